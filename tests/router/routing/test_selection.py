"""Which nodes may be given a request with images, where only some of the nodes see, and where its KV is looked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from baton.engine.cache.block_pool import BlockPool
from baton.engine.core import EngineCore
from baton.engine.models.vision.facts import ImageFacts
from baton.engine.scheduler.limits import SchedulerLimits
from baton.engine.scheduler.scheduler import Scheduler
from baton.router.nodes.registry import NodeRegistry
from baton.router.routing.ejection import Ejections
from baton.router.routing.policies import RoundRobin
from baton.router.routing.prefix_ways import PrefixWays
from baton.router.routing.pulls import PullRecords
from baton.router.routing.selection import RouteRequest, Routing
from baton.router.routing.suspicion import Probation
from baton.wire.errors import NoNode
from baton.wire.images import PromptImage, digest_of
from baton.wire.media import Medium
from baton.wire.messages.membership import DECODE, PREFILL
from baton.wire.prompt import Prompt
from baton.wire.sampling import DecodingParams
from tests.engine.scheduler.simulation import Device
from tests.request_keys import A, B
from tests.router.fake_node import FINGERPRINT, LAYOUT, make_hello
from tests.wire.tone import tone

MODEL = "m"
IMAGES = (PromptImage(1, 4, bytes(16), b"", 28, 28),)


class Deployment:
    """Nodes by name, and what routing does with requests to them."""

    def __init__(self) -> None:
        self.registry = NodeRegistry({MODEL: None})
        policies = RoundRobin(), RoundRobin()
        self.routing = Routing(
            self.registry, *policies, 0, Probation(), Ejections(self.registry), PrefixWays(PullRecords())
        )

    def join(
        self, name: str, role: str, *, sees: bool, prefers: str = "", tokens: int = 256, hears: bool = False
    ) -> int:
        """The epoch of the node."""
        media = (*["image"] * sees, *["tone"] * hears)
        hello = make_hello(role, node_id=name, media=media, prefers=prefers, max_request_tokens=tokens)
        self.registry.register(hello, 0.0)
        return hello.epoch

    def routes(self, media: Sequence[Medium], avoided: frozenset[int] = frozenset()) -> set[tuple[str, str]]:
        """Prefill and decode node of several requests, "" for no prefill node."""
        found = set()
        for _ in range(8):
            prompt = Prompt.of(range(20), media=media)
            route = self.routing.choose(RouteRequest(MODEL, prompt, max_tokens=4, avoided=avoided), 0.0)
            found.add((route.prefill.node_id if route.prefill else "", route.decode.node_id))
        return found


def test_text_goes_anywhere_and_images_to_nodes_that_see() -> None:
    nodes = Deployment()
    for role, mark in ((PREFILL, "P"), (DECODE, "D")):
        nodes.join(mark, role, sees=False)
        nodes.join(mark + "sees", role, sees=True)
    assert {name for route in nodes.routes(()) for name in route} == {"P", "Psees", "D", "Dsees"}
    assert nodes.routes(IMAGES) == {("Psees", "Dsees")}
    target = nodes.routing.another_decode(MODEL, 20, frozenset(), 4, media={"image"})
    assert target is not None
    assert target.node_id == "Dsees"


def test_a_decode_node_that_sees_computes_what_no_prefill_node_can() -> None:
    nodes = Deployment()
    nodes.join("P", PREFILL, sees=False)
    nodes.join("D", DECODE, sees=False)
    epoch = nodes.join("Dsees", DECODE, sees=True)
    assert nodes.routes(IMAGES) == {("", "Dsees")}
    # there is no other, so it may be one that is avoided, or one that would rather do something else
    assert nodes.routes(IMAGES, frozenset({epoch})) == {("", "Dsees")}
    nodes.registry.remove(epoch)
    nodes.join("Msees", DECODE, sees=True, prefers=PREFILL)
    assert nodes.routes(IMAGES) == {("", "Msees")}


def test_images_are_served_as_long_as_a_decode_node_sees_them() -> None:
    nodes = Deployment()
    assert nodes.registry.max_request_tokens(MODEL, {"image"}) is None
    nodes.join("Psees", PREFILL, sees=True)
    assert nodes.registry.max_request_tokens(MODEL, {"image"}) == 256  # decode nodes are yet to join
    nodes.join("D", DECODE, sees=False, tokens=512)
    assert nodes.registry.max_request_tokens(MODEL, {"image"}) is None
    with pytest.raises(NoNode):
        nodes.routes(IMAGES)
    nodes.join("Dsees", DECODE, sees=True, tokens=128)
    assert nodes.registry.max_request_tokens(MODEL) == 512
    assert nodes.registry.max_request_tokens(MODEL, {"image"}) == 128


def test_a_prompt_goes_to_nodes_that_compute_all_kinds_of_its_media() -> None:
    nodes = Deployment()
    for role, mark in ((PREFILL, "P"), (DECODE, "D")):
        nodes.join(mark + "sees", role, sees=True)
        nodes.join(mark + "hears", role, sees=False, hears=True)
        nodes.join(mark + "both", role, sees=True, hears=True, tokens=64)
    heard = tone(6, [1, 2])
    assert {decode for _, decode in nodes.routes([heard])} == {"Dhears", "Dboth"}
    assert nodes.routes([*IMAGES, heard]) == {("Pboth", "Dboth")}
    assert nodes.registry.max_request_tokens(MODEL, {"image", "tone"}) == 64
    assert nodes.registry.max_request_tokens(MODEL, {"video"}) is None


def seeing_core() -> EngineCore:
    """An engine of the fake nodes' model that takes every image, and computes nothing but the names of blocks."""
    pool = BlockPool(64)
    scheduler = Scheduler(pool, SchedulerLimits(LAYOUT.block_size, 8, 64, 256), frozenset())
    facts = cast("ImageFacts", SimpleNamespace(require_fit=lambda token_ids, image: None))
    return EngineCore(pool, scheduler, Device(LAYOUT.block_size), FINGERPRINT, media_facts={"image": facts})


TEXT, PIXELS = Prompt(tuple(range(10))), bytes(3 * 28 * 28)
SEEN = replace(TEXT, media=(PromptImage(5, 3, digest_of(28, 28, PIXELS), PIXELS, 28, 28),))
OTHER = replace(TEXT, media=(replace(SEEN.media[0], digest=bytes(16), payload=b""),))
PROMPTS = (TEXT, replace(TEXT, cache_salt=b"a"), replace(TEXT, cache_salt=b"b"), SEEN, replace(SEEN, cache_salt=b"a"))


@pytest.mark.parametrize("computed", PROMPTS)
def test_router_and_engine_name_the_blocks_of_a_prompt_alike(computed: Prompt) -> None:
    core, output_ids = seeing_core(), list[int]()
    core.add(A, computed, DecodingParams(max_tokens=7, ignore_eos=True))
    while core.has_work:
        output_ids += [token_id for output in core.step() for token_id in output.token_ids]
    nodes = Deployment()
    nodes.join("P", PREFILL, sees=True)
    node = nodes.registry.get(nodes.join("D", DECODE, sees=True))
    assert node is not None
    node.cached_hashes = set(core.cached_hashes())
    assert len(node.cached_hashes) == 4, "of ten tokens of the prompt and six of the output"
    for asked in (*PROMPTS, OTHER):
        route = nodes.routing.choose(RouteRequest(MODEL, asked, tuple(output_ids[:6])), 0.0)
        assert (route.prefill is None) == (asked == computed)
        reservation = core.handoffs.reserve(B, asked.without_payload(), output_ids[:6])
        assert reservation is not None
        assert (reservation.num_cached_tokens == 16) == (asked == computed)
        core.handoffs.release(B)
