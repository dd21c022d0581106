from __future__ import annotations

import pytest

from baton.bench.targets.spec import Target, parse_target
from baton.wire.errors import InvalidSetting


def test_a_url_is_a_server_that_runs_already() -> None:
    target = parse_target("theirs=http://10.0.0.7:8000/")
    assert target == Target("theirs", "http://10.0.0.7:8000")
    assert not target.is_started


def test_a_baton_is_started_on_a_port_that_is_chosen_later() -> None:
    target = parse_target("colocated=baton serve 'my model' --prefill 0")
    assert target == Target("colocated", "", ("baton", "serve", "my model", "--prefill", "0"))
    assert target.is_started
    assert target.is_baton


def test_any_other_command_says_where_it_answers() -> None:
    target = parse_target("peer=bash serve.sh pd a=b @ http://127.0.0.1:8300")
    assert target == Target("peer", "http://127.0.0.1:8300", ("bash", "serve.sh", "pd", "a=b"))
    assert target.is_started
    assert not target.is_baton


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("http://127.0.0.1:8000", "expected NAME=URL"),
        ("=http://127.0.0.1:8000", "expected NAME=URL"),
        ("two words=http://127.0.0.1:8000", "expected NAME=URL"),
        ("a=http://", "http://HOST:PORT is needed"),
        ("a=http://host:no", "http://HOST:PORT is needed"),
        ("a=vllm serve model", "must say where the command answers"),
        ("a=vllm serve model @ localhost:8000", "http://HOST:PORT is needed"),
        ("a=baton serve --port 8000", "needs ` @ "),
        ("a=baton serve 'model", "No closing quotation"),
        ("a= @ http://127.0.0.1:8000", "there is no command"),
    ],
)
def test_what_is_no_target_is_refused(text: str, reason: str) -> None:
    with pytest.raises(InvalidSetting, match=reason):
        parse_target(text)
