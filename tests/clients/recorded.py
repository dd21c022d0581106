"""Request bodies as clients send them that cannot run here: editors, chat pages, load generators.

Each was written from the source or issue that `source` names, with shorter texts; that of Open WebUI, and LibreChat's
parts, from what their issues say of the body, not from their code. `MODEL` stands for the served model's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MODEL = "{model}"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request of a client."""

    client: str
    source: str
    path: str
    body: Mapping[str, Any]


_VLLM = "github.com/vllm-project/vllm, vllm/benchmarks/lib/endpoint_request_func.py"
_LM_EVAL = "github.com/EleutherAI/lm-evaluation-harness, models/openai_completions.py"
_CONTINUE = "github.com/continuedev/continue, core/llm/llms/OpenAI.ts"
_USAGE = {"include_usage": True}
_CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}

RECORDED = (
    Recorded("Open WebUI", "github.com/open-webui/open-webui, routers/openai.py: metadata is taken out before", CHAT, {
        "stream": True, "model": MODEL, "stream_options": _USAGE, "temperature": 0.7, "max_tokens": 16,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
    }),
    Recorded("Open WebUI with pipelines", "github.com/open-webui/pipelines/pull/377: chat_id stays in the body", CHAT, {
        "stream": True, "model": MODEL, "chat_id": "c1", "max_tokens": 16,
        "messages": [{"role": "user", "content": "Hello"}],
    }),
    Recorded("LibreChat", "github.com/danny-avila/LibreChat/issues/9436", CHAT, {
        "model": MODEL, "stream": True, "user": "68906998cc83815dd7244885", "max_tokens": 16,
        "messages": [{"role": "user", "content": "hello"}],
    }),
    Recorded("LibreChat, content in parts", "github.com/danny-avila/LibreChat: agents send parts", CHAT, {
        "model": MODEL, "stream": True, "user": "68906998cc83815dd7244885", "max_tokens": 16, "temperature": 1,
        "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0, "stream_options": _USAGE,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
    }),
    Recorded("Continue, chat", _CONTINUE, CHAT, {
        "messages": [{"role": "user", "content": "Explain this."}], "model": MODEL, "max_tokens": 16, "stream": True,
    }),
    Recorded("Continue, autocomplete", _CONTINUE, COMPLETIONS, {
        "model": MODEL, "max_tokens": 16, "temperature": 0.01, "stream": True,
        "prompt": "<|fim_prefix|>def add(a, b):\n<|fim_suffix|>\n<|fim_middle|>",
        "stop": ["<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "/src/", "```"],
    }),
    Recorded("Cline", "github.com/cline/cline, src/api/providers/openai.ts", CHAT, {
        "model": MODEL, "temperature": 0, "stream": True, "stream_options": _USAGE, "max_tokens": 16,
        "messages": [
            {"role": "system", "content": "You are Cline."},
            {"role": "user", "content": [{"type": "text", "text": "<task>hi</task>"}, {"type": "text", "text": "x"}]},
        ],
    }),
    Recorded("CodeCompanion", "github.com/olimorris/codecompanion.nvim/issues/117: id and opts in messages", CHAT, {
        "model": MODEL, "frequency_penalty": 0, "temperature": 1, "top_p": 1, "stream": True, "presence_penalty": 0,
        "stream_options": _USAGE, "max_tokens": 16,
        "messages": [
            {"role": "system", "opts": {"visible": False}, "id": -259038987, "content": "You are an AI assistant."},
            {"role": "user", "opts": {"visible": True}, "id": 1947269257, "content": "Hello"},
        ],
    }),
    Recorded("vllm bench serve", _VLLM, COMPLETIONS, {
        "model": MODEL, "prompt": "The quick brown fox", "repetition_penalty": 1.0, "max_tokens": 16, "logprobs": None,
        "stream": True, "stream_options": _USAGE, "ignore_eos": True, "temperature": 0.0,
    }),
    Recorded("vllm bench serve, chat", _VLLM, CHAT, {
        "model": MODEL, "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
        "max_completion_tokens": 16, "stream": True, "stream_options": _USAGE, "ignore_eos": True, "temperature": 0.0,
    }),
    Recorded("guidellm", "github.com/vllm-project/guidellm, backends/openai/request_handlers.py", COMPLETIONS, {
        "model": MODEL, "stream": True, "stream_options": _CONTINUOUS, "max_tokens": 16, "stop": None,
        "ignore_eos": True, "prompt": "The quick brown fox",
    }),
    Recorded("guidellm, chat", "github.com/vllm-project/guidellm, backends/openai/request_handlers.py", CHAT, {
        "model": MODEL, "stream": True, "stream_options": _CONTINUOUS, "max_completion_tokens": 16, "stop": None,
        "ignore_eos": True, "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
    }),
    Recorded("aiperf", "github.com/ai-dynamo/aiperf, src/aiperf/endpoints/openai_chat.py", CHAT, {
        "model": MODEL, "stream": True, "stream_options": _USAGE, "max_completion_tokens": 16, "ignore_eos": True,
        "min_tokens": 16, "messages": [{"role": "user", "content": "Hello"}],
    }),
    Recorded("lm-eval, generate", _LM_EVAL, COMPLETIONS, {
        "model": MODEL, "prompt": ["Question: 1+1?\nAnswer:"], "max_tokens": 16, "temperature": 0,
        "stop": ["Question:", "\n\n"], "seed": 1234,
    }),
    Recorded("lm-eval, loglikelihood", _LM_EVAL, COMPLETIONS, {
        "model": MODEL, "prompt": [[60, 61, 62, 63], [70, 71, 72]], "temperature": 0, "max_tokens": 1, "logprobs": 1,
        "seed": 1234, "echo": True,
    }),
)  # fmt: skip
