"""Build the documentation site: English in site/, Simplified Chinese in site/zh/. `make docs` runs it.

Each language gets a source tree in a temporary folder: the pages of docs/ (or docs/zh/; pages without a translation are
English, under a banner), the reference pages, and the repository's files that pages link to. zensical makes HTML of it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from urllib.parse import unquote

import reference
import tomli_w
from links import broken_links

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
HOWTO = (
    *("own-loop", "resume", "slurm", "kubernetes", "nodes", "notebooks", "finetuning", "evaluation", "export"),
    "trackers",
    *("debugging-a-hang", "leave"),
)
FROM = ("from-torchrun", "from-accelerate", "from-lightning", "from-the-classic-tutorials")
DETAILS = (
    *("session", "your-case", "own-data", "runs", "launchers", "ray"),
    *("same-model", "verify", "audit", "compare", "forecast", "architecture"),
)
NOTES = ["notes/index.md", *sorted(f"notes/{page.name}" for page in (DOCS / "notes").glob("[0-9]*.md"))]
SECTIONS = {
    ("Start", "入门"): ["index.md", "tutorial.md"],
    ("How-to", "操作指南"): [f"howto/{name}.md" for name in (*HOWTO, *FROM)],
    ("Notes", "笔记"): NOTES,
    ("In detail", "详解"): [f"{name}.md" for name in DETAILS],
    ("Reference", "参考"): [*reference.PAGES, "files.md", "glossary.md"],
}
LANGUAGES = {"en": "English", "zh": "简体中文"}
TOGGLES = {"en": "Switch between light and dark", "zh": "切换明暗模式"}
BANNER = '!!! note "本页尚无中文翻译，以下为英文原文。"\n\n'
LINK = re.compile(r"\]\(([^)\s]+)\)")
CHINESE_WRAP = re.compile(
    r"(?:(?<=[\u4e00-\u9fff])\n *(?=[\u3000-\u9fff\uff00-\uffef])"
    r"|(?<=[\u3000-\u303f\uff00-\uffef])\n *(?=[^\s\d#>|!+*-]))"
)  # HTML would show a space
FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


class Tree:
    """The sources of one language in a folder; `pages` are the paths of its files."""

    def __init__(self, folder: Path, language: str) -> None:
        self.folder, self.language, self.pages = folder, language, set[str]()
        for page in (page for pages in SECTIONS.values() for page in pages):
            if page in reference.PAGES:
                self.write(page, self.banner(page) + reference.PAGES[page]())
            else:
                self.add(DOCS / page)

    def write(self, page: str, text: str) -> None:
        path = self.folder / "docs" / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def banner(self, page: str) -> str:
        return BANNER if self.language == "zh" and not (DOCS / "zh" / page).exists() else ""

    def add(self, source: Path) -> str:
        """Add a file or folder of the repository, once; return its path in the tree."""
        is_own = source.is_relative_to(DOCS)
        page = source.relative_to(DOCS if is_own else ROOT).as_posix().removeprefix("zh/")
        if not is_own:
            suffix = "/index.md" if source.is_dir() else ".md"
            page = f"repository/{page}{'' if source.suffix == '.md' else suffix}"
        if page in self.pages:
            return page
        self.pages.add(page)
        if self.language == "zh" and (DOCS / "zh" / page).exists():
            source = DOCS / "zh" / page
        title = f"# {source.relative_to(ROOT)}\n\n"
        if source.is_dir():
            names = [path.name for path in sorted(source.iterdir()) if not path.name.startswith(("_", "."))]
            self.write(page, self.linked(title + "".join(f"- [{name}]({name})\n" for name in names), source, page))
        elif source.suffix == ".md":
            text = self.linked(source.read_text(encoding="utf-8"), source.parent, page)
            self.write(page, (self.banner(page) if is_own else "") + text)
        elif is_own:  # a figure
            self.write(page, source.read_text(encoding="utf-8"))
        else:
            self.write(page, f"{title}````{source.suffix[1:]}\n{source.read_text(encoding='utf-8')}````\n")
        return page

    def linked(self, text: str, folder: Path, page: str) -> str:
        """Return the text of a page, whose links start from `folder`, with links within the tree."""

        def replace(match: re.Match[str]) -> str:
            path, anchor = re.fullmatch("([^#]*)(.*)", match[1]).groups()  # type: ignore[union-attr]
            if not path or ":" in path:
                return match[0]
            target = (folder / unquote(path)).resolve()
            if not target.exists():
                raise SystemExit(f"{page}: the link {match[1]} leads to no file.")
            top = "../" * page.count("/")
            if target.relative_to(ROOT).as_posix() in (f"docs/{page}", f"docs/zh/{page}"):  # in the other language
                return f"]({top}{'../' if self.language == 'zh' else 'zh/'}{page.removesuffix('.md')}.html)"
            return f"]({top}{self.add(target)}{anchor})"

        parts = FENCED.split(text)
        prose = {part: CHINESE_WRAP.sub("", LINK.sub(replace, part)) for part in parts[::2]}
        return "".join(prose.get(part, part) for part in parts)

    def build(self, site: Path) -> None:
        """Run zensical; copy its output to `site`."""
        is_zh = self.language == "zh"
        links = {"en": "../" if is_zh else "", "zh": "" if is_zh else "zh/"}
        settings = tomllib.loads((DOCS / "theme" / "zensical.toml").read_text(encoding="utf-8"))
        project = settings["project"]
        project["nav"] = [{title[is_zh]: pages} for title, pages in SECTIONS.items()]
        project["extra"]["alternate"] = [{"name": LANGUAGES[key], "link": links[key], "lang": key} for key in LANGUAGES]
        project["theme"]["language"] = self.language
        for palette in project["theme"]["palette"]:
            palette["toggle"]["name"] = TOGGLES[self.language]
        (self.folder / "zensical.toml").write_text(tomli_w.dumps(settings), encoding="utf-8")
        shutil.copytree(DOCS / "theme" / "partials", self.folder / "theme" / "partials")
        command = [sys.executable, "-m", "zensical", "build", "--strict"]
        built = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)
        if built.returncode:
            raise SystemExit(f"{built.stdout}{built.stderr}zensical refused the pages ({self.language}).")
        shutil.copytree(self.folder / "site", site)


def main(site: Path) -> None:
    shutil.rmtree(site, ignore_errors=True)
    for language in LANGUAGES:
        with tempfile.TemporaryDirectory() as folder:
            Tree(Path(folder), language).build(site / {"en": "."}.get(language, language))
    if faults := broken_links(site.resolve()):
        raise SystemExit("\n".join([*faults, f"{len(faults)} broken links."]))
    print(f"{len(list(site.rglob('*.html')))} pages in {site}; all links lead somewhere")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else ROOT / "site")
