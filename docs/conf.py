"""Sphinx makes a site of these pages: `make docs` builds it into build/site, from what stands here alone.

Pages link to code and settings beside them, which are no part of the site: with SOURCE_URL in the environment
("https://HOST/PROJECT/blob/main") these links lead there, else they are shown as paths.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import download_reference, pending_xref
from sphinx.application import Sphinx

project = "kvcommons"
author = "The kvcommons authors"
extensions = ["myst_parser"]
root_doc = "index"
html_theme = "furo"
html_title = "kvcommons"
html_copy_source = False
html_show_sourcelink = False
myst_heading_anchors = 4
suppress_warnings = ["toc.not_included"]  # records and formats are listed on pages of their own
_PAGES = Path(__file__).parent


def _replace_links_out(app: Sphinx, doctree: nodes.document) -> None:
    page = Path(app.env.doc2path(app.env.docname))
    for link in [*doctree.findall(download_reference), *doctree.findall(pending_xref)]:
        target = str(link["reftarget"]).partition("#")[0]
        # MyST names a page without its ending, and other pages by where it expects them.
        found = next(
            (one for one in (page.parent / target, page.parent / f"{target}.md") if one.exists()), None
        )
        if not target or found is None or found.resolve().is_relative_to(_PAGES):
            continue
        name = str(found.resolve().relative_to(_PAGES.parent))
        source = os.environ.get("SOURCE_URL")
        if source is None:
            link.replace_self(nodes.literal(text=name))
        else:
            link.replace_self(nodes.reference(text=link.astext(), refuri=f"{source.rstrip('/')}/{name}"))


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("doctree-read", _replace_links_out, priority=100)  # before Sphinx copies what they name
    return {"parallel_read_safe": True}
