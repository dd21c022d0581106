"""`baton serve` as a program of the tests: one command that starts and ends everything."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.system.harness import START_TIMEOUT_S, Program, listening_ports, own_segments, wait_until


class Serve(Program):
    """`baton serve ARGUMENT...`. `require_nothing_left` covers its children."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        super().__init__("serve", ["-m", "baton", "serve", *arguments, "--port", "0"], folder)

    @property
    def endpoint(self) -> str:
        """What it announced; "" before."""
        lines = [line for line in self.out.splitlines() if line.startswith("Baton ready at ")]
        return lines[0].rsplit(" ", 1)[1] if lines else ""

    def children(self) -> list[psutil.Process]:
        """Every process it has started and that lives."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, module: str) -> psutil.Process:
        """The child that runs `module`."""
        found = [child for child in self.children() if _runs(child, module)]
        assert len(found) == 1, f"{module}: {found}"
        return found[0]

    def life_of_router(self) -> psutil.Process:
        """The process of the router that serves."""
        children = psutil.Process(self.process.pid).children()
        (life,) = next(child for child in children if _runs(child, "baton.router")).children()
        return life

    def note_footprint(self) -> list[psutil.Process]:
        """Remember ports and segments of all children; returns them."""
        children = self.children()
        for child in children:
            self.ports |= listening_ports(child.pid)
            self.segments |= own_segments(child.pid)
        return children


def _runs(child: psutil.Process, word: str) -> bool:
    """Whether that word is among its arguments; a process that has ended has none."""
    try:
        return word in child.cmdline()
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[Serve]:
    """A running `baton serve`, killed with its children if the block leaves it running."""
    program = Serve(folder, *arguments)
    children: list[psutil.Process] = []
    try:
        wait_until(lambda: bool(program.endpoint) or not program.is_running, "serve announced itself", START_TIMEOUT_S)
        assert program.is_running, program.err
        yield program
    finally:
        if program.is_running:
            children = program.children()
        program.kill()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
