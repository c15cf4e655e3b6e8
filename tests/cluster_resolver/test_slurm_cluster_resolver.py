"""Slurm by environment variables alone: what ranks of real jobs were seen to have, and what cannot be."""

from __future__ import annotations

import os
import re

import pytest

from mpidist.cluster_resolver import SlurmClusterResolver
from mpidist.compat.multi_worker_util import is_chief
from mpidist.topology.launchers import LAUNCHER_VARIABLES

# The environment of one process, made up.
pytestmark = pytest.mark.one_rank

# Four ranks, two on each of slurm0 and slurm1: by srun, and by mpirun inside the job, where Slurm's variables are those
# of the batch script on the first host and of mpirun's daemon on the others.
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "slurm[0-1]", "SLURM_NODELIST": "slurm[0-1]"}
STEP = {
    **JOB,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "slurm[0-1]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NTASKS": "4",
}
FIRST_HOST = {**JOB, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "4"}
OTHER_HOST = {
    **JOB,
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_NODELIST": "slurm1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}
PLACES = ["slurm0:8888", "slurm0:8889", "slurm1:8888", "slurm1:8889"]


def srun(rank: int) -> dict[str, str]:
    return {**STEP, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 2), "SLURM_NODEID": str(rank // 2)}


def mpirun(rank: int, size: int = 4, local_size: int = 2) -> dict[str, str]:
    return {
        **(FIRST_HOST if rank < local_size else OTHER_HOST),
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % local_size),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
    }


def hydra(rank: int) -> dict[str, str]:
    daemon = {"SLURM_PROCID": str(rank // 2), "SLURM_NODEID": str(rank // 2), "SLURM_STEP_NUM_TASKS": "2"}
    pmi = {"PMI_RANK": str(rank), "PMI_SIZE": "4", "MPI_LOCALRANKID": str(rank % 2), "MPI_LOCALNRANKS": "2"}
    return {**OTHER_HOST, **daemon, "SLURM_STEP_NODELIST": "slurm[0-1]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", **pmi}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpidist.cluster_resolver.slurm_cluster_resolver._left", None)
    for name in [*os.environ]:
        if name.startswith("SLURM_") or name in LAUNCHER_VARIABLES or name in ("CUDA_VISIBLE_DEVICES", "MPIDIST_JOBS"):
            monkeypatch.delenv(name)


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch):
    def put(variables: dict[str, str]) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        if "CUDA_VISIBLE_DEVICES" not in variables:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES")

    return put


@pytest.mark.parametrize("launcher", [srun, mpirun, hydra])
@pytest.mark.parametrize("rank", range(4))
def test_four_tasks_on_two_hosts_whoever_started_them(environ, launcher, rank: int) -> None:
    environ(launcher(rank))
    resolver = SlurmClusterResolver()
    assert resolver.get_task_info() == ("worker", rank)
    assert resolver.cluster_spec().as_dict() == {"worker": PLACES}
    assert resolver.master() == f"grpc://{PLACES[rank]}"
    assert resolver.master("worker", 3, rpc_layer="mpi") == "mpi://slurm1:8889"
    assert is_chief(resolver.cluster_spec(), *resolver.get_task_info()) is (rank == 0)


@pytest.mark.parametrize("launcher", [srun, mpirun, hydra])
def test_roles_in_the_order_given(environ, launcher) -> None:
    environ(launcher(1))
    resolver = SlurmClusterResolver(jobs={"worker": 3, "ps": 1}, port_base=9000)
    assert resolver.get_task_info() == ("worker", 1)
    assert resolver.cluster_spec().as_dict() == {
        "worker": ["slurm0:9000", "slurm0:9001", "slurm1:9000"],
        "ps": ["slurm1:9001"],
    }


def test_roles_by_the_variable(environ) -> None:
    environ({**srun(0), "MPIDIST_JOBS": "chief:1,worker:3"})
    assert SlurmClusterResolver().get_task_info() == ("chief", 0)
    assert SlurmClusterResolver(jobs={"worker": 4}).get_task_info() == ("worker", 0)


def uneven(rank: int) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": "9",
        "SLURM_STEP_NODELIST": "n[08-10],m1",
        "SLURM_STEP_TASKS_PER_NODE": "3(x2),2,1",
    }


def test_uneven_tasks_and_padded_names(environ) -> None:
    environ(uneven(8))
    expected = [
        f"{host}:{8888 + local}"
        for host, tasks in (("n08", 3), ("n09", 3), ("n10", 2), ("m1", 1))
        for local in range(tasks)
    ]
    resolver = SlurmClusterResolver()
    assert resolver.cluster_spec().as_dict() == {"worker": expected}
    assert resolver.master() == "grpc://m1:8888"


def test_cyclic_distribution(environ) -> None:
    environ({**uneven(3), "SLURM_DISTRIBUTION": "cyclic:block", "SLURM_NODEID": "3", "SLURM_LOCALID": "0"})
    spec = SlurmClusterResolver().cluster_spec()
    hosts = [address.partition(":")[0] for address in spec.job_tasks("worker")]
    assert hosts == ["n08", "n09", "n10", "m1", "n08", "n09", "n10", "n08", "n09"]


@pytest.mark.parametrize("given", [2, {"slurm0": 2, "slurm1": 2}])
def test_tasks_per_node_given(environ, given) -> None:
    environ({**srun(2), "SLURM_STEP_TASKS_PER_NODE": ""})
    assert SlurmClusterResolver(tasks_per_node=given).cluster_spec().as_dict() == {"worker": PLACES}


def test_uneven_mpirun_needs_to_be_told(environ) -> None:
    environ({**mpirun(3, local_size=3), "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"})
    with pytest.raises(ValueError, match=r"distribution is unknown.*tasks_per_node=.*Or use MPIClusterResolver"):
        SlurmClusterResolver()
    spec = SlurmClusterResolver(tasks_per_node={"slurm0": 3, "slurm1": 1}).cluster_spec()
    assert spec.task_address("worker", 3) == "slurm1:8888"


def test_mpirun_that_goes_round_the_hosts_is_noticed(environ) -> None:
    environ({**mpirun(1), "OMPI_COMM_WORLD_LOCAL_RANK": "0"})
    with pytest.raises(ValueError, match="rank 1 is number 0 on its host, and number 1 of 'slurm0'|number 1 of slurm0"):
        SlurmClusterResolver()


@pytest.mark.parametrize(
    ("shown", "rank", "arguments", "left"),
    [
        ("0,1,2,3", 0, {"gpus_per_node": 4}, "0,1"),
        ("0,1,2,3", 3, {"gpus_per_node": 4}, "2,3"),
        ("0,1,2,3", 3, {"gpus_per_node": 4, "gpus_per_task": 1}, "1"),
        ("4,5", 1, {"gpus_per_node": 2}, "5"),
        (None, 1, {"gpus_per_node": 2}, "1"),
        ("7", 1, {"gpus_per_node": 4}, "2,3"),  # what is said by hand wins
        ("", 0, {"gpus_per_node": 4, "gpus_per_task": 1}, "0"),
        ("0,1", 1, {"gpus_per_node": 2, "auto_set_gpu": False}, "0,1"),
        ("1", 1, {"gpus_per_node": 2}, "1"),  # bound by Slurm already
        ("0", 1, {"gpus_per_node": 1}, "0"),  # two tasks share one
        ("0,1", 1, {}, "0,1"),  # nothing says how many there are
    ],
)
def test_gpus_of_a_task(environ, monkeypatch, shown: str | None, rank: int, arguments, left: str) -> None:
    environ(srun(rank) if shown is None else {**srun(rank), "CUDA_VISIBLE_DEVICES": shown})
    for _ in range(2):  # a second resolver changes nothing
        SlurmClusterResolver(**arguments)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == left


@pytest.fixture
def no_driver(monkeypatch) -> None:
    """What CuPy sees is not asked for where Slurm says nothing of use."""
    monkeypatch.setattr("mpidist.cluster_resolver.cluster_resolver.visible_devices", lambda: ("a", "b", "c"))


@pytest.mark.parametrize(
    ("variables", "arguments", "count", "left"),
    [
        # As srun of Slurm 22.05 was seen to set them: plain, --gpus-per-task=1, --gpus-per-task=2, --gpu-bind=none.
        ({"SLURM_STEP_GPUS": "0,1,2,3", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, {}, 2, "2,3"),
        ({"SLURM_STEP_GPUS": "1", "CUDA_VISIBLE_DEVICES": "1"}, {}, 1, "1"),
        ({"SLURM_STEP_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "2,3"}, {}, 2, "2,3"),
        ({"SLURM_STEP_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "2,3"}, {"gpus_per_task": 1}, 1, "2"),
        ({}, {}, 2, "2,3"),
        # Hidden by the user, from all tasks of the node.
        ({"SLURM_STEP_GPUS": "0,1,2,3", "CUDA_VISIBLE_DEVICES": "2,3"}, {}, 1, "3"),
        ({"SLURM_STEP_GPUS": "0,1,2,3", "CUDA_VISIBLE_DEVICES": "1,3, 0"}, {}, 1, "3"),
        ({"SLURM_STEP_GPUS": "0,1,2,3", "CUDA_VISIBLE_DEVICES": "2,0,-1,1"}, {}, 1, "0"),
        ({"SLURM_STEP_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "3"}, {}, 1, "3"),
        # Too few for each to have one: what the process itself sees counts.
        ({"SLURM_STEP_GPUS": "0,1,2,3", "CUDA_VISIBLE_DEVICES": "2"}, {}, 3, "2"),
        ({"SLURM_STEP_GPUS": "0,1,2,3", "CUDA_VISIBLE_DEVICES": ""}, {}, 3, ""),
    ],
)
def test_gpus_that_are_hidden(environ, no_driver, variables, arguments, count: int, left: str) -> None:
    environ({**srun(1), "SLURM_GPUS_ON_NODE": "4", **variables})
    for _ in range(2):  # a second resolver finds the same
        assert SlurmClusterResolver(**arguments).num_accelerators() == {"GPU": count}
        assert os.environ["CUDA_VISIBLE_DEVICES"] == left


def test_fewer_gpus_to_be_seen_than_asked_for(environ) -> None:
    environ({**srun(1), "SLURM_GPUS_ON_NODE": "4", "SLURM_STEP_GPUS": "0,1,2,3", "CUDA_VISIBLE_DEVICES": "0,1"})
    with pytest.raises(ValueError, match=r"CUDA_VISIBLE_DEVICES='0,1' shows 2 GPUs to 2 task\(s\); expected 4"):
        SlurmClusterResolver(gpus_per_task=2)


def test_number_of_gpus_comes_from_slurm(environ) -> None:
    environ({**srun(1), "SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    resolver = SlurmClusterResolver()
    assert resolver.num_accelerators() == {"GPU": 2}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"SLURM_PROCID": ""}, "no task of a Slurm job step.*'SLURM_JOB_ID': '7'"),
        ({"SLURM_PROCID": "4"}, "SLURM_PROCID=4 and SLURM_STEP_NUM_TASKS=4 contradict"),
        *(
            ({"SLURM_PROCID": text}, rf"SLURM_PROCID={re.escape(repr(text))}: expected .*unset SLURM_PROCID")
            for text in ("one", " 1", "1 ", "+1", "-1", "1_0", "1.0", "\u0661", "9" * 5000)
        ),
        ({"SLURM_LOCALID": " 1"}, "SLURM_LOCALID=' 1'"),
        ({"SLURM_NODEID": "+1"}, r"SLURM_NODEID='\+1'"),
        ({"SLURM_GPUS_ON_NODE": "\u0662"}, "SLURM_GPUS_ON_NODE='\u0662'"),
        ({"MPIDIST_JOBS": "worker:0_4"}, "MPIDIST_JOBS='worker:0_4'"),
        ({"MPIDIST_JOBS": "worker:999999999999"}, "MPIDIST_JOBS has 999999999999 worker = 999999999999 tasks"),
        ({"SLURM_STEP_NUM_TASKS": "many"}, "SLURM_STEP_NUM_TASKS='many'"),
        ({"SLURM_STEP_NUM_TASKS": "5"}, r"2\(x2\)' adds up to 4 tasks, but SLURM_STEP_NUM_TASKS=5"),
        ({"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST is not set"),
        ({"SLURM_STEP_NODELIST": "(null)"}, r"SLURM_STEP_NODELIST: the list of hosts '\(null\)' has '\(null\)' where"),
        ({"SLURM_STEP_NODELIST": "n[0-1999999]"}, "SLURM_STEP_NODELIST: .*more than 65536.*Or use MPIClusterResolver"),
        ({"SLURM_STEP_NUM_TASKS": "999999999999"}, "SLURM_STEP_NUM_TASKS=999999999999; expected at most 4194304 tasks"),
        ({"SLURM_STEP_NODELIST": "slurm[0-1"}, r"'slurm\[0-1'"),
        ({"SLURM_STEP_NODELIST": "slurm[0-[1-2]]"}, r"'slurm\[0-\[1-2\]\]'"),
        ({"SLURM_STEP_NODELIST": "slurm[0-2]"}, r"has 2 nodes, but the job has the hosts"),
        ({"SLURM_STEP_NODELIST": "a,a"}, r"SLURM_STEP_NODELIST has \['a'\] more than once"),
        ({"SLURM_STEP_TASKS_PER_NODE": ""}, "SLURM_STEP_TASKS_PER_NODE is not set"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x"}, r"2\(x"),
        ({"SLURM_NODEID": "0"}, "number 1|SLURM_NODEID='0' and SLURM_PROCID=3 contradict"),
        ({"SLURM_LOCALID": "0"}, "rank 3 is number 0 on its host"),
        ({"SLURM_DISTRIBUTION": "plane=4"}, "SLURM_DISTRIBUTION='plane=4'"),
        ({"SLURM_GPUS_ON_NODE": "two"}, "SLURM_GPUS_ON_NODE='two'"),
        ({"MPIDIST_JOBS": "ps:1,worker:4"}, "MPIDIST_JOBS has 1 ps . 4 worker = 5 tasks, and there are 4"),
        ({"MPIDIST_JOBS": "wroker:4"}, "MPIDIST_JOBS has the task type 'wroker'; expected one of chief"),
        ({"MPIDIST_JOBS": "worker=4"}, "MPIDIST_JOBS='worker=4'"),
    ],
)
def test_bad_variables_are_quoted(environ, change: dict[str, str], said: str) -> None:
    environ({**srun(3), **change})
    with pytest.raises(ValueError, match=said):
        SlurmClusterResolver()


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"jobs": {"worker": 3}}, ValueError, "3 worker = 3 tasks, and there are 4 ranks"),
        ({"jobs": {}}, ValueError, r"jobs is \{\}. Each of the 4 ranks needs a task, such as"),
        ({"jobs": {"worker": 10**12}}, ValueError, "1000000000000 worker = 1000000000000 tasks"),
        ({"jobs": {"boss": 4}}, ValueError, "task type 'boss'"),
        ({"jobs": ["worker"]}, TypeError, "expected a dict such as"),
        ({"port_base": -1}, ValueError, "port_base is -1"),
        ({"gpus_per_node": 2, "gpus_per_task": 2}, ValueError, "need 4 GPUs; expected at most the 2"),
        ({"gpus_per_task": 1}, ValueError, "Pass gpus_per_node, too"),
        ({"gpus_per_node": 1.5}, ValueError, "gpus_per_node is 1.5"),
        ({"tasks_per_node": 3}, ValueError, "tasks_per_node=3 adds up to 6"),
        ({"tasks_per_node": 0}, ValueError, "tasks_per_node is 0"),
        ({"tasks_per_node": {"a": 4}}, ValueError, r"has the hosts \['a'\]"),
        ({"tasks_per_node": "2"}, TypeError, "tasks_per_node is '2'"),
    ],
)
def test_bad_arguments(environ, arguments, error: type[Exception], said: str) -> None:
    environ(srun(0))
    with pytest.raises(error, match=said):
        SlurmClusterResolver(**arguments)


def test_outside_of_slurm() -> None:
    with pytest.raises(ValueError, match=r"no task of a Slurm job step.*srun -n 4 python.*MPIClusterResolver"):
        SlurmClusterResolver()


def test_mpirun_outside_of_slurm(environ) -> None:
    environ({name: value for name, value in mpirun(0).items() if not name.startswith("SLURM")})
    with pytest.raises(ValueError, match="SLURM_JOB_NODELIST and SLURM_NODELIST is not set"):
        SlurmClusterResolver()


def test_no_such_task(environ) -> None:
    environ(srun(0))
    with pytest.raises(ValueError, match="job_name is 'ps'"):
        SlurmClusterResolver().master("ps", 0)


def test_task_type_and_id_can_be_set(environ) -> None:
    environ(srun(0))
    resolver = SlurmClusterResolver()
    resolver.task_id = 3
    assert resolver.master() == "grpc://slurm1:8889"
