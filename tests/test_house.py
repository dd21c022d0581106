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
    "prefill_node",
    "decode_node",
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
    "engine": ("wire", "program", "device", "demo.location", "engine"),
    "kvtransfer": ("wire", "program", "device", "kvtransfer"),
    "node": ("wire", "program", "device", "engine", "node"),
    "prefill_node": ("wire", "program", "engine", "kvtransfer", "node", "prefill_node"),
    "decode_node": ("wire", "program", "engine", "kvtransfer", "node", "decode_node"),
    "router": ("wire", "program", "engine.text", "engine.cache.hashing", "engine.models", "router"),
    "launch": PACKAGES,
    "baton": ("wire", "engine", "launch", "baton"),
    "demo": ("demo",),
    "bench": ("wire", "program", "device", "demo", "engine", "kvtransfer", "node", "bench"),
}
TORCH_FREE = (
    "wire",
    "program",
    "engine.text",
    "engine.cache",
    "engine.scheduler",
    "engine.settings",
    "kvtransfer",
    "router",
    "bench",
)
OWN_PROCESS_SUFFIX = "_process"
"""A module of bench/ with this ending runs in a process of its own, which may need torch."""
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "marshal", "shelve", "cloudpickle"}
UNSAFE_CALLS = {"eval", "exec", "recv_pyobj", "send_pyobj"}


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _imports(path: Path) -> set[str]:
    """Modules a file imports, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


FILES = {_module(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}
IMPORTS = {module: _imports(path) for module, path in FILES.items()}


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
    # the first runs in a child process of its own, the next are imported for pools in device memory, the others when
    # `--kv-transport nccl` asks for them
    exempt = {"engine.text.convert"} | {
        f"kvtransfer.{name}"
        for name in (
            "device_pool",
            "device_queue",
            "device_checksums",
            "transports.nixl.cuda",
            "transports.nccl.transport",
            "transports.nccl.pair_blocks",
            "transports.nccl.pair_group",
            "transports.nccl.pair_threads",
        )
    }
    for module, imported in IMPORTS.items():
        runs_alone = _within(module, ("bench",)) and module.endswith(OWN_PROCESS_SUFFIX)
        if _within(module, TORCH_FREE) and module not in exempt and not runs_alone:
            assert {name for name in imported if name.split(".")[0] in ("torch", "transformers")} == set(), module


@pytest.mark.parametrize(
    ("package", "only"), [("flashinfer", "engine.attention.flashinfer"), ("triton", "engine.models.triton_ops")]
)
def test_packages_for_gpus_have_one_importer(package: str, only: str) -> None:
    importers = {
        module for module, imported in IMPORTS.items() if any(name.split(".")[0] == package for name in imported)
    }
    assert importers == {only}


def test_nothing_decodes_code_from_bytes() -> None:
    everything = [*FILES.values(), *sorted((ROOT / "tests").rglob("*.py"))]
    for path in everything:
        tree = ast.parse(path.read_text())
        assert not {name.split(".")[0] for name in _imports(path)} & UNSAFE_MODULES, path
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
            owner = call.func.value if isinstance(call.func, ast.Attribute) else None
            is_torch_load = name == "load" and isinstance(owner, ast.Name) and owner.id in ("torch", "yaml")
            is_method = isinstance(call.func, ast.Attribute) and name in ("eval", "exec")
            assert not is_torch_load, path
            assert name not in UNSAFE_CALLS or is_method, path


def test_no_file_is_for_anything() -> None:
    for module in FILES:
        assert module.rsplit(".", 1)[-1] not in ("utils", "util", "misc", "helpers", "common"), module
