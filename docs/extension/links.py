"""Looks through the finished site: every link of a page leads to a file and a place that are there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from sphinx.application import Sphinx

# Others' pages cannot be asked for here: their addresses have to look like one.
_EXTERNAL = re.compile(r"(https?://(localhost|[\w-]+(\.[\w-]+)+)(:\d+)?(/[\w~%/.:@!$&'()*+,;=?#-]*)?|mailto:\S+@\S+)")


class Page(HTMLParser):
    """The places of a page, and where its links lead."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes an element's name and what it refers to."""
        values = {name: value for name, value in attrs if value is not None}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        self.links += [values[name] for name in ("href", "src") if values.get(name)]


def broken(folder: Path) -> Iterator[str]:
    """Yields a sentence for each link of the folder's pages that leads nowhere."""
    pages = {path.resolve(): Page(path) for path in sorted(folder.rglob("*.html"))}
    for path, page in pages.items():
        for link in dict.fromkeys(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if parts.scheme != "data" and not _EXTERNAL.fullmatch(link):
                    yield f"{path.name} links to {link}, which is no address"
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists():
                yield f"{path.name} links to {link}, which is not there"
            elif target in pages and parts.fragment and unquote(parts.fragment) not in pages[target].ids:
                yield f"{path.name} links to {link}, which has no such place"


def _check(app: Sphinx, error: Exception | None) -> None:
    # A test looks for links without Sphinx.
    from sphinx.util import logging

    if error is None and app.builder.name == "html":
        for sentence in broken(Path(app.outdir)):
            logging.getLogger(__name__).warning(sentence)


def setup(app: Sphinx) -> dict[str, bool]:
    """Has the site looked through once it is written."""
    app.connect("build-finished", _check)
    return {"parallel_read_safe": True}
