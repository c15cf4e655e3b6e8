"""Going on after ranks were lost: ``mpidist.elastic.run(train, state)``."""

from mpidist.elastic.recovery import run
from mpidist.elastic.state import State

__all__ = ["State", "run"]
