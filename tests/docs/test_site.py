"""The site as it was built: links, assets, and a page for each public name."""

from __future__ import annotations

import importlib
import inspect
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from urllib.error import HTTPError
from urllib.parse import unquote, urldefrag
from urllib.request import Request, urlopen

import pytest

from tests.docs.pages import PAGES
from tests.docs.site import SITE, needs_site, page_at, pages
from tests.support.ranks.jobs import ROOT

pytestmark = pytest.mark.one_rank

_OUTSIDE = ("http:", "https:", "mailto:", "data:", "javascript:")


def broken(page: Path) -> Iterator[str]:
    """Yield the links of a page that lead nowhere in the site."""
    for link in [*page_at(page).links, *page_at(page).loads]:
        if link.startswith(_OUTSIDE):
            continue
        path, anchor = urldefrag(link)
        place = (page.parent / unquote(path.partition("?")[0])).resolve() if path else page
        if not place.exists():
            yield link
        elif anchor and place.suffix == ".html" and unquote(anchor) not in page_at(place).anchors:
            yield link


@needs_site
def test_links_lead_somewhere() -> None:
    found = {str(page.relative_to(SITE)): list(broken(page)) for page in pages()}
    assert len(found) > 200
    assert {page: links for page, links in found.items() if links} == {}


@needs_site
def test_nothing_is_loaded_from_elsewhere() -> None:
    loads = {load for page in pages() for load in page_at(page).loads}
    assert [load for load in loads if load.startswith(("http:", "https:", "//"))] == []
    styles = [path.read_text(errors="replace") for path in SITE.rglob("*.css")]
    assert [found for text in styles for found in re.findall(r"url\(['\"]?(https?:[^)]*)", text)] == []


def public_modules() -> list[str]:
    """Return the modules that say by ``__all__`` what is public in them."""
    says = re.compile(r"^(?:__all__ = |from .* import __all__ as )", re.MULTILINE)
    files = [path.relative_to(ROOT) for path in (ROOT / "mpidist").rglob("*.py") if says.search(path.read_text())]
    return sorted(".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in files)


def names_of(module: str) -> list[str]:
    """Return the public names of a module from its source: it may need a library that is not here."""
    file = ROOT / module.replace(".", "/")
    text = (file / "__init__.py" if file.is_dir() else file.with_suffix(".py")).read_text()
    found = re.search(r"^__all__ = \[(.*?)\]", text, re.DOTALL | re.MULTILINE)
    return re.findall(r'"(\w+)"', found[1]) if found else list(importlib.import_module(module).__all__)


@needs_site
@pytest.mark.parametrize("module", public_modules())
def test_every_public_name_has_a_page(module: str) -> None:
    index = SITE / f"docs/api/{module}/index.html"
    targets = {urldefrag((index.parent / urldefrag(link)[0]).resolve().as_uri())[0] for link in page_at(index).links}
    listed = {
        unquote(Path(target).stem if not target.endswith("index.html") else Path(target).parent.name)
        for target in targets
    }
    names = set(names_of(module))
    # A thing with several names has its page under one of them.
    table = set(re.findall(r'<span class="pre">(\w+)</span>', index.read_text())) | {
        name.rpartition(".")[2] for name in listed
    }
    assert names - table == set()


@needs_site
def test_every_public_method_of_the_names_of_mpidist_is_told_of() -> None:
    mpidist = importlib.import_module("mpidist")
    for name in mpidist.__all__:
        value = getattr(mpidist, name) if name != "torch" else None
        if not inspect.isclass(value) or isinstance(value, ModuleType):
            continue
        text = (SITE / f"docs/api/mpidist/{name}.html").read_text()
        methods = [
            method for method in vars(value) if not method.startswith("_") and inspect.isfunction(vars(value)[method])
        ]
        shown = [method for method in methods if method in dir(value) and inspect.getdoc(getattr(value, method))]
        hidden = set(shown) - set(re.findall(rf'id="mpidist\.{name}\.(\w+)"', text))
        # A Communicator hides what is for strategies, and nothing else hides anything.
        assert hidden == set() or name == "Communicator", name


@pytest.mark.long
def test_links_to_other_sites() -> None:
    try:
        socket.create_connection(("www.tensorflow.org", 443), timeout=10).close()
    except OSError as error:
        pytest.skip(f"no network: www.tensorflow.org cannot be reached ({error})")
    links = {link for page in PAGES for link in re.findall(r"\]\((https?://[^)\s]+)\)", page.read_text())}
    gone = []
    for link in sorted(links):
        try:
            urlopen(Request(link, headers={"User-Agent": "mpidist's documentation"}), timeout=30).close()
        except HTTPError as error:
            # Some sites let no program in; what they do not have is another matter.
            if error.code in (404, 410):
                gone.append(link)
    assert gone == []
