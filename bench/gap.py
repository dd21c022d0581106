"""`baton bench gap`: what a client sees of the handoff: the gap between token 1 and token 2, against all later gaps.

Sends one streamed completion after the other to a running endpoint, so the system is idle but for it. Token 1 comes
from the prefill node, every later one from the decode node: what the first gap is longer by is what is left of the
transfer when decoding could have begun.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from bench.stats import median, percentile
from engine.api.errors import InvalidSetting, RequestFailed
from engine.api.settings import add_flags, resolve, setting

_TIMEOUT_S = 120.0
_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class GapSettings:
    """Settings of `baton bench gap`."""

    url: str = setting("http://127.0.0.1:8000", "endpoint to ask")
    model: str = setting("", "name of the model; empty: the first that the endpoint lists")
    prompt_tokens: int = setting(512, "length of each prompt")
    output_tokens: int = setting(32, "tokens to ask for")
    requests: int = setting(30, "requests, one after the other")
    vocabulary: int = setting(1000, "token ids below this are drawn at random, at least from 10 on")
    seed: int = setting(0, "of the prompts; another one for another run, or the prompts are cached")


@dataclass(frozen=True, slots=True)
class Stream:
    """When the tokens of one answer came (seconds), and what its usage says."""

    sent_s: float
    token_s: list[float]
    usage: dict[str, Any]


def main(arguments: Sequence[str]) -> int:
    """Measure and print. Raises `BatonError`."""
    parser = argparse.ArgumentParser(prog="baton bench gap", description=__doc__.splitlines()[0], allow_abbrev=False)
    add_flags(parser, GapSettings)
    settings = resolve(GapSettings, parser.parse_args(arguments), {})
    address = urlsplit(settings.url)
    if address.scheme != "http" or address.hostname is None:
        raise InvalidSetting(f"--url {settings.url}: http://HOST:PORT is needed")
    host, port = address.hostname, address.port or 80
    model = settings.model or _ask(host, port, "GET", "/v1/models", None)["data"][0]["id"]
    chance = random.Random(settings.seed)
    streams = []
    for _ in range(1 + settings.requests):
        prompt = [chance.randrange(10, settings.vocabulary) for _ in range(settings.prompt_tokens)]
        streams.append(_stream(host, port, model, prompt, settings.output_tokens))
        time.sleep(_PAUSE_S)
    print(describe(streams[1:]))  # the first connects the nodes to each other
    return 0


def describe(streams: Sequence[Stream]) -> str:
    """The figures of a run. Raises `RequestFailed` when answers are too short to have gaps."""
    if any(len(stream.token_s) < 3 for stream in streams):
        raise RequestFailed("an answer had fewer than three pieces: there are no gaps to compare")
    first_s = [stream.token_s[1] - stream.token_s[0] for stream in streams]
    later_s = [b - a for stream in streams for a, b in zip(stream.token_s[1:], stream.token_s[2:], strict=False)]
    ttft_s = [stream.token_s[0] - stream.sent_s for stream in streams]
    exposed_ms = [stream.usage["kv_transfer"]["exposed_ms"] for stream in streams if "kv_transfer" in stream.usage]
    lines = [
        f"{len(streams)} requests, one after the other",
        f"time to first token    median {median(ttft_s) * 1e3:8.2f} ms",
        f"gap from token 1 to 2  median {median(first_s) * 1e3:8.2f} ms, p90 {percentile(first_s, 90) * 1e3:.2f} ms",
        f"later gaps             median {median(later_s) * 1e3:8.2f} ms, p90 {percentile(later_s, 90) * 1e3:.2f} ms",
        f"ratio of the medians          {median(first_s) / median(later_s):8.2f}",
    ]
    if exposed_ms:
        lines.append(f"exposed transfer       median {median(exposed_ms):8.2f} ms (as the endpoint says)")
    return "\n".join(lines)


def _ask(host: str, port: int, method: str, path: str, body: dict[str, Any] | None) -> Any:
    connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
    try:
        connection.request(method, path, None if body is None else json.dumps(body))
        answer = connection.getresponse()
        if answer.status != 200:
            raise RequestFailed(f"{path} answered {answer.status}: {answer.read(500).decode(errors='replace')}")
        return json.loads(answer.read())
    except OSError as error:
        raise RequestFailed(f"http://{host}:{port}{path}: {error}") from None
    finally:
        connection.close()


def _stream(host: str, port: int, model: str, prompt: Sequence[int], num_tokens: int) -> Stream:
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": num_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
    token_s: list[float] = []
    usage: dict[str, Any] = {}
    try:
        sent_s = time.monotonic()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise RequestFailed(f"the endpoint answered {answer.status}: {answer.read(500).decode(errors='replace')}")
        while line := answer.readline():
            came_s = time.monotonic()
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[len(b"data: ") :])
            if chunk.get("choices"):
                token_s.append(came_s)
            usage = chunk.get("usage") or usage
    except OSError as error:
        raise RequestFailed(f"http://{host}:{port}: {error}") from None
    finally:
        connection.close()
    return Stream(sent_s, token_s, usage)
