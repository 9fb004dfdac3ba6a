"""What mkdocs does beside: pages in the order of docs/README.md, links that are named after a file by its heading, and
links to files outside docs/ as plain text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)(#[^)]*)?\)")


def on_config(config: Any) -> Any:
    config.nav = navigation((HERE / "README.md").read_text(encoding="utf-8"))
    return config


def navigation(readme: str) -> list[dict[str, Any]]:
    """Sections of the list of pages, each with its pages by file name; links out of docs/ are left out."""
    nav: list[dict[str, Any]] = [{"Documentation": "README.md"}]
    for part in re.split(r"^## ", readme, flags=re.MULTILINE)[1:]:
        title = part.partition("\n")[0]
        linked = dict.fromkeys(re.findall(r"\]\(([\w/]+\.md)\)", part))
        paths = [each for path in linked if (HERE / path).is_file() for each in (path, *beside(path))]
        nav.append({title: [{label(path): path} for path in paths]})
    return [entry for entry in nav if all(entry.values())]


def beside(path: str) -> list[str]:
    """The other pages of a folder whose README is listed."""
    if not path.endswith("/README.md"):
        return []
    pages = sorted((HERE / path).parent.glob("*.md"))
    return [str(page.relative_to(HERE)) for page in pages if page.name != "README.md"]


def label(path: str) -> str:
    """The first heading of a page."""
    return (HERE / path).read_text(encoding="utf-8").splitlines()[0].lstrip("# ")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    return inside_only(markdown, HERE / page.file.src_uri)


def inside_only(markdown: str, page: Path) -> str:
    """The text with links to files that are no part of the site as their words and the file's path."""

    def shown(match: re.Match[str]) -> str:
        text, target = match[1], match[2]
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        linked = (page.parent / target).resolve()
        if linked.suffix in (".md", ".svg", ".png") and linked.is_relative_to(HERE):
            named = text == target and linked.suffix == ".md" and linked.is_file()  # after its file: by its heading
            return f"[{label(str(linked.relative_to(HERE)))}]({target}{match[3] or ''})" if named else match[0]
        path = linked.relative_to(HERE.parent) if linked.is_relative_to(HERE.parent) else Path(target)
        return f"{text} (`{path}`)" if str(path) not in text else text

    return LINK.sub(shown, markdown)
