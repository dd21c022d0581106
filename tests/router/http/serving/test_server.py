"""Who asks whether the router lives does not take its turn behind those who ask for more."""

from __future__ import annotations

import pytest

from baton.router.http.openai.prompts import PromptMaker
from baton.router.http.serving.turns import Turns
from tests.router.http_client import fetch
from tests.router.rig import serving


async def test_probes_take_turns_among_themselves(prompts: PromptMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Turns] = []
    take = Turns.take

    async def note(turns: Turns) -> None:
        taken.append(turns)
        await take(turns)

    monkeypatch.setattr(Turns, "take", note)
    async with serving(prompts) as server:
        for path in ("/health", "/live", "/ready", "/health/", "/v1/models"):
            await fetch(server, "GET", path)
    *of_probes, of_models = taken
    assert len(of_probes) == 4
    assert set(of_probes) == {of_probes[0]}
    assert of_models is not of_probes[0]
