"""The Dockerfiles, which cannot be built here: what a linter would say, and that what they name exists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from baton.launch.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "deploy" / "docker").glob("Dockerfile.*"))
_KNOWN = {"FROM", "RUN", "ENV", "ARG", "WORKDIR", "COPY", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}


def _instructions(path: Path) -> list[tuple[str, str]]:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_dockerfile_is_as_a_linter_wants_it(path: Path) -> None:
    found = _instructions(path)
    assert {name for name, _ in found} <= _KNOWN
    for name, text in found:
        if name == "FROM":
            assert re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+[\w.-]*( AS \w+)?", text), "a base has a whole version"
        if "apt-get install" in text:
            assert "--no-install-recommends" in text
            assert text.startswith("apt-get update")
            assert text.endswith("rm -rf /var/lib/apt/lists/*")
    environment = " ".join(text for name, text in found if name == "ENV")
    assert "PIP_NO_CACHE_DIR=1" in environment


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_an_image_runs_baton_as_a_user_with_a_health_check(path: Path) -> None:
    last = dict(_instructions(path))
    assert int(last["USER"]) > 0
    assert json.loads(last["ENTRYPOINT"]) == ["baton"]
    assert json.loads(last["CMD"])[0] in COMMANDS
    check = json.loads(last["HEALTHCHECK"].partition("CMD ")[2])
    compile(check[2], "HEALTHCHECK", "exec")
    assert "BATON_HEALTH_URL" in check[2]
    assert "BATON_HEALTH_URL=http" in last["ENV"]


def test_manifests_and_images_have_the_same_user() -> None:
    users = {dict(_instructions(path))["USER"] for path in FILES}
    manifests = (ROOT / "deploy" / "kubernetes").rglob("*.yaml")
    named = {user for path in manifests for user in re.findall(r"runAsUser: (\d+)", path.read_text())}
    assert users == named
