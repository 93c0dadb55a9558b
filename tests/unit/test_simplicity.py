"""The laws of simplicity that can be counted: how long a story is, and what its modules look like.

A ceiling only goes down. One that a change would break says that a story has become longer: look for a shorter way to
tell it first. A new format, backend or command raises `MOST_TOKENS` by what its own files have, in the same commit.
"""

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import statexchange

PACKAGE = Path(statexchange.__file__).parent
MOST_IMPORTS = 14
MOST_CODE_LINES = 600
MOST_LINES_OF_A_FUNCTION = 50
MOST_PARAMETERS = 8
MOST_LINES_OF_TESTS = 500
# Of the whole package. Tokens count what code says, however it is folded, and docstrings as one each; the others are
# counted per 1,000 lines: comments on lines of their own, ternaries and comprehensions, and uses of `Any`.
MOST_TOKENS = 411_000
LEAST_REASONS, MOST_DENSE, MOST_ANY = 31.5, 24.0, 7.0
STORY_PACKAGES = ("state", "exchange")


class Walk(NamedTuple):
    """What a call makes on one rank, for a module of one layer with AdamW's moments.

    Attributes:
        modules: the modules of the package that are entered.
        calls: the calls of functions of the package.
        each: the calls that each further parameter adds.
        climbs: the pairs of modules between which a call goes to one that stands above the caller.
    """

    modules: int
    calls: int
    each: int
    climbs: int


CEILINGS = {
    "load": Walk(25, 617, 47, 0),
    "save": Walk(25, 512, 35, 2),
    "export": Walk(25, 417, 24, 0),
    "merge": Walk(25, 634, 56, 0),
    "synchronize": Walk(12, 232, 33, 1),
}

# Run by a fresh interpreter, so that neither pytest's plugins nor plans that are remembered count.
PROGRAM = """
import collections, json, pathlib, sys, tempfile, threading
import torch
import statexchange as sx

package = str(pathlib.Path(sx.__file__).parent) + "/"

def job(layers, width=8):
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, width)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "step": 3}

def prepared(story, state, path):
    if story == "export":
        return lambda: sx.export_checkpoint(state["model"], path)
    if story == "save":
        return lambda: sx.save_checkpoint(state, path)
    if story == "synchronize":
        return lambda: sx.synchronize(state)
    sx.save_checkpoint(state, path)
    if story == "load":
        return lambda: sx.load_checkpoint(state, path)
    return lambda: sx.merge_checkpoint(path, path + "-merged")

class Trace:
    def __init__(self):
        self.calls = 0
        self.pairs = set()
        self.modules = set()
        self.stacks = threading.local()

    def __call__(self, frame, event, argument):
        name = frame.f_code.co_filename
        if event not in ("call", "return") or not name.startswith(package):
            return
        stack = self.stacks.__dict__.setdefault("stack", [])
        if event == "return":
            if stack:
                stack.pop()
            return
        name = name.removeprefix(package)
        if stack and stack[-1] != name:
            self.pairs.add((stack[-1], name))
        self.calls += 1
        self.modules.add(name)
        stack.append(name)

def traced(story, layers, folder):
    prepared(story, job(3, 4), f"{folder}/first")()  # imports do not count
    run = prepared(story, job(layers), f"{folder}/then")
    trace = Trace()
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return {"calls": trace.calls, "modules": sorted(trace.modules), "pairs": sorted(trace.pairs)}

with tempfile.TemporaryDirectory() as few, tempfile.TemporaryDirectory() as many:
    print(json.dumps([traced(sys.argv[1], 1, few), traced(sys.argv[1], 8, many)]))
"""


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports_of(path: Path) -> set[str]:
    """The modules of the package that a module imports, by their paths in it, at any depth of its code."""
    names = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("statexchange."):
            names.add(node.module.removeprefix("statexchange.").replace(".", "/") + ".py")
    return names


@cache
def floor_of(name: str) -> int:
    """How high a module stands: one above the highest of those that it imports."""
    path = PACKAGE / name
    if not path.exists():  # a package's own names
        return 0
    return 1 + max((floor_of(other) for other in imports_of(path) if other != name), default=0)


@pytest.mark.parametrize("story", CEILINGS)
def test_a_story_is_not_longer_than_it_was(story: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, story], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    few, many = json.loads(done.stdout.splitlines()[-1])
    climbs = [(caller, callee) for caller, callee in few["pairs"] if floor_of(callee) > floor_of(caller)]
    each = round((many["calls"] - few["calls"]) / 14)  # 8 layers of a weight and a bias, against one
    walk, ceiling = Walk(len(few["modules"]), few["calls"], each, len(climbs)), CEILINGS[story]
    longer = [name for name, count, most in zip(Walk._fields, walk, ceiling, strict=True) if count > most]
    assert not longer, f"{story}: {walk}, at most {ceiling}; it enters {few['modules']} and climbs {climbs}"


def modules_of_stories() -> list[str]:
    paths = [path for package in STORY_PACKAGES for path in sorted((PACKAGE / package).glob("*.py"))]
    return [path.relative_to(PACKAGE).as_posix() for path in paths]


def num_code_lines(path: Path) -> int:
    """Return the number of lines that have code: no comments, no docstrings, no blank lines."""
    docstrings = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    no_code = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type not in no_code:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


@pytest.mark.parametrize("name", modules_of_stories())
def test_a_module_of_a_story_is_small(name: str) -> None:
    path = PACKAGE / name
    assert len(imports_of(path)) <= MOST_IMPORTS
    assert num_code_lines(path) <= MOST_CODE_LINES
    doors: set[int] = set()  # methods of public classes
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ClassDef) and node.name in statexchange.__all__:
            doors.update(id(inner) for inner in node.body)
        if not isinstance(node, ast.FunctionDef):
            continue
        body = node.body[0]
        begin = body.lineno
        if ast.get_docstring(node) is not None:
            begin = (body.end_lineno or begin) + 1
        assert (node.end_lineno or begin) - begin < MOST_LINES_OF_A_FUNCTION, f"{node.name} is long"
        parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        is_door = node.name in statexchange.__all__ or id(node) in doors
        assert len(parameters) <= MOST_PARAMETERS or is_door, f"{node.name} has many parameters"


def test_the_package_keeps_its_size_and_its_reasons() -> None:
    num_tokens = num_lines = 0
    counts = {"reasons": 0, "dense": 0, "Any": 0}
    layout = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        lines = text.splitlines()
        num_lines += len(lines)
        counts["Any"] += len(re.findall(r"\bAny\b", text))
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type != tokenize.COMMENT:
                num_tokens += token.type not in layout
            elif lines[token.start[0] - 1].lstrip().startswith("#"):
                counts["reasons"] += re.search(r"noqa|pragma|type: ignore", token.string) is None
        for node in ast.walk(ast.parse(text)):
            counts["dense"] += isinstance(
                node, ast.IfExp | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
            )
    assert num_tokens <= MOST_TOKENS, f"{num_tokens} tokens, at most {MOST_TOKENS}: see the top of this file"
    per_1000 = {name: round(1000 * count / num_lines, 1) for name, count in counts.items()}
    assert per_1000["reasons"] >= LEAST_REASONS, per_1000
    assert per_1000["dense"] <= MOST_DENSE, per_1000
    assert per_1000["Any"] <= MOST_ANY, per_1000


def test_a_file_of_tests_answers_one_question_in_few_lines() -> None:
    tests = Path(__file__).parents[1]
    lengths = {path.relative_to(tests).as_posix(): len(path.read_text().splitlines()) for path in tests.rglob("*.py")}
    longer = {name: length for name, length in lengths.items() if length > MOST_LINES_OF_TESTS}
    assert not longer, f"split them by the questions that they answer: {longer}"
