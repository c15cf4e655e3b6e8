"""Advice on names that other libraries have and mpidist lacks."""

from __future__ import annotations

_STARTS = "nothing has to be started: the first strategy or Communicator does it; delete this line"
_ENDS = "nothing has to be ended: the end of the program does it; delete this line"
_VARIABLES = "variables made in `with strategy.scope():` have the first rank's values everywhere; delete this line"
_COLLECTIVE = "type: comm = mpidist.Communicator(), and comm.{}"
_OPTIMIZER = "type: with strategy.scope(): optimizer = mpidist.optimizers.SGD(...)"
_ON_NODE = (
    "a rank finds its GPU by itself, which this is mostly asked for; otherwise type: from mpi4py import MPI, and "
    "MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED).{}()"
)

# Names of Horovod, torch.distributed and mpi4py, and a room that nothing imports but programs.
IN_PLACE_OF = {
    **dict.fromkeys(("init", "init_process_group", "is_initialized", "Init"), _STARTS),
    **dict.fromkeys(("finalize", "shutdown", "destroy_process_group", "Finalize"), _ENDS),
    **dict.fromkeys(("get_rank", "Get_rank"), "type: mpidist.rank()"),
    **dict.fromkeys(("get_world_size", "world_size", "Get_size"), "type: mpidist.size()"),
    **dict.fromkeys(("local_rank", "get_local_rank"), _ON_NODE.format("Get_rank")),
    "local_size": _ON_NODE.format("Get_size"),
    "COMM_WORLD": "type: mpidist.Communicator(), or from mpi4py import MPI, and MPI.COMM_WORLD",
    **dict.fromkeys(("all_reduce", "allreduce", "Allreduce"), _COLLECTIVE.format('all_reduce("SUM", x)')),
    **dict.fromkeys(("all_gather", "allgather", "Allgather"), _COLLECTIVE.format("all_gather(x)")),
    **dict.fromkeys(("broadcast", "bcast", "Bcast"), _COLLECTIVE.format("broadcast(x, root=0)")),
    **dict.fromkeys(("barrier", "Barrier"), _COLLECTIVE.format("barrier()")),
    **dict.fromkeys(("DistributedOptimizer", "DistributedDataParallel"), _OPTIMIZER),
    **dict.fromkeys(("broadcast_parameters", "broadcast_variables"), _VARIABLES),
    "jax": "type: import mpidist.jax",
}
