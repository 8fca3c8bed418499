"""What goes into a model: prompts and options, checked on the host before anything runs."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jmla.batching import bucket
from jmla.models import Model
from jmla.models.config.common import shown
from jmla.models.spec import check_model
from jmla.sampling import DEFAULT_MAX_NEW_TOKENS, DEFAULTS, SamplingParams
from jmla.tokenizer import Tokenizer
from jmla.values import as_integer, check_text, check_token_ids, is_list


def as_model(model_or_path: Any) -> Model:
    """A model, or what ``jmla.load`` takes, loaded."""
    if isinstance(model_or_path, str | os.PathLike):
        from jmla.loading import load

        return load(model_or_path)
    return check_model(model_or_path)


def tokenizer_of(model: Model) -> Tokenizer | None:
    """The checkpoint's tokenizer; None if it has none."""
    return model.text.tokenizer if model.text is not None else None


def split_prompts(prompts: Any) -> tuple[list[Any], bool]:
    """The prompts as a list, and whether the caller gave one alone."""
    if isinstance(prompts, str):
        return [prompts], True
    if not is_list(prompts):
        raise TypeError(f"Expected prompts={shown(prompts)} to be a string, token ids, or a list of those")
    if isinstance(prompts, np.ndarray | jax.Array):
        if prompts.ndim > 2:
            raise ValueError(f"Expected prompts as an array to have one or two axes, got shape {prompts.shape}")
        prompts = np.asanyarray(prompts)  # masked values stay masked, and are refused
        if prompts.ndim == 1:
            return [prompts], True
    items = list(prompts)
    if not items:
        raise ValueError("Expected at least one prompt, got none")
    if not any(isinstance(item, str) or is_list(item) for item in items) and as_integer(items[0]) is not None:
        return [items], True
    return items, False


def encode(model: Model, index: int, prompt: Any) -> np.ndarray:
    name = f"prompt {index}"
    if isinstance(prompt, str):
        tokenizer = tokenizer_of(model)
        if tokenizer is None:
            raise ValueError(f"Expected {name} to be token ids: this checkpoint has no tokenizer.json to encode text")
        prompt = tokenizer.encode(check_text(name, prompt))
        if not prompt:
            raise ValueError(f"Expected {name} to hold at least one token, got an empty prompt")
    elif not is_list(prompt):
        raise TypeError(f"Expected {name} to be a string or token ids, got {shown(prompt)}")
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


def end_token_array(ends: Sequence[int]) -> np.ndarray:
    """The ids that end a completion, behind which -1 stands, so that few lengths are compiled."""
    ids = np.full(bucket(len(ends) or 1, 8), -1, np.int32)
    ids[: len(ends)] = ends
    return ids


def split_sampling(given: Any, count: int) -> list[SamplingParams | None]:
    """What the caller says on sampling for each of ``count`` prompts."""
    rows = list(given) if is_list(given) else [given] * count
    for row in rows:
        if row is not None and not isinstance(row, SamplingParams):
            raise TypeError(
                f"Expected sampling to be jmla.SamplingParams, or a list of one for each prompt, got {shown(row)}"
            )
    if len(rows) != count:
        raise ValueError(f"Expected one SamplingParams, or one for each of the {count} prompts, got {len(rows)}")
    return rows


def check_choices(full: SamplingParams) -> None:
    """Refuses complete options that ask for several completions which could not differ, or for more than are drawn."""
    if full.best_of is not None and full.best_of < (full.n or 1):
        raise ValueError(f"Expected best_of={full.best_of} to be at least n={full.n}")
    if full.draws > 1 and full.temperature == 0:
        raise ValueError(
            f"Expected temperature above 0 with n={full.n} and best_of={full.best_of}: greedy completions are all equal"
        )


def complete_params(
    model: Model, given: Any, count: int, lengths: Sequence[int], max_new_tokens: int | None, stop: Any
) -> list[SamplingParams]:
    """One complete ``SamplingParams`` a prompt, checked against the model's context and vocabulary."""
    rows = split_sampling(given, count)
    explicit = SamplingParams(max_new_tokens=max_new_tokens, stop=stop)
    limit, result = model.spec.max_seq_len, []
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
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
        check_choices(full)
        for item in full.stop:
            if not isinstance(item, str):
                check_token_ids(f"stop item {shown(list(item))}", item, model.spec.config.vocab_size)
            elif tokenizer_of(model) is None:
                raise ValueError(
                    "Expected stop to be token id lists: this checkpoint has no tokenizer for stop strings"
                )
        result.append(full)
    return result
