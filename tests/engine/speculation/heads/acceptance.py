"""How often the drafts of a trained head are right: `python -m tests.engine.speculation.heads.acceptance FOLDER`.

FOLDER has what `trained_head` has made. The demo model answers questions that the head has not seen, each alone and
with as many drafts as it may have. With `--rest` a request goes on without the head after its first tokens, for so
many. Drafts behind that are counted, where the slots of the gap are filled, and where they are left as they are
(`--leave`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import islice
from unittest import mock

from tokenizers import Tokenizer

from baton.demo.location import checkpoint_path
from baton.demo.training.corpus import texts
from baton.engine.build import build_engine
from baton.engine.core import EngineCore
from baton.engine.runner.kv_memory import allocate_private
from baton.engine.scheduler.proposer import Draft
from baton.engine.scheduler.request import Request
from baton.engine.settings import EngineSettings
from baton.engine.speculation.heads import slots
from baton.engine.speculation.heads.proposer import HeadProposer
from baton.wire.prompt import Prompt
from baton.wire.sampling import DecodingParams
from tests.engine.scheduler.all_drafts import AllDrafts
from tests.request_keys import key_of

_SEED, _NUM_TOKENS, _FIRST = 77, 120, 8


class Counted:
    """Drafts behind the first tokens and a rest of `rest`: tokens that were tried, and those that were right."""

    def __init__(self, rest: int) -> None:
        self.tried = self.accepted = 0
        self._rest = range(_FIRST, _FIRST + rest)

    def follows(self, _: HeadProposer, request: Request) -> bool:
        """Whether the request does not rest."""
        return len(request.token_ids) - request.num_prompt_tokens not in self._rest

    def verified(self, _: HeadProposer, request: Request, draft: Draft, num_accepted: int) -> None:
        """Count it, where it comes behind the rest."""
        if len(request.token_ids) - request.num_prompt_tokens >= self._rest.stop:
            self.tried += min(num_accepted + 1, len(draft.token_ids))
            self.accepted += num_accepted


def questions(count: int) -> Iterator[list[int]]:
    """Prompts with one question each."""
    tokenizer = Tokenizer.from_file(str(checkpoint_path() / "tokenizer.json"))
    asked = (each["content"] for text in texts(_SEED) for each in text.messages[:1] if each["role"] == "user")
    for question in islice(asked, count):
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        yield tokenizer.encode(text, add_special_tokens=False).ids


def run(core: EngineCore, count: int, temperature: float) -> float:
    """Tokens of a step."""
    num_steps = num_tokens = 0
    for number, prompt in enumerate(questions(count)):
        params = DecodingParams(temperature=temperature, seed=number, max_tokens=_NUM_TOKENS, ignore_eos=True)
        core.add(key_of(number), Prompt.of(prompt), params)
        while core.has_work:
            num_steps += 1
            num_tokens += sum(len(output.token_ids) for output in core.step())
    return num_tokens / num_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--questions", type=int, default=30)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--rest", type=int, default=0)
    parser.add_argument("--leave", action="store_true")
    asked = parser.parse_args()
    counted = Counted(asked.rest)
    config = {"method": "eagle3", "model": asked.folder, "num_speculative_tokens": asked.drafts}
    settings = EngineSettings(
        num_threads=1, num_blocks=400, enable_prefix_caching=False, speculative_config=json.dumps(config)
    )
    with (
        mock.patch("baton.engine.speculation.building.DraftDepth", AllDrafts),
        mock.patch("baton.engine.speculation.text_first._SURE", 2.0),
        mock.patch.object(HeadProposer, "follows", lambda *given: counted.follows(*given)),
        mock.patch.object(HeadProposer, "verified", lambda *given: counted.verified(*given)),
        mock.patch.object(slots, "MOST_FILLED", 0 if asked.leave else slots.MOST_FILLED),
    ):
        core = build_engine(settings, allocate_private).core
        tokens = run(core, asked.questions, asked.temperature)
    (drafts,) = core.draft_counts.by_method()
    sys.stdout.write(
        f"{tokens:.3f} tokens a step; of {drafts.tokens_by_position} drafts by position {drafts.accepted_by_position} "
        f"right; behind the rest {counted.accepted} of {counted.tried}, {counted.accepted / counted.tried:.3f}\n"
    )


if __name__ == "__main__":
    main()
