"""Run each rank by its role: ``train_and_evaluate``, and ``launch`` for programs without an evaluator."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mpidist.checkpoint.writer import finish_writing
from mpidist.cluster_resolver import ClusterResolver
from mpidist.cluster_resolver.mpi_cluster_resolver import checked_resolver
from mpidist.core.errors import PeerError
from mpidist.core.text import names_text
from mpidist.estimator.evaluations import Evaluations
from mpidist.estimator.roles import Cast, Line, News, find_cast, ranks_of
from mpidist.estimator.specs import EvalResult, EvalSpec, TrainContext, TrainSpec, check_function, check_train_jobs
from mpidist.parameter_server.link import release_servers
from mpidist.parameter_server.server import Server
from mpidist.topology.exit import signals_left_to_others

T = TypeVar("T")


def launch(
    main_fn: Callable[[], T],
    roles: Sequence[str] = ("chief", "worker"),
    cluster_resolver: ClusterResolver | None = None,
) -> T | None:
    """Call ``main_fn`` on the ranks of some ``roles``, which the others serve meanwhile.

    Call it on every rank of the job. ``ps`` ranks serve, and workers where ``roles`` is ``("chief",)``, as with a
    coordinator. An evaluator does neither: with one use ``train_and_evaluate``.

    Args:
        main_fn: The program; it makes the strategy.
        roles: The jobs that call it.
        cluster_resolver: Who is who; by default as ``MPIDIST_JOBS`` says.

    Returns:
        The result of ``main_fn``; None on ranks that serve.

    Raises:
        TypeError: ``main_fn`` is no function, or ``cluster_resolver`` no resolver.
        ValueError: Other roles than chief and worker, or this rank is an evaluator.

    Source: ``run_distribute_coordinator`` of TensorFlow's ``distribute_coordinator``.

    >>> launch(lambda: 42)
    42
    """
    check_function("main_fn", main_fn, "def main(): ...")
    check_train_jobs("roles", roles)
    resolver = checked_resolver(cluster_resolver, "a resolver: MPIClusterResolver()", TypeError)
    if resolver.task_type == "evaluator":
        raise ValueError("this rank is an evaluator, for which launch() has nothing; use mpidist.train_and_evaluate()")
    if resolver.task_type in (None, *roles):
        return _and_release(main_fn)
    Server(resolver).join()
    return None


def train_and_evaluate(
    train_spec: TrainSpec, eval_spec: EvalSpec, cluster_resolver: ClusterResolver | None = None
) -> Any:
    """Train on the ranks that train, while the evaluator evaluates the newest checkpoint (tf.estimator).

    Collective: call it on every rank of the job, with the same arguments. The resolver gives each rank its role.
    ``chief`` and ``worker`` call ``train_fn(context)`` and wait for the last evaluation. The ``evaluator`` calls
    ``eval_fn(path)`` while the others train, whenever there is a new newest checkpoint, and at last for the final one.

    Ranks that do neither serve those that train (``mpidist.Server(resolver).join()``): ``ps``, and with
    ``TrainSpec(train_jobs=("chief",))`` also ``worker``.

    Without an evaluator the chief (or the first worker) evaluates the final checkpoint after training, and those in
    between where ``train_fn`` calls ``context.evaluate()``. Each result is also a line in ``eval/metrics.jsonl`` in the
    directory of the checkpoints; a job that is started again adds to it.

    The evaluator belongs to none of the communicators of the training: a strategy that ``train_fn`` makes of
    ``context.cluster_resolver`` or ``MPIDIST_JOBS`` has the ranks that train. A checkpoint that is removed while it is
    evaluated (``max_to_keep``) is given up for the next newest. Checkpoints that ``train_fn`` began to save with
    ``async_save`` are waited for.

    Whatever ends the training ends the evaluator. An exception of ``train_fn`` or ``eval_fn`` on one rank is a
    PeerError on those that wait for it. Where all training ranks leave by ``sys.exit``, as after a save of
    PreemptionCheckpointHandler, the evaluator leaves with the same code, without the last evaluation; signals that ask
    for such a save are left to the ranks that train. An evaluation that has begun is finished first.

    Not together with ``mpidist.elastic.run``, whose ranks are all ranks of the job.

    Args:
        train_spec: How to train.
        eval_spec: How to evaluate.
        cluster_resolver: Who is who; by default as ``MPIDIST_JOBS="chief:1,worker:2,evaluator:1"`` says, without it all
            ranks are workers.

    Returns:
        The result of ``train_fn``, on the ranks that train; on the evaluator a list of EvalResult, one per evaluation;
        on ranks that serve None.

    Raises:
        TypeError: An argument of another type.
        ValueError: There are two evaluators or chiefs, nobody trains, or ranks were given different directories; on all
            ranks.
        FileNotFoundError: The training is over, and the evaluator sees no checkpoint, or not the one that the chief has
            saved last; on the others PeerError.
        PeerError: Another rank has failed.

    Source: ``tf.estimator.train_and_evaluate``.

    >>> import tempfile
    >>> import mpidist
    >>> def train(context):
    ...     weight = mpidist.Variable(0.0)
    ...     checkpoint = mpidist.Checkpoint(weight=weight)
    ...     for _ in range(context.max_steps):
    ...         weight.assign_add(1.0)
    ...     checkpoint.save(context.checkpoint_dir + "/ckpt")
    ...     return weight.numpy()
    >>> def evaluate(path):
    ...     weight = mpidist.Variable(0.0)
    ...     mpidist.Checkpoint(weight=weight).restore(path).assert_consumed()
    ...     return {"loss": (weight.numpy() - 3.0) ** 2}
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     specs = TrainSpec(train, directory, max_steps=2), EvalSpec(evaluate, on_result=lambda it: print(it.metrics))
    ...     float(train_and_evaluate(*specs))
    {'loss': 1.0}
    2.0
    """
    for name, value, kind in (("train_spec", train_spec, TrainSpec), ("eval_spec", eval_spec, EvalSpec)):
        if not isinstance(value, kind):
            got = f"{value!r} of type {type(value).__name__}"
            raise TypeError(f"{name} is {got}; expected mpidist.{kind.__name__}(...)")
    jobs = "{'chief': 1, 'worker': 2, 'evaluator': 1}"
    example = f"an object such as mpidist.cluster_resolver.MPIClusterResolver(jobs={jobs})"
    resolver = checked_resolver(cluster_resolver, example, TypeError)
    comm = ranks_of(resolver)
    cast = find_cast(resolver, train_spec, comm)
    line = Line(comm, cast)
    try:
        result = _RankRole(cast, line, resolver, train_spec, eval_spec).play()
    except SystemExit as error:
        line.give_up(News.LEFT, error.code)
        raise
    except BaseException as error:
        line.give_up(News.FAILED, f"{type(error).__name__}: {error}")
        raise
    line.close()
    return result


def _and_release(program: Callable[[], T]) -> T:
    """Call ``program``, then release the ranks that serve it.

    Other errors than SystemExit end the job. To release first would wait for running functions, and hide the error.
    """
    try:
        result = program()
    except SystemExit:
        release_servers()
        raise
    release_servers()
    return result


class _RankRole:
    """The role of this rank.

    Args:
        cast: The roles of all ranks.
        line: To the other ranks.
        resolver: Who is who.
        train_spec: How to train.
        eval_spec: How to evaluate.
    """

    def __init__(
        self, cast: Cast, line: Line, resolver: ClusterResolver, train_spec: TrainSpec, eval_spec: EvalSpec
    ) -> None:
        self._cast, self._line, self._resolver, self._train_spec = cast, line, resolver, train_spec
        self._directory = os.path.abspath(train_spec.checkpoint_dir)
        self._evaluations = Evaluations(eval_spec, Path(self._directory))

    def play(self) -> object:
        """Train, evaluate or serve, and return once all are through."""
        if self._cast.trains:
            return self._train()
        if self._cast.evaluates:
            with signals_left_to_others():
                # How long the training takes is nobody's concern, so without a report.
                self._evaluate_to_the_end("", self._evaluations.evaluate_if_due)
            return self._evaluations.results
        Server(self._resolver).join()
        self._await_evaluation()
        return None

    def _train(self) -> object:
        cast, evaluations = self._cast, self._evaluations
        job, index = cast.tasks[cast.rank]
        is_chief = cast.rank == cast.chief
        evaluate: Callable[[], EvalResult | None] = evaluations.evaluate_if_due if cast.evaluates else lambda: None
        spec = self._train_spec
        context = TrainContext(self._directory, spec.max_steps, self._resolver, job, index, is_chief, evaluate)
        result = _and_release(lambda: spec.train_fn(context))
        finish_writing()
        if cast.evaluates:
            self._evaluate_to_the_end("the other ranks to end their training")
            return result
        self._line.tell(News.TRAINED, evaluations.newest_id() if is_chief else None, cast.evaluator)
        self._await_evaluation()
        return result

    def _evaluate_to_the_end(self, waiting_for: str, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Wait until all have trained, evaluate the final checkpoint, and let the others go."""
        cast, line = self._cast, self._line
        others = {rank for rank in cast.trainers if rank != cast.rank}
        line.wait(lambda: others <= line.trained.keys() | line.left.keys(), waiting_for, meanwhile)
        if others and others <= line.left.keys() and cast.chief in others:
            raise SystemExit(line.left[cast.chief])
        if line.left:
            raise self._left_alone()
        self._evaluations.evaluate_last(line.trained.get(cast.chief))
        line.tell(News.EVALUATED, None)

    def _await_evaluation(self) -> None:
        cast, line = self._cast, self._line
        name = cast.name(cast.evaluator)
        line.wait(lambda: line.evaluated or cast.evaluator in line.left, f"{name} to evaluate the final checkpoint")
        if not line.evaluated:
            raise self._left_alone()

    def _left_alone(self) -> PeerError:
        codes = sorted(self._line.left.items())
        left = names_text(f"{self._cast.name(rank)} by sys.exit({code!r})" for rank, code in codes)
        return PeerError(f"ranks have left the program in train_and_evaluate(), and others have not: {left}")
