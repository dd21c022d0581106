from __future__ import annotations

import json
import shlex
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

import baton.launch.serve
from baton.demo.location import checkpoint_path
from baton.engine.native.loans import Lending
from baton.launch.cli import main
from baton.launch.key import write_role_keys
from baton.launch.layout import ONE_NODE
from baton.launch.placement import Placement
from baton.launch.ports import ListeningPort
from baton.launch.serve import Doors, announce, child_specs, lend_cores, placements, with_cluster_key, with_journal
from baton.launch.settings import resolve_serve
from baton.launch.supervised import ChildSpec
from baton.launch.supervisor import Supervisor
from baton.wire.errors import BatonError, InvalidSetting, ModelLoadError
from baton.wire.keys import ROLES, KeyFile
from tests.checkpoints import make_checkpoint
from tests.launch.endpoint import FakeEndpoint

DOORS = [Doors("router", ListeningPort(8000, (5, 6)), ListeningPort(41000, (7,)))]


def specs(*arguments: str, shares: list[Placement] | None = None) -> list[ChildSpec]:
    """The programs of a prefill node and a decode node, unless `arguments` say otherwise."""
    environment = {"BATON_BLOCK_SIZE": "32", "BATON_PORT": "9", "HOME": "/root"}
    shares = shares or [Placement(1), Placement(1)]
    return child_specs(resolve_serve(("--prefill=1", *arguments), environment), DOORS, shares, environment)


def test_a_deployment_is_a_router_prefill_nodes_and_decode_nodes() -> None:
    found = specs("--prefill=1", "--decode=2", shares=[Placement(1)] * 3)
    assert [(spec.name, spec.module, spec.stops_last) for spec in found] == [
        ("router", "baton.router", True),
        ("prefill-0", "baton.prefill_node", False),
        ("decode-0", "baton.decode_node", False),
        ("decode-1", "baton.decode_node", False),
    ]


def test_mixed_nodes_are_told_what_to_prefer(tmp_path: Path) -> None:
    found = specs("--mixed")
    assert [spec.module for spec in found] == ["baton.router", "baton.node", "baton.node"]
    assert [flag for spec in found for flag in spec.arguments if flag.startswith("--role")] == [
        "--role=prefill",
        "--role=decode",
    ]
    write_role_keys(tmp_path / "keys")
    deployment = with_cluster_key(resolve_serve(["--mixed", f"--cluster-key={tmp_path / 'keys'}"], {}), tmp_path)
    assert deployment.prefill.cluster_key == deployment.decode.cluster_key


def test_with_data_parallelism_each_node_is_a_group() -> None:
    found = specs("--data-parallel-size=2", "--prefill=2", shares=[Placement(1)] * 6)
    names = ["prefill-0-0", "prefill-0-1", "prefill-1-0", "prefill-1-1", "decode-0-0", "decode-0-1"]
    assert [spec.name for spec in found] == ["router", *names]
    assert [flag for spec in found for flag in spec.arguments if flag.startswith("--node-group")] == [
        f"--node-group={name[:-2]}" for name in names
    ]
    assert not any("data-parallel" in flag for spec in found for flag in spec.arguments)
    assert len(placements(resolve_serve(["--data-parallel-size=2"], {}))) == 4


def test_without_prefill_nodes_there_are_decode_nodes_only() -> None:
    assert [spec.name for spec in specs("--prefill=0", shares=[Placement(2)])] == ["router", "decode-0"]


@pytest.mark.parametrize(
    ("words", "goal_ttft_ms"),
    [("", 500), ("--refuse-late", 0), ("--prefill=1", 0), ("--decode=2 --prefill=0", 0), ("--mixed", 0)],
)
def test_a_node_may_give_up_a_goal_only_where_late_prompts_have_no_other_place(words: str, goal_ttft_ms: float) -> None:
    goals = ["--goal-ttft-ms=500", "--goal-tpot-ms=25", "--device=cpu"]
    deployment = resolve_serve([*goals, *words.split()], {})
    assert deployment.decode.goal_ttft_ms == goal_ttft_ms
    assert (deployment.decode.goal_tpot_ms, deployment.router.goal_ttft_ms) == (25, 500)


def test_prefill_and_decode_nodes_may_have_different_numbers_of_ranks() -> None:
    def ranks(*flags: str) -> list[int]:
        deployment = resolve_serve(flags, {})
        return [node.tensor_parallel_size for node in (deployment.prefill, deployment.decode)]

    assert ranks() == [1, 1]
    assert ranks("--tensor-parallel-size=4") == [4, 4]
    uneven = ("--tensor-parallel-size=4", "--prefill-tensor-parallel-size=2")
    assert ranks(*uneven) == [2, 4]
    assert ranks(*uneven, "--decode-tensor-parallel-size=1") == [2, 1]
    stages = resolve_serve(("--pipeline-parallel-size=2", "--decode-pipeline-parallel-size=3", *uneven), {})
    assert (stages.prefill.num_ranks, stages.decode.num_ranks) == (2 * 2, 4 * 3)
    router, prefill, decode = specs(*uneven)
    assert "--tensor-parallel-size=2" in prefill.arguments
    assert "--tensor-parallel-size=4" in decode.arguments
    assert not any("parallel" in word for word in router.arguments)
    with pytest.raises(InvalidSetting, match="--batch-invariant with 2 ranks in a stage of prefill nodes and 4"):
        resolve_serve([*uneven, "--batch-invariant"], {})
    with pytest.raises(InvalidSetting, match="--decode-tensor-parallel-size: -1 is not from 0 to 64"):
        resolve_serve(["--decode-tensor-parallel-size=-1"], {})


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--tensor-parallel-size=3"], "^prefill nodes with --tensor-parallel-size 3 .*: 4 attention heads cannot be"),
        (["--prefill-pipeline-parallel-size=3"], "2 layers cannot be divided among 3 stages"),
        (["--tensor-parallel-size=16", "--pipeline-parallel-size=16"], "16 in 16 stages are more than 64 ranks"),
    ],
)
def test_ranks_that_no_node_can_have_are_refused_before_anything_starts(
    tmp_path: Path, flags: list[str], reason: str
) -> None:
    make_checkpoint(tmp_path, "llama")
    with pytest.raises(BatonError, match=reason):
        baton.launch.serve.main([str(tmp_path), *flags])


def test_a_deployment_has_a_cluster_key_of_its_own_unless_it_is_asked_not_to(tmp_path: Path) -> None:
    deployment = with_cluster_key(resolve_serve([], {}), tmp_path)
    keys = {part.cluster_key for part in (deployment.router, deployment.prefill, deployment.decode)}
    assert keys == {str(tmp_path / "cluster.key")}
    assert [len(secret) for secret in KeyFile.read(tmp_path / "cluster.key").secrets] == [40]
    assert (tmp_path / "cluster.key").stat().st_mode & 0o777 == 0o600
    named = resolve_serve(["--cluster-key=mine"], {})
    assert with_cluster_key(named, tmp_path) == named
    without = with_cluster_key(resolve_serve(["--cluster-key=none"], {}), tmp_path)
    assert [part.cluster_key for part in (without.router, without.prefill, without.decode)] == ["", "", ""]


def test_each_program_gets_the_key_of_its_role_from_a_folder(tmp_path: Path) -> None:
    write_role_keys(tmp_path / "keys")
    deployment = with_cluster_key(resolve_serve([f"--cluster-key={tmp_path / 'keys'}"], {}), tmp_path)
    files = [part.cluster_key for part in (deployment.router, deployment.prefill, deployment.decode)]
    assert files == [str(tmp_path / "keys" / f"{role}.key") for role in ROLES]


def test_the_programs_meet_at_the_reserved_control_port() -> None:
    router, prefill, decode = specs()
    assert "--control-port=41000" in router.arguments
    assert {"--listen-fds=5", "--listen-fds=6", "--control-fd=7"} <= set(router.arguments)
    assert router.inherited_fds == (5, 6, 7)
    assert "--router=tcp://127.0.0.1:41000" in prefill.arguments
    assert "--router=tcp://127.0.0.1:41000" in decode.arguments


def test_several_routers_share_the_port_for_clients_and_all_nodes() -> None:
    http = ListeningPort(8000, (5, 6))
    doors = [
        Doors("router-0", http, ListeningPort(41000, (7,)), ListeningPort(42000, (8,))),
        Doors("router-1", http, ListeningPort(41001, (9,)), ListeningPort(42001, (10,))),
    ]
    deployment = resolve_serve(["--routers=2", "--prefill=1"], {})
    first, second, *nodes = child_specs(deployment, doors, [Placement(1), Placement(1)], {})
    assert [(spec.name, spec.group, spec.stops_last) for spec in (first, second)] == [
        ("router-0", "router", True),
        ("router-1", "router", True),
    ]
    assert {"--listen-fds=5", "--listen-fds=6", "--listen-fds=10", "--control-fd=9"} <= set(second.arguments)
    assert (first.inherited_fds, second.inherited_fds) == ((5, 6, 8, 7), (5, 6, 10, 9))
    for node in nodes:
        assert "--router=tcp://127.0.0.1:41000,tcp://127.0.0.1:41001" in node.arguments


@pytest.mark.parametrize(
    ("flags", "is_off"), [((), False), (("--routers=2",), True), (("--routers=2", "--responses-store=x"), False)]
)
def test_what_one_router_stores_in_its_memory_is_not_looked_for_at_another(
    flags: tuple[str, ...], is_off: bool
) -> None:
    port = ListeningPort(8000, (5,))
    deployment = resolve_serve(["--prefill=1", *flags], {})
    doors = [Doors(f"router-{number}", port, port, port) for number in range(deployment.serve.routers)]
    first, *_ = child_specs(deployment, doors, [Placement(1), Placement(1)], {})
    assert ("--responses-store-bytes=0" in first.arguments) is is_off


def test_streams_cannot_be_resumed_where_another_router_may_be_asked(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="--routers 1"):
        with_journal(resolve_serve(["--routers=2", "--resumable-streams-s=60"], {}), tmp_path)


def test_settings_reach_the_programs_that_have_them() -> None:
    router, prefill, decode = specs("some/model", "--served-model-name=m")
    for spec in (router, prefill, decode):
        assert spec.arguments[0] == "some/model"
    assert "--served-model-name=m" in router.arguments
    assert "--block-size=32" in prefill.arguments
    assert "--block-size=32" not in router.arguments


def test_nodes_publish_kv_events_at_ports_of_their_own() -> None:
    config = '{"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:5557"}'
    flags = [spec.arguments for spec in specs(f"--kv-events-config={config}")]
    found = [[flag for flag in each if flag.startswith("--kv-events-config=")] for each in flags]
    assert found == [[], [f"--kv-events-config={config}"], [found[2][0]]]
    assert json.loads(found[2][0].partition("=")[2])["endpoint"] == "tcp://127.0.0.1:5558"


def test_settings_in_the_environment_reach_a_child_as_flags_only() -> None:
    for spec in specs():
        assert not [name for name in spec.environment if name.startswith("BATON_")]
        assert spec.environment["HOME"] == "/root"


def test_an_address_with_a_password_reaches_the_nodes_by_their_environment() -> None:
    url = "redis://:horse@127.0.0.1/0"
    router, *nodes = specs("--kv-store=valkey", f"--kv-store-url={url}")
    assert [each.environment.get("BATON_KV_STORE_URL") for each in (router, *nodes)] == [None, url, url]
    assert not any("horse" in argument for spec in (router, *nodes) for argument in spec.arguments)


@pytest.mark.parametrize("flag", ["--api-key-file=keys.toml", "--ssl-certfile=cert.pem", "--audit-log=audit.jsonl"])
def test_a_router_with_files_to_reload_gets_sighup(flag: str) -> None:
    assert [spec.reloads for spec in specs(flag)] == [True, False, False]
    assert [spec.reloads for spec in specs()] == [False, False, False]


def test_every_program_gets_sighup_where_cluster_keys_may_change() -> None:
    deployment = resolve_serve(["--cluster-key=mine", "--prefill=1"], {})
    found = child_specs(deployment, DOORS, [Placement(1), Placement(1)], {}, reloads_keys=True)
    assert [spec.reloads for spec in found] == [True] * 3


def test_each_node_gets_its_share_of_the_machine() -> None:
    _, prefill, decode = specs(shares=[Placement(2, (0, 1), "4"), Placement(3)])
    assert {"--node-id=prefill-0", "--num-threads=2", "--cpu-affinity=0,1"} <= set(prefill.arguments)
    assert prefill.environment["CUDA_VISIBLE_DEVICES"] == "4"
    assert "--num-threads=3" in decode.arguments
    assert "CUDA_VISIBLE_DEVICES" not in decode.environment


def pinned_nodes(*arguments: str, cores: tuple[int, ...] = (0, 1)) -> list[Lending]:
    deployment = resolve_serve(("--prefill=1", *arguments), {})
    shares = [Placement(1, (core,) if cores else ()) for core in cores or (0, 1)]
    with ExitStack() as stack:
        return lend_cores(deployment, shares, stack)


def test_nodes_with_cores_of_their_own_lend_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    told = pinned_nodes()
    assert [each.guests for each in told] == [((1, 1),), ((0, 0),)]
    shares = [Placement(1, (0,)), Placement(1, (1,))]
    _, prefill, decode = child_specs(resolve_serve(["--prefill=1"], {}), DOORS, shares, {}, core_loans=told)
    for spec, lending in ((prefill, told[0]), (decode, told[1])):
        assert f"--core-loans={lending}" in spec.arguments
        assert spec.inherited_fds == (lending.descriptor,)
    assert not [
        flag for spec in specs() for flag in spec.arguments if flag.startswith("--core-loans") and flag[-1] != "="
    ]


@pytest.mark.parametrize(
    "arguments",
    [["--no-lend-cores"], ["--mixed"], ["--device=cuda"], ["--decode-tensor-parallel-size=2"]],
)
def test_cores_are_not_lent_where_that_is_turned_off_or_cannot_be(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert pinned_nodes(*arguments) == []


def test_one_node_lends_nothing_and_neither_do_nodes_without_cores_or_with_an_accelerator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert pinned_nodes("--prefill=0", cores=(0,)) == []
    assert pinned_nodes(cores=()) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert pinned_nodes() == []


def test_a_system_that_gives_no_page_starts_nodes_that_lend_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delattr("os.memfd_create")
    assert pinned_nodes() == []
    assert "do not lend each other cores: this system has no anonymous files" in capsys.readouterr().err


def test_nodes_of_one_accelerator_divide_its_memory() -> None:
    _, prefill, decode = specs(shares=[Placement(1, num_sharing=2), Placement(1, num_sharing=2)])
    assert "--gpu-memory-utilization=0.45" in prefill.arguments
    assert "--gpu-memory-utilization=0.45" in decode.arguments
    _, prefill, decode = specs("--gpu-memory-utilization=0.6", shares=[Placement(1), Placement(1, num_sharing=3)])
    assert "--gpu-memory-utilization=0.6" in prefill.arguments
    assert "--gpu-memory-utilization=0.2" in decode.arguments


def test_nodes_of_one_machine_share_its_memory() -> None:
    _, prefill, decode = specs(shares=[Placement(1), Placement(1)])
    assert "--cpu-memory-utilization=0.3" in prefill.arguments
    assert "--cpu-memory-utilization=0.3" in decode.arguments


def test_an_accelerator_that_was_named_is_shared_by_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    named = placements(resolve_serve(["--device=cuda:1", "--prefill=1"], {}))
    assert [(share.device, share.num_sharing) for share in named] == [("", 2), ("", 2)]
    spread = placements(resolve_serve(["--device=cuda", "--prefill=1"], {}))
    assert [(share.device, share.num_sharing) for share in spread] == [("2", 1), ("3", 1)]


@pytest.mark.parametrize("flag", ["--router=tcp://h:1", "--control-port=1", "--cpu-affinity=0", "--http-port=1"])
def test_what_the_launcher_chooses_is_not_a_flag(flag: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        specs(flag)


@pytest.mark.parametrize(("words", "is_said"), [([], True), (["--prefill=0"], False)])
def test_a_layout_that_nobody_asked_for_is_said_with_its_reason(
    words: list[str], is_said: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Supervisor, "run", lambda *_: 0)
    assert main(["serve", "--port=0", "--device=cpu", *words]) == 0
    assert (ONE_NODE.reason in capsys.readouterr().err) == is_said


@pytest.mark.parametrize(
    "flag", ["--prefill=-1", "--decode=0", "--routers=0", "--routers=17", "--start-timeout-s=0", "--prefill=some"]
)
def test_impossible_numbers_are_refused(flag: str) -> None:
    with pytest.raises(InvalidSetting, match=flag.split("=")[0]):
        specs(flag)


def test_an_unknown_key_of_the_settings_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("prefill: 2\nrouter: tcp://host:1\n")
    with pytest.raises(InvalidSetting, match="unknown setting 'router'"):
        specs(f"--config={file}")


@pytest.mark.parametrize(("arguments", "part"), [
    (["--max-model-len=999999"], "--max-model-len 999999 is above the model's limit"),
    (["./no/such/folder"], "no/such/folder"),
])  # fmt: skip
def test_what_no_node_can_serve_is_refused_before_one_starts(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baton.launch.serve, "Supervisor", None)
    assert main(["serve", "--port=0", *arguments]) == 2
    shown = capsys.readouterr().err
    assert part in shown
    assert shown.count("\n") == 1


def test_the_help_says_what_the_model_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["serve", "--help"])
    assert "tokenizer" not in capsys.readouterr().out


def test_weights_are_fetched_once_before_nodes_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def find(model: str, *, weights: bool = True) -> Path:
        asked.append(weights)
        if weights:
            raise ModelLoadError("the network has gone")
        return checkpoint_path()

    monkeypatch.setattr(baton.launch.serve, "find_checkpoint", find)
    with socket.socket() as taken:  # a deployment that would start all the same ends here
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["serve", f"--port={taken.getsockname()[1]}"]) == 2
    assert asked == [False, True]
    assert capsys.readouterr().err.endswith("error: the network has gone\n")


def test_a_port_in_use_is_one_error(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", f"--port={port}"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: cannot listen on 127.0.0.1:{port}: ")
    assert shown.count("\n") == 1


def test_a_command_to_try_names_the_demo_model_where_nobody_can_be_asked(capsys: pytest.CaptureFixture[str]) -> None:
    announce({"router": "http://127.0.0.1:9"}, resolve_serve([], {}), DOORS)
    assert '"model": "baton-demo"' in capsys.readouterr().out


def test_announces_the_address_and_a_command_to_try(endpoint: FakeEndpoint, capsys: pytest.CaptureFixture[str]) -> None:
    announce({"router": endpoint.url, "decode-0": "http://127.0.0.1:9"}, resolve_serve([], {}), DOORS)
    ready, *metrics, curl = capsys.readouterr().out.splitlines()
    assert ready == f"Baton ready at {endpoint.url}"
    assert metrics == [
        f"metrics of router: {endpoint.url}/metrics",
        "metrics of decode-0: http://127.0.0.1:9/metrics",
    ]
    words = shlex.split(curl)
    assert words[:3] == ["curl", "-N", f"{endpoint.url}/v1/chat/completions"]
    body = json.loads(words[-1])
    assert (body["model"], body["stream"]) == ("tiny", True)


def test_with_api_keys_the_command_has_one(
    endpoint: FakeEndpoint, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    announce({"router": endpoint.url}, resolve_serve([], {}), DOORS)
    assert "Authorization" not in capsys.readouterr().out
    announce({"router": endpoint.url}, resolve_serve(["--api-key-file=keys.toml"], {}), DOORS)
    assert ' -H "Authorization: Bearer $BATON_API_KEY" ' in capsys.readouterr().out
    monkeypatch.setenv("BATON_API_KEY", "secret")
    announce({"router": endpoint.url}, resolve_serve([], {}), DOORS)
    shown = capsys.readouterr().out
    assert "Authorization" in shown
    assert "secret" not in shown


def test_each_of_several_routers_has_an_address_for_its_metrics(
    endpoint: FakeEndpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    doors = [
        Doors(f"router-{number}", ListeningPort(8000, (5,)), DOORS[0].control, ListeningPort(42000 + number, (8,)))
        for number in range(2)
    ]
    announce({each.name: endpoint.url for each in doors}, resolve_serve([], {}), doors)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"Baton ready at {endpoint.url}"
    assert lines[1:3] == [f"metrics of router-{number}: http://127.0.0.1:{42000 + number}/metrics" for number in (0, 1)]


@pytest.mark.parametrize(("words", "pulls"), [("", True), ("--decode-policy least_loaded", False)])
def test_nodes_open_nothing_for_pulls_that_their_router_never_asks_for(words: str, pulls: bool) -> None:
    deployment = resolve_serve(words.split(), {})
    assert (deployment.prefill.enable_prefix_pulls, deployment.decode.enable_prefix_pulls) == (pulls, pulls)
