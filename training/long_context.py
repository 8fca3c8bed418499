"""Tunes jmla-tiny-v4 to look up facts that stand far back in a long text, in one short run on one GPU.

    python -m training.long_context --corpus runs/corpus --out runs/long --minutes 4.5
    python -m training.export --run runs/long --corpus runs/corpus --out runs/jmla-tiny-v4

Starts from a checkpoint (``--resume``: from the weights in ``--out``) and goes on with the training text, into which
lines like ``# key path list = time no`` (``jmla.bench.facts``) are planted; later lines repeat the key of an earlier
one, and the value has to be looked up. What was done so that short sequences teach it for long ones:

- A fact's five tokens always lie in just one CSA entry, at any alignment, so a head that matches the key words can read
  the value words out of the same entry. Keys that share a word with another, at 1/24 to 1/96 lines a token, make
  other facts the hardest distractors.
- Positions are not 0, 1, ...: a sequence is cut into up to eight pieces whose positions lie apart, by multiples of 128,
  in a text of up to ``--context`` tokens (drawn evenly on a logarithmic scale; a quarter of the steps is without gaps).
  Window attention does not see across a gap, as in a long text; of what the gaps would hold nothing is there.
- A text of C tokens has C / T times the HCA entries of the sequence, and all of them are read. Each HCA entry counts as
  that many (their number's logarithm is added to its logit), so the window keeps its share when they are thousands.
- At 1M tokens, 64 of 262,144 CSA entries are kept. In training indexers keep 8 to 64 of about a thousand, and where a
  fact is asked for they learn to give its entry more than all others together, each of which counts as
  ``--context`` / T of its like. Attention of the CSA layers to the entry is rewarded in the first half of the run,
  which spares the wait until heads find out by themselves; the divergence from attention is learnt everywhere.
- The next-token loss leaves out planted lines and the first token after a gap, which nothing predicts; the values
  asked for have a loss of their own, whose mean counts as much as that over all of the text. Draft loss as before.
- Weights are rounded to the published formats throughout (``training.quantise``), so the export loses nothing.

The first part of the run (``--warm-share``) takes sequences of 1,024 tokens, the rest ``--length``; both steps are
compiled before the clock starts. Writes the float32 weights as ``training.train`` does, and log.jsonl.
"""

import argparse
import concurrent.futures
import functools
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmla
from jmla import bundled
from jmla.bench.facts import KEY, LINE, VALUE, WORDS, Facts
from jmla.models.config import V4Config
from jmla.models.params import abstract_params
from jmla.tokenizer import Tokenizer
from training.model import Guide, forward
from training.quantise import straight_through
from training.train import held_out, join, load_state, make_optimizer, rebalance, save_state, schedule, split_ids

CELL = 12  # tokens of text that a line is put into, so that lines keep apart; a multiple of CSA's ratio
COPIES = 4  # times that a fact is written at most, the first included
PIECES = (1, 2, 4, 8)
DENSEST, SPARSEST = 24, 96  # tokens a line
NEW = 0.4  # share of lines that state a fact rather than ask for one
STRIDE = 128  # of gaps: a page of the window stream, an HCA window, a multiple of a CSA window
LEAST_KEPT = 8
Batch = dict[str, Any]


# ---- what is read


def spaced(rng: np.random.Generator, length: int, context: int) -> tuple[np.ndarray, int]:
    """Positions ``[length]`` int32 of pieces strewn over a text, and the tokens of that text.

    Every fourth call gives 0, 1, ... and ``length``.
    """
    if rng.random() < 0.25 or context < length + STRIDE:
        return np.arange(length, dtype=np.int32), length
    whole = int(np.exp(rng.uniform(np.log(length + STRIDE), np.log(context))))
    blocks = length // STRIDE
    pieces = min(int(rng.choice(PIECES)), blocks)
    first = np.sort(rng.choice(np.arange(1, blocks), pieces - 1, replace=False)) if pieces > 1 else []
    before = np.zeros(blocks, np.int64)  # the strides left out in front of each block
    before[[0, *first]] = rng.multinomial((whole - length) // STRIDE, np.full(pieces, 1 / pieces))
    starts = (np.arange(blocks) + before.cumsum()) * STRIDE
    return (starts[:, None] + np.arange(STRIDE)).reshape(-1).astype(np.int32), whole


def with_facts(rng: np.random.Generator, facts: Facts, text: np.ndarray, length: int, ratio: int) -> Batch:
    """One sequence with facts and questions.

    Args:
        rng: of everything that is drawn.
        facts: the lines.
        text: at least ``length`` ids that go on between the lines.
        length: of the sequence, a multiple of ``STRIDE``.
        ratio: CSA's.

    Returns:
        ``tokens [length]``; ``weights [length]`` of each token as a target; ``asks [n]``, where the value's words are
        predicted, -1 filled, two a question; ``holds [n, COPIES]`` entries with the fact, -1 filled.
    """
    cells = np.arange(length // CELL)
    cells = cells[cells * CELL // STRIDE == (cells * CELL + CELL - 1) // STRIDE]  # no line over a gap
    wanted = length // int(rng.integers(DENSEST, SPARSEST + 1))
    chosen = np.sort(rng.choice(cells, min(max(wanted, 2), len(cells)), replace=False))
    starts = chosen * CELL + rng.integers(0, CELL - LINE + 1, len(chosen))
    size = WORDS * (length // DENSEST)
    tokens, weights = np.zeros(length, np.int32), np.ones(length, np.float32)
    asks, holds = np.full(size, -1, np.int32), np.full((size, COPIES), -1, np.int32)
    planted = np.zeros(length, bool)
    known: dict[tuple[int, int], tuple[tuple[int, int], list[int]]] = {}
    used = 0
    for start in starts:
        open_keys = [key for key, (_, where) in known.items() if len(where) < COPIES]
        if not open_keys or rng.random() < NEW:
            key, value = facts.draw(rng, list(known))
            known[key] = (value, [])
        else:
            key = open_keys[rng.integers(len(open_keys))]
            value, where = known[key]
            for word in range(WORDS):
                asks[used] = start + VALUE + word - 1
                holds[used, : len(where)] = [(at + KEY) // ratio + 1 for at in where]
                used += 1
        known[key][1].append(int(start))
        tokens[start : start + LINE] = facts.line(key, value)
        weights[start : start + VALUE + WORDS] = 0
        planted[start : start + LINE] = True
    room = int((~planted).sum())
    tokens[~planted] = text[:room]
    return {"tokens": tokens, "weights": weights, "asks": asks, "holds": holds}


def draw_batch(
    rng: np.random.Generator, facts: Facts, data: np.ndarray, config: V4Config, rows: int, length: int, context: int
) -> Batch:
    """A batch of sequences over one set of positions, as ``loss_fn`` takes it."""
    positions, whole = spaced(rng, length, context)
    parts = [
        with_facts(rng, facts, data[s : s + length], length, config.csa_ratio)
        for s in rng.integers(0, len(data) - length, rows)
    ]
    batch = {name: np.stack([part[name] for part in parts]) for name in parts[0]}
    batch["weights"][:, 1:][:, np.diff(positions) > 1] = 0
    return batch | {
        "positions": positions,
        "spread": np.float32(whole / length),
        "topk": np.int32(rng.integers(min(LEAST_KEPT, config.index_topk), config.index_topk + 1)),
        "crowd": np.float32(max(context / length, 1)),
    }


# ---- the step


def run(config: V4Config, dtype: str, params: Any, batch: Batch) -> Any:
    """Logits, the draft block's logits and the tally, with rounded weights."""
    cast = jax.tree.map(lambda w, s: w.astype(s.dtype), straight_through(params), abstract_params(config, dtype))
    guide = Guide(batch["spread"], batch["topk"], batch["crowd"], batch["asks"], batch["holds"])
    return forward(config, cast, batch["tokens"], dtype, batch["positions"], guide)


def answers(logits: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
    """At each place asked ``[B, n]``: the loss of the value's word, whether it is the first choice, and whether the
    place is one."""
    places = jnp.maximum(batch["asks"], 0)
    wanted = jnp.take_along_axis(batch["tokens"], jnp.minimum(places + 1, batch["tokens"].shape[1] - 1), axis=1)
    there = jnp.take_along_axis(logits, places[..., None], axis=1)
    loss = optax.softmax_cross_entropy_with_integer_labels(there, wanted)
    return loss, jnp.argmax(there, -1) == wanted, batch["asks"] >= 0


def loss_fn(config: V4Config, dtype: str, params: Any, batch: Batch, help_: jax.Array) -> Any:
    """The losses that the module's text names; ``help_``: weight of the attention to the facts' entries."""
    logits, drafted, tally = run(config, dtype, params, batch)
    tokens, weights = batch["tokens"], batch["weights"]

    def text_loss(logits: jax.Array, ahead: int) -> jax.Array:
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, ahead:])
        return jnp.sum(loss * weights[:, ahead:]) / jnp.sum(weights[:, ahead:])

    asked, right, there = answers(logits, batch)
    count = jnp.maximum(jnp.sum(there), 1)
    report = {
        "loss": text_loss(logits[:, :-1], 1),
        "draft": text_loss(drafted[:, :-1], 2),
        "index": sum(tally.index_losses) / len(tally.index_losses),
        "answer": jnp.sum(jnp.where(there, asked, 0)) / count,
        "words_right": jnp.sum(right & there) / count,
    }
    for number, (found, kept, picked) in enumerate(zip(tally.found, tally.kept, tally.picked, strict=True)):
        report |= {f"attention_{number}": found, f"kept_{number}": kept, f"picked_{number}": picked}
    total = report["loss"] + 0.2 * report["draft"] + report["index"] + report["answer"]
    total = total + 0.1 * sum(tally.kept) + help_ * sum(tally.found)
    return total, report | {"loads": tally.loads}


@functools.partial(jax.jit, static_argnames=("config", "optimizer", "dtype"), donate_argnames=("trained", "state"))
def step(config, optimizer, dtype, trained, tables, state, batch, rate, help_):
    def objective(trained: Any) -> Any:
        return loss_fn(config, dtype, join(trained, tables), batch, help_)

    (_, report), grads = jax.value_and_grad(objective, has_aux=True)(trained)
    updates, state = optimizer.update(grads, state, trained)
    trained = optax.apply_updates(trained, jax.tree.map(lambda u: u * rate, updates))
    rebalance(config, trained, report.pop("loads"))
    return trained, state, report


# ---- what it reaches


@functools.partial(jax.jit, static_argnames=("config", "dtype"))
def _looked_up(config, dtype, params, batch):
    logits, _, tally = run(config, dtype, params, batch)
    _, right, there = answers(logits, batch)
    whole = right[:, 0::WORDS] & right[:, 1::WORDS]
    asked = there[:, 0::WORDS]
    return jnp.sum(whole & asked), jnp.sum(asked), jnp.stack(tally.picked)


def look_up(
    config: V4Config, params: Any, facts: Facts, data: np.ndarray, length: int, context: int, questions: int, dtype: str
) -> dict[str, Any]:
    """Share of questions of which both words of the value are the model's first choices, and where indexers keep the
    fact's entry by layer; in sequences like those of the training, with as many entries kept as the model serves with.
    """
    rng = np.random.default_rng(length)
    rows = max(16384 // length, 1)
    right, asked, picked = 0, 0, []
    while asked < questions:
        batch = draw_batch(rng, facts, data, config, rows, length, context)
        batch["topk"] = np.int32(config.index_topk)
        hits, count, kept = jax.device_get(_looked_up(config, dtype, params, batch))
        right, asked = right + int(hits), asked + int(count)
        picked.append(kept)
    return {"tokens": length, "questions": asked, "right": right / asked, "kept": np.mean(picked, axis=0).tolist()}


def parse(given: list[str] | None = None) -> argparse.Namespace:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--corpus", type=Path, required=True)
    args.add_argument("--out", type=Path, required=True)
    args.add_argument("--minutes", type=float, default=4.5, help="of training, once compiled")
    args.add_argument("--steps", type=int, help="end after so many steps, if that is sooner")
    args.add_argument("--length", type=int, default=4096)
    args.add_argument("--batch", type=int, default=8, help="sequences of --length; shorter ones in proportion")
    args.add_argument("--warm-length", type=int, default=1024)
    args.add_argument("--warm-share", type=float, default=0.35, help="of the time with sequences of --warm-length")
    args.add_argument("--context", type=int, default=1 << 20, help="tokens of the texts that sequences stand for")
    args.add_argument("--rate", type=float, default=1e-3)
    args.add_argument("--dtype", default="bfloat16", help="of products")
    args.add_argument("--seed", type=int, default=0)
    args.add_argument("--model", default=str(bundled.path()), help="checkpoint to start from; default: the bundled one")
    args.add_argument("--resume", action="store_true", help="from the weights in --out")
    args.add_argument("--sizes", type=int, nargs="*", default=[1024, 4096, 16384], help="of look-ups at the end")
    args.add_argument("--questions", type=int, default=1000)
    opt = args.parse_args(given)
    for name in ("length", "warm_length"):
        if getattr(opt, name) < 2 * STRIDE or getattr(opt, name) % STRIDE:
            args.error(f"Expected --{name.replace('_', '-')} to be a multiple of {STRIDE} from {2 * STRIDE}")
    return opt


def main() -> None:
    opt = parse()
    if (opt.corpus / "tokenizer.json").read_bytes() != (bundled.path() / "tokenizer.json").read_bytes():
        raise SystemExit(f"Expected {opt.corpus} to be cut by the bundled model's tokenizer, found another")
    train = np.fromfile(opt.corpus / "train.bin", np.uint16)
    held = np.fromfile(opt.corpus / "heldout.bin", np.uint16)
    facts = Facts.of(Tokenizer(bundled.path()))
    model = jmla.load(opt.model, dtype="float32")
    config: Any = model.config
    trained, tables = split_ids(model.params)
    opt.out.mkdir(parents=True, exist_ok=True)
    if opt.resume:
        trained = load_state(opt.out, trained, "params", np.float32)
    trained = jax.tree.map(jnp.array, trained)  # buffers of its own, which steps may take over

    def measure(when: str) -> dict[str, Any]:
        params = join(trained, tables)
        found: dict[str, Any] = {"when": when, "held_out": held_out(config, params, held, 1024, True, dtype=opt.dtype)}
        print(f"{when}: held-out text, rounded weights: {found['held_out']}", flush=True)
        found["look_ups"] = []
        for size in opt.sizes:
            part = look_up(config, params, facts, held, size, opt.context, opt.questions, opt.dtype)
            found["look_ups"].append(part)
            print(
                f"{when}: look-ups in {size} tokens that stand for up to {opt.context}: {part['right']:.1%} of "
                f"{part['questions']} right, kept by the indexers {[f'{k:.1%}' for k in part['kept']]}",
                flush=True,
            )
        return found

    optimizer = make_optimizer(opt.rate)
    state = optimizer.init(trained)
    rng = np.random.default_rng(opt.seed)
    parts = [(opt.warm_length, opt.batch * opt.length // opt.warm_length)] if opt.warm_share else []
    parts.append((opt.length, opt.batch))

    def compiled(part: tuple[int, int]) -> Any:
        batch = draw_batch(np.random.default_rng(0), facts, train, config, part[1], part[0], opt.context)
        zero = np.float32(0)
        return step.lower(config, optimizer, opt.dtype, trained, tables, state, batch, zero, zero).compile()

    with concurrent.futures.ThreadPoolExecutor(len(parts)) as pool:
        waiting = {part[0]: pool.submit(compiled, part) for part in parts}
        before = measure("before")
        programs = {length: program.result() for length, program in waiting.items()}
    log = (opt.out / "log.jsonl").open("a" if opt.resume else "w")
    log.write(json.dumps(before) + "\n")
    begin, seen, number, reports = time.time(), 0, 0, []
    while True:
        fraction = (time.time() - begin) / 60 / opt.minutes
        if opt.steps:
            fraction = max(fraction, number / opt.steps)
        if fraction >= 1:
            break
        length, rows = parts[0] if fraction < opt.warm_share else parts[-1]
        batch = draw_batch(rng, facts, train, config, rows, length, opt.context)
        rate, help_ = np.float32(schedule(fraction, 0.03)), np.float32(0.2 * max(1 - 2 * fraction, 0))
        trained, state, report = programs[length](trained, tables, state, batch, rate, help_)
        number, seen = number + 1, seen + rows * length
        reports.append(report)
        if len(reports) > 2:
            jax.block_until_ready(reports[-3])  # the clock shall not run away from the device
        if number % 50 == 0:
            row = {name: float(np.mean([float(r[name]) for r in reports])) for name in report}
            minutes = (time.time() - begin) / 60
            row = {"step": number, "minutes": minutes, "length": length, **row}
            log.write(json.dumps(row) + "\n")
            log.flush()
            if number % 250 == 0 or number == 50:
                print(
                    " ".join(f"{k}={v:.4g}" for k, v in row.items()), f"tokens/s={seen / minutes / 60:,.0f}", flush=True
                )
            reports = []
    jax.block_until_ready(trained)
    save_state(opt.out, trained, "params", np.float32)
    log.write(json.dumps(measure("after")) + "\n")
    log.close()


if __name__ == "__main__":
    main()
