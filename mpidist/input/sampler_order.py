"""The order in which a sampler of PyTorch gives rows, the same on all ranks."""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpidist.core.seed import next_seed
from mpidist.input.graph import Pass, Seed
from mpidist.input.row_indices import Numbers

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

# Samplers draw from random sources of the whole process, which one pass at a time may borrow.
_drawing = threading.Lock()


class _Source(NamedTuple):
    """Something that random numbers are drawn from, and how its state is read and set."""

    read: Callable[[], Any]
    write: Callable[[Any], object]


def _source_of(value: Any) -> _Source | None:
    torch = sys.modules["torch"]
    if isinstance(value, torch.Generator):
        return _Source(
            lambda: value.get_state().numpy().tobytes(),
            lambda state: value.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8)),
        )
    if isinstance(value, np.random.RandomState):
        return _Source(value.get_state, value.set_state)
    if isinstance(value, random.Random):
        return _Source(value.getstate, value.setstate)
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return _Source(lambda: bits.state, lambda state: setattr(bits, "state", state))
    return None


@contextlib.contextmanager
def _borrowed_sources(seed: int) -> Iterator[None]:
    """Begin the random numbers of the process with ``seed`` in the block.

    After it they go on as before.
    """
    torch = sys.modules["torch"]
    sources = (
        _Source(torch.get_rng_state, torch.set_rng_state),
        _Source(np.random.get_state, np.random.set_state),
        _Source(random.getstate, random.setstate),
    )
    before = [source.read() for source in sources]
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % (1 << 32))
    random.seed(seed)
    try:
        yield
    finally:
        for source, state in zip(sources, before, strict=True):
            source.write(state)


class SamplerOrder:
    """The order of each pass, the same for the same number of the pass.

    A generator that the user gave goes on from pass to pass, as it does in a DataLoader. Random numbers of the process,
    which samplers without a generator draw, begin with the seed of the step, on which ranks agree.

    Args:
        loader: The DataLoader.
        sampler: Gives rows or batches.
    """

    def __init__(self, loader: DataLoader[Any], sampler: Any) -> None:
        self.sampler = sampler
        self.samplers = list(_samplers(sampler))
        values = [loader.generator, *(value for each in self.samplers for value in _attributes(each))]
        self._loader_generator = loader.generator
        self._generators = list({id(value): value for value in values if _source_of(value) is not None}.values())
        self._first_states = self._states()
        self._next = (0, self._first_states)
        drawn = next_seed()
        # torch.manual_seed() decides where mpidist's seed is not set.
        self.seed = Seed(sys.modules["torch"].randint(1 << 62, ()).item() if drawn is None else drawn)

    def draw(self, run: Pass) -> list[Any]:
        """Return the rows or batches of a pass."""
        number = sum(run.key)
        with _drawing:
            self._go_to(number)
            found = self._drawn(int(self.seed.generator(run).integers(1 << 62)))
            self._next = (number + 1, self._states())
        if len(found) != len(self.sampler):
            raise ValueError(
                f"{type(self.sampler).__name__} gave {len(found)} items in a pass, and its __len__ says "
                f"{len(self.sampler)}; expected as many, since ranks count their steps by it"
            )
        return found

    def _go_to(self, number: int) -> None:
        """Bring the generators of the user to where pass ``number`` begins."""
        if not self._generators:
            return
        if number < self._next[0]:
            self._next = (0, self._first_states)
        begun, states = self._next
        for generator, state in zip(self._generators, states, strict=True):
            source = _source_of(generator)
            assert source is not None
            source.write(state)
        for _ in range(begun, number):
            self._drawn(0)

    def _drawn(self, seed: int) -> list[Any]:
        with _borrowed_sources(seed):
            items = iter(self.sampler)
            if self._loader_generator is not None:
                # A DataLoader takes a seed for its workers before it asks for the first row.
                torch = sys.modules["torch"]
                torch.empty((), dtype=torch.int64).random_(generator=self._loader_generator)
            return list(items)

    def _states(self) -> list[Any]:
        sources = map(_source_of, self._generators)
        return [source.read() for source in sources if source is not None]

    def __str__(self) -> str:
        # Ranks, and programs that go on with a pass, whose generators begin elsewhere have other orders.
        start = f" from {zlib.crc32(pickle.dumps(self._first_states)):08x}" if self._generators else ""
        return f"{type(self.sampler).__name__} of {len(self.sampler)}{start}"


def _samplers(sampler: Any) -> Iterator[Any]:
    """Yield a sampler and those that it draws from."""
    yield sampler
    for value in _attributes(sampler):
        if isinstance(value, sys.modules["torch.utils.data"].Sampler):
            yield from _samplers(value)


def _attributes(value: object) -> list[Any]:
    return list(vars(value).values()) if hasattr(value, "__dict__") else []


def row_numbers(keys: Sequence[Any], sampler: object) -> Numbers:
    """Return the keys of a sampler as row numbers.

    Raises:
        TypeError: It is something else.
    """
    found = np.array(keys) if len(keys) else np.empty(0, np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise TypeError(
            f"{type(sampler).__name__} gave {keys[0]!r} of type {type(keys[0]).__name__}; expected row numbers, or, as "
            "batch_sampler, lists of row numbers"
        )
    return found.astype(np.int64)
