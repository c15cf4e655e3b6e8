"""An all-reduce of pytrees, in and outside of jitted functions, with a gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.experimental import io_callback

from mpidist.arrays.convert import jax_makes
from mpidist.arrays.dtypes import Array, DType, reduction_dtypes
from mpidist.collectives import Communicator
from mpidist.core.context import Frame, current_frame, entered, is_default, replica_frame_elsewhere
from mpidist.core.options import ReduceOp
from mpidist.core.text import skip_frames_of, user_call_site
from mpidist.jax.leaf_packs import LeafPacks
from mpidist.jax.startup import check_order
from mpidist.topology import world_topology
from mpidist.topology.topology import Topology

Tree = TypeVar("Tree")
Leaves: TypeAlias = "list[jax.Array]"
_WITH_GRADIENT = (ReduceOp.SUM, ReduceOp.MEAN)
# Errors name lines of the program.
skip_frames_of(jax.__file__)


def all_reduce(reduce_op: ReduceOp | str, tree: Tree) -> Tree:
    """Combine a pytree over all replicas, or outside ``strategy.run`` over all ranks (collective).

    Call it on every replica or rank, in the same order, also in a jitted function: there it runs in program order
    (``io_callback`` with ``ordered=True``). All leaves travel together. A rank with several replicas, which take turns,
    cannot call it in a jitted function.

    The gradient of SUM and MEAN is the same reduction of the gradients of all replicas: the gradient of the sum of
    their losses. ``vmap`` reduces the whole batch at once.

    Args:
        reduce_op: A ``ReduceOp`` or its name.
        tree: A pytree of arrays or numbers, of the same structure, shapes and dtypes everywhere.

    Returns:
        The same structure. Arrays of JAX stay arrays of JAX. MEAN of integers has floats.

    Raises:
        RuntimeError: In a jitted function: a rank with several replicas, another device than a CPU, or JAX had started
            before ``mpidist.jax`` was imported.
        TypeError: A dtype that cannot be reduced so, or the gradient of another operation than SUM and MEAN.
        MismatchError: Ranks differ. From a jitted function JAX raises it as a ``JaxRuntimeError`` with its text.

    >>> import jax
    >>> jax.jit(lambda tree: all_reduce("MEAN", tree))({"w": 2.0})
    {'w': Array(2., dtype=float32...)}
    """
    op = ReduceOp.of(reduce_op)
    leaves, structure = jax.tree.flatten(tree)
    results = _differentiable(op)(leaves) if _are_traced(leaves) else _reduce_now(op, leaves)
    reduced: Tree = jax.tree.unflatten(structure, results)
    return reduced


@cache
def _differentiable(op: ReduceOp) -> Callable[[Leaves], Leaves]:
    """Return the reduction of a list of leaves by ``op``, with its gradient."""

    @jax.custom_vjp
    def reduce(leaves: Leaves) -> Leaves:
        # The gradient of a function that is not jitted has values.
        return _reduce_traced(op, leaves) if _are_traced(leaves) else _reduce_now(op, leaves)

    def forward(leaves: Leaves) -> tuple[Leaves, None]:
        if op not in _WITH_GRADIENT:
            raise TypeError(
                f"all_reduce {op.name} has no gradient here, SUM and MEAN have; put jax.lax.stop_gradient(...) around "
                "its argument, or take the gradient of something else"
            )
        return reduce(leaves), None

    def backward(_: None, cotangents: Leaves) -> tuple[Leaves]:
        given = [each for each in cotangents if each.dtype != jax.dtypes.float0]
        sums = iter(reduce(given) if given else [])
        # Integers have no gradient.
        return ([each if each.dtype == jax.dtypes.float0 else next(sums) for each in cotangents],)

    reduce.defvjp(forward, backward)
    differentiable: Callable[[Leaves], Leaves] = reduce
    return differentiable


def _are_traced(leaves: Leaves) -> bool:
    return any([isinstance(leaf, jax.core.Tracer) for leaf in leaves])


def _reduce_now(op: ReduceOp, leaves: Leaves) -> Leaves:
    """Reduce arrays over all replicas, or outside of them over all ranks."""
    frame = current_frame()
    if frame.replica_context is None or is_default(frame.strategy):
        return communicator_of(world_topology()).all_reduce(op, leaves)
    return frame.replica_context.all_reduce(op, leaves)


@cache
def communicator_of(world: Topology) -> Communicator:
    """Return the communicator for calls outside of ``strategy.run`` (collective in the first call)."""
    return Communicator(world.world)


def _reduce_traced(op: ReduceOp, leaves: Leaves) -> Leaves:
    """Reduce leaves whenever the traced function is called."""
    check_order()
    _check_alone(current_frame())

    @custom_vmap
    def reduce(*leaves: jax.Array) -> Leaves:
        packs = LeafPacks(leaves)
        given = packs.join(leaves, jnp)
        results = [jax.ShapeDtypeStruct(pack.shape, _result_dtype(op, pack.dtype)) for pack in given]
        on_host = partial(_reduce_on_host, op, packs, user_call_site())
        return packs.cut(io_callback(on_host, results, *given, ordered=True))

    @reduce.def_vmap
    def reduce_batch(_: int, are_batched: list[bool], *leaves: jax.Array) -> tuple[Leaves, list[bool]]:
        return reduce(*leaves), are_batched

    reduced: Leaves = reduce(*map(jnp.asarray, leaves))
    return reduced


def _reduce_on_host(op: ReduceOp, packs: LeafPacks, call_site: str, *given: jax.Array) -> list[Array]:
    """Reduce the values of a jitted function, in a thread of JAX."""
    works_for_call_site = call_site  # noqa: F841  # read by user_call_site()
    frame = replica_frame_elsewhere() or current_frame()
    _check_alone(frame)
    with entered(frame):
        reduced = _reduce_now(op, packs.cut([np.asarray(pack) for pack in given]))
    results = packs.join(reduced, np)
    return [
        result.astype(_result_dtype(op, pack.dtype), copy=False) for result, pack in zip(results, given, strict=True)
    ]


def _result_dtype(op: ReduceOp, dtype: DType) -> DType:
    return jax_makes(reduction_dtypes(dtype, op)[1])


def _check_alone(frame: Frame) -> None:
    """Raise RuntimeError if the rank has other replicas, which wait for their turn."""
    replicas = len(frame.strategy.extended.local_replica_ids)
    if frame.replica_context is not None and replicas > 1:
        raise RuntimeError(
            f"mpidist.jax.all_reduce in a jitted function, with {replicas} replicas on this rank, which take turns in "
            "threads: while JAX waits for one the others cannot run; call it between two jitted functions, or start a "
            "rank for each replica"
        )
