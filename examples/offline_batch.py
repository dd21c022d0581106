"""Many prompts at once, without a server: the engine runs in this process.

    python examples/offline_batch.py                     # the built-in demo model
    python examples/offline_batch.py path/to/checkpoint

Prompts run together: the more there are, the better the processor is used.
"""

from __future__ import annotations

import sys

from baton import LLM, SamplingParams

PROMPTS = ["Once upon a time there was a fox", "The capital of France is", "17 + 25 =", "A spider has"]


def main(model: str = "") -> None:
    """Continue all prompts in one batch, print them in their order, then answer a chat."""
    llm = LLM(model)
    # one entry for all prompts, or a list with one for each; temperature 0 takes the likeliest token each time
    params = SamplingParams(temperature=0, max_tokens=24)
    for prompt, answer in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True):
        print(f"{prompt} ...{answer.text!r}  [{len(answer.token_ids)} tokens, {answer.finish_reason}]")
    # `generate` continues a text as it is; `chat` puts messages into the model's chat template first
    print(llm.chat([{"role": "user", "content": "Who are you?"}], params).text)


if __name__ == "__main__":
    main(*sys.argv[1:])
