"""docs/api.md says what the schemas do, of every field that OpenAI and vLLM know."""

from __future__ import annotations

from pathlib import Path

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from baton.router.http.anthropic.request import MessagesRequest
from baton.router.http.openai import field_docs
from baton.router.http.openai.ignored import INTERNAL
from baton.router.http.openai.messages import Message
from baton.router.http.openai.reference import rows_of, with_tables
from baton.router.http.openai.responses_request import ResponsesRequest
from baton.router.http.openai.schemas import ChatCompletionRequest, CompletionRequest, StreamOptions
from baton.router.http.openai.strict_model import Strict

PAGE = Path(__file__).parents[4] / "docs" / "api.md"

VLLM_BOTH = """
    add_special_tokens allowed_token_ids bad_words cache_salt echo frequency_penalty ignore_eos
    include_stop_str_in_output length_penalty logit_bias logprob_token_ids logprobs max_tokens min_p min_tokens
    model n presence_penalty priority prompt_logprobs repetition_detection repetition_penalty response_format
    return_mm_kwargs return_token_ids return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start
    seed session_id skip_special_tokens spaces_between_special_tokens stop stop_token_ids stream stream_interval
    stream_options structured_outputs temperature thinking_token_budget top_k top_p truncate_prompt_tokens
    truncation_side use_beam_search user vllm_xargs watermarking
"""
VLLM_CHAT = """
    add_generation_prompt chat_template chat_template_kwargs continue_final_message documents include_reasoning
    max_completion_tokens media_io_kwargs messages mm_processor_kwargs parallel_tool_calls reasoning_effort
    return_prompt_text tool_choice tools top_logprobs
"""
ANTHROPIC = """
    cache_control compaction container context_management diagnostics inference_geo max_tokens mcp_servers messages
    metadata model output_config output_format service_tier speed stop_sequences stream system temperature thinking
    thread tool_choice tools top_k top_p
"""
VLLM_COMPLETION = "prompt prompt_embeds suffix"
VLLM_INTERNAL = {"request_id", "kv_transfer_params", "ec_transfer_params"}


@pytest.mark.parametrize(
    ("schema", "known"),
    [
        (ChatCompletionRequest, chat_create_params.CompletionCreateParamsBase.__annotations__),
        (CompletionRequest, completion_create_params.CompletionCreateParamsBase.__annotations__),
        (ResponsesRequest, response_create_params.ResponseCreateParamsBase.__annotations__),
        (MessagesRequest, ANTHROPIC.split()),
        (ChatCompletionRequest, (VLLM_BOTH + VLLM_CHAT).split()),
        (CompletionRequest, (VLLM_BOTH + VLLM_COMPLETION).split()),
    ],
    ids=[
        "openai-chat",
        "openai-completions",
        "openai-responses",
        "anthropic-messages",
        "vllm-chat",
        "vllm-completions",
    ],
)
def test_every_field_of_openai_and_vllm_is_known(schema: type[Strict], known: list[str]) -> None:
    sentences = {ResponsesRequest: field_docs.RESPONSES, MessagesRequest: field_docs.ANTHROPIC}
    assert set(known) - {row.name for row in rows_of(schema, sentences.get(schema, field_docs.REQUEST))} == set()
    assert set(INTERNAL) >= VLLM_INTERNAL


def test_every_sentence_is_about_a_field() -> None:
    requests = {*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields}
    assert set(field_docs.REQUEST) - requests == set()
    assert set(field_docs.RESPONSES) - {*requests, *ResponsesRequest.model_fields} == set()
    assert set(field_docs.ANTHROPIC) == set(MessagesRequest.model_fields)
    assert set(field_docs.MESSAGE) == set(Message.model_fields)
    assert set(field_docs.STREAM_OPTIONS) == set(StreamOptions.model_fields)


def test_no_field_is_in_two_tables() -> None:
    assert ResponsesRequest.unsupported.keys() & ResponsesRequest.ignorable.keys() == set()
    for schema in (ChatCompletionRequest, CompletionRequest, MessagesRequest, Message, StreamOptions):
        assert schema.unsupported.keys() & {*schema.ignorable, *schema.model_fields} == set()


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text()
    assert page == with_tables(page), "run python -m baton.router.http.openai.reference docs/api.md"
