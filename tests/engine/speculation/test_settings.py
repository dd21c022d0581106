"""The setting of speculation: vLLM's words, or one line says what is wrong with them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.engine.scheduler.proposer import Wanted
from baton.engine.scheduler.request import Request
from baton.engine.speculation.settings import Eagle3Asked, MtpAsked, chosen_config, read_asked
from baton.wire.errors import InvalidSetting
from baton.wire.prompt import Prompt
from baton.wire.sampling import DecodingParams
from tests.engine.speculation.text_proposers import proposer_of
from tests.request_keys import A


def num_drafts(text: list[int], **config: Any) -> int:
    proposer = proposer_of(json.dumps({"method": "ngram", **config}))
    assert proposer is not None
    request = Request(A, Prompt.of(text), DecodingParams(), b"", 10**6)
    (draft,) = proposer.propose([Wanted(request, 99)])
    assert proposer.follows(request) == bool(draft.token_ids)
    return len(draft.token_ids)


def test_nothing_is_proposed_unless_asked_for() -> None:
    assert proposer_of("") is None


def test_lengths_are_those_of_the_setting() -> None:
    text = [*range(100), *range(6)]
    assert num_drafts(text, num_speculative_tokens=7) == 7
    assert num_drafts(text[:-2], num_speculative_tokens=7) == 0  # five by default
    assert num_drafts(text[:-2], num_speculative_tokens=7, prompt_lookup_max=4) == 7
    assert num_drafts(text[:-3], num_speculative_tokens=7, prompt_lookup_max=4) == 0
    assert num_drafts(text[:-3], num_speculative_tokens=7, prompt_lookup_min=3) == 7
    assert num_drafts(text[:-3], num_speculative_tokens=7, prompt_lookup_max=4, prompt_lookup_min=2) == 7


def test_suffixes_have_the_settings_of_vllm() -> None:
    config = {
        "method": "suffix",
        "num_speculative_tokens": 8,
        "suffix_decoding_max_tree_depth": 24,
        "suffix_decoding_max_cached_requests": 10000,
        "suffix_decoding_max_spec_factor": 1.0,
        "suffix_decoding_min_token_prob": 0.1,
    }
    text = [*range(100), *range(30)]
    assert num_drafts(text, **config) == 8
    assert num_drafts(text, method="suffix") == 24
    assert num_drafts(text[:-27], method="suffix") == 3
    assert num_drafts(text[:-27], **{**config, "suffix_decoding_max_spec_factor": 2.0}) == 6


@pytest.mark.parametrize("method", ["mtp", "deepseek_mtp", "qwen3_next_mtp", "glm4_moe_mtp"])
def test_layers_for_further_tokens_have_all_names_of_vllm(method: str) -> None:
    asked = read_asked(json.dumps({"method": method, "num_speculative_tokens": 3}))
    assert isinstance(asked, MtpAsked)
    assert asked.num_speculative_tokens == 3


def test_a_head_is_a_checkpoint_of_its_own() -> None:
    asked = read_asked('{"method": "eagle3", "model": "a/b", "num_speculative_tokens": 3, "revision": "main"}')
    assert isinstance(asked, Eagle3Asked)
    assert (asked.checkpoint, asked.num_speculative_tokens) == ("a/b@main", 3)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("ngram", "malformed"),
        ("[]", "Expected `object`, got `array`"),
        ('{"method": "medusa", "num_speculative_tokens": 2}', "Invalid value 'medusa'"),
        ('{"method": "eagle3", "num_speculative_tokens": 2}', "missing required field `model`"),
        ('{"method": "mtp", "model": "x"}', "unknown field `model`"),
        ('{"method": "suffix", "suffix_decoding_min_token_prob": 1.5}', "`float` <= 1.0"),
        ('{"method": "suffix", "suffix_decoding_max_cached_requests": -1}', "`int` >= 0"),
        ('{"method": "suffix", "prompt_lookup_max": 2}', "unknown field `prompt_lookup_max`"),
        ('{"method": "ngram"}', "missing required field `num_speculative_tokens`"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "`int` >= 1"),
        ('{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup": 2}', "unknown field `prompt_lookup`"),
        (
            '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 3, "prompt_lookup_max": 2}',
            "prompt_lookup_min 3 is above prompt_lookup_max 2",
        ),
    ],
)
def test_what_cannot_be_used_is_refused(config: str, reason: str) -> None:
    with pytest.raises(InvalidSetting, match=reason) as found:
        proposer_of(config)
    assert str(found.value).startswith("--speculative-config")


@pytest.mark.parametrize(
    ("config", "is_useful", "chosen"),
    [
        (
            "auto",
            True,
            '{"method":"suffix","num_speculative_tokens":16,"suffix_decoding_max_spec_factor":4.0}',
        ),
        ("auto", False, ""),
        ("none", True, ""),
        ("", True, ""),
        ('{"method": "mtp"}', False, '{"method": "mtp"}'),
    ],
)
def test_a_node_drafts_from_text_by_itself_where_that_is_useful(config: str, chosen: str, *, is_useful: bool) -> None:
    assert chosen_config(config, is_useful=is_useful) == chosen
    assert (read_asked(chosen) is None) == (not chosen)
