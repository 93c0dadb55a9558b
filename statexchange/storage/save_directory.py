"""The directory of one save: a tensor file of each rank, and ``save.json``, which lists them and is written last.

A build (build.py) makes the directory appear under its name as a whole. Every file has the random `save` number of its
save in its metadata, so that files of two saves are never read as one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from statexchange.errors import CorruptError, NotFoundError, ReplacedError, StateExchangeError, UnsafeError
from statexchange.storage.json_text import parse_json, read_json, seal, unseal
from statexchange.storage.tensorfile import SCHEMA, RankFile, read_header

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statexchange.storage.store import Budget, Store

__all__ = [
    "MANIFEST",
    "SaveManifest",
    "is_of_a_save",
    "is_stray",
    "open_rank_file",
    "rank_file_names",
    "rank_metadata",
    "rank_of_file",
    "read_manifest",
    "removable_files",
]

MANIFEST = "save.json"
_SAVE = re.compile(r"[0-9a-f]{16}")
_MAX_RANKS = 10**6
_RANK_FILE = re.compile(r"rank-([0-9]{5,9})-of-[0-9]{5,9}\.safetensors")


def rank_of_file(name: str) -> int | None:
    """Return the rank of a rank's file; None for any other name."""
    match = _RANK_FILE.fullmatch(name)
    return None if match is None else int(match[1])


def rank_file_names(world_size: int) -> list[str]:
    """Return the names of all ranks' files, in rank order."""
    names = []
    for rank in range(world_size):
        names.append(f"rank-{rank:05d}-of-{world_size:05d}.safetensors")
    return names


@dataclass(frozen=True, slots=True)
class SaveManifest:
    """The content of ``save.json``.

    Attributes:
        save: 16 random hex digits, which all files of the save have in their metadata.
        job: identity of the job's run that made the save.
        created: time of the save, in seconds since the epoch by the clock of rank 0's host.
        nbytes: size in bytes of each rank's file, in rank order.
        step: the training step; None for a save without one.
        metrics: numbers that the job gave with the save.
    """

    save: str
    job: str
    created: float
    nbytes: tuple[int, ...]
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """Number of ranks, each of which has a file."""
        return len(self.nbytes)

    @property
    def files(self) -> list[str]:
        """Names of the ranks' files, in rank order."""
        return rank_file_names(len(self.nbytes))

    def to_bytes(self) -> bytes:
        """Return the text of the file."""
        metrics = {}
        for name, value in self.metrics.items():
            # JSON has no such numbers, and our readers refuse Python's way to write them.
            metrics[name] = value if math.isfinite(value) else str(value)
        record = {
            "schema": SCHEMA,
            "save": self.save,
            "job": self.job,
            "created": self.created,
            "step": self.step,
            "metrics": metrics,
            "files": [list(pair) for pair in zip(self.files, self.nbytes, strict=True)],
        }
        return json.dumps(seal(record), indent=1, ensure_ascii=False).encode()

    @classmethod
    def parse(cls, data: bytes, path: str, budget: Budget) -> SaveManifest:
        """Return the manifest that `to_bytes` encoded; raise CorruptError for anything else."""
        return cls.from_json(parse_json(data, path, budget), path)

    @classmethod
    def from_json(cls, parsed: object, path: str) -> SaveManifest:
        """Return the manifest from the text that `parse` takes, parsed."""
        try:
            raw = unseal(parsed)
            if raw["schema"] != SCHEMA:
                text = "this save was written by a newer version of statexchange: use that version to read it"
                raise CorruptError(text, path=path, expected=SCHEMA, found=raw["schema"])
            names, sizes, metrics = [], [], {}
            for name, size in raw["files"]:
                names.append(name)
                sizes.append(size)
            for name, value in raw["metrics"].items():
                metrics[name] = _number_from_json(value)
            created = _number_from_json(raw["created"])
            manifest = cls(raw["save"], raw["job"], created, tuple(sizes), raw["step"], metrics)
            manifest._check(names)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, StateExchangeError):
                raise
            what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            text = f"broken manifest of a save: {what}. It was changed after the save: restore it, or load another save"
            raise CorruptError(text, path=path) from None
        return manifest

    def _check(self, names: Sequence[str]) -> None:
        if not isinstance(self.save, str) or not _SAVE.fullmatch(self.save) or not isinstance(self.job, str):
            raise ValueError("it does not name its save and job")
        if self.step is not None and (type(self.step) is not int or self.step < 0):
            raise ValueError("its step is not a number")
        # The number of ranks bounds the work of a reader, before anything is made for each.
        are_sizes = 0 < len(self.nbytes) <= _MAX_RANKS and {*map(type, self.nbytes)} == {int}
        if not are_sizes or min(self.nbytes) < 0:
            raise ValueError("it does not list the size of each file")
        if names != self.files:
            raise ValueError("it does not list one file per rank")


def _number_from_json(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    if value in ("nan", "inf", "-inf"):
        return float(str(value))
    raise ValueError("a metric or time is not a number")


def read_manifest(store: Store) -> SaveManifest:
    """Return the manifest in a directory; raise NotFoundError without one."""
    file = store.open(MANIFEST)
    return SaveManifest.from_json(read_json(file), file.path)


def removable_files(store: Store) -> list[str]:
    """Return the files of a save in the order of their removal: the manifest first, so that it is no save any more.

    An empty directory has none.

    Raises:
        UnsafeError: there is no manifest, or an entry that it does not list.
        CorruptError: the manifest is broken.
    """
    if not store.listing:
        return []
    try:
        files = read_manifest(store).files
    except NotFoundError:
        raise UnsafeError("refused to replace or remove: this directory is not a save", path=store.path) from None
    unlisted = sorted(store.listing.keys() - {MANIFEST, *files})
    if unlisted:
        text = f"refused to replace or remove: {unlisted[0]!r} is not a file of this save; move it elsewhere first"
        raise UnsafeError(text, path=store.path)
    return [MANIFEST, *files]


def rank_metadata(save: str, rank: int, world_size: int, config: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a rank's file; `config` is JSON text of `values.encode`."""
    identity = {"schema": SCHEMA, "save": save, "rank": rank, "world_size": world_size}
    return seal({**extra, **identity, "config": config})


def is_of_a_save(store: Store, name: str) -> bool:
    """Whether a file is one that a rank wrote for a save; False if it is broken."""
    try:
        file = store.open(name)
        metadata = read_header(file).workspace_metadata(file.path, file.budget)
    except CorruptError:
        return False
    return metadata is not None and "save" in metadata


def is_stray(store: Store, name: str) -> bool:
    """Whether a file in a directory without a manifest is a rank's file of an unfinished save."""
    try:
        return rank_of_file(name) is not None and is_of_a_save(store, name)
    except (NotFoundError, ReplacedError):  # removed meanwhile
        return False


def open_rank_file(store: Store, manifest: SaveManifest, rank: int, name: str) -> RankFile:
    """Open a rank's file of a save by its name; it is closed with the store.

    Raises:
        NotFoundError: the file is missing.
        CorruptError: its header, metadata or size is wrong, or it belongs to another save.
    """
    expected: dict[str, str | int] = {"save": manifest.save, "rank": rank, "world_size": len(manifest.nbytes)}
    try:
        file = store.open(name)
    except NotFoundError as error:
        raise NotFoundError("this rank's file is missing", rank=rank, path=error.path) from None
    return RankFile(file, expected, manifest.nbytes[rank])
