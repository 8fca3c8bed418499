"""Writes the trained model as the bundled checkpoint, in the dialect and number formats in which V4 is published.

python -m training.export --run runs/tiny --corpus runs/corpus --out jmla/data/jmla-tiny-v4
"""

import argparse
import json
import shutil
from pathlib import Path

import jax
import numpy as np

from jmla.models.checkpoint import collect_tensors, save_checkpoint
from training.train import init_params, join, load_state, split_ids, tiny_config

LIMIT = 5 << 20  # bytes of the whole directory


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--run", type=Path, required=True)
    args.add_argument("--corpus", type=Path, required=True)
    args.add_argument("--out", type=Path, required=True)
    args.add_argument("--seed", type=int, default=0, help="of the training, which drew the hash layers' expert tables")
    args.add_argument("--plain", action="store_true", help="write BF16 where V4 has FP8 and FP4")
    opt = args.parse_args()
    config = tiny_config(int(json.loads((opt.corpus / "stats.json").read_text())["vocab"]))
    trained, tables = split_ids(init_params(config, opt.seed))
    params = join(load_state(opt.run, trained, "params", np.float32), tables)
    tensors = collect_tensors(config, jax.tree.map(np.asarray, params))
    save_checkpoint(opt.out, config, tensors, quantised=not opt.plain)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(opt.corpus / name, opt.out / name)
    defaults = {"bos_token_id": 0, "eos_token_id": 1, "do_sample": False}
    (opt.out / "generation_config.json").write_text(json.dumps(defaults, indent=2) + "\n", encoding="utf-8")
    size = sum(file.stat().st_size for file in opt.out.iterdir())
    print(f"{opt.out}: {size:,} bytes in {len(tensors)} tensors")
    if size > LIMIT and not opt.plain:
        raise SystemExit(f"Expected at most {LIMIT:,} bytes, got {size:,}")


if __name__ == "__main__":
    main()
