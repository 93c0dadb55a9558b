"""A source: a checkpoint of any format as files with shards, and a byte range for each box of each shard.

::

    Source        files             tensors, by name          boxes              bytes
    ------        -----             ----------------          -----              -----
    directory -+- ShardFile 0 -+--- SourceTensor "w" -------- rows 0 to 3 ------ file 0, from 4,096 on
               |               +--- SourceTensor "b" -------- all -------------- file 0, from 4,192 on
               +- ShardFile 1 ----- SourceTensor "w" -------- rows 3 to 5 ------ file 1, from 4,096 on
                                        |                         |                      |
                                    shard: name, dtype,       shard.boxes:           byte_ranges:
                                    global_shape              offsets and shape      of each box, in order

What reads tensors asks for the files and goes to the right. Beside them a source has entries that are no tensors
(`others`), what is missing or broken (`problems`, and the `unreadable` tensors that it affects), and what the format
knows of the job that wrote it.

A job of thousands of ranks leaves millions of boxes. Where a format has shown that a tensor is cut evenly over the
files, each element once, one `ShardingSpec` stands for all its boxes (`specs`, of `EvenFiles`). To describe, select and
plan takes no more; a part is opened when its bytes are needed. A file gives its part by name as any other, so that only
what would go through all boxes has to ask for `specs` and `files_without_specs`.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, Protocol

from statexchange.errors import (
    CorruptError,
    IncompleteError,
    NotFoundError,
    StateExchangeError,
    UnsafeError,
    UnsupportedError,
    excerpt,
)
from statexchange.formats import torchao
from statexchange.sharding.options import renamed
from statexchange.sharding.paths import (
    Path,
    agreed_paths,
    moved_path,
    note_on_wrappers,
    wrapper_rules,
)
from statexchange.sharding.plan import HolderLabel, RankShards
from statexchange.sharding.sharding_spec import ShardingSpec
from statexchange.sharding.shards import Box, Shard, c_strides
from statexchange.storage.location import OpenedPath
from statexchange.storage.store import Budget, ByteRange, Store, StoredFile
from statexchange.storage.tensorfile import Header, RankFile
from statexchange.tensors import ITEMSIZE, PACKED

if TYPE_CHECKING:
    from typing_extensions import Self

    from statexchange.storage.regions import BoxDigest

_MAX_LISTED, _MAX_NAME = 8, 100
_AHEAD_BYTES = 64 << 20  # of all files of a source that is read ahead
SourceKind = Literal[
    "save",
    "workspace",
    "huggingface",
    "version",
    "megatron torch_dist",
    "megatron ranks",
    "dcp",
    "deepspeed",
    "torch",
    "rank files",
    "trainer",
    "accelerate",
    "verl",
    "lightning",
    "torch_checkpointing",
]
SectionName = Literal["model", "ema", "optimizer", "scheduler", "rng", "other"]
# Lists of kinds, for a new format to choose from.
KINDS_WITH_RANKS = ("save", "workspace", "megatron torch_dist", "megatron ranks", "dcp", "deepspeed", "rank files")
KINDS_OF_JOBS = ("save", "workspace", "dcp", "torch")  # whose tensors may be a whole job's state
KINDS_WITH_KEYS = ("dcp", "deepspeed", "torch")  # whose first keys show the sections of a job's state
# A merge copies the config of a model, and its other small files, that lie in the directory of these.
KINDS_BESIDE_CONFIGS = ("torch", "deepspeed", "dcp", "rank files")
# Endings of files of weights, also of programs that no format reads: a note names those that lie beside a model and are
# not read, and none is copied with its small files.
WEIGHT_SUFFIXES = (
    *(".safetensors", ".pt", ".pth", ".bin"),
    *(".ckpt", ".gguf", ".ggml", ".h5", ".msgpack", ".onnx", ".npz", ".tflite", ".ot"),
)


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A file's shard of one tensor, with one byte range per box."""

    shard: Shard
    byte_ranges: tuple[ByteRange, ...]

    @classmethod
    def of_blocks(
        cls, shard: Shard, stored: ByteRange, shape: tuple[int, ...], offsets: Iterable[tuple[int, ...]]
    ) -> SourceTensor:
        """Return a shard whose boxes lie in one stored tensor of this shape, each at its offsets in that tensor."""
        byte_ranges = []
        for box, box_offsets in zip(shard.boxes, offsets, strict=True):
            byte_ranges.append(_range_of_block(stored, shape, Box(box_offsets, box.shape), shard.dtype))
        return cls(shard, tuple(byte_ranges))

    def digest_of(self, index: int, progress: Callable[[], None] | None = None) -> str:
        """Return the known digest of a box, or else read its bytes, compute it, and call `progress` again and again."""
        return self.byte_ranges[index].digest or self.read_digest(index, progress, always=True).hexdigest()

    def read_digest(self, index: int, progress: Callable[[], None] | None = None, *, always: bool = False) -> BoxDigest:
        """Read the bytes of a box and compare them with the digests that are known; `always` as in `BoxDigest`."""
        from statexchange.storage import regions  # imports numpy, which reading headers does not need

        stored, box = self.byte_ranges[index], self.shard.boxes[index]
        digest = regions.BoxDigest(stored, box, self.shard.dtype, always=always)
        # Block by block, as a box may be larger than memory.
        for window, data in regions.blocks(stored, box.shape, self.shard.dtype):
            digest.update(regions.to_global(window, box), data)
            if progress is not None:
                progress()
        digest.check(self.shard.name)
        return digest


def open_listed(
    store: Store,
    file: str,
    missing: str = "a file of this checkpoint is missing",
    *,
    rank: int | None = None,
    name: str | None = None,
) -> StoredFile:
    """Open a file that a checkpoint must have; raise IncompleteError without it, where a store has NotFoundError."""
    try:
        return store.open(file)
    except NotFoundError:
        # The directory is there, so what is missing is a part of a checkpoint, not the checkpoint.
        raise IncompleteError(missing, rank=rank, name=name, path=store.path_of(file)) from None


@contextmanager
def parsing(what: str, *, rank: int | None = None, name: str | None = None, path: str | None = None) -> Iterator[None]:
    """Turn what unexpected content raises into CorruptError, whose message begins with `what`; locate all errors."""
    try:
        yield
    except StateExchangeError as error:
        raise error.located(rank=rank, name=name, path=path) from None
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise CorruptError(f"{what}: {excerpt(error, 200)}", rank=rank, name=name, path=path) from None


def strides_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the strides for a `ByteRange`: None if the elements are one run in C order.

    The stride of a dim of size 1 has no effect.
    """
    if not math.prod(shape):
        return None
    for size, stride, expected in zip(shape, strides, c_strides(shape), strict=True):
        # numpy and torch leave such a stride as any operation made it.
        if size != 1 and stride != expected:
            return strides
    return None


def _range_of_block(stored: ByteRange, shape: tuple[int, ...], block: Box, dtype: str) -> ByteRange:
    """Return the byte range of a block of a tensor of this shape, whose bytes may have strides of their own."""
    if block.shape == shape:
        return stored
    strides = c_strides(shape) if stored.strides is None else stored.strides
    begin = stored.begin + ITEMSIZE[dtype] * sum(map(operator.mul, block.offsets, strides))
    nbytes = ITEMSIZE[dtype] * block.numel
    return ByteRange(stored.file, begin, nbytes, strides=strides_of(block.shape, strides))


@dataclass(frozen=True, slots=True)
class UnreadableTensor:
    """A tensor whose bytes are missing or cannot be read.

    Attributes:
        name: the tensor's name.
        dtype: its dtype; None if only the name is known.
        shape: its shape; None if only the name is known. In groups of a packed dtype if `nbytes` follow from it.
        path: the file that should have the tensor.
        unsupported: why it cannot be read although its file can: an unsupported dtype or kind of tensor.
        nbytes: its bytes; None if they are not known, or follow from dtype and shape.
    """

    name: str
    dtype: str | None
    shape: tuple[int, ...] | None
    path: str
    unsupported: UnsupportedError | None = None
    nbytes: int | None = None


FLAT_PARAMETERS = (
    "FSDP1's LOCAL_STATE_DICT: each rank saved its piece of flattened parameters, whose names and shapes are lost: "
    "load it as it was saved, and save with StateDictType.SHARDED_STATE_DICT or FULL_STATE_DICT"
)


def is_flat_parameter(name: str) -> bool:
    """Whether a name is that of parameters that FSDP1 flattened into one."""
    return name.rpartition(".")[2] == "_flat_param"


def abbreviated_list(entries: Mapping[str, str]) -> str:
    """Return the first names with their descriptions and the number of the others, for a message."""
    listed = islice(entries.items(), _MAX_LISTED)
    shown = [f"{excerpt(name, _MAX_NAME)[1:-1]} ({description})" for name, description in listed]
    return with_hidden(shown, len(entries))


def with_hidden(shown: Sequence[str], count: int) -> str:
    """Return the texts that are shown and the number of all others, of `count`."""
    text = ", ".join(shown)
    if count > len(shown):
        text += f" and {count - len(shown):,} more"
    return text


def abbreviated_names(names: Sequence[str], most: int = _MAX_LISTED) -> str:
    """Return the first `most` names and the number of the others, for a message."""
    return with_hidden([excerpt(name, _MAX_NAME)[1:-1] for name in names[:most]], len(names))


def abbreviated_reasons(reasons: Mapping[str, str]) -> str:
    """Return the first reasons, which are by name, after the first names that each is about, for a message."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    listed = islice(names.items(), _MAX_LISTED)
    return with_hidden([f"{abbreviated_names(of_reason)} ({reason})" for reason, of_reason in listed], len(names))


def empty_weights_text(shapes: Mapping[str, Sequence[int]]) -> str:
    """Return a text about tensors of shape [0], given by name; "" if none of these is called a weight.

    DeepSpeed's ZeRO-3 leaves such tensors on a rank that does not own a parameter, and other tools save these. No layer
    has a weight of shape [0]. A buffer of this shape, as of an empty list, may be right.
    """
    empty = [name for name, shape in shapes.items() if [*shape] == [0]]
    if not any(name.endswith("weight") for name in empty):
        return ""
    have = "1 tensor has" if len(empty) == 1 else f"{len(empty):,} tensors have"
    text = f"{have} shape [0], as ZeRO-3 leaves in place of weights: {abbreviated_names(empty)}"
    return f"{text}. DeepSpeed's own checkpoint has them, or a save with stage3_gather_16bit_weights_on_model_save"


def unknown_dtypes(header: Header, path: str) -> list[UnreadableTensor]:
    """Return the tensors of a safetensors file with unsupported dtypes."""
    texts = {name: f"rows of {name} that are not whole groups of {PACKED[name]} elements are" for name in PACKED}
    text = "{} not supported: leave this tensor out with exclude (--exclude)"
    unreadable = []
    for name, entry in header.unknown.items():
        what = texts.get(entry.dtype, f"dtype {entry.dtype} is")
        error = UnsupportedError(text.format(what), name=name, path=path)
        unreadable.append(UnreadableTensor(name, entry.dtype, entry.shape, path, error, entry.nbytes))
    return unreadable


def merged_metadata(files: Sequence[Mapping[str, str]]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the text metadata on which all files agree, and the keys on which they differ.

    torchao's lists of names, one in each file, are joined.
    """
    values: dict[str, dict[str, None]] = {}  # the values of each key, in the order of the files
    for metadata in files:
        for key, value in metadata.items():
            values.setdefault(key, {})[value] = None
    lists = list(map(torchao.listed_weights, values.get(torchao.TENSOR_NAMES, ())))
    if len(lists) > 1 and None not in lists:
        names: dict[str, None] = {}
        for listed in lists:
            names.update(dict.fromkeys(listed or ()))
        values[torchao.TENSOR_NAMES] = {json.dumps(list(names)): None}
    agreed, differing = {}, []
    for key, of_key in sorted(values.items()):
        if len(of_key) == 1:
            (agreed[key],) = of_key
        else:
            differing.append(key)
    return agreed, tuple(differing)


@dataclass(frozen=True, slots=True)
class Section:
    """One section of a checkpoint, such as the model (formats/sections.py).

    Attributes:
        name: what it is.
        prefix: the beginning of all its names, which is removed when the section is selected; "" for none.
        names: the names of its tensors and of its other entries, with the prefix.
    """

    name: SectionName
    prefix: str
    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a framework's directory (formats/directories.py).

    Attributes:
        section: the section that it is; None if it has several.
        names: names of its files or of its directory.
        refusal: why it cannot be read; "" if it can.
    """

    section: SectionName | None
    names: tuple[str, ...]
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One file of a checkpoint, with its tensors and its rank, or its number if it has no rank."""

    rank: int
    file: StoredFile
    tensors: Mapping[str, SourceTensor]
    aliases: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_rank(cls, file: RankFile) -> ShardFile:
        """Return the file that a rank wrote for a save or a workspace; raise CorruptError for broken aliases."""
        tensors: dict[str, SourceTensor] = {}
        for name, shard in file.shards.items():
            tensors[name] = SourceTensor(shard, file.byte_ranges[name])
        aliases = file.metadata.get("aliases", {})
        if not isinstance(aliases, dict) or set(map(type, aliases.values())) - {str}:
            raise CorruptError("broken aliases", path=file.path)
        return cls(int(file.metadata["rank"]), file.file, tensors, aliases)

    @property
    def path(self) -> str:
        """The file's path, for messages."""
        return self.file.path

    @property
    def name(self) -> str:
        """The file's name, without its directory."""
        return self.file.path.rpartition("/")[2]

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self.file.size

    def renamed(self, new_name: Callable[[str], str | None]) -> ShardFile:
        """Return the file with other names for its tensors, and without those whose new name is None.

        Raises:
            UnsafeError: two tensors would get one name.
        """
        tensors: dict[str, SourceTensor] = {}
        for name, tensor in self.tensors.items():
            new = new_name(name)
            if new in tensors:
                text = f"{excerpt(tensors[new].shard.name)} and another tensor of this file would get one name"
                raise UnsafeError(text, name=name, path=self.path)
            if new == name:
                tensors[new] = tensor
            elif new is not None:
                tensors[new] = replace(tensor, shard=replace(tensor.shard, name=new))
        aliases: dict[str, str] = {}
        for alias, name in self.aliases.items():
            new_alias, new_target = new_name(alias), new_name(name)
            if new_alias is not None and new_target is not None:
                aliases[new_alias] = new_target
        return replace(self, tensors=tensors, aliases=aliases)


class EvenParts(Protocol):
    """The parts of tensors that are cut evenly over very many files: ten million boxes by one spec for each tensor.

    Attributes:
        specs: the tensors, whose `ranks` are the numbers of the files.
        version: a JSON value that changes whenever a part may lie elsewhere.
    """

    specs: Mapping[str, ShardingSpec]
    version: list[str | int]

    def names_in(self, file: ShardFile) -> list[str]:
        """Return the names of the tensors of which a file has a part."""

    def read(self, file: ShardFile, name: str) -> SourceTensor:
        """Open the part that a file has of a tensor; raise KeyError if it has none."""

    def renamed(self, new_name: Callable[[str], str | None]) -> Self:
        """Return the parts with other names, and without those whose new name is None."""


class _FileTensors(Mapping[str, SourceTensor]):
    """The tensors of one file: its parts of tensors that are cut evenly, opened at each look, and its others."""

    def __init__(self, file: ShardFile, parts: EvenParts) -> None:
        self._file = file
        self._parts = parts

    def __getitem__(self, name: str) -> SourceTensor:
        if name in self._file.tensors:
            return self._file.tensors[name]
        return self._parts.read(self._file, name)

    def __contains__(self, name: object) -> bool:
        return name in self._file.tensors or (name in self._parts.specs and name in self._parts.names_in(self._file))

    def __iter__(self) -> Iterator[str]:
        yield from self._parts.names_in(self._file)
        yield from self._file.tensors

    def __len__(self) -> int:
        return len(self._file.tensors) + len(self._parts.names_in(self._file))


class EvenFiles(tuple[ShardFile, ...]):
    """All files of a source, each also with its parts of tensors that are cut evenly.

    Each is a `ShardFile` as any other. But who has all files can go by the specs of `parts`, without opening any part.
    A selection of the files is no `EvenFiles`: in it the files would have other numbers.

    Attributes:
        without_parts: the files with their other tensors.
        parts: the parts.
    """

    without_parts: Sequence[ShardFile]
    parts: EvenParts

    @classmethod
    def of(cls, files: Sequence[ShardFile], parts: EvenParts) -> EvenFiles:
        """Return files with the parts; raise UnsafeError if one has another tensor of the name of such a tensor."""
        with_parts = []
        for shard_file in files:
            # As after a rename: the view would show one of them only.
            for name in shard_file.tensors.keys() & parts.specs.keys():
                raise UnsafeError("two tensors would get this name", name=name, path=shard_file.path)
            # A view: the parts of a file are looked up in columns, not copied into a dict.
            with_parts.append(replace(shard_file, tensors=_FileTensors(shard_file, parts)))
        even_files = cls(with_parts)
        even_files.without_parts, even_files.parts = files, parts
        return even_files


def _renamed_keys(entries: Mapping[str, str], new_name: Callable[[str], str | None]) -> dict[str, str]:
    return {new: text for name, text in entries.items() if (new := new_name(name)) is not None}


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint on disk, pinned as it was opened.

    A format fills the first ten fields, and of the others those that it knows.

    Attributes:
        kind: the format.
        opened: the opened path, which holds the files open until `close` or the end of a with block.
        files: the files with their tensors.
        others: descriptions, by name, of entries that are not tensors.
        texts: those of `others` that are plain values, as JSON text of `values.encode`.
        problems: errors for everything that is missing or broken.
        unreadable: tensors that are affected by `problems` or are unsupported.
        metadata: text metadata on which all files agree.
        differing: metadata keys on which files differ.
        notes: what a user should know about how it was read.
        sections: its sections, if the format knows them (formats/sections.py).
        paths: by name of a tensor or of another entry, its keys, where the format records them (sharding/paths.py).
        step: the training step of a save, or the iteration of a Megatron checkpoint.
        manifest: content of the statexchange.json of a published directory.
        arguments: numbers that describe the model, from the arguments of a Megatron run.
        parts: the parts of a framework's directory.
        small_files: the directory with the model's config and tokenizer, where the format knows it.
        world_size: number of ranks, where the format has it.
        configs: each rank's config as JSON text of `values.encode`.
        run: the run of a workspace, or the run of the job that made a save.
        round: the round of a workspace.
        save: the random id of a save of ours; "" of anything else.
        created: the time of a save, in seconds since the epoch.
        metrics: numbers that a job gave with a save.
        per_rank: the paths of what belongs to a rank, and fits no other number of ranks than saved it.
        optimizers: by the path of each optimizer, the qualified names of its class; several if ranks differ.
        left_out: by rank, the paths of what a save was asked to leave out.
        selected: the section whose tensors alone are here, without its prefix; None for all.
    """

    kind: SourceKind
    opened: OpenedPath
    files: Sequence[ShardFile]
    others: Mapping[str, str] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    problems: Sequence[StateExchangeError] = ()
    unreadable: Sequence[UnreadableTensor] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    differing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    # Where the format knows them.
    sections: tuple[Section, ...] = ()
    paths: Mapping[str, Path] = field(default_factory=dict)
    step: int | None = None
    manifest: Mapping[str, Any] | None = None
    arguments: Mapping[str, int] = field(default_factory=dict)
    parts: tuple[Part, ...] = ()
    small_files: Store | None = None
    # Of a save or a round of a workspace.
    world_size: int | None = None
    configs: Mapping[int, str] = field(default_factory=dict)
    run: str | None = None
    round: int | None = None
    save: str = ""
    created: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    per_rank: frozenset[str] = frozenset()
    optimizers: Mapping[str, frozenset[str]] = field(default_factory=dict)
    left_out: Mapping[int, Sequence[str]] = field(default_factory=dict)
    # Set by `select_section`.
    selected: SectionName | None = None

    @property
    def tensor_names(self) -> set[str]:
        """The names of all tensors in the files."""
        if isinstance(self.files, EvenFiles):
            return set(self.specs).union(*map(attrgetter("tensors"), self.files_without_specs))
        return set().union(*map(attrgetter("tensors"), self.files))

    @property
    def specs(self) -> Mapping[str, ShardingSpec]:
        """The tensors that are cut evenly over very many files, by name; none if only some of the files are here."""
        if isinstance(self.files, EvenFiles):
            return self.files.parts.specs
        return {}

    @property
    def files_without_specs(self) -> Sequence[ShardFile]:
        """The files with their tensors that are not among the `specs`."""
        if isinstance(self.files, EvenFiles):
            return self.files.without_parts
        return self.files

    def described(self) -> Iterator[Shard | ShardingSpec]:
        """Yield the specs, and then the shards of each file of the other tensors."""
        yield from self.specs.values()
        for shard_file in self.files_without_specs:
            for tensor in shard_file.tensors.values():
                yield tensor.shard

    @property
    def names(self) -> set[str]:
        """The names of all tensors, also of those that cannot be read, and other entries."""
        return self.tensor_names.union(self.others, [tensor.name for tensor in self.unreadable])

    @property
    def unsupported(self) -> dict[str, UnsupportedError]:
        """The errors, by name, of tensors that cannot be read although their files can."""
        errors: dict[str, UnsupportedError] = {}
        for tensor in self.unreadable:
            if tensor.unsupported is not None:
                errors.setdefault(tensor.name, tensor.unsupported)
        return errors

    @property
    def has_ranks(self) -> bool:
        """Whether each file's `rank` is the rank that wrote it; else it is the number of the file."""
        return self.kind in KINDS_WITH_RANKS

    @property
    def path(self) -> str:
        """The path or URL that was opened."""
        return self.opened.path

    @property
    def budget(self) -> Budget:
        """The budget of all reads of text that may be of foreign origin."""
        return self.opened.store.budget

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(shard_file.nbytes for shard_file in self.files)

    def label_of(self, shard_file: ShardFile) -> HolderLabel:
        """Return what error messages call a file: its rank, or its name if it is no rank's."""
        return shard_file.rank if self.has_ranks else shard_file.name

    @property
    def config_store(self) -> Store | None:
        """The directory with the model's config, where there is one; None if a single file was opened."""
        return self.small_files or (self.opened.store if self.opened.file is None else None)

    def path_below(self, shard_file: ShardFile) -> str:
        """Return a file's path below the directory that was opened."""
        return shard_file.path.removeprefix(f"{self.opened.store.path.rstrip('/')}/")

    def rank_shards(self) -> list[RankShards]:
        """Return each rank's shards for the merge plan."""
        rank_shards = []
        shards: list[Shard | ShardingSpec] = [*self.specs.values()]  # any file may give them: the first does
        for shard_file in self.files_without_specs:
            shards += [tensor.shard for tensor in shard_file.tensors.values()]
            rank_shards.append(RankShards(shard_file.rank, shards, shard_file.aliases, self.label_of(shard_file)))
            shards = []
        return rank_shards

    def empty_weights(self) -> tuple[StateExchangeError, ...]:
        """Return an error if tensors of shape [0] are in place of weights, else ()."""
        shapes = {shard.name: shard.global_shape for shard in self.described()}
        text = empty_weights_text(shapes)
        return (IncompleteError(text, path=self.path),) if text else ()

    def shards(self) -> Iterator[tuple[ShardFile, SourceTensor]]:
        """Yield each tensor of each file."""
        for shard_file in self.files:
            for tensor in shard_file.tensors.values():
                yield shard_file, tensor

    def renamed(self, new_name: Callable[[str], str | None]) -> Source:
        """Return the source with other names for its entries, and without those whose new name is None.

        Raises:
            UnsafeError: two tensors of one file would get one name.
        """
        paths: list[tuple[str, Path | None]] = []
        names = self.names if self.paths else set()
        # First those with paths: the order must not be that of a set, which differs among processes.
        for name in dict.fromkeys((*filter(names.__contains__, self.paths), *names)):
            new, path = new_name(name), self.paths.get(name)
            if new is not None:
                paths.append((new, None if path is None else moved_path(path, name, new)))
        unreadable = []
        for tensor in self.unreadable:
            new = new_name(tensor.name)
            if new is not None:
                unreadable.append(replace(tensor, name=new))
        files: Sequence[ShardFile] = [shard_file.renamed(new_name) for shard_file in self.files_without_specs]
        if isinstance(self.files, EvenFiles):
            files = EvenFiles.of(files, self.files.parts.renamed(new_name))
        return replace(
            self,
            files=files,
            others=_renamed_keys(self.others, new_name),
            texts=_renamed_keys(self.texts, new_name),
            unreadable=unreadable,
            paths=agreed_paths(paths),
        )

    def unwrapped(self) -> Source:
        """Return the source without the parts of wrappers in its names, and with a note if there were any."""
        names = self.tensor_names
        rules = wrapper_rules(names)
        if not rules:
            return self
        source = self.renamed(lambda name: renamed(name, rules))
        return replace(source, notes=(*self.notes, note_on_wrappers(names, rules)))

    def read_ahead(self) -> None:
        """Let reads at a URL that follow one another be few requests, for callers that may read most of the tensors."""
        # Of a local file the kernel reads ahead by itself.
        if self.opened.store.is_remote:
            files: set[StoredFile] = set()
            for _, tensor in self.shards():
                files.update(byte_range.file for byte_range in tensor.byte_ranges)
            for file in files:
                file.read_ahead(_AHEAD_BYTES // len(files))

    def check_unchanged(self) -> None:
        """Raise ReplacedError if any file may have been changed or replaced since it was opened."""
        for shard_file in self.files:
            shard_file.file.check_current()

    def close(self) -> None:
        """Close all files."""
        self.opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def joined(kind: SourceKind, opened: OpenedPath, sources: Sequence[Source]) -> Source:
    """Return sources, such as those of several files, as one of this kind at an opened path.

    Of an entry that is no tensor and differs between two, that is all that is said.
    """
    files: list[ShardFile] = []
    others: dict[str, str] = {}
    texts: dict[str, str] = {}
    differing: set[str] = set()
    problems: list[StateExchangeError] = []
    unreadable: list[UnreadableTensor] = []
    paths: list[tuple[str, Path | None]] = []
    has_paths = any(source.paths for source in sources)
    for source in sources:
        files += source.files
        for name in others.keys() & source.others.keys():
            if texts.get(name) != source.texts.get(name):
                differing.add(name)
        others |= source.others
        texts |= source.texts
        problems += source.problems
        unreadable += source.unreadable
        if has_paths:
            paths += source.paths.items()
            # A name without a path in one of several sources contradicts a path in another: `agreed_paths` leaves it
            # out.
            paths += dict.fromkeys(source.names - source.paths.keys()).items()
    metadata, differing_keys = merged_metadata([source.metadata for source in sources if source.metadata])
    return Source(
        kind,
        opened,
        files,
        others=others | dict.fromkeys(differing, "differs between the files"),
        texts={name: text for name, text in texts.items() if name not in differing},
        problems=problems,
        unreadable=unreadable,
        metadata=metadata,
        differing=differing_keys,
        paths=agreed_paths(paths),
    )
