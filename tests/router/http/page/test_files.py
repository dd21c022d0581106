"""The files of the page: small, from this router only, as their publishers made them, under a strict content policy."""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator

import pytest

from baton.router.http.openai.prompts import PromptMaker
from baton.router.http.page.serving import FOLDER
from tests.router.http_client import fetch
from tests.router.rig import Server, serving

OTHERS = {
    "marked-18.2.1.js": "5371fea86fd0656b4fc7bea7c94c663109d82789b69433eeee78d42895aa44de",
    "marked-18.2.1-license.txt": "8e3a3f82f59a60958f56ca08f445647c32a4733dc7ca6c2c46f6eb898471ab9c",
}
"""SHA-256 of `lib/marked.esm.js` and `LICENSE` of the npm package marked 18.2.1."""
OWN = sorted(path.name for path in FOLDER.iterdir() if path.name not in OTHERS)
SCRIPTS = [name for name in OWN if name.endswith(".js")]
MAX_BYTES, MAX_OWN_BYTES = 160_000, 90_000
MAX_LINES = 200
_IMPORT = re.compile(r'^import (?:\{([^}]*)\} from )?"\./([^"]+)";$', re.MULTILINE)

_EXPORT = re.compile(r"^export (?:async )?(?:function\*?|const|class) ([\w$]+)", re.MULTILINE)
_MAKES_MARKUP = re.compile(r"(inner|outer)HTML|insertAdjacent|document\.write|DOMParser|\beval\(|new Function|srcdoc")


@pytest.fixture
async def server(prompts: PromptMaker) -> AsyncIterator[Server]:
    async with serving(prompts) as running:
        yield running


def _text(name: str) -> str:
    return (FOLDER / name).read_text()


async def test_the_page_is_small_and_its_policy_allows_nothing_but_its_own_files(server: Server) -> None:
    replies = [await fetch(server, "GET", path) for path in ("/", *(f"/page/files/{name}" for name in (*OWN, *OTHERS)))]
    assert {reply.status for reply in replies} == {200}
    assert sum(len(reply.body) for reply in replies) < MAX_BYTES
    assert sum(len(_text(name)) for name in OWN) < MAX_OWN_BYTES
    for reply in replies:
        policy = dict(part.strip().split(" ", 1) for part in reply.headers["content-security-policy"].split(";"))
        own = {"script-src": "'self'", "style-src": "'self'", "img-src": "'self'", "connect-src": "'self'"}
        nothing = dict.fromkeys(
            ("default-src", "base-uri", "form-action", "frame-ancestors", "trusted-types"), "'none'"
        )
        assert policy == own | nothing | {"require-trusted-types-for": "'script'"}
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["referrer-policy"] == "no-referrer"


async def test_every_file_that_is_loaded_is_there_and_every_file_is_loaded(server: Server) -> None:
    page = _text("index.html")
    loaded = set(re.findall(r'(?:src|href)="page/files/([^"]+)"', page))
    assert {"docs", "#prompt"} == set(re.findall(r'(?:src|href)="(?!page/files/)([^"]+)"', page))
    for name in SCRIPTS:
        loaded |= {found for _, found in _IMPORT.findall(_text(name))}
    assert loaded | {"index.html", "marked-18.2.1-license.txt"} == {*OWN, *OTHERS}


async def test_a_file_is_sent_again_only_when_it_has_changed(server: Server) -> None:
    for name, caching in (("main.js", "no-cache"), ("marked-18.2.1.js", "public, max-age=31536000, immutable")):
        first = await fetch(server, "GET", f"/page/files/{name}")
        assert first.headers["cache-control"] == caching
        again = await fetch(server, "GET", f"/page/files/{name}", headers={"if-none-match": first.headers["etag"]})
        assert (again.status, again.body, again.headers["etag"]) == (304, b"", first.headers["etag"])
        other = await fetch(server, "GET", f"/page/files/{name}", headers={"if-none-match": '"another"'})
        assert other.body == (FOLDER / name).read_bytes()


@pytest.mark.parametrize("name", ["nothing.js", "../serving.py", "..%2fserving.py", "%2e%2e/serving.py"])
async def test_there_are_no_other_files(server: Server, name: str) -> None:
    assert (await fetch(server, "GET", f"/page/files/{name}")).status == 404


def test_what_others_wrote_is_as_they_published_it() -> None:
    assert {name: hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() for name in OTHERS} == OTHERS


@pytest.mark.parametrize("name", OWN)
def test_a_file_names_no_other_site_and_makes_no_markup_or_code_of_text(name: str) -> None:
    text = _text(name).replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|//[a-z]+\.|@import|url\(", text)
    assert not re.search(r"<script[^>]*>[^<]|<style|\son\w+=|\sstyle=", text)
    assert not _MAKES_MARKUP.search(text)
    assert len(text.splitlines()) <= MAX_LINES


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_imports_what_is_exported_and_begins_by_saying_what_it_is(name: str) -> None:
    text = _text(name)
    assert text.startswith("// ")
    for names, other in _IMPORT.findall(text):
        exported = set(_EXPORT.findall(_text(other))) if other in OWN else {"Lexer"}
        assert {each.strip() for each in names.split(",") if each.strip()} <= exported, other
