"""Publishers for tests, and sweeps that kill, interrupt or overtake one at each of its storage events.

A sweep runs in a process of its own, which `run_sweep` starts. This forks once for each event: an audit hook acts at
the n-th event of the child, for n = 1, 2, ... until the child runs to its end.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from disk_stores import import_s3, names_at, use_object_stores
from storage_events import act_at, armed, in_child, in_new_namespace, outcome_of

import statexchange as sx
from statexchange.checkpoint.publication import Draft, Provenance, Publication
from statexchange.formats.registry import open_checkpoint, open_source
from statexchange.processes import Owner
from statexchange.sharding.options import ExportOptions
from statexchange.sharding.plan import Plan, RankShards, plan_merge
from statexchange.sharding.shards import Shard, full_box
from statexchange.storage.files import digest
from statexchange.storage.publish.claim import CLAIM_NAME

NBYTES = 5000
OTHER_HOST = Owner("a-host-far-away", "0" * 36, 1, 2, 3)
"""A process of another host: whether it runs cannot be determined here."""


def plan_of(value: int) -> Plan:
    shards = [Shard(f"{name}{value}", "U8", (NBYTES,), (full_box((NBYTES,)),)) for name in "ab"]
    return plan_merge([RankShards(0, shards)], ExportOptions(max_shard_size=NBYTES))


def provenance_of(plan: Plan, value: int) -> dict[str, Provenance]:
    known = digest(bytes([value]) * NBYTES)
    return {tensor.name: Provenance([0], bytes.fromhex(known)) for file in plan.files for tensor in file.tensors}


def begin(path: Any, value: int, **options: Any) -> Publication:
    config = json.dumps({"value": value}).encode()  # objects of the same bytes have the same version on S3
    return Publication(path, Draft(plan_of(value), source="test", extra={"config.json": config}), **options)


def build(publication: Publication, value: int) -> None:
    """Write all files but those that are finished."""
    for file in plan_of(value).files:
        if file.name not in publication.build.finished:
            opened = publication.create(file)
            for tensor in file.tensors:
                opened.write(bytes([value]) * NBYTES, len(opened.header) + tensor.begin)
            opened.finish()
            publication.build.record(file.name, value)


def publish(path: Any, value: int, *, overwrite: bool = True, **options: Any) -> list[str]:
    """Publish a checkpoint of two files full of `value`; return the names that an earlier publisher had finished."""
    with begin(path, value, overwrite=overwrite, **options) as publication:
        finished = sorted(publication.build.finished)
        build(publication, value)
        publication.commit(provenance_of(plan_of(value), value))
    return finished


def value_at(path: Any) -> int:
    """Return the value that fills the checkpoint, after reading all of it and comparing it with its digests."""
    checkpoint = open_checkpoint(path)
    (data,) = {bytes(checkpoint[name].read().tobytes()) for name in checkpoint}
    source = open_source(path)
    known = {byte_range.digest for _, tensor in source.shards() for byte_range in tensor.byte_ranges}
    source.close()
    assert known == {digest(data)}
    assert sorted(checkpoint) == [f"a{data[0]}", f"b{data[0]}"]
    return data[0]


def value_of(out: Path) -> int:
    """Return `value_at` of a directory, which must have its final name and only the files of its manifest."""
    listed = json.loads((out / "statexchange.json").read_text())["files"]
    assert sorted(os.listdir(out)) == sorted([*listed, "statexchange.json"])
    return value_at(out)


def save(path: Any, value: int, *, overwrite: bool = True) -> None:
    sx.save_checkpoint({"a": np.full(NBYTES, value, np.uint8), "value": value}, path, overwrite=overwrite)


def saved_value(path: Path) -> int:
    """Return the value that fills the save, which must have only its own files."""
    assert sorted(os.listdir(path)) == ["rank-00000-of-00001.safetensors", "save.json"]
    state = {"a": np.zeros(NBYTES, np.uint8), "value": 0}
    sx.load_checkpoint(state, path)
    assert set(state["a"]) == {state["value"]}
    return state["value"]


def ended_owner() -> Owner:
    """Return a process of this host that has ended."""
    from warm_python import warm_python  # not where the processes of tests import this file

    code = "import json; from statexchange.processes import Owner; print(json.dumps(Owner.current().to_json()))"
    done = subprocess.run([warm_python("commands"), "-c", code], capture_output=True, text=True, check=True)
    return Owner.from_json(json.loads(done.stdout))


# Sweeps


def run_sweep(name: str, place: Path, *, exchange: bool = True, **options: Any) -> dict[str, Any]:
    """Run a sweep of this module in a process of its own, and return its counts; skip the running test if it must be.

    Without `exchange` names cannot be exchanged, as on NFS.
    """
    from programs import require_refusal_of_exchange  # not where the processes of tests import this file
    from warm_python import warm_python

    if not exchange:
        require_refusal_of_exchange()
    code = "import sys; import publishing; publishing.main(*sys.argv[1:])"
    command = [warm_python("commands"), "-c", code, name, str(place), json.dumps(exchange), json.dumps(options)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "skip" in found:
        import pytest

        pytest.skip(found["skip"])
    print(name, options, "with exchange" if exchange else "without exchange", found)
    return found


WRITERS: dict[str, tuple[Callable[..., object], Callable[[Path], int]]] = {
    "checkpoint": (publish, value_of),
    "save": (save, saved_value),
}
"""By what is written: a function that publishes it, full of a value, and one that returns the value that it reads."""


def _values_after_race(number: int, first: str, second: str, *, overwrite: bool) -> set[int]:
    """Check the outcomes of a publisher of 2 and one of 3; return which of the values may be there."""
    _check({first, second} <= {"ok", "TargetExistsError"} and "ok" in (first, second), number, first, second)
    if not overwrite:
        _check((first, second).count("ok") == 1, number, first, second)
    if second != "ok":
        return {2}
    return {3} if first != "ok" else {2, 3}


class Peer:
    """A process that makes calls for this one, one after another, and ends with it.

    A call in a process of its own each would take three times as long: for the fork, and for a client of the store.
    """

    def __init__(self, *, new_namespace: bool = False) -> None:
        self._line, line = multiprocessing.Pipe()
        if os.fork():
            line.close()
            return
        try:
            self._line.close()
            if new_namespace and in_new_namespace(lambda: _serve(line)) == "no namespace":
                _serve(line, "no namespace")
            elif not new_namespace:
                _serve(line)
        finally:
            os._exit(0)

    def run(self, work: Callable[..., object], *arguments: Any, **options: Any) -> str:
        """Make a call of a function of a module; return its outcome, as `in_child` does."""
        return self._call(work, arguments, options)[0]

    def result(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a call, which must succeed."""
        outcome, result = self._call(work, arguments, {})
        _check(outcome == "ok", outcome)
        return result

    def _call(self, work: Callable[..., object], arguments: Any, options: Any) -> tuple[str, Any]:
        self._line.send((work, arguments, options))
        outcome, result = self._line.recv()
        return outcome, result


def _serve(line: Any, refusal: str | None = None) -> None:
    """Make the calls of a peer; with `refusal` only answer that."""
    while True:
        try:
            work, arguments, options = line.recv()
        except EOFError:
            return
        results: list[Any] = []
        armed.clear()
        outcome = refusal or outcome_of(lambda: results.append(work(*arguments, **options)))  # noqa: B023
        line.send((outcome, results[0] if results else None))


def _points(place: Path, first: int, step: int) -> Iterator[tuple[int, Path]]:
    """Yield the number of each event at which to act, and an empty directory."""
    number = first
    while True:
        own = place / str(number)
        own.mkdir()
        yield number, own
        shutil.rmtree(own)
        number += step


def _check(condition: object, *shown: object) -> None:
    if not condition:
        raise AssertionError(shown)


def sweep_kills(place: Path, *, before: bool, step: int, reuse: bool = False) -> dict[str, Any]:
    """Kill a publisher at each event: the old or the new checkpoint stays, and the next publisher cleans up."""
    states: Counter[str] = Counter()
    for number, own in _points(place, 1, step):
        out = own / "out"
        if before:
            publish(out, 1)

        def work() -> None:
            act_at(number, lambda: os.kill(os.getpid(), signal.SIGKILL))  # noqa: B023
            publish(out, 2, reuse=reuse)  # noqa: B023

        outcome = in_child(work)
        if outcome == "untouched":
            return {"points": (number - 1) // step, **states}
        _check(outcome == "killed", number, outcome)
        if out.exists():
            states["old" if value_of(out) == 1 else "new"] += 1
        elif before:
            _check(value_at(out) == 2, number)  # read under its hidden name
            states["gap"] += 1
        else:
            states["absent"] += 1
        if before or out.exists():
            _check(outcome_of(lambda: publish(out, 4, overwrite=False)) == "TargetExistsError", number)  # noqa: B023
            _check(value_at(out) in (1, 2), number)
        if reuse:
            states[f"{len(publish(out, 2, reuse=True))} kept"] += 1
            _check((value_of(out), os.listdir(own)) == (2, ["out"]), number, os.listdir(own))
        else:
            publish(out, 3)
            _check((value_of(out), os.listdir(own)) == (3, ["out"]), number, os.listdir(own))
    raise AssertionError


def sweep_interrupts(place: Path, *, before: bool, step: int) -> dict[str, Any]:
    """Interrupt a publisher at each event (Ctrl-C): the next one in the same process cleans up."""
    states: Counter[str] = Counter()
    for number, own in _points(place, 1, step):
        out = own / "out"
        if before:
            publish(out, 1)

        def interrupt() -> None:
            raise KeyboardInterrupt

        def work() -> None:
            act_at(number, interrupt)  # noqa: B023
            with contextlib.suppress(KeyboardInterrupt):
                publish(out, 2)  # noqa: B023
            if armed:
                return
            if out.exists():  # noqa: B023
                value_of(out)  # noqa: B023
            else:
                _check(not before or value_at(out) == 2, number)  # noqa: B023
            left = [name for name in os.listdir(own) if name != "out"]  # noqa: B023
            (own / "state").write_text(f"{'something' if left else 'nothing'} left")  # noqa: B023
            publish(out, 3)  # noqa: B023

        outcome = in_child(work)
        if outcome == "untouched":
            return {"points": (number - 1) // step, **states}
        _check(outcome == "ok", number, outcome)
        states[(own / "state").read_text()] += 1
        _check((value_of(out), sorted(os.listdir(own))) == (3, ["out", "state"]), number, os.listdir(own))
    raise AssertionError


def sweep_races(
    place: Path, *, before: bool, overwrite: bool, elsewhere: bool, step: int, what: str = "checkpoint"
) -> dict[str, Any]:
    """Run a second publisher to its end at each event of the first.

    Exactly one wins, or one follows the other. With `elsewhere` the second runs as on another host: it cannot see
    whether the first runs.
    """
    write, read = WRITERS[what]
    states: Counter[str] = Counter()
    peer = Peer(new_namespace=elsewhere)
    for number, own in _points(place, 1, step):
        out = own / "out"
        if before:
            write(out, 1)

        others: list[str] = []

        def second() -> None:
            others.append(peer.run(write, out, 3, overwrite=overwrite))  # noqa: B023

        def first() -> None:
            act_at(number, second)  # noqa: B023
            write(out, 2, overwrite=overwrite)  # noqa: B023

        outcome = outcome_of(first)
        if outcome == "untouched":
            return {"points": (number - 1) // step, **states}
        (other,) = others
        if other == "no namespace":
            return {"skip": "this process may not make pid namespaces"}
        states[f"{outcome}/{other}"] += 1
        allowed = _values_after_race(number, outcome, other, overwrite=overwrite)
        _check(read(out) in allowed, number, outcome, other, read(out))
        _check(os.listdir(own) == ["out"], number, outcome, other, os.listdir(own))
    raise AssertionError


def sweep_strangers(place: Path, *, step: int) -> dict[str, Any]:
    """At each event of a publisher that replaces a checkpoint, give the target's name to a directory of a user.

    Whatever the publisher does, the user's directory keeps its name and its content.
    """
    states: Counter[str] = Counter()
    for number, own in _points(place, 1, step):
        out, theirs = own / "out", own / "theirs"
        publish(out, 1)
        theirs.mkdir()
        (theirs / "notes.txt").write_text("mine")

        def act() -> None:
            with contextlib.suppress(FileNotFoundError):  # between the two renames of a replacement
                out.rename(own / "aside")  # noqa: B023
            theirs.rename(out)  # noqa: B023

        def work() -> None:
            act_at(number, act)  # noqa: B023
            publish(out, 2)  # noqa: B023

        outcome = outcome_of(work)
        if outcome == "untouched":
            return {"points": (number - 1) // step, **states}
        states[outcome] += 1
        _check(os.listdir(out) == ["notes.txt"], number, outcome, sorted(os.listdir(own)))
        # The old checkpoint, or the new one that had the name before, where the user has moved it, or where it was set
        # aside to give its name to the new one.
        (kept,) = [name for name in os.listdir(own) if name == "aside" or name.endswith(".replaced")]
        _check(value_at(own / kept) == (2 if outcome == "ok" else 1), number, outcome, kept)
        _check(outcome_of(lambda: publish(out, 3)) == "UnsafeError", number)  # noqa: B023
        _check(value_at(own / kept) in (1, 2), number)
        if kept == "aside":
            _check(sorted(os.listdir(own)) == ["aside", "out"], number, outcome, os.listdir(own))
        states[kept.rpartition(".")[2]] += 1
    raise AssertionError


# Sweeps over object stores


def state_of(url: str) -> str:
    """Return "absent", "being written", or the value of a checkpoint that is whole and alone."""
    names = names_at(url)
    if "statexchange.json" in names:
        system, path = fsspec.core.url_to_fs(url)
        listed = json.loads(system.cat_file(f"{path}/statexchange.json"))["files"]
        _check(sorted(set(names) - {CLAIM_NAME}) == sorted([*listed, "statexchange.json"]), names)
        return f"{value_at(url)}{' claimed' if CLAIM_NAME in names else ''}"
    _check(CLAIM_NAME in names or not names, names)
    return "being written" if names else "absent"


def sweep_object_kills(place: Path, *, base: str, before: bool, step: int, first: int = 1) -> dict[str, Any]:
    """Run `sweep_kills` at a URL."""
    use_object_stores()
    if base.startswith("s3:"):
        import_s3()
    states: Counter[str] = Counter()
    peer = Peer()
    number = first - step
    while True:
        number += step
        out = f"{base}/{number}/out"
        if before:
            _check(peer.run(publish, out, 1) == "ok")

        def work() -> None:
            act_at(number, lambda: os.kill(os.getpid(), signal.SIGKILL))  # noqa: B023
            publish(out, 2)  # noqa: B023

        outcome = in_child(work)
        if outcome == "untouched":
            return {"points": -(-(number - first) // step), **states}
        _check(outcome == "killed", number, outcome)
        state = peer.result(state_of, out)
        states[state] += 1
        _check(state in ("1", "1 claimed", "2", "2 claimed", "being written", "absent"), number, state)
        overwrite = state[0] in "12" or number % 2 == 0
        if overwrite and state[0] in "12":
            _check(peer.run(publish, out, 4, overwrite=False) == "TargetExistsError", number)
            _check(peer.result(state_of, out) == state[0], number)
        _check(peer.run(publish, out, 3, overwrite=overwrite) == "ok", number)
        _check(peer.result(state_of, out) == "3", number)


def sweep_object_races(
    place: Path,
    *,
    base: str,
    before: bool,
    overwrite: bool,
    elsewhere: bool,
    step: int,
    first: int = 1,
    only: str | None = None,
) -> dict[str, Any]:
    """Run `sweep_races` at a URL. With `elsewhere` the first is taken for dead after a while, and then continues."""
    use_object_stores()
    if base.startswith("s3:"):
        import_s3()
    states: Counter[str] = Counter()
    other = Peer()
    _second[:] = [Peer(new_namespace=elsewhere)]
    first_one = Peer()  # the only one that knows the second
    number = first - step
    while True:
        number += step
        out = f"{base}/{number}/out"
        if before:
            _check(other.run(publish, out, 1) == "ok")
        outcome, second = first_one.result(publish_overtaken, out, number, only, overwrite)
        if outcome == "untouched":
            return {"points": -(-(number - first) // step), **states}
        if second == "no namespace":
            return {"skip": "this process may not make pid namespaces"}
        states[f"{outcome}/{second}"] += 1
        allowed = set(map(str, _values_after_race(number, outcome, second, overwrite=overwrite)))
        state = other.result(state_of, out)
        _check(state in allowed, number, outcome, second, state)


_second: list[Peer] = []


def publish_overtaken(out: str, number: int, only: str | None, overwrite: bool) -> tuple[str, str | None]:
    """Publish, and let the second publisher publish at an event; return the outcomes of both."""
    seconds: list[str] = []

    def overtake() -> None:
        seconds.append(_second[0].run(publish, out, 3, overwrite=overwrite))

    act_at(number, overtake, only)
    outcome = outcome_of(lambda: publish(out, 2, overwrite=overwrite))
    armed.clear()  # if the event has not come
    return outcome, seconds[0] if seconds else None


def warm_up() -> None:
    """Publish and read once, so that forked processes find what that imports.

    They also leave the objects of before the fork out of each collection of garbage.
    """
    with tempfile.TemporaryDirectory() as folder:
        for what, (write, read) in WRITERS.items():
            write(Path(folder, what), 1)
            read(Path(folder, what))
    gc.collect()
    gc.freeze()


def main(name: str, place: str, exchange: str, options: str) -> None:
    """Run a sweep, and print its counts as JSON."""
    if not json.loads(exchange):
        from seccomp import refuse_exchange  # not where the processes of other tests import this file

        refuse_exchange()
    warm_up()
    print(json.dumps(globals()[name](Path(place), **json.loads(options))))
