"""Trains a convolutional network of Keras on handwritten digits with fit(), under a strategy.

    KERAS_BACKEND=torch python examples/keras_fit.py                    one process
    KERAS_BACKEND=torch mpirun -n 4 python examples/keras_fit.py        four ranks; the same numbers, up to rounding
    KERAS_BACKEND=jax mpirun -n 4 python examples/keras_fit.py          the same with JAX
    mpirun -n 2 python examples/keras_fit.py --resume --epochs 8        goes on from the backup of a killed job

A program as for one process, but for the strategy and its scope. It needs Keras and PyTorch or JAX:
pip install keras torch. See docs/keras.md.
"""

import argparse
import os
import shutil
from pathlib import Path

import numpy as np

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
from keras import layers

import mpidist

# See examples/train.py for where they are from.
DIGITS = Path(__file__).with_name("digits.npz")
TEST_IMAGES = 360


def images_and_labels() -> tuple[np.ndarray, np.ndarray]:
    """Return the digits in an order that is the same everywhere."""
    with np.load(DIGITS) as digits:
        images = (digits["images"] / 16.0).astype("float32").reshape(-1, 8, 8, 1)
        labels = digits["labels"].astype("int64")
    order = np.random.default_rng(0).permutation(len(images))
    return images[order], labels[order]


def network() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.Conv2D(32, 3, strides=2, activation="relu"),
            layers.Flatten(),
            layers.Dense(10, activation="softmax"),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/keras"), help="for the backup and the model")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together (default: 64)")
    parser.add_argument("--resume", action="store_true", help="go on from the backup in OUT, if there is one")
    arguments = parser.parse_args()
    if not arguments.resume and mpidist.rank() == 0:
        shutil.rmtree(arguments.out / "backup", ignore_errors=True)

    keras.utils.set_random_seed(0)
    images, labels = images_and_labels()
    strategy = mpidist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = network()
        model.compile(keras.optimizers.Adam(3e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(
        images[TEST_IMAGES:],
        labels[TEST_IMAGES:],
        batch_size=arguments.batch_size,
        epochs=arguments.epochs,
        validation_data=(images[:TEST_IMAGES], labels[:TEST_IMAGES]),
        callbacks=[
            keras.callbacks.BackupAndRestore(arguments.out / "backup"),
            keras.callbacks.ModelCheckpoint(arguments.out / "model.keras", monitor="val_loss", save_best_only=True),
        ],
        verbose=2,
    )
    _, accuracy = model.evaluate(images[:TEST_IMAGES], labels[:TEST_IMAGES], verbose=0)
    weights = sum(float(np.abs(value).sum(dtype="float64")) for value in model.get_weights())
    if mpidist.rank() == 0:
        print(f"{100 * accuracy:.1f} % of the test images are right; weights {weights:.6f}")
    strategy.close()


if __name__ == "__main__":
    main()
