"""The site as it was built: links, assets, and a page for each public name."""

from __future__ import annotations

import importlib
import inspect
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import unquote, urldefrag
from urllib.request import Request, urlopen

import pytest

from tests.docs.pages import PAGES
from tests.docs.site import SITE, needs_site, page_at, pages
from tests.support.ranks.jobs import ROOT

pytestmark = pytest.mark.one_rank

_LISTED = re.compile(
    r'<a class="reference internal" href="([^"#]+)[^>]*><(?:code|span)[^>]*>(?:<span class="pre">)?([\w.]+)<'
)
_OUTSIDE = ("http:", "https:", "mailto:", "data:", "javascript:")


def broken(page: Path) -> Iterator[str]:
    """Yield the links of a page that lead nowhere in the site."""
    for link in [*page_at(page).links, *page_at(page).loads]:
        if link.startswith(_OUTSIDE):
            continue
        path, anchor = urldefrag(link)
        place = (page.parent / unquote(path.partition("?")[0])).resolve() if path else page
        anchors = page_at(place).anchors if anchor and place.suffix == ".html" and place.exists() else {unquote(anchor)}
        if not place.exists() or unquote(anchor) not in anchors:
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
    pages_of = {text.rpartition(".")[2]: index.parent / page for page, text in _LISTED.findall(index.read_text())}
    assert [name for name in names_of(module) if name not in pages_of or not pages_of[name].exists()] == []


@needs_site
def test_the_page_of_a_class_has_its_methods() -> None:
    mpidist = importlib.import_module("mpidist")
    classes = {name: getattr(mpidist, name) for name in mpidist.__all__ if name[0].isupper()}
    for name, cls in classes.items():
        text = (SITE / f"docs/api/mpidist/{name}.html").read_text()
        own = [method for method in getattr(cls, "__dict__", {}) if inspect.isfunction(vars(cls)[method])]
        if "__dir__" in own:  # which says what is public
            concrete = type(name, (cls,), {})
            concrete.__abstractmethods__ = frozenset()
            own = sorted({*own} & {*dir(object.__new__(concrete))})
        shown = {method for method in own if not method.startswith("_") and inspect.getdoc(vars(cls)[method])}
        assert shown - set(re.findall(rf'id="mpidist\.{name}\.(\w+)"', text)) == set(), name


@pytest.mark.long
def test_links_to_other_sites() -> None:
    try:
        socket.create_connection(("www.tensorflow.org", 443), timeout=10).close()
    except OSError as error:
        pytest.skip(f"no network: www.tensorflow.org cannot be reached ({error})")
    links = {link for page in PAGES for link in re.findall(r"[(<](https?://[^)>\s]+)[)>]", page.read_text())}
    gone = []
    for link in sorted(links):
        try:
            urlopen(Request(link, headers={"User-Agent": "mpidist's documentation"}), timeout=30).close()
        except HTTPError as error:
            # Some sites let no program in; what they do not have is another matter.
            if error.code in (404, 410):
                gone.append(link)
    assert gone == []
