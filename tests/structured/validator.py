"""The package `jsonschema`, which is no part of Baton's environment, in a process of a Python that has it.

Multiples are judged by the decimal digits that were written: `jsonschema` divides floats, to which 2.9429 is no
multiple of 0.0001.

python3 -m venv /tmp/jsonschema && /tmp/jsonschema/bin/pip install 'jsonschema[format]'
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from typing import Any

_PROGRAM = """
import json, sys
from fractions import Fraction
from jsonschema import Draft202012Validator, ValidationError, validators

def multiple_of(validator, divisor, value, schema):
    is_number = validator.is_type(value, "number")
    if is_number and (abs(value) == float("inf") or Fraction(str(value)) % Fraction(str(divisor))):
        yield ValidationError(f"{value} is not a multiple of {divisor}")

Validator = validators.extend(Draft202012Validator, {"multipleOf": multiple_of})
for line in sys.stdin:
    schema, text = json.loads(line)
    try:
        Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(json.loads(text))
        print("")
    except Exception as error:
        print(" ".join(f"{type(error).__name__}: {error}".split())[:300])
"""


def errors_of(python: str, cases: Iterable[tuple[Any, str]]) -> list[str]:
    """Why each text is not valid by its schema (draft 2020-12, formats included), "" for one that is."""
    lines = "".join(json.dumps(case) + "\n" for case in cases)
    done = subprocess.run([python, "-I", "-c", _PROGRAM], input=lines, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()
