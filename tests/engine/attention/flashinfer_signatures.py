"""Compares the stand-in's signatures with flashinfer's source, without importing flashinfer.

`python -m tests.engine.attention.flashinfer_signatures FOLDER` looks at the package unpacked in FOLDER (the one that
holds `decode.py`), names every difference and ends with 1 if there is one.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

STAND_IN = Path(__file__).with_name("flashinfer_stand_in.py")
_DECODE, _PREFILL = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"
_PLACES = {
    _DECODE: "decode.py",
    _PREFILL: "prefill.py",
    "fast_decode_plan": "decode.py",
    "append_paged_kv_cache": "page.py",
}
_METHODS = ("__init__", "plan", "run", "reset_workspace_buffer")
_IMPLEMENTATIONS = {"plan": "_plan_impl"}
"""Where a method hands all its keywords on to, in newer versions."""


def differences(package: Path) -> Iterator[str]:
    """What the stand-in accepts and the flashinfer in `package` does not, or takes otherwise."""
    ours = ast.parse(STAND_IN.read_text())
    for name, file in _PLACES.items():
        theirs = ast.parse((package / file).read_text())
        if name[0].islower():
            yield from _compare(name, _function(ours, name), _function(theirs, name))
            continue
        for method in _METHODS:
            mine = _function(_class(ours, name), method) or _function(_class(ours, "_Wrapper"), method)
            real = _function(_class(theirs, name), method)
            if real is not None and real.args.kwarg is not None and method in _IMPLEMENTATIONS:
                real = _function(_class(theirs, name), _IMPLEMENTATIONS[method])
            yield from _compare(f"{name}.{method}", mine, real)


def _compare(name: str, mine: ast.FunctionDef | None, real: ast.FunctionDef | None) -> Iterator[str]:
    if mine is None or real is None:
        yield f"{name} exists {'there' if mine is None else 'here'} only"
        return
    leading = [argument.arg for argument in mine.args.args]
    found = [argument.arg for argument in real.args.args][: len(leading)]
    if leading != found:
        yield f"{name} takes {leading} here, {found} there"
    defaults, real_defaults = _defaults(mine), _defaults(real)
    for argument in (*mine.args.args, *mine.args.kwonlyargs):
        if argument.arg not in real_defaults:
            yield f"{name} has no argument {argument.arg} there"
        elif defaults[argument.arg] != real_defaults[argument.arg]:
            yield f"{name}: {argument.arg}={defaults[argument.arg]} here, {real_defaults[argument.arg]} there"


def _defaults(function: ast.FunctionDef) -> dict[str, str | None]:
    """Each argument's default as source, None where there is none."""
    named = function.args.args
    positional = [None] * (len(named) - len(function.args.defaults)) + list(function.args.defaults)
    pairs = [
        *zip(named, positional, strict=True),
        *zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True),
    ]
    return {argument.arg: ast.unparse(default) if default is not None else None for argument, default in pairs}


def _class(tree: ast.Module, name: str) -> ast.ClassDef:
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def _function(tree: ast.Module | ast.ClassDef, name: str) -> ast.FunctionDef | None:
    """The last definition of that name: those before it are overloads."""
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    return found[-1] if found else None


if __name__ == "__main__":
    found = list(differences(Path(sys.argv[1])))
    sys.stdout.write("".join(f"{difference}\n" for difference in found) or "no difference\n")
    sys.exit(bool(found))
