"""The manifests: valid in current Kubernetes, and every command, port, path and metric in them is one of Baton's."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import urllib.request
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from baton.launch.key import write_role_keys
from baton.node.health import HealthServer
from baton.node.settings import NodeSettings
from baton.ranks.settings import RankSettings
from baton.router.http.access.guard import LIFE_ROUTES
from baton.router.settings import RouterSettings
from baton.runtime.child import PIPE, Child
from baton.runtime.command_line import CommandParser
from baton.runtime.settings import ENVIRONMENT_PREFIX, add_flags, resolve
from baton.wire.keys import KeyFile
from tests.deploy.kustomize import containers_of
from tests.deploy.kustomize import resolve as overlay

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("cpu-demo", "gpu", "data-parallel", "multi-host", "inference-pool")
GROUPS, POOL = "LeaderWorkerSet", "InferencePool"
"""No parts of Kubernetes. Of the first there is no schema: its pods are checked, and what is around them by hand."""
POOL_SCHEMA = json.loads(Path(__file__).with_name("inference_pool_v1.json").read_text())
VERSIONS = ("1.31", "1.37")
"""The oldest one whose preStop may sleep without a feature gate is 1.30; the newest that has schemas here."""
SETTINGS = {
    "router": RouterSettings,
    "prefill": NodeSettings,
    "decode": NodeSettings,
    "rank": RankSettings,
}
_LEADER = "baton-decode-wide-0.baton-decode-wide.baton"
_FROM_POD = {"POD_NAME": "baton-decode-1", "POD_IP": "10.1.2.3", "LWS_LEADER_ADDRESS": _LEADER}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("overlay") / "keys"
    write_role_keys(folder)
    (folder / "api-keys.toml").write_text(f'[alice]\nsha256 = "{"0" * 64}"\n')
    return folder


@pytest.fixture(scope="module", params=OVERLAYS)
def objects(request: pytest.FixtureRequest, keys: Path) -> list[dict[str, Any]]:
    return overlay(KUBERNETES / "overlays" / request.param, keys)


def _pods(objects: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Metadata and spec of every kind of pod."""
    for each in objects:
        if each["kind"] == "StatefulSet":
            yield each["spec"]["template"]
        elif each["kind"] == GROUPS:
            yield each["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
            yield each["spec"]["leaderWorkerTemplate"]["workerTemplate"]


def _words(container: dict[str, Any]) -> list[str]:
    """What is run, with the variables of the pod put in."""
    words = [*container["command"], *container["args"]]
    for name, value in _FROM_POD.items():
        words = [word.replace(f"$({name})", value) for word in words]
    assert not [word for word in words if "$(" in word]
    return words


def _baton(objects: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any], str, Any]]:
    """Pod, container, role and settings of each program of Baton."""
    found = []
    for pod in _pods(objects):
        for container in pod["spec"]["containers"]:
            program, role, *arguments = _words(container)
            assert program == "baton"
            found.append((pod, container, role, _settings(role, arguments)))
    return found


def _settings(role: str, arguments: list[str]) -> Any:
    parser = CommandParser(prog=f"baton {role}")
    add_flags(parser, SETTINGS[role])
    flags: argparse.Namespace = parser.parse(arguments)
    return resolve(SETTINGS[role], flags, {})


@cache
def _require_valid(text: str, version: str) -> None:
    """Most overlays have most of their objects in common."""
    kubernetes_validate.validate(json.loads(text), version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_all_objects_are_valid(objects: list[dict[str, Any]], version: str) -> None:
    for each in objects:
        if each["kind"] not in (GROUPS, POOL):
            _require_valid(json.dumps(each), version)
    for pod in _pods(objects):
        template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": pod}
        _require_valid(json.dumps(template), version)


def test_a_field_that_does_not_exist_is_found(keys: Path) -> None:
    objects = overlay(KUBERNETES / "overlays" / "cpu-demo", keys)
    deployed = next(each for each in objects if each["kind"] == "StatefulSet")
    deployed["spec"]["template"]["spec"]["containers"][0]["lifecycle"] = {"preStop": {"nap": {"seconds": 1}}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployed, VERSIONS[-1], strict=True)


def test_every_command_is_one_of_baton(objects: list[dict[str, Any]]) -> None:
    roles = [role for _, _, role, _ in _baton(objects)]
    has_groups = any(each["kind"] == GROUPS for each in objects)
    assert roles == ["router", "prefill", "decode", *(["decode", "rank"] if has_groups else [])]
    for _, container, role, _ in _baton(objects):
        known = {ENVIRONMENT_PREFIX + field.name.upper() for field in dataclasses.fields(SETTINGS[role])}
        names = {variable["name"] for variable in container["env"]}
        assert {name for name in names if name.startswith(ENVIRONMENT_PREFIX)} <= known


def test_programs_listen_where_probes_and_services_ask(objects: list[dict[str, Any]]) -> None:
    for pod, container, role, settings in _baton(objects):
        if role == "rank":  # nobody asks it
            continue
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        listening = {"http": settings.port, "control": settings.control_port} if role == "router" else {}
        listening = listening or {"health": settings.http_port, "peers": settings.port, "ranks": settings.rank_port}
        assert {name: listening[name] for name in ports} == ports
        assert pod["metadata"]["annotations"]["prometheus.io/port"] == str(
            ports["http" if role == "router" else "health"]
        )
        for name in ("startupProbe", "livenessProbe", "readinessProbe"):
            asked = container[name].get("httpGet") or container[name]["tcpSocket"]
            assert asked["port"] in ports
            if role == "router":
                assert asked["path"] in LIFE_ROUTES  # those that need no API key
            else:
                assert asked.get("path", "/health") == "/health"
    services = {each["metadata"]["name"]: each for each in objects if each["kind"] == "Service"}
    for service in services.values():
        pods = [pod for pod in _pods(objects) if _selects(service["spec"]["selector"], pod)]
        assert pods
        names = {
            port["name"]
            for pod in pods
            for container in pod["spec"]["containers"]
            for port in container.get("ports", [])
        }
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names
    assert services["baton-control"]["spec"]["publishNotReadyAddresses"]


def test_a_node_answers_the_path_that_its_probes_ask_for() -> None:
    class Nothing:
        def collect(self) -> list[Any]:
            return []

    health = HealthServer("127.0.0.1", 0, Nothing())
    try:
        assert health.answer("/health")[0] == 503
        health.is_ready = True
        assert health.answer("/health")[0] == 200
    finally:
        health.close()


def test_nodes_dial_the_router_by_its_name_and_have_names_of_their_own(objects: list[dict[str, Any]]) -> None:
    sets = {each["metadata"]["name"]: each for each in objects if each["kind"] == "StatefulSet"}
    router = sets["baton-router"]
    assert router["spec"]["replicas"] == 1
    (_, _, _, listening), *nodes = _baton(objects)
    address = f"tcp://baton-router-0.{router['spec']['serviceName']}:{listening.control_port}"
    for _, _, role, settings in nodes:
        if role != "rank":
            assert (settings.router, settings.node_id, settings.host) == (address, "baton-decode-1", "10.1.2.3")


def test_a_pod_has_the_time_to_drain(objects: list[dict[str, Any]]) -> None:
    for pod, container, _, settings in _baton(objects):
        before = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        assert pod["spec"]["terminationGracePeriodSeconds"] >= before + settings.shutdown_timeout_s + 10


def test_a_pod_has_a_gpu_for_each_of_its_nodes(keys: Path) -> None:
    for name, num_engines in (("gpu", 1), ("data-parallel", 8)):
        *_, (_, container, role, settings) = _baton(overlay(KUBERNETES / "overlays" / name, keys))
        assert (role, settings.data_parallel_size) == ("decode", num_engines)
        assert container["resources"]["limits"]["nvidia.com/gpu"] == str(num_engines)


def test_a_group_of_pods_is_one_node_whose_ranks_find_its_driver(keys: Path) -> None:
    objects = overlay(KUBERNETES / "overlays" / "multi-host", keys)
    (group,) = (each for each in objects if each["kind"] == GROUPS)
    assert (group["apiVersion"], group["metadata"]["namespace"]) == ("leaderworkerset.x-k8s.io/v1", "baton")
    assert set(group["spec"]) == {"replicas", "leaderWorkerTemplate"}
    template = group["spec"]["leaderWorkerTemplate"]
    assert set(template) == {"size", "restartPolicy", "leaderTemplate", "workerTemplate"}
    assert template["restartPolicy"] == "None"
    *others, (_, _, _, leader), (_, _, _, worker) = _baton(objects)
    assert (template["size"], leader.num_ranks_here) == (leader.rank_machines, 1)
    assert (worker.driver, worker.host) == (f"{_LEADER}:{leader.rank_port}", leader.host)
    assert (worker.model, worker.shutdown_timeout_s) == (leader.model, leader.shutdown_timeout_s)
    # their blocks go to nodes with one pool, and back
    assert {settings.kv_checksum for _, _, role, settings in others if role != "router"} == {leader.kv_checksum}


def test_an_inference_pool_has_routers_as_endpoints_and_asks_them_for_vllms_metrics(keys: Path) -> None:
    objects = overlay(KUBERNETES / "overlays" / "inference-pool", keys)
    (pool,) = (each for each in objects if each["kind"] == POOL)
    jsonschema.validate(pool, POOL_SCHEMA)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**pool, "spec": {**pool["spec"], "targetPort": 8000}}, POOL_SCHEMA)
    assert (pool["apiVersion"], pool["metadata"]["namespace"]) == ("inference.networking.k8s.io/v1", "baton")
    assert pool["spec"]["endpointPickerRef"]["port"]  # which a Service has to have
    labels = pool["spec"]["selector"]["matchLabels"]
    (router,) = (found for found in _baton(objects) if _selects(labels, found[0]))
    _, _, role, settings = router
    assert (role, settings.metrics_aliases) == ("router", "vllm")
    assert pool["spec"]["targetPorts"] == [{"number": settings.port}]


def test_each_role_has_its_own_key_and_no_other(objects: list[dict[str, Any]], keys: Path) -> None:
    secrets = {each["metadata"]["name"]: each for each in objects if each["kind"] == "Secret"}
    for pod, container, role, settings in _baton(objects):
        path = Path(settings.cluster_key)
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        secret = secrets[volumes[mounts[str(path.parent)]]["secret"]["secretName"]]
        assert set(secret["data"]) == {path.name} == {f"{'decode' if role == 'rank' else role}.key"}
        assert KeyFile.read(keys / path.name).publics is not None


def test_nothing_runs_as_root_or_may_become_it(objects: list[dict[str, Any]]) -> None:
    for pod in _pods(objects):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert not spec["automountServiceAccountToken"]
        for container in spec["containers"]:
            context = container["securityContext"]
            assert not context["allowPrivilegeEscalation"]
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert {mount["name"] for mount in container["volumeMounts"]} <= {each["name"] for each in spec["volumes"]}


def test_budgets_and_network_policies_select_the_pods(objects: list[dict[str, Any]]) -> None:
    for each in objects:
        if each["kind"] == "PodDisruptionBudget":
            assert any(_selects(each["spec"]["selector"]["matchLabels"], pod) for pod in _pods(objects))
    policies = {each["metadata"]["name"]: each["spec"] for each in objects if each["kind"] == "NetworkPolicy"}
    (_, _, _, router), *_ = _baton(objects)
    opened = [rule["ports"][0]["port"] for rule in policies["baton-router"]["ingress"]]
    assert opened == [router.port, router.control_port]
    for name, roles in (("baton-router", {"router"}), ("baton-nodes", {"prefill", "decode"})):
        labels = [pod["metadata"]["labels"] for pod in _pods(objects) if _matches(policies[name]["podSelector"], pod)]
        assert {of_pod["app.kubernetes.io/component"] for of_pod in labels} == roles


def test_scaling_is_by_metrics_that_baton_has(keys: Path) -> None:
    rules = yaml.safe_load((KUBERNETES / "prometheus-adapter" / "values.yaml").read_text())["rules"]["external"]
    made = {rule["name"]["as"] for rule in rules}
    scalers = [each for each in overlay(KUBERNETES / "overlays" / "gpu", keys) if "metrics" in each.get("spec", {})]
    asked = {metric["external"]["metric"]["name"] for each in scalers for metric in each["spec"]["metrics"]}
    assert asked == made
    page = (ROOT / "docs" / "operations" / "metrics.md").read_text()
    for series in re.findall(r"baton:\w+", str(rules)):
        assert f"`{series.removesuffix('_bucket')}" in page
    targets = {(each["spec"]["scaleTargetRef"]["kind"], each["spec"]["scaleTargetRef"]["name"]) for each in scalers}
    assert targets == {("StatefulSet", "baton-prefill"), ("StatefulSet", "baton-decode")}


def test_the_router_of_the_demo_starts_with_the_command_of_its_manifest(keys: Path) -> None:
    container = containers_of(overlay(KUBERNETES / "overlays" / "cpu-demo", keys))[0]
    program, role, *arguments = _words(container)
    assert (program, role) == ("baton", "router")
    elsewhere = {"--port=8000": "--port=0", "--control-port=8001": "--control-port=0"}
    arguments = [elsewhere.get(word, word).replace("/etc/baton/cluster", str(keys)) for word in arguments]
    with Child("baton.router", *arguments, stdout=PIPE) as router:
        address = router.wait_ready(60.0).address.replace("0.0.0.0", "127.0.0.1")
        with urllib.request.urlopen(f"{address}{container['livenessProbe']['httpGet']['path']}", timeout=30) as answer:
            assert answer.status == 200


def _selects(labels: dict[str, str], pod: dict[str, Any]) -> bool:
    return bool(labels.items() <= pod["metadata"]["labels"].items())


def _matches(selector: dict[str, Any], pod: dict[str, Any]) -> bool:
    of_pod = pod["metadata"]["labels"]
    wanted = selector.get("matchExpressions", [])
    assert all(each["operator"] == "In" for each in wanted)
    labels: dict[str, str] = selector["matchLabels"]
    return _selects(labels, pod) and all(of_pod.get(each["key"]) in each["values"] for each in wanted)
