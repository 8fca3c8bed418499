"""Measures the bundled model on the held-out text, and draws its loss curve.

    python -m training.measure --corpus runs/corpus [--log runs/tiny/log.jsonl --picture docs/tiny-v4-loss.png]

Prints held-out bits per byte under each cache format beside the byte 5-gram model's, the share of the fixed prompts
whose continuation Python's tokenizer accepts, and the draft block's acceptance; writes them as JSON with ``--json``.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tokenizers import Tokenizer

import jmla
from jmla import bundled
from jmla.models import Model
from training import evaluate
from training.tokenizer import token_bytes


def losses(model: Model, tokens: np.ndarray, spans: list[tuple[int, int, int]], batch: int = 4) -> tuple[Any, Any]:
    """-ln P of each span's counted targets, and those targets; spans as ``evaluate.windows`` yields them."""
    width = max(stop - start for start, stop, _ in spans) - 1
    nats, targets = [], []
    for at in range(0, len(spans), batch):
        part = spans[at : at + batch]
        ids = np.zeros((batch, width), np.int32)
        lengths = np.zeros(batch, np.int32)
        for row, (start, stop, _) in enumerate(part):
            lengths[row] = stop - 1 - start
            ids[row, : lengths[row]] = tokens[start : stop - 1]
        cache = jmla.init_cache(model, batch, width)
        logits, _ = jmla.prefill(model, ids, lengths, cache, all_logits=True)
        log_probs = np.asarray(jax.nn.log_softmax(logits, axis=-1))
        for row, (start, stop, first) in enumerate(part):
            wanted = tokens[first:stop].astype(np.int64)
            nats.append(-log_probs[row, np.arange(first - 1 - start, stop - 1 - start), wanted])
            targets.append(wanted)
    return np.concatenate(nats), np.concatenate(targets)


def draft_acceptance(model: Model, tokens: np.ndarray, starts: list[int], length: int = 512) -> float:
    """Share of held-out positions where the draft block's first choice is the trunk's own next choice."""
    hits = []
    for start in starts:
        ids = tokens[start : start + length + 1].astype(np.int32)[None]
        cache = jmla.init_cache(model, 1, length)
        logits, hidden, cache = jmla.prefill(model, ids[:, :-1], [length], cache, all_logits=True, return_hidden=True)
        drafted, _, cache = jmla.draft(model, hidden, ids[:, 1:], cache)
        hits.append(np.argmax(drafted[0, :-1], -1) == np.argmax(logits[0, 1:], -1))
    return float(np.concatenate(hits).mean())


def draw(log: Path, picture: Path) -> None:
    """The loss curve as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [json.loads(line) for line in log.read_text().splitlines()]
    held = [row for row in rows if "held_loss" in row]
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    axes[0].plot([r["step"] for r in rows], [r["loss"] for r in rows], lw=0.8, label="train")
    axes[0].plot([r["step"] for r in held], [r["held_loss"] for r in held], "o-", ms=3, label="held out")
    axes[0].plot([r["step"] for r in rows], [r["draft"] for r in rows], lw=0.8, label="draft block, train")
    axes[0].set(xlabel="step", ylabel="loss, nats a token", ylim=(1, 3))
    axes[0].legend()
    axes[1].plot([r["step"] for r in rows], [r["index"] for r in rows], lw=0.8)
    axes[1].set(xlabel="step", ylabel="index loss, nats")
    figure.savefig(picture, dpi=90)


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--corpus", type=Path, required=True)
    args.add_argument("--model", default="jmla-tiny-v4")
    args.add_argument("--plain", type=Path, help="the same weights before quantisation (training.export --plain)")
    args.add_argument("--every", type=int, default=1, help="count only every n-th window")
    args.add_argument("--log", type=Path)
    args.add_argument("--picture", type=Path)
    args.add_argument("--json", type=Path)
    opt = args.parse_args()
    if opt.log and opt.picture:
        draw(opt.log, opt.picture)
    tokens = np.fromfile(opt.corpus / "heldout.bin", np.uint16)
    ngram = json.loads((opt.corpus / "ngram.json").read_text())
    out: dict[str, Any] = {"five_gram_bits_per_byte": ngram, "every": opt.every}
    spans = list(evaluate.windows(len(tokens), 1024, 512))[:: opt.every]
    runs = [("footer584", opt.model), ("bfloat16", opt.model)]
    if opt.plain:
        runs.append(("bfloat16", opt.plain))
    for layout, path in runs:
        model = jmla.load(path, dtype="float32", kv_layout=layout)
        sizes = token_bytes(Tokenizer.from_file(str(bundled.path() / "tokenizer.json")))
        nats, targets = losses(model, tokens, spans)
        name = f"{layout} cache" + (", weights before quantisation" if path != opt.model else "")
        out[name] = {
            "bits_per_byte": evaluate.bits_per_byte(nats, targets, sizes),
            "nats_per_token": float(nats.mean()),
            "targets": len(targets),
        }
        print(name, out[name], flush=True)
    model = jmla.load(opt.model)
    prompts = evaluate.prompts()
    done = jmla.generate(model, prompts, max_new_tokens=evaluate.CONTINUATION_TOKENS)
    out["acceptance"] = evaluate.acceptance([p + c.text for p, c in zip(prompts, done, strict=True)])
    out["draft_acceptance"] = draft_acceptance(model, tokens, list(range(0, 200_000, 20_000)))
    print(json.dumps(out, indent=2))
    if opt.json:
        opt.json.write_text(json.dumps(out, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
