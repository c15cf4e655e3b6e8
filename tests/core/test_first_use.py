"""Names that are imported on first use: all are there, and a program does not pay for those that it does not use."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mpidist
from mpidist.core.advice import IN_PLACE_OF
from tests.support.ranks.jobs import child_environment
from tests.support.speed import scaled

pytestmark = pytest.mark.one_rank

FACADES = ["mpidist", "mpidist.experimental", "mpidist.errors"]
# What a synchronous program does not need.
LATE = ("checkpoint", "cli", "coordinator", "elastic", "errors", "estimator", "parameter_server", "v1")


def run_python(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], env=child_environment(), capture_output=True, text=True, timeout=scaled(60)
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.jobs
def test_rooms_that_a_synchronous_program_does_not_need_are_not_loaded() -> None:
    program = "import sys, numpy, mpidist; mpidist.MirroredStrategy; mpidist.optimizers.Adam; mpidist.Dataset"
    loaded = run_python(f"{program}; print(*sys.modules)").split()
    rooms = {name.split(".")[1] for name in loaded if name.startswith("mpidist.")}
    assert rooms.isdisjoint(LATE)
    assert "mpi4py.MPI" not in loaded


@pytest.mark.jobs
def test_a_program_with_a_communicator_alone_loads_no_more_than_that() -> None:
    program = "import sys, mpidist; before = {*sys.modules}; mpidist.Communicator; print(*before, '|', *sys.modules)"
    before, after = run_python(program).split("|")
    assert "numpy" not in before.split()
    rooms = {name.split(".")[1] for name in after.split() if name.startswith("mpidist.")}
    assert rooms == {"arrays", "collectives", "core", "native", "topology"}


TWO_THREADS = """
import sys, threading, mpidist
together, errors = threading.Barrier(2), []
def use(name):
    together.wait()
    try:
        mpidist.get_strategy() if name == "get_strategy" else getattr(mpidist, name)
    except BaseException as error:
        errors.append(f"{name}: {error!r}")
threads = [threading.Thread(target=use, args=(name,)) for name in %r]
[thread.start() for thread in threads], [thread.join() for thread in threads]
print(errors)
"""


@pytest.mark.jobs
@pytest.mark.parametrize("names", [("get_strategy", "MirroredStrategy"), ("Checkpoint", "elastic")])
def test_two_threads_may_be_the_first_to_use_names(names: tuple[str, str]) -> None:
    # Three fresh processes: without a lock nine of twelve failed.
    assert [run_python(TWO_THREADS % (names,)) for _ in range(3)] == ["[]\n"] * 3


@pytest.mark.jobs
def test_the_default_strategy_is_there_without_an_import_of_its_own() -> None:
    assert run_python("import mpidist; print(mpidist.has_strategy(), mpidist.get_strategy().num_replicas_in_sync)") == (
        "False 1\n"
    )


@pytest.mark.jobs
@pytest.mark.parametrize("room", ["checkpoint", "estimator", "parameter_server"])
def test_rooms_are_there_without_an_import_of_their_own(room: str) -> None:
    run_python(f"import mpidist; mpidist.{room}.__all__")


@pytest.mark.jobs
@pytest.mark.parametrize("facade", FACADES)
def test_every_name_is_there_by_attribute_and_by_import(facade: str) -> None:
    names = importlib.import_module(facade).__all__
    run_python(f"import {facade} as module; [getattr(module, name) for name in {names}]")
    run_python(f"from {facade} import {', '.join(names)}")


@pytest.mark.parametrize("facade", FACADES)
def test_completion_shows_the_names_and_nothing_else(facade: str) -> None:
    module = importlib.import_module(facade)
    assert dir(module) == sorted(module.__all__)


@pytest.mark.parametrize("facade", FACADES)
def test_type_checkers_see_the_same_object_that_a_program_gets(facade: str) -> None:
    tree = ast.parse(Path(str(importlib.import_module(facade).__file__)).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    seen = {
        alias.name: statement.module
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    for name, home in seen.items():
        got = getattr(importlib.import_module(facade), name)
        expected = importlib.import_module(f"{home}.{name}") if home == facade else None
        assert got is (expected or getattr(importlib.import_module(home), name))


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'mpidist' has no attribute 'Varable'$") as raised:
        mpidist.Varable
    assert (raised.value.name, raised.value.obj) == ("Varable", mpidist)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("init", "nothing has to be started"),
        ("shutdown", "nothing has to be ended"),
        ("get_rank", r"type: mpidist\.rank\(\)"),
        ("Get_size", r"type: mpidist\.size\(\)"),
        ("local_rank", "a rank finds its GPU by itself"),
        ("allreduce", r"mpidist\.Communicator\(\), and comm\.all_reduce"),
    ],
)
def test_a_name_of_another_library_says_what_to_type(name: str, advice: str) -> None:
    with pytest.raises(AttributeError, match=f"has no attribute '{name}': .*{advice}"):
        getattr(mpidist, name)


def test_no_name_that_is_there_is_advised_against() -> None:
    assert set(IN_PLACE_OF).isdisjoint(mpidist.__all__)
    methods = set(re.findall(r"comm\.(\w+)", " ".join(IN_PLACE_OF.values())))
    assert methods
    assert methods <= set(dir(mpidist.Communicator))


def test_a_star_import_hides_no_other_library() -> None:
    names: dict[str, object] = {}
    exec("from mpidist import *", names)
    assert {"torch", "keras", "jax"}.isdisjoint(names)
    assert names["Variable"] is mpidist.Variable


def test_helpers_of_the_import_are_not_left_in_the_module() -> None:
    left = {name for name in vars(mpidist) if not name.startswith("_")} - set(mpidist.__all__)
    assert {name for name in left if not inspect.ismodule(getattr(mpidist, name))} == set()


def test_a_variable_shows_the_arguments_it_takes() -> None:
    assert str(inspect.signature(mpidist.Variable)).startswith("(initial_value: 'Any' = None, trainable:")
    assert str(inspect.signature(mpidist.Variable)).endswith("-> None")
