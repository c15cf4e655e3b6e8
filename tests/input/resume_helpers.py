"""What the tests of resuming share: datasets of every division, and workers that begin, stop and go on."""

import json
from itertools import islice

from hypothesis import strategies as st

from mpidist.input.dataset import Dataset
from mpidist.input.distribute import distribute_dataset, distribute_from_function
from mpidist.input.input_options import SHARD_HINT, InputWorkers
from tests.input.policy_helpers import DATA, FILE, HINT, OFF, named, read, rows_of, stream
from tests.input.worker_threads import lists, run_workers, steps_of

LAYOUTS = [(1,), (2,), (1, 1), (1, 2), (2, 2), (1, 1, 1)]
layouts = st.sampled_from(LAYOUTS)


class Case:
    """A dataset and how it is distributed; ``make`` returns a new one, as another run of the program would."""

    def __init__(self, make, policy=DATA, from_function=False):
        self.make, self.policy, self.from_function = make, policy, from_function

    def distribute(self, workers, size):
        if self.from_function:
            return distribute_from_function(lambda ctx: self.make(size, ctx), workers, None)
        return distribute_dataset(self.make(size).with_options(auto_shard_policy=self.policy), workers, None)


NAMES, FILES = named([7, 0, 5, 9])


def rows(size, seed=None):
    return Dataset.range(37).shuffle(seed=seed).map(lambda x: x + 0).batch(size).prefetch(2)


def streamed(size):
    return stream(37).shuffle(10).batch(size).map(lambda x: x + 0)


def files(size):
    return Dataset.from_files(NAMES, read).shuffle(5).batch(size)


def hinted(size):
    return Dataset.range(37).shuffle().shard(SHARD_HINT, SHARD_HINT).batch(size)


def sharded(size, ctx):
    return Dataset.range(37).shard(ctx.num_input_pipelines, ctx.input_pipeline_id).batch(size)


CASES = {
    "rows": Case(rows),
    "stream": Case(streamed),
    "files": Case(files, FILE),
    "hint": Case(hinted, HINT),
    "off": Case(rows, OFF),
    "function": Case(sharded, from_function=True),
}
SEEN = {"files": sorted(row for rows in FILES for row in rows)}


def begin(case, counts, size, taken, passes=0):
    """Return what each worker got in its first steps, its state then, and the rest of this pass and the next."""

    def work(workers):
        distributed = case.distribute(workers, size)
        for _ in range(passes):
            steps_of(distributed)
        iterator = iter(distributed)
        first = [lists(step) for step in islice(iterator, taken)]
        state = json.loads(json.dumps(iterator.state()))
        return first, state, [lists(step) for step in iterator], steps_of(distributed)

    return run_workers(work, counts)


def go_on(case, counts, size, states, taken=None):
    """Return the same of workers that begin at the states."""

    def work(workers):
        distributed = case.distribute(workers, size)
        iterator = iter(distributed)
        next(iterator, None)
        iterator.restore(states[workers.worker_id % len(states)])
        first = [lists(step) for step in islice(iterator, taken)]
        state = iterator.state()
        return first, state, [lists(step) for step in iterator], steps_of(distributed)

    return run_workers(work, counts)


def all_rows(workers):
    return [row for worker in workers for row in rows_of(worker)]


def restored(state, make=rows, policy=DATA, size=4):
    iterator = iter(Case(make, policy).distribute(InputWorkers(1, 0, (2,), None, True), size))
    iterator.restore(state)


def go_on_error(case, counts, size, state):
    def work(workers):
        iter(case.distribute(workers, size)).restore(state)

    return run_workers(work, counts)


def shuffled(size, ctx):
    return Dataset.range(36).shuffle().shard(ctx.num_input_pipelines, ctx.input_pipeline_id).batch(size)
