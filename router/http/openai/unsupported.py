"""Fields that OpenAI or vLLM know and Baton does not support, each with its neutral values, which ask for nothing.

Pure data. Ignoring such a field would answer another question than the one asked, so a request that sets it is refused
by name; a client library that always sends its neutral value is not. null is neutral everywhere. Fields that change
nothing are in `ignored`.
"""

from __future__ import annotations

from collections.abc import Mapping

Table = Mapping[str, tuple[object, ...]]

COMMON: Table = {
    # vLLM
    "early_stopping": (False,),
    "length_penalty": (1.0, 1),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "mm_processor_kwargs": (),
    "media_io_kwargs": (),
    "repetition_detection": (),
    "routed_experts_prompt_start": (0,),
    "use_beam_search": (False,),
    "vllm_xargs": (),
    "watermarking": (False,),
    # others
    "ebnf": (),
    "format": ("",),
    "grammar": ("",),
    "images": ([],),
    "input_ids": (),
    "json_schema": (),
    "lora_path": (),
    "regex": (),
}

CHAT: Table = {
    # OpenAI
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "web_search_options": (),
    # vLLM
    "best_of": (1,),
    "echo": (False,),
    "prompt": (),
    "return_prompt_text": (False,),
}

COMPLETION: Table = {
    "messages": (),
    "prompt_embeds": (),
    "thinking_token_budget": (-1,),
}

MESSAGE: Table = {
    "audio": (),
    "function_call": (),
    "partial": (False,),
    "prefix": (False,),
    "refusal": (),
}
"""An answer's message may be sent back as it came, with all its empty members."""

_STRUCTURE = "is not supported: send response_format or structured_outputs"
_TOOLS = "is not supported: send tools and tool_choice"
_TEXT = "is not supported: only text is served"
_IMAGES = "is not supported: images are read as the checkpoint's image processor says"
_BEAMS = "is not supported: there is no beam search; send n for several answers"
REASONS: Mapping[str, str] = {
    "audio": _TEXT,
    "early_stopping": _BEAMS,
    "ebnf": _STRUCTURE,
    "format": _STRUCTURE,
    "function_call": _TOOLS,
    "functions": _TOOLS,
    "grammar": _STRUCTURE,
    "images": "is not supported: send image_url parts in the content of messages",
    "input_ids": "is not supported: send token ids as the prompt of /v1/completions",
    "json_schema": _STRUCTURE,
    "length_penalty": _BEAMS,
    "media_io_kwargs": _IMAGES,
    "messages": "belongs to /v1/chat/completions",
    "mm_processor_kwargs": _IMAGES,
    "modalities": _TEXT,
    "partial": "is not supported: send continue_final_message",
    "prefix": "is not supported: send continue_final_message",
    "prompt": "belongs to /v1/completions",
    "regex": _STRUCTURE,
    "thread": "is not supported: conversations are not stored, send all messages",
    "use_beam_search": _BEAMS,
    "web_search_options": "is not supported: only functions are served",
}
"""What an error says of a field when there is more to say than that it is not supported."""


def is_harmless(value: object, neutral: tuple[object, ...]) -> bool:
    """Whether `value` asks for nothing. 0 is not False here: types are as strict as everywhere."""
    return value is None or any(type(value) is type(other) and value == other for other in neutral)
