"""Helper: a load of greedy streams whose tokens are known, and what became of each."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from tests.system.reference import Reference

Prompt = tuple[int, ...]
MODEL = "demo"
TIMEOUT_S = 240.0
MAX_FAILURES = 20
"""After which a load ends: the trial has failed."""
_LOOK_S = 0.1
_FIRST_ID, _LAST_ID = 300, 1700


def known_answers(model: Path, num_prompts: int, num_tokens: int) -> Mapping[Prompt, Sequence[int]]:
    """Random prompts of some hundred tokens, and what transformers says comes after each: up to `num_tokens`."""
    rng, reference = random.Random(25), Reference(model)
    sizes = [rng.randrange(200, 700) for _ in range(num_prompts)]
    prompts = [tuple(rng.randrange(_FIRST_ID, _LAST_ID) for _ in range(size)) for size in sizes]
    return {
        prompt: reference.greedy(prompt, rng.randrange(num_tokens // 3, num_tokens)).token_ids for prompt in prompts
    }


@dataclass
class Tally:
    """What became of requests. `failures`: what went wrong with each that did."""

    num_right: int = 0
    failures: list[str] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.num_right} right, {len(self.failures)} failed; medians: TTFT {_median_ms(self.ttft_s):.0f} ms, "
            f"TPOT {_median_ms(self.tpot_s):.1f} ms"
        )


class Load:
    """Streams `num_streams` at a time, on a thread of its own, from entering to leaving its block, which waits until
    all of them have ended. Each waits for `pause_s` before the next. `num_streams` may be raised meanwhile."""

    def __init__(
        self, url: str, answers: Mapping[Prompt, Sequence[int]], num_streams: int, pause_s: float = 0.0
    ) -> None:
        self.tally = Tally()
        self._url, self._answers = url, answers
        self.num_streams, self._pause_s = num_streams, pause_s
        self._must_stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="load")

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._must_stop.set()
        self._thread.join()

    async def _run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session, asyncio.TaskGroup() as group:
            num_started = 0
            while not self._must_stop.is_set():
                while num_started < self.num_streams:
                    group.create_task(self._streams(session, num_started))
                    num_started += 1
                await asyncio.sleep(_LOOK_S)

    async def _streams(self, session: aiohttp.ClientSession, seed: int) -> None:
        rng, prompts = random.Random(seed), list(self._answers)
        while not self._must_stop.is_set() and len(self.tally.failures) < MAX_FAILURES:
            await ask(session, self._url, rng.choice(prompts), self._answers, self.tally)
            await asyncio.sleep(self._pause_s)


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    prompt: Prompt,
    answers: Mapping[Prompt, Sequence[int]],
    tally: Tally,
) -> None:
    """One stream; whether it was right goes into `tally`."""
    expected = list(answers[prompt])
    body = {
        "model": MODEL,
        "prompt": list(prompt),
        "max_tokens": len(expected),
        "temperature": 0.0,
        "stream": True,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    begun_s = time.monotonic()
    first_s, found = 0.0, list[int]()
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise aiohttp.ClientError(f"HTTP {response.status}: {(await response.text())[:300]}")
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise aiohttp.ClientError(str(event["error"])[:300])
                found += [token for choice in event["choices"] for token in choice.get("token_ids", ())]
                first_s = first_s or (time.monotonic() if found else 0.0)
    except (aiohttp.ClientError, TimeoutError) as error:
        tally.failures.append(f"after {len(found)} tokens: {type(error).__name__}: {error}")
        return
    if found != expected:
        wrong = next((at for at, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]), -1)
        tally.failures.append(f"{len(found)} of {len(expected)} tokens, wrong from {wrong}")
        return
    tally.num_right += 1
    tally.ttft_s.append(first_s - begun_s)
    tally.tpot_s.append((time.monotonic() - first_s) / max(1, len(found) - 1))


def _median_ms(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] * 1000 if values else 0.0
