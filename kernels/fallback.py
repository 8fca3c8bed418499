"""Derivatives and batching of kernels that have no rules of their own, by those of the XLA implementation."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.custom_batching import sequential_vmap

from . import launch


def with_xla_rules(fn: Callable[..., Any], xla: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` (arrays and pytrees of them by position, static by keyword), differentiable and batchable.

    The forward pass runs ``fn``; derivatives are those of ``xla``, which takes the same arguments. ``jax.vmap`` runs
    ``fn`` on one element after another.
    """

    @functools.wraps(fn)
    def call(*arrays: Any, **static: Any) -> Any:
        if launch.keeping():  # JAX drops calls with rules of their own whose results are not used
            return fn(*arrays, **static)
        leaves, tree = jax.tree.flatten(arrays)

        @sequential_vmap
        def batched(*leaves: Any) -> Any:
            return fn(*jax.tree.unflatten(tree, leaves), **static)

        @jax.custom_jvp
        def differentiable(*leaves: Any) -> Any:
            return batched(*leaves)

        @differentiable.defjvp
        def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
            out = differentiable(*primals)
            _, tangent = jax.jvp(lambda *xs: xla(*jax.tree.unflatten(tree, xs), **static), primals, tangents)
            return out, tangent

        return differentiable(*leaves)

    return call
