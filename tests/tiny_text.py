"""A small byte-level BPE tokenizer for tests, trained in place."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

BOS, EOS = "<|begin|>", "<|end|>"  # ids 0 and 1
SAMPLE = ["the quick brown fox jumps over the lazy dog, and the dog sleeps on"] * 4


def write_tokenizer(path: Path, vocab_size: int = 300, *, every_byte: bool = True, add_bos: bool | None = None) -> Path:
    """Writes tokenizer.json (all 256 bytes, or the sample's only; BOS, EOS and some merges) into ``path``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if every_byte else [],
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLE, trainer)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    if add_bos is not None:
        settings = {"add_bos_token": add_bos, "bos_token": {"content": BOS}}
        (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path
