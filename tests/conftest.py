"""Settings of all tests, for plain pytest and for pytest under mpirun: see tests/support for the parts."""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

import mpidist  # it sets what the MPI of this machine needs, before MPI starts
from tests.support.fake_cupy.fixture import fake_gpus  # noqa: F401 - pytest finds fixtures by their names here
from tests.support.gpu_strategies import gpu_strategy  # noqa: F401 - as above
from tests.support.layouts import layouts
from tests.support.leaks import Inventory
from tests.support.sessions import LastResort, OneOutcome

# All ranks must draw the same examples: nothing random, stored, shrunk (each shrinking step depends on one
# rank's outcome) or decided by the clock.
hypothesis.settings.register_profile(
    "ranks",
    derandomize=True,
    database=None,
    deadline=None,
    phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
    report_multiple_bugs=False,
    max_examples=50,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("ranks")

_failed = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--ranks",
        type=int,
        metavar="N",
        help="fail unless the session has N ranks: N worlds of one rank would pass without testing much",
    )


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
    last_resort = LastResort()
    config.pluginmanager.register(last_resort, "mpidist-last-resort")
    if world.size > 1:
        # What communicators of all ranks share is made once, and no test seems to leave it behind.
        config.add_cleanup(mpidist.Communicator().close)
        # Ranks must not clear away one another's old temporary folders.
        temporary = tempfile.TemporaryDirectory(prefix=f"mpidist-rank-{world.rank}-")
        config.add_cleanup(temporary.cleanup)
        config._tmp_path_factory._basetemp = Path(temporary.name).resolve()  # type: ignore[attr-defined]
        one_outcome = OneOutcome(world, last_resort)
        config.pluginmanager.register(one_outcome, "mpidist-one-outcome")
        one_outcome.quiet(config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    from mpi4py import MPI

    size = MPI.COMM_WORLD.size
    for item in items:
        marker = item.get_closest_marker("min_ranks")
        if marker is not None and size < marker.args[0]:
            item.add_marker(pytest.mark.skip(reason=f"needs {marker.args[0]} ranks, this session has {size}"))
    if size > 1:
        # Doctests show what one process prints.
        def alone(item: pytest.Item) -> bool:
            return isinstance(item, pytest.DoctestItem) or item.get_closest_marker("one_rank") is not None

        config.hook.pytest_deselected(items=[item for item in items if alone(item)])
        items[:] = [item for item in items if not alone(item)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[_failed] = item.stash.get(_failed, False) or report.failed
    return report


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves threads or communicators; one that failed already has said enough."""
    before = Inventory()
    yield
    if not request.node.stash.get(_failed, False):
        leaked = before.leaked()
        if leaked:
            pytest.fail("the test leaves behind:\n" + "\n".join(leaked), pytrace=False)


@pytest.fixture(params=layouts())
def strategy(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A strategy in each layout of tests.support.layouts, closed afterwards."""
    with request.param.open() as opened:
        yield opened
