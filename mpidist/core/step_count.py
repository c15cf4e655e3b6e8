"""The number of steps that this process has made: calls of ``strategy.run``."""

made = 0
