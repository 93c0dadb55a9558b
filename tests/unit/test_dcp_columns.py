"""A large DCP directory is read in columns, and as the general reader reads it."""

from __future__ import annotations

import io
import itertools
import json
import pickle
import pickletools
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import Shard

import statexchange as sx
from statexchange.checkpoint.merge import merge_checkpoint
from statexchange.errors import CorruptError, StateExchangeError
from statexchange.formats import dcp, pickle_runs
from statexchange.formats.registry import open_checkpoint, open_source
from statexchange.report.summary import summarize
from statexchange.report.tensor_facts import tensor_rows
from statexchange.report.verify import verify
from statexchange.testing import run_ranks

Cut = list[tuple[tuple[int, ...], tuple[int, ...]]]


@pytest.fixture
def in_columns(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Return what chooses whether small metadata is read in columns."""

    def choose(in_columns: bool) -> None:
        monkeypatch.setattr(dcp, "_LONG_BYTES", 0 if in_columns else 1 << 40)
        monkeypatch.setattr(pickle_runs, "_LEAST_RECORDS", 2)

    return choose


def grid(shape: tuple[int, ...], counts: tuple[int, ...]) -> Cut:
    """Return the boxes of a tensor that is cut as torch.chunk does."""
    runs = []
    for size, count in zip(shape, counts, strict=True):
        part = -(-size // count)
        runs.append([(begin, min(part, size - begin)) for begin in range(0, size, part)])
    return [(tuple(b for b, _ in chosen), tuple(s for _, s in chosen)) for chosen in itertools.product(*runs)]


def halves(shape: tuple[int, ...]) -> Cut:
    """Return two boxes of different sizes along the first dim."""
    first, rest, zeros = shape[0] // 3, shape[1:], (0,) * (len(shape) - 1)
    return [((0, *zeros), (first, *rest)), ((first, *zeros), (shape[0] - first, *rest))]


class Job:
    """What a job saves: metadata with torch's own classes, and the bytes of the files."""

    def __init__(self, seed: int, num_ranks: int = 12, *, has_empty: bool = True) -> None:
        self.random = random.Random(seed)
        self.kinds = [0, 1, 2, 3, 5, *([4] if has_empty else [])]
        self.num_ranks = num_ranks
        self.metadata = Metadata({}, {}, {})
        self.files: dict[str, bytearray] = {}
        entries = []
        for number in range(self.random.randrange(3, 9)):
            name = f"model.layers.{number}.weight"
            shape, cut = self._tensor()
            dtype = self.random.choice([torch.float32, torch.bfloat16, torch.int64])
            chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in cut]
            properties = TensorProperties(dtype)
            self.metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, torch.Size(shape), chunks)
            self.metadata.planner_data[name] = ("model", name[6:])
            ranks = self.random.sample(range(num_ranks), num_ranks) if self.random.random() < 0.5 else range(num_ranks)
            for at, (offsets, sizes) in enumerate(cut):
                tensor = torch.arange(torch.Size(sizes).numel()).reshape(sizes).to(dtype) + 7 * at
                entries.append((ranks[at % num_ranks], at, name, torch.Size(offsets), tensor))
        self.metadata.state_dict_metadata["step"] = BytesStorageMetadata()
        entries.append((0, None, "step", None, 7))
        for rank, index, name, offsets, value in sorted(entries, key=lambda entry: entry[0]):
            self.add(rank, index, name, offsets, value)

    def _tensor(self) -> tuple[tuple[int, ...], Cut]:
        num_ranks = self.num_ranks
        rows, columns = self.random.randrange(1, 40), self.random.randrange(2, 9)
        kind = self.random.choice(self.kinds)
        if kind == 0:
            return (rows,), grid((rows,), (min(rows, num_ranks),))
        if kind == 1:
            return (rows, columns), grid((rows, columns), (min(rows, 6), 2))
        if kind == 2:
            return (rows + 3, columns), halves((rows + 3, columns))
        if kind == 3:
            return (2, rows, 3, 2), grid((2, rows, 3, 2), (2, min(rows, 3), 1, 2))
        if kind == 4:  # some ranks have no row
            shape = (num_ranks // 2, columns)
            return shape, grid(shape, (shape[0], 1)) + [((shape[0], 0), (0, columns))] * (num_ranks - shape[0])
        return (num_ranks, columns), grid((num_ranks, columns), (num_ranks, 1))

    def add(self, rank: int, index: int | None, name: str, offsets: torch.Size | None, value: Any) -> None:
        """Add an entry to the file of a rank."""
        data = io.BytesIO()
        torch.save(value, data)
        file = self.files.setdefault(f"__{rank}_0.distcp", bytearray())
        # Each rank sends texts of its own.
        key = MetadataIndex("".join([*name]), offsets and torch.Size([*offsets]), index)
        paths = [info.relative_path for info in self.metadata.storage_data.values()]
        path = next((path for path in paths if path == f"__{rank}_0.distcp"), f"__{rank}_0.distcp")
        self.metadata.storage_data[key] = _StorageInfo(path, len(file), len(data.getvalue()))
        file += data.getvalue()

    def write(self, folder: Path) -> Path:
        """Write the directory."""
        folder.mkdir()
        (folder / ".metadata").write_bytes(pickle.dumps(self.metadata, protocol=4))
        for name, data in self.files.items():
            (folder / name).write_bytes(data)
        return folder


def outcome(action: Callable[[], Any]) -> Any:
    """Return what an action returns, or its error."""
    try:
        return action()
    except StateExchangeError as error:
        return type(error).__name__, str(error)


def look(folder: Path) -> Any:
    """Return all that is seen of a checkpoint. Parts without elements may be counted."""
    summary = summarize(folder)
    with open_source(folder, strict=False) as source:
        rows = sorted(row[:4] for row in tensor_rows(source))
        names, paths = source.names, source.paths
    findings = sorted(map(str, verify(folder).findings))
    problems = sorted(map(str, summary.problems))
    numbers = summary.num_parameters, summary.dtypes, summary.others, summary.nbytes
    return numbers, rows, names, paths, problems, findings


def read(folder: Path) -> dict[str, bytes]:
    """Return the values of all tensors."""
    with open_checkpoint(folder) as checkpoint:
        return {name: tensor.read().tobytes() for name, tensor in checkpoint.items()}


def loaded(folder: Path, num_ranks: int) -> list[dict[str, bytes]]:
    """Return what each rank loads: its rows of each tensor."""
    with open_checkpoint(folder) as checkpoint:
        wholes = {name: tensor.read(framework="pt").zero_() for name, tensor in checkpoint.items()}

    def load() -> dict[str, bytes]:
        comm = sx.init()
        state = {}
        for name, tensor in wholes.items():
            rows = tensor.chunk(comm.world_size)
            state[name] = rows[comm.rank].clone() if comm.rank < len(rows) else tensor[:0].clone()
        sx.load_checkpoint(state, folder, comm=comm, layout=dict.fromkeys(state, Shard(0)))
        return {name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in state.items()}

    return run_ranks(load, num_ranks)


def merged(folder: Path, out: Path, **options: Any) -> tuple[dict[str, bytes], Any]:
    """Merge a checkpoint; return the files, and the manifest without the digest of the plan and in any order."""
    merge_checkpoint(folder, out, section="all", **options)
    files = {path.name: path.read_bytes() for path in out.iterdir()}
    return files, {**json.loads(files.pop("statexchange.json")), "plan": None}


def specs_of(folder: Path) -> set[str]:
    """Return the names of the tensors that are cut evenly."""
    with open_source(folder, strict=False) as source:
        return set(source.specs)


def test_tensors_that_are_cut_evenly_are_specs(tmp_path: Path, in_columns: Callable[[bool], None]) -> None:
    job = Job(1).write(tmp_path / "job")
    in_columns(True)
    with open_source(job) as source:
        specs = source.specs
        assert specs.keys() < source.tensor_names == set().union(*(file.tensors for file in source.files))
        for name, spec in specs.items():
            for number in spec.ranks:
                assert source.files[number].tensors[name].shard == spec.shard_of(number)
    assert len(specs) > 1
    in_columns(False)
    assert not specs_of(job)


@pytest.mark.parametrize("seed", range(12))
def test_columns_read_as_the_general_reader(seed: int, tmp_path: Path, in_columns: Callable[[bool], None]) -> None:
    job = Job(seed).write(tmp_path / "job")
    of_ways = []
    for way in (False, True):
        in_columns(way)
        out = merged(job, tmp_path / f"out{way}")
        renamed = merged(job, tmp_path / f"renamed{way}", rename=[("model", "m")], exclude="*.1.weight")
        section = outcome(lambda: merge_checkpoint(job, tmp_path / "none", section="optimizer", dry_run=True))
        of_ways.append((look(job), read(job), out, renamed, section, loaded(job, 1 + seed % 3)))
    assert of_ways[0] == of_ways[1]


def damaged(job: Job, folder: Path, rng: random.Random) -> str:
    """Damage a job that was written; return what was done."""
    stored, described = job.metadata.storage_data, job.metadata.state_dict_metadata
    keys = [key for key in stored if key.offset is not None]
    key = rng.choice(keys)
    tensor = described[key.fqn]
    kinds = "no entry,no chunk,moved,overlap,length,file name,dtype,gone,cut,extra"
    kind = rng.choice(kinds.split(","))
    if kind == "no entry":
        del stored[key]
    elif kind == "no chunk":
        del tensor.chunks[rng.randrange(len(tensor.chunks))]
    elif kind == "moved":
        stored[MetadataIndex(key.fqn, torch.Size([offset + 1 for offset in key.offset]), 0)] = stored.pop(key)
    elif kind == "overlap":
        stored[key].offset += rng.choice([-3, 3])
    elif kind == "length":
        stored[key].length = rng.choice([0, 10, 1 << 40])
    elif kind == "file name":
        stored[key].relative_path = rng.choice(["../x", "__99_0.distcp", "no"])
    elif kind == "dtype":
        tensor.properties = TensorProperties(torch.complex32)
    elif kind == "extra":
        tensor.chunks.append(rng.choice(tensor.chunks))
    (folder / ".metadata").write_bytes(pickle.dumps(job.metadata, protocol=4))
    file = folder / rng.choice([*job.files])
    if kind == "gone":
        file.unlink()
    elif kind == "cut":
        file.write_bytes(file.read_bytes()[: -rng.randrange(1, 2000)])
    return kind


@pytest.mark.parametrize("seed", range(20))
def test_damage_is_the_same_error_in_columns(seed: int, tmp_path: Path, in_columns: Callable[[bool], None]) -> None:
    job = Job(seed)
    folder = job.write(tmp_path / "job")
    kind = damaged(job, folder, random.Random(seed))
    of_ways = []
    for way in (False, True):
        in_columns(way)
        of_ways.append(outcome(partial(merged, folder, tmp_path / f"out{way}")))
    assert of_ways[0] == of_ways[1], kind


def test_verify_reports_a_broken_part_and_reads_all_others(tmp_path: Path, in_columns: Callable[[bool], None]) -> None:
    job = Job(1)
    folder = job.write(tmp_path / "job")
    in_columns(True)
    num_boxes = verify(folder).num_boxes
    with open_source(folder) as source:
        name, spec = next((name, spec) for name, spec in source.specs.items() if len(spec.ranks) > 2)
        file = Path(source.files[spec.ranks[1]].path)
    place = next(
        info for key, info in job.metadata.storage_data.items() if key.fqn == name and info.relative_path == file.name
    )
    data = bytearray(file.read_bytes())
    data[place.offset + place.length - 22] ^= 1  # of the record at the end of its archive
    file.write_bytes(data)
    report = verify(folder)
    assert [(type(error), error.name, error.path) for error in report.findings] == [(CorruptError, name, str(file))]
    assert report.num_boxes == num_boxes - 1


@pytest.mark.parametrize("seed", range(4))
def test_changed_bytes_of_metadata_are_read_alike(
    seed: int, tmp_path: Path, in_columns: Callable[[bool], None]
) -> None:
    job = Job(seed, has_empty=False)  # whose places do not count
    folder = job.write(tmp_path / "job")
    data = (folder / ".metadata").read_bytes()
    rng = random.Random(seed)
    for _ in range(40):
        changed = bytearray(data)
        for _ in range(rng.choice([1, 1, 1, 4])):
            changed[rng.randrange(11, len(data))] = rng.choice([rng.randrange(256), *b"KMJh)uq\x94"])
        (folder / ".metadata").write_bytes(changed)
        of_ways = []
        for way in (False, True):
            in_columns(way)
            of_ways.append(outcome(partial(read, folder)))
        assert of_ways[0] == of_ways[1], bytes(changed)


def many_boxes(num_ranks: int = 40) -> Job:
    """Return a job with tensors that are cut evenly; the boxes of all but the first are runs in the metadata."""
    job = Job(0, num_ranks)
    job.metadata, job.files = Metadata({}, {}, {}), {}
    for name in "abc":
        described = [ChunkStorageMetadata(torch.Size([rank]), torch.Size([1])) for rank in range(num_ranks)]
        properties = TensorProperties(torch.float32)
        job.metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, torch.Size([num_ranks]), described)
    for rank in range(num_ranks):
        for name in "abc":
            job.add(rank, 0, name, torch.Size([rank]), torch.full((1,), float(rank)))
    return job


def framed(body: bytes) -> bytes:
    """Return a pickle of these opcodes in one frame."""
    return b"\x80\x04\x95" + len(body).to_bytes(8, "little") + body


def read_both_ways(folder: Path, in_columns: Callable[[bool], None]) -> list[Any]:
    """Return the outcomes of the general reader and of columns."""
    outcomes = []
    for way in (False, True):
        in_columns(way)
        outcomes.append(outcome(partial(read, folder)))
    return outcomes


def test_two_names_of_one_description_are_read_alike(tmp_path: Path, in_columns: Callable[[bool], None]) -> None:
    job = many_boxes()
    described = job.metadata.state_dict_metadata
    described["c"] = described["b"]
    general, columns = read_both_ways(job.write(tmp_path / "job"), in_columns)
    assert general == columns
    assert [*general] == ["a", "b", "c"]


def test_boxes_in_a_tuple_are_read_alike(tmp_path: Path, in_columns: Callable[[bool], None]) -> None:
    job = many_boxes()
    tensor = job.metadata.state_dict_metadata["b"]
    assert isinstance(tensor, TensorStorageMetadata)
    tensor.chunks = tuple(tensor.chunks)  # type: ignore[assignment]
    general, columns = read_both_ways(job.write(tmp_path / "job"), in_columns)
    assert general == columns
    assert [*general] == ["a", "b", "c"]


def test_opcodes_behind_a_run_do_not_change_it_unseen(tmp_path: Path, in_columns: Callable[[bool], None]) -> None:
    folder = many_boxes().write(tmp_path / "job")
    body = (folder / ".metadata").read_bytes()[11:]
    end = body.index(b"ube", body.index(b"ube") + 1) + 2  # of the last box of the second tensor
    (folder / ".metadata").write_bytes(framed(body[:end] + b"}b" + body[end:]))  # its state becomes an empty dict
    for result in read_both_ways(folder, in_columns):
        assert result[0] == "CorruptError"


def test_a_file_name_from_further_on_is_an_error(tmp_path: Path, in_columns: Callable[[bool], None]) -> None:
    folder = many_boxes(400).write(tmp_path / "job")  # more entries than the pickler writes in one batch
    data = bytearray((folder / ".metadata").read_bytes())
    memo: list[Any] = []
    places: dict[int, int] = {}  # of the first reference to each file name
    value: Any = None
    for opcode, argument, at in pickletools.genops(bytes(data)):
        if opcode.name == "MEMOIZE":
            memo.append(value)
        elif opcode.name == "LONG_BINGET" and str(memo[argument]).endswith(".distcp"):
            places.setdefault(argument, at or 0)
        value = argument
    *_, earlier, last = places
    data[places[earlier] + 1 : places[earlier] + 5] = last.to_bytes(4, "little")
    (folder / ".metadata").write_bytes(data)
    general, columns = read_both_ways(folder, in_columns)
    assert general == columns
    assert general[0] == "CorruptError"


def test_a_frame_as_large_as_a_huge_file_is_not_read(tmp_path: Path, in_columns: Callable[[bool], None]) -> None:
    folder = many_boxes().write(tmp_path / "job")
    size = 1 << 42
    with (folder / ".metadata").open("wb") as file:
        file.write(b"\x80\x04\x95" + (size - 11).to_bytes(8, "little"))
        file.truncate(size)
    general, columns = read_both_ways(folder, in_columns)
    assert general == columns
    assert general[0] == "CorruptError"


def test_an_entry_of_another_class_is_an_error(tmp_path: Path, in_columns: Callable[[bool], None]) -> None:
    folder = many_boxes().write(tmp_path / "job")
    data = bytearray((folder / ".metadata").read_bytes())
    classes: dict[str, bytes] = {}  # the opcode that refers to each
    text, count = "", 0
    previous = ""
    for opcode, argument, _ in pickletools.genops(bytes(data)):
        if opcode.name == "MEMOIZE":
            if previous == "STACK_GLOBAL":
                classes[text] = b"h" + bytes([count]) if count < 256 else b"j" + count.to_bytes(4, "little")
            count += 1
        elif isinstance(argument, str):
            text = argument
        previous = opcode.name
    index, info = classes["MetadataIndex"], classes["_StorageInfo"]
    assert len(index) == len(info)
    at = data.index(index + b")\x81\x94}\x94(")
    data[at : at + len(info)] = info
    (folder / ".metadata").write_bytes(data)
    general, columns = read_both_ways(folder, in_columns)
    assert general == columns
    assert general[0] == "CorruptError"
