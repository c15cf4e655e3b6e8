"""The site in a browser: on a desktop and on a telephone, light and dark, nothing is wider than the page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.docs.site import SITE, needs_site, pages
from tests.support.speed import scaled

pytestmark = [pytest.mark.one_rank, pytest.mark.jobs, needs_site]

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
_WIDTHS = {"desktop": 1280, "telephone": 375}
# Opens page after page in a frame of each width, and writes what is too wide into itself.
_LOOKING = """<!doctype html><title>looking</title><pre id="found"></pre><script>
const found = [], pages = PAGES, widths = WIDTHS;
const scrolls = (frame, box) => /auto|scroll/.test(frame.contentWindow.getComputedStyle(box).overflowX);
async function look(page, width) {
  const frame = document.createElement("iframe");
  frame.style.width = width + "px"; frame.style.height = "800px"; frame.src = page;
  document.body.append(frame);
  await new Promise(done => frame.onload = done);
  const inside = frame.contentDocument.documentElement;
  for (const theme of ["light", "dark"]) {
    inside.dataset.theme = theme; inside.dataset.mode = theme;
    if (inside.scrollWidth > inside.clientWidth) found.push([page, width, theme, inside.scrollWidth]);
    // Pages cut off what is too wide; tables and code may scroll in themselves.
    for (const part of inside.querySelectorAll("article *")) {
      if (part.getBoundingClientRect().right <= width + 1) continue;
      let box = part;
      while (box.tagName !== "ARTICLE" && !scrolls(frame, box)) box = box.parentElement;
      if (box.tagName === "ARTICLE") found.push([page, width, theme, part.outerHTML.slice(0, 80)]);
    }
    for (const image of frame.contentDocument.images)
      if (!image.complete || image.naturalWidth === 0) found.push([page, width, theme, image.src]);
  }
  frame.remove();
}
(async () => {
  for (const page of pages) for (const width of widths) await look(page, width);
  document.getElementById("found").textContent = "found " + JSON.stringify(found) + " end";
})();
</script>"""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """Serve the site, and the page that looks at it, to this machine alone."""

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/looking.html":
                return super().do_GET()
            shown = [f"/{page.relative_to(SITE)}" for page in looked_at()]
            text = _LOOKING.replace("PAGES", json.dumps(shown)).replace("WIDTHS", json.dumps(list(_WIDTHS.values())))
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(text.encode())
            return None

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(SITE)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/looking.html"
    server.shutdown()
    thread.join()
    server.server_close()


def looked_at() -> list[Path]:
    """Return all pages but those of the API, which are alike: of these the indexes and the largest."""
    api = [page for page in pages() if "api" in page.parts]
    largest = sorted(api, key=lambda page: page.stat().st_size)[-8:]
    return [page for page in pages() if page not in api and page.name != "index.html"] + [
        *(page for page in api if page.name == "index.html"),
        *largest,
        SITE / "docs/index.html",
    ]


@pytest.mark.timeout(300)
def test_nothing_is_wider_than_the_page(served: str, tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser: none of {', '.join(_BROWSERS)} is in PATH")
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}",
        "--virtual-time-budget=600000",
    ]
    command = [browser, *flags, "--dump-dom", served]
    seen = subprocess.run(command, capture_output=True, text=True, timeout=scaled(240))
    found = re.search(r"found (\[.*\]) end", unescape(seen.stdout))
    assert found, f"the browser did not come to the end: {seen.stderr[-2000:]}"
    assert json.loads(found[1]) == []
