"""SlurmClusterResolver: the tasks of a Slurm job by its environment variables alone."""

from __future__ import annotations

import os
from collections.abc import Mapping

from mpidist.cluster_resolver.cluster_resolver import ClusterResolver, format_master_url
from mpidist.cluster_resolver.cluster_spec import ClusterSpec
from mpidist.cluster_resolver.roles import deal_tasks
from mpidist.cluster_resolver.slurm_gpus import gpus_of_task, leave_gpus
from mpidist.cluster_resolver.slurm_layout import read_layout


class SlurmClusterResolver(ClusterResolver):
    """The tasks of a Slurm job step, in the order of their ranks. Everything is local.

    It works without MPI, but not everywhere: under ``mpirun`` Slurm's variables are those of mpirun's daemons, so the
    rank and the size come from ``OMPI_*`` or ``PMI_*``, and equal numbers of ranks on each host are assumed, unless
    ``tasks_per_node`` says otherwise. MPIClusterResolver, the default of all strategies, asks the ranks themselves.

    Args:
        jobs: ``{job: number of tasks}``, which together are all tasks, dealt out in this order (TensorFlow sorts the
            names); None reads ``MPIDIST_JOBS="ps:1,worker:3"``; without it all are workers.
        port_base: The address of the i-th task on a host is ``"host:(port_base + i)"``.
        gpus_per_node: GPUs of each node; by default ``SLURM_GPUS_ON_NODE``, else none are counted.
        gpus_per_task: GPUs of each task; by default all that Slurm has bound to this task (``--gpus-per-task``,
            ``--gpu-bind``), else those of its node that ``CUDA_VISIBLE_DEVICES`` shows, shared out evenly.
        tasks_per_node: Tasks of each node, or ``{host: tasks}``; by default Slurm's numbers.
        auto_set_gpu: Set ``CUDA_VISIBLE_DEVICES`` of this process to the GPUs of its task, unless there are fewer GPUs
            than tasks. Ranks that do not see one another's GPUs cannot copy between
            them: with False the strategies share the GPUs out and all ranks see all.
        rpc_layer: The scheme of the addresses.

    Raises:
        TypeError: An argument of another type.
        ValueError: This process is in no Slurm job, variables are missing, malformed or contradict each other, jobs do
            not add up to the number of tasks, a task type does not exist, or more GPUs are asked for than a node
            has or this process sees.

    Source: ``tf.distribute.cluster_resolver.SlurmClusterResolver``. There the task is known only after
    :meth:`cluster_spec`, and errors are RuntimeError.
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str = "grpc",
    ) -> None:
        for name, number, least in (
            ("port_base", port_base, 0),
            ("gpus_per_node", gpus_per_node, 0),
            ("gpus_per_task", gpus_per_task, 0),
        ):
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < least):
                raise ValueError(f"{name} is {number!r}; expected a whole number of at least {least}")
        self._layout = read_layout(os.environ, tasks_per_node)
        self._port_base = port_base
        self._rpc_layer = rpc_layer
        self._tasks = deal_tasks(jobs, self._layout.size)
        self._task_type, self._task_id = self._tasks[self._layout.rank]
        mine = gpus_of_task(os.environ, self._layout, gpus_per_node, gpus_per_task)
        self._gpus_per_task = len(mine)
        if auto_set_gpu and mine:
            leave_gpus(mine)

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Return ``(task_type, task_id)`` of this process."""
        return self.task_type, self.task_id

    def cluster_spec(self) -> ClusterSpec:
        """Return the jobs and the addresses of all tasks, the same on every task."""
        cluster: dict[str, list[str]] = {}
        for (host, local), (job, _) in zip(self._layout.places, self._tasks, strict=True):
            cluster.setdefault(job, []).append(f"{host}:{self._port_base + local}")
        return ClusterSpec(cluster)

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of a task; that of this process by default.

        Raises:
            ValueError: No such task.
        """
        job, index = self._tasks[self._layout.rank]
        job = task_type or self.task_type or job
        given = self.task_id if task_id is None else task_id
        return format_master_url(
            self.cluster_spec().task_address(job, index if given is None else given), rpc_layer or self.rpc_layer
        )

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """Return ``{"GPU": k}`` for the k GPUs of each task.

        Where none are counted, those that this process sees.
        """
        if self._gpus_per_task:
            return {"GPU": self._gpus_per_task}
        return super().num_accelerators(task_type, task_id)
