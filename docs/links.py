"""The links of a built site: each leads to a file and an anchor, and no page loads anything from another host."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The anchors of a page, its links, and the files that it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors, self.links, self.loaded = set[str](), set[str](), set[str]()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values.get("id", ""), values.get("name", "")}
        (self.links if tag == "a" else self.loaded).update(values[name] for name in ("href", "src") if name in values)


def broken_links(site: Path) -> list[str]:
    """Return the faults of the links of a built site, one per line."""
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    faults = []
    for path, page in pages.items():
        for link in sorted(page.links | page.loaded):
            parts, fault = urlsplit(link), ""
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target, anchor = target / "index.html" if target.is_dir() else target, unquote(parts.fragment)
            if parts.scheme or parts.netloc:
                fault = "loaded from another host" if link in page.loaded and parts.scheme != "data" else ""
            elif not target.exists():
                fault = "no such file"
            elif anchor and target in pages and anchor not in pages[target].anchors:
                fault = "no such anchor"
            if fault:
                faults.append(f"{path.relative_to(site)}: {link}: {fault}")
    return faults
