"""Trains a two-layer network on handwritten digits, on one process or many, with gradients written by hand.

    python examples/train.py                                             one process
    mpirun -n 4 python examples/train.py --strategy multi_worker         four ranks
    python examples/train.py --strategy mirrored --devices 2             two replicas in one process
    mpirun -n 4 python examples/train.py --device gpu                    four ranks, a GPU each
    mpirun --with-ft ulfm -n 4 python examples/train.py --elastic        goes on when ranks are lost (Open MPI 5)

The seed and the global batch alone decide the numbers: all strategies give the same losses and weights.
"""

import argparse
import hashlib
import json
import platform
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mpidist
from mpidist import elastic
from mpidist.cluster_resolver import MPIClusterResolver
from mpidist.experimental import PreemptionCheckpointHandler

# The 1,797 images of the test set, 8 x 8 pixels from 0 to 16, of E. Alpaydin and C. Kaynak, Optical Recognition of
# Handwritten Digits, UCI Machine Learning Repository, 1998 (CC BY 4.0).
DIGITS = Path(__file__).with_name("digits.npz")

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Data = tuple[Floats, Ints]  # images and labels


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    kinds = ["default", "one_device", "mirrored", "multi_worker"]
    parser.add_argument("--strategy", choices=kinds, default="multi_worker")
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu", help="where to compute (default: cpu)")
    parser.add_argument(
        "--devices",
        type=int,
        metavar="K",
        help="replicas per rank (default: 1 on CPUs, on GPUs this rank's share of those of its node)",
    )
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="of all replicas together (default: 32)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, help="stop after so many steps in all, also within an epoch")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint in --out; on SIGTERM or SIGUSR1 save, and end with code 42",
    )
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="when ranks are lost go on with the others, from the last step (under mpirun --with-ft ulfm)",
    )
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="the same ranks give the same bits, whatever is reduced together (--strategy multi_worker)",
    )
    parser.add_argument("--out", type=Path, default=Path("out"), help="checkpoints and curves (default: out/)")
    parser.add_argument("--dump-weights", type=Path, metavar="FILE.npz", help="write the weights and losses, too")
    arguments = parser.parse_args()
    if (arguments.devices or 1) > 1 and arguments.strategy in ("default", "one_device"):
        parser.error(f"--devices {arguments.devices} needs --strategy mirrored or multi_worker")
    if arguments.device == "gpu" and arguments.strategy == "default":
        parser.error("--device gpu needs a strategy that places things: one_device, mirrored or multi_worker")
    if arguments.elastic and arguments.strategy != "multi_worker":
        parser.error(f"--elastic goes on with the ranks that are left, and --strategy {arguments.strategy} has but one")
    if arguments.deterministic and arguments.strategy != "multi_worker":
        parser.error(f"--deterministic is about sums over ranks, and --strategy {arguments.strategy} forms none")
    for name in ("devices", "epochs", "batch_size", "steps"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(arguments, name)}; expected 1 or more")
    return arguments


def make_strategy(arguments: argparse.Namespace) -> mpidist.Strategy:
    """The one place that knows how the work is spread."""
    devices = None
    if arguments.device == "cpu" or arguments.devices is not None:
        devices = [f"{arguments.device}:{index}" for index in range(arguments.devices or 1)]
    if arguments.strategy == "default":
        return mpidist.get_strategy()
    if arguments.strategy == "one_device":
        return mpidist.OneDeviceStrategy(f"{arguments.device}:0")
    if arguments.strategy == "mirrored":
        return mpidist.MirroredStrategy(devices)
    options = mpidist.experimental.CommunicationOptions(deterministic=arguments.deterministic)
    return mpidist.MultiWorkerMirroredStrategy(devices=devices, communication_options=options)


def check_out(folder: Path) -> None:
    """Exit on all ranks unless all of them see the folder that rank 0 makes."""
    with mpidist.Communicator() as comm, ExitStack() as stack:
        name = ""
        if comm.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            name = Path(stack.enter_context(NamedTemporaryFile(dir=folder)).name).name
        sees = (folder / comm.broadcast_object(name)).exists()
        seen = comm.all_gather_object((platform.node(), sees))
        blind = sorted({node for node, sees in seen if not sees})
        if blind and comm.rank == 0:
            text = f"--out {folder} is another folder on {', '.join(blind)}. Pass a folder that all nodes share."
            print(text, file=sys.stderr, flush=True)
    if blind:
        sys.exit(1)


def load_data() -> tuple[Data, Data]:
    """Return the training and the test part of the 1,797 images: float64 rows of 64 pixels, and labels."""
    with np.load(DIGITS) as digits:
        images, labels = digits["images"] / 16.0, digits["labels"].astype(int)
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[:-360], order[-360:]
    return (images[train], labels[train]), (images[test], labels[test])


class Network:
    """64 pixels, 128 hidden units with ReLU, 10 scores. Create it inside strategy.scope().

    Where its variables are, and the images with them, NumPy's functions compute with NumPy, or with CuPy on a GPU.
    """

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.variables = {
            "w1": mpidist.Variable(rng.normal(0, np.sqrt(2 / 64), (64, 128)), name="w1"),
            "b1": mpidist.Variable(np.zeros(128), name="b1"),
            "w2": mpidist.Variable(rng.normal(0, np.sqrt(2 / 128), (128, 10)), name="w2"),
            "b2": mpidist.Variable(np.zeros(10), name="b2"),
        }
        self.classes = mpidist.Variable(np.arange(10), name="classes", trainable=False)

    def scores(self, images: Floats) -> tuple[Floats, Floats]:
        """Return the hidden layer and the scores."""
        w1, b1, w2, b2 = self.variables.values()
        hidden = np.maximum(images @ w1 + b1, 0)
        return hidden, hidden @ w2 + b2

    def losses_and_gradients(self, images: Floats, labels: Ints, batch_size: int) -> tuple[Floats, Ints, list[Floats]]:
        """Return the loss of each image, the predicted labels, and the gradients of sum(losses) / batch_size."""
        hidden, scores = self.scores(images)
        scores = scores - scores.max(axis=1, keepdims=True)
        log_probabilities = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
        is_label = np.equal(labels[:, np.newaxis], self.classes)
        losses = -np.where(is_label, log_probabilities, 0).sum(axis=1)

        to_scores = (np.exp(log_probabilities) - is_label) / batch_size
        to_hidden = (to_scores @ np.transpose(self.variables["w2"])) * (hidden > 0)
        gradients = [images.T @ to_hidden, to_hidden.sum(0), hidden.T @ to_scores, to_scores.sum(0)]
        return losses, scores.argmax(axis=1), gradients


class Training:
    """The model, what belongs to it, and the two functions that every replica runs."""

    def __init__(self, strategy: mpidist.Strategy, arguments: argparse.Namespace) -> None:
        with strategy.scope():
            self.network = Network(arguments.seed)
            self.optimizer = mpidist.optimizers.SGD(learning_rate=0.1, momentum=0.9, nesterov=True)
            self.optimizer.build(self.network.variables.values())
            self.train_loss = mpidist.metrics.Mean(name="train_loss")
            self.train_accuracy = mpidist.metrics.Accuracy(name="train_accuracy")
            self.test_accuracy = mpidist.metrics.Accuracy(name="test_accuracy")
        # What a checkpoint holds. An evaluation is due where there have been more steps than at the last one.
        self.progress: dict[str, Any] = {"step": 0, "evaluated": 0, "history": "[]"}
        self.state = {
            "weights": self.network.variables,
            "optimizer": self.optimizer,
            "metrics": [self.train_loss, self.train_accuracy],
            "progress": self.progress,
        }

    def train_step(self, images: Floats, labels: Ints) -> np.float64:
        """Return this replica's part of the loss; the parts of all replicas add up to the mean over the batch."""
        # The last batch of an epoch is smaller, and is not dealt evenly.
        batch_size = mpidist.global_count(images)
        losses, predicted, gradients = self.network.losses_and_gradients(images, labels, batch_size)
        self.optimizer.apply_gradients(zip(gradients, self.network.variables.values(), strict=True))
        self.train_loss.update_state(losses)
        self.train_accuracy.update_state(labels, predicted)
        return mpidist.compute_average_loss(losses, global_batch_size=batch_size)

    def step_done(self, commits: elastic.State | None) -> None:
        """Count a step, and commit it if lost ranks are to be survived."""
        self.progress["step"] += 1
        if commits is not None:
            commits.commit()

    def test_step(self, images: Floats, labels: Ints) -> None:
        """Count the hits of this replica."""
        _, scores = self.network.scores(images)
        self.test_accuracy.update_state(labels, scores.argmax(axis=1))


def train(
    strategy: mpidist.Strategy, arguments: argparse.Namespace, is_writer: bool, commits: elastic.State | None = None
) -> None:
    """Train from where the newest commit or checkpoint is, if there is one, and report on the writer."""
    train_data, test_data = load_data()
    steps_per_epoch = -(-len(train_data[1]) // arguments.batch_size)
    last_step = arguments.epochs * steps_per_epoch
    if arguments.steps is not None:
        last_step = min(last_step, arguments.steps)
    training = Training(strategy, arguments)
    progress = training.progress
    # Ranks that train together save together; otherwise rank 0 saves what it has trained alone.
    saves = strategy.extended.experimental_between_graph or is_writer
    checkpoint = mpidist.Checkpoint(**training.state)
    manager = mpidist.CheckpointManager(checkpoint, arguments.out, max_to_keep=None) if saves else None
    losses: list[float] = []
    with ExitStack() as stack:
        handler = None
        if arguments.resume and manager is not None:
            handler = stack.enter_context(PreemptionCheckpointHandler(None, manager))
            if is_writer:
                found = manager.latest_checkpoint
                print(
                    f"going on from {found}, after step {progress['step']}"
                    if found
                    else f"no checkpoint in {arguments.out}: starting anew"
                )
        if commits is not None:
            commits.track(**training.state)

        def step(images: Floats, labels: Ints) -> None:
            parts = strategy.run(training.train_step, args=(images, labels))
            losses.append(float(strategy.reduce("SUM", parts, axis=None)))
            training.step_done(commits)

        while progress["evaluated"] < last_step:
            epoch = progress["evaluated"] // steps_per_epoch
            done = progress["step"] - epoch * steps_per_epoch
            # The order of an epoch depends on the seed and the epoch only: a resumed run deals the same batches.
            batches = (
                mpidist.Dataset.from_tensor_slices(train_data)
                .shuffle(seed=arguments.seed * 1_000_000 + epoch)
                .batch(arguments.batch_size)
                .skip(done)
                .take(last_step - progress["step"])
            )
            start = time.perf_counter()
            for images, labels in strategy.experimental_distribute_dataset(batches):
                if handler is None:
                    step(images, labels)
                else:
                    handler.run(step, images, labels)
            seconds = time.perf_counter() - start

            results = evaluate(strategy, training, test_data, arguments.batch_size, epoch)
            if progress["step"] == (epoch + 1) * steps_per_epoch:
                training.train_loss.reset_state()
                training.train_accuracy.reset_state()
            if commits is not None:
                commits.commit()
            if manager is not None:
                manager.save()
            if is_writer:
                seen = min((progress["step"] - epoch * steps_per_epoch) * arguments.batch_size, len(train_data[1]))
                print(
                    f"epoch {epoch + 1:2d}  loss {results['loss']:.4f}  "
                    f"train acc {results['train_accuracy']:.2%}  test acc {results['test_accuracy']:.2%}  "
                    f"{(seen - done * arguments.batch_size) / seconds:,.0f} images/s",
                    flush=True,
                )
    if is_writer:
        report(arguments, training, losses)


def evaluate(
    strategy: mpidist.Strategy, training: Training, test_data: Data, batch_size: int, epoch: int
) -> dict[str, float]:
    """Count the hits on the test data, and write the results of the epoch into its history."""
    test_batches = mpidist.Dataset.from_tensor_slices(test_data).batch(batch_size)
    for images, labels in strategy.experimental_distribute_dataset(test_batches):
        strategy.run(training.test_step, args=(images, labels))
    results = {
        "epoch": epoch + 1,
        "loss": float(training.train_loss.result()),
        "train_accuracy": float(training.train_accuracy.result()),
        "test_accuracy": float(training.test_accuracy.result()),
    }
    training.test_accuracy.reset_state()
    progress = training.progress
    history = [entry for entry in json.loads(progress["history"]) if entry["epoch"] != epoch + 1]
    progress["history"] = json.dumps([*history, results])
    progress["evaluated"] = progress["step"]
    return results


def report(arguments: argparse.Namespace, training: Training, losses: list[float]) -> None:
    """Draw the learning curve, write the weights if wanted, and print the closing line."""
    weights: dict[str, Any] = {name: variable.numpy() for name, variable in training.network.variables.items()}
    digest = hashlib.sha256(b"".join(weight.tobytes() for weight in weights.values())).hexdigest()
    history = json.loads(training.progress["history"])
    drawn = draw(history, arguments.out / "learning_curve.png")
    if arguments.dump_weights is not None:
        np.savez(arguments.dump_weights, losses=losses, **weights)
    print(
        f"done after {training.progress['step']} steps: loss {history[-1]['loss']:.6f}, "
        f"test accuracy {history[-1]['test_accuracy']:.2%}, weights {digest[:16]}; "
        f"{'checkpoint and learning_curve.png' if drawn else 'checkpoint'} in {arguments.out}"
        + ("" if drawn else " (no learning_curve.png: pip install matplotlib)")
    )


def draw(history: list[dict[str, float]], path: Path) -> bool:
    """Draw the learning curve, and return whether matplotlib is installed."""
    try:
        from matplotlib.figure import Figure  # Here, because the import takes half a second and one rank draws.
    except ModuleNotFoundError:
        return False
    epochs = [entry["epoch"] for entry in history]
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(epochs, [entry["loss"] for entry in history], marker=".")
    left.set(xlabel="epoch", ylabel="training loss", yscale="log")
    for name in ("train_accuracy", "test_accuracy"):
        right.plot(epochs, [entry[name] for entry in history], marker=".", label=name.replace("_", " "))
    right.set(xlabel="epoch", ylabel="accuracy")
    right.legend()
    for axes in (left, right):
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path)
    return True


def train_once(arguments: argparse.Namespace, commits: elastic.State | None = None) -> None:
    """Train on all ranks that there are."""
    check_out(arguments.out)
    world = MPIClusterResolver()  # rank and size of the job; where there is no MPI it says what to type
    ranks = world.size
    with make_strategy(arguments) as strategy:
        # Rank 0 of the beginning may be lost meanwhile.
        is_writer = world.rank == 0 if commits is None else strategy.extended.should_checkpoint
        if is_writer:
            alone = ranks > 1 and not strategy.extended.experimental_between_graph
            print(
                f"{arguments.strategy}: {strategy.num_replicas_in_sync} replica(s) in sync, "
                + (f"commit {commits.commits}" if commits is not None and commits.commits else f"{ranks} rank(s)")
                + (", each of which trains by itself" if alone else "")
            )
        train(strategy, arguments, is_writer, commits)


def main() -> None:
    arguments = parse_arguments()
    if arguments.elastic:
        # Called again whenever ranks are lost.
        elastic.run(lambda commits: train_once(arguments, commits), elastic.State())
    else:
        train_once(arguments)


if __name__ == "__main__":
    main()
