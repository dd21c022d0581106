"""Command: write the `tokenizer.json` of a checkpoint that has none, through transformers.

Runs in a child process, because importing transformers takes seconds and pulls in torch. Reads only the
given folder (no network, no code from the checkpoint) and stands alone: it imports nothing of this project.

    python -m baton.engine.text.convert FOLDER OUT_FILE
"""

from __future__ import annotations

import sys


def convert(folder: str, out_file: str) -> None:
    """Load `folder` with transformers and save its tokenizer in the `tokenizers` format as `out_file`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not tokenizer.is_fast:
        raise TypeError(f"{type(tokenizer).__name__} has no equivalent in the tokenizers library")
    tokenizer.backend_tokenizer.save(out_file)


def main() -> int:
    """Convert a tokenizer. The exit status is 0, or 1 with the reason as the last line on stderr."""
    try:
        convert(sys.argv[1], sys.argv[2])
    except Exception as error:  # the outer edge of a program: any failure becomes its one line
        sys.stderr.write(f"{type(error).__name__}: {' '.join(str(error).split())}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
