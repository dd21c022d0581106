"""Policies by name."""

from __future__ import annotations

from router.policies.base import Policy
from router.policies.least_loaded import LeastLoaded
from router.policies.prefix import Prefix
from router.policies.round_robin import RoundRobin
from wire.errors import InvalidSetting


def make_policy(name: str) -> Policy:
    """A new policy of that name. Raises `InvalidSetting`."""
    policies: dict[str, type[Policy]] = {
        "prefix": Prefix,
        "least_loaded": LeastLoaded,
        "round_robin": RoundRobin,
    }
    if name not in policies:
        raise InvalidSetting(f"policy {name!r} is not one of {', '.join(policies)}")
    return policies[name]()
