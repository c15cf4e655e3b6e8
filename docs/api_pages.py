"""The API reference: a page for each public name, made from the ``__all__`` of each module; an extension of Sphinx.

Wherever a page has a public name in code type, such as ``mpidist.Checkpoint`` or ``Communicator.empty``, it is a link.
"""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
from abc import ABC
from collections.abc import Iterator
from enum import Enum
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, NamedTuple, Protocol

from docutils import nodes
from sphinx.addnodes import desc_signature, pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.ext.autodoc.mock import mock
from sphinx.transforms import SphinxTransform

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs/api"
# What programs seldom name: for those who add a strategy, a resolver, an algorithm.
ROOMS = ("cross_device_ops", "input", "parameter_server", "strategies", "topology", "values")
# Libraries that need not be there when the docs are built.
MOCKED = ["jax", "keras", "torch"]
# What programs, and the pages, call an object of a class.
_INSTANCES = {"strategy": "mpidist.Strategy", "ctx": "mpidist.ReplicaContext", "comm": "mpidist.Communicator"}
_SAYS = re.compile(r"^(__all__ = |from .* import __all__ as )", re.MULTILINE)
_NAME = re.compile(r"([A-Za-z_][\w.]*)(?:\(.*\))?", re.DOTALL)


class PublicName(NamedTuple):
    """What a name of an ``__all__`` means, and the name under which that is documented."""

    value: Any
    home: str


def modules() -> list[str]:
    """Return the modules that say what is public in them, the package first."""
    files = [path for path in sorted((ROOT / "mpidist").rglob("*.py")) if _SAYS.search(path.read_text())]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in files]
    # A thing is at home in the first module that has it.
    return sorted(names, key=lambda name: (is_room(name), name))


def is_room(module: str) -> bool:
    """Return whether a module is for those who extend mpidist."""
    return any(part in ROOMS for part in module.split("."))


@cache
def public_names() -> dict[str, PublicName]:
    """Return all public names, with their modules before them."""
    values: dict[str, Any] = {}
    # Now, because it hooks into libraries that are imported already, and the hooks do not fit the mocks.
    importlib.import_module("mpidist.strategies")
    with mock(MOCKED):
        # mpidist.keras asks at its import which backend there is.
        importlib.import_module("keras").backend = SimpleNamespace(backend=lambda: "torch")
        for name in modules():
            module = importlib.import_module(name)
            values |= {f"{name}.{public}": getattr(module, public) for public in module.__all__}
    homes: dict[object, str] = {}
    # An alias is at home where the thing has its own name.
    for name, value in sorted(values.items(), key=lambda item: not item[0].endswith(f".{_own_name(item[1])}")):
        home = homes.setdefault(_key(name, value), value.__name__ if isinstance(value, ModuleType) else name)
        if inspect.isclass(value):
            # Else Sphinx shows a class whose public name is another one as an alias without members.
            value.__name__ = value.__qualname__ = home.rpartition(".")[2]
    return {name: PublicName(value, homes[_key(name, value)]) for name, value in values.items()}


def _own_name(value: Any) -> str | None:
    return getattr(value, "__name__", None)


def _key(name: str, value: Any) -> object:
    # Numbers may be one object by chance.
    return id(value) if callable(value) or isinstance(value, ModuleType) else (name.rpartition(".")[2], id(value))


@cache
def homes() -> dict[str, str]:
    """Return where a thing is documented, by its public names, its path, and its bare name where that is clear."""
    found = {name: public.home for name, public in public_names().items()} | {name: name for name in modules()}
    bare: dict[str, set[str]] = {}
    for public in public_names().values():
        if isinstance(public.value, ModuleType):
            continue
        bare.setdefault(public.home.rpartition(".")[2], set()).add(public.home)
        if inspect.isclass(public.value) or inspect.isfunction(public.value):
            found.setdefault(f"{public.value.__module__}.{public.value.__qualname__}", public.home)
    # Of several things with one name that of the package itself is meant.
    bare = {name: {f"mpidist.{name}"} & places or places for name, places in bare.items()}
    unique = {name: place for name, (place, *others) in bare.items() if not others and not name.islower()}
    return _INSTANCES | unique | found


def documented(text: str) -> str | None:
    """Return the documented name that a text such as ``Checkpoint.save`` speaks of, or None."""
    if text in homes():
        return homes()[text]
    owner, _, member = text.rpartition(".")
    home = homes().get(owner)
    cls = public_names()[home].value if home in public_names() else None
    return f"{place_of_member(cls, member)}.{member}" if inspect.isclass(cls) and hasattr(cls, member) else None


def place_of_member(cls: type, member: str) -> str:
    """Return the class on whose page a member is: its own, or the public base that it comes from."""
    for base in cls.__mro__[1:]:
        if homes().get(_path(base)) and getattr(base, member, None) is getattr(cls, member):
            return place_of_member(base, member)
    return homes()[_path(cls)]


def page_of(name: str) -> str:
    """Return the page of a documented name, without its suffix."""
    if name in modules():
        return f"{name}/index"
    module, _, last = name.rpartition(".")
    return f"{module}/{last}"


def _concrete(cls: type) -> type:
    """Return a subclass that can be created without the abstract methods."""
    concrete = type(cls.__name__, (cls,), {})
    concrete.__abstractmethods__ = frozenset()
    return concrete


def own_members(cls: type) -> list[str]:
    """Return the public members of a class that no page of a base of it has."""
    places = {base: vars(base) for base in cls.__mro__ if base.__module__.startswith("mpidist")}
    names = [name for base in places for name in places[base] if not name.startswith("_")]
    # A class may hide what is for other rooms alone.
    hides = any("__dir__" in places[base] for base in places)
    shown = set(dir(object.__new__(_concrete(cls))) if hides else names)
    # The fields of a named tuple are among its arguments.
    shown -= set(getattr(cls, "_fields", ()))
    return [
        name for name in dict.fromkeys(names) if name in shown and place_of_member(cls, name) == homes()[_path(cls)]
    ]


def _path(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def object_page(name: str, value: Any) -> str:
    """Return the page of a class, a function or a constant, as reStructuredText."""
    title = f"{name}\n{'=' * len(name)}\n"
    if inspect.isclass(value):
        members = ", ".join(own_members(value))
        # Members of an enum speak for themselves.
        undocumented = "   :undoc-members:\n" if issubclass(value, Enum) else ""
        bases = "   :show-inheritance:\n" if public_bases(value) else ""
        options = f"{bases}{f'   :members: {members}{chr(10)}' if members else ''}{undocumented}"
        return f"{title}\n.. autoclass:: {name}\n{options}"
    return f"{title}\n.. {'autofunction' if inspect.isfunction(value) else 'autodata'}:: {name}\n"


def summary(value: Any) -> str:
    """Return the first sentence of what a class or function says of itself; a constant is its value."""
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return f"``{value!r}``"
    text = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    return re.sub(r":\w+:(?=`)", "", re.split(r"(?<=\.) (?=[A-Z])", text)[0])


def module_page(module: str) -> str:
    """Return the page of a module: what it is for, and a table of its names."""
    names = importlib.import_module(module).__all__
    own = [name for name in names if not isinstance(public_names()[f"{module}.{name}"].value, ModuleType)]
    inner = [public_names()[f"{module}.{name}"].home for name in names if name not in own]
    here = [(name, page_of(f"{module}.{name}")) for name in own if f"{module}.{name}" in dict(at_home())]
    lines = [module, "=" * len(module), "", f".. automodule:: {module}", "   :no-members:", ""]
    if inner:
        lines += ["Modules: " + ", ".join(f":doc:`/docs/api/{place}/index`" for place in inner), ""]
    lines += [".. list-table::", "   :widths: auto", ""]
    for name in own:
        lines += [
            f"   * - :py:obj:`{name} <{module}.{name}>`",
            f"     - {summary(public_names()[f'{module}.{name}'].value)}",
        ]
    lines.append("")
    lines += [".. toctree::", "   :hidden:", "", *(f"   {name} </docs/api/{place}>" for name, place in here), ""]
    return "\n".join(lines)


def write_pages() -> None:
    """Write all pages into ``docs/api``."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    pages = {page_of(module): module_page(module) for module in modules()}
    pages |= {page_of(name): object_page(name, value) for name, value in at_home()}
    for place, text in pages.items():
        path = FOLDER / f"{place}.rst"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def at_home() -> Iterator[tuple[str, Any]]:
    """Yield the names that have a page, and what they mean."""
    for name, public in public_names().items():
        if name == public.home and not isinstance(public.value, ModuleType):
            yield name, public.value


# A link in these would be one in another, or in a table of contents.
_NO_LINKS = (nodes.reference, pending_xref, nodes.title, desc_signature)


class LinkNames(SphinxTransform):
    """Makes links of public names in code type."""

    default_priority = 500

    def apply(self, **kwargs: Any) -> None:
        """Put a reference around each of them."""
        for literal in list(self.document.findall(nodes.literal)):
            match = _NAME.fullmatch(literal.astext())
            target = documented(match[1]) if match else None
            if target is None or isinstance(literal.parent, _NO_LINKS):
                continue
            reference = pending_xref("", refdomain="py", reftype="obj", reftarget=target, refexplicit=True)
            reference["refdoc"] = self.env.docname
            literal.replace_self(reference)
            reference += literal


def resolve(app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.Element) -> nodes.Element | None:
    """Return a link to a name of mpidist under the name that has its page; leave types of others without a link."""
    if node.get("refdomain") != "py":
        return None
    # A docstring names the members of its class without the class.
    in_class = ".".join(filter(None, (node.get("py:module"), node.get("py:class"), node["reftarget"])))
    target = documented(node["reftarget"]) or documented(in_class)
    if target is None:
        return content if node["reftype"] in ("class", "obj", "exc", "data") else None
    if target in modules():
        return env.get_domain("std").resolve_xref(
            env, node["refdoc"], app.builder, "doc", f"docs/api/{page_of(target)}", node, content
        )
    # Fields are with the arguments of their class.
    found = (_link(app, env, node, content, place) for place in (target, target.rpartition(".")[0]))
    return next(filter(None, found), None)


def _link(app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.Element, name: str) -> Any:
    return env.get_domain("py").resolve_xref(env, node["refdoc"], app.builder, "obj", name, node, content)


def public_bases(cls: type) -> list[type]:
    """Return the nearest bases of a class that are public, or of another library."""
    known = [base for base in cls.__mro__[1:] if not base.__module__.startswith("mpidist") or _path(base) in homes()]
    told = [base for base in known if base not in (object, ABC, Generic, Protocol)]
    return [base for base in told if not any(base in other.__mro__[1:] for other in told)]


def show_public_bases(*arguments: Any) -> None:
    """Leave out the bases that only files of mpidist know."""
    *_, cls, _, bases = arguments
    bases[:] = public_bases(cls)


def setup(app: Sphinx) -> dict[str, bool]:
    """Tell Sphinx."""
    app.connect("builder-inited", lambda _: write_pages())
    app.connect("missing-reference", resolve)
    app.connect("autodoc-process-bases", show_public_bases)
    app.add_transform(LinkNames)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
