"""What a checkpoint directory holds for text: tokenizer and generation defaults."""

from dataclasses import dataclass, field
from pathlib import Path

from jmla.models.config import ConfigError, read_generation_config
from jmla.models.config.common import INT32_MAX
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

    tokenizer: Tokenizer | None = None
    defaults: SamplingParams = field(default_factory=SamplingParams)
    end_token_ids: tuple[int, ...] | None = None


def read_text_support(path: Path, vocab_size: int = INT32_MAX) -> TextSupport:
    """Reads tokenizer.json and generation_config.json of a checkpoint directory, both optional.

    End tokens must be below ``vocab_size``. ``do_sample: false`` means greedy, whatever temperature stands beside it.

    Raises:
        ValueError: a file that cannot be read, or a value out of range.
    """
    given = read_generation_config(path, vocab_size)
    temperature = given.temperature
    if given.do_sample is not None:
        temperature = (1.0 if temperature is None else temperature) if given.do_sample else 0.0
    try:
        defaults = SamplingParams(
            temperature=temperature,
            top_k=given.top_k,
            top_p=given.top_p,
            min_p=given.min_p,
            repetition_penalty=given.repetition_penalty,
            max_new_tokens=given.max_new_tokens,
        )
    except ValueError as error:
        raise ConfigError(f"{path / 'generation_config.json'}: {error}") from error
    return TextSupport(Tokenizer.find(path), defaults, given.eos_token_id or None)
