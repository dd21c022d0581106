"""One campaign from its settings to its result."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from openai import AsyncOpenAI

from baton.engine.cache.store import LATENCY_S
from tests.campaign import checks, private_shm, report, results
from tests.campaign.clocks import compile_liar
from tests.campaign.corpus import make_corpus, token_seconds
from tests.campaign.deployment import Deployment
from tests.campaign.faults import Happened, Injector
from tests.campaign.gaps import NORMAL_S, GapJudge
from tests.campaign.growth import Growth
from tests.campaign.load import GIVE_UP_S, HUNG, WRONG, Asked, Load
from tests.campaign.pace import measured
from tests.campaign.schedule import plan
from tests.campaign.settings import CampaignSettings
from tests.campaign.strangers import Answered, Strangers
from tests.campaign.tier_counts import TierCounts
from tests.checkpoints import make_checkpoint
from tests.engine.models.seeing import make_seeing
from tests.stations.ring import stamp_turns


@dataclass(frozen=True, slots=True)
class Course:
    """What a campaign has come to, for somebody who watches it: everything here goes on changing."""

    deployment: Deployment
    load: Load
    happened: Sequence[Happened]
    excused: Mapping[str, int]
    judge: GapJudge
    growth: Growth
    findings: Sequence[str]


Watcher: TypeAlias = Callable[[Course], Awaitable[None]]
_WARM_UP_S = 1.0
_MAX_POSITION = 4096


async def run(settings: CampaignSettings, *, has_private_shm: bool, watcher: Watcher | None = None) -> list[str]:
    """Run it and print its result; what was found that must not happen. `watcher` runs beside it, and is cancelled when
    everything has ended that was asked."""
    timeline = report.Timeline(settings.folder)
    report.tell(f"{settings.command}\nlogs and timeline are in {settings.folder}")
    model = _make_model(settings)
    deployment = Deployment(settings, model, timeline.note, timeline.found)
    injector = Injector(deployment, timeline.note, timeline.found)
    try:
        await deployment.start()
        async with _client(deployment.url) as client:
            line = await _run_faults(settings, deployment, injector, client, timeline, has_private_shm, watcher)
        for text in await checks.quiescence(deployment):
            timeline.found(text, results.LEAK)
        lines, grown = checks.footprints(deployment)
        for text in [*grown, *await checks.stop_all(deployment, has_private_shm=has_private_shm)]:
            timeline.found(text, results.LEAK)
        report.tell("\n".join(lines))
        report.tell(results.append(settings.results, line, timeline.kinds))
    finally:
        await injector.close()
        await deployment.close()
        timeline.close()
    if timeline.findings:
        report.tell(
            f"\n=== {len(timeline.findings)} findings; logs are in {settings.folder}; again:\n{settings.command}"
        )
        for finding in timeline.findings[:10]:
            report.tell(f"\n=== {finding}")
        report.tell(f"\n=== ends of logs\n{checks.tails(deployment)}")
    return timeline.findings


async def _run_faults(
    settings: CampaignSettings,
    deployment: Deployment,
    injector: Injector,
    client: AsyncOpenAI,
    timeline: report.Timeline,
    has_private_shm: bool,
    watcher: Watcher | None,
) -> results.Line:
    entries = await make_corpus(settings, client, sees=settings.sees)
    token_s = await token_seconds(client)
    num_tokens = sum(entry.num_tokens for entry in entries)
    timeline.note(f"{len(entries)} references, {num_tokens} tokens; {1 / token_s:.0f} tokens of a prompt a second")
    checks.note_footprints(deployment)
    excused: Counter[str] = Counter()
    normal_s = NORMAL_S + (0.0 if deployment.tiers is None else LATENCY_S)
    judge = GapJudge(injector.happened, deployment, token_s, settings.folder, normal_s)

    def done(asked: Asked) -> None:
        known = (injector.happened, deployment.outages, deployment.deaths_s)
        if finding := checks.finding_of(asked, *known):
            timeline.found(finding, {WRONG: results.WRONG, HUNG: results.HANG}.get(asked.end, results.ERROR))
        elif asked.message:
            excused[checks.excuse(asked, *known).partition(" (")[0]] += 1
        if gap := checks.long_gap(asked):
            timeline.note(gap)
        for finding in judge.findings_of(asked, load.asked):
            timeline.found(finding, results.GAP)

    def answered(each: Answered) -> None:
        if finding := checks.finding_of_body(each, injector.happened, deployment.outages, deployment.deaths_s):
            timeline.found(finding, results.BODY)

    load = Load(entries, client, settings.seed, done, settings.salted_share)
    longest_s = _MAX_POSITION * settings.step_s
    strangers = Strangers(deployment.http_port, settings.seed, answered, sees=settings.sees, longest_s=longest_s)
    growth = Growth(timeline.footprints)
    tier_counts = TierCounts()
    async with measured(judge.pace):
        load.start(settings.num_clients)
        strangers.start(settings.num_strangers)
        watching = _watching(deployment, injector, load, growth, judge, settings.stall_s, timeline)
        if deployment.tiers is not None:
            watching.append(asyncio.ensure_future(tier_counts.watch(deployment)))
        if watcher is not None:
            course = Course(deployment, load, injector.happened, excused, judge, growth, timeline.findings)
            watching.append(asyncio.ensure_future(watcher(course)))
        await asyncio.sleep(_WARM_UP_S)
        end_s = time.monotonic() + 60 * settings.minutes
        await injector.run(plan(settings, has_private_shm=has_private_shm))
        await asyncio.sleep(max(0.0, end_s - time.monotonic()))
        await asyncio.gather(load.stop(), strangers.stop())
    for task in watching:
        task.cancel()
    await asyncio.gather(*watching, return_exceptions=True)
    for thaw in checks.after_thaws(load.asked, injector.happened):
        if thaw.held_s > checks.AFTER_THAW_S:
            timeline.found(str(thaw), results.GAP)
    report.tell(report.summary(load.asked, excused, injector.happened, load.num_tokens))
    report.tell(strangers.summary())
    report.tell("\n".join([*judge.summary(), *judge.lines]))
    lines, grown = growth.judged()
    report.tell("\n".join(lines))
    for text in grown:
        timeline.found(text, results.LEAK)
    line = results.line_of(settings, load, strangers, injector.happened, excused, judge)
    if deployment.tiers is None:
        return line
    await tier_counts.look(deployment)
    report.tell(tier_counts.summary())
    for text in tier_counts.findings():
        timeline.found(text, results.UNTRIED)
    for text in deployment.tiers.findings():
        timeline.found(text, results.LEAK)
    return line | {"tiers": tier_counts.table()}


def _watching(
    deployment: Deployment,
    injector: Injector,
    load: Load,
    growth: Growth,
    judge: GapJudge,
    stall_s: float,
    timeline: report.Timeline,
) -> list[asyncio.Future[None]]:
    """What looks at the campaign while it runs, until cancelled."""

    def is_excused() -> bool:
        is_out = bool(deployment.outages) and deployment.outages[-1].ended_s is None
        return is_out or any(each.fault.is_of_router and each.ended_s is None for each in injector.happened)

    watches = [
        checks.watch_progress(lambda: load.running, is_excused, stall_s, partial(timeline.found, kind=results.HANG)),
        growth.watch(deployment),
        stamp_turns(judge.turns),
    ]
    return [asyncio.ensure_future(each) for each in watches]


def _client(url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=GIVE_UP_S + 10)


def _make_model(settings: CampaignSettings) -> Path:
    folder = settings.folder / "model"
    if settings.sees:
        return make_seeing(folder, settings.model, _MAX_POSITION).folder
    seed = random.Random(f"model {settings.seed}").randrange(2**31)
    return make_checkpoint(folder, settings.model, seed=seed, max_position=_MAX_POSITION)


def main(settings: CampaignSettings) -> int:
    """The exit status: 0 if nothing was found."""
    has_private_shm = private_shm.mount()
    if settings.clocks_lie:
        settings.folder.mkdir(parents=True, exist_ok=True)
        os.environ["LD_PRELOAD"] = str(compile_liar(settings.folder))  # this process has its libraries already
    return 1 if asyncio.run(run(settings, has_private_shm=has_private_shm)) else 0
