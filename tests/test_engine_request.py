"""Handles of requests that an engine has lost."""

import pytest

from jmla.engine import Engine
from tests.test_engine import model


@pytest.mark.parametrize("wait", [lambda handle: handle.result(), list], ids=["result", "iterate"])
def test_who_waits_for_a_lost_request_is_told(wait):
    engine = Engine(model("v32"), max_requests=1, pages=1)
    handle = engine.submit([5, 9], max_new_tokens=3)
    engine._waiting.clear()
    with pytest.raises(RuntimeError, match="request 0, waiting"):
        wait(handle)
