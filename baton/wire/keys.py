"""The cluster key of a program: who it is, whom it lets in, and whom it takes for which other program.

Owns the format of a key file and what follows from it. Does not open sockets. A file has lines of two words, a name and
a Z85 key of 40 characters; "#" and a blank begin a comment:

    secret KEY      a secret of the program itself, at most two: the first is used, the second is the one before it
    router KEY      public keys of each role, at most two: the newest first, and all of them are accepted
    prefill KEY
    decode KEY

A file with nothing but one or two secrets (without the word) is shared by all programs: whoever has it is every role.
With a file for each role, a node's key does not make a router: nodes know the router by its public key, the router
knows the nodes by theirs, and P and D accept others only as what they are.

Invariants: what a program is does not change while it runs; whom it accepts is what the file said when it was last
read. A file that cannot be used changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq

from baton.wire.errors import InvalidSetting
from baton.wire.messages.membership import DECODE, PREFILL

ROUTER = "router"
ROLES = (ROUTER, PREFILL, DECODE)
SECRET = "secret"
ADMITTED: Mapping[str, tuple[str, ...]] = dict.fromkeys((ROUTER, PREFILL, DECODE), (PREFILL, DECODE))
"""Which roles dial a program of each role. Nodes of both dial those of both: whoever takes KV dials who has it."""
MAX_KEYS = 2
_KEY_LENGTH = 40
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeyFile:
    """The content of a key file. `publics`: of each role, the newest first; None when every role has the program's
    own."""

    secrets: tuple[bytes, ...]
    publics: Mapping[str, tuple[bytes, ...]] | None = None

    @classmethod
    def read(cls, path: Path) -> KeyFile:
        """The keys in the file at `path`. Raises `InvalidSetting` when it is not a file written by `baton key`."""
        try:
            return cls.parse(path.read_text(encoding="ascii"))
        except (OSError, ValueError, zmq.ZMQError) as error:
            raise InvalidSetting(f"cluster key {path}: not a key written by `baton key` ({error})") from None

    @classmethod
    def parse(cls, text: str) -> KeyFile:
        """The keys in such a text. Raises `ValueError` or `zmq.ZMQError` for any other."""
        found: dict[str, list[bytes]] = {}
        for number, line in enumerate(text.splitlines(), 1):
            words = line.split()
            if not words or words[0] == "#":
                continue
            name, key = words if len(words) == 2 else ("", words[0])
            if name not in ("", SECRET, *ROLES) or len(words) > 2 or len(key) != _KEY_LENGTH:
                raise ValueError(f"line {number} is not a key")
            zmq.curve_public(key.encode())  # raises for what is not Z85
            found.setdefault(name, []).append(key.encode())
        if any(len(keys) > MAX_KEYS for keys in found.values()):
            raise ValueError(f"more than {MAX_KEYS} keys of one kind")
        if set(found) == {""}:
            return cls(tuple(found[""]))
        if set(found) != {SECRET, *ROLES}:
            raise ValueError(f"a key of a role has lines {SECRET}, {', '.join(ROLES)}")
        return cls(tuple(found[SECRET]), {role: tuple(found[role]) for role in ROLES})

    def text(self) -> str:
        """The text of a file with these keys."""
        if self.publics is None:
            return "".join(f"{secret.decode()}\n" for secret in self.secrets)
        lines = [(SECRET, secret) for secret in self.secrets]
        lines += [(role, public) for role in ROLES for public in self.publics[role]]
        return "".join(f"{name} {key.decode()}\n" for name, key in lines)

    def publics_of(self, role: str) -> tuple[bytes, ...]:
        """The public keys by which a role is known, the newest first."""
        if self.publics is not None:
            return self.publics[role]
        return tuple(zmq.curve_public(secret) for secret in self.secrets)

    def __repr__(self) -> str:
        return "KeyFile(...)"


class KeyRing:
    """The keys of a running program of `role`. Raises `InvalidSetting` when the file cannot be used."""

    def __init__(self, path: Path, role: str) -> None:
        self._path = path
        self._role = role
        self._file = KeyFile.read(path)
        self._secret = self._file.secrets[0]
        self._public = zmq.curve_public(self._secret)
        if self._public not in self._file.publics_of(role):
            raise InvalidSetting(f"cluster key {path}: it is not the key of a {role}")

    @property
    def public(self) -> bytes:
        """The program's own public key."""
        return self._public

    @property
    def secret(self) -> bytes:
        """The program's own secret key."""
        return self._secret

    @property
    def tells_roles(self) -> bool:
        """Whether the roles have different keys."""
        return self._file.publics is not None

    def reload(self) -> None:
        """Read the file again: whom to accept from now on. One that cannot be used is logged and changes nothing."""
        try:
            self._file = KeyFile.read(self._path)
        except InvalidSetting as error:
            _log.error("%s: the keys of before are still accepted", error)
        else:
            _log.info("cluster key %s was read again", self._path)

    def admits(self, public: bytes) -> bool:
        """Whether the program with that key may connect to this one."""
        return any(public in self._file.publics_of(role) for role in ADMITTED[self._role])

    def is_of(self, public: bytes, role: str) -> bool:
        """Whether that key is one of a role."""
        return public in self._file.publics_of(role)

    def towards(self, *roles: str) -> ClusterKey:
        """The key with which to dial programs of some roles, or to listen."""
        return ClusterKey(self._public, self._secret, _Servers(self, roles))

    def known_as(self, roles: Sequence[str]) -> Sequence[bytes]:
        """The public keys by which programs of these roles are known now, of each role the newest first."""
        return tuple(dict.fromkeys(public for role in roles for public in self._file.publics_of(role)))

    def __repr__(self) -> str:
        return "KeyRing(...)"


def own_role(path: Path) -> str:
    """The role of a node that the key of this file is of, the first where they share one. Raises `InvalidSetting`."""
    file = KeyFile.read(path)
    public = zmq.curve_public(file.secrets[0])
    for role in (PREFILL, DECODE):
        if public in file.publics_of(role):
            return role
    raise InvalidSetting(f"cluster key {path}: it is not the key of a node")


@dataclass(frozen=True, slots=True)
class _Servers:
    ring: KeyRing
    roles: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ClusterKey:
    """A CURVE key pair, and whom it is used to dial: programs with this same key unless `servers` says otherwise. The
    repr hides both halves."""

    public: bytes
    secret: bytes
    servers: _Servers | None = None

    @property
    def expected(self) -> Sequence[bytes]:
        """The public keys by which those that it dials may be known, the likeliest first."""
        return (self.public,) if self.servers is None else self.servers.ring.known_as(self.servers.roles)

    def admits(self, public: bytes) -> bool:
        """Whether a program with that key may connect to one with this."""
        return public == self.public

    def is_of(self, public: bytes, role: str) -> bool:
        """Whether that key is one of a role."""
        return public == self.public if self.servers is None else self.servers.ring.is_of(public, role)

    def __repr__(self) -> str:
        return "ClusterKey(...)"
