"""Settings of the launcher's own commands, and those of the programs that `baton serve` starts.

Owns what only the launcher decides. The settings of the router and the nodes stay where they are defined;
`resolve_serve` takes over every one of them except those that the launcher itself has to choose (addresses,
names, placement).
Invariant: a setting that the launcher chooses is unknown to `baton serve`, so it is refused instead of ignored.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar, get_type_hints

from baton.engine.settings import RANKS_OR_SAME
from baton.launch.layout import Layout, asked_layout, chosen_layout
from baton.launch.placement import find_devices
from baton.node.settings import MAX_ROUTERS, NodeSettings
from baton.router.settings import RouterSettings
from baton.runtime.command_line import CommandParser, closest
from baton.runtime.ranges import SECONDS, Range
from baton.runtime.settings import ENVIRONMENT_PREFIX, add_flags, check_file_keys, resolve, setting
from baton.wire.errors import InvalidSetting
from baton.wire.messages.membership import DECODE, PREFILL

ROUTER_SETTINGS_CHOSEN = frozenset({"control_host", "control_port", "control_fd", "listen_fds"})
NODE_SETTINGS_CHOSEN = frozenset(
    {
        "router",
        "host",
        "port",
        "rank_machines",
        "rank_port",
        "http_port",
        "node_id",
        "node_group",
        "cpu_affinity",
        "core_loans",
    }
)
LOOPBACK = "127.0.0.1"
MAX_NODES = 256
_SettingsT = TypeVar("_SettingsT")
_NodeSettingsT = TypeVar("_NodeSettingsT", bound=NodeSettings)
_layout = partial(setting, group="layout")
_ranks = partial(setting, group="ranks")
_kernels = partial(setting, group="kernels")
_lifetime = partial(setting, group="lifetime")


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """The settings of `baton serve` beside those of the router and the nodes."""

    prefill: int | None = setting(
        None,
        "number of prefill nodes; 0: decode nodes compute the prompts too; none: 1, but 0 where nothing else asks for "
        "two nodes and they would share one device (the CPU, or one GPU)",
        allowed=Range(0, MAX_NODES),
    )
    decode: int | None = setting(None, "number of decode nodes; none: 1", allowed=Range(1, MAX_NODES))
    mixed: bool = _layout(False, "nodes that do any leg: --prefill and --decode are then what they prefer")
    prefill_tensor_parallel_size: int = _ranks(
        0, "ranks of each prefill node; 0: --tensor-parallel-size", allowed=RANKS_OR_SAME
    )
    decode_tensor_parallel_size: int = _ranks(
        0, "ranks of each decode node; 0: --tensor-parallel-size", allowed=RANKS_OR_SAME
    )
    prefill_pipeline_parallel_size: int = _ranks(
        0, "stages of each prefill node; 0: --pipeline-parallel-size", allowed=RANKS_OR_SAME
    )
    decode_pipeline_parallel_size: int = _ranks(
        0, "stages of each decode node; 0: --pipeline-parallel-size", allowed=RANKS_OR_SAME
    )
    routers: int = _layout(
        1,
        "number of routers: they share the port and all nodes; more serve more streams at once",
        allowed=Range(1, MAX_ROUTERS),
    )
    pin_cpus: bool = _kernels(True, "give every node cores of its own if there are enough and --num-threads is unset")
    lend_cores: bool = _kernels(
        True, "let prefill and decode nodes compute on each other's cores while those are idle, where each has its own"
    )
    start_timeout_s: float = _lifetime(
        1800.0, "seconds until every process must be ready, loading weights included", allowed=SECONDS
    )


@dataclass(frozen=True, slots=True)
class Deployment:
    """All settings of a `baton serve`, one value per program; and how many nodes there are."""

    serve: ServeSettings
    router: RouterSettings
    prefill: NodeSettings
    decode: NodeSettings
    layout: Layout

    @property
    def node_names(self) -> list[NodeName]:
        """All nodes, prefill nodes first."""
        prefill = node_names(PREFILL, self.layout.num_prefill, self.prefill.data_parallel_size)
        return prefill + node_names(DECODE, self.layout.num_decode, self.decode.data_parallel_size)


class NodeName(NamedTuple):
    """A node of a deployment. `group`: the nodes that are counted and drained with it, "" for none."""

    role: str
    group: str
    node_id: str


def node_names(role: str, count: int, num_engines: int) -> list[NodeName]:
    """The names of `count` nodes of a role, or of groups of `num_engines` nodes each."""
    names = [f"{role}-{index}" for index in range(count)]
    if num_engines == 1:
        return [NodeName(role, "", name) for name in names]
    return [NodeName(role, name, f"{name}-{engine}") for name in names for engine in range(num_engines)]


def require_same_sums(prefill: NodeSettings, decode: NodeSettings) -> None:
    """Raise `InvalidSetting` where a prompt's tokens would depend on the node that computes it, against a promise."""
    sizes = prefill.tensor_parallel_size, decode.tensor_parallel_size
    if (prefill.batch_invariant or decode.batch_invariant) and sizes[0] != sizes[1]:
        raise InvalidSetting(
            f"--batch-invariant with {sizes[0]} ranks in a stage of prefill nodes and {sizes[1]} of decode nodes; they "
            "add up in different orders, and either may compute a prompt; use the same --tensor-parallel-size"
        )


def resolve_serve(arguments: Sequence[str], environment: Mapping[str, str]) -> Deployment:
    """Settings from flags, environment and the file of `--config`. Raises `InvalidSetting`; exits on unknown flags."""
    router_part = _without(RouterSettings, ROUTER_SETTINGS_CHOSEN)
    prefill_part = _without(NodeSettings, NODE_SETTINGS_CHOSEN)
    decode_part = _without(NodeSettings, NODE_SETTINGS_CHOSEN)
    classes = (ServeSettings, router_part, prefill_part, decode_part)
    parser = CommandParser(
        prog="baton serve",
        description="Start a router, prefill nodes and decode nodes on this machine, and keep them running.",
    )
    add_flags(parser, *classes)
    flags = parser.parse(arguments)
    if flags.config:
        check_file_keys(flags.config, *classes)
    serve = resolve(ServeSettings, flags, environment)
    prefill = _complete(NodeSettings, resolve(prefill_part, flags, environment))
    decode = _complete(NodeSettings, resolve(decode_part, flags, environment))
    router = _complete(RouterSettings, resolve(router_part, flags, environment))
    prefill = with_ranks(prefill, serve.prefill_tensor_parallel_size, serve.prefill_pipeline_parallel_size)
    decode = with_ranks(decode, serve.decode_tensor_parallel_size, serve.decode_pipeline_parallel_size)
    layout = _layout_of(serve, prefill, decode, environment)
    if layout.num_prefill:
        require_same_sums(prefill, decode)
    if layout.num_prefill or layout.num_decode > 1 or serve.mixed or router.refuse_late:
        # late prompts have another place to go to, or are refused: the goal between tokens need not be given up
        prefill = dataclasses.replace(prefill, goal_ttft_ms=0.0)
        decode = dataclasses.replace(decode, goal_ttft_ms=0.0)
    if {router.prefill_policy, router.decode_policy} != {"prefix"}:  # its router never asks for any
        prefill = dataclasses.replace(prefill, enable_prefix_pulls=False)
        decode = dataclasses.replace(decode, enable_prefix_pulls=False)
    return Deployment(serve, router, prefill, decode, layout)


def _layout_of(
    serve: ServeSettings, prefill: NodeSettings, decode: NodeSettings, environment: Mapping[str, str]
) -> Layout:
    ranks_of_roles = (
        serve.prefill_tensor_parallel_size,
        serve.decode_tensor_parallel_size,
        serve.prefill_pipeline_parallel_size,
        serve.decode_pipeline_parallel_size,
    )
    has_counts = serve.prefill is not None or serve.decode is not None
    if has_counts or serve.mixed or decode.data_parallel_size > 1 or any(ranks_of_roles):
        return asked_layout(serve.prefill, serve.decode)
    return chosen_layout(prefill, decode, find_devices(environment))


def settings_from_table(
    settings_class: type[_SettingsT], chosen: frozenset[str], table: Mapping[str, Any], origin: str
) -> _SettingsT:
    """Settings of a table of a file, keys spelled as the flags; those in `chosen` are no keys. `origin` says where the
    table is. Raises `InvalidSetting`."""
    part = _without(settings_class, chosen)
    known = {field.name.replace("_", "-") for field in dataclasses.fields(part)}
    for key in table:
        if key.replace("_", "-") not in known:
            raise InvalidSetting(f"{origin}: unknown flag {key!r:.100}{closest(key, known)}")
    values = {key.replace("-", "_"): value for key, value in table.items()}
    try:
        return _complete(settings_class, resolve(part, argparse.Namespace(config=None, **values), {}))
    except InvalidSetting as error:
        raise InvalidSetting(f"{origin}: {error}") from None


def with_ranks(settings: _NodeSettingsT, num_ranks: int, num_stages: int) -> _NodeSettingsT:
    """The settings of a node with so many ranks in each stage and so many stages; 0: as they are."""
    return dataclasses.replace(
        settings,
        tensor_parallel_size=num_ranks or settings.tensor_parallel_size,
        pipeline_parallel_size=num_stages or settings.pipeline_parallel_size,
    )


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` for a child: without settings, because its flags carry those already resolved."""
    classes = (ServeSettings, RouterSettings, NodeSettings, NodeSettings)
    settings_names = {ENVIRONMENT_PREFIX + field.name.upper() for each in classes for field in dataclasses.fields(each)}
    return {name: value for name, value in environment.items() if name not in settings_names}


def _without(settings_class: type[Any], names: frozenset[str]) -> type[Any]:
    """`settings_class` without the fields in `names`."""
    hints = get_type_hints(settings_class)
    fields = [
        (field.name, hints[field.name], dataclasses.field(default=field.default, metadata=field.metadata))
        for field in dataclasses.fields(settings_class)
        if field.name not in names
    ]
    return dataclasses.make_dataclass(settings_class.__name__, fields, frozen=True)


def _complete(settings_class: type[_SettingsT], part: Any) -> _SettingsT:
    return settings_class(**{field.name: getattr(part, field.name) for field in dataclasses.fields(part)})
