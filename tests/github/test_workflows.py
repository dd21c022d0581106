"""The workflows, which cannot run here: that what they name exists, and that they test what the project promises.

`check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*` checks them against GitHub's schema.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.baton.test_distribution import PROJECT, ROOT

GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml"))


def _jobs(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    yield from yaml.safe_load(path.read_text())["jobs"].items()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_job_has_a_deadline_and_fixed_actions(path: Path) -> None:
    text = path.read_text()
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}, "each job gets no more than it needs"
    for name, job in _jobs(path):
        assert job["timeout-minutes"] <= 60, name
        for step in job["steps"]:
            assert "run" in step or re.fullmatch(r"[\w/-]+@(v[\d.]+|release/v1)", step["uses"]), step
            assert "${{" not in step.get("run", ""), "what others wrote is no part of a command"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_jobs_wait_for_jobs_that_exist(path: Path) -> None:
    jobs = dict(_jobs(path))
    for job in jobs.values():
        needs = job.get("needs", [])
        assert ({needs} if isinstance(needs, str) else set(needs)) <= set(jobs)


def test_every_make_target_is_there() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    commands = [step.get("run", "") for path in WORKFLOWS for _, job in _jobs(path) for step in job["steps"]]
    asked = {shlex.split(command)[1] for command in commands if command.startswith("make ")}
    assert {"lint", "test", "docs"} <= asked <= targets


def test_each_python_that_gets_a_wheel_is_tested() -> None:
    tested = dict(_jobs(GITHUB / "workflows/ci.yml"))["test"]["strategy"]["matrix"]["python"]
    wheels = PROJECT["tool"]["cibuildwheel"]["build"]
    assert [f"cp{version.replace('.', '')}-*" for version in tested] == wheels
    assert f">={tested[0]}" == PROJECT["project"]["requires-python"]


@pytest.mark.parametrize("path", [path for path in FORMS if path.stem != "config"], ids=lambda path: path.name)
def test_a_form_asks_for_something(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    fields = [field for field in form["body"] if field["type"] == "textarea"]
    assert {"name", "description"} <= set(form)
    assert any(field.get("validations", {}).get("required") for field in fields)
    assert all(field["attributes"]["label"] for field in fields)


def test_hooks_run_what_is_installed() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    dev = " ".join(PROJECT["project"]["optional-dependencies"]["dev"])
    programs = {Path(shlex.split(hook["entry"])[0]).name for hook in repository["hooks"]}
    assert programs == {"ruff", "mypy"}
    assert all(f"{program}>=" in dev for program in programs)
    by_hand = [hook["id"] for hook in repository["hooks"] if hook.get("stages") == ["manual"]]
    assert by_hand == ["mypy"]
