"""What the ranks of the tests run: a small training with checkpoints, and its evaluation."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import mpidist
from mpidist.cluster_resolver import MPIClusterResolver

from mpi4py import MPI  # isort: skip
from tests.support.speed import scaled

FOUR = {"chief": 1, "worker": 2, "evaluator": 1}
STEPS = 4
_WAIT_SECONDS = scaled(20.0)


def await_file(path: Path) -> None:
    deadline = time.monotonic() + _WAIT_SECONDS
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} does not come"
        time.sleep(0.01)


class Model:
    """Weights that go half of the way to 1 in each step."""

    def __init__(self) -> None:
        self.weights = mpidist.Variable(np.zeros(3), aggregation=mpidist.VariableAggregation.ONLY_FIRST_REPLICA)
        self.checkpoint = mpidist.Checkpoint(weights=self.weights, step=0)

    def step(self, strategy: mpidist.Strategy) -> None:
        def replica_fn() -> None:
            context = mpidist.get_replica_context()
            self.weights.assign_add(context.all_reduce("MEAN", (1.0 - self.weights.numpy()) / 2))

        strategy.run(replica_fn)
        self.checkpoint.step += 1


def make_train(in_step: Callable[[mpidist.TrainContext, int], object], **options: Any) -> Callable[..., list[float]]:
    """Return a train_fn that saves after each step and then calls ``in_step(context, step)``."""

    def train(context: mpidist.TrainContext) -> list[float]:
        strategy = mpidist.MultiWorkerMirroredStrategy(context.cluster_resolver)
        with strategy.scope():
            model = Model()
        manager = mpidist.CheckpointManager(model.checkpoint, context.checkpoint_dir, 2, **options)
        for step in range(1, (context.max_steps or STEPS) + 1):
            model.step(strategy)
            manager.save()
            in_step(context, step)
        return [strategy.num_replicas_in_sync, float(model.weights.numpy()[0])]

    return train


def evaluate(path: str) -> dict[str, Any]:
    model = Model()
    model.checkpoint.restore(path).assert_consumed()
    strategy = mpidist.MultiWorkerMirroredStrategy(devices=["cpu:0"]) if is_evaluator() else None
    replicas = 1 if strategy is None else strategy.num_replicas_in_sync
    return {"step": model.checkpoint.step, "weight": model.weights.numpy()[0], "replicas": replicas}


def is_evaluator() -> bool:
    return MPIClusterResolver().task_type == "evaluator"


def run_both(
    directory: str,
    in_step: Callable[[mpidist.TrainContext, int], object] = lambda *_: None,
    evaluate_fn: Callable[..., Mapping[str, Any]] = evaluate,
    jobs: Mapping[str, int] | None = None,
    **options: Any,
) -> Any:
    resolver = None if jobs is None else MPIClusterResolver(jobs=jobs)
    found = mpidist.train_and_evaluate(
        mpidist.TrainSpec(make_train(in_step, **options), directory, max_steps=STEPS),
        mpidist.EvalSpec(evaluate_fn, throttle_secs=0),
        resolver,
    )
    evaluates = (resolver or MPIClusterResolver()).task_type == "evaluator"
    return [result.metrics for result in found] if evaluates else found


# What ranks run ---------------------------------------------------------------------------------------------------


def side_by_side(directory: str) -> list[Any]:
    """The training goes on when the first checkpoint has been evaluated; and all again, with saves in a thread."""

    def in_step(context: mpidist.TrainContext, step: int) -> None:
        if step == 2:
            await_file(Path(context.checkpoint_dir, "eval", "metrics.jsonl"))

    return [run_both(f"{directory}/{is_async}", in_step, async_save=is_async) for is_async in (False, True)]


def in_between(directory: str) -> Any:
    """There is no evaluator; the chief evaluates after steps 1 and 3, and at the end."""
    seen: list[tuple[int, bool]] = []

    def in_step(context: mpidist.TrainContext, step: int) -> None:
        if step in (1, 3):
            result = context.evaluate()
            while result is None and context.is_chief:  # it looks at the directory now and then only
                result = context.evaluate()
            if result is not None:
                seen.append((result.metrics["step"], context.is_chief))

    return *run_both(directory, in_step), seen


Ended = tuple[str, str, float]


def ended(call: Callable[[], Any]) -> Ended:
    """Return how a call ended: the type and text of what it raised, and when."""
    try:
        found = call()
    except BaseException as error:
        return type(error).__name__, str(error), time.time()
    return "value", repr(found), time.time()


def all_failures(directory: str) -> dict[str, Ended]:
    """One after the other in one job of four ranks, which goes on after each."""
    two = {"chief": 1, "worker": 1, "evaluator": 2}

    def different() -> Any:
        if MPI.COMM_WORLD.rank == 0:
            return mpidist.MultiWorkerMirroredStrategy()
        return train_by(print, f"{directory}/different", FOUR)

    return {
        "different": ended(different),
        "roles": ended(lambda: train_by(print, f"{directory}/roles", two)),
        "no checkpoint": ended(lambda: train_by(lambda _: None, f"{directory}/none", FOUR)),
        "worker": worker_fails(f"{directory}/worker"),
        "evaluator": evaluator_fails(f"{directory}/evaluator"),
        "all leave": trainers_leave(f"{directory}/leave", (3, 4, 5)),
        "one leaves": trainers_leave(f"{directory}/leaves", (None, 0, None)),
    }


def train_by(train: Callable[..., Any], directory: str, jobs: Mapping[str, int]) -> Any:
    spec = mpidist.TrainSpec(train, directory)
    return mpidist.train_and_evaluate(spec, mpidist.EvalSpec(evaluate), MPIClusterResolver(jobs=jobs))


def worker_fails(directory: str) -> Ended:
    """Worker 0 fails by itself, without a collective after it, while the others wait for the last evaluation."""

    def train(context: mpidist.TrainContext) -> None:
        if (context.task_type, context.task_id) == ("worker", 0):
            await_file(Path(directory, "trained"))
            raise ValueError("no more data")
        Path(directory).mkdir(exist_ok=True)
        Path(directory, "trained").touch()

    return ended(lambda: train_by(train, directory, FOUR))


def evaluator_fails(directory: str) -> Ended:
    """At the last checkpoint, when the others have trained."""

    def fail(path: str) -> dict[str, Any]:
        if evaluate(path)["step"] == STEPS:
            raise ZeroDivisionError("no rows")
        return {}

    return ended(lambda: run_both(directory, evaluate_fn=fail, jobs=FOUR))


def trainers_leave(directory: str, codes: Sequence[int | None]) -> Ended:
    """The training ranks with a code leave by sys.exit."""
    resolver = MPIClusterResolver(jobs=FOUR)

    def train(_: mpidist.TrainContext) -> None:
        if codes[resolver.rank] is not None:
            sys.exit(codes[resolver.rank])

    return ended(lambda: train_by(train, directory, FOUR))


def serving(directory: str) -> tuple[Any, Any]:
    """A parameter server, two workers and an evaluator; first by launch() without the evaluator."""
    jobs = {"ps": 1, "worker": 2, "evaluator": 1}
    resolver = MPIClusterResolver(jobs=jobs)

    def main(saves: bool) -> float:
        strategy = mpidist.v1.experimental.ParameterServerStrategy(resolver)
        with strategy.scope():
            total = mpidist.Variable(0.0, aggregation=mpidist.VariableAggregation.SUM)
        strategy.run(lambda: total.assign_add(1.0))
        deadline = time.monotonic() + _WAIT_SECONDS
        while total.numpy() < 2:
            assert time.monotonic() < deadline, "the other worker does not come"
        found = float(total.numpy())
        if saves and strategy.extended.should_checkpoint:
            mpidist.Checkpoint(total=total).save(f"{directory}/ckpt")
        strategy.close()
        return found

    launched = None
    if resolver.task_type != "evaluator":
        launched = mpidist.launch(lambda: main(False), cluster_resolver=resolver)
    found = mpidist.train_and_evaluate(
        mpidist.TrainSpec(lambda _: main(True), directory), mpidist.EvalSpec(evaluate_total), resolver
    )
    return launched, [result.metrics for result in found] if resolver.task_type == "evaluator" else found


def coordinated(directory: str) -> Any:
    """The chief trains by functions that it schedules; worker and server serve, and the evaluator evaluates."""

    def train(context: mpidist.TrainContext) -> float:
        with mpidist.ParameterServerStrategy(context.cluster_resolver) as strategy:
            coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
            with strategy.scope():
                total = mpidist.Variable(0.0, aggregation=mpidist.VariableAggregation.SUM)

            def step() -> None:
                total.assign_add(1.0)

            for _ in range(STEPS):
                coordinator.schedule(step)
            coordinator.join()
            mpidist.Checkpoint(total=total).save(f"{context.checkpoint_dir}/ckpt")
            return float(total.numpy())

    jobs = {"chief": 1, "ps": 1, "worker": 1, "evaluator": 1}
    spec = mpidist.TrainSpec(train, directory, train_jobs=("chief",))
    resolver = MPIClusterResolver(jobs=jobs)
    found = mpidist.train_and_evaluate(spec, mpidist.EvalSpec(evaluate_total), resolver)
    return [result.metrics for result in found] if resolver.task_type == "evaluator" else found


def evaluate_total(path: str) -> dict[str, Any]:
    total = mpidist.Variable(0.0)
    mpidist.Checkpoint(total=total).restore(path)
    return {"total": total.numpy()}


# Scripts: python tests/estimator/programs.py WHAT DIRECTORY ---------------------------------------------------------


def a_worker_does(act: Callable[[], object]) -> Callable[[mpidist.TrainContext, int], None]:
    def in_step(context: mpidist.TrainContext, step: int) -> None:
        if step == 2 and (context.task_type, context.task_id) == ("worker", 1):
            act()

    return in_step


def fail() -> None:
    raise ValueError("no more data")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def lone_trainer_dies(directory: str) -> Any:
    """There is nobody beside the evaluator who could notice."""

    def train(_: mpidist.TrainContext) -> None:
        die()

    return mpidist.train_and_evaluate(mpidist.TrainSpec(train, directory), mpidist.EvalSpec(evaluate))


def preempted(directory: str) -> Any:
    """All ranks get the signal in their midst, as from a launcher that passes it on."""

    def train(context: mpidist.TrainContext) -> None:
        strategy = mpidist.MultiWorkerMirroredStrategy(context.cluster_resolver)
        with strategy.scope():
            model = Model()
        with mpidist.experimental.PreemptionCheckpointHandler(
            context.cluster_resolver, model.checkpoint, directory
        ) as handler:
            while True:
                handler.run(model.step, strategy)
                if model.checkpoint.step == 2 and context.is_chief:
                    await_file(Path(directory, "signalled"))
                    os.kill(os.getpid(), signal.SIGUSR1)

    def signalled(path: str) -> dict[str, Any]:
        raise AssertionError(f"{path}: nothing is evaluated when the job is to end")

    if is_evaluator():
        threading.Thread(target=signal_myself, args=(Path(directory, "signalled"),), daemon=True).start()
    return mpidist.train_and_evaluate(mpidist.TrainSpec(train, directory), mpidist.EvalSpec(signalled))


def signal_myself(then: Path) -> None:
    while signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:  # before train_and_evaluate has begun
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGUSR1)
    then.touch()


SCRIPTS: dict[str, Callable[[str], Any]] = {
    "raise": lambda directory: run_both(directory, a_worker_does(fail)),
    "die": lambda directory: run_both(directory, a_worker_does(die)),
    "lone": lone_trainer_dies,
    "preempted": preempted,
}


if __name__ == "__main__":
    print(json.dumps(SCRIPTS[sys.argv[1]](sys.argv[2])), flush=True)
