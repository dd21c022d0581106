"""The key file, and which key was presented."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from baton.launch.cli import main
from baton.launch.keys import new_key
from baton.router.http.access.keys import ApiKey, KeyTable, digest_of, read_key_file
from baton.wire.errors import InvalidSetting

DIGEST = digest_of("secret").hex()


def _read(tmp_path: Path, text: str) -> dict[str, ApiKey]:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    return read_key_file(path)


def test_a_key_has_its_limits_and_its_group(tmp_path: Path) -> None:
    text = f'[alice]\nsha256 = "{DIGEST}"\ngroup = "research"\nrequests_per_minute = 60\n[bob]\nsha256 = "{"0" * 64}"\n'
    keys = _read(tmp_path, text)
    assert keys == {
        "alice": ApiKey(DIGEST, group="research", requests_per_minute=60),
        "bob": ApiKey("0" * 64),
    }


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no keys"),
        ("[alice", "key file"),
        ("alice = 3", "object"),
        ("[alice]\n", "sha256"),
        ('[alice]\nsha256 = "secret"', "sha256"),
        (f'[alice]\nsha256 = "{DIGEST}"\nkey = "secret"', "key"),
        (f'[alice]\nsha256 = "{DIGEST}"\nrequests_per_minute = 0', "requests_per_minute"),
        (f'[alice]\nsha256 = "{DIGEST}"\ntokens_per_minute = "many"', "tokens_per_minute"),
        (f'["al ice"]\nsha256 = "{DIGEST}"', "matching"),
        (f'[alice]\nsha256 = "{DIGEST}"\n[bob]\nsha256 = "{DIGEST.upper()}"', "same key"),
        (f'[alice]\nsha256 = "{DIGEST}"\n[alice]\nsha256 = "{DIGEST}"', "alice"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_sentence(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(InvalidSetting, match=complaint) as caught:
        _read(tmp_path, text)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="No such file"):
        read_key_file(tmp_path / "keys.toml")


def test_a_key_is_known_by_its_digest_only() -> None:
    table = KeyTable({"alice": ApiKey(DIGEST), "bob": ApiKey(digest_of("other").hex())})
    assert table.name_of("secret") == "alice"
    assert table.name_of("other") == "bob"
    for wrong in ("", "secre", "secret ", "SECRET", DIGEST, "secret\x00", "\udcff", "x" * 2**20):
        assert table.name_of(wrong) is None


def test_a_comparison_looks_at_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(presented: bytes, known: bytes) -> bool:
        compared.append(known)
        return presented == known

    monkeypatch.setattr("baton.router.http.access.keys.hmac.compare_digest", compare)
    table = KeyTable({name: ApiKey(digest_of(name).hex()) for name in ("first", "second", "third")})
    for presented in ("first", "third", "none"):
        compared.clear()
        table.name_of(presented)
        assert len(compared) == 3


def test_a_new_key_can_be_appended_to_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = ""
    shown: list[str] = []
    for name in ("alice", "bob-2"):
        assert main(["keys", "new", name]) == 0
        captured = capsys.readouterr()
        text += captured.out
        shown += re.findall(r"baton-\S{43}", captured.err)
    table = KeyTable(_read(tmp_path, text))
    assert [table.name_of(key) for key in shown] == ["alice", "bob-2"]
    assert not any(key in text for key in shown)


@pytest.mark.parametrize("name", ["", "a b", "../keys", "a" * 65, "a\n[b]"])
def test_a_name_that_the_file_cannot_hold_is_refused(name: str) -> None:
    with pytest.raises(InvalidSetting, match="letters, digits"):
        new_key(name)
