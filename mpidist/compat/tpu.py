"""TPUStrategy, which is not offered, and its alternative."""

from __future__ import annotations

from typing import NoReturn

from mpidist.strategies.base import Strategy


class TPUStrategy(Strategy):
    """Not offered: raises NotImplementedError, which names the alternative. There is no support for TPUs."""

    def __new__(cls, *args: object, **kwargs: object) -> NoReturn:
        """Raise NotImplementedError."""
        raise NotImplementedError(
            "mpidist does not offer TPUStrategy: its replicas compute with NumPy on CPUs or CuPy on GPUs; type "
            "mpidist.MultiWorkerMirroredStrategy(), and start the program with mpirun or srun"
        )
