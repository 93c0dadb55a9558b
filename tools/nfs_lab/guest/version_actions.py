"""The actions of agents that publish and follow versions of weights, called as those of actions.py.

The weights of a version differ from those of the one before in 1 % of the elements, at random places. The publisher
returns a digest of each version, and readers one of what they have loaded under its number. Leases, and the time after
which retired versions are removed, are not public: engines take leases by `Subscriber.stage` only.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

import statexchange as sx
from nfs_lab.guest.actions import Errors, Values
from statexchange.checkpoint import version_retention
from statexchange.exchange.subscriber import StagedVersion
from statexchange.exchange.version_reading import Version
from statexchange.storage.versions import Lease, version_number

SHAPE = (400, 128)  # of each of the two tensors: 102,400 bytes of bf16
CHANGED_SHARE = 0.01
RENAME = ("statexchange.storage", "rename")
READ_PAUSE_S = 0.3


def import_all() -> None:
    """Import everything that these actions import, by running them once on a local directory."""
    with tempfile.TemporaryDirectory() as folder:
        publish_versions(folder, count=2)
        follow_versions(folder, last=2, timeout_s=10.0)
        read_under_leases(folder, last=2, longest_hold_s=0.0, timeout_s=10.0)
    _publishers.clear()


def clock() -> float:
    """Return this host's time."""
    return time.time()


# The publisher


@dataclass
class _Run:
    """A publisher of this process, and the weights that it has published last."""

    publisher: sx.Publisher
    weights: dict[str, torch.Tensor]
    random: torch.Generator
    number: int = 0
    commits: dict[int, float] = field(default_factory=dict)


_publishers: dict[str, _Run] = {}
_recording: list[_Run] = []
_hook_added = False


def publish_versions(
    path: str, count: int = 1, keep: int = 4, full_every: int = 10, pause_s: float = 0.0, grace_s: float | None = None
) -> Values:
    """Publish the next `count` versions; return their digests and times of commit, and warnings of the product.

    Args:
        path: the directory of versions.
        count: how many.
        keep: as of `Publisher`, for the first call for a path.
        full_every: as `keep`.
        pause_s: wait this long after each.
        grace_s: the time after which retired versions are removed; by default the product's.
    """
    run = _publishers.get(path) or _new_run(path, keep, full_every)
    records: dict[int, Values] = {}
    with _warnings() as warnings, _grace(grace_s), _commits(run):
        for _ in range(count):
            _change(run)
            run.number += 1
            report = run.publisher.publish(run.weights, run.number)
            records[run.number] = {
                "digest": _digest(run.weights),
                "commit": run.commits[run.number],
                "kind": report.kind,
                "seconds": report.seconds,
            }
            time.sleep(pause_s)
    return {"records": records, "warnings": warnings}


def _new_run(path: str, keep: int, full_every: int) -> _Run:
    generator = torch.Generator().manual_seed(random.getrandbits(32))
    weights = {name: torch.randn(SHAPE, generator=generator).bfloat16() for name in ("a", "b")}
    run = _publishers[path] = _Run(sx.Publisher(path, keep=keep, full_every=full_every), weights, generator)
    return run


def _change(run: _Run) -> None:
    """Change some low bits of 1 % of the elements, each to another value."""
    for tensor in run.weights.values():
        count = int(CHANGED_SHARE * tensor.numel())
        places = torch.randperm(tensor.numel(), generator=run.random)[:count]
        bits = torch.randint(1, 128, (count,), generator=run.random, dtype=torch.int16)
        tensor.view(-1).view(torch.int16)[places] ^= bits


def _digest(state: dict[str, torch.Tensor]) -> str:
    hasher = hashlib.sha256()
    for _, tensor in sorted(state.items()):
        hasher.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()[:16]


@contextlib.contextmanager
def _commits(run: _Run) -> Iterator[None]:
    """Record the time right before each rename that makes a version appear."""
    global _hook_added
    if not _hook_added:  # once: audit hooks cannot be removed
        sys.addaudithook(_audit)
        _hook_added = True
    _recording.append(run)
    try:
        yield
    finally:
        _recording.remove(run)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _recording or (event, *arguments[:1]) != RENAME:
        return
    number = version_number(os.path.basename(str(arguments[1])))
    if number is not None:  # not the rename of a version that is removed, which comes later
        for run in _recording:
            run.commits.setdefault(number, time.time())


@contextlib.contextmanager
def _grace(seconds: float | None) -> Iterator[None]:
    if seconds is None:
        yield
    else:
        with patch.object(version_retention, "GRACE_S", seconds):
            yield


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """Yield a list that gets the product's warnings: a publish succeeds also where old versions cannot be removed."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage()[:300])  # type: ignore[method-assign]
    logger = logging.getLogger("statexchange")
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)


# Readers


def _load(staged: StagedVersion) -> str:
    live = {name: torch.zeros(SHAPE, dtype=torch.bfloat16) for name in ("a", "b")}
    staged.load_into(live)
    return _digest(live)


def follow_versions(path: str, last: int, timeout_s: float) -> Values:
    """Wait for, stage and load each version that is newer, up to number `last`.

    Returns:
        ``seen``: by version [number, digest, time when `wait` returned it, seconds to stage and load it];
        ``late``: how many were retired before they were staged; errors.
    """
    version: Version | None = None
    seen: list[Any] = []
    late, errors, end = 0, Errors(), time.monotonic() + timeout_s
    with sx.Subscriber(path) as subscriber:
        while (version is None or version.number < last) and time.monotonic() < end:
            try:
                version = subscriber.wait(newer_than=version, timeout_s=max(0.0, end - time.monotonic()))
                at, began = time.time(), time.monotonic()
                with subscriber.stage(version) as staged:
                    seen.append([version.number, _load(staged), at, time.monotonic() - began])
            except sx.errors.NotFoundError:
                late += 1
            except Exception as error:  # noqa: BLE001
                errors.add(error)
                time.sleep(0.1)
    return {"seen": seen, "late": late, **errors.facts()}


def read_under_leases(path: str, last: int, longest_hold_s: float, timeout_s: float, hold_s: float = 0.0) -> Values:
    """Take a lease of the newest version again and again, and read the version slowly while it lasts.

    The first lease is held for `hold_s`, each other one for a random time of at most `longest_hold_s`.

    Returns:
        ``read``: [number, digest] of each read; ``held``: by lease [number, how often it was read, seconds];
        ``late``: how many leases were refused, as the version was retired; errors.
    """
    version: Version | None = None
    read: list[list[Any]] = []
    held: list[list[Any]] = []
    late, errors, end = 0, Errors(), time.monotonic() + timeout_s
    with sx.Subscriber(path) as subscriber:
        while (version is None or version.number < last) and time.monotonic() < end:
            version = subscriber.wait(newer_than=version, timeout_s=max(0.0, end - time.monotonic()))
            try:
                lease = Lease(path, version.run, version.number)
            except sx.errors.NotFoundError:
                late += 1
                continue
            began, count = time.monotonic(), 0
            seconds = 0.0 if version.number >= last else hold_s or random.uniform(0, longest_hold_s)
            hold_s = 0.0
            try:
                while count == 0 or time.monotonic() < began + seconds:
                    read.append([version.number, _read_slowly(version.path)])
                    count += 1
            except Exception as error:  # noqa: BLE001
                errors.add(error)
            finally:
                lease.end()
            held.append([version.number, count, time.monotonic() - began])
    return {"read": read, "held": held, "late": late, **errors.facts()}


def _read_slowly(path: str) -> str:
    """Read a version tensor by tensor, with a pause before each."""
    state: dict[str, torch.Tensor] = {}
    with sx.open_checkpoint(path) as checkpoint:
        for name, tensor in checkpoint.items():
            time.sleep(READ_PAUSE_S)
            state[name] = tensor.read(framework="pt")
    return _digest(state)


_waited: dict[str, tuple[Version, Any]] = {}
_opened: list[int] = []


def wait_and_open(path: str, descriptors: bool = False) -> list[Any]:
    """Wait for the newest version, open it without a lease, and keep it; return its number and digest.

    With `descriptors` also hold each of its files open, as a reader of another program may.
    """
    version = sx.Subscriber(path).wait(timeout_s=20)
    _waited[path] = (version, sx.open_checkpoint(version.path))
    if descriptors:
        _opened.extend(os.open(f"{version.path}/{name}", os.O_RDONLY) for name in os.listdir(version.path))
    return [version.number, _read_slowly(version.path)]


def release(path: str) -> None:
    """Close what `wait_and_open` has opened."""
    _waited.pop(path)
    while _opened:
        os.close(_opened.pop())


def use_late(path: str) -> Values:
    """Use the version of `wait_and_open` in each way; return the digest that each way gave, or its error's name."""
    version, checkpoint = _waited[path]
    with sx.Subscriber(path) as subscriber:

        def waited() -> Version:
            return subscriber.wait(version=version.number, timeout_s=0)

        ways: dict[str, Callable[[], str | None]] = {
            "stage": lambda: _stage_and_load(subscriber, version),
            "wait": lambda: _stage_and_load(subscriber, waited()),
            "lease": lambda: Lease(path, version.run, version.number).end(),
            "open": lambda: _read_slowly(version.path),
            "opened before": lambda: _digest(
                {name: tensor.read(framework="pt") for name, tensor in checkpoint.items()}
            ),
        }
        found: Values = {}
        for way, use in ways.items():
            try:
                found[way] = use()
            except Exception as error:  # noqa: BLE001
                found[way] = f"{type(error).__name__}: {error!s:.200}"
        found["newest"] = subscriber.wait(timeout_s=20).number
    return found


def _stage_and_load(subscriber: sx.Subscriber, version: Version) -> str:
    with subscriber.stage(version) as staged:
        return _load(staged)
