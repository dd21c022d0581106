"""The server that a measurement starts for itself: `baton serve` with a model, on a free port."""

from __future__ import annotations

from bench.targets.spec import Target


def baton_target(name: str, model: str, *flags: str) -> Target:
    """A Baton to be started; `model` as `baton serve` takes it, "" for the demo model."""
    return Target(name, "", ("baton", "serve", *filter(None, (model,)), *flags))
