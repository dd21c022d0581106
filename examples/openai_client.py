"""A chat through the official client, printed token by token as it is generated.

    baton serve                                          # in another terminal
    python examples/openai_client.py "Tell me a story."

Any client of OpenAI's API will do; docs/api.md lists the fields.
"""

from __future__ import annotations

import argparse

import openai


def main() -> None:
    """Ask one question, print the answer while it comes, then what it took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("question", nargs="?", default="What is the capital of France?")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    arguments = parser.parse_args()
    # without --api-key-file the server takes any key; the client wants one
    client = openai.OpenAI(base_url=f"{arguments.url}/v1", api_key="none")
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": arguments.question}],
        temperature=0,
        max_tokens=120,
        stream=True,
        stream_options={"include_usage": True},  # the last chunk has no choice, and counts the tokens
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        elif chunk.usage is not None:
            print(f"\n[{model}: {chunk.usage.prompt_tokens} + {chunk.usage.completion_tokens} tokens]")


if __name__ == "__main__":
    main()
