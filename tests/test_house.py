"""The shape of the house: which folder may import which, no cycles, nothing that decodes code from bytes."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import pytest

ROOT = Path(__file__).parent.parent
BATON = ROOT / "baton"
ROOMS = tuple(sorted(path.parent.name for path in BATON.glob("*/__init__.py")))
"""All that is imported as `baton.*`; the tables leave that name out."""
LINKED_ROOMS = ("bench", "decode_node", "kvtransfer", "prefill_node", "router")
"""They lie at the root, and as links in `baton/`."""
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "wire": ("wire",),
    "runtime": ("wire", "runtime"),
    "device": ("wire", "runtime", "device"),
    "engine.text": ("wire", "runtime", "engine.text"),
    "engine.cache": ("wire", "engine.cache"),
    "engine.scheduler": ("wire", "engine.cache", "engine.scheduler"),
    "engine.structured": ("wire", "engine.text", "engine.structured"),
    "engine": ("wire", "runtime", "device", "demo.location", "engine"),
    "kvtransfer": ("wire", "runtime", "device", "kvtransfer"),
    "ranks.executor": ("wire", "runtime", "device", "engine", "ranks.executor"),
    "ranks.machines": ("wire", "runtime", "engine.settings", "ranks.executor", "ranks.machines"),
    "ranks.transfer": ("wire", "runtime", "kvtransfer", "ranks.transfer"),
    "ranks": ("wire", "runtime", "engine", "kvtransfer", "ranks"),
    "offline": ("wire", "engine", "ranks.executor", "offline"),
    "node": ("wire", "runtime", "device", "engine", "kvtransfer", "ranks", "node"),
    "prefill_node": ("wire", "runtime", "engine", "kvtransfer", "node", "prefill_node"),
    "decode_node": ("wire", "runtime", "engine", "kvtransfer", "node", "decode_node"),
    "node.__main__": ("runtime", "node", "prefill_node", "decode_node"),
    "router.nodes": ("wire", "engine.cache.hashing", "router.nodes"),
    "router.routing": ("wire", "engine.cache.hashing", "router.nodes", "router.routing"),
    "router.requests": ("wire", "runtime", "engine.cache.hashing", "router.nodes", "router.routing", "router.requests"),
    "router.health": ("wire", "runtime", "router.nodes", "router.routing", "router.requests", "router.health"),
    "router.http.access": ("wire", "router.http.access"),
    "router.http.admission": ("wire", "router.http.access", "router.http.admission"),
    "router": ("wire", "runtime", "engine.text", "engine.cache.hashing", "engine.models", "router"),
    "testing": ("wire", "runtime", "device", "engine", "kvtransfer", "testing"),
    "launch": (*(room for room in ROOMS if room != "testing"), "demo.location"),
    "demo": ("demo",),
    "bench": ("wire", "runtime", "device", "demo", "engine", "kvtransfer", "ranks.executor", "bench"),
}
TORCH_FREE = (
    "wire",
    "runtime",
    "device.pinning",
    "engine.text",
    "engine.cache",
    "engine.scheduler",
    "engine.settings",
    "engine.structured",
    "kvtransfer",
    "ranks.machines",
    "ranks.transfer",
    "router",
    "bench",
)
NEEDS_TORCH = (
    "engine.text.convert",
    "kvtransfer.pools.device",
    "kvtransfer.pools.device_checksums",
    "kvtransfer.pools.device_cut",
    "kvtransfer.transports.nccl",
)
"""Runs in a child process of its own; imported for pools in device memory; imported for `--kv-transport nccl`."""
OWN_PROCESS_SUFFIX = "_process"
"""A module of bench/ with this ending runs in a process of its own, which may need torch."""
WALL_CLOCK = {"time.time", "time.time_ns", "time.localtime", "time.gmtime", "datetime.now", "datetime.utcnow"}
TELLS_THE_TIME = {
    "bench.facts": "when a measurement was made",
    "bench.serve.command": "names of result files",
    "engine.text.chat_template": "templates that say what day it is",
    "launch.cache": "how long ago files were used",
    "launch.cluster.controller": "notes of changes",
    "launch.cluster.status": "notes of changes",
    "node.kv_events.publisher": "when events were published",
    "router.__main__": "since when a model is served",
    "router.http.access.audit": "when a request ended",
    "router.http.openai.answer": "when an answer ended",
    "router.http.openai.endpoints": "when an answer was begun",
    "router.requests.trace": "when a request came",
    "router.http.stored.database": "stored responses that are too old, of an earlier life too; the same holds for them",
    "router.http.resume.logs": "journals that an earlier router left too long ago; only files know when that was",
}
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "marshal", "shelve", "cloudpickle"}
UNSAFE_CALLS = {"eval", "exec", "recv_pyobj", "send_pyobj", ".recv_pyobj", ".send_pyobj", "torch.load", "yaml.load"}


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__").removeprefix("baton.")


MAX_LINES, MAX_METHODS = 400, 25
LONG_FILES = {"demo.training.facts", "demo.training.stories"}
"""Texts that the demo model learns."""
LARGE_CLASSES = {"Flight", "RouterLink", "ControlLink", "NodeRegistry"}
"""docs/decisions/the_house.md says why."""
MAX_PARAMETERS = 7
LONG_SIGNATURES = {
    "engine.build._core": "all that an engine is built of meets here",
    "engine.build._runner": "all that a runner is built of meets here",
    "engine.core.__init__": "all that an engine is made of meets here",
    "engine.models.ops.triton_ops._add_norm": "a Triton kernel takes its pointers, strides and sizes one by one",
    "engine.models.ops.triton_ops._norm_rotate": "a Triton kernel takes its pointers, strides and sizes one by one",
    "engine.models.parts.linear.row_parallel": "names, shape and share of one matrix, as `column_parallel` has them",
    "runtime.settings.setting": "what a setting may say of itself, by name and nearly all left out",
    "engine.runner.graphs.__init__": "made of the runner's own members",
    "engine.runner.model_runner.__init__": "`RunnerArguments`, spelled out, and the passes that replace the usual one",
}
"""Of functions with more parameters, apart from `self` and `cls`: why they are not a value."""


_Definition: TypeAlias = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class Source:
    """Of one file: its lines; its classes with more methods than most, and its functions with more parameters; names
    whose docstring begins with "See"; the modules it imports, wherever in it; its attributes of names ("time.time");
    and what it calls, such as "eval", ".eval" for a method of anything, and "torch.load"."""

    num_lines: int
    large_classes: set[str] = field(default_factory=set)
    long_signatures: set[str] = field(default_factory=set)
    sent_elsewhere: set[str] = field(default_factory=set)
    imports: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    calls: set[str] = field(default_factory=set)

    @staticmethod
    def of(path: Path) -> Source:
        """Read a file."""
        text = path.read_text()
        source = Source(text.count("\n"))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                source.imports.update(alias.name.removeprefix("baton.") for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                module = node.module.removeprefix("baton.")
                source.imports.add(module)
                source.imports.update(f"{module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Attribute):
                source.attributes.update(_named(node))
            elif isinstance(node, ast.Call):
                source.calls.update(_named(node.func))
            elif isinstance(node, _DEFINITIONS):
                source._note_definition(node)
        return source

    def _note_definition(self, node: _Definition) -> None:
        if (ast.get_docstring(node) or "").startswith("See "):
            self.sent_elsewhere.add(node.name)
        if isinstance(node, ast.ClassDef):
            if _num_methods(node) > MAX_METHODS:
                self.large_classes.add(node.name)
        elif _num_parameters(node) > MAX_PARAMETERS:
            self.long_signatures.add(node.name)


def _num_methods(node: ast.ClassDef) -> int:
    return sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body)


def _num_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    every = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    return sum(each.arg not in ("self", "cls") for each in every)


def _named(node: ast.expr) -> set[str]:
    if isinstance(node, ast.Name):
        return {node.id}
    if not isinstance(node, ast.Attribute):
        return set()
    return {f".{node.attr}"} | ({f"{node.value.id}.{node.attr}"} if isinstance(node.value, ast.Name) else set())


def _sources(*folders: str) -> dict[str, Source]:
    paths = [path for folder in folders for path in sorted((BATON / folder).rglob("*.py"))]
    return {_module(path): Source.of(path) for path in paths}


@pytest.fixture(scope="module")
def sources() -> dict[str, Source]:
    """All modules of the product. Read when they are needed: every process that runs tests imports this module."""
    return _sources(*ROOMS) | {"baton": Source.of(BATON / "__init__.py")}


def _within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def test_everything_is_imported_below_one_name() -> None:
    """Another `engine.py` beside a user's script is nobody's business, and a room is never two modules."""
    assert {path.name for path in BATON.iterdir() if path.is_symlink()} == set(LINKED_ROOMS)
    pattern = re.compile(rf"^\s*(?:from|import) (?:{'|'.join(ROOMS)})\b", re.M)
    folders = (BATON, ROOT / "tests", *(ROOT / room for room in LINKED_ROOMS))
    files = [path for folder in folders for path in folder.rglob("*.py")]
    assert len(files) > 1000
    assert [str(path) for path in files if pattern.search(path.read_text())] == []


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_go_one_way(sources: dict[str, Source], folder: str) -> None:
    inner = tuple(other for other in MAY_IMPORT if other != folder and other.startswith(f"{folder}."))
    for module, source in sources.items():
        if _within(module, (folder,)) and not _within(module, inner):
            ours = {name for name in source.imports if name in sources}
            assert {name for name in ours if not _within(name, MAY_IMPORT[folder])} == set(), module


def test_there_is_no_import_cycle(sources: dict[str, Source]) -> None:
    graph = {module: {name for name in each.imports if name in sources} - {module} for module, each in sources.items()}
    while leaves := {module for module, imported in graph.items() if not imported}:
        graph = {module: imported - leaves for module, imported in graph.items() if module not in leaves}
    assert set(graph) == set()


def test_what_starts_without_torch_names_it_nowhere(sources: dict[str, Source]) -> None:
    for module, source in sources.items():
        runs_alone = _within(module, ("bench",)) and module.endswith(OWN_PROCESS_SUFFIX)
        if _within(module, TORCH_FREE) and not _within(module, NEEDS_TORCH) and not runs_alone:
            assert {name for name in source.imports if name.split(".")[0] in ("torch", "transformers")} == set(), module


def test_cuda_is_spoken_to_in_one_package(sources: dict[str, Source]) -> None:
    for module, source in sources.items():
        # benchmarks have stopwatches of their own
        assert "torch.cuda" not in source.attributes or _within(module, ("device", "bench")), module


def test_durations_and_deadlines_know_no_wall_clock(sources: dict[str, Source]) -> None:
    """It may be set, by an hour or a second, at any time: it is read to tell people the time, and to decide nothing but
    whether a journal or a stored response of an earlier router is too old."""
    readers = {module for module, source in sources.items() if source.attributes & WALL_CLOCK}
    assert readers == set(TELLS_THE_TIME)


@pytest.mark.parametrize(
    ("package", "only"),
    [
        ("flashinfer", ["engine.attention.flashinfer"]),
        ("pytest", ["testing", "testing.attention", "testing.transports.suite"]),
        ("triton", ["engine.models.ops.triton_ops"]),
        ("ray", ["launch.cluster.ray_backend", "launch.cluster.ray_places"]),
    ],
)
def test_packages_that_may_be_missing_have_known_importers(
    sources: dict[str, Source], package: str, only: list[str]
) -> None:
    importers = {
        module for module, each in sources.items() if any(name.split(".")[0] == package for name in each.imports)
    }
    assert importers == set(only)


def test_the_router_starts_no_thread_when_work_comes(sources: dict[str, Source]) -> None:
    """Where memory is missing, the event loop would wait for the thread for ever: see `baton.runtime.threads`."""
    pools = {module for module, each in sources.items() if "concurrent.futures.ThreadPoolExecutor" in each.imports}
    assert not {module for module in pools if _within(module, ("router",))}
    assert "set_default_executor" in {name.lstrip(".") for name in sources["router.__main__"].calls}
    assert "model.prompts.start()" in (BATON / "router" / "__main__.py").read_text()


def test_nothing_decodes_code_from_bytes(sources: dict[str, Source]) -> None:
    names = {name.rsplit(".", 1)[-1] for name in UNSAFE_MODULES | UNSAFE_CALLS}
    suspects = [path for path in (ROOT / "tests").rglob("*.py") if names & set(re.findall(r"\w+", path.read_text()))]
    for module, source in {**sources, **{_module(path): Source.of(path) for path in suspects}}.items():
        assert not {name.split(".")[0] for name in source.imports} & UNSAFE_MODULES, module
        assert not source.calls & UNSAFE_CALLS, module


def test_no_file_is_for_anything(sources: dict[str, Source]) -> None:
    for module in sources:
        assert module.rsplit(".", 1)[-1] not in ("utils", "util", "misc", "helpers", "common"), module


def test_files_and_classes_have_a_size_that_can_be_read(sources: dict[str, Source]) -> None:
    assert {module for module, source in sources.items() if source.num_lines > MAX_LINES} == LONG_FILES
    assert {name for source in sources.values() for name in source.large_classes} == LARGE_CLASSES


def test_a_function_with_many_parameters_has_its_reason(sources: dict[str, Source]) -> None:
    """What belongs together is a value with a name. The table says why these few are none."""
    found = {f"{module}.{name}" for module, source in sources.items() for name in source.long_signatures}
    assert found == set(LONG_SIGNATURES)
    assert {name for name, reason in LONG_SIGNATURES.items() if len(reason.split()) < 5} == set()


def test_a_docstring_says_what_it_is_about(sources: dict[str, Source]) -> None:
    """A stranger reads one file: a sentence there says what a method does in it, and not only in its interface."""
    for module, source in sources.items():
        assert source.sent_elsewhere == set(), module


def test_every_large_class_has_its_reason() -> None:
    page = (ROOT / "docs/decisions/the_house.md").read_text()
    (reason,) = re.findall(r"### Four classes have more than 25 methods\n(.*?)(?=\n### |\Z)", page, re.DOTALL)
    assert {name for name in LARGE_CLASSES if f"`{name}`" not in reason} == set()
