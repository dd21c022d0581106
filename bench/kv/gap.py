"""`baton bench gap`: what a client sees of the handoff: the gap between token 1 and token 2, against all later gaps.

Sends one streamed completion after the other to a running endpoint. Token 1 comes from the prefill node, every later
one from the decode node: what the first gap is longer by is what is left of the transfer.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from bench.arguments import parse_alone
from bench.client.driver import TIMEOUT_S, Prompts, ask, client_runner
from bench.client.endpoint import probe
from bench.client.outcome import Outcome
from bench.numbers import median, percentile
from program.settings import setting
from wire.errors import RequestFailed

_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class GapSettings:
    url: str = setting("http://127.0.0.1:8000", "endpoint to ask")
    model: str = setting("", "name of the model; empty: the first that the endpoint lists")
    prompt_tokens: int = setting(512, "length of each prompt")
    output_tokens: int = setting(32, "tokens to ask for")
    requests: int = setting(30, "requests, one after the other")
    vocabulary: int = setting(1000, "token ids below this are drawn at random, at least from 10 on")
    seed: int = setting(0, "of the prompts; another one for another run, or the prompts are cached")


def main(arguments: Sequence[str]) -> int:
    """Measure and print. Raises `BatonError`."""
    settings = parse_alone("baton bench gap", __doc__.splitlines()[0], arguments, GapSettings)
    with client_runner() as runner:
        outcomes = runner.run(_measure(settings))
    sys.stdout.write(describe(outcomes[1:]) + "\n")  # the first request connects the nodes to each other
    return 0


def describe(outcomes: Sequence[Outcome]) -> str:
    """The figures of a run. Raises `RequestFailed` when answers are too short to have gaps."""
    if any(len(outcome.chunk_s) < 3 for outcome in outcomes):
        raise RequestFailed("an answer had fewer than three pieces: there are no gaps to compare")
    first_s = [outcome.chunk_s[1] - outcome.chunk_s[0] for outcome in outcomes]
    later_s = [after - before for outcome in outcomes for before, after in pairwise(outcome.chunk_s[1:])]
    ttft_s = [outcome.chunk_s[0] - outcome.sent_s for outcome in outcomes]
    exposed_ms = [outcome.usage["kv_transfer"]["exposed_ms"] for outcome in outcomes if "kv_transfer" in outcome.usage]
    lines = f"""{len(outcomes)} requests, one after the other
time to first token    median {median(ttft_s) * 1e3:8.2f} ms
gap from token 1 to 2  median {median(first_s) * 1e3:8.2f} ms, p90 {percentile(first_s, 90) * 1e3:.2f} ms
later gaps             median {median(later_s) * 1e3:8.2f} ms, p90 {percentile(later_s, 90) * 1e3:.2f} ms
ratio of the medians          {median(first_s) / median(later_s):8.2f}"""
    if exposed_ms:
        lines += f"\nexposed transfer       median {median(exposed_ms):8.2f} ms (as the endpoint says)"
    return lines


async def _measure(settings: GapSettings) -> list[Outcome]:
    endpoint = await probe(settings.url, "completions", settings.model, TIMEOUT_S)
    prompts = Prompts(settings.vocabulary, settings.seed)
    outcomes = []
    for _ in range(1 + settings.requests):
        outcomes.append(await ask(endpoint, prompts.conversation(settings.prompt_tokens, settings.output_tokens)))
        await asyncio.sleep(_PAUSE_S)
    return outcomes
