"""The registry of checkpoint formats, and the functions that open a checkpoint of any of them.

A format is a module with the functions of `Format`. To add one, write the module and put its name into `FORMATS`. A
path is opened and listed once, and all formats match against this one listing. Nothing in a file is executed.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from statexchange.errors import (
    InvalidArgumentError,
    NotFoundError,
    ReplacedError,
    StateExchangeError,
    UnsupportedError,
)
from statexchange.formats.directories import check_none_below
from statexchange.formats.frameworks import state_file
from statexchange.formats.model_files import is_weights, part_of, unread_weights
from statexchange.formats.open_checkpoint import OpenCheckpoint
from statexchange.formats.sections import ALL, MODEL_OF_PARTS, check_section, problems_of, select_section
from statexchange.formats.source import Source
from statexchange.storage.location import Attempts, OpenedPath, read_with_retry, resolve_path
from statexchange.storage.steps import is_saves_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Self

_log = logging.getLogger(__name__)


class Format(Protocol):
    """A module that reads one kind of checkpoint.

    Whatever a file holds, the outcome is a source or an error of `statexchange.errors` that names the file. Files are
    opened by `Store.open`, JSON is read by `storage.location.read_json` within `source.parsing`, shapes and offsets are
    checked by `shape_from_json` and `sizes_from_json` of `sharding.shards`, dtypes are named by `tensors.DTYPE_NAMES`,
    and text from a file enters a message through `errors.excerpt`. torch is never imported, numpy only inside of
    functions.
    """

    def matches(self, opened: OpenedPath) -> bool:
        """Whether a path has this format, by its listing and at most the first bytes of a file."""

    def read(self, opened: OpenedPath) -> Source:
        """Return the source, reading headers only.

        A broken listing, such as an index, raises CorruptError. What is wrong with one file is one of the source's
        `problems`, and the tensors that it affects are in `unreadable`: CorruptError for a broken file, TruncatedError
        for one that is too short, IncompleteError for one that is listed and absent (`open_listed`), although
        `Store.open` raises NotFoundError, which would mean that there is no checkpoint. All have the path of the file,
        by which `problems_of` pairs them. A part whose place in its tensor is not known is left out. A gap between
        parts, or an overlap, is found where the tensor is planned. A tensor of an unsupported dtype is in `unreadable`
        alone. `notes` name the weights beside the checkpoint that are not read (`unread_weights`).
        """


# In order: the first format that matches reads. A format is imported when it is tried; those from Megatron's on import
# the pickle reader, which the others do not need. `directories` reads parts by the other formats, and selects the
# section itself.
_DIRECTORIES, _FOREIGN = "directories", "foreign"
FORMATS = (
    "save",
    "version",
    _DIRECTORIES,
    "huggingface",
    "workspace",
    "megatron",
    "dcp",
    "deepspeed",
    _FOREIGN,
    "torch_file",
)
# What a format's `read` takes beside the opened path.
_OPTIONS = {_DIRECTORIES: ("section",), "save": ("ranks",)}
_BESIDE_DEEPSPEED = (
    "not read: a checkpoint of DeepSpeed, whose step the file latest names; to read it, give the directory of the step"
)
_DESCRIPTIONS = ("statexchange.json", "manifest.json", "save.json", ".metadata")  # endings of file names
# All tensors together may have _BASE_BYTES more than _MAX_REPETITION times the bytes of their files.
_BASE_BYTES, _MAX_REPETITION = 64 << 20, 16
UNFINISHED_DOWNLOAD = ".incomplete"  # the end of the hub's files while they are written
_UNKNOWN = (
    "neither a save, a workspace nor a checkpoint "
    "(safetensors, torch DCP, Megatron, DeepSpeed, or torch.save's .pt files); "
    "if it is a directory of checkpoints, statexchange scan lists them, and statexchange ls the versions of weights"
)


def open_source(
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    section: str | None = ALL,
    wants: Callable[[str], bool] | None = None,
    ranks: tuple[int, int] | None = None,
) -> Source:
    """Open a checkpoint of any format.

    Not collective. Reads headers only. A checkpoint that is replaced meanwhile is opened again.

    Args:
        path: a save, a workspace (or one run or round of it), a Hugging Face directory or file, a torch DCP directory,
            a Megatron or DeepSpeed checkpoint, a file of torch.save or a directory of such files.
        strict: raise the first missing or broken part; otherwise all become the source's `problems`.
        section: the section to open, without its prefix: its name, "all", or None for the model, if it is known which
            tensors are the model's (formats/sections.py). Problems of other sections do not count.
        wants: `wants(name)` returns whether a tensor will be read. With `strict`, only problems of such tensors are
            raised, by default those of all.
        ranks: this rank and the number of ranks that load: of a save with an index a file is then opened only when
            something in it is read, and what is wrong with it is raised then.

    Returns:
        The source, which holds its files open until it is closed.

    Raises:
        NotFoundError: there is no checkpoint of a known format at the path.
        IncompleteError, CorruptError: with `strict`, something is missing or broken.
        InvalidArgumentError: the checkpoint does not have the section.
        UnsupportedError: the format is one that is not read (formats/foreign.py).
    """
    return open_with(path, partial(read_opened, ranks=ranks), strict=strict, section=section, wants=wants)


def open_with(
    path: str | os.PathLike[str],
    read: Callable[..., Source],
    *,
    strict: bool,
    section: str | None = ALL,
    wants: Callable[[str], bool] | None = None,
) -> Source:
    """Open a path and read a section of its source with `read`; retry if the path was replaced meanwhile."""
    path = resolve_path(path, "a source")
    if section != ALL:
        check_section(section)

    attempts = Attempts(path)
    while True:  # as `read_with_retry`, whose callback would be a step up from storage in each story
        opened = attempts.open()
        try:
            return _read_once(opened, read, strict=strict, section=section, wants=wants)
        except BaseException as error:
            if not attempts.goes_on(opened, error):
                raise


def _read_once(
    opened: OpenedPath,
    read: Callable[..., Source],
    *,
    strict: bool,
    section: str | None = ALL,
    wants: Callable[[str], bool] | None = None,
) -> Source:
    """Return a section of the source at an opened path; raise ReplacedError if its files are of two versions."""
    try:
        source = read(opened, section=section)
        problems = source.problems if wants is None else problems_of(source, partial(_may_want, wants))
        if strict and problems:
            raise problems[0]
    except StateExchangeError:
        # Files of two versions contradict each other: then ReplacedError is raised, and they are read again.
        opened.store.check_opened()
        raise
    source.opened.store.check_opened()
    if strict:  # what is left affects no tensor that is wanted
        source = replace(source, problems=())
    _check_not_repeated(source)
    if source.problems and not opened.is_current():
        raise ReplacedError("replaced while it was read", path=opened.path) from source.problems[0]
    _log.debug(
        "opened %s as %s: %d files, %d problems", opened.path, source.kind, len(source.files), len(source.problems)
    )
    return source


def _may_want(wants: Callable[[str], bool], name: str) -> bool:
    """Whether a tensor may be read. A name that ends in ``*`` stands for tensors whose names are in a missing file."""
    return name.endswith("*") or wants(name)


@dataclass(frozen=True, slots=True)
class Probe:
    """A path, and the checkpoint there or the reason why there is none. A context manager, which closes it.

    Attributes:
        opened: the opened path.
        source: the checkpoint; None if there is none, or if it cannot be opened.
        error: why it cannot be opened.
        directories: the names of its directories, without links; none if these are parts of a checkpoint in one of the
            formats that are not read.
        is_foreign: whether the checkpoint has a format that is not read, which `error` names.
    """

    opened: OpenedPath
    source: Source | None
    error: StateExchangeError | None
    directories: Sequence[str]
    is_foreign: bool = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.opened.close()


def probe(path: str) -> Probe:
    """Look at a path, which need not be a checkpoint.

    Not collective. Reads headers only. A path that is replaced meanwhile is looked at again.

    Raises:
        NotFoundError: there is nothing at the path.
        StorageError: it cannot be listed.
    """

    def look(opened: OpenedPath) -> Probe:
        store = opened.store
        directories = store.directories
        try:
            source = _read_once(opened, read_opened, strict=False)
        except NotFoundError:
            return Probe(opened, None, None, directories)
        except ReplacedError:
            raise
        except InvalidArgumentError as error:  # one of several checkpoints has to be named
            are_files = not directories or any(map(is_weights, store.listing))  # else directories, to be probed in turn
            return Probe(opened, None, error if are_files else None, directories)
        except StateExchangeError as error:
            is_foreign = isinstance(error, UnsupportedError) and _format_of(opened) == _FOREIGN
            if is_foreign:
                from statexchange.formats.foreign import is_directory_format

                directories = [] if is_directory_format(store) else directories
            return Probe(opened, None, error, directories, is_foreign=is_foreign)
        return Probe(opened, source, None, directories)

    return read_with_retry(path, look)


def holds_saves(path: str | os.PathLike[str]) -> bool:
    """Whether a directory has saves by step, whole or unfinished, and is no checkpoint itself.

    Not collective. False for a path that does not exist.
    """

    def look(opened: OpenedPath) -> bool:
        with opened:
            return opened.file is None and is_saves_directory(opened.store) and _format_of(opened) is None

    path = resolve_path(path, "a source")
    try:
        return read_with_retry(path, look)
    except NotFoundError:
        return False


def _format_of(opened: OpenedPath) -> str | None:
    """Return the name of the first format that matches an opened path; None if none does."""
    for name in FORMATS:
        if _format(name).matches(opened):
            return name
    return None


@cache  # a scan asks for each format once a directory
def _format(name: str) -> Format:
    """Import a format."""
    module: Format = import_module(f"statexchange.formats.{name}")
    return module


def _check_not_repeated(source: Source) -> None:
    """Raise UnsupportedError if the tensors together are far larger than their files.

    A tensor with strides of 0, or tensors that share a storage, may have any number of elements in a small file.
    """
    if source.kind == "save":  # whose tensors lie one after another
        return
    sizes = {}  # by path: a file may hold the tensors of several ranks
    for shard_file in source.files:
        sizes[shard_file.file.path] = shard_file.file.size
    limit = _BASE_BYTES + _MAX_REPETITION * sum(sizes.values())
    total = 0
    for shard_file in source.files_without_specs:  # a part of a spec is not larger than its entry
        for tensor in shard_file.tensors.values():
            for byte_range in tensor.byte_ranges:
                total += byte_range.nbytes
            if total > limit:
                text = (
                    f"refused: its tensors would be {total} bytes, more than {_MAX_REPETITION} times its files' bytes, "
                    "because they are expanded or share a storage: save them with .contiguous()"
                )
                raise UnsupportedError(text, name=tensor.shard.name, path=shard_file.path)


def read_opened(
    opened: OpenedPath,
    *,
    section: str | None = ALL,
    ranks: tuple[int, int] | None = None,
) -> Source:
    """Return a section of the source at an opened path, by the first format that matches."""
    name = _format_of(opened)
    # A directory of checkpoints may have a file of torch.save, such as an optimizer's, beside them.
    if name is None or name == "torch_file":
        _check_is_complete(opened)
        check_none_below(opened)
    if name is None:
        raise NotFoundError(_UNKNOWN, path=opened.path)
    options = {"section": section, "ranks": ranks}
    read: Callable[..., Source] = _format(name).read
    source = read(opened, **{option: options[option] for option in _OPTIONS.get(name, ())})
    # First the notes: the error for a section that is not there says where the others lie.
    source = replace(source, notes=(*source.notes, *_unread_beside(opened, name)))
    return source if section == ALL or name == _DIRECTORIES else select_section(source, section)


def _unread_beside(opened: OpenedPath, name: str) -> Sequence[str]:
    """Return a note on what is not read: other files of the checkpoint, or one of another format in the directory."""
    store = opened.store
    if opened.file is not None:
        section = state_file(opened.file)
        of = part_of(opened.file, store) if name in ("huggingface", "torch_file") else ""
        if section is not None:
            of = f"the section {section!r} of a checkpoint"
        return [f"this file alone is {of}: to read all, give the directory, {store.path}"] if of else []
    if name == "huggingface" and "latest" in store.files:
        return [_BESIDE_DEEPSPEED]
    return unread_weights(store, ()) if name == "dcp" else []


def _check_is_complete(opened: OpenedPath) -> None:
    """Raise InvalidArgumentError for a file that is no checkpoint without its directory, such as a manifest."""
    if opened.file is not None and opened.file.endswith((*_DESCRIPTIONS, ".distcp")):
        is_part = opened.file.endswith(".distcp")
        does = "has some entries of a torch DCP checkpoint" if is_part else "only describes a checkpoint"
        text = f"this file {does}: give its directory, {opened.store.path}"
        raise InvalidArgumentError(text, path=opened.path)


def open_checkpoint(path: str | os.PathLike[str]) -> OpenCheckpoint:
    """Open a checkpoint of any format as a lazy mapping of tensor names to tensors.

    Not collective. Reads headers only; a tensor's bytes are read by its `read`. A tensor that is stored as shards, even
    in several files, is read as one. The files stay open until the mapping is closed, so that the old content stays
    readable if the checkpoint is replaced later. The mapping belongs to this process and cannot be pickled. Of a
    training framework's directory, whose parts are model, optimizer and others, the model is opened.

    Args:
        path: a Hugging Face directory or file, a save, a workspace, a torch DCP directory, a Megatron or DeepSpeed
            checkpoint, or files of torch.save; a local path or an fsspec URL.

    Returns:
        A mapping of names to `StoredTensor`, which has `shape`, `dtype`, `nbytes` and `read()`. It is a context
        manager.

    Raises:
        NotFoundError: there is no checkpoint at the path.
        IncompleteError: a file or a rank is missing.
        CorruptError: a file is broken.
        InvalidArgumentError: one of several checkpoints has to be named.
        UnsupportedError: the format is one that is not read.

    Example:
        >>> import numpy
        >>> from safetensors.numpy import save_file
        >>> save_file({"w": numpy.arange(6, dtype="float32").reshape(2, 3)}, "model.safetensors")
        >>> with open_checkpoint("model.safetensors") as checkpoint:
        ...     w = checkpoint["w"]
        ...     w.dtype, w.shape, w.read().tolist()
        ('F32', (2, 3), [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])
    """
    return OpenCheckpoint(open_source(path, section=MODEL_OF_PARTS))
