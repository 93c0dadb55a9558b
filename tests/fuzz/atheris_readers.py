"""Fuzz the readers of pickles, headers, manifests and frameworks with atheris, which follows coverage.

``python tests/fuzz/atheris_readers.py TARGET --minutes 30``, with one of TARGETS, ends when libFuzzer has found no new
edge for 30 minutes. It starts itself again as libFuzzer's process, reads that process's output, and reports when it
found the last new edge. A reader may raise nothing but a StateExchangeError. An input that raises another error, or
takes 10 s of processor time or 2 GiB, is kept as a file in the directory of --findings; ``... pickle --input FILE``
runs it again.

The first byte of an input selects the kind of file that it is read as; for the target "frameworks" the first two select
one file of one directory that a framework wrote. All files lie in memory.
"""

from __future__ import annotations

import argparse
import collections
import functools
import io
import json
import os
import random
import re
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

_CHILD = "STATEXCHANGE_FUZZ_CHILD"  # only for the process that this one starts
_COVERAGE = re.compile(rb"cov: (\d+) ft: (\d+) .*exec/s: (\d+)")
_CPU_S, _HANG_S, _LIMIT_MB = 10, 300, 2048  # of one input; a busy machine may stop the process for long
MAX_BYTES, _MAX_DIRECTORY_BYTES = 1 << 16, 1 << 20
TARGETS = ("pickle", "header", "manifest", "frameworks")


def main() -> int:
    """Fuzz one target; return 1 if there are findings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--minutes", type=float, default=30, help="end when no new edge has come for so long")
    parser.add_argument("--total-minutes", type=float, default=24 * 60, help="end after so long in any case")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corpus", help="a directory that is read, and gets what reaches new edges")
    parser.add_argument("--findings", default="fuzz-findings")
    parser.add_argument("--input", help="run one input, and nothing else")
    options = parser.parse_args()
    if _CHILD in os.environ:
        _fuzz(options.target, options.seed, os.environ[_CHILD].split("\n"))
    os.makedirs(options.findings, exist_ok=True)
    with tempfile.TemporaryDirectory() as own:
        if options.input is not None:
            return _follow([options.input], options)
        corpus = options.corpus or own
        os.makedirs(corpus, exist_ok=True)  # without its directory libFuzzer ends at once
        return _follow([corpus, f"-artifact_prefix={options.findings}/{options.target}-"], options)


def _follow(arguments: list[str], options: argparse.Namespace) -> int:
    """Run libFuzzer in a process until it has found no new edge for long; print its progress."""
    limits = [f"-timeout={_HANG_S}", f"-rss_limit_mb={_LIMIT_MB}", f"-max_len={MAX_BYTES}", f"-seed={options.seed}"]
    environment = {**os.environ, _CHILD: "\n".join([*arguments, *limits])}
    command = [sys.executable, __file__, options.target, "--seed", str(options.seed)]
    began = last = time.monotonic()
    edges = features = rate = 0
    last_lines: deque[str] = deque(maxlen=60)  # with the error, if one ends it
    reader = _Lines(subprocess.Popen(command, stderr=subprocess.PIPE, env=environment))
    while True:
        try:
            line = reader.next()
        except KeyboardInterrupt:
            reader.end()
            continue
        if line is None:
            break
        now = time.monotonic()
        found = _COVERAGE.search(line)
        if found is not None:
            features, rate = int(found[2]), int(found[3])
            if int(found[1]) > edges:
                edges, last = int(found[1]), now
                print(f"{now - began:7.0f} s  {edges} edges, {features} features", flush=True)
        elif line:
            last_lines.append(line.decode(errors="replace"))
        if not edges:  # it still imports modules and makes its first inputs
            began = last = now
        if now - last > 60 * options.minutes or now - began > 60 * options.total_minutes:
            reader.end()
    is_found = reader.code != 0 and not reader.is_asked_to_end
    if is_found:
        print("\n".join(last_lines))
    text = f"{options.target}: {edges} edges, {features} features, the last new edge after {last - began:.0f} s of "
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = used.ru_utime + used.ru_stime
    print(f"{text}{time.monotonic() - began:.0f} s, {rate} inputs/s, {cpu_s:.0f} s of processor time")
    return int(is_found)


class _Lines:
    """The lines that a process prints, until it ends."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.is_asked_to_end = False
        assert process.stderr is not None
        self._pipe = process.stderr
        os.set_blocking(self._pipe.fileno(), False)
        self._data = b""
        self.code = 0

    def next(self) -> bytes | None:
        """Return the next line; b"" if none came for a second, None at the end."""
        for _ in range(10):
            chunk = self._pipe.read(1 << 16)
            if chunk == b"":
                self.code = self._process.wait()
                return None
            self._data += chunk or b""
            line, newline, rest = self._data.partition(b"\n")
            if newline:
                self._data = rest
                return line
            time.sleep(0.1)
        return b""

    def end(self) -> None:
        """Signal libFuzzer to end, once."""
        if not self.is_asked_to_end:
            self._process.send_signal(signal.SIGINT)
        self.is_asked_to_end = True


# The process of libFuzzer


def _fuzz(target: str, seed: int, arguments: list[str]) -> NoReturn:
    import atheris

    with atheris.instrument_imports(include=["statexchange"]):
        readers = _Readers()
    read: Callable[[bytes], None] = getattr(readers, target)
    if os.path.isdir(arguments[0]):
        for number, data in enumerate(_seeds(target)):
            Path(arguments[0], f"seed-{number}").write_bytes(data)
    chance = random.Random(seed)

    def run(data: bytes) -> None:
        began = time.process_time()
        read(data)
        if time.process_time() - began > _CPU_S:
            raise TimeoutError(f"it took {time.process_time() - began:.1f} s of processor time")

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        from mutate import mutated_pickle
        from mutate_json import mutated_json

        chance.seed(seed)
        if chance.random() < 0.5:
            return atheris.Mutate(data, max_size)  # type: ignore[no-any-return]
        try:
            begin = 2 if target == "frameworks" else 1
            if data[begin : begin + 1] == b"\x80":
                new = mutated_pickle(data[begin:], chance)[0]
            else:
                new = mutated_json(data[begin:].decode(), chance)[0].encode("utf-8", "surrogatepass")
        except Exception:  # noqa: BLE001 (it is not of this kind, or not any longer)
            return atheris.Mutate(data, max_size)  # type: ignore[no-any-return]
        return (data[:begin] + new)[:max_size]

    atheris.Setup([sys.argv[0], *arguments], run, custom_mutator=mutate)
    atheris.Fuzz()
    sys.exit(0)


class _Readers:
    """One method per target. Modules that are imported when this is made are instrumented."""

    def __init__(self) -> None:
        from statexchange import errors
        from statexchange.conversions import plan
        from statexchange.conversions import rules as conversion_rules
        from statexchange.formats import dcp, huggingface, open_checkpoint, registry, torch_file
        from statexchange.sharding import rules
        from statexchange.storage import location, store, tensorfile, workspace
        from statexchange.storage.publish import claim

        for name in registry.FORMATS:  # imported where they are tried, which would be too late
            import_module(f"statexchange.formats.{name}")

        self._error = errors.StateExchangeError
        self._formats = {"torch": torch_file, "dcp": dcp, "hf": huggingface}
        self._open = open_checkpoint.OpenCheckpoint
        self._read_any = registry.read_opened
        self._layout = rules.Layout
        self._conversion = conversion_rules.ConversionRules
        self._plan_conversion, self._tensor_info = plan.plan_conversion, plan.TensorInfo
        self._directories: list[_File] | None = None
        self._claim = claim.Claim
        self._json = location
        self._budget = store.Budget
        self._opened_path = location.OpenedPath
        self._workspace = workspace
        self._save_directory = tensorfile
        self._store_of = _memory_stores(store.Store, store.StoredFile, errors.NotFoundError)

    def pickle(self, data: bytes) -> None:
        """Read the data as the pickle of a file of torch.save, or as the metadata of a DCP directory."""
        kind, pickled = data[:1], data[1:]
        if kind == b"d":
            self._read("dcp", {".metadata": pickled, "__0_0.distcp": _zip(_ENTRY)})
        else:
            self._read("torch", {"x.pt": _zip(pickled)})

    def header(self, data: bytes) -> None:
        """Read the data as a safetensors file, as a header and as many bytes as it claims, or as a workspace's file."""
        kind, text = data[:1], data[1:]
        if kind == b"r":
            self._read("hf", {"model.safetensors": text})
        elif kind == b"w":
            expected = {"run": "job", "round": 1, "rank": 0, "world_size": 1}
            self._try(lambda: self._workspace.RankFile(self._store_of({"x": _tensor_file(text)}).open("x"), expected))
        else:
            self._read("hf", {"model.safetensors": _tensor_file(text)})

    def manifest(self, data: bytes) -> None:
        """Read the data as one of the JSON files: a manifest, an index, a claim, a layout, a conversion or another."""
        kind, text = data[:1], data[1:]
        tensors = {"model.safetensors": _tensor_file(_HEADER)}
        if kind == b"i":
            self._read("hf", {**tensors, "model.safetensors.index.json": text})
        elif kind == b"s":
            sealed = _with_own_digest(text)
            parse, of_save = self._json.parse_json, self._save_directory.SaveManifest.from_json
            self._try(lambda: of_save(parse(sealed, "x", self._budget("x")), "x"))
        elif kind == b"v":
            written = text.decode(errors="replace")
            leaves: dict[str, str] = collections.defaultdict(str)
            decode = functools.partial(self._json.values.decode_parsed, leaves=leaves)
            self._try(lambda: self._json.decode_stored(written, "x", self._budget("x"), decode))
        elif kind == b"c":
            self._try(lambda: self._claim.parse(text, "x"))
        elif kind == b"l":
            self._try(lambda: self._layout.parse(self._json.parse_json(text, "x", self._budget("x"))))
        elif kind == b"x":
            self._try(lambda: self._convert(text))
        else:
            self._read("hf", {**tensors, "statexchange.json": text})

    def frameworks(self, data: bytes) -> None:
        """Read a framework's directory in which the data is one file, or the pickle in it."""
        from corpus import SOURCES

        if self._directories is None:
            self._directories = _files_of_frameworks(SOURCES)
        number = int.from_bytes(data[:2], "big")
        if number < len(self._directories):
            file = self._directories[number]
            self._read("any", file.directory_with(data[2:]), file.opened)

    def _convert(self, text: bytes) -> None:
        """Plan the conversion of the tensors that its rules name."""
        conversion = self._conversion.parse(self._json.parse_json(text, "x", self._budget("x")), "x")
        names = [
            pattern.text.replace("{", "").replace("}", "") for rule in conversion.rules for pattern in rule.sources
        ]
        tensors = {name: self._tensor_info("F32", (24, 8)) for name in names}
        for one in (conversion, conversion.inverse()):
            self._try(lambda one=one: self._plan_conversion(one, tensors, {}))  # type: ignore[misc]

    def _read(self, kind: str, files: dict[str, bytes], opened_file: str | None = None) -> None:
        """Open a checkpoint, and read its tensors if they are small."""
        place = self._opened_path("x", self._store_of(files), opened_file)

        def read() -> None:
            source = self._read_any(place) if kind == "any" else self._formats[kind].read(place)
            found = self._open(source)
            for name in list(found)[:10]:
                if found[name].nbytes < 1 << 16:
                    self._try(found[name].read)

        self._try(read)

    def _try(self, work: Callable[[], object]) -> None:
        try:
            work()
        except self._error as error:
            str(error)


def _memory_stores(base: type[Any], file_base: type[Any], absent: type[Exception]) -> Callable[[dict[str, bytes]], Any]:
    """A directory in memory, as a Store."""

    class File(file_base):  # type: ignore[misc]
        version, local_identity, shared_identity = ["x"], ["x"], None

        def __init__(self, path: str, data: bytes) -> None:
            self.path, self.size, self._data = path, len(data), data

        def read_into(self, buffer: memoryview, offset: int) -> None:
            assert offset + len(buffer) <= self.size
            buffer[:] = self._data[offset : offset + len(buffer)]

        def check_unchanged(self) -> None: ...

    class Directory(base):  # type: ignore[misc]
        def __init__(self, files: dict[str, bytes], path: str = "/x") -> None:
            self._files = files
            self.path = path

        @property
        def listing(self) -> dict[str, str]:
            tops = {name.partition("/")[0] for name in self._files}
            return {top: "file" if top in self._files else "directory" for top in sorted(tops)}

        def open(self, name: str) -> File:
            self.check_name(name)
            if name not in self._files:
                raise absent("no such file", path=name)
            return File(self.path_of(name), self._files[name])

        def below(self, name: str, *, private: bool = False) -> Any:
            below = {path[len(name) + 1 :]: data for path, data in self._files.items() if path.startswith(f"{name}/")}
            if not below:
                raise absent("no such directory", path=name)
            return Directory(below, self.path_of(name))

        def is_current(self) -> bool:
            return True

        def close(self) -> None: ...

    return Directory


@dataclass(frozen=True)
class _File:
    """A file of a directory that a framework wrote, which inputs replace."""

    directory: dict[str, bytes]
    name: str
    opened: str | None

    @property
    def content(self) -> bytes:
        """The part of a source that an input replaces: the pickle in a file of torch.save, or the whole file."""
        data = self.directory[self.name]
        pickled = _pickle_in(data)
        return data if pickled is None else pickled[1]

    def directory_with(self, content: bytes) -> dict[str, bytes]:
        """Return the directory with other content in the file."""
        data = self.directory[self.name]
        pickled = _pickle_in(data)
        if pickled is None:
            return {**self.directory, self.name: content}
        found = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(found, "w") as new:
            for member in old.namelist():
                new.writestr(member, content if member == pickled[0] else old.read(member))
        return {**self.directory, self.name: found.getvalue()}


def _pickle_in(data: bytes) -> tuple[str, bytes] | None:
    """Return the name and the content of the pickle in a file of torch.save; None for another file."""
    if not zipfile.is_zipfile(io.BytesIO(data)):
        return None
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        name = next((name for name in file.namelist() if name.endswith("data.pkl")), None)
        return None if name is None else (name, file.read(name))


def _files_of_frameworks(sources: dict[str, Any]) -> list[_File]:
    """Return the files of the directories in the corpus that are samples, or have several files."""
    found = []
    with tempfile.TemporaryDirectory() as root:
        for number, source in enumerate(sources.values()):
            folder = Path(root, str(number))
            folder.mkdir()
            path = Path(source.path.format(folder))
            if source.slow or "://" in source.path:
                continue
            try:
                source.make(folder)
            except ModuleNotFoundError:
                continue
            top = path if path.is_dir() else path.parent
            directory = {}
            for inside in sorted(inside for inside in top.rglob("*") if inside.is_file()):
                directory[str(inside.relative_to(top))] = inside.read_bytes()
            if len(directory) > 1 and sum(map(len, directory.values())) < _MAX_DIRECTORY_BYTES:
                opened = path.name if path.is_file() else None
                found += [_File(directory, name, opened) for name in directory]
    return found


_HEADER = b'{"w":{"dtype":"U8","shape":[2,4],"data_offsets":[0,8]}}'
_ENTRY = b""


def _tensor_file(header: bytes) -> bytes:
    """Return a safetensors file with this header, and the bytes that its tensors need if they are few."""
    ends = [int(found) for found in re.findall(rb'"data_offsets":\s*\[\d{1,5},\s*(\d{1,5})\]', header)]
    return struct.pack("<Q", len(header)) + header + bytes(max(ends, default=0))


def _zip(pickled: bytes) -> bytes:
    found = io.BytesIO()
    with zipfile.ZipFile(found, "w") as file:
        for name, content in (("data.pkl", pickled), ("data/0", bytes(16)), ("data/1", bytes(96))):
            file.writestr(f"archive/{name}", content)
    return found.getvalue()


def _with_own_digest(text: bytes) -> bytes:
    from mutate_json import with_own_digest

    return with_own_digest(text.decode(errors="replace")).encode("utf-8", "surrogatepass")


def _seeds(target: str) -> list[bytes]:
    """Return inputs from those sources of the corpus that can be made here: some need torch."""
    from corpus import HOSTILE, SOURCES

    if target == "frameworks":
        files = enumerate(_files_of_frameworks(SOURCES))
        found = [number.to_bytes(2, "big") + file.content for number, file in files]
        return [data for data in found if len(data) < MAX_BYTES]
    found = []
    if target == "manifest":
        from statexchange.conversions.choice import BUILTIN, read_builtin
        from statexchange.storage.memory_directory import headers_to_bytes

        found += [b"x" + json.dumps(read_builtin(name)).encode() for name in BUILTIN]
        found.append(b"p" + headers_to_bytes({"rank-00000-of-00001.safetensors": "0" * 32}))
    with tempfile.TemporaryDirectory() as root:
        for number, source in enumerate([*SOURCES.values(), *HOSTILE.values()]):
            folder = Path(root, str(number))
            folder.mkdir()
            try:
                source.make(folder)
            except ModuleNotFoundError:
                continue
            for path in sorted(path for path in folder.rglob("*") if path.is_file()):
                if path.stat().st_size < MAX_BYTES:
                    found += inputs_of(target, path)
    return [data for data in found if len(data) < MAX_BYTES]


def inputs_of(target: str, path: Path) -> list[bytes]:
    """Return the inputs for a target that a file of a source makes."""
    data, name = path.read_bytes(), path.name
    if target == "pickle":
        if name == ".metadata":
            return [b"d" + data]
        if not data.startswith(b"PK") or zipfile.is_zipfile(path) is False:
            return []
        with zipfile.ZipFile(path) as file:
            return [b"t" + file.read(member) for member in file.namelist() if member.endswith("data.pkl")]
    if name.endswith(".safetensors") and target == "header":
        header = data[8 : 8 + struct.unpack("<Q", data[:8])[0]]
        return [b"r" + data, b"h" + header.rstrip(), b"w" + header.rstrip()]
    if target != "manifest":
        return []
    if name.endswith(".safetensors") and b"config" in data:
        metadata = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]]).get("__metadata__", {})
        return [b"v" + json.loads(metadata["statexchange"])["config"].encode()]
    kinds = {
        "statexchange.json": b"m",
        "save.json": b"s",
        "layout.json": b"l",
        ".statexchange-claim.json": b"c",
    }
    kind = b"i" if name.endswith(".index.json") else kinds.get(name)
    if kind is None and name.endswith(".json") and b'"rules"' in data:
        kind = b"x"
    return [kind + data] if kind is not None else []


if __name__ == "__main__":
    sys.exit(main())
