"""`python -m tests.page.echo_server`: a router whose model says what it was asked, for checks of the page.

Prints its address as one line and serves until it is told to stop. The answer is the last question, token by token, and
before it a thought unless the template is told that none is wanted. The first word of a question may say how it is
answered: `slowly`, `at-once` (one event), or `fail` (no answer).
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from baton.demo.location import checkpoint_path
from baton.engine.text.tokenizer import Tokenizer
from baton.router.http.openai.prompts import PromptMaker
from baton.router.requests.relay import RelaySettings
from baton.wire.messages.legs import Prefill
from baton.wire.messages.membership import DECODE, PREFILL, live_key
from tests.router.fake_node import FakeNode, LegMessage, Script, first_index
from tests.router.rig import serving

THOUGHT = "I say it again."
_LIMITS = RelaySettings(local_prefill_tokens=4, max_concurrent_requests=64, max_attempts=1, request_timeout_s=120.0)
_BEGIN, _END = "<|im_start|>", "<|im_end|>"
_ASSISTANT = f"{_BEGIN}assistant\n"
_NO_THOUGHT = "<think>\n\n</think>\n\n"
_TEMPLATE = (
    f"{{%- for message in messages %}}{_BEGIN}{{{{ message.role }}}}\n{{{{ message.content }}}}{_END}\n{{% endfor %}}"
    f"{_ASSISTANT}{{% if enable_thinking is defined and not enable_thinking %}}<think>\n\n</think>\n\n{{% endif %}}"
)
_MAX_TOKENS = 16_384
_PAUSE_S, _SLOW_PAUSE_S = 0.002, 0.06


def make_checkpoint(folder: Path) -> Path:
    """The demo's text side, with a chat template that knows thinking."""
    for file in checkpoint_path().iterdir():
        (folder / file.name).symlink_to(file)
    config = folder / "tokenizer_config.json"
    settings = json.loads(config.read_text()) | {"chat_template": _TEMPLATE}
    config.unlink()
    config.write_text(json.dumps(settings))
    return folder


def answer_to(prompt: str) -> str:
    """What the model says to a rendered conversation."""
    question = prompt.rpartition(f"{_BEGIN}user\n")[2].partition(_END)[0]
    return question if prompt.endswith(_NO_THOUGHT) else f"<think>\n{THOUGHT}\n</think>\n\n{question}"


def echoing(tokenizer: Tokenizer) -> Script:
    """A script for both roles."""

    def script(node: FakeNode, leg: LegMessage) -> None:
        prompt = tokenizer.decode(leg.prompt.token_ids, skip_special_tokens=False)
        answer = answer_to(prompt)
        manner = next(iter(answer.rpartition("</think>\n\n")[2].split()), "")
        if manner == "fail":
            node.fail(leg, "request_failed")
            return
        token_ids = tokenizer.encode(answer + _END)
        first, last = first_index(leg), len(token_ids) - 1
        end = first if isinstance(leg, Prefill) else last
        if manner == "at-once":
            node.emit(leg, token_ids[first : end + 1], first, "stop" if end == last else "")
            return
        pause_s = _SLOW_PAUSE_S if manner == "slowly" else _PAUSE_S
        loop = asyncio.get_running_loop()
        for index in range(first, end + 1):
            finish = "stop" if index == last else ""
            loop.call_later(pause_s * index, _emit, node, leg, token_ids[index : index + 1], index, finish)

    return script


def _emit(node: FakeNode, leg: LegMessage, token_ids: Sequence[int], index: int, finish: str) -> None:
    """Tokens of a leg that has not been cancelled."""
    if live_key(leg.handoff_id, leg.attempt) in node.live:
        node.emit(leg, token_ids, index, finish)


async def main() -> None:
    """Serve until SIGINT or SIGTERM."""
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    with tempfile.TemporaryDirectory() as folder:
        prompts = PromptMaker.from_folder(make_checkpoint(Path(folder)))
        async with serving(prompts, _LIMITS) as server:
            for role in (PREFILL, DECODE):
                await server.rig.join(role, echoing(prompts.tokenizer), max_request_tokens=_MAX_TOKENS)
            sys.stdout.write(f"{server.url}\n")
            sys.stdout.flush()
            await stopped.wait()
            for node in server.rig.nodes:
                node.live.clear()
        prompts.close()


if __name__ == "__main__":
    asyncio.run(main())
