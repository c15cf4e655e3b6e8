"""The site that ``make docs`` has built, and what is in its pages."""

from __future__ import annotations

import os
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.support.ranks.jobs import ROOT

SITE = ROOT / os.environ.get("DOCS_SITE", "out/docs/html")

# Sphinx is in an environment of its own, and what it has built may be older than the pages.
needs_site = pytest.mark.skipif("DOCS_SITE" not in os.environ, reason="the site is built and tested by `make docs`")


class Page(HTMLParser):
    """A page of the site: its anchors, its links, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value for name, value in attrs if value is not None}
        if "id" in found:
            self.anchors.add(found["id"])
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag in ("img", "script", "iframe") and "src" in found:
            self.loads.append(found["src"])
        elif tag == "link" and "href" in found:
            self.loads.append(found["href"])


@cache
def page_at(path: Path) -> Page:
    """Return a page of the site."""
    return Page(path.read_text())


def pages() -> list[Path]:
    """Return the files of all pages."""
    return sorted(path for path in SITE.rglob("*.html") if "_static" not in path.parts)
