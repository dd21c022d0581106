"""`baton completion SHELL`: a script with which a shell completes commands, flags and their values.

Owns what the scripts look like. The flags are those that the commands list themselves, so that none is written down
here. Invariant: a script runs nothing of Baton, so that a tab is never slow.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.bench.command import BENCHMARKS
from baton.launch import cli
from baton.runtime.command_line import LIST_FLAGS, CommandParser

_SCRIPTS = {
    "bash": """_baton() {
  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} words=
  if [[ $current == = ]]; then current=; fi
  if [[ $previous == = ]]; then previous=${COMP_WORDS[COMP_CWORD-2]}; fi
  case "${COMP_WORDS[*]:1:COMP_CWORD-1} " in
COMMANDS
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}
complete -o default -F _baton baton
""",
    "zsh": """#compdef baton
_baton() {
  case "${words[2,CURRENT-1]} " in
COMMANDS
  esac
}
if [[ $funcstack[1] == _baton ]]; then _baton "$@"; else compdef _baton baton; fi
""",
    "fish": """function __baton_at
  set -l words (commandline -opc)
  string match -q -- $argv[1] (string join ' ' -- '' $words[2..] '')
end
COMMANDS
""",
}
_MAX_DOC_CHARS = 60


@dataclass(frozen=True, slots=True)
class _Command:
    """The words of a command, those that may follow them, and its flags as `CommandParser.flags` has them."""

    words: str
    subcommands: Sequence[str]
    flags: Sequence[Mapping[str, Any]]

    def in_bash(self) -> str:
        names = " ".join([*self.subcommands, *(name for flag in self.flags for name in flag["names"])])
        valued = [flag for flag in self.flags if flag["takes_value"]]
        values = " ".join(f'{"|".join(flag["names"])}) words="{" ".join(flag["choices"])}";;' for flag in valued)
        return f'    "{self.words} "*) words="{names}"; case $previous in {values} esac;;'

    def in_zsh(self) -> str:
        depth = len(self.words.split())
        specs = [f"'{name}[{_doc(flag)}]{_zsh_value(flag)}'" for flag in self.flags for name in flag["names"]]
        rest = f"'1: :({' '.join(self.subcommands)})'" if self.subcommands else "'*:file:_files'"
        return (
            f"    '{self.words} '*) shift {depth} words; ((CURRENT -= {depth})); _arguments {' '.join(specs)} {rest};;"
        )

    def in_fish(self) -> str:
        pattern = f" {self.words} *" if self.words else " "
        at = f"complete -c baton -n '__baton_at \"{pattern}\"'"
        lines = [f"{at} -f -a '{' '.join(self.subcommands)}'"] if self.subcommands else []
        lines += [f"{at} {_fish_flag(name, flag)}" for flag in self.flags for name in flag["names"]]
        return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Print the script of a shell."""
    parser = CommandParser(
        prog="baton completion",
        description="Print a script with which a shell completes commands and flags. Write it where the shell looks: "
        "bash into ~/.local/share/bash-completion/completions/baton, zsh into a file _baton in a folder of $fpath, fish "
        "into ~/.config/fish/completions/baton.fish.",
    )
    parser.add_argument("shell", choices=list(_SCRIPTS), metavar="{bash,zsh,fish}", help="the shell")
    shell: str = parser.parse(arguments).shell
    commands = (getattr(command, f"in_{shell}")() for command in _commands())
    print(_SCRIPTS[shell].replace("COMMANDS", "\n".join(commands)), end="")
    return 0


def _commands() -> Iterator[_Command]:
    """All commands, each after those that its words begin."""
    for name in cli.COMMANDS:
        command = _listed(name)
        subcommands = BENCHMARKS if name == "bench" else command.subcommands
        yield from (_listed(f"{name} {each}") for each in subcommands)
        yield _Command(name, list(subcommands), command.flags)
    yield _Command("", list(cli.COMMANDS), _listed("").flags)


def _listed(words: str) -> _Command:
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        cli.main([*words.split(), LIST_FLAGS])
    found = json.loads(shown.getvalue())
    return _Command(words, found["subcommands"], found["flags"])


def _doc(flag: Mapping[str, Any]) -> str:
    """The begin of a flag's help, without what a shell would read."""
    return re.sub(r"[^\w ,;.()/-]", "", flag["help"].split(" (default")[0])[:_MAX_DOC_CHARS]


def _zsh_value(flag: Mapping[str, Any]) -> str:
    values = f"({' '.join(flag['choices'])})" if flag["choices"] else "_files"
    return f":value:{values}" if flag["takes_value"] else ""


def _fish_flag(name: str, flag: Mapping[str, Any]) -> str:
    kind = "-l" if name.startswith("--") else "-o" if len(name) > 2 else "-s"  # -tp is an "old" flag to fish
    values = f" -x -a '{' '.join(flag['choices'])}'" if flag["choices"] else " -r" if flag["takes_value"] else ""
    return f"{kind} {name.lstrip('-')}{values} -d '{_doc(flag)}'"
