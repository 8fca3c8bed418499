"""What the CPU path costs: python benchmarks/cpu.py [--json FILE]

Prints, for the bundled model: prefill and decode speed at 1k and 32k tokens and the peak memory of the process (each
in a process of its own); the cost of deterministic mode; and, for random models of growing depth, compile time and the
number of arrays that a step takes. All times are of this machine; only their ratios mean something elsewhere.
"""

import argparse
import dataclasses
import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

import jmla


def length(tokens: int, deterministic: bool, decode_steps: int = 32) -> dict[str, Any]:
    """Prefill of ``tokens`` and decoding behind them, second run timed; peak resident memory of this process."""
    model = jmla.load("jmla-tiny-v4", deterministic=deterministic)
    ids = np.random.default_rng(0).integers(6, model.config.vocab_size, (1, tokens)).astype(np.int32)
    for _ in range(2):
        cache = jmla.init_cache(model, 1, tokens + 2 * decode_steps)
        start = time.perf_counter()
        logits, cache = jmla.prefill(model, ids, [tokens], cache)
        jax.block_until_ready(logits)
        prefill = time.perf_counter() - start
    logits, cache = jmla.decode(model, [7], cache)
    jax.block_until_ready(logits)
    start = time.perf_counter()
    for _ in range(decode_steps):
        logits, cache = jmla.decode(model, [7], cache)
    jax.block_until_ready(logits)
    decode = (time.perf_counter() - start) / decode_steps
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"tokens": tokens, "prefill_s": prefill, "decode_s": decode, "peak_bytes": peak}


def depth(repeats: int) -> dict[str, Any]:
    """Compile time of a prefill step of a random V4 with ``repeats`` pairs of HCA and CSA layers."""
    from jmla.models import make_model, steps
    from jmla.models.random import init_random
    from tests.tiny import V4

    config = dataclasses.replace(
        V4,
        num_hidden_layers=1 + 2 * repeats,
        layer_kinds=("window", *("hca", "csa") * repeats),
        layer_routing=("hash", *("learned",) * 2 * repeats),
    )
    model = make_model(config, jax.tree.map(jnp.asarray, init_random(config)), dtype="float32", kv_layout="footer584")
    cache = jmla.init_cache(model, 1, 512)
    arguments = {
        "spec": model.spec,
        "params": model.params,
        "cache": cache,
        "tokens": jnp.zeros((1, 64), jnp.int32),
        "counts": jnp.ones((1,), jnp.int32),
        "all_logits": False,
        "return_hidden": False,
    }
    start = time.perf_counter()
    lowered = steps._compiled("advance", True).lower(**arguments)
    lowering = time.perf_counter() - start
    start = time.perf_counter()
    lowered.compile()
    return {
        "layers": config.num_hidden_layers,
        "leaves": len(jax.tree.leaves((model.params, cache))),
        "trace_s": lowering,
        "compile_s": time.perf_counter() - start,
    }


def apart(what: str) -> dict[str, Any]:
    """One measurement in a process of its own."""
    done = subprocess.run([sys.executable, __file__, "--one", what], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--json", type=Path)
    args.add_argument("--one", help=argparse.SUPPRESS)
    opt = args.parse_args()
    if opt.one:
        kind, value = opt.one.split(":")
        print(json.dumps(depth(int(value)) if kind == "depth" else length(int(value), kind == "fixed")))
        return
    out: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "length": [apart(f"fast:{n}") for n in (1024, 8192, 32768)],
        "deterministic": [apart(f"fixed:{n}") for n in (1024,)],
        "depth": [apart(f"depth:{n}") for n in (2, 8, 20)],
    }
    print("tokens  prefill tokens/s  decode tokens/s  peak memory GiB")
    for row in out["length"]:
        rate = row["tokens"] / row["prefill_s"]
        print(f"{row['tokens']:6}  {rate:16.0f}  {1 / row['decode_s']:15.1f}  {row['peak_bytes'] / 2**30:15.2f}")
    first, last = out["length"][0], out["length"][-1]
    out["prefill_ratio"] = (last["tokens"] / last["prefill_s"]) / (first["tokens"] / first["prefill_s"])
    out["decode_ratio"] = first["decode_s"] / last["decode_s"]
    print(f"32k against 1k: prefill speed {out['prefill_ratio']:.2f}, decode speed {out['decode_ratio']:.2f}")
    fixed = out["deterministic"][0]
    out["deterministic_cost"] = [fixed[k] / first[k] for k in ("prefill_s", "decode_s")]
    print("deterministic mode at 1k: prefill time x{:.2f}, decode time x{:.2f}".format(*out["deterministic_cost"]))
    print("layers  arrays of a step  trace s  compile s")
    for row in out["depth"]:
        print(f"{row['layers']:6}  {row['leaves']:16}  {row['trace_s']:7.2f}  {row['compile_s']:9.2f}")
    if opt.json:
        opt.json.write_text(json.dumps(out, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
