from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

from baton.bench.documents import served
from baton.bench.runs import METRICS
from baton.bench.serve.command import measure, run_serve_benchmark
from baton.bench.serve.result import RunResult
from baton.bench.serve.settings import ServeBenchSettings
from baton.bench.workload.dataset_settings import DatasetSettings
from tests.bench.mock_server.schedule import Answer, Fault, FaultKind, Script, Steady
from tests.bench.mock_server.server import MockOptions, MockServer, mock_server

QUICK = Steady(ttft_s=0.01, itl_s=0.001)
DATASET = DatasetSettings(num_prompts=6, random_input_len=20, random_output_len=4)
SETTINGS = ServeBenchSettings(vocab_size=100, timeout_s=10.0)


async def measured(
    servers: Sequence[MockServer], settings: ServeBenchSettings = SETTINGS, dataset: DatasetSettings = DATASET
) -> RunResult:
    settings = dataclasses.replace(settings, base_url=tuple(server.url for server in servers))
    return await measure(settings, dataset, "baton bench serve", lambda _: None)


async def test_a_result_says_what_was_measured_and_where() -> None:
    settings = dataclasses.replace(SETTINGS, request_rate=200.0, goodput=("ttft:5000",), label="mine")
    async with mock_server(QUICK) as server:
        summary = (await measured([server], settings)).summary
    assert (summary["completed"], summary["failed"]) == (6, 0)
    assert (summary["model_id"], summary["label"], summary["backend"]) == ("mock", "mine", "openai")
    assert (summary["request_rate"], summary["seed"], summary["num_prompts"]) == (200.0, 0, 6)
    assert (summary["total_input_tokens"], summary["total_output_tokens"]) == (120, 24)
    assert summary["slo_attainment"] == 1.0
    assert summary["facts"]["command"] == "baton bench serve"
    assert summary["dataset"]["name"] == "random"
    assert summary["arrival"]["process"] == "poisson"
    assert summary["client"]["cpu_share"] > 0
    assert summary["breakdown"] is None
    (run,) = served(summary, "the result").runs
    assert [metric.name for metric in METRICS if run.number(metric.name) is None] == []


async def test_warm_up_requests_have_other_prompts_and_are_in_no_figure() -> None:
    async with mock_server(QUICK) as server:
        result = await measured([server], dataclasses.replace(SETTINGS, num_warmups=3))
        prompts = [tuple(record.body["prompt"]) for record in server.records]
    assert len(prompts) == 9
    assert not set(prompts[:3]) & set(prompts[3:])
    assert {len(prompt) for prompt in prompts} == {20}
    assert result.summary["completed"] == 6


async def test_requests_say_what_the_settings_say() -> None:
    said: dict[str, Any] = {"ignore_eos": True, "temperature": 0.5, "extra_body": '{"top_k": 7}', "header": ("x=1",)}
    settings = dataclasses.replace(SETTINGS, served_model_name="other", **said)
    async with mock_server(QUICK) as server:
        await measured([server], settings)
        body = server.records[0].body
        assert server.records[0].headers["x"] == "1"
    assert (body["ignore_eos"], body["temperature"], body["top_k"], body["model"]) == (True, 0.5, 7, "other")
    assert body["max_tokens"] == 4
    assert "return_timings" not in body


async def test_chat_sends_messages_and_its_opening_event_is_no_token() -> None:
    settings = ServeBenchSettings(backend="openai-chat", timeout_s=10.0)
    async with mock_server(QUICK, MockOptions(model="baton-demo")) as server:
        result = await measured([server], settings)
        assert {record.path for record in server.records} == {"/v1/chat/completions"}
    assert result.summary["completed"] == 6
    assert result.summary["total_output_tokens"] == 24
    assert result.summary["chunks_per_token"] == 1.0


async def test_a_server_that_comes_late_is_waited_for() -> None:
    async with mock_server(QUICK) as first:
        url = first.url
    settings = dataclasses.replace(SETTINGS, base_url=(url,), ready_check_timeout_sec=30.0)
    waiting = asyncio.create_task(measure(settings, DATASET, "", lambda _: None))
    async with mock_server(QUICK, MockOptions(port=int(url.rsplit(":", 1)[1]))):
        assert (await waiting).summary["completed"] == 6


async def test_a_server_that_cannot_compute_yet_is_tried_until_it_can() -> None:
    unready, ready = Answer(0.001, fault=Fault(FaultKind.HTTP_ERROR)), Answer(0.001, (0.001,) * 3)
    async with mock_server(Script((unready, unready, *[ready] * 10))) as server:
        result = await measured([server], dataclasses.replace(SETTINGS, ready_check_timeout_sec=30.0))
        tried = [tuple(record.body["prompt"]) for record in server.records][:3]
    assert (result.summary["completed"], result.summary["failed"]) == (6, 0)
    assert len(set(tried)) == 1


async def test_the_command_measures_the_same_again_and_keeps_secrets() -> None:
    async with mock_server(QUICK) as server:
        settings = dataclasses.replace(
            SETTINGS, base_url=(server.url,), header=("Authorization=Bearer s3cret",), ignore_eos=True
        )
        result = await asyncio.to_thread(run_serve_benchmark, settings, DATASET, say=lambda _: None)
    command = result.summary["facts"]["command"]
    for word in ("baton bench serve ", f"--base-url={server.url}", "--ignore-eos", "--num-prompts=6"):
        assert word in command
    assert "--header=Authorization=..." in command
    assert "s3cret" not in command
