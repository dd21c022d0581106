"""`baton serve`: a whole deployment on this machine with one command.

Owns the command lines of the children. Does not know how they are kept alive (`baton.launch.supervisor`) nor what they
do. All children start at once: this process listens for the routers from before their start to after their end, so that
nodes load weights while they start, and clients and nodes wait while one is started again. Several routers have one
port for clients: whichever of them is free takes the next connection.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from baton.demo.location import DEMO_MODEL_NAME
from baton.device.host_memory import read_host_memory
from baton.engine.capacity import find_capacity
from baton.engine.models.division import require_divisible, require_number_of_ranks
from baton.engine.models.facts import load_facts
from baton.engine.models.identity import find_checkpoint
from baton.engine.native.loans import MAX_LINES, Lending, open_page
from baton.launch.api_client import ApiClient
from baton.launch.console import Console
from baton.launch.key import role_file, write_key
from baton.launch.memory_check import require_memory_for_nodes
from baton.launch.placement import VISIBLE_DEVICES, Placement, find_devices, lendings, placed, shares_of
from baton.launch.ports import ListeningPort, listening
from baton.launch.settings import LOOPBACK, Deployment, child_environment, resolve_serve
from baton.launch.supervised import ChildSpec
from baton.launch.supervisor import Supervisor
from baton.node.kv_events.config import of_node
from baton.node.settings import NodeSettings
from baton.router.http.access.keys import KEY_VARIABLE
from baton.router.settings import RouterSettings
from baton.runtime.settings import as_flags, secret_environment
from baton.wire.errors import BatonError, InvalidSetting, ModelLoadError
from baton.wire.messages.membership import DECODE, PREFILL

ROUTER_NAME = "router"
NO_KEY = "none"
"""As `--cluster-key`: the programs of this deployment talk without a key."""
STOP_MARGIN_S = 2.0
"""A node drains for its `shutdown_timeout_s` and needs a little more to leave."""
_NO_PORT = ListeningPort(0, ())


class Doors(NamedTuple):
    """The places where a router listens: for clients, for nodes, and for questions to it alone, such as its metrics.
    The last is there where other routers listen for clients too."""

    name: str
    http: ListeningPort
    control: ListeningPort
    own: ListeningPort = _NO_PORT


def main(arguments: Sequence[str]) -> int:
    """Run a router and its nodes until a signal; returns the exit status. Raises `BatonError` when one cannot start."""
    return run(resolve_serve(arguments, os.environ), os.environ)


def run(deployment: Deployment, environment: Mapping[str, str]) -> int:
    """Serve `deployment`, as `main` does; returns the exit status. `environment`: of all programs, beside their
    settings."""
    _check_model(deployment)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-"))
        doors = _open_doors(deployment, stack)
        if deployment.layout.reason:
            Console(sys.stderr).log("serve", deployment.layout.reason)
        shares = placements(deployment)
        supervisor = Supervisor(
            child_specs(
                with_journal(with_cluster_key(deployment, Path(folder)), Path(folder)),
                doors,
                shares,
                environment,
                reloads_keys=deployment.router.cluster_key not in ("", NO_KEY),
                core_loans=lend_cores(deployment, shares, stack),
            ),
            Console(sys.stderr),
            start_timeout_s=deployment.serve.start_timeout_s,
            stop_timeout_s=deployment.decode.shutdown_timeout_s + STOP_MARGIN_S,
        )
        return supervisor.run(lambda addresses: announce(addresses, deployment, doors))


def _open_doors(deployment: Deployment, stack: ExitStack) -> list[Doors]:
    """Listen for all routers until `stack` ends."""
    num_routers = deployment.serve.routers
    http = stack.enter_context(listening(deployment.router.host, deployment.router.port, "--port"))
    doors = []
    for number in range(num_routers):
        control = stack.enter_context(listening(LOOPBACK, 0, "--control-port"))
        if num_routers == 1:
            doors.append(Doors(ROUTER_NAME, http, control))
        else:
            own = stack.enter_context(listening(LOOPBACK, 0, "--port"))
            doors.append(Doors(f"{ROUTER_NAME}-{number}", http, control, own))
    return doors


def with_cluster_key(deployment: Deployment, folder: Path) -> Deployment:
    """The deployment with a cluster key: one of its own in `folder` when it names none, and none at all when it asks
    for that.

    Other users of this machine must not be able to join it, or to read what its programs say. Of a folder each program
    gets its role's.
    """
    asked = deployment.router.cluster_key
    if Path(asked).is_dir() and asked:
        files = {role: str(role_file(Path(asked), role)) for role in ("router", "prefill", "decode")}
    elif asked and asked != NO_KEY:
        return deployment
    else:
        file = "" if asked == NO_KEY else str(folder / "cluster.key")
        if file:
            write_key(Path(file))
        files = dict.fromkeys(("router", "prefill", "decode"), file)
    return dataclasses.replace(
        deployment,
        router=dataclasses.replace(deployment.router, cluster_key=files["router"]),
        prefill=dataclasses.replace(
            deployment.prefill, cluster_key=files["decode" if deployment.serve.mixed else "prefill"]
        ),
        decode=dataclasses.replace(deployment.decode, cluster_key=files["decode"]),
    )


def with_journal(deployment: Deployment, folder: Path) -> Deployment:
    """The deployment with a journal of resumable streams in `folder`, when it has some and names no place for it.
    Journals outlive a router, and not the deployment."""
    router = deployment.router
    if router.resumable_streams_s and deployment.serve.routers > 1:
        raise InvalidSetting("--resumable-streams-s needs --routers 1: a stream is resumed at the router that began it")
    if not router.resumable_streams_s or router.journal_dir:
        return deployment
    return dataclasses.replace(deployment, router=dataclasses.replace(router, journal_dir=str(folder / "streams")))


def _check_model(deployment: Deployment) -> None:
    """Refuse a model or a limit that no node can serve before any of them starts, loads libraries and reads weights."""
    settings = deployment.decode
    folder = find_checkpoint(settings.model, weights=False)
    config = load_facts(folder, settings.model_impl, remote_code=settings.trust_remote_code)
    find_capacity(settings, config, is_gpu=False)
    for role, node in ((PREFILL, deployment.prefill), (DECODE, deployment.decode)):
        sizes = node.tensor_parallel_size, node.pipeline_parallel_size
        require_number_of_ranks(*sizes)
        try:
            require_divisible(config, *sizes)
        except ModelLoadError as error:
            flags = "--tensor-parallel-size {} and --pipeline-parallel-size {}".format(*sizes)
            raise InvalidSetting(f"{role} nodes with {flags}: {error}") from None
    if settings.load_format == "auto":
        find_checkpoint(settings.model)  # here once, with its progress in sight, and not in every node
    if settings.device == "cpu" or (settings.device == "auto" and not find_devices(os.environ)):
        num_ranks = [settings.num_ranks_here for settings in _settings_of_nodes(deployment)]
        require_memory_for_nodes(folder, config, settings.dtype, len(num_ranks), sum(num_ranks), read_host_memory())


def placements(deployment: Deployment) -> list[Placement]:
    """The share of this machine that each node gets, prefill nodes first."""
    num_ranks = [settings.num_ranks_here for settings in _settings_of_nodes(deployment)]
    pin_cpus = deployment.serve.pin_cpus
    return shares_of(deployment.decode, len(num_ranks), os.environ, pin_cpus=pin_cpus, num_ranks=num_ranks)


def _settings_of_nodes(deployment: Deployment) -> list[NodeSettings]:
    return [deployment.prefill if role == PREFILL else deployment.decode for role, _, _ in deployment.node_names]


def lend_cores(deployment: Deployment, shares: Sequence[Placement], stack: ExitStack) -> list[Lending]:
    """For each node the cores of others that it may use. They lie on a page that is open until `stack` ends. Empty when
    none are lent: nodes share cores or have accelerators or ranks."""
    serve, nodes = deployment.serve, (deployment.prefill, deployment.decode)
    roles = [name.role for name in deployment.node_names]
    is_off = not serve.lend_cores or serve.mixed or PREFILL not in roles or len(roles) > MAX_LINES
    if is_off or not all(share.cpu_ids for share in shares):
        return []
    if any(node.num_ranks > 1 or node.device not in ("auto", "cpu") for node in nodes):
        return []
    if deployment.decode.device == "auto" and find_devices(os.environ):
        return []
    try:
        descriptor = open_page()
    except OSError as error:
        Console(sys.stderr).log("serve", f"nodes do not lend each other cores: {error}")
        return []
    stack.callback(os.close, descriptor)
    Console(sys.stderr).log("serve", "prefill and decode nodes lend each other idle cores (--no-lend-cores: not)")
    return lendings(roles, shares, descriptor)


def child_specs(
    deployment: Deployment,
    doors: Sequence[Doors],
    shares: Sequence[Placement],
    environment: Mapping[str, str],
    *,
    reloads_keys: bool = False,
    core_loans: Sequence[Lending] = (),
) -> list[ChildSpec]:
    """The programs to start: the routers, then one node per share, prefill nodes first.

    `reloads_keys`: cluster keys may change; those that `baton serve` has made for itself do not. `core_loans`: for each
    node, if cores are lent.
    """
    inherited = {**child_environment(environment), "PYTHONUNBUFFERED": "1"}
    reloads = deployment.router.reloads_files or reloads_keys
    router = deployment.router if len(doors) == 1 else deployment.router.beside_others()
    specs = [_router_spec(router, each, inherited, reloads=reloads) for each in doors]
    routers = ",".join(f"tcp://{LOOPBACK}:{each.control.port}" for each in doors)
    for number, ((role, node_group, name), share) in enumerate(zip(deployment.node_names, shares, strict=True)):
        own = placed(deployment.prefill if role == PREFILL else deployment.decode, share, len(shares))
        settings = dataclasses.replace(
            own,
            node_id=name,
            node_group=node_group,
            router=routers,
            data_parallel_size=1,
            kv_events_config=of_node(own.kv_events_config, number),
        )
        page_fds = tuple(each.descriptor for each in core_loans[number : number + 1])
        if page_fds:
            settings = dataclasses.replace(settings, core_loans=str(core_loans[number]))
        module, preference = (
            ("baton.node", [f"--role={role}"]) if deployment.serve.mixed else (f"baton.{role}_node", [])
        )
        flags = [*as_flags(settings), *preference]
        device = {VISIBLE_DEVICES: share.device} if share.device else {}
        node_environment = {**inherited, **secret_environment(settings), **device}
        # without prefill nodes the others compute prompts too; to others a mixed node is a decode node
        group = "" if role == PREFILL else DECODE
        specs.append(
            ChildSpec(
                name,
                module,
                tuple(flags),
                node_environment,
                reloads=reloads_keys,
                inherited_fds=page_fds,
                group=group,
            )
        )
    return specs


def _router_spec(settings: RouterSettings, doors: Doors, environment: Mapping[str, str], *, reloads: bool) -> ChildSpec:
    listen_fds = (*doors.http.fds, *doors.own.fds)
    router = dataclasses.replace(
        settings,
        port=doors.http.port,
        listen_fds=listen_fds,
        control_host=LOOPBACK,
        control_port=doors.control.port,
        control_fd=doors.control.fds[0],
    )
    return ChildSpec(
        doors.name,
        "baton.router",
        tuple(as_flags(router)),
        environment,
        stops_last=True,
        reloads=reloads,
        inherited_fds=(*listen_fds, *doors.control.fds),
        group=ROUTER_NAME,
    )


def announce(addresses: Mapping[str, str], deployment: Deployment, doors: Sequence[Doors]) -> None:
    """Say on stdout that everything is ready, where its metrics are, and how to try it. `addresses`: by child name."""
    address = addresses[doors[0].name]
    own_ports = {each.name: each.own.port for each in doors if each.own.fds}
    request = {
        "model": _served_name(address, deployment),
        "stream": True,
        "messages": [{"role": "user", "content": "Hello!"}],
    }
    print(f"Baton ready at {address}")
    for name, child_address in addresses.items():
        if name in own_ports:
            child_address = f"{urlsplit(child_address).scheme}://{LOOPBACK}:{own_ports[name]}"
        print(f"metrics of {name}: {child_address}/metrics")
    data = shlex.quote(json.dumps(request))
    has_keys = deployment.router.api_key_file or os.environ.get(KEY_VARIABLE)
    key = f'-H "Authorization: Bearer ${KEY_VARIABLE}" ' if has_keys else ""
    print(f"curl -N {address}/v1/chat/completions {key}-H 'Content-Type: application/json' -d {data}", flush=True)


def _served_name(address: str, deployment: Deployment) -> str:
    try:
        return ApiClient(address, os.environ.get(KEY_VARIABLE, "")).models()[0]
    except BatonError:  # it wants an API key that is not at hand: the line is only an example
        return deployment.router.served_model_name or deployment.router.model or DEMO_MODEL_NAME
