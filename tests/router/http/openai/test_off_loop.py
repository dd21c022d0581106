from __future__ import annotations

import threading
from pathlib import Path
from unittest import mock

from baton.router.http.openai.prompts import PromptMaker


async def test_a_very_long_prompt_starts_no_thread(checkpoint: Path) -> None:
    """Where there is no memory for one, the event loop would wait for it for ever."""
    maker = PromptMaker.from_folder(checkpoint)
    maker.start()
    try:
        with mock.patch.object(threading.Thread, "start", side_effect=MemoryError):
            assert await maker.off_loop(lambda: "made", 2**20) == "made"
            assert await maker.grammars._compilers.run(lambda: "checked") == "checked"
    finally:
        maker.close()
