"""TPUStrategy, which is not offered: what to use instead."""

from __future__ import annotations

from typing import Any, NoReturn

from mpidist.strategies.base import Strategy


class TPUStrategy(Strategy):
    """Not offered: raises NotImplementedError, which says what to use. There is no support for TPUs."""

    def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NotImplementedError."""
        raise NotImplementedError(
            "mpidist does not offer TPUStrategy: its replicas compute with NumPy on CPUs or CuPy on GPUs; type "
            "mpidist.MultiWorkerMirroredStrategy(), and start the program with mpirun or srun"
        )
