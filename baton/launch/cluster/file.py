"""The file that describes a deployment: its model, its routers, its two groups of nodes, and what they are to reach.

Owns the format, TOML, and its checks. Does not know who starts the programs: the same file describes one machine
(`backend = "local"`) and a Ray cluster.

    name = "baton"                # of the deployment: `baton cluster status` and `down` find it by that
    model = ""                    # checkpoint folder or hub id, the same on every machine; "": the demo model
    backend = "ray"               # or "local": `baton serve`, with each group at its `count`
    listen = "loopback"           # or "machine": at the address of the machine, needed when there are several
    start_timeout_s = 1800
    environment = {}              # variables of all programs, for example HF_HOME

    [goals]                       # what requests are placed by, and groups are scaled by; 0: no goal
    ttft_ms = 500
    tpot_ms = 50

    [scaling]
    window_s = 10                 # what is judged: the requests of so many seconds
    up_after_s = 10               # a group grows when it was over its goal for so long
    down_after_s = 120            # and shrinks when one node less would have done for so long
    settle_s = 30                 # after a change nothing is judged for so long

    [router]
    count = 1                     # routers that share all nodes
    resources = { CPU = 1 }       # of each, of a machine, by the names that Ray has for them
    flags = { port = 8000 }       # of `baton router`; of several, each has the next port but one

    [prefill]                     # and [decode], likewise
    min = 1                       # from `min` to `max` nodes, at first `count`
    max = 4
    count = 1
    resources = { CPU = 4, GPU = 1 }    # of each rank of a node; all ranks of one are on one machine, and all
                                        # nodes of a group (data-parallel-size among the flags)
    machines = 1                  # but for this: so many that the ranks of each node are spread over
    flags = { max-num-seqs = 64 }

Invariant: a value that cannot be used is an `InvalidSetting` that names its place in the file.
"""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Generic, Literal, TypeAlias, TypeVar

import msgspec

from baton.launch.layout import Layout
from baton.launch.settings import (
    NODE_SETTINGS_CHOSEN,
    ROUTER_SETTINGS_CHOSEN,
    Deployment,
    ServeSettings,
    require_same_sums,
    settings_from_table,
)
from baton.node.settings import MAX_ROUTERS, NodeSettings
from baton.router.settings import RouterSettings
from baton.wire.errors import InvalidSetting
from baton.wire.keys import ROUTER
from baton.wire.kv_shard import MAX_RANKS
from baton.wire.messages.membership import DECODE, PREFILL

RAY: Final = "ray"
LOCAL: Final = "local"
MAX_NODES = 4096
_ELSEWHERE = frozenset({"model", "cluster_key", "goal_ttft_ms", "goal_tpot_ms"})
"""Settings that the file has at another place, and the key, which is made."""
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_NODES)]
_Seconds: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
_Goal: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=3_600_000)]
_SettingsT = TypeVar("_SettingsT", bound=NodeSettings, covariant=True)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


class Scaling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a group grows and shrinks, in seconds; see the module."""

    window_s: _Seconds = 10.0
    up_after_s: _Seconds = 10.0
    down_after_s: _Seconds = 120.0
    settle_s: _Seconds = 30.0


class _Goals(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ttft_ms: _Goal = 0.0
    tpot_ms: _Goal = 0.0


class _Router(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_ROUTERS)] = 1
    resources: dict[str, float] = msgspec.field(default_factory=lambda: {"CPU": 1.0})
    flags: dict[str, Any] = {}


class _Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    min: _Count | None = None
    max: _Count | None = None
    count: _Count | None = None
    machines: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)] = 1
    resources: dict[str, float] = msgspec.field(default_factory=lambda: {"CPU": 1.0})
    flags: dict[str, Any] = {}


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str = "baton"
    model: str = ""
    backend: Literal["ray", "local"] = RAY
    listen: Literal["loopback", "machine"] = "loopback"
    start_timeout_s: _Seconds = 1800.0
    environment: dict[str, str] = {}
    goals: _Goals = _Goals()
    scaling: Scaling = Scaling()
    router: _Router = _Router()
    prefill: _Group = _Group()
    decode: _Group = _Group()


@dataclass(frozen=True, slots=True)
class Group(Generic[_SettingsT]):
    """Nodes of one role: from `minimum` to `maximum`, at first `count`. Each of the `ranks` of a node needs `resources`
    of the node's machine, or of its `machines`, each of which has as many of them. With `engines` above 1
    (`--data-parallel-size`) each is a group of so many nodes, on one machine."""

    role: str
    minimum: int
    maximum: int
    count: int
    ranks: int
    engines: int
    machines: int
    resources: Mapping[str, float]
    settings: _SettingsT


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """A deployment as its file describes it; see the module."""

    name: str
    backend: str
    listens_on_machine: bool
    start_timeout_s: float
    environment: Mapping[str, str]
    ttft_goal_s: float
    tpot_goal_s: float
    scaling: Scaling
    num_routers: int
    router: RouterSettings
    router_resources: Mapping[str, float]
    prefill: Group[NodeSettings]
    decode: Group[NodeSettings]

    @property
    def router_names(self) -> list[str]:
        """The names of the routers: that of the role for one, with numbers behind it for several, as in `baton
        serve`."""
        return [ROUTER] if self.num_routers == 1 else [f"{ROUTER}-{index}" for index in range(self.num_routers)]

    @property
    def groups(self) -> dict[str, Group[NodeSettings]]:
        """Both groups of nodes by their role."""
        return {PREFILL: self.prefill, DECODE: self.decode}

    def on_one_machine(self) -> Deployment:
        """The file as a deployment of `baton serve`, with each group at its count, and all ranks here."""
        serve = ServeSettings(
            self.prefill.count, self.decode.count, routers=self.num_routers, start_timeout_s=self.start_timeout_s
        )
        prefill = dataclasses.replace(self.prefill.settings, rank_machines=1)
        decode = dataclasses.replace(self.decode.settings, rank_machines=1)
        return Deployment(serve, self.router, prefill, decode, Layout(self.prefill.count, self.decode.count))


def read_cluster_file(path: Path) -> tuple[ClusterFile, str]:
    """The deployment that a file describes, and the file's text. Raises `InvalidSetting`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"cannot read {path}: {error}") from None
    return parse_cluster_file(text, str(path)), text


def parse_cluster_file(text: str, origin: str) -> ClusterFile:
    """The deployment that `text` describes; `origin` is what errors call it. Raises `InvalidSetting`."""
    try:
        file = msgspec.convert(tomllib.loads(text), _File)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise InvalidSetting(f"{origin}: {error}") from None
    if not _NAME.fullmatch(file.name):
        raise InvalidSetting(f"{origin}: name {file.name!r:.100}: use 1 to 64 letters, digits, - and _")
    router_chosen = (ROUTER_SETTINGS_CHOSEN | _ELSEWHERE) - {"control_port"}
    router = settings_from_table(RouterSettings, router_chosen, file.router.flags, f"{origin}: [router] flags")
    if router.resumable_streams_s and file.router.count > 1:
        raise InvalidSetting(
            f"{origin}: [router]: resumable-streams-s needs count = 1: a stream is resumed at the router that began it"
        )
    if file.router.count > 1:
        router = router.beside_others()
    prefill = _group(PREFILL, file, file.prefill, NodeSettings, file.goals.ttft_ms > 0, origin)
    decode = _group(DECODE, file, file.decode, NodeSettings, file.goals.tpot_ms > 0, origin)
    if prefill.maximum:
        require_same_sums(prefill.settings, decode.settings)
    return ClusterFile(
        name=file.name,
        backend=file.backend,
        listens_on_machine=file.listen == "machine",
        start_timeout_s=file.start_timeout_s,
        environment=file.environment,
        ttft_goal_s=file.goals.ttft_ms / 1000,
        tpot_goal_s=file.goals.tpot_ms / 1000,
        scaling=file.scaling,
        num_routers=file.router.count,
        router=dataclasses.replace(
            router, model=file.model, goal_ttft_ms=file.goals.ttft_ms, goal_tpot_ms=file.goals.tpot_ms
        ),
        router_resources=_resources(file.router.resources, f"{origin}: [router]"),
        prefill=prefill,
        decode=decode,
    )


def _group(
    role: str, file: _File, table: _Group, settings_class: type[_SettingsT], has_goal: bool, origin: str
) -> Group[_SettingsT]:
    place = f"{origin}: [{role}]"
    settings = settings_from_table(settings_class, NODE_SETTINGS_CHOSEN | _ELSEWHERE, table.flags, f"{place} flags")
    machines = table.machines
    if settings.num_ranks % machines:
        raise InvalidSetting(
            f"{place}: machines = {machines}: {settings.num_ranks} ranks are not spread equally over them"
        )
    if machines > 1 and settings.data_parallel_size > 1:
        raise InvalidSetting(f"{place}: machines = {machines}: the nodes of data-parallel-size share one machine")
    minimum, maximum, count = _bounds(table, place)
    if role == DECODE and minimum < 1:
        raise InvalidSetting(f"{place}: min must be at least 1, because decode nodes finish every request")
    if minimum < maximum and not has_goal:
        goal = "goals.ttft_ms" if role == PREFILL else "goals.tpot_ms"
        raise InvalidSetting(f"{place}: min {minimum} and max {maximum} differ, and {goal} does not say what to reach")
    return Group(
        role,
        minimum,
        maximum,
        count,
        settings.num_ranks,
        settings.data_parallel_size,
        machines,
        _resources(table.resources, place),
        dataclasses.replace(settings, model=file.model, goal_tpot_ms=file.goals.tpot_ms, rank_machines=machines),
    )


def _bounds(table: _Group, place: str) -> tuple[int, int, int]:
    """(min, max, count) of a group, of which any may be left out."""
    minimum = next((given for given in (table.min, table.count) if given is not None), 1)
    count = minimum if table.count is None else table.count
    maximum = count if table.max is None else table.max
    if not minimum <= count <= maximum:
        raise InvalidSetting(f"{place}: count {count} is not between min {minimum} and max {maximum}")
    return minimum, maximum, count


def _resources(table: Mapping[str, float], place: str) -> Mapping[str, float]:
    for name, amount in table.items():
        if not (math.isfinite(amount) and amount > 0):
            raise InvalidSetting(f"{place} resources: {name!r:.100} = {amount} must be positive")
    if not table:
        raise InvalidSetting(f"{place} resources: name at least one, for example CPU = 1")
    return table
