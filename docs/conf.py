"""Settings of Sphinx, for ``make docs``. The sources are the whole checkout: its pages link to one another."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from api_pages import MOCKED  # noqa: E402

from mpidist.core import __version__ as release  # noqa: E402, F401

project = "mpidist"
project_copyright = "the mpidist authors"
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**", "packaging/*.md", "slurm/*.md", "tests/cluster/lab/*.md"]
exclude_patterns = [".*", "build", "dist", "examples", "mpidist", "out"]
html_additional_pages = {"index": "redirect.html"}
templates_path = ["_templates"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "api_pages"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
nitpicky = True
# Code without a language is commands and what they print.
highlight_language = "text"

# Anchors are those of GitHub, on which the pages are read, too.
myst_heading_anchors = 4

autodoc_mock_imports = MOCKED
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
toc_object_entries_show_parents = "hide"
python_use_unqualified_type_names = True
maximum_signature_line_length = 100
napoleon_use_ivar = True

html_theme = "pydata_sphinx_theme"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = "mpidist"
html_show_sourcelink = False
# The search and the tables of the API lead to every name.
html_use_index = False
html_domain_indices = False
html_theme_options = {
    "navbar_end": ["theme-switcher"],
    "navbar_persistent": ["search-button"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "header_links_before_dropdown": 7,
    # Wide tables have the whole width.
    "secondary_sidebar_items": {"**": ["page-toc"], "docs/tf_distribute": [], "docs/environment": []},
    "show_prev_next": False,
}
