"""Trains jmla-tiny-v4 on one GPU, in resumable runs.

    python -m training.train --corpus runs/corpus --out runs/tiny --minutes 8 [--resume]

Reads ``train.bin`` and ``heldout.bin`` (uint16 token ids) and ``stats.json``; writes the float32 weights and the
optimiser's state after each run, for the next run and for the export, and the loss curve as JSON lines. The
learning rate follows the fraction of the whole budget ``--total-minutes``, so that cutting the training into runs
changes nothing but the seams.
"""

import argparse
import functools
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

from jmla.models.config import V4Config, Yarn
from jmla.models.params import abstract_params
from jmla.models.random import packed_vectors
from training.model import forward
from training.quantise import straight_through


def tiny_config(vocab_size: int) -> V4Config:
    """The bundled model: one layer of each kind and a second CSA layer, with the true geometry of attention."""
    return V4Config(
        model_type="deepseek_v4",
        vocab_size=vocab_size,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=2,
        head_dim=512,
        qk_rope_head_dim=64,
        q_lora_rank=64,
        o_groups=2,
        o_lora_rank=64,
        sliding_window=128,
        layer_kinds=("window", "csa", "hca", "csa"),
        csa_ratio=4,
        hca_ratio=128,
        layer_routing=("hash", "hash", "learned", "learned"),
        index_n_heads=8,
        index_head_dim=128,
        index_topk=64,
        n_routed_experts=10,
        num_experts_per_tok=3,
        n_shared_experts=1,
        moe_intermediate_size=64,
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


# ---- parameters


def _at(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def init_params(config: V4Config, seed: int) -> Any:
    """Random weights: normal with deviation ``fan_in^-0.5`` for matrices, streams that start as a plain residual."""
    rng = np.random.default_rng(seed)

    def one(path: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        name, shape = path[-1].key, leaf.shape
        if name == "fixed":
            rows = [
                rng.permuted(np.tile(np.arange(config.n_routed_experts), (shape[-2], 1)), axis=1)[:, : shape[-1]]
                for _ in range(shape[0] if len(shape) == 3 else 1)
            ]
            return np.stack(rows).reshape(shape).astype(np.int32)
        if name in ("values", "ape"):
            return np.zeros(shape, np.float32)
        if name == "embed":
            return rng.normal(0, 0.5, shape).astype(np.float32)
        gain = 0.3 if name in ("wo_b", "down", "shared_down") else 1.0
        return rng.normal(0, gain * shape[-1] ** -0.5, shape).astype(np.float32)

    params = jax.tree_util.tree_map_with_path(one, abstract_params(config, "float32"))
    n = config.hc_mult
    mixing = np.where(np.eye(n), 3.0, 0.0).reshape(-1)
    # distinct small weights for the input streams and output gains break the symmetry between streams
    base = np.concatenate([np.linspace(-1.5, -0.7, n), np.linspace(-0.3, 0.3, n), mixing])
    for path, small in packed_vectors(config).items():
        values = _at(params, path)["small"]["values"]
        for name, shape in small.fields:
            where, _ = small.place(name)
            if name.endswith("norm"):
                values[..., where] = 1.0
            elif name == "hc_scale":
                values[..., where] = 0.3
            elif name == "hc_base":
                values[..., where] = np.tile(base, 2) if shape[0] == 2 else np.linspace(-1.5, -0.7, n)
    return params


# ---- the step


def loss_fn(config: V4Config, dtype: str, rounding: Any, params: Any, tokens: jax.Array) -> Any:
    """Next-token loss, a fifth of the draft block's, and the indexers'; ``rounding`` 1 rounds the weights."""
    params = straight_through(params, rounding)
    shapes = abstract_params(config, dtype)
    cast = jax.tree.map(lambda w, s: w.astype(s.dtype), params, shapes)
    logits, drafted, tally = forward(config, cast, tokens, dtype)
    main = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    draft = optax.softmax_cross_entropy_with_integer_labels(drafted[:, :-1], tokens[:, 2:])
    index = sum(tally.index_losses) / max(len(tally.index_losses), 1)
    total = jnp.mean(main) + 0.2 * jnp.mean(draft) + index
    return total, {
        "loss": jnp.mean(main),
        "draft": jnp.mean(draft),
        "index": index,
        "draft_hits": jnp.mean(jnp.argmax(drafted[:, :-1], -1) == tokens[:, 2:]),
        "loads": tally.loads,
        "tokens": main,
    }


def make_optimizer(peak: float) -> optax.GradientTransformation:
    """AdamW with the learning rate passed in, decay on matrices only."""

    def decays(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda p, w: p[-1].key not in ("values", "ape", "embed"), params)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(0.9, 0.95, mu_dtype=jnp.float32),
        optax.add_decayed_weights(0.1, mask=decays),
        optax.scale(-peak),
    )


def split_ids(params: Any) -> tuple[Any, Any]:
    """Trainable float parameters and the integer tables, as two trees with None in the other's places."""
    trained = jax.tree.map(lambda w: w if w.dtype == np.float32 else None, params)
    tables = jax.tree.map(lambda w: None if w.dtype == np.float32 else jnp.asarray(w), params)
    return trained, tables


def join(trained: Any, tables: Any) -> Any:
    return jax.tree.map(lambda a, b: b if a is None else a, trained, tables, is_leaf=lambda x: x is None)


def rebalance(config: V4Config, trained: Any, loads: dict[tuple[str, ...], jax.Array]) -> None:
    """Moves the biases towards idle experts (DeepSeek-V3, section 2.1.2), outside the gradient; in place."""
    fields = packed_vectors(config)
    for path, load in loads.items():
        here = path[:3] if path[0] == "stacks" else path
        where, _ = fields[here].place("gate_bias")
        step = 0.001 * jnp.sign(jnp.mean(load) - load)
        holder = _at(trained, here)["small"]
        row = holder["values"]
        index = (int(path[3]), where) if path[0] == "stacks" else (where,)
        holder["values"] = row.at[index].add(step)


@functools.partial(jax.jit, static_argnames=("config", "optimizer"), donate_argnames=("trained", "state"))
def train_step(config, optimizer, rounding, trained, tables, state, tokens, rate):
    def objective(trained: Any) -> Any:
        return loss_fn(config, "bfloat16", rounding, join(trained, tables), tokens)

    (_, report), grads = jax.value_and_grad(objective, has_aux=True)(trained)
    updates, state = optimizer.update(grads, state, trained)
    trained = optax.apply_updates(trained, jax.tree.map(lambda u: u * rate, updates))
    report.pop("tokens")
    loads = report.pop("loads")
    rebalance(config, trained, loads)
    report["balance"] = jnp.max(jnp.stack([jnp.max(v) * config.n_routed_experts for v in loads.values()]))
    return trained, state, report


@functools.partial(jax.jit, static_argnames=("config", "dtype"))
def evaluate_batch(config, rounding, params, tokens, dtype="bfloat16"):
    return loss_fn(config, dtype, rounding, params, tokens)[1]


def held_out(
    config: V4Config,
    params: Any,
    data: np.ndarray,
    length: int,
    quantised: bool,
    windows: int = 64,
    dtype: str = "bfloat16",
) -> dict:
    """Mean loss in nats a token over evenly spaced windows, counting the second half of each (a warm context)."""
    starts = np.linspace(0, len(data) - length - 1, windows).astype(int)
    batch = np.stack([data[s : s + length] for s in starts]).astype(np.int32)
    total = []
    for part in np.split(batch, max(1, windows // 16)):
        report = evaluate_batch(config, np.float32(quantised), params, part, dtype)
        total.append(
            {k: np.asarray(report[k]).mean() for k in ("draft", "index", "draft_hits")}
            | {"loss": float(np.asarray(report["tokens"])[:, length // 2 :].mean())}
        )
    return {k: float(np.mean([t[k] for t in total])) for k in total[0]}


# ---- files


def save_state(out: Path, tree: Any, name: str, dtype: Any) -> None:
    """Flattens a tree of float arrays into files of at most 15 MiB."""
    leaves = [np.asarray(x).astype(dtype).reshape(-1) for x in jax.tree.leaves(tree)]
    flat = np.concatenate(leaves).view(np.uint8)
    for part, start in enumerate(range(0, len(flat), 15 << 20)):
        (out / f"{name}.{part}.bin").write_bytes(flat[start : start + (15 << 20)].tobytes())


def load_state(out: Path, like: Any, name: str, dtype: Any) -> Any:
    parts = sorted(out.glob(f"{name}.*.bin"), key=lambda file: int(file.name.split(".")[1]))
    flat = np.concatenate([np.fromfile(part, np.uint8) for part in parts]).view(dtype)
    leaves, start = [], 0
    for x in jax.tree.leaves(like):
        leaves.append(flat[start : start + x.size].astype(np.float32).reshape(x.shape))
        start += x.size
    if start != flat.size:
        raise ValueError(f"Expected {name} to hold {start} values, got {flat.size}")
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def schedule(fraction: float, warmup: float = 0.01) -> float:
    """Linear warm-up, constant, and a linear decay to zero over the last 40 % of the budget."""
    if fraction < warmup:
        return fraction / warmup
    return 1.0 if fraction < 0.6 else max((1.0 - fraction) / 0.4, 0.0)


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--corpus", type=Path, required=True)
    args.add_argument("--out", type=Path, required=True)
    args.add_argument("--minutes", type=float, default=8.0, help="length of this run")
    args.add_argument("--total-minutes", type=float, default=8.0, help="whole budget, over all runs")
    args.add_argument("--batch", type=int, default=32)
    args.add_argument("--length", type=int, default=1024)
    args.add_argument("--rate", type=float, default=3e-3)
    args.add_argument("--quantise-from", type=float, default=0.6, help="fraction after which weights are rounded")
    args.add_argument("--seed", type=int, default=0)
    args.add_argument("--resume", action="store_true")
    opt = args.parse_args()

    train = np.fromfile(opt.corpus / "train.bin", np.uint16)
    held = np.fromfile(opt.corpus / "heldout.bin", np.uint16)
    stats = json.loads((opt.corpus / "stats.json").read_text())
    config = tiny_config(int(stats["vocab"]))
    opt.out.mkdir(parents=True, exist_ok=True)
    trained, tables = split_ids(init_params(config, opt.seed))
    optimizer = make_optimizer(opt.rate)
    state = optimizer.init(trained)
    spent, step = 0.0, 0
    if opt.resume:
        trained = load_state(opt.out, trained, "params", np.float32)
        mu = load_state(opt.out, trained, "mu", ml_dtypes.bfloat16)
        nu = load_state(opt.out, trained, "nu", ml_dtypes.bfloat16)
        progress = json.loads((opt.out / "progress.json").read_text())
        spent, step = progress["minutes"], progress["step"]
        state = (state[0], optax.ScaleByAdamState(jnp.int32(step), mu, nu), *state[2:])
    print(f"parameters: {sum(x.size for x in jax.tree.leaves(trained)):,}; train tokens: {len(train):,}", flush=True)
    rng = np.random.default_rng(opt.seed + step)
    begin: float | None = None
    seen, window_loss = 0, []
    log = (opt.out / "log.jsonl").open("a" if opt.resume else "w")
    while True:
        now = 0.0 if begin is None else (time.time() - begin) / 60
        fraction = (spent + now) / opt.total_minutes
        if now >= opt.minutes or fraction >= 1:
            break
        starts = rng.integers(0, len(train) - opt.length, opt.batch)
        tokens = np.stack([train[s : s + opt.length] for s in starts]).astype(np.int32)
        quantised = fraction >= opt.quantise_from
        trained, state, report = train_step(
            config, optimizer, np.float32(quantised), trained, tables, state, tokens, np.float32(schedule(fraction))
        )
        step += 1
        if begin is None:
            jax.block_until_ready(report)
            begin = time.time()
            continue
        seen += tokens.size
        window_loss.append(report)
        if step % 50 == 0:
            means = {k: float(np.mean([float(r[k]) for r in window_loss])) for k in report}
            window_loss = []
            row = {"step": step, "minutes": spent + now, **means}
            if step % 500 == 0:
                result = held_out(config, join(trained, tables), held, opt.length, quantised)
                row |= {f"held_{k}": v for k, v in result.items()}
                speed = seen / max((time.time() - begin), 1e-9)
                print(" ".join(f"{k}={v:.4g}" for k, v in row.items()), f"tokens/s={speed:,.0f}", flush=True)
            log.write(json.dumps(row) + "\n")
            log.flush()
    spent += now
    params = join(trained, tables)
    for quantised in (False, True):
        print(
            "held-out",
            "rounded weights:" if quantised else "float32 weights:",
            held_out(config, params, held, opt.length, quantised),
            flush=True,
        )
    save_state(opt.out, trained, "params", np.float32)
    adam = state[1]
    save_state(opt.out, adam.mu, "mu", ml_dtypes.bfloat16)
    save_state(opt.out, adam.nu, "nu", ml_dtypes.bfloat16)
    (opt.out / "progress.json").write_text(json.dumps({"minutes": spent, "step": step}))


if __name__ == "__main__":
    main()
