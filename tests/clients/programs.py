"""Programs as their users run them: a command line each, and what the file that it writes has to say.

A load generator sends `NUM_REQUESTS` requests of `PROMPT_TOKENS` random tokens and asks for `OUTPUT_TOKENS`. A token
that Baton lost or added shows in the sums. Sums of prompts are compared where a prompt is sent as it is: chat templates
add tokens, and the texts that vLLM makes of its random tokens have a few more or less. aiperf records what it got, so
of its streams text and usage are compared too (`streams.py`). lm-eval has two tasks of its own, whose answers the demo
model is sure of.

guidellm 0.8.1 may lose the last result of a run on a busy machine: the thread that receives results says that all of
them are there before it passes the last one on, and whoever waits for results looks up ten times a second and leaves as
soon as that is said. It then reports one request less than it has sent, all of which were answered: run it again. With
a pause of half a second at that place it always does.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.clients.streams import asking, check_streams

NUM_REQUESTS, CONCURRENCY, PROMPT_TOKENS, OUTPUT_TOKENS = 20, 4, 32, 16
PROMPTS, OUTPUT = NUM_REQUESTS * PROMPT_TOKENS, NUM_REQUESTS * OUTPUT_TOKENS
TIMEOUT_S = 600.0
CHAT = "/v1/chat/completions"
# aiperf 0.13 takes the folder of a tokenizer for the name of a repository when one of these is set
UNSET = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


class NotInstalled(Exception):
    """The program is not on PATH, and no flag says where it is."""


@dataclass(frozen=True, slots=True)
class Program:
    """`command` with `arguments` runs in a folder that has nothing but `files` (texts by name) and writes `result`
    there, a name with wildcards. `{url}`, `{model}` and `{tokenizer}` in the arguments are filled in. `expected`:
    values of the result by path, such as `benchmarks.0.type`. `streams`: the file with all streams as they came, and
    the path at which they were asked for.
    """

    name: str
    command: str
    arguments: str
    result: str
    expected: Mapping[str, Any]
    streams: tuple[str, str] | None = None
    files: Mapping[str, str] = field(default_factory=dict)


def _vllm(name: str, arguments: str) -> Program:
    return Program(
        f"vllm bench serve: {name}",
        "vllm",
        f"bench serve --base-url {{url}} --tokenizer {{tokenizer}} {arguments} --ignore-eos --num-warmups 2"
        f" --dataset-name random --random-input-len {PROMPT_TOKENS} --random-output-len {OUTPUT_TOKENS}"
        f" --num-prompts {NUM_REQUESTS} --max-concurrency {CONCURRENCY} --ready-check-timeout-sec 60"
        " --disable-tqdm --save-result --result-dir . --result-filename result.json",
        "result.json",
        {"completed": NUM_REQUESTS, "failed": 0, "total_output_tokens": OUTPUT},
    )


def _guidellm(name: str, path: str, **prompts: int) -> Program:
    sums = {"output_token_count": OUTPUT, **prompts}
    return Program(
        f"guidellm: {name}",
        "guidellm",
        f"run --backend kind=openai_http,target={{url}},model={{model}},request_format={path}"
        f" --profile kind=concurrent,streams={CONCURRENCY} --constraint kind=max_requests,count={NUM_REQUESTS}"
        f" --data kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"
        " --tokenizer kind=huggingface_auto,model={tokenizer} --disable-progress --output kind=json,path=result.json",
        "result.json",
        {
            "benchmarks.0.metrics.request_totals.successful": NUM_REQUESTS,
            "benchmarks.0.metrics.request_totals.total": NUM_REQUESTS,
            **{f"benchmarks.0.metrics.{name}.successful.total_sum": total for name, total in sums.items()},
        },
    )


def _aiperf(name: str, path: str, *, streams: bool, **sums_of_tokens: int) -> Program:
    sums = {"request_count": NUM_REQUESTS, "request_error_rate": 0, **sums_of_tokens}
    kind = path.rpartition("/")[2] if path != CHAT else "chat"
    return Program(
        f"aiperf: {name}",
        "aiperf",
        f"profile --url {{url}} --model {{model}} --tokenizer {{tokenizer}} --endpoint-type {kind}"
        f"{' --streaming' * streams} --concurrency {CONCURRENCY}"
        f" --request-count {NUM_REQUESTS} --isl {PROMPT_TOKENS} --osl {OUTPUT_TOKENS} --extra-inputs ignore_eos:true"
        " --extra-inputs temperature:0 --export-level raw"
        " --ui-type none --no-gpu-telemetry --output-artifact-dir result",
        "result/profile_export_aiperf.json",
        {"error_summary": [], "is_complete": True, **{f"{name}.avg": total for name, total in sums.items()}},
        ("result/profile_export_raw.jsonl", path) if streams else None,
    )


_TASK = """task: {task}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {task}.jsonl}}}}
test_split: test
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{target}}}}"
target_delimiter: ""
"""
_ENDINGS = (
    {"text": "Once upon a", "endings": [" time", " table"], "target": 0},
    {"text": "Once upon a time there", "endings": [" banana", " was"], "target": 1},
)
_STORIES = ({"text": "Once", "target": " upon a"},)
LM_EVAL = Program(
    "lm-eval: local-completions",
    "lm_eval",
    f"--model local-completions --model_args model={{model}},base_url={{url}}/v1/completions,tokenizer={{tokenizer}},"
    f"num_concurrent={CONCURRENCY},max_length=2048 --include_path . --tasks endings,stories --output_path result",
    "result/**/results_*.json",
    {"results.endings.acc,none": 1.0, "results.stories.exact_match,none": 1.0, "n-samples.endings.effective": 2},
    files={
        "endings.yaml": _TASK.format(task="endings")
        + 'output_type: multiple_choice\ndoc_to_choice: "{{endings}}"\nmetric_list: [{metric: acc}]\n',
        "endings.jsonl": "".join(f"{json.dumps(each)}\n" for each in _ENDINGS),
        "stories.yaml": _TASK.format(task="stories")
        + 'output_type: generate_until\ngeneration_kwargs: {until: [" time"], max_gen_toks: 8}\n'
        + "metric_list: [{metric: exact_match}]\n",
        "stories.jsonl": "".join(f"{json.dumps(each)}\n" for each in _STORIES),
    },
)
PROGRAMS = (
    _vllm("completions", "--backend openai --logprobs 2"),  # without --model: it asks for the list of models
    _vllm("chat", "--backend openai-chat --endpoint /v1/chat/completions --model {model}"),
    _vllm("responses", "--backend openai-responses --endpoint /v1/responses --model {model}"),
    _guidellm("completions", "/v1/completions", prompt_token_count=PROMPTS),
    _guidellm("chat", "/v1/chat/completions"),
    _guidellm("responses", "/v1/responses"),
    _aiperf(
        "completions",
        "/v1/completions",
        streams=True,
        total_usage_prompt_tokens=PROMPTS,
        total_usage_completion_tokens=OUTPUT,
    ),
    _aiperf("chat", CHAT, streams=True, total_usage_completion_tokens=OUTPUT),
    _aiperf("chat, not streamed", CHAT, streams=False, total_usage_completion_tokens=OUTPUT),
    # of a stream it reads the usage in `response.completed`, and an answer cut at its limit ends in another event
    _aiperf("responses", "/v1/responses", streams=True),
    _aiperf("responses, not streamed", "/v1/responses", streams=False, total_usage_completion_tokens=OUTPUT),
    LM_EVAL,
)


def run_program(program: Program, executable: str, filled_in: Mapping[str, str]) -> None:
    """Run it and judge its result. Raises `NotInstalled`, `ValueError`, `OSError`, and after ten minutes
    `TimeoutExpired`.

    Not every one exits with an error when requests fail: the result decides.
    """
    path = shutil.which(executable)
    if path is None:
        raise NotInstalled
    command = [path, *(argument.format(**filled_in) for argument in program.arguments.split())]
    environment = {name: value for name, value in os.environ.items() if name not in UNSET}
    with tempfile.TemporaryDirectory() as name:
        folder, log = Path(name), Path(name, "log")
        for file, text in program.files.items():
            (folder / file).write_text(text)
        status = _finish(command, folder, log, environment)
        if status:
            raise ValueError(f"exit status {status}, and at the end: {' '.join(log.read_text().split())[-300:]}")
        results = [json.loads(file.read_text()) for file in folder.glob(program.result)]
        check(results[-1] if results else None, program.expected)
        if program.streams is not None:
            file, endpoint = program.streams
            check_streams(folder / file, asking(f"{filled_in['url']}{endpoint}"), NUM_REQUESTS)


def check(result: Any, expected: Mapping[str, Any]) -> None:
    """Raise `ValueError` that names each path at which `result` has another value, or none."""
    found = {path: _at(result, path) for path in expected}
    wrong = [f"{path} is {found[path]}, not {value}" for path, value in expected.items() if found[path] != value]
    if wrong:
        raise ValueError("; ".join(wrong))


def _at(result: Any, path: str) -> Any:
    for step in path.split("."):
        try:
            result = result[int(step) if isinstance(result, list) else step]
        except (LookupError, TypeError, ValueError):
            return "absent"
    return result


def _finish(command: list[str], folder: Path, log: Path, environment: Mapping[str, str]) -> int:
    # a group of its own: aiperf has many processes, which do not end with their parent
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, process_group=0
        )
    try:
        return process.wait(TIMEOUT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
