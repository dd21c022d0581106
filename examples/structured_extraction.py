"""Facts from a text, as JSON of a schema: every token that would break the schema is impossible.

    baton serve                                          # in another terminal
    python examples/structured_extraction.py "Maria is 34 years old and lives in Lisbon."

The schema holds for the form, whatever the model. What the fields say is as good as the model is.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import openai

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "city": {"type": "string", "maxLength": 40},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}


def extract(client: openai.OpenAI, model: str, text: str) -> dict[str, Any]:
    """What the text says of a person. Raises `ValueError` when the answer was cut off."""
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": f"Extract the person. {text} Answer in JSON with name, age and city."}],
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}},
        temperature=0,
        max_tokens=200,
    )
    choice = answer.choices[0]
    if choice.finish_reason != "stop":  # `length`: the JSON has no end, give it more tokens
        raise ValueError(f"the answer ended with {choice.finish_reason}")
    person: dict[str, Any] = json.loads(choice.message.content or "")
    return person


def main() -> None:
    """Print the facts of one text."""
    parser = argparse.ArgumentParser()
    parser.add_argument("text", nargs="?", default="Maria is 34 years old and lives in Lisbon.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    arguments = parser.parse_args()
    client = openai.OpenAI(base_url=f"{arguments.url}/v1", api_key="none")
    print(json.dumps(extract(client, client.models.list().data[0].id, arguments.text), indent=2))


if __name__ == "__main__":
    main()
