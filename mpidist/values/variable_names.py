"""VariableNames: what the variables of a strategy are called, and how ranks tell those of one name apart."""

from __future__ import annotations

from collections import Counter


class VariableNames:
    """The names of a strategy's variables, in order of creation, which is the same on all ranks.

    A rank that lists its variables in another order than the others would add up gradients of different variables. So
    their labels travel with the gradients, and no two variables of a strategy have the same label.

    >>> names = VariableNames()
    >>> [names.label(name) for name in ("kernel", "bias", "kernel")]
    ['kernel', 'bias', 'kernel (number 2 of this name)']
    """

    def __init__(self) -> None:
        self._unnamed = 0
        self._taken: Counter[str] = Counter()

    def default(self) -> str:
        """Return the name of the next variable that is given none, as TensorFlow 1 counts them.

        >>> names = VariableNames()
        >>> names.default()
        'Variable'
        >>> names.took_default()
        >>> names.default()
        'Variable_1'
        """
        return f"Variable_{self._unnamed}" if self._unnamed else "Variable"

    def took_default(self) -> None:
        """Note that there is a variable of the name ``default()``, which could have failed on all ranks."""
        self._unnamed += 1

    def label(self, name: str) -> str:
        """Return what no other variable is called, and note the name."""
        self._taken[name] += 1
        return name if self._taken[name] == 1 else f"{name} (number {self._taken[name]} of this name)"
