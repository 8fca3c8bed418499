"""Make or check the golden files with transformers: `python generate.py [--check] [--search N] [case ...]`.

Needs the packages of README.md (torch, transformers, accelerate, safetensors), not JAX. The models run in float32 on
the CPU with the eager attention and expert code.
"""

import argparse
import dataclasses
import json
import math
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v4 import modeling_deepseek_v4
from transformers.models.deepseek_v32 import modeling_deepseek_v32
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from golden import weights as golden_weights  # noqa: E402
from golden.configs import CASES, CHAIN, GREEDY, Case  # noqa: E402

MODELING = {
    "deepseek_v4": modeling_deepseek_v4,
    "deepseek_v32": modeling_deepseek_v32,
    "glm_moe_dsa": modeling_glm_moe_dsa,
}


# ---- what a run decides: index sets, experts, and how close each decision was


class Recorder:
    """Hooks on the indexers and routers of a module.

    selected: layer -> [T, k] indices, -1 where the pick is not visible to the query.
    margins: "index" and "route" -> smallest difference between the last score chosen and the best one refused.
    """

    def __init__(self, module: torch.nn.Module, config: dict[str, Any], first_position: int = 0):
        self.config, self.start = config, first_position
        self.selected: dict[int, np.ndarray] = {}
        self.margins = {"index": math.inf, "route": math.inf}
        self.scores: torch.Tensor | None = None
        self.hooks = []
        for name, part in module.named_modules():
            kind = type(part).__name__
            if kind.endswith("Indexer"):
                layer = next((int(piece) for piece in name.split(".") if piece.isdigit()), -1)
                self.hooks += [part.register_forward_pre_hook(self._open)]
                self.hooks += [part.register_forward_hook(lambda m, a, out, n=layer: self._close(n, out))]
            elif kind.lower().endswith("topkrouter"):
                self.hooks += [part.register_forward_hook(lambda m, a, out: self._route(out[0], m))]

    def _open(self, module, args) -> None:
        self.topk = torch.Tensor.topk

        def topk(scores, k, dim=-1, **rest):
            self.scores = scores
            return self.topk(scores, k, dim=dim, **rest)

        torch.Tensor.topk = topk

    def _close(self, layer: int, picked: torch.Tensor) -> None:
        torch.Tensor.topk = self.topk
        scores, picked = self.scores[0], picked[0].long()
        rows = torch.arange(picked.shape[0]) + self.start
        ratio = 4 if self.config["model_type"] == "deepseek_v4" else 1
        picked = torch.where((picked >= 0) & (picked < ((rows + 1) // ratio)[:, None]), picked, -1)
        order = picked.masked_fill(picked < 0, 2**30).sort(-1).values
        self.selected[layer] = order.masked_fill(order == 2**30, -1).numpy().astype(np.int16)
        chosen = torch.zeros(scores.shape[0], scores.shape[1] + 1, dtype=torch.bool)
        chosen.scatter_(1, torch.where(picked < 0, scores.shape[1], picked), True)
        visible = torch.arange(scores.shape[1])[None] < ((rows + 1) // ratio)[:, None]
        chosen = chosen[:, :-1]
        worst = scores.masked_fill(~chosen, math.inf).amin(-1)
        refused = scores.masked_fill(chosen | ~visible, -math.inf).amax(-1)
        self._margin("index", worst - refused)

    def _route(self, logits: torch.Tensor, router: torch.nn.Module) -> None:
        v4 = self.config["model_type"] == "deepseek_v4"
        scores = F.softplus(logits).sqrt() if v4 else logits.sigmoid()
        scores = scores + router.e_score_correction_bias
        groups, kept = (1, 1) if v4 else (self.config["n_group"], self.config["topk_group"])
        if kept < groups:
            grouped = scores.view(scores.shape[0], groups, -1)
            best = grouped.topk(2).values.sum(-1).sort(descending=True)
            self._margin("route", best.values[:, kept - 1] - best.values[:, kept])
            keep = torch.zeros_like(best.values, dtype=torch.bool).scatter_(1, best.indices[:, :kept], True)
            scores = grouped.masked_fill(~keep[..., None], -math.inf).flatten(1)
        best = scores.sort(descending=True).values
        count = self.config["num_experts_per_tok"]
        self._margin("route", best[:, count - 1] - best[:, count])

    def _margin(self, kind: str, values: torch.Tensor) -> None:
        self.margins[kind] = min(self.margins[kind], float(values.min()))

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()


@contextmanager
def recorded(module: torch.nn.Module, config: dict[str, Any], first_position: int = 0) -> Iterator[Recorder]:
    recorder = Recorder(module, config, first_position)
    try:
        yield recorder
    finally:
        recorder.close()


# ---- the draft block: transformers has none, so its decoder layer is composed with the published formulas


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


class DraftBlock:
    """The multi-token-prediction block: one decoder layer behind a projection of (hidden state, next token)."""

    def __init__(self, case: Case, model: torch.nn.Module, tensors: dict[str, torch.Tensor]):
        self.case, self.model, self.dtype = case, model, next(model.parameters()).dtype
        c, index = case.config, case.config["num_hidden_layers"]
        self.v4 = c["model_type"] == "deepseek_v4"
        prefix = "mtp.0." if self.v4 else f"model.layers.{index}."
        self.own = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        config = type(model.config)(**self._longer(c, index))
        config._attn_implementation = "eager"
        config._experts_implementation = "eager"
        modeling = MODELING[c["model_type"]]
        family = {"deepseek_v4": "DeepseekV4", "deepseek_v32": "DeepseekV32", "glm_moe_dsa": "GlmMoeDsa"}
        self.layer = getattr(modeling, family[c["model_type"]] + "DecoderLayer")(config, index)
        self.layer.load_state_dict(self._layer_state(), strict=True)
        self.layer.to(self.dtype).eval()

    @staticmethod
    def _longer(c: dict[str, Any], index: int) -> dict[str, Any]:
        """The config with the draft layer as a further trunk layer: sliding attention and routed, or full indexer."""
        longer = json.loads(json.dumps(c)) | {"num_hidden_layers": index + 1}
        if c["model_type"] == "glm_moe_dsa":
            longer["indexer_types"] = [*golden_weights.indexer_kinds(c), "full"]
        return longer

    def _layer_state(self) -> dict[str, torch.Tensor]:
        outside = ("e_proj", "h_proj", "eh_proj", "enorm", "hnorm", "norm", "shared_head", "hc_head")
        state = {k: v for k, v in self.own.items() if not k.startswith(outside)}
        renames = {
            "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
            "hc_attn_": "attn_hc.", "hc_ffn_": "ffn_hc.",
            "attn.attn_sink": "self_attn.sinks", "attn.wq_a": "self_attn.q_a_proj", "attn.q_norm": "self_attn.q_a_norm",
            "attn.wq_b": "self_attn.q_b_proj", "attn.wkv": "self_attn.kv_proj", "attn.kv_norm": "self_attn.kv_norm",
            "attn.wo_a": "self_attn.o_a_proj", "attn.wo_b": "self_attn.o_b_proj",
            "ffn.gate.bias": "mlp.gate.e_score_correction_bias", "ffn.gate.weight": "mlp.gate.weight",
            "ffn.shared_experts.w1": "mlp.shared_experts.gate_proj",
            "ffn.shared_experts.w3": "mlp.shared_experts.up_proj",
            "ffn.shared_experts.w2": "mlp.shared_experts.down_proj",
        }  # fmt: skip
        count, moe = self.case.config["n_routed_experts"], "ffn" if self.v4 else "mlp"
        gate, up, down = ("w1", "w3", "w2") if self.v4 else ("gate_proj", "up_proj", "down_proj")
        experts = [[state.pop(f"{moe}.experts.{e}.{part}.weight") for part in (gate, up, down)] for e in range(count)]
        if self.v4:
            for old, new in renames.items():
                state = {new + k.removeprefix(old) if k.startswith(old) else k: v for k, v in state.items()}
        state["mlp.experts.gate_up_proj"] = torch.stack([torch.cat(each[:2]) for each in experts])
        state["mlp.experts.down_proj"] = torch.stack([each[2] for each in experts])
        return state

    def __call__(self, hidden: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [T, vocab] and next hidden states for hidden [T, ...] and the tokens [T] that follow them."""
        c, own, eps = self.case.config, self.own, self.case.config["rms_norm_eps"]
        count = tokens.shape[0]
        embedded = rms_norm(self.model.get_input_embeddings().weight[tokens], own["enorm.weight"], eps)
        positions = torch.arange(count)
        rotary, rope_input = self.model.model.rotary_emb, torch.zeros(1, count, 1, dtype=self.dtype)
        normed = rms_norm(hidden, own["hnorm.weight"], eps)
        distance = positions[:, None] - positions[None]
        seen = (distance >= 0) & (distance < c["sliding_window"] if self.v4 else True)
        mask = torch.zeros(count, count, dtype=self.dtype).masked_fill(~seen, torch.finfo(torch.float32).min)
        common = {"attention_mask": mask[None, None], "position_ids": positions[None]}
        if self.v4:
            inputs = (embedded @ own["e_proj.weight"].T)[:, None] + normed @ own["h_proj.weight"].T
            tables = {"main": rotary(rope_input, position_ids=positions[None], layer_type="main")}
            out = self.layer(inputs[None], input_ids=tokens[None], position_embeddings=tables, **common)[0]
            flat = out.flatten(1)
            mixes = (flat @ own["hc_head_fn"].T) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)
            pre = torch.sigmoid(mixes * own["hc_head_scale"] + own["hc_head_base"]) + c["hc_eps"]
            normed_out, following = rms_norm((pre[..., None] * out).sum(1), own["norm.weight"], eps), out
        else:
            inputs = torch.cat([embedded, normed], dim=-1) @ own["eh_proj.weight"].T
            tables = rotary(rope_input, position_ids=positions[None])
            out = self.layer(inputs[None], position_embeddings=tables, **common)
            out = (out[0] if isinstance(out, tuple) else out)[0]
            normed_out = rms_norm(out, own["shared_head.norm.weight"], eps)
            following = normed_out if c["model_type"] == "glm_moe_dsa" else out
        return normed_out @ self.model.lm_head.weight.T, following

    def chain(self, hidden: torch.Tensor, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Drafts for the whole prompt, then CHAIN further steps that feed on their own states and greedy tokens."""
        states, ids, steps = hidden, tokens, []
        for step in range(CHAIN + 1):
            logits, following = self(states, ids)
            if step == 0:
                first, first_hidden = logits, following
            else:
                steps.append(logits[-1])
            if step < CHAIN:
                ids = torch.cat([ids, logits[-1:].argmax(-1)])
                states = torch.cat([states, following[-1:]])
        drafted = ids[tokens.shape[0] :]
        return {"logits": first, "hidden": first_hidden, "tokens": drafted, "chain": torch.stack(steps)}


# ---- one case


def load(case: Case, drawn: golden_weights.Weights, folder: Path) -> torch.nn.Module:
    """The trunk as transformers reads it from a checkpoint of the original dialect."""
    golden_weights.write_checkpoint(folder, case.config, drawn)
    model, info = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    problems = {key: info[key] for key in ("missing_keys", "mismatched_keys") if info[key]}
    drafts = ("mtp.", f"model.layers.{case.config['num_hidden_layers']}.")
    if extra := [key for key in info["unexpected_keys"] if not key.startswith(drafts)]:
        problems["unexpected_keys"] = extra
    if problems:
        raise RuntimeError(f"transformers did not read the checkpoint cleanly: {problems}")
    return model.eval()


@torch.no_grad()
def trunk(model: torch.nn.Module, case: Case, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Recorder]:
    """One uncached forward: logits [T, vocab], the states the draft block reads, and the decisions taken."""
    kept: list[torch.Tensor] = []
    v4 = case.config["model_type"] == "deepseek_v4"
    source = model.model.layers[-1] if v4 else model.model.norm
    hook = source.register_forward_hook(lambda m, a, out: kept.append(out))
    with recorded(model, case.config) as recorder:
        logits = model(tokens[None], use_cache=False).logits[0]
    hook.remove()
    return logits, kept[0][0], recorder


@torch.no_grad()
def greedy(model: torch.nn.Module, prompt: torch.Tensor, case: Case) -> tuple[torch.Tensor, torch.Tensor, list]:
    """GREEDY tokens with the cache of transformers, the logits they came from, and the index sets on the way."""
    out = model(prompt[None], use_cache=True)
    tokens, logits, selected = [], [out.logits[0]], []
    for step in range(GREEDY):
        tokens.append(logits[-1][-1].argmax())
        with recorded(model, case.config, prompt.shape[0] + step) as recorder:
            out = model(tokens[-1].view(1, 1), cache=out.cache, use_cache=True)
        selected.append(recorder.selected)
        logits.append(out.logits[0])
    return torch.stack(tokens), torch.cat(logits), selected


class _DoubleTorch:
    """The torch module with float64 in the place of float32."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def double_precision(modeling: Any) -> Iterator[None]:
    """Turn the explicit float32 casts of a modelling module into float64."""
    cast, module = torch.Tensor.float, modeling.torch
    torch.Tensor.float, modeling.torch = torch.Tensor.double, _DoubleTorch()
    try:
        yield
    finally:
        torch.Tensor.float, modeling.torch = cast, module


def smallest_gap(logits: torch.Tensor) -> float:
    best = logits.topk(2).values
    return float((best[:, 0] - best[:, 1]).min())


@torch.no_grad()
def run(case: Case, precise: bool = True) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """The golden arrays of a case and the numbers that say how much they can be trusted."""
    c, drawn = case.config, golden_weights.make(case.config, case.seed)
    tensors = {name: torch.from_numpy(array) for name, array in drawn.items()}
    prompt = torch.from_numpy(golden_weights.prompt(c, case.seed, case.prompt).astype(np.int64))
    with tempfile.TemporaryDirectory() as folder:
        model = load(case, drawn, Path(folder))
    tokens, cached_logits, cached_selected = greedy(model, prompt, case)
    sequence = torch.cat([prompt, tokens])
    logits, hidden, recorder = trunk(model, case, sequence)
    path = logits[case.prompt - 1 : -1]
    if not torch.equal(path.argmax(-1), tokens):
        raise RuntimeError("cached and recomputed greedy tokens differ")
    for step, chosen in enumerate(cached_selected):
        for layer, picks in chosen.items():
            row = recorder.selected[layer][case.prompt + step]
            if not np.array_equal(row[row >= 0], picks[0][picks[0] >= 0]):
                raise RuntimeError(f"cached and recomputed index sets differ: {layer=}, {step=}")
    draft_block = DraftBlock(case, model, tensors)
    following = sequence[1 : case.prompt + 1]
    with recorded(draft_block.layer, c) as draft_recorder:
        draft = draft_block.chain(hidden[: case.prompt], following)
    margins = {kind: min(recorder.margins[kind], draft_recorder.margins[kind]) for kind in ("index", "route")}
    report = {
        "logits_std": float(logits.std()),
        "draft_std": float(draft["logits"].std()),
        "cached_minus_whole": float((cached_logits - logits).abs().max()),
        "greedy_gap": smallest_gap(path),
        "chain_gap": smallest_gap(torch.cat([draft["logits"][-1:], draft["chain"]])),
        "index_margin": margins["index"],
        "route_margin": margins["route"],
    }
    if precise:
        model.double()
        with double_precision(MODELING[c["model_type"]]):
            exact, exact_hidden, _ = trunk(model, case, sequence)
            block = DraftBlock(case, model, {name: t.double() for name, t in tensors.items() if t.is_floating_point()})
            exact_draft = block.chain(exact_hidden[: case.prompt], following)
        report["float64_error"] = float((logits - exact).abs().max())
        report["float64_draft_error"] = float((draft["chain"] - exact_draft["chain"]).abs().max())
    at, draft_at = list(case.logits_at), list(case.draft_at)
    arrays = {
        "config": np.array(json.dumps(c, sort_keys=True)),
        "seed": np.array(case.seed),
        "weights_sha256": np.array(golden_weights.digest(drawn)),
        "prompt": prompt.numpy().astype(np.int32),
        "greedy": tokens.numpy().astype(np.int32),
        "logits_at": np.array(at, np.int32),
        "logits": logits[at].numpy(),
        "draft_at": np.array(draft_at, np.int32),
        "draft_logits": draft["logits"][draft_at].numpy(),
        "draft_hidden": draft["hidden"][-1].numpy(),
        "chain_tokens": draft["tokens"].numpy().astype(np.int32),
        "chain_logits": draft["chain"].numpy(),
        **{f"selected_{layer}": picks for layer, picks in sorted(recorder.selected.items())},
        **{f"report_{name}": np.array(value) for name, value in report.items()},
    }
    return arrays, report


def check(name: str, arrays: dict[str, np.ndarray]) -> None:
    """Compare a fresh run with the stored file: integers and text equal, floats within 1e-5."""
    with np.load(HERE / f"{name}.npz") as stored:
        if set(stored.files) != set(arrays):
            raise SystemExit(f"{name}: other contents: {sorted(set(stored.files) ^ set(arrays))}")
        for key, array in arrays.items():
            if key.startswith("report_"):
                continue
            same = np.allclose(stored[key], array, 0, 1e-5) if array.dtype.kind == "f" else (stored[key] == array).all()
            if not same:
                raise SystemExit(f"{name}: {key} differs from the stored file")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help=f"default: all of {', '.join(CASES)}")
    parser.add_argument("--check", action="store_true", help="compare with the stored files instead of writing")
    parser.add_argument("--search", type=int, default=0, help="only print the margins of this many seeds")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    transformers.logging.set_verbosity_error()  # it lists the draft block's tensors, which it has no place for
    transformers.logging.disable_progress_bar()
    for name in options.cases or CASES:
        case = CASES[name]
        if options.search:
            for seed in range(1, options.search + 1):
                try:
                    _, report = run(dataclasses.replace(case, seed=seed), precise=False)
                    print(name, seed, *(f"{key}={value:.2e}" for key, value in report.items()), flush=True)
                except RuntimeError as error:  # a tie that rounding decides: not a seed to take
                    print(name, seed, error, flush=True)
            continue
        arrays, report = run(case)
        if options.check:
            check(name, arrays)
        else:
            np.savez_compressed(HERE / f"{name}.npz", **arrays)
        print(name, "checked" if options.check else "written", *(f"{k}={v:.3g}" for k, v in report.items()), flush=True)


if __name__ == "__main__":
    main()
