"""`python -m tests.system.answers_again URL`: does the next turn of a chat have the tokens of the answer before it?

For each temperature it asks a running relay for answers with their token ids, has it tokenize the chat with the next
question, and counts answers of which the prompt has every token whose KV is there (the last one has none). It prints a
row for each temperature. Run by hand: it needs a model that has something to say.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from itertools import takewhile
from typing import Any

QUESTIONS = ("Tell me a story about a river.", "What is the capital of France?", "Count to twenty.", "Who are you?")
NEXT = {"role": "user", "content": "And then?"}
TIMEOUT_S = 120.0


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    """The JSON that is answered at `url`, to a POST where there is a body."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        return json.load(answer)


def num_missing(url: str, model: str, question: str, answer: Any) -> int:
    """Tokens of an answer that the next prompt does not find."""
    asked, said = {"role": "user", "content": question}, {"role": "assistant", "content": answer["message"]["content"]}
    again = ask(f"{url}/tokenize", {"model": model, "messages": [asked, said, NEXT]})["tokens"]
    known = [*answer["prompt_token_ids"], *answer["token_ids"]][:-1]
    num_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(known, again, strict=False)))
    return len(known) - num_same


def main() -> int:
    """Print a row for each temperature; the exit status."""
    parser = argparse.ArgumentParser(description="Count answers whose tokens the next turn has again.")
    parser.add_argument("url", help="address of a router")
    parser.add_argument("--temperatures", type=float, nargs="+", default=(0.0, 0.5, 0.7, 1.0))
    parser.add_argument("--answers", type=int, default=8, help="of each question")
    parser.add_argument("--max-tokens", type=int, default=100)
    flags = parser.parse_args()
    model = ask(f"{flags.url}/v1/models")["data"][0]["id"]
    for temperature in flags.temperatures:
        missing, num_tokens = [], 0
        for seed, question in enumerate(QUESTIONS):
            body = {"model": model, "messages": [{"role": "user", "content": question}], "temperature": temperature}
            body |= {
                "n": flags.answers if temperature else 1,
                "seed": seed,
                "max_tokens": flags.max_tokens,
                "return_token_ids": True,
            }
            for choice in ask(f"{flags.url}/v1/chat/completions", body)["choices"]:
                missing.append(num_missing(flags.url, model, question, choice))
                num_tokens += len(choice["token_ids"])
        row = f"{temperature}: {missing.count(0)} of {len(missing)} answers, {sum(missing)} of {num_tokens} tokens lost"
        sys.stdout.write(row + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
