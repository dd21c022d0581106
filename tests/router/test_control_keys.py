"""Where each role has a key, the router takes a node for nothing but what its key says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import zmq

from baton.launch.key import role_file, write_role_keys
from baton.router.nodes.control import ControlLink, ControlPort
from baton.router.nodes.registry import NodeRegistry
from baton.router.requests.relay import Relay
from baton.router.routing.policies import RoundRobin
from baton.runtime.process import start_authenticator
from baton.wire import links
from baton.wire.keys import ROUTER, KeyRing
from baton.wire.links import LinkSettings
from baton.wire.messages.membership import (
    DECODE,
    PREFILL,
    Heartbeat,
    Hello,
    Leaving,
    Refusal,
    Welcome,
    control_identity,
)
from baton.wire.messages.vocabulary import NODE_TO_ROUTER, ROUTER_TO_NODE
from baton.wire.session import Session
from tests.router.fake_node import FINGERPRINT, STATUS, make_hello
from tests.router.rig import DEFAULTS, MODEL

_WAIT_MS = 10_000


@dataclass
class Deployment:
    context: zmq.Context[zmq.Socket[bytes]]
    folder: Path
    control: ControlLink
    registry: NodeRegistry

    async def say(self, role_of_key: str, hello: Hello, *frames: bytes) -> object:
        """Say something over a connection of the identity of `hello` with the key of a role; the answer."""
        keys = KeyRing(role_file(self.folder, role_of_key), role_of_key)
        settings = LinkSettings(cluster_key=keys.towards(ROUTER))
        link = links.open_socket(self.context, zmq.DEALER, settings)
        try:
            link.setsockopt(zmq.IDENTITY, control_identity(hello.epoch))
            links.connect(link, self.control.address, settings)
            await asyncio.to_thread(link.send_multipart, frames or [NODE_TO_ROUTER.encode(hello)])
            assert await asyncio.to_thread(link.poll, _WAIT_MS), "no answer came"
            return ROUTER_TO_NODE.decode(link.recv_multipart()[-1])
        finally:
            link.close()


@asynccontextmanager
async def deployed(folder: Path) -> AsyncIterator[Deployment]:
    write_role_keys(folder)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    keys = KeyRing(role_file(folder, ROUTER), ROUTER)
    authenticator = start_authenticator(context, keys)
    assert authenticator is not None
    registry, settings = NodeRegistry({MODEL: FINGERPRINT}), LinkSettings(cluster_key=keys.towards(PREFILL))
    control = ControlLink(context, ControlPort("127.0.0.1", 0, settings, is_of_role=keys.is_of), registry)
    control.start(Relay(registry, control, RoundRobin(), RoundRobin(), DEFAULTS))
    try:
        yield Deployment(context, folder, control, registry)
    finally:
        await control.close()
        authenticator.stop()
        context.destroy(linger=0)


async def test_a_node_joins_with_the_key_of_its_role_and_with_no_other(tmp_path: Path) -> None:
    async with deployed(tmp_path / "keys") as deployment:
        hello = make_hello(DECODE)
        refusal = await deployment.say(PREFILL, hello)
        assert refusal == Refusal("the cluster key is not one of a decode node")
        assert len(deployment.registry) == 0
        assert isinstance(await deployment.say(DECODE, hello), Welcome)
        assert deployment.registry.get(hello.epoch) is not None


async def test_a_nodes_identity_is_of_no_use_with_another_roles_key(tmp_path: Path) -> None:
    async with deployed(tmp_path / "keys") as deployment:
        hello = make_hello(DECODE)
        welcome = await deployment.say(DECODE, hello)
        assert isinstance(welcome, Welcome)
        leaving = Session(welcome.session, NODE_TO_ROUTER).frames(Leaving(hello.epoch))
        assert isinstance(await deployment.say(PREFILL, hello, *leaving), Refusal)
        node = deployment.registry.get(hello.epoch)
        assert node is not None
        assert not node.is_leaving
        busy = Heartbeat(hello.epoch, replace(STATUS, num_running=9))
        assert isinstance(await deployment.say(PREFILL, make_hello(PREFILL), NODE_TO_ROUTER.encode(busy)), Refusal)
        assert node.status.num_running == 0
