"""The shape of the house: which folder may import which, no cycles, nothing that decodes code from bytes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "wire",
    "program",
    "device",
    "engine",
    "kvtransfer",
    "node",
    "rank_node",
    "prefill_node",
    "decode_node",
    "mixed_node",
    "router",
    "launch",
    "baton",
    "demo",
    "bench",
)

MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "wire": ("wire",),
    "program": ("wire", "program"),
    "device": ("wire", "program", "device"),
    "engine.text": ("wire", "program", "engine.text"),
    "engine.cache": ("wire", "engine.cache"),
    "engine.scheduler": ("wire", "engine.cache", "engine.scheduler"),
    "engine.structured": ("wire", "engine.text", "engine.structured"),
    "engine": ("wire", "program", "device", "demo.location", "engine"),
    "kvtransfer": ("wire", "program", "device", "kvtransfer"),
    "node": ("wire", "program", "device", "engine", "node"),
    "rank_node": ("wire", "program", "engine", "kvtransfer", "rank_node"),
    "prefill_node": ("wire", "program", "engine", "kvtransfer", "node", "rank_node", "prefill_node"),
    "decode_node": ("wire", "program", "engine", "kvtransfer", "node", "rank_node", "decode_node"),
    "mixed_node": (
        "wire",
        "engine",
        "kvtransfer",
        "node",
        "rank_node",
        "prefill_node",
        "decode_node",
        "program",
        "mixed_node",
    ),
    "router.access": ("wire", "router.access"),
    "router.admission": ("wire", "router.access", "router.admission"),
    "router": ("wire", "program", "engine.text", "engine.cache.hashing", "engine.models", "router"),
    "launch": PACKAGES,
    "baton": ("wire", "engine", "launch", "baton"),
    "demo": ("demo",),
    "bench.plan": ("wire", "program", "engine", "router", "bench"),
    "bench.scale": ("wire", "program", "demo", "engine", "router", "bench"),
    "bench": ("wire", "program", "device", "demo", "engine", "kvtransfer", "node", "bench"),
}
TORCH_FREE = (
    "wire",
    "program",
    "device.pinning",
    "engine.text",
    "engine.cache",
    "engine.scheduler",
    "engine.settings",
    "engine.structured",
    "kvtransfer",
    "router",
    "bench",
)
NEEDS_TORCH = (
    "bench.limits.kernels_alone",
    "bench.plan.simulated_node",
    "engine.text.convert",
    "kvtransfer.pools.device",
    "kvtransfer.pools.device_checksums",
    "kvtransfer.transports.nccl",
)
"""Belongs to `bench.limits.engine_process`; has an engine core, without a model; runs in a child process of its own;
imported for pools in device memory; imported for `--kv-transport nccl`."""
OWN_PROCESS_SUFFIX = "_process"
"""A module of bench/ with this ending runs in a process of its own, which may need torch."""
WALL_CLOCK = {"time.time", "time.time_ns", "time.localtime", "time.gmtime", "datetime.now", "datetime.utcnow"}
TELLS_THE_TIME = {
    "bench.facts": "when a measurement was made",
    "bench.serve.command": "names of result files",
    "engine.text.chat_template": "templates that say what day it is",
    "launch.cluster.controller": "notes of changes",
    "launch.cluster.status": "notes of changes",
    "router.__main__": "since when a model is served",
    "router.access.audit": "when a request ended",
    "router.openai.endpoints": "when an answer was begun",
    "router.openai.responses_api": "when an answer was completed",
    "router.request_trace": "when a request came",
    "router.resume.logs": "journals that an earlier router left too long ago; only files know when that was",
}
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "marshal", "shelve", "cloudpickle"}
UNSAFE_CALLS = {"eval", "exec", "recv_pyobj", "send_pyobj"}


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _imports(tree: ast.Module) -> set[str]:
    """Modules a file imports, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


FILES = {_module(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}
TREES = {module: ast.parse(path.read_text()) for module, path in FILES.items()}
IMPORTS = {module: _imports(tree) for module, tree in TREES.items()}


def _within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_go_one_way(folder: str) -> None:
    inner = tuple(other for other in MAY_IMPORT if other != folder and other.startswith(f"{folder}."))
    for module, imported in IMPORTS.items():
        if _within(module, (folder,)) and not _within(module, inner):
            ours = {name for name in imported if name in FILES}
            assert {name for name in ours if not _within(name, MAY_IMPORT[folder])} == set(), module


def test_there_is_no_import_cycle() -> None:
    graph = {module: {name for name in imported if name in FILES} - {module} for module, imported in IMPORTS.items()}
    while leaves := {module for module, imported in graph.items() if not imported}:
        graph = {module: imported - leaves for module, imported in graph.items() if module not in leaves}
    assert set(graph) == set()


def test_what_starts_without_torch_names_it_nowhere() -> None:
    for module, imported in IMPORTS.items():
        runs_alone = _within(module, ("bench",)) and module.endswith(OWN_PROCESS_SUFFIX)
        if _within(module, TORCH_FREE) and not _within(module, NEEDS_TORCH) and not runs_alone:
            assert {name for name in imported if name.split(".")[0] in ("torch", "transformers")} == set(), module


def test_cuda_is_spoken_to_in_one_package() -> None:
    for module, tree in TREES.items():
        if _within(module, ("device", "bench")):  # benchmarks have stopwatches of their own
            continue
        for node in ast.walk(tree):
            assert not (isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda"), module


def test_durations_and_deadlines_know_no_wall_clock() -> None:
    """It may be set, by an hour or a second, at any time: it is read to tell people the time, and to decide nothing but
    whether a journal of an earlier router is too old."""
    readers = {
        module
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in WALL_CLOCK
    }
    assert readers == set(TELLS_THE_TIME)


@pytest.mark.parametrize(
    ("package", "only"),
    [
        ("flashinfer", "engine.attention.flashinfer"),
        ("triton", "engine.models.ops.triton_ops"),
        ("ray", "launch.cluster.ray_backend"),
    ],
)
def test_packages_that_may_be_missing_have_one_importer(package: str, only: str) -> None:
    importers = {
        module for module, imported in IMPORTS.items() if any(name.split(".")[0] == package for name in imported)
    }
    assert importers == {only}


def test_nothing_decodes_code_from_bytes() -> None:
    tests = {_module(path): ast.parse(path.read_text()) for path in sorted((ROOT / "tests").rglob("*.py"))}
    for module, tree in {**TREES, **tests}.items():
        assert not {name.split(".")[0] for name in _imports(tree)} & UNSAFE_MODULES, module
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
            owner = call.func.value if isinstance(call.func, ast.Attribute) else None
            is_torch_load = name == "load" and isinstance(owner, ast.Name) and owner.id in ("torch", "yaml")
            is_method = isinstance(call.func, ast.Attribute) and name in ("eval", "exec")
            assert not is_torch_load, module
            assert name not in UNSAFE_CALLS or is_method, module


def test_no_file_is_for_anything() -> None:
    for module in FILES:
        assert module.rsplit(".", 1)[-1] not in ("utils", "util", "misc", "helpers", "common"), module
