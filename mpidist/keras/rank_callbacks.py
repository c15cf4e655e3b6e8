"""The callbacks of a rank: files and output on the first one alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras

from mpidist.keras.untyped import KerasObject

# These write files or to the terminal, and decide nothing but by themselves.
_OF_FIRST_RANK = tuple(
    getattr(keras.callbacks, name)
    for name in (
        "BackupAndRestore",
        "CSVLogger",
        "ModelCheckpoint",
        "OrbaxCheckpoint",
        "ProgbarLogger",
        "RemoteMonitor",
        "TensorBoard",
    )
    if hasattr(keras.callbacks, name)
)


class AlignRanks(keras.callbacks.Callback):
    """Makes the ranks begin alike, and stop alike; comes after all other callbacks.

    Args:
        align: Called once the model and its optimizer have all their variables.
        any_of: Returns whether a flag is set on any rank.
        begin_epoch: Called with the number of each epoch.
    """

    def __init__(
        self, align: Callable[[], None], any_of: Callable[[bool], bool], begin_epoch: Callable[[int], None]
    ) -> None:
        super().__init__()
        self._align = align
        self._any_of = any_of
        self._begin_epoch = begin_epoch
        self._is_aligned = False
        # Not ``self.model``, which copies the state of the model there and back under JAX.
        self._trained: KerasObject = None

    def set_model(self, model: KerasObject) -> None:
        """See Keras."""
        super().set_model(model)
        self._trained = model

    def on_train_begin(self, logs: object = None) -> None:
        """See Keras."""
        self._begin()

    def on_test_begin(self, logs: object = None) -> None:
        """See Keras: also within a training, whose ranks are alike."""
        self._begin()

    def on_predict_begin(self, logs: object = None) -> None:
        """See Keras."""
        self._begin()

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        """See Keras."""
        self._begin_epoch(epoch)

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        """See Keras."""
        self.agree_to_stop()

    def agree_to_stop(self) -> None:
        """Stop the training everywhere if it stops on any rank (collective)."""
        self._trained.stop_training = self._any_of(self._trained.stop_training)

    def _begin(self) -> None:
        if not self._is_aligned:
            self._align()
            self._is_aligned = True


class AlignBatches(AlignRanks):
    """The same where a callback may stop the training after any batch."""

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        """See Keras."""
        self.agree_to_stop()


def callbacks_of_rank(
    callbacks: KerasObject,
    rank: int,
    align: Callable[[], None],
    any_of: Callable[[bool], bool],
    begin_epoch: Callable[[int], None],
) -> list[KerasObject]:
    """Return the callbacks that a rank calls, with AlignRanks as the last.

    Args:
        callbacks: Those of the user.
        rank: The number of the rank.
        align, any_of, begin_epoch: The arguments of AlignRanks.

    Raises:
        TypeError: A CallbackList, which Keras has made for another call.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        raise TypeError("callbacks is a CallbackList; expected a list of callbacks, as it is made for one call")
    given: Sequence[KerasObject] = keras.tree.flatten(callbacks) if callbacks else []
    deciding = [callback for callback in given if not isinstance(callback, _OF_FIRST_RANK)]
    after_batches = any(_acts_after_batches(callback) for callback in deciding)
    last = (AlignBatches if after_batches else AlignRanks)(align, any_of, begin_epoch)
    return [*(given if rank == 0 else deciding), last]


def _acts_after_batches(callback: KerasObject) -> bool:
    # Keras marks the methods of its base class so.
    methods = (callback.on_train_batch_end, callback.on_batch_end)
    return not all(getattr(method, "_is_default", False) for method in methods)
