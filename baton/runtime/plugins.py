"""What installed packages add by entry points: names of transports, attention backends and KV stores.

Owns how such a name is found, and the one sentence about a package that is of no use. Does not know what a name stands
for: whoever owns a seam knows its own names and its contract (docs/extending.md).

Invariants: nothing of a package is imported before the user has chosen its name, and a name that Baton has itself is
never looked up here. Only settings choose; what a client or a peer says is no name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from baton.wire.errors import BatonError, InvalidSetting

ATTENTION_BACKENDS, KV_STORES, KV_TRANSPORTS = "baton.attention_backends", "baton.kv_stores", "baton.kv_transports"
_MAX_REASON_CHARS = 200


@dataclass(frozen=True, slots=True)
class Plugin:
    """What an installed package registered. `origin`: the flag, the name and the package, as a message names them."""

    origin: str
    value: Any

    def opened(self, contract: type, make: Callable[..., Any], *arguments: Any) -> Any:
        """What `make`, a part of it, gives for these arguments. Raises `InvalidSetting` unless that fulfils
        `contract`, and what it raises itself of Baton's errors."""
        try:
            made = make(*arguments)
        except BatonError:
            raise
        except Exception as error:  # code of others may fail in every way
            raise self._unusable(error) from error
        return self.fulfilling(contract, made)

    def fulfilling(self, contract: type, made: Any) -> Any:
        """`made`. Raises `InvalidSetting` unless it has all that `contract` names."""
        missing = sorted(name for name in _members(contract) if not hasattr(made, name))
        if missing:
            raise InvalidSetting(f"{self.origin} is no {contract.__name__}: it has no {', '.join(missing)}")
        return made

    def _unusable(self, error: Exception) -> InvalidSetting:
        return InvalidSetting(f"{self.origin} cannot be used: {_in_a_line(error)}")


def installed(group: str) -> tuple[str, ...]:
    """The names that packages have registered in a group."""
    return tuple(sorted({point.name for point in entry_points(group=group)}))


def load(group: str, flag: str, name: str, own: Sequence[str]) -> Plugin:
    """Import what a package has registered by a name that is none of `own`. Raises `InvalidSetting`."""
    points = list(entry_points(group=group, name=name))
    if not points:
        known = ", ".join((*own, *installed(group)))
        raise InvalidSetting(f"{flag} {name!r:.50} is not one of {known}")
    packages = [point.dist.name if point.dist else point.value for point in points]
    if len(points) > 1:
        raise InvalidSetting(f"{flag} {name}: the packages {' and '.join(sorted(packages))} all have one of that name")
    origin = f"{flag} {name} of the package {packages[0]}"
    try:
        return Plugin(origin, points[0].load())
    except Exception as error:  # whatever an import runs
        raise InvalidSetting(f"{origin} cannot be imported: {_in_a_line(error)}") from error


def _members(contract: type) -> set[str]:
    """What a class, and those it derives from, says that values of it have."""
    names = {name for base in contract.__mro__ for name in (*vars(base), *inspect.get_annotations(base))}
    return {name for name in names if not name.startswith("_")}


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_MAX_REASON_CHARS]
