"""Read and count the source of the library: lines, functions, imports in circles, names, private accesses."""

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
from typing import Any

PACKAGE = "mpidist"
LONGEST_FIRST_SENTENCE = 15
# Public, although their names begin like private ones.
_DOCUMENTED = {"_asdict", "_exit", "_fields", "_field_defaults", "_getframe", "_make", "_replace"}
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass(frozen=True)
class Source:
    """One file of the library.

    Attributes:
        path: Path inside the package, such as ``input/dataset.py``.
        text: Content of the file.
    """

    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed text."""
        return ast.parse(self.text)

    @property
    def module(self) -> str:
        """The dotted name for imports."""
        parts = [PACKAGE, *self.path.with_suffix("").parts]
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def docstrings(self) -> list[ast.Constant]:
        """All docstrings, including those below attributes."""
        texts = [node.value for node in ast.walk(self.tree) if isinstance(node, ast.Expr)]
        return [each for each in texts if isinstance(each, ast.Constant) and isinstance(each.value, str)]

    @property
    def only_reexports(self) -> bool:
        """Whether the file only imports names for others, such as ``metrics.py``."""
        kinds = (ast.Expr, ast.Import, ast.ImportFrom, ast.If)
        return all(isinstance(node, kinds) or ast.unparse(node).startswith("__all__") for node in self.tree.body)

    def nodes(self, *kinds: type[ast.AST]) -> Iterator[Any]:
        """Iterate over the nodes of some kinds."""
        return (node for node in ast.walk(self.tree) if isinstance(node, kinds))


def read(checkout: Path) -> list[Source]:
    """Return the files of a checkout's package."""
    package = checkout / PACKAGE
    return [Source(path.relative_to(package), path.read_text()) for path in sorted(package.rglob("*.py"))]


def figures(checkout: Path) -> dict[str, Any]:
    """Return each figure of a checkout by name: a number, or the list of occurrences."""
    sources = read(checkout)
    classes = [node.name for each in sources for node in each.nodes(ast.ClassDef)]
    files = [each.path.stem for each in sources if each.path.stem != "__init__" and not each.only_reexports]
    first = [first_sentence(str(node.value)) for each in sources for node in each.docstrings]
    return {
        **_lines(sources),
        "files": len(sources),
        "functions": sum(1 for each in sources for _ in each.nodes(ast.FunctionDef, ast.AsyncFunctionDef)),
        "circles of files": circles(_imports(sources)),
        "private accesses": _private_accesses(sources),
        "Any": sum(len(re.findall(r"\bAny\b", each.text)) for each in sources),
        "first sentences of more than 15 words": [each for each in first if len(each.split()) > LONGEST_FIRST_SENTENCE],
        "class names that occur twice": _twice(classes),
        "file names that occur twice": _twice(files),
    }


def _lines(sources: list[Source]) -> dict[str, int]:
    """Count lines of code (not blank, comment or docstring), of docstrings and of comments."""
    counts = Counter({"code lines": 0, "docstring lines": 0, "comment lines": 0})
    for source in sources:
        docstring = {line for node in source.docstrings for line in range(node.lineno, (node.end_lineno or 0) + 1)}
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


def _imports(sources: list[Source]) -> dict[str, set[str]]:
    """Return the modules that each module imports, including imports for type checkers and inside functions."""
    modules = {source.module for source in sources}
    graph: dict[str, set[str]] = {}
    for source in sources:
        found = {alias.name for node in source.nodes(ast.Import) for alias in node.names}
        for node in source.nodes(ast.ImportFrom):
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {name if name in modules else node.module for name in names}
        graph[source.module] = (found & modules) - {source.module}
    return graph


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import one another, directly or not, the largest first."""
    reached = {module: _reached(edges, module) for module in edges}
    groups = {frozenset(other for other in reached[one] if one in reached[other]) for one in edges}
    return sorted((sorted(group) for group in groups if len(group) > 1), key=len, reverse=True)


def _reached(edges: dict[str, set[str]], start: str) -> set[str]:
    found, left = {start}, [start]
    while left:
        new = edges[left.pop()] - found
        found |= new
        left += new
    return found


def _private_accesses(sources: list[Source]) -> list[str]:
    """Return place and text of each ``x._name`` if ``x`` is not ``self``, ``cls``, ``super()`` or a class around it."""
    return [
        f"{source.path}:{node.lineno} {text}"
        for source in sources
        for node, text in _foreign(source.tree, {"self", "cls", "super()"})
    ]


def _foreign(node: ast.AST, own: set[str]) -> Iterator[tuple[Any, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Attribute) and _is_private(child.attr) and ast.unparse(child.value) not in own:
            yield child, ast.unparse(child)
        elif isinstance(child, ast.ImportFrom):
            yield from ((child, f"{child.module}.{each.name}") for each in child.names if _is_private(each.name))
        yield from _foreign(child, own | {child.name} if isinstance(child, ast.ClassDef) else own)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in _DOCUMENTED


def first_sentence(docstring: str) -> str:
    """Return the text up to the first full stop, or to the end of the first paragraph.

    >>> first_sentence("Add 1.5 to x. Then stop.")
    'Add 1.5 to x.'
    """
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    return re.split(r"(?<=[.?!]) ", paragraph)[0]


def _twice(names: list[str]) -> list[str]:
    return sorted(name for name, times in Counter(names).items() if times > 1)
