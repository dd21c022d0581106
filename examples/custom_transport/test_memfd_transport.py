"""The suite that Baton's own transports pass: `pytest examples/custom_transport`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from baton.testing.transports.suite import TransportSuite


class TestMemfd(TransportSuite):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _own_folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        """The ends that the suite kills leave theirs behind."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("ends")))
            yield

    @pytest.fixture(scope="class")
    @classmethod
    def transport(cls) -> str:
        return "memfd_transport"
