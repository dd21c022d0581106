"""How a write is described to nixl: as whole blocks, or as runs of bytes of blocks, where ranks with pools of their own
have different parts of them.

Owns descriptors alone. Which runs a rank writes is `baton.kvtransfer.parts`; what becomes of a write is the agent's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from baton.kvtransfer.transports.nixl.memory import BlockRuns, Region
from baton.kvtransfer.transports.nixl.wire import Write


@dataclass(frozen=True, slots=True)
class WholeBlocks:
    """Writes of whole blocks: both lists of them are known to nixl."""

    sources: Any
    targets: Any

    def begin(self, nixl: Any, command: Write) -> Any:
        """The handle of a write. Raises nixl's errors."""
        return nixl.make_prepped_xfer(
            "WRITE",
            self.sources,
            np.asarray(command.sources, dtype=np.int32),
            self.targets,
            np.asarray(command.targets, dtype=np.int32),
            command.notice,
        )

    def release(self) -> None:
        """Give back what is the peer's."""
        self.targets.release()


@dataclass(frozen=True, slots=True)
class Runs:
    """Writes of runs of bytes of each block. They are described write by write, since a list of all of them could be
    longer than the pool is large."""

    own: Region
    pool: Region
    name: str
    sources: BlockRuns
    targets: BlockRuns

    def begin(self, nixl: Any, command: Write) -> Any:
        """Begin a write of these runs of bytes, and return its handle. Raises nixl's errors."""
        sources = nixl.get_xfer_descs(self.sources.of(command.sources), self.own.kind)
        targets = nixl.get_xfer_descs(self.targets.of(command.targets), self.pool.kind)
        return nixl.initialize_xfer("WRITE", sources, targets, self.name, command.notice)

    def release(self) -> None:
        """Do nothing: no handles are held."""
