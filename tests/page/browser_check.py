"""`python -m tests.page.browser_check --axe axe.min.js --pictures FOLDER`: looks at the page with a real browser.

Run by hand; it needs `chromium` and `chromedriver` (Debian: `apt-get install chromium chromium-driver`). It starts a
browser, a router whose model says what it was asked (`echo_server`), and a deployment of the demo model. The modules
`*_checks` say what is checked. `--axe` is axe-core (`npm pack axe-core`), which may find nothing serious; `--pictures`
keeps a screenshot of each state in each colour scheme.
"""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

from baton.router.http.access.keys import KEY_VARIABLE
from tests.free_port import free_port
from tests.page.browser import Browser, browsing, until
from tests.page.chats import ChatPage
from tests.page.history_checks import check_bounds, check_history, check_reload_in_an_answer, check_without_storage
from tests.page.look_checks import Look, check_hiding, check_looks
from tests.page.markdown_checks import check_attacks, check_long_answer, check_markdown
from tests.page.programs import is_ready, running
from tests.page.relay_checks import check_relay
from tests.page.turn_checks import (
    CATCH,
    check_copy,
    check_failed_send,
    check_refused,
    check_retry_and_edit,
    check_speed,
    check_stop,
    check_thinking,
)

CHAT_CHECKS: tuple[Callable[[ChatPage], None], ...] = (
    check_markdown,
    check_attacks,
    check_long_answer,
    check_copy,
    check_retry_and_edit,
    check_stop,
    check_failed_send,
    check_thinking,
    check_speed,
    check_refused,
    check_hiding,
    check_history,
    check_reload_in_an_answer,
    check_bounds,
    check_without_storage,
)


def check_chat(browser: Browser, look: Look, only: str) -> None:
    """The page over a router whose model says what it was asked; each check begins with a new chat."""
    with running([sys.executable, "-m", "tests.page.echo_server"]) as server:
        assert server.stdout is not None
        page = ChatPage(browser, server.stdout.readline().decode().strip())
        end = browser.before_each_page(CATCH)
        for check in CHAT_CHECKS:
            if only in check.__name__:
                _anew(page)
                check(page)
                _no_errors(browser, check.__name__)
                _say(check.__name__.replace("_", " "))
        if only in check_looks.__name__:
            _anew(page)
            check_looks(page, look)
        end()


def _anew(page: ChatPage) -> None:
    """Show the page as to one who has never been here, but for the list of chats, which is open."""
    page.open()
    page.browser.run(
        "localStorage.clear(); sessionStorage.clear(); localStorage.setItem('baton.layout', '{\"chats\": true}')"
    )
    page.open()


def _no_errors(browser: Browser, name: str) -> None:
    """The console says what a page may not do. A request that was refused, or found no router, is logged there too."""
    errors = [entry["message"] for entry in browser.log() if entry["level"] == "SEVERE"]
    wanted = (
        "Failed to load resource",
        "net::ERR_INTERNET_DISCONNECTED",
        "trusted-types",
        "TrustedScript",
        "TrustedHTML",
    )
    assert all(any(part in error for part in wanted) for error in errors), (name, errors)


def check_deployment(browser: Browser, look: Look, model: str) -> None:
    """The page over a deployment that wants a key."""
    port, key = free_port(), secrets.token_hex(16)
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "baton", "serve", *([model] if model else []), "--port", str(port)]
    command += ["--prefill", "1", "--kv-offloading-size", "0.05"]
    command += ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}']
    with running(command, {KEY_VARIABLE: key}) as serve:
        until("the deployment", lambda: is_ready(url))
        _say(check_relay(browser, url, psutil.Process(serve.pid), key, look))


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    """Run everything; the exit status."""
    parser = argparse.ArgumentParser(description="Check the page with a real browser.")
    parser.add_argument("--axe", type=Path, help="axe.min.js of axe-core")
    parser.add_argument("--model", default="", help="a checkpoint instead of the demo model, whose answers take 0.1 s")
    parser.add_argument("--only", default="", help="checks with this in their names, for instance history")
    parser.add_argument("--pictures", type=Path, help="folder for screenshots")
    flags = parser.parse_args()
    look = Look("" if flags.axe is None else flags.axe.read_text(), flags.pictures)
    if flags.pictures is not None:
        flags.pictures.mkdir(parents=True, exist_ok=True)
    with browsing() as browser:
        check_chat(browser, look, flags.only)
        if flags.only in check_relay.__name__:
            check_deployment(browser, look, flags.model)
    _say("axe-core finds nothing serious" if flags.axe else "axe-core was not given")
    return 0


if __name__ == "__main__":
    sys.exit(main())
