"""Stand-ins for a pool on a GPU, for torch's allocator, and for the nixl library."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any


class FakeTensor:
    """A pool on GPU 3, as far as its description goes."""

    shape, ndim = (4, 4096), 2
    device = SimpleNamespace(type="cuda", index=3)

    def data_ptr(self) -> int:
        return 2**40

    def element_size(self) -> int:
        return 1

    def is_contiguous(self) -> bool:
        return True


def a_segment(**changes: Any) -> dict[str, Any]:
    """Of torch's allocator, around the pool of `FakeTensor`."""
    return {"device": 3, "address": 2**40 - 2**21, "total_size": 2**22, "is_expandable": False, **changes}


def metadata_of(name: str) -> bytes:
    """Of the agent of that name."""
    return b"agent %s and its memory" % name.encode()


class FakeNixl:
    """Notes what it is asked for. A write `has_begun`, and stays in flight until it is released. Other agents, by
    whatever name they were added, are noted as "peer"."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.calls: list[tuple[Any, ...]] = []
        self.agents: list[Any] = []
        self.state = "PROC"
        self.fails: dict[str, Exception] = {}
        """What functions raise, by their names."""
        self.notices: dict[str, list[bytes]] = {}
        self.more_metadata = b""
        self.writes: list[tuple[Any, ...]] = []
        self.has_begun = threading.Event()

    def known(self, name: str) -> str:
        """What is noted for a name."""
        return "peer" if name in self.names else name

    def try_to(self, name: str) -> None:
        """Raise what the function of that name is to raise."""
        if name in self.fails:
            raise self.fails[name]

    def module(self) -> Any:
        fake = self

        class Native:
            pass

        class Handle:
            def __init__(self, what: str) -> None:
                self.what = what

            def release(self) -> None:
                fake.calls.append(("release", self.what))
                fake.try_to(f"release {self.what}")

        class NixlAgent:
            def __init__(self, name: str, config: Any) -> None:
                self.agent = Native()
                self.name = name

            def register_memory(self, descriptors: Any, kind: str) -> str:
                fake.try_to("register")
                fake.calls.append(("register", descriptors.tolist(), kind))
                return "registered"

            def deregister_memory(self, registered: str) -> None:
                fake.calls.append(("deregister", registered))

            def prep_xfer_dlist(self, name: str, descriptors: Any, kind: str) -> Handle:
                known = fake.known(name)
                fake.try_to(f"prepare {known}")
                fake.calls.append(("prepare", known, descriptors.tolist(), kind))
                return Handle(f"list of {known}")

            def get_agent_metadata(self) -> bytes:
                return metadata_of(self.name) + fake.more_metadata

            def add_remote_agent(self, metadata: bytes) -> str:
                fake.names.append(metadata.split()[1].decode())
                return fake.names[-1]

            def remove_remote_agent(self, name: str) -> None:
                fake.calls.append(("remove", fake.known(name)))
                fake.try_to("remove")

            def make_prepped_xfer(self, *arguments: Any) -> Handle:
                fake.try_to("begin")
                fake.writes.append(arguments)
                return Handle("write")

            def get_xfer_descs(self, descriptors: Any, kind: str) -> Any:
                return descriptors.tolist(), kind

            def initialize_xfer(self, kind: str, sources: Any, targets: Any, name: str, notice: bytes) -> Handle:
                fake.writes.append((kind, sources, targets, fake.known(name), notice))
                return Handle("write")

            def transfer(self, handle: Handle) -> str:
                fake.has_begun.set()
                fake.try_to("transfer")
                return fake.state

            def check_xfer_state(self, handle: Handle) -> str:
                fake.try_to("check")
                return fake.state

            def get_new_notifs(self) -> dict[str, list[bytes]]:
                notices, fake.notices = fake.notices, {}
                return notices

        return SimpleNamespace(nixl_agent=NixlAgent, nixl_agent_config=lambda **settings: settings)
