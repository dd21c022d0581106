"""Which nodes may be given a request with images, where only some of a model's nodes see."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from baton.router.nodes.registry import NodeRegistry
from baton.router.routing.ejection import Ejections
from baton.router.routing.policies import RoundRobin
from baton.router.routing.selection import RouteRequest, Routing
from baton.router.routing.suspicion import Probation
from baton.wire.errors import NoNode
from baton.wire.images import PromptImage
from baton.wire.messages import DECODE, PREFILL
from baton.wire.prompt import Prompt
from tests.router.fake_node import make_hello

MODEL = "m"
IMAGES = (PromptImage(1, 4, 28, 28, bytes(16)),)


class Deployment:
    """Nodes by name, and what routing does with requests to them."""

    def __init__(self) -> None:
        self.registry = NodeRegistry({MODEL: None})
        policies = RoundRobin(), RoundRobin()
        self.routing = Routing(self.registry, *policies, 0, Probation(), Ejections(self.registry))

    def join(self, name: str, role: str, *, sees: bool, prefers: str = "", tokens: int = 256) -> int:
        """The epoch of the node."""
        hello = make_hello(role, node_id=name, sees_images=sees, prefers=prefers, max_request_tokens=tokens)
        self.registry.register(hello, 0.0)
        return hello.epoch

    def routes(self, images: Sequence[PromptImage], avoided: frozenset[int] = frozenset()) -> set[tuple[str, str]]:
        """Prefill and decode node of several requests, "" for no prefill node."""
        found = set()
        for _ in range(8):
            prompt = Prompt.of(range(20), images=images)
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
    target = nodes.routing.another_decode(MODEL, 20, frozenset(), 4, images=IMAGES)
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
    assert nodes.registry.max_request_tokens_with_images(MODEL) is None
    nodes.join("Psees", PREFILL, sees=True)
    assert nodes.registry.max_request_tokens_with_images(MODEL) == 256  # decode nodes are yet to join
    nodes.join("D", DECODE, sees=False, tokens=512)
    assert nodes.registry.max_request_tokens_with_images(MODEL) is None
    with pytest.raises(NoNode):
        nodes.routes(IMAGES)
    nodes.join("Dsees", DECODE, sees=True, tokens=128)
    assert nodes.registry.max_request_tokens(MODEL) == 512
    assert nodes.registry.max_request_tokens_with_images(MODEL) == 128
