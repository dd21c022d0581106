"""What `make docs` does to pages before mkdocs reads them, so that they read well in the repository too.

Links that leave docs/ lead to the published sources (`repo_url`), and are plain text where that is not set; a file that
does not exist is a warning, which ends a strict build. CONTRIBUTING.md and CHANGELOG.md become pages of the site.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
FROM_THE_ROOT = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")
_log = logging.getLogger("mkdocs.hooks.docs")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of a folder where the navigation names the folder."""
    config.nav = [_expanded(entry) for entry in config.nav or []]
    return config


def _expanded(entry: Any) -> Any:
    if isinstance(entry, dict):
        return {title: _expanded(below) for title, below in entry.items()}
    if isinstance(entry, list):
        return [_expanded(below) for below in entry]
    if entry.endswith("/"):
        return sorted(f"{entry}{path.name}" for path in (ROOT / "docs" / entry).glob("*.md"))
    return entry


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie beside docs/."""
    for name, uri in FROM_THE_ROOT.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links that are relative to the file in the repository into links of the site."""
    names = {uri: name for name, uri in FROM_THE_ROOT.items()}
    source = PurePosixPath(names.get(page.file.src_uri, f"docs/{page.file.src_uri}"))

    def replaced(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        path = os.path.normpath(source.parent / target)
        uri = FROM_THE_ROOT.get(path, path.removeprefix("docs/"))
        if uri != path:
            return f"[{text}]({os.path.relpath(uri, PurePosixPath(page.file.src_uri).parent)}{anchor})"
        if not (ROOT / path).exists():
            _log.warning("%s links to %s, which does not exist", source, path)
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path}{anchor})" if config.repo_url else text

    return _LINK.sub(replaced, markdown)
