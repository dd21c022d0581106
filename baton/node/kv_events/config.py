"""What `--kv-events-config` asks for, in the words of vLLM.

Owns the reading of the setting, and where a node listens of several that one command starts. Opens nothing.
"""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Annotated, Literal

import msgspec

from baton.wire.errors import InvalidSetting

FLAG = "--kv-events-config"
_ENDPOINT = re.compile(r"tcp://(?P<host>\*|\[[0-9A-Fa-f:.]+\]|[\w.-]+):(?P<port>\d{1,5})")
_Count = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]
_Topic = Annotated[str, msgspec.Meta(max_length=1024)]


class KvEventsConfig(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, frozen=True):
    """As vLLM's, but for the default of `endpoint`, which is loopback. `max_queue_size` is taken for its sake, and of
    no use here: nothing waits before it is sent. `buffer_steps`: batches that are kept for replays."""

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] | None = None
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: _Count = 10_000
    hwm: _Count = 100_000
    max_queue_size: _Count = 100_000
    topic: _Topic = ""

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Those that it names."""
        return (self.endpoint,) if self.replay_endpoint is None else (self.endpoint, self.replay_endpoint)


def read_config(text: str) -> KvEventsConfig | None:
    """What `text`, a JSON object or "", asks for; None: no events. Raises `InvalidSetting`."""
    config = _decoded(text)
    for endpoint in config.endpoints:
        _parts(endpoint)
    if config.replay_endpoint is not None and not listens(config.replay_endpoint):
        raise InvalidSetting(f"{FLAG}: replay_endpoint {config.replay_endpoint} is not of this machine")
    return config if config.enable_kv_cache_events and config.publisher != "null" else None


def listens(endpoint: str) -> bool:
    """Whether a node listens there. `*` and loopback are of this machine; any other host is dialled, as vLLM does."""
    host = _parts(endpoint)[0].strip("[]")
    if host in ("*", "localhost"):
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def of_node(text: str, number: int) -> str:
    """The setting of the node of that number, of those that one command starts: it listens so many ports further on."""
    config = _decoded(text)
    if number == 0 or config == KvEventsConfig():
        return text
    replay = config.replay_endpoint and _moved(config.replay_endpoint, number)
    moved = msgspec.structs.replace(config, endpoint=_moved(config.endpoint, number), replay_endpoint=replay)
    return msgspec.json.encode(moved).decode()


def _decoded(text: str) -> KvEventsConfig:
    try:
        return msgspec.json.decode(text, type=KvEventsConfig) if text else KvEventsConfig()
    except msgspec.DecodeError as error:
        raise InvalidSetting(f"{FLAG} {text!r:.200}: {error}") from None


def _moved(endpoint: str, number: int) -> str:
    host, port = _parts(endpoint)
    return f"tcp://{host}:{port + number}" if port and listens(endpoint) else endpoint


def _parts(endpoint: str) -> tuple[str, int]:
    found = _ENDPOINT.fullmatch(endpoint)
    if found is None or int(found["port"]) > 65_535:
        raise InvalidSetting(f"{FLAG}: {endpoint!r:.200} is no tcp://HOST:PORT")
    return found["host"], int(found["port"])
