"""Settings of all tests, for plain pytest and for pytest under mpirun: see tests/support for the parts."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

import mpidist  # it sets what the MPI of this machine needs, before MPI starts
from tests.support.fake_cupy.fixture import fake_gpus  # noqa: F401 - pytest finds fixtures by their names here
from tests.support.fake_cupy.nccl_messages import leave_the_world_alone
from tests.support.gpu_strategies import gpu_strategy  # noqa: F401 - as above
from tests.support.ranks import jobs
from tests.support.ranks.layouts import Layout, is_of_one_process, layouts
from tests.support.ranks.leaks import Inventory
from tests.support.ranks.sessions import LastResort, OneOutcome, test_seconds
from tests.support.ranks.shared import Shared
from tests.support.results import Results
from tests.support.speed import scaled, slowness

_failed = pytest.StashKey[bool]()
_shared = pytest.StashKey[Shared]()
_HAS_TIMEOUT = importlib.util.find_spec("pytest_timeout") is not None
# All tests of such a file are for one process.
_ALONE = re.compile(r"^pytestmark = (\[[^\]]*?)?pytest\.mark\.one_rank\b", re.MULTILINE)


def pytest_addoption(parser: pytest.Parser) -> None:
    if not _HAS_TIMEOUT:
        # A machine for one evening may lack pytest-timeout: then LastResort ends a test that overstays.
        parser.addoption("--timeout", type=float, help="seconds that a test may take")
        parser.addini("timeout", "seconds that a test may take")
    parser.addoption(
        "--ranks",
        type=int,
        metavar="N",
        help="fail unless the session has N ranks: N worlds of one rank would pass without testing much",
    )
    parser.addoption("--results", type=Path, metavar="FILE", help="write what became of each test, as JSON")
    parser.addoption("--long", action="store_true", help="run the tests that are marked long, too")


@pytest.hookimpl(trylast=True)  # after the terminal reporter has come to be
def pytest_configure(config: pytest.Config) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    expected = config.getoption("--ranks")
    if expected is not None and expected != world.size:
        raise pytest.UsageError(
            f"--ranks {expected} was given and MPI.COMM_WORLD has {world.size}; "
            f"type `mpirun -n {expected} python -m pytest --with-mpi --ranks {expected} tests` with the "
            "mpirun of the MPI library that mpi4py loads"
        )
    if not _HAS_TIMEOUT:
        config.addinivalue_line("markers", "timeout(seconds): of pytest-timeout, which is not installed")
    last_resort = LastResort()
    config.pluginmanager.register(last_resort, "mpidist-last-resort")
    results = config.getoption("--results")
    if results is not None and world.rank == 0:
        config.pluginmanager.register(Results(results), "mpidist-results")
    if world.size > 1:
        # What communicators of all ranks share is made once, and no test seems to leave it behind.
        config.add_cleanup(mpidist.Communicator().close)
        leave_the_world_alone()
        # Ranks must not clear away one another's old temporary folders.
        temporary = tempfile.TemporaryDirectory(prefix=f"mpidist-rank-{world.rank}-")
        config.add_cleanup(temporary.cleanup)
        config._tmp_path_factory._basetemp = Path(temporary.name).resolve()  # type: ignore[attr-defined]
        one_outcome = OneOutcome(world, last_resort)
        config.pluginmanager.register(one_outcome, "mpidist-one-outcome")
        one_outcome.quiet(config)
    shared = config.stash[_shared] = Shared()
    config.add_cleanup(shared.close)
    config.pluginmanager.register(shared, "mpidist-shared")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    from mpi4py import MPI

    if MPI.COMM_WORLD.size > 1 and collection_path.suffix == ".py" and _ALONE.search(collection_path.read_text()):
        return True
    return None


def pytest_pycollect_makemodule(module_path: Path) -> None:
    # It takes as long to import as NumPy, and many sessions do without.
    if "hypothesis" in module_path.read_text():
        importlib.import_module("tests.support.drawing")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    from mpi4py import MPI

    size = MPI.COMM_WORLD.size
    for item in items:
        if slowness() > 1:
            item.add_marker(pytest.mark.timeout(scaled(test_seconds(item))), append=False)
        marker = item.get_closest_marker("min_ranks")
        if marker is not None and size < marker.args[0]:
            item.add_marker(pytest.mark.skip(reason=f"needs {marker.args[0]} ranks, this session has {size}"))
    if not config.getoption("--long"):
        _leave_out(items, config, lambda item: item.get_closest_marker("long") is not None)
    if size > 1:
        _leave_out(items, config, _is_for_one_process)


def _leave_out(items: list[pytest.Item], config: pytest.Config, condition: Callable[[pytest.Item], bool]) -> None:
    out = [item for item in items if condition(item)]
    config.hook.pytest_deselected(items=out)
    numbers = set(map(id, out))
    items[:] = [item for item in items if id(item) not in numbers]


def _is_for_one_process(item: pytest.Item) -> bool:
    """Whether ``item`` says nothing on several ranks that it does not say on one: doctests show what one prints."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    layout, on_gpus = params.get("strategy"), params.get("gpu_strategy", "multi_worker")
    alone = (isinstance(layout, Layout) and is_of_one_process(layout)) or on_gpus != "multi_worker"
    return alone or isinstance(item, pytest.DoctestItem) or item.get_closest_marker("one_rank") is not None


def pytest_runtest_setup(item: pytest.Item) -> None:
    jobs.unmarked_test[:] = [] if item.get_closest_marker("jobs") is not None else [item.nodeid]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[_failed] = item.stash.get(_failed, False) or report.failed
    return report


@pytest.fixture(autouse=True)
def _cores(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let a test that is marked all_cores leave the core that ``python -m tests.checks`` has put its part on."""
    if request.node.get_closest_marker("all_cores") is None:
        yield
        return
    before = os.sched_getaffinity(0)
    # The system takes out those that this process may not have.
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    yield
    os.sched_setaffinity(0, before)


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves threads or communicators; one that failed already has said enough."""
    shared = request.config.stash[_shared]
    if "strategy" in request.fixturenames and _shares(request):
        layout = request.node.callspec.params["strategy"]
        shared.get(layout, layout.open)
    before = Inventory()
    yield
    if request.node.stash.get(_failed, False):
        return
    broken = shared.broken()
    leaked = before.leaked()
    if broken:
        leaked.append(f"{', '.join(map(str, broken))}, which others share, unusable; mark it own_strategy")
    if leaked:
        pytest.fail("the test leaves behind:\n" + "\n".join(leaked), pytrace=False)


def _shares(request: pytest.FixtureRequest) -> bool:
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    return isinstance(params.get("strategy"), Layout) and request.node.get_closest_marker("own_strategy") is None


@pytest.fixture(params=layouts())
def strategy(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A strategy in each layout of tests.support.ranks.layouts; tests share it unless they are marked own_strategy."""
    layout = request.param
    if _shares(request):
        yield request.config.stash[_shared].get(layout, layout.open)
    else:
        with layout.open() as opened:
            yield opened
