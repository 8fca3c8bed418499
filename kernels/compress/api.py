"""Public function of the compressor: checks, then the implementation."""

import jax
import jax.numpy as jnp

from . import xla

PAGE_TOKENS = 256  # raw tokens of a page; whole windows must fill it


def compress(
    values: jax.Array,
    gates: jax.Array,
    state: jax.Array,
    positions: jax.Array,
    *,
    ratio: int,
    overlap: bool,
    ape: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Pools each window of ``ratio`` tokens into one entry; whole sequence, chunk and single step are the same call.

    Entry w is, channel by channel, ``sum_s softmax_s(gate_s + ape_s) * value_s`` in float32. Without ``overlap`` the
    slots s are the tokens ``ratio * w .. ratio * w + ratio - 1`` and d = W. With it (CSA) d = W / 2 and there are
    ``2 * ratio`` slots: the *first* halves ``[0, d)`` of the tokens of window w - 1, then the *second* halves
    ``[d, W)`` of the tokens of window w, so the pooled intermediate is ``[B, windows, 2 * ratio, d]``. Window 0 has no
    previous one: those slots weigh nothing. RMSNorm and rotation (at position ``ratio * w``) are the caller's.

    The result is bitwise the same however a sequence is cut into calls.

    Args:
        values: ``[B, T, W]`` float, projected values of T consecutive tokens a row.
        gates: ``[B, T, W]`` float, raw gates (``ape`` not yet added).
        state: ``[B, ring, 2 * W]`` float32, the last tokens of each row: token p at ``p % ring``, as
            ``[value | raw gate]``. ``ring`` is at least the slots of a window; more keeps tokens that speculation may
            roll back to. A new sequence may start on any content.
        positions: ``[B, T]`` int32. In each row the valid ones come first and are consecutive; -1 is padding, which
            changes nothing.
        ratio: tokens a window; divides 256.
        overlap: whether an entry also pools the previous window.
        ape: ``[ratio, W]`` bias of the gates, row ``p % ratio``.

    Returns:
        Entries ``[B, T // ratio + 1, d]`` float32, entry e of row b being window ``positions[b, 0] // ratio + e``, or
        zeros when that window does not close in this call; and the state after the last valid token.

    Raises:
        TypeError: a dtype other than stated.
        ValueError: a shape or ratio other than stated, as for a state that was saved at another ratio.
    """
    _check(values, gates, state, positions, ratio, overlap, ape)
    return xla.compress(values, gates, state, positions, ratio=ratio, overlap=overlap, ape=ape)


def _check(
    values: jax.Array,
    gates: jax.Array,
    state: jax.Array,
    positions: jax.Array,
    ratio: int,
    overlap: bool,
    ape: jax.Array,
) -> None:
    if ratio < 2 or PAGE_TOKENS % ratio:
        raise ValueError(f"Expected {ratio=} to divide a page of {PAGE_TOKENS} tokens; supported: 2, 4, 8, .. 256")
    for name, array in (("values", values), ("gates", gates), ("ape", ape)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"Expected {name} to be floating point, got {array.dtype}")
    if state.dtype != jnp.float32:
        raise TypeError(f"Expected state to be float32, got {state.dtype}")
    if positions.dtype != jnp.int32:
        raise TypeError(f"Expected positions to be int32, got {positions.dtype}")
    if values.ndim != 3 or gates.shape != values.shape:
        raise ValueError(f"Expected values and gates to be [B, T, W] alike, got {values.shape=}, {gates.shape=}")
    batch, steps, width = values.shape
    if positions.shape != (batch, steps):
        raise ValueError(f"Expected {positions.shape=} to be {(batch, steps)} for {values.shape=}")
    if overlap and width % 2:
        raise ValueError(f"Expected the {width=} of values to be even with {overlap=}")
    if ape.shape != (ratio, width):
        raise ValueError(f"Expected {ape.shape=} to be {(ratio, width)} for {ratio=}, {values.shape=}")
    span = ratio * (2 if overlap else 1)
    if state.ndim != 3 or state.shape[0] != batch or state.shape[1] < span or state.shape[2] != 2 * width:
        raise ValueError(
            f"Expected {state.shape=} to be [{batch}, >= {span}, {2 * width}] for {ratio=}, {overlap=} and "
            f"{values.shape=}; a state saved at another ratio cannot be used"
        )
