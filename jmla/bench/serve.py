"""Serves a trace of requests with ``jmla.Engine`` and says how fast it was: throughput, latencies, prefix hits.

Times are seconds from the start of the clock until they are printed. A request's latencies count from its arrival as
the trace has it, not from when the loop came to submit it; a chat's next turn arrives when the one before has ended.

A delivery is what a caller gets at a time: a request's first token, if a callback has it before the step ends, and else
all of its tokens that a step has made. Of a request's deliveries, one of k tokens at time t after one at time s counts
as k inter-token latencies of (t - s) / k, and as one delivery gap of t - s.
"""

import contextlib
import dataclasses
import heapq
import itertools
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jmla import bundled
from jmla.bench.kernels import hardware
from jmla.engine import Engine, Stats
from jmla.engine.request import Handle
from jmla.loading import load
from jmla.models import Model
from jmla.models.config.common import shown
from jmla.requests import encode
from jmla.sampling import SamplingParams
from jmla.values import check_integer, check_number, check_text

COMPILED = "/jax/core/compile/backend_compile_duration"
SYNTHETIC: dict[str, Any] = {
    "requests": 16,
    "rate": 0.0,
    "prompt_tokens": "64:256",
    "new_tokens": "16:64",
    "shared_prefix": 0,
    "turns": 1,
}
PROMPTS = ("prompt", "prompt_ids", "prompt_tokens")
NEEDED, OPTIONAL = ("arrival", "max_new_tokens"), ("salt", "priority")
LAST_ARRIVAL = 7 * 24 * 3600  # seconds
NO_STOP = SamplingParams(stop=[])

# ---- what is asked


@dataclasses.dataclass(frozen=True)
class Chat:
    """Requests of which each is submitted when the one before it has ended; mostly one.

    Attributes:
        where: it stands, for messages.
        arrival: of the first, seconds from the start.
        turns: each a prompt and the number of tokens to make. A prompt is text, ids, or a number of random ids; ids
            once the model is known.
        salt: see ``Engine.submit``.
        priority: see ``Engine.submit``.
        turn: number of its first turn; above 1 for what is left of a chat.
    """

    where: str
    arrival: float
    turns: tuple[tuple[Any, int], ...]
    salt: str = ""
    priority: int = 0
    turn: int = 1

    @property
    def tokens(self) -> int:
        """Most tokens of all prompts and answers."""
        return sum((prompt if isinstance(prompt, int) else len(prompt)) + new for prompt, new in self.turns)

    def after(self, arrival: float, answer: Sequence[int]) -> "Chat":
        """What is left after the first turn, whose prompt and answer the next prompt begins with."""
        (said, _), (prompt, new), *rest = self.turns
        whole = np.concatenate([said, np.asarray(answer, np.int32), prompt])
        return dataclasses.replace(self, arrival=arrival, turns=((whole, new), *rest), turn=self.turn + 1)


def _span(name: str, text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", text)
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= low <= high:
        raise ValueError(f"Expected {name}={shown(text)} to be A:B, integers with 1 <= A <= B")
    return low, high


def synthetic(
    requests: int,
    rate: float,
    prompt_tokens: str,
    new_tokens: str,
    shared_prefix: int,
    turns: int,
    seed: int,
    turn_tokens: str | None = None,
) -> list[Chat]:
    """Chats whose lengths are drawn evenly and whose arrivals are a Poisson process; see the command's options."""
    count, turns = check_integer("requests", requests, 1), check_integer("turns", turns, 1)
    shared = check_integer("shared_prefix", shared_prefix, 0)
    rate = check_number("rate", rate, 0, np.inf)
    (low, high), (least, most) = _span("prompt_tokens", prompt_tokens), _span("new_tokens", new_tokens)
    rng = np.random.default_rng(seed)
    arrivals = rng.exponential(1 / rate, count).cumsum() if rate else np.zeros(count)
    prompts = rng.integers(low, high, (count, turns), endpoint=True)
    if turn_tokens is not None:
        prompts[:, 1:] = rng.integers(*_span("turn_tokens", turn_tokens), (count, turns - 1), endpoint=True)
    prompts[:, 0] += shared
    news = rng.integers(least, most, (count, turns), endpoint=True)
    return [
        Chat(f"request {i}", float(arrivals[i]), tuple(zip(prompts[i].tolist(), news[i].tolist(), strict=True)))
        for i in range(count)
    ]


def read_trace(path: str) -> list[Chat]:
    """The requests of a file of JSON lines.

    Raises:
        ValueError: no such file, or what is wrong with which line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"Expected trace={shown(path)} to be a text file that can be read, got: {error}") from None
    chats = []
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        try:
            if line.strip():
                chats.append(_chat(where, json.loads(line)))
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: Expected JSON, got {shown(line)}: {error}") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: {error}") from None
    if not chats:
        raise ValueError(f"Expected trace={shown(path)} to hold at least one request, got none")
    return chats


def _chat(where: str, entry: Any) -> Chat:
    known = (*NEEDED, *PROMPTS, *OPTIONAL)
    if not isinstance(entry, dict):
        raise ValueError(f"Expected an object with the keys {', '.join(known)}, got {shown(entry)}")
    if unknown := [key for key in entry if key not in known]:
        raise ValueError(f"Expected keys to be among {', '.join(known)}, got {shown(unknown)}")
    if missing := [key for key in NEEDED if key not in entry]:
        raise ValueError(f"Expected {' and '.join(missing)} to be given, got {shown(entry)}")
    given = [key for key in PROMPTS if key in entry]
    if len(given) != 1:
        raise ValueError(f"Expected one of {', '.join(PROMPTS)}, got {shown(given)}")
    (name,), prompt, salt = given, entry[given[0]], entry.get("salt", "")
    if name == "prompt_tokens":
        check_integer(name, prompt, 1)
    elif not isinstance(prompt, str if name == "prompt" else list):
        raise ValueError(f"Expected {name}={shown(prompt)} to be {'text' if name == 'prompt' else 'a list of ids'}")
    if not isinstance(salt, str):
        raise ValueError(f"Expected salt={shown(salt)} to be a string")
    return Chat(
        where,
        check_number("arrival", entry["arrival"], 0, LAST_ARRIVAL),
        ((prompt, check_integer("max_new_tokens", entry["max_new_tokens"], 1)),),
        check_text("salt", salt),
        check_integer("priority", entry.get("priority", 0), -(2**31), 2**31 - 1),
    )


def with_ids(chats: Sequence[Chat], model: Model, limit: int, seed: int, shared: int = 0) -> list[Chat]:
    """Prompts as ids for a model and an engine with room for ``limit`` tokens; ``shared`` tokens begin all of them.

    Raises:
        ValueError: text or ids that the model does not take, or too many tokens.
    """
    known = []
    for chat in chats:
        try:
            turns = [(p if isinstance(p, int) else encode(model, 0, p), new) for p, new in chat.turns]
        except (TypeError, ValueError) as error:
            raise ValueError(f"{chat.where}: {error}") from None
        known.append(dataclasses.replace(chat, turns=tuple(turns)))
        if known[-1].tokens > limit:
            raise ValueError(
                f"{chat.where}: Expected prompts and max_new_tokens to fit the engine's max_seq_len={limit}, got "
                f"{known[-1].tokens} tokens together"
            )
    rng, vocab = np.random.default_rng([seed, 1]), model.spec.config.vocab_size
    prefix = rng.integers(vocab, size=shared)

    def ids(prompt: int | np.ndarray, turn: int) -> np.ndarray:
        if not isinstance(prompt, int):
            return prompt
        drawn = rng.integers(vocab, size=prompt).astype(np.int32)
        if turn == 0:
            drawn[:shared] = prefix
        return drawn

    return [
        dataclasses.replace(c, turns=tuple((ids(prompt, i), new) for i, (prompt, new) in enumerate(c.turns)))
        for c in known
    ]


# ---- what is served


@dataclasses.dataclass
class Served:
    """A request as it was served.

    Attributes:
        arrival: seconds from the start, as all times.
        prompt_tokens: read from pages of earlier requests or not.
        deliveries: time and number of tokens of each.
        ended: when its last step did.
        cached_tokens: of the prompt.
        preemptions: times that it was computed again.
        outcome: "finished", "failed" or "cancelled".
        error: of one that failed.
        turn: of its chat.
        told: when the last of a step's pieces came.
    """

    arrival: float
    prompt_tokens: int
    deliveries: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    ended: float = 0.0
    cached_tokens: int = 0
    preemptions: int = 0
    outcome: str = "finished"
    error: str | None = None
    turn: int = 1
    told: float | None = None

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.deliveries)

    def deliver(self, at: float, made: int) -> None:
        """Notes that ``made`` tokens are out in all."""
        if made > self.tokens:
            self.deliveries.append((at, made - self.tokens))

    def end(self, at: float, handle: Handle) -> None:
        self.ended = at
        self.cached_tokens, self.preemptions = handle.cached_tokens or 0, handle.preemptions
        try:
            if handle.result().finish_reason in ("cancelled", "deadline"):
                self.outcome = "cancelled"
        except Exception as error:  # of this request alone: those of the engine come out of ``step``
            self.outcome, self.error = "failed", f"{type(error).__name__}: {error}"


def _submit(engine: Engine, chat: Chat, now: Callable[[], float]) -> tuple[Chat, Served, Handle]:
    prompt, new = chat.turns[0]
    served = Served(chat.arrival, len(prompt), turn=chat.turn)

    def told(_: str | int) -> None:  # the tokens of a launch are there at once, whenever the host comes to each
        served.told = now()
        if len(handle.token_ids) == 1:
            served.deliver(served.told, 1)

    handle = engine.submit(
        prompt, sampling=NO_STOP, max_new_tokens=new, salt=chat.salt, priority=chat.priority, callback=told
    )
    return chat, served, handle


def serve(
    engine: Engine,
    chats: Sequence[Chat],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Served]:
    """Submits requests as they arrive and steps the engine until all have ended; in the order in which they end.

    A chat ends with a request that does not finish.
    """
    order = itertools.count()
    queue = [(chat.arrival, next(order), chat) for chat in chats]
    heapq.heapify(queue)
    running: list[tuple[Chat, Served, Handle]] = []
    out: list[Served] = []
    start = clock()

    def now() -> float:
        return clock() - start

    while queue or running:
        while queue and queue[0][0] <= now():
            running.append(_submit(engine, heapq.heappop(queue)[2], now))
        if not running:
            sleep(max(queue[0][0] - now(), 0.0))
            continue
        engine.step()
        at = now()
        for chat, served, handle in running:
            served.deliver(at if served.told is None else served.told, len(handle.token_ids))
            served.told = None
            if handle.done:
                served.end(at, handle)
                out.append(served)
                if len(chat.turns) > 1 and served.outcome == "finished":
                    heapq.heappush(queue, (at, next(order), chat.after(at, handle.token_ids)))
        running = [item for item in running if not item[2].done]
    return out


# ---- compilation


@contextlib.contextmanager
def compilations() -> Iterator[list[float]]:
    """The seconds of each compilation while the context is open."""
    seen: list[float] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == COMPILED:
            seen.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


# ---- what is said of it


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and percentiles (linear between the two nearest values); None without values."""
    if not values:
        return {"mean": None, "p50": None, "p99": None}
    mean, p50, p99 = np.mean(values), *np.percentile(values, [50, 99])
    return {"mean": float(mean), "p50": float(p50), "p99": float(p99)}


def figures(served: Sequence[Served]) -> dict[str, Any]:
    """Counts, tokens a second from the first arrival to the last end, and latencies in seconds.

    Tokens are those of all requests, latencies those of finished ones. ``time_per_output_token`` of a request is the
    time from its first delivery to its last over the tokens after its first delivery; if there is one, it has none.
    """
    outcomes = [s.outcome for s in served]
    done = [s for s in served if s.outcome == "finished"]
    gaps = [[(b[0] - a[0], b[1]) for a, b in itertools.pairwise(s.deliveries)] for s in done]
    seconds = max(s.ended for s in served) - min(s.arrival for s in served)
    made, read = sum(s.tokens for s in served), sum(s.prompt_tokens for s in served)
    cached = sum(s.cached_tokens for s in served)
    return {
        "requests": len(served),
        **{outcome: outcomes.count(outcome) for outcome in ("finished", "failed", "cancelled")},
        "preemptions": sum(s.preemptions for s in served),
        "seconds": seconds,
        "output_tokens": made,
        "prompt_tokens": read,
        "cached_tokens": cached,
        "prefix_hits": cached / read,
        "output_tokens_per_second": made / seconds,
        "tokens_per_second": (made + read) / seconds,
        "time_to_first_token": spread([s.deliveries[0][0] - s.arrival for s in done]),
        "time_to_first_token_of_later_turns": spread([s.deliveries[0][0] - s.arrival for s in done if s.turn > 1]),
        "time_per_output_token": spread([sum(g for g, _ in each) / sum(k for _, k in each) for each in gaps if each]),
        "inter_token_latency": spread([gap / k for each in gaps for gap, k in each for _ in range(k)]),
        "delivery_gap": spread([gap for each in gaps for gap, _ in each]),
        "end_to_end_latency": spread([s.ended - s.arrival for s in done]),
        "error": next((s.error for s in served if s.error), None),
    }


def engine_figures(stats: Stats) -> dict[str, Any]:
    """What the engine counted: drafts, and whether the device waited for the host."""
    return {
        "steps": stats.steps,
        "late_steps": stats.late_steps,
        "host_share": stats.host_seconds / stats.step_seconds if stats.step_seconds else 0.0,
        "drafted_tokens": stats.drafted_tokens,
        "accepted_tokens": stats.accepted_tokens,
    }


def report(found: dict[str, Any]) -> str:
    """What is printed of the figures."""
    lines = [
        "{requests} requests in {seconds:.2f} s: {finished} finished, {failed} failed, {cancelled} cancelled; "
        "{preemptions} preemptions.",
        "{output_tokens_per_second:.1f} output tokens/s, {tokens_per_second:.1f} prompt and output tokens/s "
        "({prompt_tokens} and {output_tokens} tokens).",
        "Prefix hits: {cached_tokens} of {prompt_tokens} prompt tokens ({prefix_hits:.1%}).",
        "{accepted_tokens} of {drafted_tokens} drafts were right.",
        "Host time between the device's results and its next work: {host_share:.1%} of all steps; in "
        "{late_steps} of {steps} the device had ended before the host came.",
        "Compilations while the clock ran: {compilations} ({compilation_seconds:.1f} s); in the warm-up before it: "
        "{warm_up_compilations} ({warm_up_seconds:.1f} s).",
        "",
        "| ms | mean | p50 | p99 |",
        "|---|---|---|---|",
    ]
    lines = [line.format(**found) for line in lines]
    for name, values in found.items():
        if isinstance(values, dict):
            cells = ["-" if value is None else f"{value * 1e3:.1f}" for value in values.values()]
            lines.append(f"| {name.replace('_', ' ')} | {' | '.join(cells)} |")
    return "\n".join(lines)


# ---- the command


def without_ends(model: Model) -> Model:
    """A model whose completions no token ends."""
    text = None if model.text is None else dataclasses.replace(model.text, end_token_ids=())
    config = dataclasses.replace(model.spec.config, eos_token_id=())
    return dataclasses.replace(model, spec=dataclasses.replace(model.spec, config=config), text=text)


def prepare(
    model: str | None, trace: str | None, given: dict[str, Any], seed: int, options: dict[str, Any], end_tokens: bool
) -> tuple[Engine, list[Chat], dict[str, Any]]:
    """The engine, the requests and the settings; compiles no step of the model. For the arguments see ``run``."""
    check_integer("seed", seed, 0)
    drawn = {name: value for name, value in given.items() if value is not None}
    if trace is None:
        drawn = SYNTHETIC | drawn
        chats = synthetic(**drawn, seed=seed)
    elif drawn:
        raise ValueError(f"Expected trace={shown(trace)} to come without {', '.join(drawn)}")
    else:
        chats = read_trace(trace)
    loaded = load(bundled.path() if model is None else model)
    engine = Engine(loaded if end_tokens else without_ends(loaded), **options)
    chats = with_ids(chats, loaded, engine.max_seq_len, seed, drawn.get("shared_prefix", 0))
    settings = {"model": model or bundled.NAME, "trace": trace, **drawn, "seed": seed, **options}
    return engine, chats, settings | {"end_tokens": end_tokens}


def run(
    model: str | None,
    trace: str | None,
    given: dict[str, Any],
    seed: int,
    options: dict[str, Any],
    end_tokens: bool,
    json_path: str | None,
) -> None:
    """Serves a trace, prints the figures and writes the JSON file.

    Args:
        model: directory or hub id; None for the bundled model.
        trace: file of requests; None for a synthetic trace.
        given: options of the synthetic trace (see ``SYNTHETIC``); None for those that were not given.
        seed: of all that is drawn.
        options: of ``Engine``.
        end_tokens: whether end tokens end a request.
        json_path: file for the figures, times in seconds, with settings, hardware and versions.
    """
    try:
        if json_path is not None and (Path(json_path).is_dir() or not Path(json_path).parent.is_dir()):
            raise ValueError(f"Expected json={shown(json_path)} to be a file in a directory that exists")
        engine, chats, settings = prepare(model, trace, given, seed, options, end_tokens)
    except (ValueError, TypeError, OSError, ImportError) as error:
        raise SystemExit(f"Error: {error}") from None
    about = hardware()
    print(f"{about['device']}, {about['date']}, {about['versions']}")
    print(", ".join(f"{name}={value}" for name, value in settings.items() if value is not None), flush=True)
    start = time.monotonic()
    with compilations() as before:
        engine.warmup()
    found: dict[str, Any] = {"warm_up_seconds": time.monotonic() - start, "warm_up_compilations": len(before)}
    with compilations() as during:
        found |= figures(serve(engine, chats)) | engine_figures(engine.stats)
    found |= {"compilations": len(during), "compilation_seconds": sum(during)}
    print(report(found))
    if json_path:
        text = json.dumps({**about, "settings": settings, "figures": found}, indent=1)
        Path(json_path).write_text(text + "\n", encoding="utf-8")
    if found["failed"]:
        raise SystemExit(f"{found['failed']} requests failed, the first with {found['error']}")
