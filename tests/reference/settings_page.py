"""docs/reference/settings.md: every flag of every program, from the dataclasses that make its `--help`.

Owns the page's form. Flags, defaults and sentences come from the fields; `baton.runtime.settings` says how the other
names of a flag follow from its field.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from baton.bench.serve.settings import ServeBenchSettings
from baton.bench.workload.dataset_settings import DatasetSettings
from baton.launch.chat import ChatSettings
from baton.launch.plan.command import PlanSettings
from baton.launch.settings import NODE_SETTINGS_CHOSEN, ROUTER_SETTINGS_CHOSEN, ServeSettings
from baton.node.settings import MixedNodeSettings, NodeSettings
from baton.ranks.settings import RankSettings
from baton.router.settings import RouterSettings
from baton.runtime.ranges import ANY
from baton.runtime.settings import ENVIRONMENT_PREFIX

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"
_BEGINNING = """# Settings

*For operators: every flag of every program, its environment variable and its default.*

A setting has three names: a flag, an environment variable, and a key of the YAML file that `--config FILE` names. The
key is the flag without the dashes before it. A flag beats the environment, the environment beats the file, and the file
beats the default. `--no-NAME` turns off a flag that is on. A flag can take several values: `--name A B`, words in the
environment, or a list in the file. `--help` shows the usual flags, and `--help GROUP` those of a group.

`baton cluster`, `drain`, `restart`, `key` and `keys` have few flags, and their `--help` shows all of them.
`python -m tests.reference` makes this page from the code.
"""
_Field = dataclasses.Field[Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A section: what it says, and the classes of its settings without the fields that the section of `base` has."""

    name: str
    text: str
    classes: tuple[type[Any], ...]
    reads_environment: bool = True
    base: type[Any] | None = None

    @property
    def fields(self) -> list[_Field]:
        """Of all classes, in their order."""
        known = {field.name for field in dataclasses.fields(self.base)} if self.base else set()
        return [field for each in self.classes for field in dataclasses.fields(each) if field.name not in known]


def settings_page() -> str:
    """The whole page."""
    return _BEGINNING + "".join(_section(program) for program in programs())


def programs() -> tuple[Program, ...]:
    """The sections of the page."""
    serve = (
        "It also takes the flags of [the router](#baton-router) and of [nodes](#baton-prefill-and-baton-decode), "
        f"except those that it sets itself: `{' '.join(map(_flag, _set_by_serve()))}`."
    )
    return (
        Program("baton serve", serve, (ServeSettings,)),
        Program("baton router", "", (RouterSettings,)),
        Program(
            "baton prefill and baton decode", "`baton.LLM` takes those of the engine as arguments.", (NodeSettings,)
        ),
        Program("baton node", "It has the flags of the other nodes, and:", (MixedNodeSettings,), base=NodeSettings),
        Program("baton rank", "", (RankSettings,)),
        Program("baton plan", "", (PlanSettings,)),
        Program("baton chat", "", (ChatSettings,)),
        Program("baton bench serve", "It reads no environment.", (ServeBenchSettings, DatasetSettings), False),
    )


def _set_by_serve() -> list[str]:
    """The settings that a router or a node takes and `baton serve` does not."""
    router = {field.name for field in dataclasses.fields(RouterSettings)}
    node = {field.name for field in dataclasses.fields(NodeSettings)}
    return sorted((router | node) - (router - ROUTER_SETTINGS_CHOSEN) - (node - NODE_SETTINGS_CHOSEN))


def _section(program: Program) -> str:
    parts = [f"\n## {program.name}\n", f"\n{program.text}\n" if program.text else ""]
    groups = dict.fromkeys(field.metadata["group"] for field in program.fields)
    for group in sorted(groups, key=bool):  # the usual ones, which have no group, come first
        title = f"\n### {program.name}: {group}\n" if group else ""
        fields = [field for field in program.fields if field.metadata["group"] == group]
        parts += [title, "\n", *_table(fields, program.reads_environment)]
    return "".join(parts)


def _table(fields: Iterable[_Field], reads_environment: bool) -> Iterable[str]:
    yield f"| flag{', environment' if reads_environment else ''} | default | meaning |\n"
    yield "| --- | --- | --- |\n"
    for field in fields:
        flags = filter(None, (_flag(field.name), field.metadata.get("short")))
        name = f"`{field.name.upper()}`" if field.metadata["positional"] else ", ".join(f"`{flag}`" for flag in flags)
        variable = f"<br>`{ENVIRONMENT_PREFIX}{field.name.upper()}`" if reads_environment else ""
        yield f"| {name}{variable} | {_default(field.default)} | {_meaning(field)} |\n"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _default(default: Any) -> str:
    words = " ".join(map(str, default)) if isinstance(default, tuple) else default
    return "" if words in (None, "") else f"`{'on' if words is True else 'off' if words is False else words}`"


def _meaning(field: _Field) -> str:
    """The sentence, and the values that are allowed."""
    metadata = field.metadata
    values = [f"`{choice}`" for choice in metadata["choices"] or ()] + ["NAME"] * bool(metadata["plugins"])
    values += [f"`{metadata['metavar']}`"] * bool(metadata["metavar"])
    is_number = type(field.default) in (int, float) or metadata["allowed"] is not ANY
    values += [str(metadata["allowed"])] * is_number
    text = f"{metadata['doc']} ({', '.join(values)})" if values else metadata["doc"]
    return text.replace("|", "\\|")
