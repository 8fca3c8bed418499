"""Where the time of a decode layer of V4-Flash goes: kernels by part of the layer.

The layer runs compiled, alone, at its true widths over a cache that is full up to the context. The profiler gives each
kernel's time and the instruction of the compiled program that launched it; the program's text gives the Python
functions that the instruction stems from, and the innermost one that ``PARTS`` names decides which part it belongs to.
"""

import dataclasses
import functools
import importlib.util
import json
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmla import models
from jmla.bench.trace import Event, busy_us, traced
from jmla.kernels import dispatch
from jmla.models import Model, PagedCache, trunk
from jmla.models.config import V4Config, Yarn
from jmla.models.params import abstract_params
from jmla.models.spec import ModelSpec

# XLA's command buffers launch kernels without the names of their instructions.
XLA_FLAGS = "--xla_gpu_enable_command_buffer="

FLASH = V4Config(  # config.json of DeepSeek-V4-Flash
    model_type="deepseek_v4",
    vocab_size=129280,
    hidden_size=4096,
    num_hidden_layers=43,
    num_attention_heads=64,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=1024,
    o_groups=8,
    o_lora_rank=1024,
    sliding_window=128,
    layer_kinds=("window", "window", *("csa", "hca") * 20, "csa"),
    csa_ratio=4,
    hca_ratio=128,
    layer_routing=("hash",) * 3 + ("learned",) * 40,
    index_n_heads=64,
    index_head_dim=128,
    index_topk=512,
    n_routed_experts=256,
    num_experts_per_tok=6,
    n_shared_experts=1,
    moe_intermediate_size=2048,
    routed_scaling_factor=1.5,
    norm_topk_prob=True,
    swiglu_limit=10.0,
    hc_mult=4,
    hc_sinkhorn_iters=20,
    hc_eps=1e-6,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    compress_rope_theta=160000.0,
    yarn=Yarn(16.0, 32.0, 1.0, 65536, None, None),
    max_position_embeddings=1048576,
    num_nextn_predict_layers=1,
    draft_kind="window",
    bos_token_id=0,
    eos_token_id=(1,),
    pad_token_id=None,
    torch_dtype="bfloat16",
)

# By name of a function, or of the file of an operation ("op/...").
PARTS = {
    "op/sparse_mla": "attention",
    "op/kv_pack": "packing",
    "op/index_scores": "index scores",
    "op/top_k": "top-k",
    "op/resolve_slots": "slots",
    "op/compress": "compression",
    "collapse": "hyper-connections",
    "hyper_projection": "hyper-connections",
    "sinkhorn": "hyper-connections",
    "weighted_sum": "hyper-connections",
    "expand": "hyper-connections",
    "project": "projections",
    "attention_output": "output projection",
    "route": "router and shared expert",
    "experts": "experts",
    "feed_forward": "experts",
    "rotary": "rotary tables",
    "compress": "compression",
    "select": "selection around scores and top-k",
    "slots": "slots",
    "attend": "attention",
}
REST = "rest"
CONTROL = ("while", "conditional", "call")  # instructions whose time is that of others


@dataclasses.dataclass(frozen=True)
class Instruction:
    """Of a compiled program: its opcode, and the part of the layer it belongs to."""

    opcode: str
    part: str


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel of a step: ``us`` of all its launches together, and the instruction that launches it."""

    name: str
    instruction: str
    part: str
    us: float
    launches: float


# ---- the program's text


def provenance(text: str) -> dict[str, Instruction]:
    """Instructions by name, from the text of a compiled program (``Compiled.as_text()``)."""
    files, functions = _named(text, "FileNames"), _named(text, "FunctionNames")
    places = {
        int(number): (files.get(int(file), ""), functions.get(int(function), ""))
        for number, file, function in re.findall(
            r"^(\d+) \{file_name_id=(\d+) function_name_id=(\d+)", _section(text, "FileLocations"), re.M
        )
    }
    frames = {
        int(number): (int(place), int(parent or 0))
        for number, place, parent in re.findall(
            r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?", _section(text, "StackFrames"), re.M
        )
    }
    # Some versions print a frame's parent as its number plus one, so that an outermost frame names itself.
    shift = int(any(number == parent for number, (_, parent) in frames.items()))

    @functools.cache
    def part_of(frame: int) -> str | None:
        while frame in frames:
            place, parent = frames[frame]
            file, function = places.get(place, ("", ""))
            if found := _part(file, function):
                return found
            frame = parent - shift
        return None

    found: dict[str, tuple[str, str | None, str | None]] = {}
    last: dict[str, str] = {}  # part of a computation's last instruction that has one
    computation = ""
    for line in text.splitlines():
        if opened := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            computation = opened[1]
        if not (head := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (?:\(.*?\)|\S+) ([\w\-]+)\(", line)):
            continue
        frame = re.search(r"stack_frame_id=(\d+)", line)
        part = part_of(int(frame[1])) if frame else None
        if part:
            last[computation] = part
        calls = re.search(r"calls=%?([\w.\-]+)", line)
        found[head[1]] = (head[2], part, calls[1] if calls else None)
    return {
        name: Instruction(opcode, part or last.get(calls or "", REST)) for name, (opcode, part, calls) in found.items()
    }


def _section(text: str, name: str) -> str:
    found = re.search(rf"^{name}\n(.*?)(?:\n\n|\Z)", text, re.M | re.S)
    return found[1] if found else ""


def _named(text: str, section: str) -> dict[int, str]:
    return {int(number): name for number, name in re.findall(r'^(\d+) "(.*)"$', _section(text, section), re.M)}


def _part(file: str, function: str) -> str | None:
    path = Path(file)
    if path.parents[1:2] and path.parent.parent.name == "kernels":
        return PARTS.get(f"op/{path.parent.name}")
    return PARTS.get(function.rpartition(".")[2]) if path.parent.name == "models" else None


# ---- the profile


def by_kernel(seen: Sequence[Event], instructions: dict[str, Instruction], steps: int) -> list[Kernel]:
    """Kernels of one of ``steps`` equal steps, those that take longest first."""
    sums: dict[tuple[str, str], tuple[float, int]] = {}
    for event in seen:
        us, launches = sums.get((event.name, event.instruction), (0.0, 0))
        sums[event.name, event.instruction] = (us + event.duration_ns / 1e3, launches + 1)
    kernels = []
    for (name, instruction), (us, launches) in sums.items():
        known = instructions.get(instruction)
        if known is None or known.opcode not in CONTROL or name != instruction:
            part = known.part if known else REST
            kernels.append(Kernel(name, instruction, part, us / steps, launches / steps))
    return sorted(kernels, key=lambda kernel: -kernel.us)


# ---- the layer


def one_layer(config: V4Config, kind: str, context: int) -> tuple[ModelSpec, dict[str, Any]]:
    """A model of ``config``'s widths with a single layer, ``kind`` "window", "csa" or "hca", and random weights.

    The routed experts of a layer are copies of one: what they hold does not change the time, where they lie does.
    """
    config = dataclasses.replace(
        config, num_hidden_layers=1, layer_kinds=(kind,), layer_routing=("learned",), num_nextn_predict_layers=0
    )
    length = -(-(context + 1) // 256) * 256
    spec = ModelSpec(config, dtype=config.torch_dtype, kv_layout="footer584", max_seq_len=length)

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = path[-1].key
        shape = (*leaf.shape[:1], 1, *leaf.shape[2:]) if name in trunk.EXPERTS else leaf.shape

        @jax.jit
        def fill() -> jax.Array:
            values = jax.random.normal(jax.random.key(zlib.crc32(str(path).encode())), shape)
            values = 1 + 0.2 * values if name == "values" else values * leaf.shape[-1] ** -0.5
            return jnp.broadcast_to(values.astype(leaf.dtype), leaf.shape)

        return fill()

    shapes = abstract_params(config, spec.dtype, drafting=False)["stacks"]
    return spec, {"stacks": jax.tree_util.tree_map_with_path(draw, shapes)}


@functools.partial(jax.jit, static_argnums=(0, 1))
def random_pool(pages: int, stride: int) -> jax.Array:
    """A pool of bytes ``[pages, stride]`` of random but finite content, whatever its layout; the first pages repeat."""
    # Below 0x40 every byte is a finite code, the exponent of a scale, or half of a small bf16 or float32 value.
    distinct = jax.random.bits(jax.random.key(0), (min(pages, 1024), stride), jnp.uint8) & 0x3F
    return distinct[jnp.arange(pages) % len(distinct)]


def full_cache(spec: ModelSpec, rows: int, context: int) -> PagedCache:
    """A cache of ``rows`` sequences of ``context`` tokens, of random content, pages in any order."""
    cache = models.init_cache(Model({}, spec), rows, spec.max_seq_len)
    order = np.random.default_rng(0).permutation(cache.table.size).reshape(cache.table.shape)
    return cache.replace(
        pools={name: random_pool(*pool.shape) for name, pool in cache.pools.items()},
        table=jnp.asarray(order, jnp.int32),
        lengths=jnp.full((rows,), context, jnp.int32),
    )


@functools.partial(jax.jit, static_argnames="spec", donate_argnames="cache")
def step(spec: ModelSpec, params: dict[str, Any], cache: PagedCache, x: jax.Array) -> tuple[jax.Array, PagedCache]:
    """The layers over the next token of each row, ``x [B, N, D]`` before and after; the lengths stay as they are."""
    ones = jnp.ones((cache.batch,), jnp.int32)
    ctx = trunk.make_context(spec, cache, jnp.zeros((cache.batch, 1), jnp.int32), ones, cache.lengths)
    x, store, _ = trunk.run_layers(ctx, params, x, {"pools": cache.pools, "states": cache.states}, False)
    return x, cache.replace(**store)


def profile_layer(config: V4Config, kind: str, rows: int, context: int, steps: int = 5) -> dict[str, Any]:
    """Times of one decode step of one layer.

    Args:
        config: of the model.
        kind: of the layer: "window", "csa" or "hca".
        rows: sequences.
        context: tokens of each sequence, that of the step included; a multiple of 128 closes windows of all kinds.
        steps: that are traced; the result is their mean.

    Returns:
        ``kind``, ``rows``, ``context``; ``us`` in which the device works, ``span_us`` from the first kernel of a step
        to the last (they are launched one by one here); ``parts`` and ``kernels``, each by falling time.
    """
    spec, params = one_layer(config, kind, context)
    cache = full_cache(spec, rows, context - 1)
    x = jax.random.normal(jax.random.key(1), (rows, config.hc_mult, config.hidden_size), spec.dtype)
    with dispatch.following(params, cache, x):
        compiled = step.lower(spec=spec, params=params, cache=cache, x=x).compile()

    def run() -> jax.Array:
        nonlocal cache
        for _ in range(steps):
            out, cache = compiled(params=params, cache=cache, x=x)
        return out

    jax.block_until_ready(run())
    seen = traced(run)
    if not seen:
        raise RuntimeError("Expected the profiler to have seen what ran on the device, got nothing")
    kernels = by_kernel(seen, provenance(compiled.as_text() or ""), steps)
    total = sum(kernel.us for kernel in kernels)
    parts: dict[str, tuple[float, float]] = {}
    for kernel in kernels:
        us, launches = parts.get(kernel.part, (0.0, 0.0))
        parts[kernel.part] = (us + kernel.us, launches + kernel.launches)
    first, last = min(e.start_ns for e in seen), max(e.start_ns + e.duration_ns for e in seen)
    return {
        "kind": kind,
        "rows": rows,
        "context": context,
        "us": busy_us(seen) / steps,
        "span_us": (last - first) / 1e3 / steps,
        "parts": [
            {"part": part, "share": us / total, "us": us, "launches": launches}
            for part, (us, launches) in sorted(parts.items(), key=lambda item: -item[1][0])
        ],
        "kernels": [dataclasses.asdict(kernel) for kernel in kernels],
    }


# ---- what is printed


def title(result: dict[str, Any]) -> str:
    """What was measured."""
    rows = result["rows"]
    return f"{result['kind']} layer, {rows} row{'s' * (rows > 1)}, context {result['context']}"


def table(result: dict[str, Any], longest: int = 8) -> str:
    """Markdown: the parts of a layer, and its longest kernels."""
    lines = [
        f"### {title(result)}",
        "",
        f"{result['us']:.0f} us of work a step; {result['span_us']:.0f} us with kernels launched one by one.",
        "",
        "| part | share | us | launches |",
        "|---|---|---|---|",
    ]
    lines += [f"| {p['part']} | {p['share']:.1%} | {p['us']:.1f} | {p['launches']:.0f} |" for p in result["parts"]]
    lines += ["", "| kernel | part | us | launches |", "|---|---|---|---|"]
    for kernel in result["kernels"][:longest]:
        name = kernel["name"] if len(kernel["name"]) <= 60 else kernel["name"][:57] + "..."
        lines.append(f"| `{name}` | {kernel['part']} | {kernel['us']:.1f} | {kernel['launches']:.0f} |")
    return "\n".join([*lines, ""])


def plot(results: Sequence[dict[str, Any]], path: str) -> None:
    """A picture of the parts, one panel a layer and batch; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    height = max(len(result["parts"]) for result in results)
    figure, axes = plt.subplots(
        len(results), 1, figsize=(8, (0.28 * height + 0.9) * len(results)), layout="constrained", squeeze=False
    )
    for axis, result in zip(axes[:, 0], results, strict=True):
        parts = result["parts"]
        bars = axis.barh([p["part"] for p in parts], [p["us"] for p in parts], color="#4878a8")
        axis.bar_label(bars, [f"{p['us']:.0f} us, {p['share']:.0%}" for p in parts], padding=3, fontsize=8)
        axis.invert_yaxis()
        axis.margins(x=0.2)
        axis.set_title(f"{title(result)}: {result['us']:.0f} us", fontsize=10)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("microseconds of a decode step")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def run(
    config: V4Config,
    kinds: Sequence[str],
    rows: Sequence[int],
    context: int,
    json_path: str | None,
    picture: str | None,
) -> None:
    """Profiles every kind of layer at every batch, prints the tables and writes the files."""
    from jmla.bench.kernels import hardware

    if picture and importlib.util.find_spec("matplotlib") is None:  # not after the measurement
        raise SystemExit("--picture needs matplotlib: pip install matplotlib")

    about = hardware()
    print(f"{about['device']}, {about['date']}, {about['versions']}\n")
    results = []
    for kind in kinds:
        for count in rows:
            results.append(profile_layer(config, kind, count, context))
            print(table(results[-1]), flush=True)
            if json_path:
                Path(json_path).write_text(json.dumps({**about, "layers": results}, indent=1) + "\n", encoding="utf-8")
    if picture:
        plot(results, picture)
