"""The NCCL library of this process: its state, its errors and its shared communicators.

A communicator holds hundreds of megabytes of its GPU and takes seconds to start, so Communicators of the same ranks
on the same GPU share one. Its calls come in the order of the device's queue (``DeviceQueue``), which is the program's.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Hashable
from types import ModuleType
from typing import Any, Protocol

from mpidist.arrays.cupy_module import find_cupy, require_cupy
from mpidist.core.errors import NcclFailure

# The library ----------------------------------------------------------------------------------------------------------


IN_PROGRESS = 7
"""ncclInProgress: no error, but that NCCL is at work. CuPy has no name for it."""


class NcclCommunicator(Protocol):
    """The interface of CuPy's NcclCommunicator, one rank's end."""

    allReduce: Callable[..., None]  # noqa: N815
    allGather: Callable[..., None]  # noqa: N815
    reduceScatter: Callable[..., None]  # noqa: N815
    reduce: Callable[..., None]
    broadcast: Callable[..., None]
    check_async_error: Callable[[], None]
    abort: Callable[[], None]
    destroy: Callable[[], None]


def nccl_problem() -> str | None:
    """Return why NCCL cannot be used here and how to install it, or None."""
    state = find_cupy()
    if state.module is None:
        return state.problem
    binding = nccl_binding()
    if getattr(binding, "available", False):
        return None
    major = state.module.cuda.runtime.runtimeGetVersion() // 1000
    return (
        f"CuPy {state.module.__version__} finds no NCCL library (libnccl.so.2), which reduces between GPUs; type: "
        f"pip install nvidia-nccl-cu{major}, or put the folder of the system's libnccl.so.2 into LD_LIBRARY_PATH "
        "(CUPY_DEBUG_LIBRARY_LOAD=1 shows where CuPy looks)"
    )


def nccl_binding() -> ModuleType:
    """Return the module ``cupy.cuda.nccl``; the first call in a process loads the NCCL library.

    Raises:
        DeviceError: There is no GPU, or no CuPy, that this process can use.
    """
    require_cupy()
    with warnings.catch_warnings():
        # It warns where there is no library, which nccl_problem says where it matters.
        warnings.simplefilter("ignore")
        return importlib.import_module("cupy.cuda.nccl")


def nccl_version(binding: ModuleType) -> str:
    """Return the version of the NCCL library as NVIDIA writes it: "2.28.9"."""
    number = int(binding.get_version())
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def failure(binding: ModuleType, doing: str, error: Exception) -> NcclFailure:
    """Return the error to raise for one of the binding.

    That is an NcclError, or a KeyError for a status that it cannot name.
    """
    if isinstance(error, binding.NcclError):
        return NcclFailure(f"{doing}: {error}", error.status)
    status = error.args[0]
    return NcclFailure(f"{doing}: NCCL returned status {status}, which CuPy has no name for", status)


# Shared communicators -------------------------------------------------------------------------------------------------


# Ranks as those of the job, in NCCL's order, and the number of this rank's GPU.
Key = tuple[tuple[int, ...], int]


class _Shared:
    """One NCCL communicator.

    Args:
        key: Its ranks and GPU.
        raw: CuPy's NcclCommunicator.
        identity: By which all its ranks know it, and no other.
    """

    def __init__(self, key: Key, raw: NcclCommunicator, identity: Hashable) -> None:
        self.key, self.raw, self.identity = key, raw, identity
        self.users: list[NcclShare] = []

    @property
    def in_step(self) -> bool:
        """Return whether all its users have made their calls so far, or will."""
        return not any([user.has_given_up() for user in self.users])


_open: list[_Shared] = []


class NcclShare:
    """One user's share of an NCCL communicator, in place of CuPy's NcclCommunicator.

    Args:
        shared: The communicator.
        has_given_up: Whether the user makes no more calls, also of those that other ranks make.
    """

    def __init__(self, shared: _Shared, has_given_up: Callable[[], bool]) -> None:
        self._shared = shared
        self.has_given_up = has_given_up
        shared.users.append(self)

    def __getattr__(self, name: str) -> Any:
        self.check_in_step()
        return getattr(self._shared.raw, name)

    def check_in_step(self) -> None:
        """Raise RuntimeError where a user has given up, whose calls other ranks may still make.

        One of ours would meet one of theirs, and both would go on with wrong numbers.
        """
        if not self._shared.in_step:
            raise RuntimeError(
                "this Communicator reduces no more arrays on GPUs: another one of the same ranks was given up, after "
                "an error or a deadline, and NCCL takes their calls for one another's; make a new Communicator"
            )

    def check_async_error(self) -> None:
        """Ask NCCL for an error of any user."""
        self._shared.raw.check_async_error()

    def destroy(self) -> None:
        """Give the share back; the last one destroys the communicator."""
        self._shared.users.remove(self)
        if not self._shared.users and self._forget():
            self._shared.raw.destroy()

    def abort(self) -> None:
        """Abort the communicator, for all users; nobody gets a share of it any more."""
        if self._forget():
            self._shared.raw.abort()

    def _forget(self) -> bool:
        """Remove the communicator from the open ones; return whether it was there."""
        is_open = self._shared in _open
        if is_open:
            _open.remove(self._shared)
        return is_open


def first_share(key: Key, raw: NcclCommunicator, identity: Hashable, has_given_up: Callable[[], bool]) -> NcclShare:
    """Return the first share of a new communicator."""
    _open.append(_Shared(key, raw, identity))
    return NcclShare(_open[-1], has_given_up)


def open_identities(key: Key) -> tuple[Hashable, ...]:
    """Return the identities of communicators to share; other ranks may have others."""
    return tuple(shared.identity for shared in _open if shared.key == key and shared.in_step)


def share_of_open(key: Key, identity: Hashable, has_given_up: Callable[[], bool]) -> NcclShare:
    """Return a share of a communicator out of ``open_identities``.

    Both calls belong to one place in the queue of the device.
    """
    (shared,) = [shared for shared in _open if (shared.key, shared.identity) == (key, identity)]
    return NcclShare(shared, has_given_up)


def forget_shares() -> None:
    """Forget all, where the GPUs themselves are gone (for tests)."""
    _open.clear()
