"""JAX on the ranks of MPI: its start, an all-reduce in jitted functions, pytrees.

The import registers JAX's pytrees (of Flax, Equinox, optax and the program) for ``strategy.run``, reductions,
collectives and checkpoints. Import it before JAX computes anything.
"""

from mpidist.jax.reduction import all_reduce
from mpidist.jax.startup import dispatch_in_order, initialize
from mpidist.jax.trees import register_trees

__all__ = ["all_reduce", "initialize"]

dispatch_in_order()
register_trees()

del dispatch_in_order, register_trees
