"""Checks of arguments: shapes and dtypes always, values only when asked."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .layouts import KVLayout

INT32 = np.iinfo(np.int32)


class ValueCheckError(ValueError):
    """A value check of ``debug_checks()`` or ``validate=True`` failed."""


def check_shape(name: str, x: Any, shape: tuple[int | None, ...], axes: str) -> None:
    """Raises ValueError unless ``x.shape`` matches; None in ``shape`` matches any size, ``axes`` names the form."""
    got = tuple(x.shape)
    if len(got) != len(shape) or any(want is not None and want != size for want, size in zip(shape, got, strict=True)):
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"Expected {name} to have shape {axes} = [{wanted}], got {list(got)}")


def check_dtype(name: str, x: Any, *dtypes: Any) -> None:
    """Raises TypeError unless ``x.dtype`` is one of ``dtypes``."""
    if not any(x.dtype == jnp.dtype(dtype) for dtype in dtypes):
        raise TypeError(f"Expected {name} to have dtype {_names(dtypes)}, got {x.dtype}")


def _names(dtypes: tuple[Any, ...]) -> str:
    return " or ".join(jnp.dtype(dtype).name for dtype in dtypes)


def check_float(name: str, x: Any) -> None:
    """Raises TypeError unless ``x`` is a floating-point array (float8 included)."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"Expected {name} to have a floating-point dtype, got {x.dtype}")


def int32_array(name: str, x: Any) -> jax.Array:
    """Takes integers as an int32 array: NumPy and Python values are range-checked, JAX arrays must be int32 already.

    JAX cuts 64-bit host integers to 32 bits without a word, so that slot 2^32 would become slot 0.

    Raises:
        TypeError: not integers, or a JAX array of another dtype.
        ValueError: a host value that int32 cannot hold.
    """
    if isinstance(x, jax.Array):
        check_dtype(name, x, jnp.int32)
        return x
    host = np.asarray(x)
    if host.size == 0 and host.dtype == np.float64:
        host = host.astype(np.int32)  # np.asarray([]) is float64
    if not np.issubdtype(host.dtype, np.integer):
        raise TypeError(f"Expected {name} to have dtype int32, got {host.dtype}")
    if host.size and (host.min() < INT32.min or host.max() > INT32.max):
        raise ValueError(f"Expected values of {name} to fit int32, got {host.min()} .. {host.max()}")
    return jnp.asarray(host.astype(np.int32))


def check_pool(pool: Any, layout: KVLayout, name: str = "pool") -> None:
    """Raises ValueError unless a pool's dtype and row of bytes are those of the layout, and int32 slots can reach it.

    Quantised layouts take uint8 ``[pages, page_stride]``; plain ones ``[pages, page_size * width]`` of their dtype too.
    """
    forms = [(jnp.dtype(jnp.uint8), layout.page_stride)]
    if layout.kind == "plain":
        forms.insert(0, (layout.pool_dtype(), layout.page_size * layout.width))
    if pool.ndim != 2 or (pool.dtype, pool.shape[1]) not in forms:
        wanted = " or ".join(f"{dtype.name} [pages, {stride}]" for dtype, stride in forms)
        raise ValueError(
            f"Expected {name} to be {wanted} for layout {layout.name} (page_size={layout.page_size}, "
            f"page_stride={layout.page_stride}), got {pool.dtype} {list(pool.shape)}"
        )
    layout.pool_shape(pool.shape[0])


def check_kv_scale(kv_scale: Any, layout: KVLayout, name: str = "kv_scale") -> None:
    """Raises ValueError unless a per-tensor scale is a scalar and meets plain e4m3 rows."""
    if kv_scale is None:
        return
    if layout.kind != "plain" or layout.value_dtype != "float8_e4m3fn":
        raise ValueError(f"Expected {name} only with layout plain-float8_e4m3fn, got layout {layout.name}")
    if np.ndim(kv_scale) != 0:
        raise ValueError(f"Expected {name} to be a scalar, got shape {list(np.shape(kv_scale))}")


# Part of jit's cache key: a function compiled outside the context is traced anew inside, and the other way round.
_checking = jax.make_user_context(False)
_lock = threading.Lock()
_failures: list[list[str]] = []  # one list for each open context


@contextlib.contextmanager
def debug_checks() -> Iterator[None]:
    """Inside it, operations check values too: index bounds, NaN and infinities in rows, scales and weights.

    The checks are host callbacks of the compiled code. The first failures are raised together as ``ValueCheckError``
    when the context ends, after all computations have finished. Outside nothing is checked and nothing is compiled in.
    """
    found: list[str] = []
    with _lock:
        _failures.append(found)
    try:
        with _checking(True):
            yield
    finally:
        jax.effects_barrier()
        with _lock:
            _failures.remove(found)
    if found:
        raise ValueCheckError("\n".join(found[:8]))


def checking() -> bool:
    """Whether value checks are on."""
    return bool(_checking.value)


def check_values(op: str, name: str, bad: jax.Array, values: jax.Array, expected: str) -> None:
    """Reports, from compiled code, the elements of ``values`` where ``bad`` holds.

    Call it only when ``checking()`` or on an explicit request. Inside ``debug_checks()`` the report is raised when the
    context ends; elsewhere it is raised in the computation itself.

    Args:
        op: the operation.
        name: the argument.
        bad: boolean, the shape of ``values``.
        values: the array that is checked.
        expected: what it should hold, for the message.
    """
    if bad.size == 0:
        return
    flat = bad.reshape(-1)
    where = jnp.argmax(flat)

    def report(count: Any, where: Any, value: Any) -> None:
        if not int(count):
            return
        index = tuple(int(i) for i in np.unravel_index(int(where), bad.shape))
        first = f"first {name}{list(index)} = {value}"
        message = f"{op}: expected {name} {expected}; {int(count)} of {flat.size} are not, {first}"
        with _lock:
            if _failures:
                _failures[-1].append(message)
                return
        raise ValueCheckError(message)

    value = values.reshape(-1)[where]
    jax.debug.callback(report, jnp.sum(flat), where, value)
