"""Rules A and B, by the examples and against slow references written from the text."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.input import rules

quick = settings(max_examples=200)
pytestmark = pytest.mark.one_rank


def reference(batch, counts, assignment):
    """Rows of every replica of every worker: cut into pieces of ceil(B/n), then hand out piece by piece."""
    n, size, pieces = sum(counts), 0, []
    while size * n < len(batch):
        size += 1
    rest = list(batch)
    for _ in range(n):
        pieces.append([rest.pop(0) for _ in range(min(size, len(rest)))])
    hands = [[] for _ in counts]
    if assignment == "tf":
        turn = 0
        for piece in pieces:
            hands[turn].append(piece)
            turn = (turn + 1) % len(counts)
    else:
        for worker, count in enumerate(counts):
            for _ in range(count):
                hands[worker].append(pieces.pop(0))
    return hands


def dealt(batch, counts, assignment):
    return [
        [batch[a:b] for a, b in rules.local_rows(len(batch), counts, worker, assignment)]
        for worker in range(len(counts))
    ]


@quick
@given(st.integers(0, 70), st.integers(1, 5), st.integers(1, 4))
def test_tf_assignment_agrees_with_the_reference(rows, num_workers, replicas):
    counts = (replicas,) * num_workers
    assert dealt(list(range(rows)), counts, "tf") == reference(range(rows), counts, "tf")


@quick
@given(st.integers(0, 70), st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_block_assignment_agrees_with_the_reference_and_keeps_the_order(rows, counts):
    hands = dealt(list(range(rows)), tuple(counts), "block")
    assert hands == reference(range(rows), counts, "block")
    assert [row for worker in hands for part in worker for row in part] == list(range(rows))


@pytest.mark.parametrize(
    ("rows", "n", "sizes"),
    [(4, 3, [2, 2, 0]), (5, 4, [2, 2, 1, 0]), (2, 2, [1, 1]), (1, 2, [1, 0]), (0, 2, [0, 0])],
)
def test_sizes_of_the_parts(rows, n, sizes):
    assert [stop - start for start, stop in rules.parts(rows, n)] == sizes


def test_unequal_counts_are_dealt_in_blocks_only():
    assert rules.choose_assignment(None, (2, 1)) == "block"
    assert rules.choose_assignment("block", (2, 1)) == "block"
    assert rules.choose_assignment(None, (2, 2)) == "tf"
    with pytest.raises(ValueError, match=r"\(2, 1\).*assignment='block'"):
        rules.choose_assignment("tf", (2, 1))
    with pytest.raises(ValueError, match="'round'"):
        rules.choose_assignment("round", (1, 1))


def reference_b(rows, batch, counts, worker):
    """Steps of a worker that cuts its own rows: sizes for all replicas, turned by where the worker's come."""
    n, first = sum(counts), sum(counts[:worker])
    sizes = [batch // n + 1 if k < batch % n else batch // n for k in range(n)]
    # In TensorFlow all workers have as many replicas; elsewhere sizes move on by one replica in a step.
    moves = counts[0] if len(set(counts)) == 1 else 1
    rest, steps = list(rows), []
    while rest:
        turned, parts = sizes[moves * len(steps) % n :] + sizes[: moves * len(steps) % n], []
        for replica in range(counts[worker]):
            parts.append([rest.pop(0) for _ in range(min(turned[(first + replica) % n], len(rest)))])
        steps.append(tuple(parts))
    return steps


@quick
@given(st.integers(1, 30), st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 60))
def test_rule_b_agrees_with_the_reference(batch, counts, rows):
    for worker, replicas in enumerate(counts):
        sizes = rules.sub_batch_sizes(batch, counts, worker)
        assert len(sizes) % replicas == 0
        steps = reference_b(range(rows), batch, counts, worker)
        count = rules.count_sub_batches(rows, sizes)
        assert -(-count // replicas) == len(steps)
        taken = [len(part) for step in steps for part in step][:count]
        left = rows
        for size, part in zip(itertools.cycle(sizes), taken, strict=False):
            assert part == min(size, left)
            left -= part
        assert left == 0


@quick
@given(st.integers(1, 30), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_every_step_of_rule_b_takes_a_global_batch(batch, counts):
    cycles = [rules.sub_batch_sizes(batch, counts, worker) for worker in range(len(counts))]
    steps = {len(sizes) // replicas for sizes, replicas in zip(cycles, counts, strict=True)}
    assert len(steps) == 1
    for step in range(steps.pop()):
        parts = [sizes[step * replicas : (step + 1) * replicas] for sizes, replicas in zip(cycles, counts, strict=True)]
        assert sum(map(sum, parts)) == batch
        assert max(map(max, parts)) - min(map(min, parts)) <= 1
    assert all(sum(sizes) > 0 for sizes in cycles)


def test_sizes_of_rule_b():
    assert rules.sub_batch_sizes(7, (2, 2), 0) == [2, 2, 2, 1]
    assert rules.sub_batch_sizes(7, (2, 2), 1) == [2, 1, 2, 2]
    assert [rules.sub_batch_sizes(5, (1, 1), worker) for worker in (0, 1)] == [[3, 2], [2, 3]]
    assert rules.sub_batch_sizes(4, (3,), 0) == [2, 1, 1]
    assert [rules.sub_batch_sizes(2, (2, 2), worker) for worker in (0, 1)] == [[1, 1, 0, 0], [0, 0, 1, 1]]
