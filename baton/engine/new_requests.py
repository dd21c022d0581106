"""What one model makes of what a program asks: a `Request`, which names the model in its hashes and is checked.

Owns what a request needs of the model and the scheduler does not: the fingerprint, the grammars and which media
its model computes. Has no requests and no blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from baton.engine.cache.hashing import block_hashes, root_hash
from baton.engine.models.media import MediaFacts, require_computed
from baton.engine.runner.prompt_scoring import PromptScoring
from baton.engine.scheduler.reading import Reading
from baton.engine.scheduler.request import Matcher, Request
from baton.engine.structured.matcher import Grammars
from baton.wire.errors import InvalidRequest
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams


class NewRequests:
    """Makes the requests of one model. Without `grammars` requests with a grammar are refused, and those with media
    of a kind that is not in `media_facts`."""

    def __init__(
        self,
        fingerprint: str,
        max_total_tokens: int,
        grammars: Grammars | None,
        media_facts: Mapping[str, MediaFacts[Any]],
    ) -> None:
        self._fingerprint = fingerprint
        self._max_total_tokens = max_total_tokens
        self._grammars = grammars
        self._media_facts = media_facts

    @property
    def media_kinds(self) -> tuple[str, ...]:
        """The kinds of media that they may have."""
        return tuple(self._media_facts)

    def block_hashes(self, prompt: Prompt, output_ids: Sequence[int], block_size: int) -> list[bytes]:
        """By what the full blocks of a prompt and what follows it are found in the cache."""
        return block_hashes(self._fingerprint, prompt, output_ids, block_size)

    def prepare(self, params: DecodingParams) -> None:
        """Begin with what a request of these parameters needs before it can be computed: its grammar."""
        if params.grammar is not None and self._grammars is not None:
            self._grammars.prepare(params.grammar)

    def make(
        self,
        key: RequestKey,
        prompt: Prompt,
        params: DecodingParams,
        output_ids: Sequence[int],
        reading: Reading | None = None,
    ) -> Request:
        """A new request, with earlier output behind its prompt. Raises `InvalidRequest` for what this engine does not
        serve."""
        if prompt.media:
            require_computed(self._media_facts, prompt)
        return Request(
            key=key,
            prompt=prompt,
            params=params,
            hash_root=root_hash(self._fingerprint, prompt),
            max_total_tokens=self._max_total_tokens,
            output_ids=output_ids,
            matcher=self._matcher(params, output_ids),
            reading=reading or _reading_of(params),
        )

    def _matcher(self, params: DecodingParams, output: Sequence[int]) -> Matcher | None:
        """The matcher of a request with this output so far."""
        if params.grammar is None:
            return None
        if self._grammars is None:
            raise InvalidRequest("this engine serves no answers of a given structure", "grammar")
        return self._grammars.matcher(params.grammar, output)


def _reading_of(params: DecodingParams) -> Reading | None:
    """What the parameters of a request ask of its prompt."""
    return None if params.prompt_logprobs is None else PromptScoring(params.prompt_logprobs)
