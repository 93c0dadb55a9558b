"""``python tests/fuzz``: run the fuzzer, print the outcomes, and keep the findings.

Exits with 1 if there are findings.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from corpus import HOSTILE, SOURCES, Source
from mutate import mutate
from runner import Outcome, preload, run

import statexchange as sx
from statexchange.tensors import torch_dtype

_MEMORY = "/dev/shm"
_REPORTED = 1000  # cases from one line of progress to the next


def main() -> int:
    """Run the cases that the arguments ask for; return the exit code."""
    parser = argparse.ArgumentParser(prog="python tests/fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=1000, help="how many sources to change and read")
    parser.add_argument("--minutes", type=float, default=24 * 60, help="end after so long")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--source", action="append", help="only this kind of source; may be repeated")
    parser.add_argument("--quick", action="store_true", help="only sources that are made fast")
    parser.add_argument("--findings", default="fuzz-findings", help="the directory that gets what is found")
    parser.add_argument("--replay", metavar="DIR", help="run a finding again")
    options = parser.parse_args()
    preload()
    with tempfile.TemporaryDirectory(dir=_MEMORY if os.path.isdir(_MEMORY) else None) as root:
        fuzzer = _Fuzzer(Path(root), Path(options.findings))
        if options.replay is not None:
            fuzzer.replay(Path(options.replay))
        else:
            cases = range(options.first, options.first + options.cases)
            with contextlib.suppress(KeyboardInterrupt):
                fuzzer.fuzz(_names(options.source, quick=options.quick), options.seed, cases, 60 * options.minutes)
        fuzzer.show()
        return 1 if fuzzer.found else 0


def _names(only: list[str] | None, *, quick: bool) -> list[str]:
    known = {**SOURCES, **HOSTILE}
    return [name for name in only or known if not (quick and known[name].slow)]


class _Fuzzer:
    """The cases of one run, and their outcomes."""

    def __init__(self, root: Path, findings: Path) -> None:
        self._root = root
        self._findings = findings
        self._expected: dict[str, dict[str, Any]] = {}
        self._outcomes: Counter[tuple[str, str, str]] = Counter()
        self._cases: Counter[str] = Counter()
        self._began = time.monotonic()
        self.found: Counter[str] = Counter()

    def fuzz(self, names: list[str], seed: int, cases: range, limit_s: float) -> None:
        """Run `cases` cases.

        Each takes a source, mostly of the valid kinds, and changes it by random numbers of its own.
        """
        whole = [name for name in names if name in SOURCES]
        hostile = [name for name in names if name in HOSTILE]
        for number in cases:
            if time.monotonic() - self._began > limit_s:
                break
            chance = random.Random(f"{seed} {number}")
            done = number - cases.start
            if done and done % _REPORTED == 0:
                print(f"{done:,} cases, {self.found.total()} findings", file=sys.stderr, flush=True)
            chosen = hostile if hostile and (not whole or chance.random() < 0.02) else whole
            self._case(chance.choice(chosen), seed, number, chance)

    def _case(self, name: str, seed: int, number: int, chance: random.Random) -> None:
        source = self._made(name)
        folder = self._root / "case"
        shutil.copytree(self._root / "sources" / name, folder, copy_function=os.link)
        changes = [] if name in HOSTILE and chance.random() < 0.3 else mutate(folder, chance)
        path = source.path.format(folder) if chance.random() < 0.9 else _other_path(folder, chance)
        kept = self._root / "kept"
        shutil.copytree(folder, kept, symlinks=True, copy_function=_link)
        outcomes = run(folder, path, source, self._expected[name])
        shown = source.path if "://" in path else os.path.relpath(path, folder)
        about = {"source": name, "seed": seed, "case": number, "changes": changes, "path": shown}
        self._note(name, outcomes, kept, about)
        for used in (folder, kept):
            _remove(used)

    def _made(self, name: str) -> Source:
        """Return the source; make it at its first use."""
        source = {**SOURCES, **HOSTILE}[name]
        if name not in self._expected:
            folder = self._root / "sources" / name
            folder.mkdir(parents=True)
            source.make(folder)
            self._expected[name] = _tensors_of(source.path.format(folder)) if name in SOURCES else {}
        return source

    def _note(self, name: str, outcomes: list[Outcome], kept: Path, about: dict[str, Any]) -> None:
        kind = name if name in SOURCES else "hostile files"
        self._cases[kind] += 1
        problems = []
        for outcome in outcomes:
            self._outcomes[kind, outcome.step, outcome.name] += 1
            if outcome.problem is not None:
                problems.append({"step": outcome.step, "outcome": outcome.name, "problem": outcome.problem})
                self.found[f"{outcome.step}: {outcome.name}: {_last_line(outcome.problem)}"] += 1
        if problems:
            target = self._findings / f"{about['seed']}-{about['case']}"
            _remove(target)
            target.mkdir(parents=True)
            shutil.copytree(kept, target / "files", symlinks=True, copy_function=_copy)
            (target / "finding.json").write_text(json.dumps({**about, "findings": problems}, indent=1))
            print(
                f"found {target}: {problems[0]['step']}: {problems[0]['problem'].strip().splitlines()[-1][:300]}",
                flush=True,
            )

    def replay(self, target: Path) -> None:
        """Run the steps again on files that were kept."""
        about = json.loads((target / "finding.json").read_text())
        source = self._made(about["source"])
        folder = self._root / "case"
        shutil.copytree(target / "files", folder, symlinks=True, copy_function=_copy)
        path = about["path"].format(folder) if "://" in about["path"] else os.path.normpath(folder / about["path"])
        for outcome in run(folder, str(path), source, self._expected[about["source"]]):
            self._outcomes[about["source"], outcome.step, outcome.name] += 1
            if outcome.problem is not None:
                self.found[f"{outcome.step}: {outcome.name}"] += 1
                print(f"{outcome.step}: {outcome.problem}")

    def show(self) -> None:
        """Print the outcomes of each step by kind of source, and the findings."""
        for line in self._lines():
            print(line)

    def _lines(self) -> Iterator[str]:
        steps = list(dict.fromkeys(step for _, step, _ in self._outcomes))
        for kind in self._cases:
            yield f"{kind}: {self._cases[kind]:,} cases"
            for step in steps:
                of_step = {name: count for (k, s, name), count in self._outcomes.items() if (k, s) == (kind, step)}
                if of_step:
                    yield f"  {step:<18}" + _counts(of_step)
        yield f"all: {self._cases.total():,} cases, {self._outcomes.total():,} steps"
        for step in steps:
            total: Counter[str] = Counter()
            for (_, s, name), count in self._outcomes.items():
                total[name] += count if s == step else 0
            yield f"  {step:<18}" + _counts(total)
        took = time.monotonic() - self._began
        cpu = sum(os.times()[:4])
        yield f"{self.found.total()} findings in {took:.0f} s, {cpu:.0f} s of processor time"
        for text, count in self.found.most_common():
            yield f"  {count}x {text}"


def _last_line(text: str) -> str:
    """Return the message of an error, without its traceback."""
    lines = [line for line in text.strip().splitlines() if not line.startswith("hint:")]
    return lines[-1][:200]


def _counts(outcomes: dict[str, int]) -> str:
    return ", ".join(f"{name} {n:,}" for name, n in sorted(outcomes.items(), key=lambda item: -item[1]) if n)


def _tensors_of(path: str) -> dict[str, Any]:
    """Return dtype and shape of the tensors of a valid source; {} if it cannot be opened."""
    try:
        with sx.open_checkpoint(path) as found:
            return {
                name: (torch_dtype(found[name].dtype), found[name].shape) for name in found if found[name].dtype != "?"
            }
    except sx.StateExchangeError:
        return {}


def _other_path(folder: Path, chance: random.Random) -> str:
    """Return a path other than that of the source: of something inside it, or of the directory above it."""
    return str(chance.choice([folder, *sorted(folder.rglob("*"))]))


def _link(source: str, target: str) -> None:
    """Hard link a file, as files are never written in place; make another FIFO for a FIFO."""
    if os.path.isfile(source):
        os.link(source, target)
    else:
        os.mkfifo(target)


def _copy(source: str, target: str) -> None:
    """Copy a file; make another FIFO for a FIFO."""
    if os.path.isfile(source):
        shutil.copyfile(source, target)
    else:
        os.mkfifo(target)


def _remove(folder: Path) -> None:
    if folder.exists():
        for path in folder.rglob("*"):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o700)
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
