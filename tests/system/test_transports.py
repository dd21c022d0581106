"""`baton serve --kv-transport X`, for every X: real processes, real client, tokens equal to those of transformers."""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from tests.system.conftest import Checkpoints
from tests.system.harness import REQUEST_TIMEOUT_S
from tests.system.reference import Reference, make_prompt
from tests.system.serve import serving

_LENGTHS = (1, 16, 33, 90)
_NUM_TOKENS = 16


@pytest.mark.timeout(180)
@pytest.mark.parametrize("transport", ["shm", "zmq", "nixl", "nccl"])
def test_a_relay_over_this_transport_answers_token_by_token_as_transformers_does(
    transport: str, checkpoints: Checkpoints, references: Callable[[str], Reference], tmp_path: Path
) -> None:
    reference = references("llama")
    flags = ("--served-model-name", "tiny", "--kv-transport", transport, "--local-prefill-tokens", "0")
    with serving(tmp_path, str(checkpoints("llama")), *flags, "--max-num-batched-tokens", "40") as program:
        client = openai.OpenAI(base_url=f"{program.endpoint}/v1", api_key="none", max_retries=0, timeout=60)

        def ask(prompt: tuple[int, ...]) -> tuple[tuple[int, ...], dict[str, float] | None]:
            answer = client.completions.create(
                model="tiny",
                prompt=list(prompt),
                max_tokens=_NUM_TOKENS,
                temperature=0.0,
                timeout=REQUEST_TIMEOUT_S,
                extra_body={"return_token_ids": True, "ignore_eos": True},
            )
            choice = answer.choices[0].model_extra or {}
            usage = answer.usage.model_extra if answer.usage is not None else None
            return tuple(choice["token_ids"]), (usage or {}).get("kv_transfer")

        prompts = [make_prompt(length, 7) for length in _LENGTHS]
        for prompt in prompts:
            token_ids, transfer = ask(prompt)
            assert token_ids == reference.greedy(prompt, _NUM_TOKENS).token_ids
            assert transfer is not None
            assert transfer["blocks"] == -(-len(prompt) // 16)
            assert transfer["exposed_ms"] > 0
            assert transfer["transfer_ms"] > 0
        # again, all at once: blocks that the decode node has cached do not travel a second time
        with ThreadPoolExecutor(len(prompts)) as threads:
            for prompt, (token_ids, transfer) in zip(prompts, threads.map(ask, prompts), strict=True):
                assert token_ids == reference.greedy(prompt, _NUM_TOKENS).token_ids
                assert (transfer or {"blocks": 0})["blocks"] == (len(prompt) % 16 > 0)
        client.close()
        children = program.note_footprint()
        program.signal(signal.SIGINT)
        assert program.wait_exit() == 128 + signal.SIGINT
        program.require_nothing_left(children)
