"""The source of the library, read and counted: lines, functions, words, names, private accesses."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PACKAGE = "mpidist"
SHORT_FUNCTION_LINES = 4
LONGEST_FIRST_SENTENCE = 15
# Public, as their libraries' documentation says, although their names begin like private ones.
_DOCUMENTED = {"_asdict", "_exit", "_fields", "_field_defaults", "_getframe", "_make", "_replace"}
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass(frozen=True)
class Source:
    """A file of the library.

    Attributes:
        path: From the package's folder on, such as ``input/dataset.py``.
        text: What it holds.
    """

    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The text, parsed."""
        return ast.parse(self.text)

    @property
    def module(self) -> str:
        """The name by which it is imported."""
        parts = [PACKAGE, *self.path.with_suffix("").parts]
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def docstrings(self) -> list[ast.Constant]:
        """All of them, those under attributes too."""
        texts = [node.value for node in ast.walk(self.tree) if isinstance(node, ast.Expr)]
        return [each for each in texts if isinstance(each, ast.Constant) and isinstance(each.value, str)]

    @property
    def hands_on(self) -> bool:
        """Whether it makes nothing and hands on names of other files, such as ``metrics.py``."""
        kinds = (ast.Expr, ast.Import, ast.ImportFrom, ast.If)
        return all(isinstance(node, kinds) or ast.unparse(node).startswith("__all__") for node in self.tree.body)

    def nodes(self, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
        """Go through the nodes of some kinds."""
        return (node for node in ast.walk(self.tree) if isinstance(node, kinds))


def read(checkout: Path) -> list[Source]:
    """Return the files of a checkout's package."""
    package = checkout / PACKAGE
    return [Source(path.relative_to(package), path.read_text()) for path in sorted(package.rglob("*.py"))]


def lines(sources: list[Source]) -> dict[str, int]:
    """Return how many lines are code (neither blank, comment nor docstring), docstring and comment."""
    counts = Counter({"code lines": 0, "docstring lines": 0, "comment lines": 0})
    for source in sources:
        docstring = {line for node in source.docstrings for line in _span(node)}
        with_code, with_comment = set(), set()
        for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
            if token.type == tokenize.COMMENT:
                with_comment.add(token.start[0])
            elif token.type not in _NO_CODE:
                with_code |= set(range(token.start[0], token.end[0] + 1))
        blank = {number for number, line in enumerate(source.text.splitlines(), 1) if not line.strip()}
        counts["code lines"] += len(with_code - docstring - blank)
        counts["docstring lines"] += len(docstring)
        counts["comment lines"] += len(with_comment - with_code)
    return dict(counts)


def _span(node: ast.stmt | ast.expr) -> range:
    assert node.end_lineno is not None
    return range(node.lineno, node.end_lineno + 1)


def functions(sources: list[Source]) -> dict[str, int]:
    """Return how many functions there are, and how many have four lines or fewer from ``def`` to their end."""
    sizes = [len(_span(node)) for each in sources for node in each.nodes(ast.FunctionDef, ast.AsyncFunctionDef)]
    short = sum(size <= SHORT_FUNCTION_LINES for size in sizes)
    return {"functions": len(sizes), f"functions of {SHORT_FUNCTION_LINES} lines or fewer": short}


def private_accesses(sources: list[Source]) -> list[str]:
    """Return place and text of each ``x._name`` where ``x`` is another object than ``self``, a class or a module too.

    ``super()``, ``cls`` and the classes around count as ``self``; ``x`` may be any expression, such as ``self.y``.
    """
    return [
        f"{source.path}:{node.lineno} {text}"
        for source in sources
        for node, text in _foreign(source.tree, {"self", "cls", "super()"})
    ]


def _foreign(node: ast.AST, own: set[str]) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Attribute) and _is_private(child.attr) and ast.unparse(child.value) not in own:
            yield child, ast.unparse(child)
        elif isinstance(child, ast.ImportFrom):
            yield from ((child, f"{child.module}.{each.name}") for each in child.names if _is_private(each.name))
        yield from _foreign(child, own | {child.name} if isinstance(child, ast.ClassDef) else own)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in _DOCUMENTED


def is_of_a_name(access: str) -> bool:
    """Whether a private access is of a plain name, such as ``x._y`` and not ``self.x._y``."""
    return access.split(" ", 1)[1].count(".") == 1


def any_count(sources: list[Source]) -> int:
    """Return how often the word ``Any`` stands in the text."""
    return sum(len(re.findall(r"\bAny\b", source.text)) for source in sources)


def what_per_10_000(sources: list[Source]) -> float:
    """Return how many of 10,000 words of docstrings are "what"."""
    words = [word.lower() for each in sources for node in each.docstrings for word in _words(str(node.value))]
    return round(10_000 * words.count("what") / max(1, len(words)), 1)


def _words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z']+", text)


def long_first_sentences(sources: list[Source]) -> list[str]:
    """Return the first sentences of docstrings that have more than 15 words."""
    firsts = [first_sentence(str(node.value)) for each in sources for node in each.docstrings]
    return [first for first in firsts if len(first.split()) > LONGEST_FIRST_SENTENCE]


def first_sentence(docstring: str) -> str:
    """Return the text up to the first full stop, or to the first paragraph's end.

    >>> first_sentence("Add 1.5 to x. Then stop.")
    'Add 1.5 to x.'
    """
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    return re.split(r"(?<=[.?!]) ", paragraph)[0]


def classes_twice(sources: list[Source]) -> list[str]:
    """Return the names that more than one class has."""
    return _twice(node.name for each in sources for node in each.nodes(ast.ClassDef) if isinstance(node, ast.ClassDef))


def files_twice(sources: list[Source]) -> list[str]:
    """Return the names that more than one file has; ``__init__`` and files of public names alone do not count."""
    return _twice(each.path.stem for each in sources if each.path.stem != "__init__" and not each.hands_on)


def _twice(names: Iterator[str]) -> list[str]:
    return sorted(name for name, times in Counter(names).items() if times > 1)
