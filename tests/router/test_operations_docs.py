"""The pages and files for operators name what exists: metrics, flags, rules and panels."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from baton.engine.cache.offload import KvOffload
from baton.engine.cache.store import TierCounters
from baton.engine.cache.tiered_pool import TieredPool
from baton.engine.cache.tiers import Tier, Tiers
from baton.engine.scheduler.step_costs import StepCosts
from baton.launch.settings import ServeSettings
from baton.node.kv_events.config import KvEventsConfig
from baton.node.kv_events.metrics import KvEventCollector
from baton.node.kv_events.publisher import KvEventPublisher
from baton.node.metrics import LinkCollector, NodeCollector, OffloadCollector
from baton.node.settings import MixedNodeSettings, NodeSettings
from baton.ranks.settings import RankSettings
from baton.router.health.metric_aliases import VLLM_NAMES
from baton.router.http.openai.prompts import PromptMaker
from baton.router.http.resume.logs import Memory
from baton.router.http.resume.streams import Streams
from baton.router.http.stored.database import Database
from baton.router.http.stored.store import ResponseStore
from baton.router.nodes.registry import NodeRegistry
from baton.router.routing.adaptation import Adaptation
from baton.router.routing.goals import Attainment, Goals
from baton.router.settings import RouterSettings
from baton.runtime.watchdog import Watchdog
from baton.wire.messages.membership import DECODE
from baton.wire.step_cost import StepCost
from tests.engine.scheduler.simulation import Device
from tests.engine.scheduler.stores import SlotBytes, TestStore
from tests.kvtransfer.legs import open_relay
from tests.router.fake_node import STATUS, answering, make_hello
from tests.router.http_client import fetch, post_completion
from tests.router.rig import MODEL, serving

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "operations"
PAGES = {page: (FOLDER / page).read_text() for page in ("README.md", "metrics.md")}
ROW = re.compile(r"^\| `(baton:\w+)(?:\{([\w,]+)\})?` \| (\w+) \| .+ \|$", re.MULTILINE)
ALIAS_ROW = re.compile(r"^\| `(vllm:\w+)` \| `(baton:\w+)` \|$", re.MULTILINE)
SUFFIXES = re.compile(r"_(bucket|sum|count|total)$")


@dataclasses.dataclass
class _Link:
    num_rejected_messages: int = 0


def _adaptation() -> Adaptation:
    """One that has changed something."""
    registry, attainment = NodeRegistry({MODEL: None}), Attainment(Goals(1.0, 1.0))
    for _ in range(3):
        registry.register(make_hello(DECODE, prefers=DECODE), 0.0)
    adaptation = Adaptation(registry, {MODEL: attainment}, adapts=True)
    for number in range(40):
        attainment.first(9.0, None)
        attainment.ended(0.0, None)
        if number % 20 == 19:
            adaptation.end_window()
    return adaptation


def _watchdog() -> Watchdog:
    watchdog = Watchdog()
    watchdog.beat("part", 1.0)
    return watchdog


def _kv_events() -> list[Metric]:
    publisher = KvEventPublisher(KvEventsConfig(endpoint="tcp://127.0.0.1:0"), 16, {})
    try:
        return [*KvEventCollector(publisher).collect()]
    finally:
        publisher.close()


def _documented(*sections: str) -> dict[str, tuple[str, set[str]]]:
    """Kind and labels of the metrics in those sections, by name."""
    parts = {part.partition("\n")[0]: part for part in PAGES["metrics.md"].split("\n## ")}
    return {
        SUFFIXES.sub("", name): (kind, set(labels.split(",")) if labels else set())
        for section in sections
        for name, labels, kind in ROW.findall(parts[section])
    }


def _shown(families: Iterable[Metric]) -> dict[str, tuple[str, set[str]]]:
    return {
        family.name: (family.type, {label for sample in family.samples for label in sample.labels} - {"le"})
        for family in families
        if not family.name.endswith("_created")
    }


async def test_every_metric_of_the_router_is_documented(prompts: PromptMaker) -> None:
    async with serving(prompts) as server:
        responses = ResponseStore(Database(None, 2**20, 1.0))
        for collector in (Streams(Memory(), 1.0), _watchdog(), _adaptation(), responses):
            server.metrics.include(collector)
        server.metrics.of_model(MODEL).cached({"host": 1})
        await server.rig.pair(answering(prompts.tokenizer.encode("abc"), "length"))
        await post_completion(server, cache_control={})  # a field that is ignored
        await server.rig.join(DECODE, group="rack-3")
        text = (await fetch(server, "GET", "/metrics")).body.decode()
        await responses.close()
    assert _shown(text_string_to_metric_families(text)) == _documented("Router")


def test_every_metric_of_the_nodes_is_documented() -> None:
    costs = StepCosts()
    costs.cost = StepCost(1e-3, 1e-4, 1e-8, 1e-4, 1e-8)
    pool = TieredPool(Tiers([Tier("disk", TestStore(), TierCounters())]), SlotBytes(Device(4)))
    with open_relay(peers_write=True, overlaps=False) as relay:
        for node, section in ((relay.prefill, "Prefill nodes"), (relay.decode, "Decode nodes")):
            families = [
                *NodeCollector(lambda: STATUS, costs, {"grammar": 1}, node.leg.metrics).collect(),
                *LinkCollector(_Link()).collect(),
                *OffloadCollector(KvOffload(pool, 4, 64, lambda: None)).collect(),
                *_watchdog().collect(),
                *_kv_events(),
            ]
            assert _shown(families) == _documented("Every node", section)


def test_every_alias_is_documented() -> None:
    aliases = {alias: name for name, aliases in VLLM_NAMES.items() for alias in aliases}
    assert dict(ALIAS_ROW.findall(PAGES["metrics.md"])) == aliases


def _expressions() -> dict[str, str]:
    rules = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"][0]["rules"]
    panels = json.loads((FOLDER / "dashboard.json").read_text())["panels"]
    shown = {f"{panel['title']} {target['refId']}": target["expr"] for panel in panels for target in panel["targets"]}
    return {rule["alert"]: rule["expr"] for rule in rules} | shown


@pytest.mark.parametrize("place", ["alerts.yml", "dashboard.json", "README.md"])
def test_every_metric_that_is_named_exists(place: str) -> None:
    known = {
        name for section in ("Router", "Every node", "Prefill nodes", "Decode nodes") for name in _documented(section)
    }
    named = set(re.findall(r"baton:\w+(?!:)\b(?!:)", (FOLDER / place).read_text()))
    assert named
    assert {name for name in named if SUFFIXES.sub("", name) not in known} == set()


def test_every_expression_is_whole() -> None:
    for place, expression in _expressions().items():
        for opening, closing in ("()", "[]", "{}"):
            assert expression.count(opening) == expression.count(closing), place
        for name in re.findall(r"rate\((baton:\w+)|increase\((baton:\w+)", expression):
            assert "".join(name).endswith(("_total", "_bucket", "_sum", "_count")), place


def test_every_rule_says_what_is_wrong_and_how_bad() -> None:
    groups: list[dict[str, Any]] = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    for rule in groups[0]["rules"]:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]


def test_panels_of_the_dashboard_have_places_of_their_own() -> None:
    panels = json.loads((FOLDER / "dashboard.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)


def test_every_flag_that_is_named_exists() -> None:
    nodes = (NodeSettings, NodeSettings, MixedNodeSettings, RankSettings)
    classes = (RouterSettings, *nodes, ServeSettings)
    known = {f"--{field.name.replace('_', '-')}" for each in classes for field in dataclasses.fields(each)}
    for page in PAGES.values():
        assert set(re.findall(r"--[a-z][a-z-]+", page)) <= known | {"--help", "--config", "--url", "--rolling"}
