"""`baton bench kv` and `baton bench gap`: what the handoff of KV blocks costs, and what a client sees of it.

`kv`: for each transport and several sizes, two node processes hand blocks over with everything the product does except
computing them, in turns with a plain copy of as many bytes. See `baton.bench.kv.measure`. `gap` sends one streamed
completion after the other to a running endpoint. Token 1 comes from the prefill node, every later one from the decode
node: what the gap between them is longer by than all later ones is what is left of the transfer.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from baton.bench.arguments import parse_alone, require_folder, say, write_json
from baton.bench.client.driver import TIMEOUT_S, ask_in_turn, client_runner, random_prompts
from baton.bench.client.endpoint import probe
from baton.bench.client.outcome import Outcome
from baton.bench.documents import ResultFile
from baton.bench.facts import as_lines, collect_facts
from baton.bench.kv.measure import KvBenchSettings, KvDocument, measure, plan
from baton.bench.numbers import median, percentile
from baton.bench.report.document import as_text
from baton.bench.report.sections import section_of
from baton.runtime.ranges import COUNT, SEED, Range
from baton.runtime.settings import setting
from baton.wire.errors import RequestFailed

_DESCRIPTION = "Measure handoffs of KV blocks between two processes, in turns with a plain copy."
_GAP_DESCRIPTION = "Measure the gap between token 1 and token 2 that a client sees, against all later gaps."
_PACKAGES = ("baton-serve", "numpy", "pyzmq", "xxhash", "nixl", "torch")


def main(arguments: Sequence[str]) -> int:
    """Measure and print; 1 when something that was to be measured failed. Raises `BatonError`."""
    settings = parse_alone("baton bench kv", _DESCRIPTION, arguments, KvBenchSettings)
    planned = plan(settings)
    require_folder(settings.json)
    facts = collect_facts(shlex.join(["baton", "bench", "kv", *arguments]), _PACKAGES)
    document = KvDocument(facts)
    measure(planned, document, say)
    section = section_of(ResultFile("kv", document))
    print(f"{as_lines(section.conditions)}\n\n{as_text(section, *section.tables)}")
    if settings.json:
        write_json(settings.json, asdict(document))
    return 1 if document.failures else 0


@dataclass(frozen=True, slots=True)
class GapSettings:
    url: str = setting("http://127.0.0.1:8000", "endpoint to ask")
    model: str = setting("", "name of the model; empty: the first that the endpoint lists")
    prompt_tokens: int = setting(512, "length of each prompt", allowed=COUNT)
    output_tokens: int = setting(32, "tokens to ask for", allowed=Range(3, 2**31 - 1))
    requests: int = setting(30, "requests, one after the other", allowed=COUNT)
    vocabulary: int = setting(
        1000, "token ids below this are drawn at random, at least from 10 on", allowed=Range(11, 2**31 - 1)
    )
    seed: int = setting(0, "of the prompts; another one for another run, or the prompts are cached", allowed=SEED)


def main_of_gap(arguments: Sequence[str]) -> int:
    """Measure and print. Raises `BatonError`."""
    settings = parse_alone("baton bench gap", _GAP_DESCRIPTION, arguments, GapSettings)
    with client_runner() as runner:
        outcomes = runner.run(_measure_gaps(settings))
    sys.stdout.write(describe_gaps(outcomes[1:]) + "\n")  # the first request connects the nodes to each other
    return 0


def describe_gaps(outcomes: Sequence[Outcome]) -> str:
    """The figures of a run. Raises `RequestFailed` when answers are too short to have gaps."""
    if any(len(outcome.chunk_s) < 3 for outcome in outcomes):
        raise RequestFailed("an answer had fewer than three pieces: there are no gaps to compare")
    first_s = [outcome.chunk_s[1] - outcome.chunk_s[0] for outcome in outcomes]
    later_s = [after - before for outcome in outcomes for before, after in pairwise(outcome.chunk_s[1:])]
    if not median(later_s):
        raise RequestFailed("most tokens came in one piece with the one before: there are no gaps to compare")
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


async def _measure_gaps(settings: GapSettings) -> list[Outcome]:
    endpoint = await probe(settings.url, "completions", settings.model, TIMEOUT_S)
    lengths = (settings.prompt_tokens, settings.output_tokens)
    return await ask_in_turn(
        endpoint, random_prompts(settings.vocabulary, settings.seed, 1 + settings.requests, *lengths)
    )
