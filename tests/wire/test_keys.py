"""Cluster keys: what a file says, whom a program of each role lets in, whom it takes for whom, and how keys change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from baton.launch.key import retire, role_file, rotate, write_key, write_role_keys
from baton.runtime.process import start_authenticator
from baton.wire import links
from baton.wire.errors import InvalidSetting
from baton.wire.keys import ADMITTED, ROLES, ROUTER, KeyFile, KeyRing
from baton.wire.links import LinkSettings
from baton.wire.messages.membership import DECODE, PREFILL

Context = zmq.Context[zmq.Socket[bytes]]
_SOON_MS, _NEVER_MS = 5_000, 300


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_role_keys(tmp_path / "keys")
    return tmp_path / "keys"


def ring(folder: Path, role: str) -> KeyRing:
    return KeyRing(role_file(folder, role), role)


class Listener:
    """A program that listens with a key ring, as its role does."""

    def __init__(self, keys: KeyRing, serves: str) -> None:
        self.context: Context = zmq.Context()
        self._authenticator = start_authenticator(self.context, keys)
        settings = LinkSettings(cluster_key=keys.towards(serves))
        self.socket, plain = links.listen(self.context, zmq.ROUTER, "127.0.0.1", 0, settings)
        self.plain, self.address = plain, links.announced(plain, settings)

    def hears(self, keys: KeyRing, role: str, address: str = "", attempt: int = 0, within_ms: int = _SOON_MS) -> bool:
        """Whether it hears a program that dials it as one of `role`."""
        settings = LinkSettings(cluster_key=keys.towards(role))
        link = links.open_socket(self.context, zmq.DEALER, settings)
        try:
            links.connect(link, address or self.plain, settings, attempt)
            link.send(b"x")
            is_heard = bool(self.socket.poll(within_ms))
            if is_heard:
                self.socket.recv_multipart()
            return is_heard
        finally:
            link.close()

    def close(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self.context.destroy(linger=0)


@pytest.fixture
def listeners() -> Iterator[list[Listener]]:
    opened: list[Listener] = []
    yield opened
    for listener in opened:
        listener.close()


def test_a_shared_key_makes_every_role(tmp_path: Path) -> None:
    write_key(tmp_path / "key")
    rings = [KeyRing(tmp_path / "key", role) for role in ROLES]
    assert all(one.admits(other.public) for one in rings for other in rings)
    assert not any(each.tells_roles for each in rings)


def test_each_role_lets_in_those_that_dial_it_and_nobody_else(folder: Path) -> None:
    rings = {role: ring(folder, role) for role in ROLES}
    for role, keys in rings.items():
        assert {other for other in ROLES if keys.admits(rings[other].public)} == set(ADMITTED[role])
        assert [other for other in ROLES if keys.is_of(rings[role].public, other)] == [role]
        assert keys.tells_roles


def test_the_key_of_one_role_is_not_taken_as_that_of_another(folder: Path) -> None:
    with pytest.raises(InvalidSetting, match="not the key of a router"):
        KeyRing(role_file(folder, DECODE), ROUTER)


def test_a_nodes_key_makes_no_router_and_no_other_node(folder: Path, listeners: list[Listener]) -> None:
    prefill, decode = ring(folder, PREFILL), ring(folder, DECODE)
    # whoever stole a decode node's key can listen with it, but no node takes it for the router
    listeners.append(Listener(decode, PREFILL))
    assert not listeners[-1].hears(prefill, ROUTER, within_ms=_NEVER_MS)
    assert listeners[-1].hears(prefill, DECODE)
    # and a node lets in what is a node, and no router
    listeners.append(Listener(prefill, DECODE))
    assert listeners[-1].hears(decode, PREFILL)
    assert not listeners[-1].hears(ring(folder, ROUTER), PREFILL, within_ms=_NEVER_MS)


def test_an_address_names_the_key_of_who_listens_there(folder: Path, listeners: list[Listener]) -> None:
    prefill, decode, router = (ring(folder, role) for role in (PREFILL, DECODE, ROUTER))
    listeners.append(Listener(prefill, DECODE))
    assert listeners[-1].hears(decode, PREFILL, links.parse_address(listeners[-1].address, "peer"))
    named = links.announced("tcp://127.0.0.1:9", LinkSettings(cluster_key=router.towards(PREFILL)))
    with pytest.raises(InvalidSetting, match="not known here"):
        listeners[-1].hears(decode, PREFILL, named)


@pytest.mark.parametrize("is_shared", [True, False])
def test_old_and_new_are_accepted_while_keys_are_rotated(
    tmp_path: Path, folder: Path, listeners: list[Listener], is_shared: bool
) -> None:
    if is_shared:
        write_key(tmp_path / "key")
    path = tmp_path / "key" if is_shared else folder

    def keys(role: str) -> KeyRing:
        return KeyRing(path if is_shared else role_file(folder, role), role)

    old_router, old_node = keys(ROUTER), keys(DECODE)
    rotate(path)
    old_router.reload()
    old_node.reload()
    new_router, new_node = keys(ROUTER), keys(DECODE)
    assert new_router.public != old_router.public
    listeners += [Listener(old_router, DECODE), Listener(new_router, DECODE)]
    for node in (old_node, new_node):
        # the new key of the router is tried first, then the old one
        assert [listeners[1].hears(node, ROUTER, attempt=0), listeners[0].hears(node, ROUTER, attempt=1)] == [True] * 2
    retire(path)
    new_router.reload()
    new_node.reload()
    assert listeners[1].hears(new_node, ROUTER)
    assert not listeners[1].hears(old_node, ROUTER, within_ms=_NEVER_MS)


def test_a_third_key_drops_the_first(folder: Path) -> None:
    first = ring(folder, DECODE)
    rotate(folder)
    second = ring(folder, DECODE)
    rotate(folder)
    router = ring(folder, ROUTER)
    assert (router.admits(first.public), router.admits(second.public)) == (False, True)
    assert all(role_file(folder, role).stat().st_mode & 0o777 == 0o600 for role in ROLES)


def test_a_file_that_cannot_be_used_changes_nothing(folder: Path) -> None:
    router, node = ring(folder, ROUTER), ring(folder, DECODE)
    role_file(folder, ROUTER).write_text("nonsense")
    router.reload()
    assert router.admits(node.public)


def test_a_key_file_gives_the_pair_and_hides_it(tmp_path: Path) -> None:
    public, secret = zmq.curve_keypair()
    (tmp_path / "key").write_bytes(secret + b"\n")
    keys = KeyRing(tmp_path / "key", ROUTER)
    assert (keys.public, keys.secret) == (public, secret)
    shown = f"{LinkSettings(cluster_key=keys.towards(DECODE))!r} {keys!r} {KeyFile.read(tmp_path / 'key')!r}"
    assert secret.decode() not in shown


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        b"\xff" * 40,
        b"~" * 40,
        b"a" * 41,
        b"secret " + b"a" * 40,
        b"master " + b"a" * 40,
        (b"a" * 40 + b"\n") * 3,
    ],
)
def test_a_file_that_is_no_key_is_an_invalid_setting(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(InvalidSetting, match="cluster key"):
        KeyRing(tmp_path / "key", ROUTER)


def test_a_missing_key_file_is_an_invalid_setting(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="cluster key"):
        KeyRing(tmp_path / "none", ROUTER)
