"""What the tests of the policies share: datasets on several workers, files without a file system, padded steps."""

import itertools

from mpidist.input.dataset import Dataset
from mpidist.input.distribute import distribute_dataset
from mpidist.input.input_options import AutoShardPolicy
from tests.input.test_dealing import reference_b
from tests.input.worker_threads import run_workers, steps_of

AUTO, FILE, DATA, OFF, HINT = (AutoShardPolicy[name] for name in ("AUTO", "FILE", "DATA", "OFF", "HINT"))


def distribute(dataset, counts, **options):
    """Return the steps of every worker, for a dataset or a function that makes it on each."""
    make = dataset if callable(dataset) else lambda: dataset
    return run_workers(
        lambda workers: steps_of(distribute_dataset(make().with_options(**options), workers, None)), counts
    )


def passes(make, counts, number, **options):
    """Return the steps of ``number`` passes of every worker."""

    def work(workers):
        distributed = distribute_dataset(make().with_options(**options), workers, None)
        return [steps_of(distributed) for _ in range(number)]

    return run_workers(work, counts)


def rows_of(worker):
    return [row for step in worker for part in step for row in part]


def read(path):
    """Return the rows of a file: its name is their first number, a colon, and how many there are."""
    first, count = map(int, str(path).split(":"))
    return iter(range(first, first + count))


def named(lengths):
    """Return the names of files of so many rows each, and the rows of each."""
    starts = [0, *itertools.accumulate(lengths)]
    names = [f"{start}:{length}" for start, length in zip(starts, lengths, strict=False)]
    return names, [list(read(name)) for name in names]


def stream(count):
    return Dataset.from_generator(lambda: iter(range(count)))


def batches_of(rows, size, drop):
    cut = [rows[i : i + size] for i in range(0, len(rows), size)]
    return [batch for batch in cut if len(batch) == size or not drop]


def padded(streams, size, counts):
    """Return the steps of every worker with a stream of its own, empty parts where others still have data."""
    steps = [reference_b(rows, size, counts, worker) for worker, rows in enumerate(streams)]
    longest = max(map(len, steps))
    return [mine + [((),) * counts[w]] * (longest - len(mine)) for w, mine in enumerate(steps)]


def as_lists(workers):
    return [[tuple(map(list, step)) for step in worker] for worker in workers]


def error_of(call):
    try:
        return call()
    except Exception as error:
        return error
