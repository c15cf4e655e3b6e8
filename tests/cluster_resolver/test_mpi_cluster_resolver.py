"""Ranks as tasks; passes on any number of ranks, and runs on three by itself."""

from __future__ import annotations

import re
import socket
from typing import Any

import pytest
from mpi4py import MPI

from mpidist.cluster_resolver import MPIClusterResolver
from mpidist.compat.multi_worker_util import is_chief
from tests.support.ranks.jobs import run_script
from tests.support.ranks.pool import run
from tests.support.speed import deadlines

pytestmark = [pytest.mark.nodes, pytest.mark.counts]

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()


@pytest.fixture(autouse=True)
def _no_jobs_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPIDIST_JOBS", raising=False)


def test_by_default_all_are_workers_and_the_first_is_chief() -> None:
    resolver = MPIClusterResolver(MPI.COMM_WORLD)
    assert resolver.get_task_info() == ("worker", RANK)
    spec = resolver.cluster_spec()
    assert spec.jobs == ["worker"]
    assert spec.num_tasks("worker") == SIZE
    assert spec.task_address("worker", RANK) == f"{socket.gethostname()}:{RANK}"
    assert is_chief(spec, resolver.task_type, resolver.task_id) is (RANK == 0)
    assert MPI.COMM_WORLD.allgather(spec.as_dict()) == [spec.as_dict()] * SIZE


def test_the_address_of_a_task() -> None:
    resolver = MPIClusterResolver(MPI.COMM_WORLD, port_base=9000)
    host = socket.gethostname()
    assert resolver.master() == f"mpi://{host}:{9000 + RANK}"
    assert resolver.master(task_id=0) == f"mpi://{host}:9000"
    assert resolver.master("worker", SIZE - 1, rpc_layer="grpc") == f"grpc://{host}:{9000 + SIZE - 1}"
    resolver.rpc_layer = None
    assert resolver.master() == f"{host}:{9000 + RANK}"
    with pytest.raises(ValueError, match=f"task_index is {SIZE}"):
        resolver.master("worker", SIZE)


def test_later_questions_are_local() -> None:
    resolver = MPIClusterResolver(MPI.COMM_WORLD)
    resolver.cluster_spec()
    if RANK == 0:
        assert resolver.cluster_spec().num_tasks("worker") == SIZE
        assert resolver.local_rank == 0
        assert resolver.num_nodes >= 1


def test_a_communicator_of_this_process_only() -> None:
    resolver = MPIClusterResolver(MPI.COMM_SELF)
    assert (resolver.rank, resolver.size, resolver.comm) == (0, 1, MPI.COMM_SELF)
    assert resolver.cluster_spec().as_dict() == {"worker": [f"{socket.gethostname()}:0"]}


def test_task_type_and_id_can_be_set() -> None:
    resolver = MPIClusterResolver(MPI.COMM_SELF)
    resolver.task_type, resolver.task_id = "evaluator", 3
    assert resolver.get_task_info() == ("evaluator", 3)
    with pytest.raises(ValueError, match=r"the task is \('evaluator', 3\)"):
        resolver.num_accelerators()


def test_accelerators_of_a_machine_with_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The devices are made up, as this must hold on machines that have none; the sharing is real."""
    module = "mpidist.cluster_resolver.mpi_cluster_resolver.visible_devices"
    monkeypatch.setattr(module, lambda: tuple(f"0000:0{bus}:00.0" for bus in range(4)))
    assert MPIClusterResolver(MPI.COMM_SELF).num_accelerators() == {"GPU": 4}
    assert MPIClusterResolver(MPI.COMM_SELF).num_accelerators("worker", 0) == {"GPU": 4}


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"jobs": {"worker": 2}}, ValueError, "2 worker = 2 tasks, and there are 1 ranks.*mpirun -n 2"),
        ({"jobs": {"ps": 1, "worker": 0}}, ValueError, "0 tasks of 'worker'; expected at least 1"),
        ({"jobs": {"worker": 1.0}}, TypeError, "expected the name of a job and a whole number"),
        ({"jobs": {"worker": True}}, TypeError, "whole number"),
        ({"jobs": ["worker"]}, TypeError, "expected a dict such as"),
        ({"port_base": -1}, ValueError, "port_base is -1"),
        ({"port_base": "8888"}, ValueError, "port_base is '8888'"),
    ],
)
def test_wrong_arguments(arguments, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        MPIClusterResolver(MPI.COMM_SELF, **arguments)


def test_a_communicator_of_another_kind() -> None:
    with pytest.raises(TypeError, match="expected an mpi4py intracommunicator"):
        MPIClusterResolver("world")  # type: ignore[arg-type]


def test_jobs_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIDIST_JOBS", "chief:1")
    assert MPIClusterResolver(MPI.COMM_SELF).get_task_info() == ("chief", 0)
    assert MPIClusterResolver(MPI.COMM_SELF, jobs={"worker": 1}).get_task_info() == ("worker", 0)
    monkeypatch.setenv("MPIDIST_JOBS", "chief:2")
    with pytest.raises(ValueError, match="MPIDIST_JOBS has 2 chief = 2 tasks"):
        MPIClusterResolver(MPI.COMM_SELF)


@pytest.mark.parametrize("text", ["worker", "worker:", "worker:0", "worker:x", "a:1,a:2", ":1", "a:1,,b:1"])
def test_jobs_that_do_not_parse(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("MPIDIST_JOBS", text)
    with pytest.raises(ValueError, match="expected jobs with their numbers of tasks, such as ps:1,worker:3"):
        MPIClusterResolver(MPI.COMM_SELF)


def _roles() -> tuple[object, ...]:
    from mpidist.cluster_resolver import MPIClusterResolver

    resolver = MPIClusterResolver(jobs={"worker": 2, "ps": 1})
    spec = resolver.cluster_spec()
    ports = {job: [address.rpartition(":")[2] for address in spec.job_tasks(job)] for job in spec.jobs}
    return (
        *resolver.get_task_info(),
        ports,
        resolver.local_rank,
        resolver.num_nodes,
        resolver.num_accelerators(),
    )


@pytest.mark.jobs
@pytest.mark.one_rank
def test_roles_on_three_ranks() -> None:
    ports = {"worker": ["0", "1"], "ps": ["2"]}
    found = run(_roles, 3)
    assert [result[:5] for result in found] == [
        ("worker", 0, ports, 0, 1),
        ("worker", 1, ports, 1, 1),
        ("ps", 0, ports, 2, 1),
    ]
    virtual = run(_roles, 3, ranks_per_node=2)
    assert [result[3:5] for result in virtual] == [(0, 2), (1, 2), (0, 2)]


def _upside_down() -> tuple[object, ...]:
    from mpi4py import MPI

    from mpidist.cluster_resolver import MPIClusterResolver

    world = MPI.COMM_WORLD
    turned = world.Split(0, key=-world.Get_rank())
    resolver = MPIClusterResolver(turned)
    first_port = resolver.cluster_spec().task_address("worker", 0).rpartition(":")[2]
    found = resolver.task_id, first_port, resolver.local_rank
    turned.Free()
    return found


@pytest.mark.jobs
@pytest.mark.one_rank
def test_the_order_is_that_of_the_communicator() -> None:
    assert run(_upside_down, 2) == [(1, "0", 1), (0, "0", 0)]


@pytest.mark.jobs
@pytest.mark.one_rank
def test_a_rank_that_does_not_come_to_make_a_communicator_is_not_waited_for_for_ever() -> None:
    script = """
    import time
    from mpidist.cluster_resolver import MPIClusterResolver
    resolver = MPIClusterResolver()
    if resolver.task_type == "chief":
        resolver.comm_of(("chief", "worker"))
    time.sleep(60)
    """
    env = {"MPIDIST_JOBS": "chief:1,worker:1,evaluator:1", **deadlines(1.5, 0.3)}
    done = run_script(script, 3, env=env, timeout=40)
    assert done.returncode != 0
    waits = "waiting for all 2 ranks of chief and worker to make a communicator"
    assert f"mpidist: rank 0 of 3 is still {waits}, at " in done.stderr
    assert re.search(rf"mpidist: rank 0 of 3 is not done with {waits} after [\d.]+ s", done.stderr)


@pytest.mark.jobs
@pytest.mark.one_rank
def test_too_few_ranks_is_an_error_on_all() -> None:
    script = """
    from mpidist.cluster_resolver import MPIClusterResolver
    try:
        MPIClusterResolver()
    except ValueError as error:
        print(error)
    """
    done = run_script(script, 2, env={"MPIDIST_JOBS": "ps:1,worker:3"})
    assert done.returncode == 0
    assert done.stdout.count("1 ps + 3 worker = 4 tasks, and there are 2 ranks") == 2


def _asked_by_one(given: str) -> tuple[int, int]:
    from mpi4py import MPI

    import mpidist

    world = MPI.COMM_WORLD
    half = world.Split(world.Get_rank() // 2, key=-world.Get_rank())
    arguments: dict[str, Any] = {
        "nothing": {},
        "communicator": {"communicator": half},
        "resolver": {"cluster_resolver": mpidist.cluster_resolver.MPIClusterResolver(half)},
    }[given]
    strategy = mpidist.MultiWorkerMirroredStrategy(**arguments)
    if strategy.cluster_resolver.task_id == 1:
        tasks = strategy.cluster_resolver.cluster_spec().num_tasks("worker")
    else:
        tasks = 0
    replicas = strategy.num_replicas_in_sync
    strategy.close()
    half.Free()
    return replicas, tasks


@pytest.mark.jobs
@pytest.mark.one_rank
@pytest.mark.parametrize(
    ("given", "replicas", "tasks"),
    [("nothing", 4, [0, 4, 0, 0]), ("communicator", 2, [2, 0, 2, 0]), ("resolver", 2, [2, 0, 2, 0])],
)
def test_one_rank_asks_where_the_others_are(given: str, replicas: int, tasks: list[int]) -> None:
    assert run(_asked_by_one, 4, given) == [(replicas, found) for found in tasks]
