"""The callbacks of a rank: files and output on the first one alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras

from mpidist.keras.global_batches import GlobalBatches

_FILES_AND_OUTPUT = (
    "BackupAndRestore",
    "CSVLogger",
    "ModelCheckpoint",
    "OrbaxCheckpoint",
    "ProgbarLogger",
    "RemoteMonitor",
    "TensorBoard",
)
# They do not change the training.
_OF_FIRST_RANK = tuple(getattr(keras.callbacks, name) for name in _FILES_AND_OUTPUT if hasattr(keras.callbacks, name))


class AlignRanks(keras.callbacks.Callback):
    """Makes the ranks start alike, and stop together. Must be the last callback.

    ``align`` is called when the model and its optimizer have all their variables.
    """

    def __init__(self, align: Callable[[], None], batches: GlobalBatches) -> None:
        super().__init__()
        self._align, self._batches = align, batches
        self._is_aligned = False
        # Not ``self.model``, which copies the state of a JAX model in both directions.
        self._trained: keras.Model = None

    def set_model(self, model: keras.Model) -> None:
        """See Keras."""
        super().set_model(model)
        self._trained = model

    def on_train_begin(self, logs: object = None) -> None:
        """See Keras."""
        if not self._is_aligned:
            self._align()
            self._is_aligned = True

    # An evaluation may be part of a training, whose ranks are aligned already.
    on_test_begin = on_predict_begin = on_train_begin

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        """See Keras."""
        self._batches.epoch = epoch

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        """See Keras: if the training stops on any rank, stop it on all (collective)."""
        self._trained.stop_training = self._batches.sums.any_of(self._trained.stop_training)


class AlignBatches(AlignRanks):
    """AlignRanks for callbacks that may stop the training after any batch."""

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        """See Keras."""
        self.on_epoch_end(batch)


def callbacks_of_rank(
    callbacks: object, align: Callable[[], None], batches: GlobalBatches
) -> list[keras.callbacks.Callback]:
    """Return the callbacks that this rank calls, with AlignRanks as the last."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        raise TypeError("callbacks is a CallbackList; expected a list of callbacks, as it is made for one call")
    given: Sequence[keras.callbacks.Callback] = keras.tree.flatten(callbacks) if callbacks else []
    deciding = [callback for callback in given if not isinstance(callback, _OF_FIRST_RANK)]
    # Keras marks the methods of its base class.
    methods = [method for each in deciding for method in (each.on_train_batch_end, each.on_batch_end)]
    kind = AlignRanks if all(getattr(method, "_is_default", False) for method in methods) else AlignBatches
    return [*(given if batches.sums.rank == 0 else deciding), kind(align, batches)]
