"""Strategies and communicators that tests share, one of each kind: making them takes far longer than most tests."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from mpidist.collectives.channel.channel import open_channels


@dataclass(frozen=True)
class _Kept:
    value: Any
    stack: ExitStack
    channels: tuple[Any, ...]

    @property
    def is_whole(self) -> bool:
        """Whether nothing was closed, and collectives can still take place."""
        still_open = {id(channel) for channel in open_channels}
        return all(id(channel) in still_open and channel.is_usable for channel in self.channels)


class Shared:
    """What tests share in this session, a plugin of pytest; every rank gets and drops the same, in the same order."""

    def __init__(self) -> None:
        self._has_failed = False
        self._kept: dict[Hashable, _Kept] = {}
        # Open until the program ends: closing takes all ranks, and they may wait for one another in vain.
        self._given_up: list[_Kept] = []

    def get(self, key: Hashable, make: Callable[[], AbstractContextManager[Any]]) -> Any:
        """Return what is kept under ``key``, made on first use (collective)."""
        if key not in self._kept:
            before = {id(channel) for channel in open_channels}
            stack = ExitStack()
            value = stack.enter_context(make())
            made = tuple(channel for channel in open_channels if id(channel) not in before)
            self._kept[key] = _Kept(value, stack, made)
        return self._kept[key].value

    def broken(self) -> list[Hashable]:
        """Return the keys of what was closed, or can no longer be used, and keep it no longer."""
        found = [key for key, kept in self._kept.items() if not kept.is_whole]
        self._given_up += [self._kept.pop(key) for key in found]
        return found

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._has_failed |= report.failed

    def pytest_runtest_logfinish(self) -> None:
        """Keep nothing after a test that failed, on this rank or on another one: by now all ranks know of it."""
        if self._has_failed:
            self._given_up += self._kept.values()
            self._kept.clear()
        self._has_failed = False

    def close(self) -> None:
        """Close all, the newest first (collective)."""
        while self._kept:
            self._kept.popitem()[1].stack.close()
