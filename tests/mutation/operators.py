"""What can be changed in a source text: its mutants, each one small change at one place.

Owns the operators, and what is left alone because a test of it would say nothing: texts for people (docstrings,
messages of errors, f-strings, log lines), annotations, decorators, imports. Knows no tests and no files.

Invariants: a mutant compiles; it differs from the source, and from every other mutant of it; the rest of the text stays
as it is, so that a diff shows the change alone.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

_NEGATED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_BOUNDARY: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
}
_OTHER_FUNCTION = {"min": "max", "max": "min", "any": "all", "all": "any"}
_LOG = ("_log", "_logger", "logging")
_FACTOR_OF_LIMITS = 1000
_NUMBERS = (ast.Constant, ast.BinOp, ast.operator, ast.UnaryOp, ast.unaryop)

Change = tuple[str, ast.AST, str]
"""The operator, the node that is replaced, and the text in its place."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """`text` instead of the bytes from `start` to `end` of a source; `line`: where that is, counted from 1."""

    line: int
    operator: str
    start: int
    end: int
    text: str

    def applied_to(self, source: bytes) -> bytes:
        """The source with the change."""
        return source[: self.start] + self.text.encode() + source[self.end :]

    def undone(self, source: bytes) -> Mutant:
        """A control: the same place, and no change."""
        return replace(self, operator="control", text=source[self.start : self.end].decode())

    def lines_of(self, source: bytes) -> tuple[str, str]:
        """The lines that change, before and after, without the space around them."""
        begin, end = source.rfind(b"\n", 0, self.start) + 1, source.find(b"\n", self.end)
        before = source[begin : end if end >= 0 else None]
        after = source[begin : self.start] + self.text.encode() + source[self.end : end if end >= 0 else None]
        return before.decode().strip(), after.decode().strip()


def mutants_of(source: bytes) -> list[Mutant]:
    """All mutants of a module, in the order of its lines."""
    starts = [0, *accumulate(map(len, source.splitlines(keepends=True)))]
    found: dict[tuple[int, int, str], Mutant] = {}
    for operator, node, text in _changes_of_module(ast.parse(source)):
        start = starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]  # each node here has a place
        end = starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        mutant = Mutant(node.lineno, operator, start, end, text)  # type: ignore[attr-defined]
        if source[start:end].decode() != text and _compiles(mutant.applied_to(source)):
            found.setdefault((start, end, text), mutant)
    return sorted(found.values(), key=lambda each: (each.start, each.end, each.text))


def _compiles(source: bytes) -> bool:
    try:
        compile(source, "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


def _changes_of_module(module: ast.Module) -> Iterator[Change]:
    for statement in _without_docstring(module.body):
        limit = _limit_in(statement)
        if limit is None:
            yield from _changes_within(statement, in_constructor=False)
        else:
            yield "limit is none", limit, f"{_text(limit)} * {_FACTOR_OF_LIMITS}"
            yield "limit is zero", limit, "0"


def _limit_in(statement: ast.stmt) -> ast.expr | None:
    """The number that a constant at the top of a module stands for. Which one it is, is a choice; that there is a limit
    is not."""
    match statement:
        case ast.Assign(targets=[ast.Name()], value=value) if all(
            isinstance(each, _NUMBERS) for each in ast.walk(value)
        ):
            return value if any(_is_number(each) for each in ast.walk(value)) else None
        case _:
            return None


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def _changes_within(node: ast.AST, *, in_constructor: bool) -> Iterator[Change]:
    if isinstance(node, ast.FunctionDef):
        in_constructor = node.name in ("__init__", "__post_init__")
    if _says_nothing(node):
        return
    for type_of_node, operator in _OPERATORS:
        if isinstance(node, type_of_node) and not (in_constructor and operator is _removed):
            yield from operator(node)
    for child in _children(node):
        yield from _changes_within(child, in_constructor=in_constructor)


def _children(node: ast.AST) -> Iterable[ast.AST]:
    """The parts in which a change would mean something."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            defaults = [*node.args.defaults, *(each for each in node.args.kw_defaults if each is not None)]
            return [*defaults, *_without_docstring(node.body)]
        case ast.ClassDef():
            return _without_docstring(node.body)
        case ast.AnnAssign():
            return [] if node.value is None else [node.value]
        case ast.Call():
            # `strict` is an assertion about what `zip` is given
            return [
                each
                for each in ast.iter_child_nodes(node)
                if not (isinstance(each, ast.keyword) and each.arg == "strict")
            ]
        case ast.JoinedStr() | ast.Raise() | ast.Import() | ast.ImportFrom():
            return []
        case _:
            return ast.iter_child_nodes(node)


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    """Texts that stand behind a constant or a field are docstrings too."""
    return [each for each in body if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))]


def _says_nothing(node: ast.AST) -> bool:
    """Log lines, and what only type checkers read."""
    match node:
        case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.AnnAssign(annotation=ast.Name(id="TypeAlias")):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
            return name in _LOG
        case _:
            return False


def _text(expression: ast.AST) -> str:
    return f"({ast.unparse(expression)})"


def _with(node: ast.AST, **changed: object) -> ast.AST:
    other = copy.copy(node)
    for name, value in changed.items():
        setattr(other, name, value)
    return other


def _replaced(items: list[ast.expr], place: int, item: ast.expr) -> list[ast.expr]:
    return [*items[:place], item, *items[place + 1 :]]


def _compare(node: ast.Compare) -> Iterator[Change]:
    for place, operator in enumerate(node.ops):
        for name, others in (("comparison negated", _NEGATED), ("boundary moved", _BOUNDARY)):
            if type(operator) in others:
                ops = [*node.ops[:place], others[type(operator)](), *node.ops[place + 1 :]]
                yield name, node, _text(_with(node, ops=ops))


def _arithmetic(node: ast.BinOp) -> Iterator[Change]:
    is_text = any(isinstance(each, ast.JoinedStr) or _is_string(each) for each in (node.left, node.right))
    if type(node.op) in _ARITHMETIC and not is_text:
        yield "arithmetic", node, _text(_with(node, op=_ARITHMETIC[type(node.op)]()))


def _is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def _augmented(node: ast.AugAssign) -> Iterator[Change]:
    if type(node.op) in _ARITHMETIC:
        yield "arithmetic", node, ast.unparse(_with(node, op=_ARITHMETIC[type(node.op)]()))


def _boolean(node: ast.BoolOp) -> Iterator[Change]:
    yield "and, or", node, _text(_with(node, op=ast.And() if isinstance(node.op, ast.Or) else ast.Or()))
    for place, value in enumerate(node.values):
        rest = [*node.values[:place], *node.values[place + 1 :]]
        left = rest[0] if len(rest) == 1 else _with(node, values=rest)
        if not isinstance(value, ast.NamedExpr):
            yield "part of a condition removed", node, _text(left)


def _unary(node: ast.UnaryOp) -> Iterator[Change]:
    if isinstance(node.op, ast.Not | ast.USub | ast.Invert):
        yield "operator removed", node, _text(node.operand)


def _condition(node: ast.If | ast.While | ast.IfExp) -> Iterator[Change]:
    yield from _negated(node.test)


def _filter(node: ast.comprehension) -> Iterator[Change]:
    for condition in node.ifs:
        yield from _negated(condition)


def _negated(test: ast.expr) -> Iterator[Change]:
    """Negated, if no other operator does the same."""
    if not (isinstance(test, ast.Compare) and len(test.ops) == 1) and not isinstance(test, ast.UnaryOp):
        yield "condition negated", test, f"(not {_text(test)})"


def _constant(node: ast.Constant) -> Iterator[Change]:
    if isinstance(node.value, bool):
        yield "constant", node, str(not node.value)
    elif isinstance(node.value, int):
        yield "constant", node, str(node.value + 1)
        yield "constant", node, _text(ast.Constant(node.value - 1))
    elif isinstance(node.value, float):
        yield "constant", node, str(node.value * 2 if node.value else 1.0)


def _slice(node: ast.Slice) -> Iterator[Change]:
    for bound in ("lower", "upper"):
        if getattr(node, bound) is not None:
            yield "bound removed", node, ast.unparse(_with(node, **{bound: None}))


def _call(node: ast.Call) -> Iterator[Change]:
    if isinstance(node.func, ast.Name) and node.func.id in _OTHER_FUNCTION:
        yield "min, max, any, all", node.func, _OTHER_FUNCTION[node.func.id]
        return  # their arguments have no order
    for place, (one, other) in enumerate(zip(node.args, node.args[1:], strict=False)):
        if not isinstance(one, ast.Starred) and not isinstance(other, ast.Starred):
            swapped = _replaced(_replaced(node.args, place, other), place + 1, one)
            yield "arguments swapped", node, _text(_with(node, args=swapped))
            return


def _return(node: ast.Return) -> Iterator[Change]:
    if node.value is None:
        yield "return removed", node, "pass"
    elif not (isinstance(node.value, ast.Constant) and node.value.value is None):
        yield "returns None", node, "return None"


def _jump(node: ast.Break | ast.Continue) -> Iterator[Change]:
    yield "break, continue", node, "continue" if isinstance(node, ast.Break) else "break"


def _removed(node: ast.stmt) -> Iterator[Change]:
    match node:
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Delete() | ast.Raise():
            yield "statement removed", node, "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            yield "statement removed", node, "pass"
        case _:
            pass


_OPERATORS: list[tuple[type[ast.AST] | tuple[type[ast.AST], ...], Callable[..., Iterator[Change]]]] = [
    (ast.Compare, _compare),
    (ast.BinOp, _arithmetic),
    (ast.AugAssign, _augmented),
    (ast.BoolOp, _boolean),
    (ast.UnaryOp, _unary),
    ((ast.If, ast.While, ast.IfExp), _condition),
    (ast.comprehension, _filter),
    (ast.Constant, _constant),
    (ast.Slice, _slice),
    (ast.Call, _call),
    (ast.Return, _return),
    ((ast.Break, ast.Continue), _jump),
    (ast.stmt, _removed),
]
