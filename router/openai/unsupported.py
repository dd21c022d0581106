"""Fields that OpenAI or vLLM know and Baton does not support, each with its neutral values, which ask for nothing.

Pure data. Silently ignoring such a field would answer another question than the one asked, so a request that sets it is
refused by name; a client library that always sends its neutral value is not. null is neutral everywhere. A field in no
table and no schema is unknown. Among these are all fields that other servers use between router and nodes
(`kv_transfer_params`, `bootstrap_host`, `bootstrap_port`, `bootstrap_room`, `request_id`): no public request may set
them.
"""

from __future__ import annotations

from collections.abc import Mapping

Table = Mapping[str, tuple[object, ...]]

COMMON: Table = {
    # OpenAI
    "moderation": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "response_format": ({"type": "text"},),
    # vLLM
    "add_special_tokens": (),
    "cache_salt": (),
    "detokenize": (True,),
    "early_stopping": (False,),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1.0, 1),
    "logits_processors": ([],),
    "mm_processor_kwargs": (),
    "priority": (0,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": (),
}

CHAT: Table = {
    # OpenAI
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory",),
    "reasoning_effort": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
    # vLLM
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "include_reasoning": (True,),
}

COMPLETION: Table = {
    "prompt_embeds": (),
    "suffix": ("",),
}

MESSAGE: Table = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "reasoning": ("",),
    "reasoning_content": ("",),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}
"""An answer's message may be sent back as it came, with all its empty members."""

STREAM_OPTIONS: Table = {
    "continuous_usage_stats": (False,),
    "include_obfuscation": (False,),
}


def is_harmless(value: object, neutral: tuple[object, ...]) -> bool:
    """Whether `value` asks for nothing. 0 is not False here: types are as strict as everywhere."""
    return value is None or any(type(value) is type(other) and value == other for other in neutral)
