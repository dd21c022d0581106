"""Which requests share a prefix cache."""

from __future__ import annotations

from baton.router.http.access.account import Account
from baton.router.http.access.identity import Identity, cache_root_of, cache_salt_of
from baton.router.http.access.keys import ApiKey

SECRET = b"s" * 32


def _identity(name: str, group: str | None = None, secret: bytes = SECRET) -> Identity:
    return Identity(name, cache_root_of(secret, name, group), Account(ApiKey("0" * 64, group=group)))


def test_without_keys_there_is_one_cache_but_for_the_clients_own_salts() -> None:
    assert cache_salt_of(None, None) == b""
    assert cache_salt_of(None, "a") == cache_salt_of(None, "a")
    assert len({cache_salt_of(None, salt) for salt in (None, "a", "b", "")}) == 4


def test_each_key_has_a_cache_of_its_own() -> None:
    salts = [cache_salt_of(_identity(name), None) for name in ("alice", "bob")]
    assert salts[0] != salts[1]
    assert {len(salt) for salt in salts} == {32}
    assert cache_salt_of(_identity("alice"), None) == salts[0]
    assert cache_salt_of(_identity("alice", secret=b"t" * 32), None) not in salts


def test_keys_of_one_group_share_a_cache_that_no_key_outside_reaches() -> None:
    of_group = cache_salt_of(_identity("alice", "research"), None)
    assert cache_salt_of(_identity("bob", "research"), None) == of_group
    for other in (_identity("alice"), _identity("research"), _identity("carol", "sales")):
        assert cache_salt_of(other, None) != of_group


def test_a_salt_of_the_client_never_replaces_the_one_of_its_key() -> None:
    names, client_salts = ("alice", "bob"), (None, "", "x", "alice", "key\0bob")
    salts = [cache_salt_of(_identity(name), client) for name in names for client in client_salts]
    salts += [cache_salt_of(None, client) for client in client_salts]
    assert len(set(salts)) == len(salts)
    assert {len(salt) for salt in salts} == {0, 32}
