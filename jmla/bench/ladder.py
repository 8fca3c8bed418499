"""The ladder of long contexts: what a DeepSeek-V4 costs at up to a million tokens, and whether it is right.

At each rung a paged FP8 cache is filled with that many tokens, by ``jmla.prefill`` in chunks of ``spec.prefill_chunk``.

- Memory: bytes of the allocated pools by stream, which must be those of ``jmla.models.bytes_per_token`` and
  ``bytes_per_row``.
- Speed: cold prefill, and decode as the engine does it, many steps in one compiled program; nothing is compiled while
  the clock runs. Beside it the time that the bytes which grow with the text take at copy bandwidth: all index keys of
  the CSA layers and all rows of the HCA layers.
- Exactness: the last 64 tokens are replayed behind one and the same cache, by four models: as it serves; with the same
  weights and activations in float32 on the same kernels; as it serves, on XLA; and the reference, float32 on XLA, layer
  by layer. Compared are the entries that each CSA layer selects at each token, and the logits. Where a set is not the
  reference's, its other entries must have reference scores close to that of the reference's last choice:
  FP8 codes of queries and of new keys turn at roundings of any size, which moves scores by up to about a percent.
  The reference says at each layer which entries it would select, and then attends those that the float32 kernels did:
  so each choice is judged by itself, and the logits by what follows from the same choices.
- Look-up: three facts (``jmla.bench.facts``) planted at random depths are asked for at the end, and count if both words
  of the value are the model's greedy choices.

A rung's prompt is shorter than its name where the model has no room for questions and decode steps behind it.
"""

import concurrent.futures
import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jmla import bundled, kernels
from jmla.bench.facts import WORDS, Facts
from jmla.bench.kernels import CEILINGS, hardware
from jmla.kernels import dispatch
from jmla.loading import load
from jmla.models import (
    Model,
    ModelSpec,
    PagedCache,
    bytes_per_row,
    bytes_per_token,
    decode,
    init_cache,
    prefill,
    steps,
    trunk,
)
from jmla.models.cache import window_pages
from jmla.models.config import V4Config
from jmla.models.config.common import shown
from jmla.models.params import graphdef, layer_counts, layer_module, layer_stacks, streams_of
from jmla.models.spec import PAGE_TOKENS, cache_layouts
from jmla.requests import tokenizer_of
from jmla.values import check_integer

REPLAYED = 64  # tokens at the end whose selections and logits are compared
ROW_TILE = 16  # rows whose scores the reference holds at a time
BLOCK = 64  # decode steps of a launch
LAUNCHES = 4  # of which the first is not timed
FACTS = 3
QUESTION = 6 + WORDS  # steps that a question takes
LEAST_TEXT = 256  # tokens of a rung's prompt at least
COPY_TBPS = CEILINGS["H200"]["copy_tbps"]
# Largest distance from the last choice's score that explains another choice, in parts of the row's best score; and
# largest difference of logits. With the dtype of activations "float32" (the check) and "bfloat16" (for information).
TIE = {"float32": 2.0**-6, "bfloat16": 2.0**-3}
LOGITS = {"float32": 0.05, "bfloat16": 1.0}


# ---- what is read


def text_ids(model: Model, corpus: str | None, count: int, seed: int) -> np.ndarray:
    """``[count]`` int32 ids: of a ``.bin`` file of uint16 ids or a text file, from its start and over again; or random.

    Raises:
        ValueError: a file that is empty or cannot be read, ids outside the vocabulary, or text for a model without a
            tokenizer.
    """
    vocab = model.config.vocab_size
    if corpus is None:
        return np.random.default_rng(seed).integers(min(6, vocab - 1), vocab, count, dtype=np.int32)
    try:
        if corpus.endswith(".bin"):
            ids = np.fromfile(corpus, "<u2", count)
        else:
            tokenizer = tokenizer_of(model)
            if tokenizer is None:
                raise ValueError(f"Expected corpus={shown(corpus)} to be a .bin file, as the model has no tokenizer")
            text = Path(corpus).read_text(encoding="utf-8")[: 16 * count]
            ids = np.asarray(tokenizer.encode(text), np.int64)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"Expected corpus={shown(corpus)} to be a file that can be read, got: {error}") from None
    if not len(ids) or ids.max() >= vocab:
        raise ValueError(f"Expected corpus={shown(corpus)} to hold ids below {vocab}, at least one")
    return np.resize(ids, count).astype(np.int32)


def facts_of(model: Model) -> Facts | None:
    """The lines of facts in the model's tokens; None where its tokenizer does not cut them so, or is missing."""
    tokenizer = tokenizer_of(model)
    if tokenizer is None:
        return None
    try:
        return Facts.of(tokenizer)
    except ValueError:
        return None


# ---- compiled pieces


@functools.partial(jax.jit, static_argnames=("spec",))
def _replay(spec: ModelSpec, params: Any, cache: PagedCache, tokens: jax.Array) -> Any:
    """The entries that each CSA layer selects ``[n, k]`` by layer, and logits ``[n, V]``, of ``tokens [1, n]``."""
    counts = jnp.full((1,), tokens.shape[1], jnp.int32)
    ctx, x, _, selected = steps._pass(spec, params, cache, tokens, counts, keep_selected=True)
    return selected, ctx.rowwise(trunk.ends(spec, params).logits, x)


@functools.partial(jax.jit, static_argnames=("spec",))
def _reference(spec: ModelSpec, params: Any, cache: PagedCache, tokens: jax.Array, given: dict[int, jax.Array]) -> Any:
    """As ``_replay``, one layer after the other, and with all scores ``[n, entries]`` by layer.

    Of the entries in ``given [n, k]`` by layer attention reads, whatever would be selected.
    """
    config: Any = spec.config
    ctx = trunk.make_context(spec, cache, tokens, jnp.full((1,), tokens.shape[1], jnp.int32), cache.lengths)
    ends = trunk.ends(spec, params)
    x, store = ends.start(ctx.tokens), {"pools": cache.pools, "states": cache.states}
    at = dict.fromkeys(layer_counts(config, False), 0)
    selected, scores = {}, {}
    for number, stack in enumerate(layer_stacks(config)):
        for repeat in range(stack.repeats):
            for j, kind in enumerate(stack.unit):
                weights = jax.tree.map(lambda w, r=repeat: w[r], params["stacks"][f"{number:02d}"][str(j)])
                layer = nnx.merge(graphdef(layer_module(config, kind, spec.dtype)), weights)
                here = {name: jnp.int32(ordinal) for name, ordinal in at.items()}
                parts = layer.project(x, layer.rotary(ctx, ctx.flat_positions), ctx.implementation("sinkhorn"))
                place = stack.first + repeat * len(stack.unit) + j
                x, store, _ = layer(ctx, x, store, here, given.get(place))
                if "index" in streams_of(kind):
                    selected[place] = layer.choose(ctx, parts, store["pools"]["index"], here["csa"])
                    scores[place] = _scores(ctx, parts, store["pools"]["index"], here["csa"])
                for stream in streams_of(kind):
                    at[stream] += 1
    return selected, ctx.rowwise(ends.logits, x), scores


def _scores(ctx: Any, parts: dict[str, jax.Array], pool: jax.Array, ordinal: jax.Array) -> jax.Array:
    """The scores of all index keys of a layer, ``[n, entries]``, -inf where a row does not see them."""
    table = ctx.page_table(ctx.table, 1, ordinal * ctx.layer_pages("index", {"index": pool}))
    rows = parts["index_q"].shape[0]
    tile = ROW_TILE if rows % ROW_TILE == 0 else rows
    split = jax.tree.map(
        lambda x: x.reshape(-1, tile, *x.shape[1:]),
        (parts["index_q"], parts["index_weights"], ctx.visible(ctx.spec.config.csa_ratio)),
    )

    def one(inputs: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q, weights, visible = inputs
        return kernels.index_scores(
            q, weights, pool, layout=ctx.layouts["index"], lengths=visible, table=table, implementation="xla"
        )

    return jax.lax.map(one, split).reshape(rows, -1)


@functools.partial(jax.jit, donate_argnames=("cache",))
def _decode(model: Model, cache: PagedCache, token: jax.Array, given: jax.Array, count: jax.Array) -> Any:
    """``count`` greedy steps of one row in one program, the last choice and all choices ``[BLOCK]``.

    ``token []`` goes in first; where ``given [BLOCK]`` is not negative it goes in instead of the last choice.
    """

    def body(i: jax.Array, carry: Any) -> Any:
        cache, token, made = carry
        token = jnp.where(given[i] >= 0, given[i], token)
        logits, cache = decode(model, token[None], cache, donate=False)
        token = jnp.argmax(logits[0]).astype(jnp.int32)
        return cache, token, made.at[i].set(token)

    return jax.lax.fori_loop(0, count, body, (cache, token, jnp.zeros(BLOCK, jnp.int32)))


def _call(fn: Any, model: Model, cache: PagedCache, tokens: np.ndarray) -> Any:
    with dispatch.following(model.params, cache):
        return fn(model.spec, model.params, cache, jnp.asarray(tokens[None]))


# ---- memory


def memory(spec: ModelSpec, cache: PagedCache) -> dict[str, dict[str, float]]:
    """Bytes by stream as allocated: of a token and layer for those that grow with the text, else of the row.

    Raises:
        RuntimeError: they are not what ``bytes_per_token`` and ``bytes_per_row`` say.
    """
    tokens, counts = cache.table.shape[1] * PAGE_TOKENS, layer_counts(spec.config, spec.drafting)
    grows, fixed = bytes_per_token(spec), bytes_per_row(spec)
    live = cache.pools["window"].shape[0] / counts["window"] / window_pages(spec)  # a short row has fewer pages
    found: dict[str, dict[str, float]] = {"token_and_layer": {}, "row": {}}
    for name, held in cache.nbytes.items():
        expected = grows[name] * tokens if name in grows else fixed[name] * (live if name == "window" else 1)
        if held != expected:
            raise RuntimeError(f"Expected {expected:,} bytes of {name} in a cache of {tokens:,} tokens, got {held:,}")
        if name in grows:
            found["token_and_layer"][name] = held / tokens / counts[name]
        else:
            found["row"][name] = held
    return found


def growing_bytes(spec: ModelSpec, tokens: int) -> int:
    """Bytes that a decode step reads of every entry of the text: index keys of CSA layers, rows of HCA layers."""
    config: Any = spec.config
    layouts, counts = cache_layouts(spec), layer_counts(config, False)
    per_entry = {name: layouts[name].page_stride / layouts[name].page_size for name in ("index", "hca")}
    index = counts["csa"] * (tokens // config.csa_ratio) * per_entry["index"]
    return int(index + counts["hca"] * (tokens // config.hca_ratio) * per_entry["hca"])


# ---- comparisons


def compare(found: Any, reference: Any, scores: dict[int, Any] | None, dtype: str) -> dict[str, Any]:
    """Selections and logits of two replays.

    Args:
        found: selections by layer and logits.
        reference: likewise.
        scores: the reference's scores by layer; None explains nothing.
        dtype: of the activations, for the tolerances.

    Returns:
        Rows (a token in a layer) in all, ``equal`` ones, ``explained`` ones of the others; the largest distance among
        entries that differ, in parts of the row's best score; the share of the reference's entries that were found;
        the largest difference of logits and the tokens whose likeliest next token is the same.
    """
    rows, equal, explained, farthest, shared = 0, 0, 0, 0.0, []
    for layer, ours in found[0].items():
        theirs = reference[0][layer]
        at = {}
        if scores is not None:
            for name, ids in (("ours", ours), ("theirs", theirs)):
                at[name] = np.asarray(jnp.take_along_axis(scores[layer], jnp.maximum(ids, 0), axis=1))
        for row, (a, b) in enumerate(zip(np.asarray(ours), np.asarray(theirs), strict=True)):
            rows += 1
            only = ~np.isin(a, b), ~np.isin(b, a)
            shared.append(1 - only[1].sum() / max((b >= 0).sum(), 1))
            if not only[0].any() and not only[1].any():
                equal += 1
            elif scores is not None:
                last = at["theirs"][row][b >= 0].min()
                apart = np.concatenate([at["ours"][row][only[0]], at["theirs"][row][only[1]]]) - last
                whole = len(a[a >= 0]) == len(b[b >= 0])
                distance = float(np.abs(apart).max() / np.abs(at["theirs"][row][b >= 0]).max())
                farthest = max(farthest, distance)
                explained += whole and distance <= TIE[dtype]
    logits, expected = np.asarray(found[1]), np.asarray(reference[1])
    return {
        "rows": rows,
        "equal": equal,
        "explained": explained,
        "farthest": farthest,
        "shared": float(np.mean(shared)) if shared else 1.0,
        "logits": float(np.abs(logits - expected).max()),
        "same_next": int((logits.argmax(-1) == expected.argmax(-1)).sum()),
    }


def replays(served: Model, precise: Model, cache: PagedCache, tokens: np.ndarray) -> dict[str, dict[str, Any]]:
    """The comparisons behind one cache, which stays: see the module's text."""

    def on_xla(model: Model) -> Model:
        return dataclasses.replace(model, spec=dataclasses.replace(model.spec, implementation="xla"))

    config: Any = served.config
    sets = jax.ShapeDtypeStruct((len(tokens), config.index_topk), jnp.int32)
    given = {number: sets for number, kind in enumerate(config.layer_kinds) if kind == "csa"}

    def compile_reference() -> Any:
        with dispatch.following(precise.params, cache):
            inputs = precise.params, cache, jnp.asarray(tokens[None])
            return _reference.lower(on_xla(precise).spec, *inputs, given).compile()

    calls = ((_replay, precise), (_replay, served), (_replay, on_xla(served)))
    with concurrent.futures.ThreadPoolExecutor(len(calls) + 1) as pool:  # most of the time goes to compilation
        compiled = pool.submit(compile_reference)
        exact, as_served, as_served_xla = pool.map(lambda call: _call(call[0], call[1], cache, tokens), calls)
        *reference, scores = compiled.result()(precise.params, cache, jnp.asarray(tokens[None]), exact[0])
    return {
        "kernels, float32": compare(exact, reference, scores, "float32"),
        "kernels, as served": compare(as_served, as_served_xla, None, served.spec.dtype),
        "as served, against float32": compare(as_served, reference, scores, served.spec.dtype),
    }


# ---- a rung


def fill(model: Model, cache: PagedCache, tokens: np.ndarray) -> tuple[PagedCache, jax.Array]:
    """Appends the tokens chunk by chunk in one compiled step; the cache, and the last one's logits ``[1, V]``."""
    size, logits = model.spec.prefill_chunk, None
    for start in range(0, len(tokens), size):
        chunk = np.zeros((1, size), np.int32)
        part = tokens[start : start + size]
        chunk[0, : len(part)] = part
        logits, cache = prefill(model, chunk, [len(part)], cache)
    if logits is None:
        raise ValueError("Expected at least one token")
    return cache, logits


def rung(served: Model, precise: Model, length: int, corpus: str | None, seed: int) -> dict[str, Any]:
    """All measurements at one length, as the JSON file has them.

    Args:
        served: the model in the dtype that it serves with, its cache in FP8.
        precise: the same in float32.
        length: tokens; fewer where the model has no room for the steps behind them.
        corpus: see ``text_ids``.
        seed: of facts and of random text.
    """
    spec, facts = served.spec, facts_of(served)
    extra = FACTS * QUESTION + LAUNCHES * BLOCK
    length = min(length, spec.max_seq_len - extra)
    ids = text_ids(served, corpus, length, seed)
    planted: list[Any] = []
    if facts is not None:  # not among the tokens at the end, which a window would show
        ids[: -2 * REPLAYED], planted, places = facts.plant(
            np.random.default_rng(seed + length), ids[: -2 * REPLAYED], FACTS
        )
    cache = init_cache(served, 1, length + extra)
    found: dict[str, Any] = {"tokens": length, "memory": memory(spec, cache), "bytes": sum(cache.nbytes.values())}
    warm = np.zeros((1, spec.prefill_chunk), np.int32)
    logits, cache = prefill(served, warm, [0], cache)  # compiles, and leaves the cache as it was
    jax.block_until_ready(logits)
    start = time.perf_counter()
    cache, logits = fill(served, cache, ids[:-REPLAYED])
    jax.block_until_ready((logits, cache.lengths))
    found["prefill_seconds"] = time.perf_counter() - start
    found["prefill_tokens_per_second"] = (length - REPLAYED) / found["prefill_seconds"]
    found["replays"] = replays(served, precise, cache, ids[-REPLAYED:])
    cache, logits = fill(served, cache, ids[-REPLAYED:])

    def block(cache: PagedCache, token: Any, given: list[int], count: int) -> Any:
        padded = np.full(BLOCK, -1, np.int32)
        padded[: len(given)] = given
        with dispatch.following(served.params, cache):
            return _decode(served, cache, jnp.asarray(token, jnp.int32), jnp.asarray(padded), jnp.int32(count))

    token = jnp.argmax(logits[0])
    right = 0
    for key, value in planted:
        question = facts.question(key) if facts is not None else []
        cache, token, made = block(cache, token, question, len(question) + WORDS - 1)
        right += tuple(np.asarray(made)[len(question) - 1 : len(question) + WORDS - 1].tolist()) == value
    found |= {"facts": len(planted), "facts_right": right if planted else None}
    if planted:
        found["facts_at"] = places
    seconds = []
    for launch in range(LAUNCHES):
        jax.block_until_ready(token)
        start = time.perf_counter()
        cache, token, _ = block(cache, token, [], BLOCK)
        jax.block_until_ready((token, cache.lengths))
        if launch:
            seconds.append((time.perf_counter() - start) / BLOCK)
    found["decode_ms"] = statistics.median(seconds) * 1e3
    found["decode_ms_all"] = [s * 1e3 for s in seconds]
    found["growing_bytes"] = growing_bytes(spec, length)
    found["bandwidth_ms"] = found["growing_bytes"] / COPY_TBPS / 1e9
    return found


# ---- what is said of it


def faults(found: dict[str, Any]) -> list[str]:
    """What is wrong with a rung's figures: kernels in float32 that choose or compute something else."""
    checked = found["replays"]["kernels, float32"]
    out = []
    if unexplained := checked["rows"] - checked["equal"] - checked["explained"]:
        out.append(f"{found['tokens']} tokens: {unexplained} of {checked['rows']} selections differ from the reference")
    if not checked["logits"] <= LOGITS["float32"]:
        out.append(f"{found['tokens']} tokens: logits differ by {checked['logits']:.3g}")
    return out


HEAD = (
    "| tokens | prefill, tokens/s | decode, ms a step | against the first | bandwidth, ms | 1.5 x first + bandwidth "
    "| facts | float32 kernels: equal + explained of rows, logits | served kernels against XLA: equal, shared, logits "
    "| served against float32: equal, shared, logits |\n|" + "---|" * 10
)


def line(found: dict[str, Any], first: dict[str, Any]) -> str:
    """A row of the table."""
    checked, own, whole = found["replays"].values()
    limit = 1.5 * first["decode_ms"] + found["bandwidth_ms"]
    cells = [
        f"{found['tokens']:,}",
        f"{found['prefill_tokens_per_second']:,.0f}",
        f"{found['decode_ms']:.3f}",
        f"{found['decode_ms'] / first['decode_ms']:.2f}",
        f"{found['bandwidth_ms']:.4f}",
        f"{limit:.3f}",
        f"{found['facts_right']} of {found['facts']}" if found["facts"] else "-",
        f"{checked['equal']} + {checked['explained']} of {checked['rows']}, {checked['logits']:.2g}",
        *(f"{part['equal']}, {part['shared']:.3f}, {part['logits']:.2g}" for part in (own, whole)),
    ]
    return "| " + " | ".join(cells) + " |"


def describe(found: dict[str, Any]) -> str:
    """What is printed of a rung before the table."""
    held = found["memory"]
    lines = [
        f"{found['tokens']:,} tokens: {found['bytes']:,} bytes of cache; bytes a token and layer, as allocated and as "
        "the layouts say: " + ", ".join(f"{name} {size:g}" for name, size in held["token_and_layer"].items()),
        "  bytes of a row: " + ", ".join(f"{name} {size:,.0f}" for name, size in held["row"].items()),
    ]
    for name, part in found["replays"].items():
        lines.append(
            f"  {name}: {part['equal']} of {part['rows']} selections equal, {part['explained']} explained (farthest "
            f"{part['farthest']:.2g}), {part['shared']:.4f} of entries shared; logits within {part['logits']:.2g}, "
            f"{part['same_next']} of {REPLAYED} next tokens alike"
        )
    if found["facts"]:
        lines.append(f"  facts at {found['facts_at']}: {found['facts_right']} of {found['facts']} right")
    lines.append(f"  prefill {found['prefill_seconds']:.2f} s; decode {found['decode_ms']:.3f} ms a step")
    return "\n".join(lines)


def climb(
    served: Model,
    precise: Model,
    lengths: list[int],
    corpus: str | None,
    seed: int,
    keep: Callable[[list[dict[str, Any]]], None] | None = None,
) -> list[dict[str, Any]]:
    """The rungs in order, each printed when it is done; ``keep`` gets those that are."""
    rungs: list[dict[str, Any]] = []
    for length in lengths:
        rungs.append(rung(served, precise, length, corpus, seed))
        print(describe(rungs[-1]), flush=True)
        if keep is not None:
            keep(rungs)
    return rungs


def parse_lengths(lengths: str) -> list[int]:
    """``"4096,32768"`` as numbers.

    Raises:
        ValueError: something else, or too few tokens.
    """
    out = []
    for part in lengths.split(","):
        if not part.strip().isdecimal():
            raise ValueError(f"Expected lengths={shown(lengths)} to be numbers of tokens with commas between them")
        out.append(check_integer("lengths", int(part), LEAST_TEXT))
    return out


def run(model: str | None, lengths: str, corpus: str | None, seed: int, json_path: str | None) -> None:
    """Measures, prints the table last and writes the JSON file.

    Args:
        model: directory or hub id of a DeepSeek-V4; None for the bundled model.
        lengths: of the rungs.
        corpus: see ``text_ids``.
        seed: of facts and of random text.
        json_path: file for the figures, with hardware and versions.
    """
    try:
        if json_path is not None and (Path(json_path).is_dir() or not Path(json_path).parent.is_dir()):
            raise ValueError(f"Expected json={shown(json_path)} to be a file in a directory that exists")
        wanted = parse_lengths(lengths)
        check_integer("seed", seed, 0)
        path = bundled.path() if model is None else model
        served, precise = load(path), load(path, dtype="float32")
        if not isinstance(served.config, V4Config):
            raise ValueError(f"Expected a DeepSeek-V4 model, got {served.config.model_type}")
        text_ids(served, corpus, 1, seed)
    except (ValueError, TypeError, OSError, ImportError) as error:
        raise SystemExit(f"Error: {error}") from None
    about = hardware()
    print(f"{about['device']}, {about['date']}, {about['versions']}")
    print(
        f"model={model or bundled.NAME}, corpus={corpus or 'random ids'}, {seed=}; float32 tolerances: selections "
        f"{TIE['float32']:.3g} of the best score, logits {LOGITS['float32']}; bandwidth {COPY_TBPS} TB/s",
        flush=True,
    )
    settings = {"model": model or bundled.NAME, "corpus": corpus, "seed": seed, "tie": TIE, "logits": LOGITS}

    def keep(rungs: list[dict[str, Any]]) -> None:  # after every rung, so that an interrupted run keeps what it has
        if json_path:
            text = json.dumps({**about, "settings": settings, "rungs": rungs}, indent=1)
            Path(json_path).write_text(text + "\n", encoding="utf-8")

    rungs = climb(served, precise, wanted, corpus, seed, keep)
    print()
    print(HEAD)
    for found in rungs:
        print(line(found, rungs[0]))
    if wrong := [fault for found in rungs for fault in faults(found)]:
        raise SystemExit("; ".join(wrong))
