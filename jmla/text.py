"""What a checkpoint directory holds for text: tokenizer and generation defaults."""

import json
from dataclasses import dataclass
from pathlib import Path

from jmla.sampling import SamplingParams
from jmla.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class TextSupport:
    """What a checkpoint adds to its weights for text; a static part of ``Model``, compared by identity.

    Attributes:
        tokenizer: None if the checkpoint has none.
        defaults: what generation_config.json sets.
        end_token_ids: what generation_config.json gives as end tokens; None leaves it to config.json.
    """

    tokenizer: Tokenizer | None
    defaults: SamplingParams
    end_token_ids: tuple[int, ...] | None


def read_text_support(path: Path) -> TextSupport:
    """Reads tokenizer.json and generation_config.json of a checkpoint directory, both optional.

    ``do_sample: false`` means greedy, whatever temperature stands beside it.

    Raises:
        ValueError: a file that cannot be read, or a value out of range; the message names the file.
    """
    tokenizer, file = Tokenizer.find(path), path / "generation_config.json"
    if not file.is_file():
        return TextSupport(tokenizer, SamplingParams(), None)
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(given, dict):
            raise ValueError("not an object")
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")
        values = {name: given[name] for name in names if given.get(name) is not None}
        if given.get("do_sample") is False:
            values["temperature"] = 0.0
        elif given.get("do_sample"):
            values.setdefault("temperature", 1.0)
        ends = given.get("eos_token_id")
        if isinstance(ends, int):
            ends = [ends]
        if ends is not None and not (isinstance(ends, list) and all(isinstance(e, int) and e >= 0 for e in ends)):
            raise ValueError(f"Expected eos_token_id={ends!r} to be a token id or a list of token ids")
        return TextSupport(tokenizer, SamplingParams(**values), None if ends is None else tuple(ends))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
