"""Run every reader and command on a source, in a forked process with little memory and processor time.

An outcome is the name of an exit code (OK, CORRUPT, ...) or of a StateExchangeError. Anything else is a finding:
another exception, exit code 70, a traceback, a killed process, exceeded memory or processor time, a secret or an escape
sequence in the output, files left beside the target of a refused merge, a target that a refused merge has changed, and
values that contradict their digest or the values of another reader.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import pkgutil
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import xxhash
from corpus import LAYOUT, Source

import statexchange as sx
from statexchange.cli.main import main
from statexchange.cli.output import EXIT_CODES
from statexchange.formats.registry import open_source
from statexchange.report.supply import supply_of, supply_picture
from statexchange.sharding.shards import full_box
from statexchange.storage.regions import slices_within
from statexchange.tensors import PACKED

__all__ = ["FoundError", "Outcome", "preload", "run"]

SPARE_BYTES, BYTES_PER_BYTE = 512 << 20, 64  # of memory: over what this process has, and for each byte of the files
CPU_S, CPU_S_PER_BYTE = 2.0, 20e-6  # of processor time, for each step: one may open the source several times
HANG_S = 300
MAX_READ_BYTES = 32 << 20  # of a tensor that is read here
MAX_SHOWN = 3  # tensors of one source
SECRET = "PASSWORD"
CODES = {number: name for name, number in EXIT_CODES.items()}
# Ranks are one process each; PeerError would mean that the package treats an own error as that of a peer.
UNEXPECTED = ("PeerError", "StallError", "INTERNAL", "INTERRUPTED", "TIMEOUT")


@dataclass(frozen=True)
class Outcome:
    """The outcome of one step."""

    step: str
    name: str
    problem: str | None = None


class FoundError(Exception):
    """A finding."""


def preload() -> None:
    """Import what the children need, so that the children do not."""
    for package in ("cli", "checkpoint", "comm", "exchange", "formats", "report", "storage"):
        for module in pkgutil.iter_modules(import_module(f"statexchange.{package}").__path__):
            if not module.name.startswith("mpi"):
                import_module(f"statexchange.{package}.{module.name}")
    for name in ("memory", "zip"):
        import_module(f"fsspec.implementations.{name}")
    torch.set_num_threads(1)


def nbytes_of(folder: Path) -> int:
    """Return the allocated bytes of all files, plus some for each name."""
    found = 0
    for path in folder.rglob("*"):
        status = path.lstat()
        found += 512 + min(status.st_size, 512 * status.st_blocks)
    return found


def run(folder: Path, path: str, source: Source, expected: dict[str, Any]) -> list[Outcome]:
    """Return the outcome of each step on what lies at `path`, a file, directory or URL in `folder`.

    `expected` are the tensors (dtype and shape) that the source had when it was whole. What is in the folder may be
    gone afterwards.
    """
    receive, send = os.pipe()
    gc.freeze()  # so that gc.collect in the child skips objects that exist already
    pid = os.fork()
    if not pid:
        os.close(receive)
        _in_child(send, folder, path, source, expected)
    os.close(send)
    found, unfinished = _received(receive, pid)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code or unfinished:
        name = signal.Signals(-code).name if code < 0 else f"exit {code}"
        stderr = (folder / "stderr").read_text(errors="replace")[-2000:] if (folder / "stderr").exists() else ""
        found.append(Outcome(unfinished or "end", name, f"the process ended with {name}: {stderr}"))
    return found


def _received(pipe: int, pid: int) -> tuple[list[Outcome], str]:
    """Return the outcomes that a child sends, and the step in which it ended early, if any."""
    found, data, current, ends = [], b"", "", time.monotonic() + HANG_S
    while True:
        ready, _, _ = select.select([pipe], [], [], max(0.0, ends - time.monotonic()))
        if not ready:
            os.kill(pid, signal.SIGKILL)
            found.append(Outcome(current, "HANG", f"{HANG_S} s without an end"))
            break
        chunk = os.read(pipe, 1 << 16)
        if not chunk:
            break
        *lines, data = (data + chunk).split(b"\n")
        for line in lines:
            record = json.loads(line)
            current = record if isinstance(record, str) else ""
            if not isinstance(record, str):
                found.append(Outcome(*record))
    os.close(pipe)
    return found, current


def _in_child(send: int, folder: Path, path: str, source: Source, expected: dict[str, Any]) -> NoReturn:
    code = 1
    try:
        errors = os.open(folder / "stderr", os.O_CREAT | os.O_WRONLY)
        os.dup2(errors, 2)
        os.dup2(errors, 1)
        nbytes = nbytes_of(folder)
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        room = size + SPARE_BYTES + BYTES_PER_BYTE * nbytes
        resource.setrlimit(resource.RLIMIT_AS, (room, room))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        allowed = CPU_S + CPU_S_PER_BYTE * nbytes
        for name, step in _Steps(folder, path, source, expected).all():
            _limit_cpu(allowed)
            os.write(send, json.dumps(name).encode() + b"\n")
            os.write(send, json.dumps([name, *_outcome(step, allowed)]).encode() + b"\n")
            gc.collect()  # tracebacks keep frames alive
        code = 0
    except BaseException:  # noqa: BLE001 (the parent fails with what is printed)
        traceback.print_exc(file=sys.__stderr__)
        sys.__stderr__.flush()
    finally:
        os._exit(code)


def _limit_cpu(allowed: float) -> None:
    """Let the kernel kill this process if it uses far more processor time than `allowed` from now on."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + 4 * allowed) + 2, hard))


def _outcome(step: Callable[[], str], allowed: float) -> tuple[str, str | None]:
    """Return the name of a step's outcome, and why it is a finding."""
    began = time.process_time()
    try:
        name, problem = step(), None
    except FoundError as found:
        name, problem = "FINDING", str(found)
    except sx.StateExchangeError as error:
        name = type(error).__name__
        problem = _flaw_of_text(str(error))
        if name in UNEXPECTED or error.code == "INTERNAL":
            problem = traceback.format_exc()
    except BaseException as error:  # noqa: BLE001 (it is what is looked for)
        name, problem = type(error).__name__, traceback.format_exc()
    took = time.process_time() - began
    if problem is None and took > allowed:
        problem = f"took {took:.1f} s of processor time, {allowed:.1f} s are allowed"
    if problem is None and name in UNEXPECTED:
        problem = f"unexpected: {name}"
    return name, problem[-4000:] if problem is not None else None


def _flaw_of_text(text: str) -> str | None:
    """Return why this output is a finding, with its end."""
    found = [repr(flaw) for flaw in (SECRET, "Traceback (most recent call last)", "\x1b") if flaw in text]
    return f"{', '.join(found)} in the output: {text[-2500:]}" if found else None


def _command(*words: str) -> str:
    """Run a command of the command line; return the name of its exit code."""
    return _command_output(*words)[0]


def _command_output(*words: str) -> tuple[str, str]:
    """Run a command of the command line; return the name of its exit code, and its output."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            main(list(words))
        except SystemExit as ended:
            code = ended.code
    flaw = _flaw_of_text(text.getvalue())
    if flaw is not None:
        raise FoundError(flaw)
    if code not in CODES or code == EXIT_CODES["INTERNAL"]:
        raise FoundError(f"exit code {code}: {text.getvalue()[-3000:]}")
    return CODES[code], text.getvalue()


class _Steps:
    """The steps of one case. The values of different readers are compared."""

    def __init__(self, folder: Path, path: str, source: Source, expected: dict[str, Any]) -> None:
        self._folder = folder
        self._path = path
        self._source = source
        self._expected = expected
        self._read: dict[str, str] = {}  # digests by name
        self._zeros: dict[str, int] = {}  # elements that are 0, by name
        self._verified = ""
        self._layout = folder / LAYOUT
        self._out = folder / "out"

    def all(self) -> Iterator[tuple[str, Callable[[], str]]]:
        """Yield name and function of each step, in order."""
        yield "info", lambda: _command("info", self._path, "--json")
        yield "info, text", lambda: _command("info", self._path)
        yield "ls", lambda: _command("ls", self._path)
        yield "verify", self._verify
        yield "verify --values", self._verify_values
        yield "show", lambda: _command("show", self._path)
        yield "show, JSON", lambda: _command("show", self._path, "--json")
        yield "scan", lambda: _command("scan", str(self._folder), "--json")
        yield "diff", self._diff
        yield "report", self._report
        yield "open_checkpoint", self._open
        yield "show, tensors", self._show_tensors
        yield "load_checkpoint", self._load
        options = ["--layout", str(self._layout)] if self._layout.exists() else []
        self._out.mkdir()
        yield "merge --dry-run", lambda: self._dry_run(options)
        yield "merge", lambda: self._merge(options)
        if "://" in self._path:
            return
        yield "verify, URL", self._verify_in_memory
        yield "seal --dry-run", self._seal_dry_run
        yield "seal", self._seal
        if Path(self._path).is_dir():
            yield "NFSWorkspace", self._workspace
            yield "merge --overwrite", self._overwrite
            yield "save_checkpoint", self._save

    def _verify(self) -> str:
        self._verified = _command("verify", self._path)
        return self._verified

    def _verify_values(self) -> str:
        """Check the values, too; this finds all that `verify` found, and may only find more."""
        name = _command("verify", self._path, "--values")
        if name != self._verified and (self._verified, name) != ("OK", "FINDINGS"):
            raise FoundError(f"verify ended in {self._verified}, verify --values in {name}")
        return name

    def _show_tensors(self) -> str:
        """Show some tensors; compare what is counted of one with what was read, unless its copies differ."""
        with open_source(self._path) as source:
            shapes = {tensor.shard.name: tensor.shard.global_shape for _, tensor in source.shards()}
            names = {name: ("--slice", ":2") if shapes[name] else () for name in list(shapes)[:MAX_SHOWN]}
        worst = "OK"
        for name, options in names.items():
            code, text = _command_output("show", self._path, "--json", *options, "--", name)
            worst = code if worst == "OK" else worst
            if self._verified != "OK" or name not in self._zeros:
                continue
            statistics = json.loads(text[text.index("{") :])["data"]["statistics"]
            if statistics["num_zeros"] != self._zeros[name]:
                raise FoundError(f"{name!r} has {self._zeros[name]} zeros, show counts {statistics['num_zeros']}")
        return worst

    def _report(self) -> str:
        with open_source(self._path, strict=False) as source:
            supply_picture(supply_of(source))
        return "OK"

    def _diff(self) -> str:
        """Compare the source with itself, in all its sections."""
        name = _command("diff", self._path, self._path, "--section", "all")
        if name == "FINDINGS":
            raise FoundError("the source differs from itself")
        return name

    def _open(self) -> str:
        """Read every tensor; hash those with digests again. A read of a large tensor allocates its whole size."""
        errors = []
        with sx.open_checkpoint(self._path) as found, open_source(self._path) as source:
            shards: dict[str, list[Any]] = {}
            for _, tensor in source.shards():
                shards.setdefault(tensor.shard.name, []).append(tensor)
            for name in found:
                if found[name].nbytes > MAX_READ_BYTES:
                    continue
                try:
                    array = found[name].read()
                except sx.StateExchangeError as error:
                    errors.append(error)
                    continue
                self._read[name] = xxhash.xxh3_128_hexdigest(array.tobytes())
                if found[name].dtype not in PACKED:
                    self._zeros[name] = array.size - int(np.count_nonzero(array))
                for tensor in shards.get(name, ()):
                    _check_digests(tensor, array)
        for error in errors:
            raise error
        return "OK"

    def _load(self) -> str:
        if self._source.state is not None:
            sx.load_checkpoint(self._source.state(), self._path, strict=False)
            return "OK"
        state = {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in self._expected.items()}
        report = sx.load_checkpoint(state, self._path, strict=False)
        for name, tensor in state.items():
            if name not in report.missing and name in self._read:
                self._compare("load_checkpoint", name, tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        return "OK"

    def _compare(self, reader: str, name: str, data: bytes) -> None:
        if name in self._read and xxhash.xxh3_128_hexdigest(data) != self._read[name]:
            raise FoundError(f"{name!r}: {reader} and open_checkpoint have read different bytes")

    def _dry_run(self, options: list[str]) -> str:
        try:
            return _command("merge", self._path, str(self._out / "x"), "--dry-run", *options)
        finally:
            self._check_out([])

    def _check_out(self, names: list[str]) -> None:
        left = sorted(os.listdir(self._out))
        if left != names:
            raise FoundError(f"beside the target lies {left}, not {names}")

    def _merge(self, options: list[str]) -> str:
        """Merge; then verify the result, and compare its values with those that were read."""
        name, text = _command_output("merge", self._path, str(self._out / "x"), "--threads", "1", *options)
        self._check_out(["x"] if name == "OK" else [])
        if name == "OK":
            self._check_whole(self._out / "x")
            with sx.open_checkpoint(self._out / "x") as merged:
                for tensor in self._read.keys() & merged.keys() if not options else ():
                    self._compare("merge", tensor, merged[tensor].read().tobytes())
            are_renamed = " of a wrapper was removed from all names" in text
            if not options and not are_renamed and _command("diff", self._path, str(self._out / "x")) != "OK":
                raise FoundError("what was merged differs from the source")
        return name

    def _check_whole(self, path: Path) -> None:
        found = _command("verify", str(path))
        if found != "OK":
            raise FoundError(f"what was merged does not verify: {found}")

    def _verify_in_memory(self) -> str:
        """Verify the same bytes in an object store, under a URL with a password."""
        import fsspec

        memory = fsspec.filesystem("memory")
        root = f"/joe:{SECRET}@fuzz"
        top = Path(self._path)
        files = [top] if top.is_file() else [path for path in sorted(top.rglob("*")) if path.is_file()]
        for path in files:
            if path.stat().st_size < 16 << 20:
                inside = path.relative_to(top.parent)
                memory.pipe_file(f"{root}/{inside}".encode("utf-8", "replace").decode(), path.read_bytes())
        return _command("verify", f"memory:/{root}/{top.name}")

    def _seal_dry_run(self) -> str:
        before = _names_of(self._folder)
        try:
            return _command("seal", self._path, "--dry-run")
        finally:
            self._check_unchanged(before, "a dry run of seal")

    def _seal(self) -> str:
        """Add a manifest, which changes nothing else, and with which everything verifies; then remove it again."""
        before = _names_of(self._folder)
        name = _command("seal", self._path)
        path = Path(self._path)
        manifest = (path if path.is_dir() else path.parent) / "statexchange.json"
        if name == "OK":
            second = _command("seal", self._path)
            if second != "UNSAFE":
                raise FoundError(f"a second seal ended in {second}")
            self._check_whole(manifest.parent)
            manifest.unlink()
        self._check_unchanged(before, f"a seal that ended in {name}")
        return name

    def _check_unchanged(self, before: dict[str, Any], what: str) -> None:
        after = _names_of(self._folder)
        after.pop(str(self._folder / "stderr"), None)
        before.pop(str(self._folder / "stderr"), None)
        if after != before:
            raise FoundError(f"{what} has changed {sorted({*after.items()} ^ {*before.items()})[:4]}")

    def _workspace(self) -> str:
        config, weights = sx.NFSWorkspace(self._path).read_configs_and_weights_from_rank(0)
        return "OK" if config is not None or weights else "nothing"

    def _overwrite(self) -> str:
        """Publish a small checkpoint over the source; if that is refused, nothing may change."""
        good = self._folder / "good"
        good.mkdir()
        (good / "model.safetensors").write_bytes(b"\x4a\0\0\0\0\0\0\0" + _GOOD + b"0123")
        before = _names_of(Path(self._path))
        name = _command(
            "merge", str(good / "model.safetensors"), self._path, "--overwrite", "--resume", "--threads", "1"
        )
        if name == "OK":
            self._check_whole(Path(self._path))
        elif _names_of(Path(self._path)) != before:
            raise FoundError(f"a merge that ended in {name} has changed the target")
        return name

    def _save(self) -> str:
        """Save in the place of what lies there, and load that; if it is refused, all stays as it was."""
        before = _names_of(Path(self._path))
        try:
            sx.save_checkpoint({"w": torch.ones(3), "step": 3}, self._path, overwrite=True)
        except sx.StateExchangeError:
            if _names_of(Path(self._path)) != before:
                raise FoundError("a save that was refused has changed the target") from None
            raise
        state: dict[str, Any] = {"w": torch.zeros(3), "step": 0}
        sx.load_checkpoint(state, self._path)
        if state["w"].tolist() != [1, 1, 1] or state["step"] != 3:
            raise FoundError(f"another state was loaded than was saved: {state}")
        self._check_whole(Path(self._path))
        return "OK"


def _check_digests(tensor: Any, array: Any) -> None:
    shard = tensor.shard
    for box, stored in zip(shard.boxes, tensor.byte_ranges, strict=True):
        known = [*stored.parts, *([(box, stored.digest)] if stored.digest is not None else [])]
        for region, digest in known:
            data = array[slices_within(region, full_box(shard.global_shape))].tobytes()
            if region.numel and xxhash.xxh3_128_hexdigest(data) != digest:
                raise FoundError(f"{shard.name!r}: what was read of {region} differs from its digest")


_GOOD = b'{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'.ljust(0x4A)


def _names_of(folder: Path) -> dict[str, Any]:
    """Return everything below a directory: names, with sizes and times of files."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        found[str(path)] = (status.st_mode, status.st_size, status.st_mtime_ns) if path.is_file() else status.st_mode
    return found
