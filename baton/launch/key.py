"""`baton key`: make, rotate and retire the secrets by which the programs of one deployment know each other.

    baton key FILE              one key that all programs share
    baton key --roles FOLDER    a key for each role: FOLDER/router.key, prefill.key and decode.key
    baton key --rotate PATH     a new key before the one of now, which stays accepted (FILE or FOLDER)
    baton key --retire PATH     only the newest key is accepted from now on

Owns the making of these files. `baton.wire.keys` knows what is in them, and who reads them.
Invariants: only its owner can ever read such a file; a new one replaces no file, and a changed one takes the place of
the earlier at once and whole.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from baton.runtime.command_line import CommandParser
from baton.wire.errors import InvalidSetting

_ROTATED = "rotated {}: send SIGHUP to every program, restart them one by one, then `baton key --retire`, SIGHUP again"


def main(arguments: Sequence[str]) -> int:
    """Do what is asked, and say what was done."""
    parser = CommandParser(
        prog="baton key",
        description="Write a new cluster key. Give every router and node the same file with --cluster-key, or each its "
        "role's of the folder that --roles makes.",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--roles", action="store_true", help="make a folder with a key for each role")
    what.add_argument("--rotate", action="store_true", help="add a new key; the one of now stays accepted")
    what.add_argument("--retire", action="store_true", help="accept the newest key only")
    parser.add_argument("path", type=Path, metavar="FILE", help="the file, or with --roles the folder; must not exist")
    options = parser.parse(arguments)
    path: Path = options.path
    if options.roles:
        write_role_keys(path)
        print(f"wrote the cluster keys of all roles to {path}")
    elif options.rotate:
        rotate(path)
        print(_ROTATED.format(path))
    elif options.retire:
        retire(path)
        print(f"retired the earlier key of {path}: send SIGHUP to every program")
    else:
        write_key(path)
        print(f"wrote a cluster key to {path}")
    return 0


def write_key(path: Path) -> None:
    """Write a CURVE secret (40 characters, Z85) with mode 0600. Raises `InvalidSetting` when `path` exists."""
    import zmq  # `baton key --help` does not need it

    _, secret = zmq.curve_keypair()
    _create(path, f"{secret.decode()}\n")


def write_role_keys(folder: Path) -> None:
    """Make `folder` with a key file for each role. Raises `InvalidSetting` when it exists."""
    import zmq

    from baton.wire.keys import ROLES, KeyFile

    pairs = {role: zmq.curve_keypair() for role in ROLES}
    publics = {role: (public,) for role, (public, _) in pairs.items()}
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        raise InvalidSetting(f"{folder} exists: a cluster key is never overwritten") from None
    except OSError as error:
        raise InvalidSetting(f"cannot make {folder}: {error.strerror}") from None
    for role, (_, secret) in pairs.items():
        _create(role_file(folder, role), KeyFile((secret,), publics).text())


def role_file(folder: Path, role: str) -> Path:
    """The key file of a role in a folder that `write_role_keys` made."""
    return folder / f"{role}.key"


def rotate(path: Path) -> None:
    """Put a new key before the newest one, in every file of it; an older one goes. Raises `InvalidSetting`."""
    import zmq

    from baton.wire.keys import ROLES, KeyFile

    if not path.is_dir():
        _, secret = zmq.curve_keypair()
        _replace({path: KeyFile((secret, KeyFile.read(path).secrets[0])).text()})
        return
    files = {role: KeyFile.read(role_file(path, role)) for role in ROLES}
    pairs = {role: zmq.curve_keypair() for role in ROLES}
    publics = {role: (pairs[role][0], files[ROLES[0]].publics_of(role)[0]) for role in ROLES}
    _replace(
        {
            role_file(path, role): KeyFile((pairs[role][1], file.secrets[0]), publics).text()
            for role, file in files.items()
        }
    )


def retire(path: Path) -> None:
    """Keep the newest key only, in every file of it. Raises `InvalidSetting`."""
    from baton.wire.keys import ROLES, KeyFile

    files = [role_file(path, role) for role in ROLES] if path.is_dir() else [path]
    texts = {}
    for each in files:
        found = KeyFile.read(each)
        publics = None if found.publics is None else {role: keys[:1] for role, keys in found.publics.items()}
        texts[each] = KeyFile(found.secrets[:1], publics).text()
    _replace(texts)


def _create(path: Path, text: str) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise InvalidSetting(f"{path} exists: a cluster key is never overwritten") from None
    except OSError as error:
        raise InvalidSetting(f"cannot write {path}: {error.strerror}") from None
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def _replace(texts: Mapping[Path, str]) -> None:
    """Replace files, each at once. All of them are written before the first is replaced."""
    new = {path: path.with_name(f"{path.name}.new") for path in texts}
    for path, text in texts.items():
        _create(new[path], text)
    for path, written in new.items():
        os.replace(written, path)
