"""A question about a picture.

    baton serve Qwen/Qwen3-VL-2B-Instruct                # in another terminal; the demo model sees nothing
    python examples/image_question.py picture.png "What is in this picture?"

Baton fetches no addresses: the bytes of the picture are in the request. The server needs pillow, which
`pip install 'baton-serve[images]'` brings.
"""

from __future__ import annotations

import argparse
import base64
import mimetypes
from pathlib import Path

import openai


def data_url(path: Path) -> str:
    """The file as an address that holds its own bytes."""
    kind = mimetypes.guess_type(path.name)[0] or "image/png"
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def main() -> None:
    """Ask one question about one picture."""
    parser = argparse.ArgumentParser()
    parser.add_argument("picture", type=Path)
    parser.add_argument("question", nargs="?", default="What is in this picture?")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--max-tokens", type=int, default=120)
    arguments = parser.parse_args()
    client = openai.OpenAI(base_url=f"{arguments.url}/v1", api_key="none")
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": data_url(arguments.picture)}},
                    {"type": "text", "text": arguments.question},
                ],
            }
        ],
        temperature=0,
        max_tokens=arguments.max_tokens,
    )
    print((answer.choices[0].message.content or "").strip())
    if answer.usage is not None:
        print(f"[{answer.usage.prompt_tokens} tokens of prompt, most of them the picture's]")


if __name__ == "__main__":
    main()
