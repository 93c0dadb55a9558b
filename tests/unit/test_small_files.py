"""Small files that request much memory or time: the cost of a reader is bounded by the bytes of its files.

Each file is opened by the command line in processes that have 2 GiB of address space and a few seconds of a processor.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hostile_pickles import PICKLES
from sweeps import by_default

MEMORY_BYTES, CPU_S = 2 << 30, 5
OK, USAGE, CORRUPT, INCOMPLETE, UNSAFE = 0, 2, 4, 5, 7

# One child for each command, forked after the imports. Its exit code is that of `wait`: a signal's number is negative.
PROGRAM = """
import gc, importlib, json, os, pkgutil, resource, sys
from statexchange.cli.main import main

for package in ("cli", "checkpoint", "formats", "report", "storage"):
    for module in pkgutil.iter_modules(importlib.import_module(f"statexchange.{package}").__path__):
        importlib.import_module(f"statexchange.{package}.{module.name}")
gc.collect()
gc.freeze()  # a collection in a child leaves these objects alone

memory, cpu = map(int, sys.argv[1:])
codes = []
for call in json.load(sys.stdin):
    pid = os.fork()
    if not pid:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
        os.dup2(2, 1)
        main(call)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(json.dumps(codes))
"""

# By group and file of PICKLES: the exit codes of info and verify, and of merge.
CODES: dict[str, dict[str, tuple[int, int]]] = {
    "worlds": {"of a name": (INCOMPLETE, INCOMPLETE)},
    "numbers": {"in names": (OK, INCOMPLETE), "in a shape": (OK, USAGE), "in a mesh": (OK, INCOMPLETE)},
    "copies": {"of a dict": (CORRUPT, CORRUPT)},
    "names": {
        "below a long one": (CORRUPT, CORRUPT),
        "of wrappers": (OK, OK),
        "of parts that are missing": (INCOMPLETE, INCOMPLETE),
    },
    "messages": {
        "on a shape": (CORRUPT, CORRUPT),
        "on a storage": (CORRUPT, CORRUPT),
        "on a class": (UNSAFE, UNSAFE),
        "with an opaque key": (OK, USAGE),
        "on sizes": (CORRUPT, CORRUPT),
        "on properties": (CORRUPT, CORRUPT),
        "on a file": (CORRUPT, CORRUPT),
        "on an extension": (UNSAFE, UNSAFE),
        "on a name": (CORRUPT, CORRUPT),
    },
    "keys": {
        "long tuples": (CORRUPT, CORRUPT),
        "equal texts": (CORRUPT, CORRUPT),
        "numbers of one hash": (CORRUPT, CORRUPT),
        "pairs of one hash": (CORRUPT, CORRUPT),
    },
    "shared": {
        "wrappers": (CORRUPT, CORRUPT),
        "a list": (CORRUPT, CORRUPT),
        "a list in itself": (CORRUPT, CORRUPT),
        "arguments": (CORRUPT, CORRUPT),
        "ranks, equal and not the same": (CORRUPT, CORRUPT),
        "ranks of meshes": (INCOMPLETE, INCOMPLETE),
        "parts": (CORRUPT, CORRUPT),
    },
    "opaque": {
        "objects with tensors": (CORRUPT, CORRUPT),
        "an object again and again": (CORRUPT, CORRUPT),
        "objects in each other": (OK, USAGE),
    },
    "places": {"of entries": (CORRUPT, CORRUPT)},
}


@pytest.mark.parametrize("group", by_default(CODES, 0, 1))
def test_small_hostile_files_are_read_or_refused_within_limits_of_memory_and_time(tmp_path: Path, group: str) -> None:
    calls = []
    for number, build in enumerate(PICKLES[group].values()):
        folder = tmp_path / str(number)
        folder.mkdir()
        path, layout = str(build(folder)), folder / "layout.json"
        options = ["--layout", str(layout)] if layout.exists() else []
        calls += [["info", path, "--json"], ["verify", path], ["merge", path, str(folder / "merged"), *options]]
    command = [sys.executable, "-c", PROGRAM, str(MEMORY_BYTES), str(CPU_S)]
    done = subprocess.run(command, input=json.dumps(calls), capture_output=True, text=True, timeout=200)
    codes = iter(json.loads(done.stdout))
    found = {case: [next(codes), next(codes), next(codes)] for case in PICKLES[group]}
    expected = {case: [looking, looking, merging] for case, (looking, merging) in CODES[group].items()}
    assert found == expected, done.stderr[-4000:]
    assert "Traceback" not in done.stderr
