"""Public function of the compressor: checks, then the implementation."""

import jax
import jax.numpy as jnp

from .. import dispatch, launch, launch_pallas
from ..checks import check_dtype, check_float, check_shape, check_values, checking, int32_array
from . import plan, xla

PAGE_TOKENS = 256  # raw tokens of a page; whole windows must fill it

launch.register("compress", f"{__package__}.triton")
launch_pallas.register("compress", f"{__package__}.pallas", plan.refuses_pallas)
dispatch.register("compress", "xla", xla.compress)


def compress(
    values: jax.Array,
    gates: jax.Array,
    state: jax.Array,
    positions: jax.Array,
    *,
    ratio: int,
    overlap: bool,
    ape: jax.Array,
    layer: int | jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Pools each window of ``ratio`` tokens into one entry; whole sequence, chunk and single step are the same call.

    Entry w is, channel by channel, ``sum_s softmax_s(gate_s + ape_s) * value_s`` in float32. Without ``overlap`` the
    slots s are the tokens ``ratio * w .. ratio * w + ratio - 1`` and d = W. With it (CSA) d = W / 2 and there are
    ``2 * ratio`` slots: the *first* halves ``[0, d)`` of the tokens of window w - 1, then the *second* halves
    ``[d, W)`` of the tokens of window w, so the pooled intermediate is ``[B, windows, 2 * ratio, d]``. Window 0 has no
    previous one: those slots weigh nothing. RMSNorm and rotation (at position ``ratio * w``) are the caller's.

    By one implementation the result is bitwise the same however a sequence is cut into calls. Under jit with the state
    donated its ring is updated in place.

    Args:
        values: ``[B, T, W]`` float, projected values of T consecutive tokens a row.
        gates: ``[B, T, W]`` float, raw gates (``ape`` not yet added).
        state: ``[B, ring, 2 * W]`` float32, the last tokens of each row: token p at ``p % ring``, as
            ``[value | raw gate]``. ``ring`` is at least the slots of a window; more keeps tokens that speculation may
            roll back to. A new sequence may start on any content. With ``layer``, ``[layers, B, ring, 2 * W]``.
        positions: ``[B, T]`` int32. In each row the valid ones come first and are consecutive; -1 is padding, which
            changes nothing.
        ratio: tokens a window; divides 256.
        overlap: whether an entry also pools the previous window.
        ape: ``[ratio, W]`` bias of the gates, row ``p % ratio``.
        layer: int32 scalar, the layer whose state is advanced, where ``state`` holds those of all layers. They are
            given whole, as the pools are, since a slice of them would be copied out and back. A layer that does not
            exist is an error where the host knows it, else the nearest one that does.
        implementation: "triton", "pallas" (without ``layer``), "xla", or None for the best.

    Returns:
        Entries ``[B, T // ratio + 1, d]`` float32, entry e of row b being window ``positions[b, 0] // ratio + e``, or
        zeros when that window does not close in this call; and the state after the last valid token.

    Raises:
        TypeError: a dtype other than stated.
        ValueError: a shape or ratio other than stated, as for a state that was saved at another ratio.
    """
    positions = int32_array("positions", positions)
    for name, array in (("values", values), ("gates", gates), ("ape", ape)):
        check_float(name, array)
    check_dtype("state", state, jnp.float32)
    if ratio < 2 or PAGE_TOKENS % ratio:
        raise ValueError(f"Expected {ratio=} to divide a page of {PAGE_TOKENS} tokens; supported: 2, 4, 8, .. 256")
    check_shape("values", values, (None, None, None), "[B, T, W]")
    batch, steps, width = values.shape
    if overlap and width % 2:
        raise ValueError(f"Expected the {width=} of values to be even with {overlap=}")
    check_shape("gates", gates, (batch, steps, width), "[B, T, W]")
    check_shape("positions", positions, (batch, steps), "[B, T]")
    check_shape("ape", ape, (ratio, width), "[ratio, W]")
    if layer is None:
        check_shape("state", state, (batch, None, 2 * width), "[B, ring, 2 * W]")
    else:
        check_shape("state", state, (None, batch, None, 2 * width), "[layers, B, ring, 2 * W]")
        known = None if isinstance(layer, jax.Array) else layer
        layer = int32_array("layer", layer)
        check_shape("layer", layer, (), "[]")
        if known is not None and not 0 <= int(known) < state.shape[0]:
            raise ValueError(f"Expected layer={int(known)} to be one of the {state.shape[0]} layers of the state")
        if checking():
            check_values("compress", "layer", (layer < 0) | (layer >= state.shape[0]), layer, "to be a layer")
        layer = jnp.clip(layer, 0, state.shape[0] - 1)
    slots = ratio * (2 if overlap else 1)
    if state.shape[-2] < slots:
        raise ValueError(
            f"Expected {state.shape=} to have a ring of at least {slots} for {ratio=}, {overlap=}; "
            "a state saved at another ratio cannot be used"
        )
    arrays = (jnp.asarray(values), jnp.asarray(gates), jnp.asarray(state), positions, jnp.asarray(ape), layer)
    shapes = {"B": batch, "T": steps, "W": width, "ratio": ratio, "overlap": overlap, "_stacked": layer is not None}
    return dispatch.call("compress", implementation, shapes, *arrays, ratio=ratio, overlap=overlap)
