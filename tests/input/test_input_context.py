"""InputContext, ValueContext, InputOptions and InputWorkers."""

import pytest

from mpidist.input.input_options import InputContext, InputOptions, InputReplicationMode, InputWorkers

pytestmark = pytest.mark.one_rank


def test_per_replica_batch_size():
    context = InputContext(1, 0, 4)
    assert context.get_per_replica_batch_size(8) == 2
    with pytest.raises(ValueError, match=r"6.*4"):
        context.get_per_replica_batch_size(6)


def test_input_options():
    per_replica = InputReplicationMode.PER_REPLICA
    assert InputOptions(None, per_replica).experimental_replication_mode is per_replica
    assert InputOptions(False, per_replica, True).experimental_place_dataset_on_device
    InputOptions(experimental_place_dataset_on_device=True)
    with pytest.raises(ValueError, match="buffer_size is 0"):
        InputOptions(experimental_per_replica_buffer_size=0)
    with pytest.raises(TypeError, match="'PER_WORKER'"):
        InputOptions(experimental_replication_mode="PER_WORKER")


def test_replica_ids_of_a_worker():
    workers = [InputWorkers(3, w, (1, 3, 2), object(), True) for w in range(3)]
    assert [w.local_replica_ids for w in workers] == [(0,), (1, 2, 3), (4, 5)]
    assert workers[1].num_replicas_in_sync == 6
    assert workers[1].num_local_replicas == 3


@pytest.mark.parametrize(
    "arguments",
    [
        (2, 0, (1,), object(), True),
        (1, 1, (1,), None, True),
        (1, 0, (0,), None, True),
        (2, 0, (1, 1), None, True),
        (1, 0, (2,), None, False),
        (1, 0, (1,), object(), True),
    ],
)
def test_workers_that_do_not_fit_together(arguments):
    with pytest.raises(ValueError, match=r"expected|wrap"):
        InputWorkers(*arguments)
