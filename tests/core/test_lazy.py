"""Names are imported on first use, so that a program loads only what it needs."""

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
from mpidist.core.lazy import ADVICE
from tests.support.ranks.jobs import child_environment
from tests.support.speed import scaled

pytestmark = pytest.mark.one_rank

FACADES = ["mpidist", "mpidist.experimental", "mpidist.errors"]
# Packages that a synchronous program does not need.
LATE = ("checkpoint", "cli", "coordinator", "elastic", "errors", "estimator", "parameter_server", "v1")


def run_python(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], env=child_environment(), capture_output=True, text=True, timeout=scaled(60)
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.jobs
def test_synchronous_program_loads_few_packages() -> None:
    program = "import sys, numpy, mpidist; mpidist.MirroredStrategy; mpidist.optimizers.Adam; mpidist.Dataset"
    loaded = run_python(f"{program}; print(*sys.modules)").split()
    rooms = {name.split(".")[1] for name in loaded if name.startswith("mpidist.")}
    assert rooms.isdisjoint(LATE)
    assert "mpi4py.MPI" not in loaded


@pytest.mark.jobs
def test_communicator_loads_five_packages() -> None:
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
def test_two_threads_may_import_at_once(names: tuple[str, str]) -> None:
    # Three fresh processes: without a lock nine of twelve failed.
    assert [run_python(TWO_THREADS % (names,)) for _ in range(3)] == ["[]\n"] * 3


@pytest.mark.jobs
def test_default_strategy_needs_no_import() -> None:
    assert run_python("import mpidist; print(mpidist.has_strategy(), mpidist.get_strategy().num_replicas_in_sync)") == (
        "False 1\n"
    )


@pytest.mark.jobs
@pytest.mark.parametrize("room", ["checkpoint", "estimator", "parameter_server"])
def test_packages_need_no_import(room: str) -> None:
    run_python(f"import mpidist; mpidist.{room}.__all__")


@pytest.mark.jobs
@pytest.mark.parametrize("facade", FACADES)
def test_names_by_attribute_and_by_import(facade: str) -> None:
    names = importlib.import_module(facade).__all__
    run_python(f"import {facade} as module; [getattr(module, name) for name in {names}]")
    run_python(f"from {facade} import {', '.join(names)}")


@pytest.mark.parametrize("facade", FACADES)
def test_dir_lists_the_public_names(facade: str) -> None:
    module = importlib.import_module(facade)
    assert dir(module) == sorted(module.__all__)


@pytest.mark.parametrize("facade", FACADES)
def test_type_checkers_see_the_same_objects(facade: str) -> None:
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


def test_missing_name_raises() -> None:
    with pytest.raises(AttributeError, match="module 'mpidist' has no attribute 'Varable'$") as raised:
        mpidist.Varable
    assert (raised.value.name, raised.value.obj) == ("Varable", mpidist)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("init", "Communicator starts everything"),
        ("shutdown", "the end of the program ends everything"),
        ("get_rank", r"type: mpidist\.rank\(\)"),
        ("Get_size", r"type: mpidist\.size\(\)"),
        ("local_rank", "mpidist assigns the GPUs of a node by itself"),
        ("allreduce", r"mpidist\.Communicator\(\), and comm\.all_reduce"),
    ],
)
def test_names_of_other_libraries_get_advice(name: str, advice: str) -> None:
    with pytest.raises(AttributeError, match=f"has no attribute '{name}': .*{advice}"):
        getattr(mpidist, name)


def test_advice_is_for_missing_names_only() -> None:
    assert set(ADVICE).isdisjoint(mpidist.__all__)
    methods = set(re.findall(r"comm\.(\w+)", " ".join(ADVICE.values())))
    assert methods
    assert methods <= set(dir(mpidist.Communicator))


def test_star_import_hides_no_library() -> None:
    names: dict[str, object] = {}
    exec("from mpidist import *", names)
    assert {"torch", "keras", "jax"}.isdisjoint(names)
    assert names["Variable"] is mpidist.Variable


def test_module_has_no_helpers() -> None:
    left = {name for name in vars(mpidist) if not name.startswith("_")} - set(mpidist.__all__)
    assert {name for name in left if not inspect.ismodule(getattr(mpidist, name))} == set()


def test_variable_has_a_signature() -> None:
    assert str(inspect.signature(mpidist.Variable)).startswith("(initial_value: 'Any' = None, trainable:")
    assert str(inspect.signature(mpidist.Variable)).endswith("-> None")
