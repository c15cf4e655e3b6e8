"""Programs of torch.distributed as jobs of their own: their start, their end, and ranks that die."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tests.support.ranks import jobs

torch = pytest.importorskip("torch", reason="PyTorch is missing: pip install '.[torch]'")

pytestmark = [pytest.mark.torch, pytest.mark.one_rank, pytest.mark.jobs]

START = """
import os, sys, torch, torch.distributed as dist
place = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
dist.init_process_group("mpidist")
rank, size = dist.get_rank(), dist.get_world_size()
assert place == [str(rank), str(size)] * 2, place
"""


def test_a_program_without_a_word_of_mpi() -> None:
    done = jobs.run_script(START + "print(dist.get_backend(), rank, size)", 2)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["mpidist 0 2", "mpidist 1 2"]


PLACE = """
place = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=place["RANK"] == "0")
store.add("ranks", 1)
dist.barrier()
print(*place.values(), store.add("ranks", 0))
"""


def test_a_plain_program_is_a_world_of_one() -> None:
    program = 'import os, torch.distributed as dist\ndist.init_process_group("mpidist")' + PLACE
    assert _without_a_launcher(program).stdout.split() == ["0", "1", "0", "1", "1"]


def test_a_plain_program_with_gloo_is_an_error() -> None:
    program = "import torch.distributed as dist\ntry: dist.init_process_group('gloo')\nexcept ValueError as e: print(e)"
    assert "environment variable RANK expected" in _without_a_launcher(program).stdout


@pytest.mark.parametrize("address", [{}, {"MASTER_ADDR": "localhost"}])
def test_mpirun_ignores_or_sets_the_address(address: dict[str, str]) -> None:
    done = jobs.run_script(START + PLACE, 2, env=address)
    assert sorted(done.stdout.splitlines()) == ["0 2 0 2 2", "1 2 1 2 2"], done.stderr


def test_gloo_uses_the_address_of_a_program() -> None:
    program = START.replace("mpidist", "gloo") + "assert 'mpi4py.MPI' not in sys.modules"
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    done = jobs.run_script(program, 2, env={"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)})
    assert done.returncode == 0, done.stderr


def test_a_missing_backend_is_reported_once() -> None:
    done = jobs.run_script(START.replace('"mpidist"', ""), 2)
    assert done.stderr.count('use init_process_group("mpidist")') == 1, done.stderr


SPAWN = """
import os, sys
import torch.distributed as dist, torch.multiprocessing as mp

def work(rank, keywords):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    dist.init_process_group("mpidist", **keywords and {"rank": rank, **keywords})
    print(dist.get_rank(), dist.get_world_size())

if __name__ == "__main__":
    mp.spawn(work, (eval(sys.argv[2]),), nprocs=int(sys.argv[1]))
"""


@pytest.mark.parametrize("keywords", [{}, {"world_size": 2}], ids=len)
def test_spawned_processes_name_their_launcher(keywords: dict[str, int], tmp_path: Path) -> None:
    done = _spawned(tmp_path, 2, keywords)
    assert done.returncode == 1
    assert "LaunchError: multiprocessing (such as torch.multiprocessing.spawn) started this process" in done.stderr
    assert "Call the training function once, without spawn()" in done.stderr
    assert f"python -m mpidist launch -n {keywords.get('world_size', 'N')} train.py" in done.stderr


def test_one_spawned_process_trains_alone(tmp_path: Path) -> None:
    assert _spawned(tmp_path, 1, {"world_size": 1}).stdout.split() == ["0", "1"]


def _spawned(folder: Path, count: int, keywords: dict[str, int]) -> subprocess.CompletedProcess[str]:
    path = folder / "train.py"
    path.write_text(SPAWN)
    command = [sys.executable, str(path), str(count), str(keywords)]
    return subprocess.run(command, env=jobs.child_environment(), capture_output=True, text=True)


def test_torchrun_is_named_by_the_error() -> None:
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    program = "import torch.distributed as dist; dist.init_process_group('mpidist')"
    done = subprocess.run(
        [sys.executable, "-c", program], env=jobs.child_environment(torchrun), capture_output=True, text=True
    )
    assert "LaunchError: torchrun started this process with RANK=1 and WORLD_SIZE=2" in done.stderr
    assert "python -m mpidist launch -n 2 train.py" in done.stderr


def test_a_place_of_another_job_is_an_error() -> None:
    done = jobs.run_script(START.replace('"mpidist"', '"mpidist", rank=0, world_size=3'), 2)
    assert "init_process_group() was called with rank=0 and world_size=3, but MPI has rank" in done.stderr


def test_the_store_is_over_mpi() -> None:
    program = """
    from datetime import timedelta
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.set("key", "value")
    assert store.get("key") == b"value"
    assert store.check(["key"]) and not store.check(["other"])
    store.add("number", rank + 1)
    while store.add("number", 0) != 3:
        pass
    try:
        store.wait(["never"], timedelta(seconds=0.2))
    except dist.DistStoreError as error:
        assert "never" in str(error)
    else:
        raise AssertionError
    dist.barrier()
    print(type(store.underlying_store.underlying_store).__name__)
    """
    done = jobs.run_script(START + dedent(program), 2)
    assert done.stdout.split() == ["MpiStore", "MpiStore"], done.stderr


def test_a_rank_that_leaves_ends_the_others() -> None:
    program = """
    if rank == 1:
        raise SystemExit(0)
    dist.all_reduce(torch.ones(3))
    """
    done = jobs.run_script(START + dedent(program), 2)
    assert done.returncode != 0
    assert "PeerError" in done.stderr
    assert "with Join([model]):" in done.stderr
    assert "should_checkpoint" not in done.stderr


def test_a_mismatch_names_both_lines_of_the_program() -> None:
    program = """
    if rank == 0:
        dist.all_reduce(torch.ones(3))
    else:
        dist.broadcast(torch.ones(3), 0)
    """
    done = jobs.run_script(START + dedent(program), 2)
    assert done.returncode != 0
    assert "all_reduce SUM of float32(3,)" in done.stderr
    assert "broadcast from rank 0 of float32(3,)" in done.stderr
    assert "torch/distributed" not in done.stderr.split("different calls")[-1]


@pytest.mark.parametrize("backend", ["mpidist", "gloo"])
def test_the_backend_is_chosen_by_name_alone(backend: str) -> None:
    program = START.replace('"mpidist"', f'"{backend}"') + "t = torch.ones(3); dist.all_reduce(t); assert t[0] == size"
    done = jobs.run_script(program, 2)
    assert done.returncode == 0, done.stderr


def test_import_torch_leaves_mpidist_alone() -> None:
    program = "import sys, torch; print([name for name in sys.modules if name.split('.')[0] in ('mpidist', 'mpi4py')])"
    done = _without_a_launcher(program)
    assert done.stdout.strip() == "[]", done.stderr


def test_an_error_in_the_entry_point_is_a_warning() -> None:
    program = (
        "import warnings, torch, mpidist_torch_entry as entry\n"
        "torch.distributed.Backend.register_backend = None\n"
        "with warnings.catch_warnings(record=True) as told:\n"
        "    warnings.simplefilter('always')\n"
        "    entry.register()\n"
        "print('mpidist is no backend' in str(told[0].message))"
    )
    assert _without_a_launcher(program).stdout.strip() == "True"


def _without_a_launcher(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=jobs.child_environment(), capture_output=True, text=True, check=True)


def test_a_program_that_ends_without_a_farewell() -> None:
    program = "dist.all_reduce(torch.ones(3), async_op=True).wait(); print('end')"
    done = jobs.run_script(START + program, 2)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["end", "end"], "")


def test_a_group_of_mpidist_beside_gloo() -> None:
    program = """
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    group = dist.new_group(backend="mpidist")
    for each in (None, group):
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=each)
        assert tensor[0] == size
    """
    done = jobs.run_script(START + dedent(program), 2)
    assert done.returncode == 0, done.stderr


IS_BACKEND = hasattr(torch._C._distributed_c10d.Backend, "supports_reconfigure")
only_backend = pytest.mark.skipif(not IS_BACKEND, reason="torch takes a Backend of Python, and the name, from 2.14 on")


@only_backend
def test_the_name_mpi() -> None:
    program = """
    assert dist.get_backend() == "mpi"
    half = dist.new_group([0])
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor[0] == size
    if rank == 0:
        dist.all_reduce(tensor, group=half)
    print("end")
    """
    done = jobs.run_script(START.replace("mpidist", "mpi") + dedent(program), 2)
    assert (done.returncode, done.stdout.split()) == (0, ["end", "end"]), done.stderr


@only_backend
@pytest.mark.parametrize("devices", ["cpu:mpidist", "cpu:mpidist,meta:gloo"])
def test_a_backend_for_each_device(devices: str) -> None:
    program = """
    groups = [None, dist.new_group([0, 1]), dist.new_group(backend="cpu:gloo"), dist.new_group(backend="cpu:mpidist")]
    for group in groups:
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=group)
        assert tensor[0] == size
    kinds = [type(group._get_backend(torch.device("cpu"))).__name__ for group in [dist.group.WORLD, *groups[1:]]]
    assert kinds == ["MpidistBackend", "MpidistBackend", "ProcessGroupGloo", "MpidistBackend"], kinds
    print("end")
    """
    done = jobs.run_script(START.replace("mpidist", devices) + dedent(program), 2)
    assert (done.returncode, done.stdout.split()) == (0, ["end", "end"]), done.stderr


@only_backend
def test_torch_finds_the_backend_by_its_name() -> None:
    """By the entry point of torch.distributed, where that of torch is off."""
    program = (
        "import torch, torch.distributed as dist\n"
        "assert 'MPIDIST' not in dist.Backend._plugins\n"
        "dist.init_process_group('mpidist', store=dist.HashStore(), rank=0, world_size=1)\n"
        "print(dist.get_backend())"
    )
    environment = {**jobs.child_environment(), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "mpidist", done.stderr


@only_backend
def test_monitored_barrier_names_who_is_missing() -> None:
    program = """
    from datetime import timedelta
    from mpidist.errors import CollectiveTimeoutError
    dist.monitored_barrier()
    if rank == 0:
        try:
            dist.monitored_barrier(timeout=timedelta(seconds=1))
        except CollectiveTimeoutError as error:
            print("rank 1: has not reached it" in str(error))
        dist.distributed_c10d._get_default_store().set("late", "yes")
    else:
        dist.distributed_c10d._get_default_store().wait(["late"])
    """
    done = jobs.run_script(START + dedent(program), 2)
    assert done.stdout.split() == ["True"], done.stderr


def test_groups_under_the_wrapper_of_debugging() -> None:
    program = """
    import gc
    group = dist.new_group()
    gc.collect()
    for each in (None, group):
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=each)
        assert tensor[0] == size
        found = [None] * size
        dist.all_gather_object(found, rank, group=each)
        assert found == [0, 1]
    dist.destroy_process_group()
    print("end")
    """
    done = jobs.run_script(START + dedent(program), 2, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    assert (done.returncode, done.stdout.split()) == (0, ["end", "end"]), done.stderr


def test_the_timeout_of_a_group() -> None:
    program = """
    from datetime import timedelta
    from mpidist.errors import CollectiveTimeoutError
    group = dist.new_group(timeout=timedelta(seconds=1))
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        try:
            dist.barrier(group)
        except CollectiveTimeoutError as error:
            assert "init_process_group or new_group" in str(error)
            print("late")
        store.set("late", "yes")
    else:
        store.wait(["late"])
    """
    done = jobs.run_script(START + dedent(program), 2)
    assert "late" in done.stdout, done.stderr


def test_a_message_that_never_comes_ends_its_future() -> None:
    program = """
    import time
    from datetime import timedelta
    dist.destroy_process_group()
    dist.init_process_group("mpidist", timeout=timedelta(seconds=1))
    store = dist.distributed_c10d._get_default_store()
    store.set_timeout(timedelta(seconds=60))
    if rank == 0:
        other = dist.all_reduce(torch.ones(3), async_op=True)
        other.wait()
        began = time.monotonic()
        try:
            dist.irecv(torch.empty(3), 1).get_future().wait()
        except RuntimeError as error:
            assert "recv from rank 1" in str(error), error
            print("late", time.monotonic() - began < 10, flush=True)
        store.set("late", "yes")
        store.wait(["seen"])
    else:
        dist.all_reduce(torch.ones(3))
        store.wait(["late"])
        store.set("seen", "yes")
    os._exit(0)
    """
    done = jobs.run_script(START + dedent(program), 2)
    assert done.stdout.split() == ["late", "True"], done.stdout + done.stderr
    assert done.stderr.count("can no longer be used") < 5, done.stderr


ASYNC_SAVE = """
import sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

dist.init_process_group("mpidist")
saving = dist.new_group(backend=sys.argv[2])  # the thread that saves must not share the group of the training
state = {"weight": torch.arange(10.0), "step": 3}
saved = dcp.async_save(state, checkpoint_id=sys.argv[1], process_group=saving)
for _ in range(100):
    dist.all_reduce(torch.ones(3))
saved.result()
loaded = {"weight": torch.zeros(10), "step": 0}
dcp.load(loaded, checkpoint_id=sys.argv[1])
assert torch.equal(loaded["weight"], torch.arange(10.0)) and loaded["step"] == 3
print("loaded", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("backend", [pytest.param("mpidist", marks=only_backend), "gloo"])
def test_checkpoints_are_saved_while_training_goes_on(backend: str, tmp_path: Path) -> None:
    job = jobs.run_script(ASYNC_SAVE, 2, str(tmp_path / "checkpoint"), backend, timeout=120)
    assert (job.returncode, job.stdout.split()) == (0, ["loaded"] * 2), job.stderr
