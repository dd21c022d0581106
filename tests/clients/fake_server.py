"""`python -m tests.clients.fake_server`: a router with fake nodes that answer at once, for tools that ask much.

Prints its address as one line and serves until it is told to stop. The model is called `org/tiny`; the nodes answer
every prompt with the same few tokens.
"""

from __future__ import annotations

import asyncio
import signal
import sys

from baton.demo.location import checkpoint_path
from baton.router.http.openai.prompts import PromptMaker
from baton.router.requests.relay import RelaySettings
from tests.router.fake_node import answering
from tests.router.rig import serving

ANSWER = "The river goes to the sea."
LIMITS = RelaySettings(local_prefill_tokens=4, max_concurrent_requests=1024, max_attempts=3, request_timeout_s=20.0)


async def main() -> None:
    """Serve until SIGINT or SIGTERM."""
    prompts = PromptMaker.from_folder(checkpoint_path())
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with serving(prompts, LIMITS) as server:
        await server.rig.pair(answering(prompts.tokenizer.encode(ANSWER), "length"))
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        await stopped.wait()


if __name__ == "__main__":
    asyncio.run(main())
