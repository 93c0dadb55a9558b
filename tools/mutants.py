"""Change modules in one place at a time, and print which changes the tests notice.

    python tools/mutants.py tests/unit/test_values.py -m statexchange/values.py --count 20

A mutant is one small change of the source: the opposite comparison, a constant plus one, a negated condition, `and` for
`or`, a statement that is left out. Each is made in a copy of the checkout, in which the tests then run until one fails.
A mutant that no test notices survives: no check holds that line. The sample depends on `--seed` alone. With
`--list FILE` the mutants are read from FILE, or written to it if it does not exist: so two sets of tests are compared
on the same mutants.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
IMPORTED = (
    "numpy",
    "safetensors.torch",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "transformers",
)
DROPPED = (ast.Expr, ast.Assign, ast.AugAssign, ast.Raise, ast.Delete, ast.Continue, ast.Break)


class Mutant(NamedTuple):
    """Text of a module that other text takes the place of; `line` begins at 1, `column` counts bytes from 0."""

    path: str
    line: int
    column: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {' '.join(self.old.split())} -> {' '.join(self.new.split())}"


def changes_of(node: ast.AST) -> Iterator[str]:
    """Yield what may stand in the place of a node."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        other = ast.Compare(node.left, [COMPARISONS[type(node.ops[0])]()], node.comparators)
        yield f"({ast.unparse(other)})"
    elif isinstance(node, ast.BoolOp):
        operator = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield f"({ast.unparse(ast.BoolOp(operator, node.values))})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield f"({node.value + 1})"
    elif isinstance(node, DROPPED) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        yield "pass"


def mutants_of(path: str) -> Iterator[Mutant]:
    """Yield all mutants of the functions of a module, in the order of its lines."""
    source = (ROOT / path).read_text()
    tree = ast.parse(source)
    # Before Python 3.12 the parts of an f-string have wrong positions.
    parts = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    sites: list[tuple[ast.AST, str]] = []
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        for statement in function.body:
            for node in ast.walk(statement):
                sites += [(node, new) for new in changes_of(node)]
                if isinstance(node, (ast.If, ast.While, ast.IfExp)):
                    sites.append((node.test, f"(not ({ast.unparse(node.test)}))"))
    mutants = {
        Mutant(path, node.lineno, node.col_offset, ast.get_source_segment(source, node) or "", new)
        for node, new in sites
        if isinstance(node, (ast.expr, ast.stmt)) and node not in parts
    }
    yield from sorted(mutants)


def mutated(source: str, mutant: Mutant) -> str:
    """Return the module's source with the mutant in it; raise ValueError if it is another source."""
    lines = source.encode().splitlines(keepends=True)
    begin = sum(map(len, lines[: mutant.line - 1])) + mutant.column
    whole, old = b"".join(lines), mutant.old.encode()
    if whole[begin : begin + len(old)] != old:
        raise ValueError(f"the module has changed: {mutant}")
    return (whole[:begin] + mutant.new.encode() + whole[begin + len(old) :]).decode()


def run_tests(copy: Path, options: list[str]) -> int:
    """Run pytest in this process, in the copy; return its exit code."""
    os.setsid()
    os.chdir(copy)
    log = os.open("mutant.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.path.insert(0, str(copy))
    os.environ["PYTHONPATH"] = str(copy)
    return pytest.main(["-q", "-x", "-n", "0", "-p", "no:cacheprovider", *options])


def outcome(copy: Path, tests: list[str], limit_s: float) -> str:
    """Run the tests in the copy, in a process that is forked from this one; return "survived", "killed" or "too long".

    This process has imported what takes long to import, and nothing of the copy.
    """
    process = os.fork()
    if process == 0:
        code = 1
        try:
            code = run_tests(copy, [*tests, "--timeout", str(limit_s)])
        except BaseException:  # noqa: BLE001 (what comes after the fork is not this process's to run)
            traceback.print_exc()
        finally:
            os._exit(code)
    deadline = time.monotonic() + 3 * limit_s
    while time.monotonic() < deadline:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return "killed" if status else "survived"
        time.sleep(0.05)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return "too long"


def chosen_mutants(arguments: argparse.Namespace) -> list[Mutant]:
    """Return the mutants of the list, or a sample, which is written to it."""
    if arguments.list is not None and arguments.list.exists():
        return [Mutant(*row) for row in json.loads(arguments.list.read_text())]
    every = [mutant for path in arguments.modules for mutant in mutants_of(path)]
    sample = random.Random(arguments.seed).sample(every, min(arguments.count, len(every)))
    if arguments.list is not None:
        arguments.list.write_text(json.dumps(sample, indent=0))
    return sample


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("tests", nargs="+", metavar="TEST", help="a test file, or an option of pytest after --")
    parser.add_argument("-m", "--modules", nargs="*", default=[], metavar="MODULE", help="statexchange/values.py, ...")
    parser.add_argument("--count", type=int, default=50, help="how many mutants")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--list", type=Path, metavar="FILE", help="the file of the mutants")
    parser.add_argument("--limit", type=float, default=40, metavar="SECONDS", help="how long one test may take")
    arguments = parser.parse_args()
    mutants = chosen_mutants(arguments)
    counts: Counter[str] = Counter()
    for name in IMPORTED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="statexchange-mutants-", ignore_cleanup_errors=True) as folder:
        copy = Path(folder, "checkout")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "site"))
        if outcome(copy, arguments.tests, arguments.limit) != "survived":
            raise SystemExit(f"the tests fail without any mutant:\n{(copy / 'mutant.log').read_text()[-2000:]}")
        for mutant in mutants:
            module = copy / mutant.path
            source = module.read_text()
            module.write_text(mutated(source, mutant))
            said = outcome(copy, arguments.tests, arguments.limit)
            module.write_text(source)
            counts[said] += 1
            print(f"{said:15} {mutant}", flush=True)
    print(", ".join(f"{count} {said}" for said, count in sorted(counts.items())))


if __name__ == "__main__":
    main()
