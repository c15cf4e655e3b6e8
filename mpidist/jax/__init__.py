"""JAX on the ranks of MPI: its start, an all-reduce in jitted functions, pytrees.

From the import on, classes that JAX takes for pytrees (Flax, Equinox, optax, a program's own) go through
``strategy.run``, reductions and collectives leaf by leaf, and into checkpoints. Import it before JAX computes anything.
"""

from mpidist.jax.dispatch import dispatch_in_order
from mpidist.jax.reduction import all_reduce
from mpidist.jax.startup import initialize
from mpidist.jax.trees import register_trees

__all__ = ["all_reduce", "initialize"]

dispatch_in_order()
register_trees()

del dispatch_in_order, register_trees
