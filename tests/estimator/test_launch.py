"""What launch() runs where, on one rank; with servers see test_train_and_evaluate.py."""

from __future__ import annotations

import pytest
from mpi4py import MPI

import mpidist
from mpidist.cluster_resolver import MPIClusterResolver

pytestmark = pytest.mark.one_rank


def alone(job: str) -> MPIClusterResolver:
    return MPIClusterResolver(MPI.COMM_SELF, jobs={job: 1})


@pytest.mark.parametrize("job", ["chief", "worker"])
def test_ranks_of_its_roles_run_the_program(job: str) -> None:
    assert mpidist.launch(lambda: job, cluster_resolver=alone(job)) == job
    assert mpidist.launch(lambda: job, roles=(job,), cluster_resolver=alone(job)) == job


def test_an_evaluator_has_nothing_to_do() -> None:
    with pytest.raises(ValueError, match=r"this rank is an evaluator.*use mpidist.train_and_evaluate"):
        mpidist.launch(print, cluster_resolver=alone("evaluator"))


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match="main_fn is 3 of type int; expected a function"):
        mpidist.launch(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"roles is \('ps',\); expected"):
        mpidist.launch(print, roles=("ps",))
    with pytest.raises(TypeError, match="cluster_resolver is 'mpi'; expected None or a resolver"):
        mpidist.launch(print, cluster_resolver="mpi")  # type: ignore[arg-type]
