"""Positions that earlier versions have saved: they go on with the same elements, in this pass and in the next."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from mpidist.core import nest
from mpidist.input import SHARD_HINT, Dataset, distribute_dataset, distribute_from_function
from mpidist.input.input_options import InputWorkers
from tests.input.policy_helpers import AUTO, DATA, HINT, OFF, named, read, rows_of, stream
from tests.input.worker_threads import steps_of

pytestmark = pytest.mark.one_rank

# Saved at version 1 of the format, on one worker or on several, after some steps of the first or second pass.
SAVED = json.loads(Path(__file__).with_name("saved_positions.json").read_text())
NAMES, _ = named([7, 0, 5, 9, 4])


def interleaved():
    return Dataset.range(5).shuffle().interleave(lambda x: Dataset.range(int(x) + 3).shuffle(), 2)


def sampled():
    return Dataset.sample_from_datasets([Dataset.range(9).shuffle(), Dataset.range(20, 30)], [1, 3])


def joined():
    return Dataset.range(9).batch(4).concatenate(Dataset.range(20, 30).shuffle().batch(4))


def windows():
    return Dataset.range(20).window(5, shift=2).flat_map(lambda window: window.shuffle().batch(5)).unbatch()


def blocks():
    return Dataset.range(37).shuffle(12, block_size=4).batch(5).map(lambda x: x).shuffle(3).prefetch(1)


def files():
    return Dataset.from_source(NAMES).shuffle().interleave(lambda p: Dataset.from_files([p], read).shuffle(3), 2)


CASES = {
    "rows": (DATA, lambda: Dataset.range(37).shuffle().map(lambda x: x + 0).batch(4).prefetch(2)),
    "chosen": (DATA, lambda: Dataset.range(11).shuffle().repeat(3).skip(2).take(29).shard(1, 0).batch(4)),
    "blocks": (OFF, blocks),
    "endless": (DATA, lambda: Dataset.range(7).repeat().shuffle(5).take(40).batch(4)),
    "stream": (AUTO, lambda: stream(37).shuffle(10).repeat(2).batch(4).map(lambda x: x + 0)),
    "function": (None, lambda: stream(37).shuffle(10).repeat(2).batch(4).map(lambda x: x + 0)),
    "interleave": (DATA, lambda: interleaved().batch(4)),
    "sample": (OFF, lambda: sampled().batch(4)),
    "concatenate": (OFF, joined),
    "cache": (DATA, lambda: Dataset.range(17).shuffle().cache().shuffle().batch(4)),
    "window": (DATA, lambda: windows().batch(4)),
    "filter": (DATA, lambda: Dataset.range(30).shuffle().filter(lambda x: x % 3).batch(4, drop_remainder=True)),
    "files": (AUTO, lambda: files().batch(4)),
    "hint": (HINT, lambda: Dataset.range(37).shuffle().shard(SHARD_HINT, SHARD_HINT).batch(4)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_position_of_an_earlier_version_goes_on(name):
    policy, make = CASES[name]
    workers = InputWorkers(1, 0, (1,), None, True)
    if policy is None:
        dataset = distribute_from_function(lambda ctx: make().shard(1, 0), workers, None)
    else:
        dataset = distribute_dataset(make().with_options(auto_shard_policy=policy), workers, None)
    saved = SAVED[name]
    iterator = iter(dataset)
    iterator.restore(saved["state"])
    assert iterator.state() == saved["state"]
    assert rows_of(steps_of(iterator)) == saved["rest"]
    assert rows_of(steps_of(dataset)) == saved["next_pass"]


# Saved by commit c3f966c after 3 steps of the first pass.
OLDER = json.loads(Path(__file__).with_name("data").joinpath("c3f966c.json").read_text())
ARRAYS = {"x": np.arange(60).reshape(30, 2), "y": np.arange(30)}
OLDER_CASES = {
    "array": lambda: Dataset.from_tensor_slices(ARRAYS).shuffle().batch(4),
    "cipher": lambda: Dataset.range(5_000_000).shuffle().map(lambda x: x + 0).batch(6),
    "windows": lambda: Dataset.range(5_000_000).shuffle(4096, block_size=1024).batch(6),
    "seeded": lambda: Dataset.range(50).shuffle(seed=7).repeat(2).batch(8),
    "zip": lambda: Dataset.zip((Dataset.range(20), Dataset.range(20).map(lambda x: x * 2))).shuffle(5).batch(4),
}


@pytest.mark.parametrize("name", OLDER)
def test_a_shuffled_epoch_of_c3f966c_resumes(name):
    saved = OLDER[name]
    dataset = distribute_dataset(OLDER_CASES[name](), InputWorkers(1, 0, (1,), None, wrap=False), None)
    iterator = iter(dataset)
    iterator.restore(saved["state"])
    for passed, expected in ((iterator, saved["rest"]), (iter(dataset), saved["next_pass"])):
        steps = itertools.islice(passed, len(expected))
        assert [[np.asarray(leaf).tolist() for leaf in nest.flatten(step)] for step in steps] == expected
