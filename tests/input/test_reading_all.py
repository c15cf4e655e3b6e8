"""A stream of which every rank reads everything is told, once, unless that was asked for."""

from __future__ import annotations

import pytest

from mpidist.input import AutoShardPolicy, Dataset
from mpidist.input.distribute import distribute_dataset, distribute_from_function
from tests.input.policy_helpers import read
from tests.input.worker_threads import run_workers

pytestmark = pytest.mark.one_rank


def first_numbers():
    yield from range(4)


def second_numbers():
    yield from range(4)


def told(caplog, make, counts=(1, 1), distribute=distribute_dataset):
    """Return the warnings of all workers that distribute a dataset."""
    caplog.clear()
    with caplog.at_level("WARNING", "mpidist"):
        run_workers(lambda workers: distribute(make(), workers, None), counts)
    return [record.getMessage() for record in caplog.records if "goes through all" in record.getMessage()]


def test_a_stream_is_warned_of_once(caplog):
    def make(generator=first_numbers):
        return Dataset.from_generator(generator).map(lambda x: x).batch(2)

    assert told(caplog, make, (2,)) == []
    (text,) = told(caplog, make)
    assert "each of the 2 ranks goes through all of from_generator(first_numbers).map.batch(2)" in text
    assert "AutoShardPolicy.DATA" in text
    assert "context.input_pipeline_id" in text
    assert told(caplog, make, (1, 1, 1)) == []
    assert len(told(caplog, lambda: make(second_numbers))) == 1


def test_so_are_datasets_that_a_function_makes(caplog):
    def make():
        return Dataset.range(11, 17).interleave(lambda x: Dataset.range(x)).batch(2)

    assert len(told(caplog, make)) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: Dataset.range(8).batch(2).map(lambda x: x),
        lambda: Dataset.from_files(["0:2", "2:2"], read).batch(2),
        lambda: Dataset.from_source(["0:2", "2:2"]).interleave(lambda path: Dataset.from_files([path], read)).batch(2),
        lambda: Dataset.from_generator(lambda: iter(range(4))).batch(2).with_options(AutoShardPolicy.DATA),
        lambda: Dataset.from_generator(lambda: iter(range(4))).batch(2).with_options(AutoShardPolicy.OFF),
    ],
    ids=["rows", "files", "files of a function", "DATA", "OFF"],
)
def test_nothing_is_told_of_what_is_dealt_or_asked_for(make, caplog):
    assert told(caplog, make) == []


def test_nothing_is_told_of_datasets_of_a_function(caplog):
    def make():
        return lambda context: Dataset.from_generator(lambda: iter(range(4))).batch(2)

    assert told(caplog, make, distribute=distribute_from_function) == []
