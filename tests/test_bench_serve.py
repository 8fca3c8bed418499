"""The serving benchmark: what it reads and refuses, its clock and figures, and runs on a small model."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from jmla.bench import serve
from jmla.bench.__main__ import app
from jmla.bench.serve import Chat, Served
from jmla.engine import Engine, Stats
from jmla.requests import end_token_ids
from jmla.text import TextSupport
from tests.tiny import tiny_model

DEFAULTS = {"rate": 0.0, "prompt_tokens": "4:9", "new_tokens": "2", "shared_prefix": 0, "turns": 1, "seed": 0}


def test_figures_of_known_deliveries():
    served = [
        Served(1.0, 100, [(2.0, 1), (4.0, 4), (5.0, 2)], 5.5, cached_tokens=60, preemptions=2),
        Served(0.5, 50, [(3.5, 3)], 4.0),
        Served(2.0, 40, [(9.0, 1), (9.5, 1)], 10.5, outcome="cancelled"),
        Served(2.0, 10, [], 3.0, outcome="failed", error="ValueError: no"),
    ]
    found = serve.figures(served)
    expected = {"requests": 4, "finished": 2, "failed": 1, "cancelled": 1, "preemptions": 2, "seconds": 10.0}
    expected |= {"output_tokens": 12, "prompt_tokens": 200, "cached_tokens": 60, "prefix_hits": 0.3}
    expected |= {"output_tokens_per_second": 1.2, "tokens_per_second": 21.2, "error": "ValueError: no"}
    assert {name: found[name] for name in expected} == expected
    assert found["time_to_first_token"] == pytest.approx({"mean": 2.0, "p50": 2.0, "p99": 2.98})
    assert found["time_per_output_token"] == {"mean": 0.5, "p50": 0.5, "p99": 0.5}  # 3 s for six tokens
    assert found["inter_token_latency"] == {"mean": 0.5, "p50": 0.5, "p99": 0.5}
    assert found["delivery_gap"] == pytest.approx({"mean": 1.5, "p50": 1.5, "p99": 1.99})
    assert found["end_to_end_latency"] == pytest.approx({"mean": 4.0, "p50": 4.0, "p99": 4.49})


def test_percentiles():
    assert serve.spread(list(range(101))) == {"mean": 50, "p50": 50, "p99": 99}
    assert serve.spread([]) == {"mean": None, "p50": None, "p99": None}
    counts = {"compilations": 1, "compilation_seconds": 0.5, "warm_up_compilations": 2, "warm_up_seconds": 3.0}
    stats = Stats(steps=4, late_steps=1, host_seconds=0.5, step_seconds=2.0, drafted_tokens=6, accepted_tokens=3)
    found = serve.figures([Served(0.0, 2, [(0.25, 1)], 0.5)]) | serve.engine_figures(stats)
    said = serve.report(found | counts)
    assert "3 of 6 drafts were right." in said
    assert "next work: 25.0% of all steps; in 1 of 4 the device" in said
    assert "2.0 output tokens/s, 6.0 prompt and output tokens/s" in said
    assert "| time to first token | 250.0 | 250.0 | 250.0 |" in said
    assert "| delivery gap | - | - | - |" in said


# ---- what is asked


def test_a_trace_is_read(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"arrival": 1.5, "prompt": "a\u2028b", "max_new_tokens": 3, "salt": "x", "priority": -1}\n\n'
        '{"arrival": 0, "prompt_ids": [4, 5], "max_new_tokens": 2}\r\n'
        '{"arrival": 0, "prompt_tokens": 7, "max_new_tokens": 1}',
        encoding="utf-8",
    )
    assert serve.read_trace(str(path)) == [
        Chat(f"{path}, line 1", 1.5, (("a\u2028b", 3),), "x", -1),
        Chat(f"{path}, line 3", 0, (([4, 5], 2),)),
        Chat(f"{path}, line 4", 0, ((7, 1),)),
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arrival": -1}, "Expected arrival=-1 to be"),
        ({"arrival": "1"}, "Expected arrival='1' to be"),
        ({"arrival": float("nan")}, "Expected arrival=nan to be"),
        ({"arrival": 1e9}, "arrival <= 604800"),
        ({"arrival": None}, "Expected arrival=None to be"),
        ({"max_new_tokens": 0}, "Expected max_new_tokens=0 to be an integer from 1"),
        ({"max_new_tokens": 2.0}, "Expected max_new_tokens=2.0 to be"),
        ({"prompt_tokens": 0}, "Expected prompt_tokens=0 to be an integer from 1"),
        ({"prompt": 3}, "Expected one of prompt, prompt_ids, prompt_tokens, got ['prompt', 'prompt_tokens']"),
        ({"salt": 3}, "Expected salt=3 to be a string"),
        ({"priority": 0.5}, "Expected priority=0.5 to be an integer"),
        (
            {"temprature": 1},
            "Expected keys to be among arrival, max_new_tokens, prompt, prompt_ids, prompt_tokens, sal",
        ),
    ],
)
def test_what_is_wrong_with_a_line_is_said(tmp_path, change, message):
    path = tmp_path / "trace.jsonl"
    good = {"arrival": 0, "prompt_tokens": 4, "max_new_tokens": 1}
    path.write_text(f"{json.dumps(good)}\n{json.dumps(good | change)}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"^.*trace\.jsonl, line 2: ") as caught:
        serve.read_trace(str(path))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"arrival": 0', "Expected JSON, got '{\"arrival\": 0'"),
        ("[1]", "Expected an object with the keys arrival,"),
        ("[" * 100000, "line 1: "),
        ('{"prompt_tokens": 4}', "Expected arrival and max_new_tokens to be given"),
        ('{"arrival": 0, "max_new_tokens": 1}', "Expected one of prompt, prompt_ids, prompt_tokens, got []"),
        ('{"arrival": 0, "max_new_tokens": 1, "prompt": [1]}', "Expected prompt=[1] to be text"),
        ('{"arrival": 0, "max_new_tokens": 1, "prompt_ids": "a"}', "Expected prompt_ids='a' to be a list of ids"),
        ("", "to hold at least one request, got none"),
        (b"\xff", "Expected trace="),
        (None, "to be a text file that can be read, got: [Errno 2]"),
    ],
    ids=str,
)
def test_files_that_hold_no_trace(tmp_path, line, message):
    path = tmp_path / "trace.jsonl"
    if line is not None:
        path.write_bytes(line if isinstance(line, bytes) else line.encode())
    with pytest.raises(ValueError, match=r"trace\.jsonl") as caught:
        serve.read_trace(str(path))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        (
            Chat("here", 0, (([3, 96], 1),)),
            r"^here: Expected prompt 0 to hold token ids in 0\.\.95, got 96 at position 1",
        ),
        (Chat("here", 0, (([], 1),)), "^here: Expected prompt 0 to hold at least one token"),
        (Chat("here", 0, (("text", 1),)), "^here: Expected prompt 0 to be token ids: this checkpoint has no tokenizer"),
        (
            Chat("here", 0, ((50, 20), (20, 11))),
            "^here: Expected .* to fit the engine's max_seq_len=100, got 101 tokens",
        ),
        (Chat("here", 0, ((2**31 - 1, 1),)), "max_seq_len=100, got 2147483648 tokens"),
    ],
)
def test_prompts_that_the_model_does_not_take(chat, message):
    with pytest.raises(ValueError, match=message):
        serve.with_ids([Chat("before", 0, ((4, 1),)), chat], tiny_model("v32"), 100, 0)


def test_synthetic_traces():
    assert serve.synthetic(50, **DEFAULTS) == serve.synthetic(50, **DEFAULTS)
    assert serve.synthetic(50, **DEFAULTS) != serve.synthetic(50, **DEFAULTS | {"seed": 1})
    chats = serve.synthetic(500, **DEFAULTS | {"rate": 20.0, "turns": 2, "shared_prefix": 10, "new_tokens": "3:5"})
    arrivals = np.array([chat.arrival for chat in chats])
    assert (np.diff(arrivals) > 0).all()
    assert arrivals[-1] == pytest.approx(25, rel=0.2)
    assert {chat.turns[0][0] for chat in chats} == set(range(14, 20))
    assert {chat.turns[1][0] for chat in chats} == set(range(4, 10))
    assert {new for chat in chats for _, new in chat.turns} == {3, 4, 5}
    known = serve.with_ids(chats, tiny_model("v32"), 100, 0, 10)
    first = known[0].turns[0][0]
    for before, chat in zip(chats, known, strict=True):
        assert [len(prompt) for prompt, _ in chat.turns] == [count for count, _ in before.turns]
        assert (chat.turns[0][0][:10] == first[:10]).all()
    assert len({chat.turns[0][0][10:14].tobytes() for chat in known}) == 500


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt-tokens", "9:4"], "Expected prompt_tokens='9:4' to be A:B, integers with 1 <= A <= B"),
        (["--new-tokens", "0:4"], "Expected new_tokens='0:4' to be A:B"),
        (["--new-tokens", "4-9"], "Expected new_tokens='4-9' to be A:B"),
        (["--requests", "0"], "Expected requests=0 to be an integer from 1"),
        (["--turns", "0"], "Expected turns=0 to be an integer from 1"),
        (["--rate", "-1"], "Expected rate=-1.0 to be a finite float32 number with 0 <= rate"),
        (["--rate", "nan"], "Expected rate=nan to be"),
        (["--shared-prefix", "-1"], "Expected shared_prefix=-1 to be"),
        (["--seed", "-1"], "Expected seed=-1 to be"),
        (["--trace", "none.jsonl"], "Expected trace='none.jsonl' to be a text file that can be read"),
        (["--trace", "none.jsonl", "--rate", "1"], "Expected trace='none.jsonl' to come without rate"),
        (["--json", "no/such/file.json"], "Expected json='no/such/file.json' to be a file in a directory that exists"),
        (["--max-requests", "0"], "Expected max_requests=0 to be an integer from 1"),
        (["--decode-steps", "17"], "Expected decode_steps=17 to be an integer from 1 to 16"),
        (["--pages", "1"], "request 0: Expected prompts and max_new_tokens to fit the engine's max_seq_len=256, got"),
        (["no/such/model"], "no/such/model"),
    ],
)
def test_bad_options_are_one_line(monkeypatch, arguments, message):
    if "such" not in arguments[0]:
        monkeypatch.setattr(serve, "load", lambda _: tiny_model("v32"))
    monkeypatch.setattr(Engine, "warmup", lambda *_: pytest.fail("compiles"))
    options = ["--prompt-tokens", "300:400"] if "--pages" in arguments else []
    said = str(CliRunner().invoke(app, ["serve", *arguments, *options]).exception)
    assert said.startswith("Error: ")
    assert message in said


# ---- what is served


class FakeEngine:
    """Takes ``seconds`` a step, in which a request gets two tokens, the first halfway; four tokens are all."""

    def __init__(self, seconds):
        self.time, self.seconds, self.asked, self.slept, self.handles = 100.0, seconds, [], [], []

    def clock(self):
        return self.time

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.time += seconds

    def submit(self, prompt, *, sampling, max_new_tokens, salt, priority, callback):
        def result():
            if salt == "bad":
                raise FloatingPointError("not numbers")
            return SimpleNamespace(finish_reason="deadline" if salt == "late" else "length")

        handle = SimpleNamespace(token_ids=(), done=False, cached_tokens=1, preemptions=0, result=result)
        self.asked.append((self.time - 100.0, tuple(prompt.tolist()), salt, priority))
        self.handles.append((handle, callback))
        return handle

    def step(self):
        running = [item for item in self.handles if not item[0].done]
        for half in (0, 1):
            self.time += self.seconds / 2
            for handle, callback in running:
                handle.token_ids += (len(handle.token_ids),)
                handle.done = len(handle.token_ids) == 4
                if half == 0 or len(handle.token_ids) > 1:
                    callback("piece")


def ids(*values):
    return np.array(values, np.int32)


def test_arrivals_are_honoured():
    engine = FakeEngine(1.0)
    chats = [
        Chat("late", 10.0, ((ids(7), 4),)),
        Chat("chat", 2.0, ((ids(5, 6), 4), (ids(9), 4)), "tenant", 3),
        Chat("meanwhile", 2.5, ((ids(8), 4),)),
    ]
    served = serve.serve(engine, chats, engine.clock, engine.sleep)
    assert engine.asked == [
        (2.0, (5, 6), "tenant", 3),
        (3.0, (8,), "", 0),  # when the step was over
        (4.0, (5, 6, 0, 1, 2, 3, 9), "tenant", 3),  # as soon as the first turn had ended
        (10.0, (7,), "", 0),
    ]
    assert engine.slept == [2.0, 4.0]
    assert [(s.arrival, s.ended, s.prompt_tokens) for s in served] == [
        (2.0, 4.0, 2),
        (2.5, 5.0, 1),
        (4.0, 6.0, 7),
        (10.0, 12.0, 1),
    ]
    assert [s.deliveries for s in served[:2]] == [[(2.5, 1), (3.0, 1), (4.0, 2)], [(3.5, 1), (4.0, 1), (5.0, 2)]]
    assert serve.figures(served)["time_to_first_token"]["mean"] == pytest.approx((0.5 + 1.0 + 0.5 + 0.5) / 4)


def test_a_chat_ends_with_a_turn_that_does_not_finish():
    engine = FakeEngine(1.0)
    chats = [Chat("", 0.0, ((ids(5), 4), (ids(9), 4)), salt) for salt in ("bad", "late", "")]
    served = serve.serve(engine, chats, engine.clock, engine.sleep)
    assert [s.outcome for s in served] == ["failed", "cancelled", "finished", "finished"]
    assert serve.figures(served)["error"] == "FloatingPointError: not numbers"


def invoke(monkeypatch, tmp_path, *arguments):
    """What the command prints and writes on a small model."""
    model = tiny_model("v32", deterministic=False)
    monkeypatch.setattr(serve, "load", lambda _: model)
    path = tmp_path / "figures.json"
    engine = ("--max-requests", "2", "--pages", "12", "--prefill-chunk", "64")
    done = CliRunner().invoke(app, ["serve", *arguments, *engine, "--json", str(path)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output, json.loads(path.read_text(encoding="utf-8"))


def test_runs_on_a_small_model(tmp_path, monkeypatch):
    """Turns of 506 and 764 tokens, of which the first 256 are common to all; then a trace, without reuse."""
    chats = ("--requests", "3", "--shared-prefix", "256", "--turns", "2", "--prompt-tokens", "250", "--new-tokens", "8")
    said, written = invoke(monkeypatch, tmp_path, *chats)
    found = written["figures"]
    assert (found["requests"], found["finished"], found["output_tokens"]) == (6, 6, 48)
    assert found["prompt_tokens"] == 3 * (506 + 764)
    assert found["cached_tokens"] == 256 + 3 * 512  # the third chat's first turn, and all second turns
    assert found["compilations"] == 0
    assert found["warm_up_compilations"] > 4
    for name in ("time_to_first_token", "time_per_output_token", "inter_token_latency", "end_to_end_latency"):
        assert 0 < found[name]["p50"] <= found[name]["p99"]
    assert found["end_to_end_latency"]["p99"] <= found["seconds"]
    assert written["settings"]["turns"] == 2
    assert written["settings"]["max_requests"] == 2
    assert {"device", "versions", "date"} <= set(written)
    assert "Prefix hits: 1792 of 3810 prompt tokens (47.0%)." in said
    assert "Compilations while the clock ran: 0" in said

    trace = tmp_path / "trace.jsonl"
    entry = {"arrival": 0.2, "prompt_ids": list(range(2, 12)), "max_new_tokens": 30, "salt": "a", "priority": 1}
    trace.write_text(json.dumps(entry) + '\n{"arrival": 0, "prompt_tokens": 300, "max_new_tokens": 5}\n', "utf-8")
    found = invoke(monkeypatch, tmp_path, "--trace", str(trace), "--no-prefix-reuse")[1]["figures"]
    assert (found["requests"], found["output_tokens"], found["prompt_tokens"]) == (2, 35, 310)
    assert found["seconds"] >= 0.2


@pytest.mark.parametrize("text", [None, TextSupport(end_token_ids=(2, 3))])
def test_end_tokens_end_requests_where_that_is_asked_for(monkeypatch, text):
    model = dataclasses.replace(tiny_model("v32"), text=text)
    monkeypatch.setattr(serve, "load", lambda _: model)
    for asked, ends in ((False, ()), (True, (2, 3) if text else (1,))):
        engine, *_ = serve.prepare(None, None, {}, 0, {"pages": 8}, asked)
        assert end_token_ids(engine._model) == ends
