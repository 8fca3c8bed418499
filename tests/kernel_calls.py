"""Control over which implementations tests may call."""

import dataclasses
from typing import Any

import pytest

from jmla.kernels import dispatch


def forbid(monkeypatch: pytest.MonkeyPatch, op: str, name: str) -> None:
    """Lets every call of an implementation of ``op`` fail, which stays registered."""

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError(f"{name} was called for {op}")

    known = dispatch._registry[op]
    changed = known | {name: dataclasses.replace(known[name], function=never)}
    monkeypatch.setitem(dispatch._registry, op, changed)
