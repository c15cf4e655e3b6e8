"""The acceptance tests that ask nothing of a strategy but to be one, for strategies that need a job of their own."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

# Not those about the engine and about ranks, which would wait for the servers.
_MODULES = (
    "test_examples_reductions",
    "test_examples_variables",
    "test_examples_input",
    "test_extended",
    "test_reduce_and_gather",
    "test_replica_context",
    "test_strategy",
    "test_variables",
    "test_variable_tables",
    "test_variables_as_values",
)
# They say where variables are, and what is so in the v2 forms alone.
_OTHERS = ("test_axis_is_required_in_the_v2_form_alone", "test_behaviour_matrix", "test_attributes")


def acceptance_tests() -> Iterator[tuple[str, Callable[[Any], None]]]:
    """Yield name and function of each that takes the strategy alone, and is for strategies with one copy as well."""
    for stem in _MODULES:
        module = importlib.import_module(f"tests.acceptance.{stem}")
        for name, test in vars(module).items():
            is_test = name.startswith("test_") and name not in _OTHERS and inspect.isfunction(test)
            if is_test and list(inspect.signature(test).parameters) == ["strategy"] and _is_for_one_copy(module, test):
                yield f"{stem}::{name}", test


def _is_for_one_copy(module: Any, test: Any) -> bool:
    of_module = getattr(module, "pytestmark", [])
    marks = [*getattr(test, "pytestmark", []), *(of_module if isinstance(of_module, list) else [of_module])]
    for mark in marks:
        if mark.name in ("min_ranks", "skip", "skipif"):
            return False
        if mark.name == "parametrize" and not any(str(value.values[0]).startswith("central") for value in mark.args[1]):
            return False
    return True
