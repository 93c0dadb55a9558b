"""Tests match an error by its class, its attributes and a key word: half a sentence would break at each rewording.

The full text of messages stands in the golden files alone.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
MAX_WORDS = 4  # of a pattern; a name with dots, a path or an option counts as one
SYNTAX = re.compile(r"\(\?[a-zA-Z]+\)|\\[bBdDsSwWAZ]|(?<!\\)\.[*+]\??")  # what of a regex is no text
WORD = re.compile(r"[^\W\d][\w.:=/\[\]-]*")

Scopes = list[ast.AST]  # the functions around a node, the innermost first, then the module


def num_words(pattern: str) -> int:
    return len(WORD.findall(re.sub(r"\\(.)", r"\1", SYNTAX.sub(" ", pattern))))


def calls(node: ast.AST, scopes: Scopes) -> Iterator[tuple[ast.Call, Scopes]]:
    """Yield the calls in a tree, each with the scopes around it."""
    if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef):
        scopes = [node, *scopes]
    if isinstance(node, ast.Call):
        yield node, scopes
    for child in ast.iter_child_nodes(node):
        yield from calls(child, scopes)


def patterns(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines and texts that a file's tests pass as `match`, themselves or by a helper that passes it on."""
    if "match=" not in text:
        return
    module = ast.parse(text)
    in_file = list(calls(module, []))
    for call, scopes in in_file:
        for pattern in (keyword.value for keyword in call.keywords if keyword.arg == "match"):
            yield from texts(pattern, scopes)
            helper = scopes[0]
            if isinstance(pattern, ast.Name) and isinstance(helper, ast.FunctionDef):
                names = [argument.arg for argument in helper.args.args]
                for use, around in in_file:
                    if isinstance(use.func, ast.Name) and use.func.id == helper.name:
                        for argument in column(names, pattern.id, use):
                            yield from texts(argument, around)


def texts(node: ast.AST, scopes: Scopes) -> Iterator[tuple[int, str]]:
    """Yield the lines and literal texts that an expression of a pattern may have."""
    match node:
        case ast.Constant(value=str(text)):
            yield node.lineno, text
        case ast.JoinedStr():
            parts = [part.value if isinstance(part, ast.Constant) else 0 for part in node.values]
            yield node.lineno, "".join(map(str, parts))
        case ast.BinOp() | ast.IfExp() | ast.Call(func=ast.Attribute(attr="escape")):
            for child in ast.iter_child_nodes(node):
                yield from texts(child, scopes)
        case ast.Name(id=name):
            for scope in scopes:
                values = [value for value in values_of(name, scope, scopes) if not isinstance(value, ast.Name)]
                for value in values:
                    yield from texts(value, scopes)
                if values:
                    break


def values_of(name: str, scope: ast.AST, scopes: Scopes) -> Iterator[ast.AST]:
    """Yield the expressions that a name gets in a scope: by assignments, loops or pytest.mark.parametrize."""
    for node in nodes_of(scope):
        match node:
            case ast.Assign(targets=[target], value=value) | ast.NamedExpr(target=target, value=value):
                yield from bound(name, target, value, scopes)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                yield from bound(name, target, value, scopes)
            case ast.For(target=target, iter=rows) | ast.comprehension(target=target, iter=rows):
                for row in rows_of(rows, scopes):
                    yield from bound(name, target, row, scopes)
            case ast.Call(func=ast.Attribute(attr="parametrize"), args=[ast.Constant(value=single), table, *_]):
                if single == name:
                    yield from rows_of(table, scopes)
            case ast.Call(func=ast.Attribute(attr="parametrize"), args=[ast.Tuple(elts=items), table, *_]):
                names = [str(getattr(item, "value", "")) for item in items]
                for row in rows_of(table, scopes):
                    yield from column(names, name, row)


@functools.cache
def nodes_of(scope: ast.AST) -> list[ast.AST]:
    """Return the nodes of a scope; those of a module without its functions."""
    if isinstance(scope, ast.Module):
        return [node for node in scope.body if not isinstance(node, ast.FunctionDef)]
    return list(ast.walk(scope))


def bound(name: str, target: ast.AST, value: ast.AST, scopes: Scopes) -> Iterator[ast.AST]:
    """Yield what a name gets where `target` is assigned `value`."""
    if isinstance(target, ast.Name) and target.id == name:
        yield value
    elif isinstance(target, ast.Tuple):
        names = [item.id if isinstance(item, ast.Name) else "" for item in target.elts]
        # A row of a table, as in `error, text = TABLE[case]`, may be any of them.
        rows = rows_of(value.value, scopes) if isinstance(value, ast.Subscript) else [value]
        for row in rows:
            yield from column(names, name, row)


def column(names: list[str], name: str, row: ast.AST) -> Iterator[ast.AST]:
    if name in names:
        items = row.args if isinstance(row, ast.Call) else getattr(row, "elts", [])  # pytest.param, or a tuple
        yield from items[names.index(name) : names.index(name) + 1]


def rows_of(table: ast.AST, scopes: Scopes) -> list[ast.AST]:
    """Return the rows of a table: a list, tuple or mapping, itself or by its name in one of the scopes."""
    match table:
        case ast.List(elts=rows) | ast.Tuple(elts=rows) | ast.Set(elts=rows):
            return list(rows)
        case ast.Dict(values=rows):
            return list(rows)
        case ast.Call(func=ast.Attribute(value=inner)):  # table.values()
            return rows_of(inner, scopes)
        case ast.Name(id=name):
            for node in (node for scope in scopes for node in nodes_of(scope)):
                target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
                if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(target, ast.Name) and target.id == name:
                    return rows_of(node.value, scopes) if node.value is not None else []
    return []


def test_an_error_is_matched_by_a_key_word() -> None:
    long = [
        f"{path.relative_to(TESTS)}:{line}: {pattern}"
        for path in sorted(TESTS.rglob("*.py"))
        if path.name != Path(__file__).name
        for line, pattern in sorted(set(patterns(path.read_text())))
        if num_words(pattern) > MAX_WORDS
    ]
    assert long == []


@pytest.mark.parametrize(
    "source",
    [
        "raises(E, match={!r})",
        "raises(E, match=f{!r})",
        "def test():\n    text = {!r}\n    raises(E, match=re.escape(text))",
        "@pytest.mark.parametrize(('a', 'text'), [(1, {!r})])\ndef test(a, text):\n    raises(E, match=text)",
        "T = {{'a': (1, {!r})}}\ndef test(a):\n    kind, text = T[a]\n    raises(E, match=text)",
        "def test():\n    for a, text in [(1, {!r})]:\n        raises(E, match=text)",
        "def refuse(error, text):\n    raises(error, match=text)\nrefuse(E, {!r})",
    ],
)
def test_a_pattern_is_found_wherever_it_stands(source: str) -> None:
    sentence = r"cannot write a file .* there: it is \w+ large"
    assert [pattern for _, pattern in patterns(source.format(sentence))] == [sentence]
    assert num_words(sentence) == 8
    assert num_words(r"missing.*\bmodel\.w;.*--strict \[1, 2\]") == 3
