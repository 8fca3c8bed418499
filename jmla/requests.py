"""What goes into a model: prompts and options, checked on the host before anything runs."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jmla.models import Model
from jmla.sampling import DEFAULT_MAX_NEW_TOKENS, DEFAULTS, SamplingParams


def check_token_ids(name: str, ids: Any, vocab_size: int) -> np.ndarray:
    """Checks token ids on the host, before anything is cut to int32 or used as an index.

    Raises:
        TypeError: not integers.
        ValueError: empty, not one-dimensional, or outside ``0..vocab_size - 1``.
    """
    array = np.asarray(ids)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"Expected {name} to hold at least one token in one dimension, got shape {array.shape}")
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"Expected {name} to hold integer token ids, got {array.dtype}")
    bad = np.flatnonzero((array < 0) | (array >= vocab_size))
    if bad.size:
        raise ValueError(
            f"Expected {name} to hold token ids in 0..{vocab_size - 1}, got {array[bad[0]]} at position {bad[0]}"
        )
    return array.astype(np.int32)


def split_prompts(prompts: Any) -> tuple[list[Any], bool]:
    """The prompts as a list, and whether the caller gave one alone."""
    if isinstance(prompts, str):
        return [prompts], True
    if isinstance(prompts, np.ndarray | jax.Array):
        if prompts.ndim not in (1, 2):
            raise ValueError(f"Expected prompts as an array to have one or two axes, got shape {prompts.shape}")
        array = np.asarray(prompts)
        return (list(array), False) if array.ndim == 2 else ([array], True)
    if not isinstance(prompts, Iterable):
        raise TypeError(f"Expected {prompts=} to be a string, token ids, or a list of those")
    items = list(prompts)
    if not items:
        raise ValueError("Expected at least one prompt, got an empty list")
    if all(isinstance(item, int | np.integer) and not isinstance(item, bool) for item in items):
        return [items], True
    return items, False


def encode(model: Model, index: int, prompt: Any) -> np.ndarray:
    name = f"prompt {index}"
    if isinstance(prompt, str):
        tokenizer = model.text.tokenizer if model.text is not None else None
        if tokenizer is None:
            raise ValueError(f"Expected {name} to be token ids: this checkpoint has no tokenizer.json to encode text")
        prompt = tokenizer.encode(prompt)
        if not prompt:
            raise ValueError(f"Expected {name} to hold at least one token, got an empty prompt")
    elif not isinstance(prompt, Sequence | np.ndarray | jax.Array):
        raise TypeError(f"Expected {name} to be a string or token ids, got {type(prompt).__name__}")
    elif len(prompt) and isinstance(prompt[0], str):
        raise TypeError(f"Expected {name} to be a string or token ids, got a list of strings")
    return check_token_ids(name, prompt, model.spec.config.vocab_size)


def default_params(model: Model) -> SamplingParams:
    """What the checkpoint's generation_config.json says, completed with the library's defaults."""
    given = model.text.defaults if model.text is not None else SamplingParams()
    return given.over(DEFAULTS)


def end_token_ids(model: Model) -> tuple[int, ...]:
    """The tokens that end a completion: generation_config.json's, else config.json's."""
    if model.text is not None and model.text.end_token_ids is not None:
        return model.text.end_token_ids
    return tuple(model.spec.config.eos_token_id)


def complete_params(
    model: Model, given: Any, count: int, lengths: Sequence[int], max_new_tokens: int | None, stop: Any
) -> list[SamplingParams]:
    """One complete ``SamplingParams`` a prompt, its token limit checked against the context."""
    rows = [given] * count if given is None or isinstance(given, SamplingParams) else list(given)
    if len(rows) != count:
        raise ValueError(f"Expected one SamplingParams, or one for each of the {count} prompts, got {len(rows)}")
    explicit = SamplingParams(max_new_tokens=max_new_tokens, stop=stop)
    limit, result = model.spec.max_seq_len, []
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if row is not None and not isinstance(row, SamplingParams):
            raise TypeError(f"Expected sampling to be jmla.SamplingParams, got {type(row).__name__}")
        if length >= limit:
            raise ValueError(
                f"Expected prompt {index} to leave room for a token: it has {length} tokens, and max_seq_len is {limit}"
            )
        asked = explicit.over(row if row is not None else SamplingParams())
        full = asked.over(default_params(model))
        if asked.max_new_tokens is None:
            wanted = full.max_new_tokens or DEFAULT_MAX_NEW_TOKENS
            full = replace(full, max_new_tokens=min(wanted, limit - length))
        elif length + asked.max_new_tokens > limit:
            raise ValueError(
                f"Expected prompt {index} of {length} tokens and max_new_tokens={asked.max_new_tokens} to fit "
                f"max_seq_len={limit}, got {length + asked.max_new_tokens} together"
            )
        if any(isinstance(s, str) for s in full.stop) and (model.text is None or model.text.tokenizer is None):
            raise ValueError("Expected stop to be token id lists: this checkpoint has no tokenizer for stop strings")
        result.append(full)
    return result
