"""Write parameters that do not train as files of their own, which the next save links instead of writing them again.

A job that trains an adapter has a base that does not change. In a directory of saves each rank has such parameters in a
file for each top-level key of the state, beside the file of all else. The next save gives that file a second name, a
hard link, if

1. it has the boxes and digests that this rank would write, by the bytes of the live tensors;
2. its device, inode, size and modification time are those of the file that this process wrote, or has read and compared
   with its digests, as it does once after a restart with the files of the newest save.

So a tensor that was changed after all is written, whatever `requires_grad` says. Saves that share a file share its
bytes: if these are damaged, they are damaged in each of them. An object store has no links: there the store copies the
object itself, if it has the size and version that this process wrote or has read. Where there is neither a link nor
such a copy the file is written.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from statexchange.comm.communicator import Communicator
from statexchange.errors import PeerError, StallError, StateExchangeError, TargetExistsError, without_secrets
from statexchange.exchange.staging import shard_data
from statexchange.formats.source import ShardFile
from statexchange.sharding.shards import Shard
from statexchange.state.describe import LocalTensor
from statexchange.storage.location import open_path
from statexchange.storage.publish import join_build
from statexchange.storage.rank_writer import digests_of
from statexchange.storage.tensorfile import (
    MANIFEST,
    SavedFile,
    frozen_file_name,
    open_rank_file,
    rank_metadata,
    read_manifest,
)

_log = logging.getLogger(__name__)
_KEY = "key"  # of a file's metadata: the top-level key of the state


@dataclass(frozen=True, slots=True)
class FrozenFile:
    """A file of frozen parameters of a save.

    Attributes:
        listed: the entry of the manifest.
        identity: what `StoredFile.local_identity` has of it.
        version: what an object store calls the version that this save has put; "" in a directory, and before a save.
        shards: its shards by name.
        digests: the digests of their boxes.
    """

    listed: SavedFile
    identity: Sequence[str | int]
    version: str
    shards: Mapping[str, Shard]
    digests: Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class Target:
    """The save that is being written: its path, the key of its build, its id, and the newest save beside it.

    `aliases` has the kept name of each other name of a tied tensor.
    """

    path: str
    key: str
    save: str
    newest: str
    aliases: Mapping[str, str]


def frozen_parameters(
    tensors: Sequence[LocalTensor], keys: Mapping[str, str], aliases: Mapping[str, str]
) -> tuple[dict[str, list[LocalTensor]], list[LocalTensor]]:
    """Return the tensors that have a key by their names, by that key, and all others.

    A tied tensor has the key of its kept name, so that all its names are in one file.
    """
    frozen: dict[str, list[LocalTensor]] = {}
    trained = []
    for local in tensors:
        name = local.shard.name
        key = keys.get(aliases.get(name, name))
        if key is None:
            trained.append(local)
        else:
            frozen.setdefault(key, []).append(local)
    return frozen, trained


class FrozenFiles:
    """The files of this rank in the last save of a job, by the top-level key of the state. Not collective."""

    def __init__(self) -> None:
        self._last: Mapping[str, FrozenFile] | None = None  # None before the first save
        self._folder = ""
        self._ranks = 0, 0  # the rank and the number of ranks in the last save

    def write(
        self,
        frozen: Mapping[str, Sequence[LocalTensor]],
        digests: Mapping[str, Sequence[str]],
        target: Target,
        comm: Communicator,
    ) -> dict[str, FrozenFile]:
        """Write or link this rank's files into a build; return them by key of the state.

        Args:
            frozen: the parameters of each file, by key of the state.
            digests: the digests of the boxes of those that have been read already.
            target: the save that is being written.
            comm: the communicator.
        """
        # A rank's file is of no use for another rank, nor where there are more or fewer ranks than before.
        if self._last is None or self._ranks != (comm.rank, comm.world_size):
            self._last = _files_of(target.newest, comm) if frozen and target.newest else {}
            self._folder, self._ranks = target.newest, (comm.rank, comm.world_size)
        files: dict[str, FrozenFile] = {}
        for key, tensors in sorted(frozen.items()):
            name = frozen_file_name(comm.rank, comm.world_size, len(files))
            last = self._last.get(key)
            file = None
            if last is not None and last.shards == _shards_of(tensors):
                # What was compared with other ranks has been read, and is not read again.
                unread = [local for local in tensors if local.shard.name not in digests]
                digests = {**digests, **digests_of(shard_data(unread), comm.progress)}
                if all(list(last.digests[name]) == list(digests[name]) for name in last.shards):
                    file = self._linked(last, name, target, comm)
            files[key] = file or _written(name, key, tensors, digests, target, comm)
        return files

    def forget(self) -> None:
        """Have the next save read what it links, as after a restart: a load may have found damage."""
        self._last = None

    def note_published(self, path: str, files: Mapping[str, FrozenFile]) -> None:
        """Record the files of a save that is whole now: the next one links them."""
        self._last, self._folder = files, path

    def _linked(self, last: FrozenFile, name: str, target: Target, comm: Communicator) -> FrozenFile | None:
        """Link a file of the last save under a name into a build; return None if it cannot be linked."""
        path = os.path.join(self._folder, last.listed.name)
        version: str | None = None
        with _writing_again(path):
            member = join_build(target.path, target.key, MANIFEST)
            version = member.link(name, path, last.identity, comm.progress)
        if version is None:
            return None
        # A link is the same inode. A copy that a store has made is an object of its own.
        identity = last.identity
        if version:
            identity = [last.listed.nbytes, version]
        listed = replace(last.listed, name=name)
        return replace(last, listed=listed, identity=identity, version=version)


def _shards_of(tensors: Sequence[LocalTensor]) -> dict[str, Shard]:
    return {local.shard.name: local.shard for local in tensors}


def _written(
    name: str,
    key: str,
    tensors: Sequence[LocalTensor],
    digests: Mapping[str, Sequence[str]],
    target: Target,
    comm: Communicator,
) -> FrozenFile:
    """Write a file of the parameters below a key of the state into a build."""
    shards_here = _shards_of(tensors)
    aliases = {alias: kept for alias, kept in target.aliases.items() if kept in shards_here}
    extra = {_KEY: key, "aliases": aliases}
    metadata = rank_metadata(target.save, comm.rank, comm.world_size, "null", extra)
    member = join_build(target.path, target.key, MANIFEST)
    file = member.write_tensors(name, shard_data(tensors), metadata, comm.progress)
    # Another rank may have left its copy to this one because of these digests (box_writers.py).
    file.content.check_unchanged(digests)
    identity: Sequence[str | int] = [file.content.nbytes, file.version]
    if not file.version:
        with open_path(file.folder) as opened:
            identity = opened.store.open(name).local_identity
    listed = SavedFile(name, file.content.nbytes, comm.rank, target.save)
    return FrozenFile(listed, identity, file.version, shards_here, file.content.digests)


@contextlib.contextmanager
def _writing_again(path: str) -> Iterator[None]:
    """A block that tries to link what lies at `path`: if it fails, a warning says that the parameters are written."""
    try:
        yield
    except (PeerError, StallError, TargetExistsError):  # this save is over: another rank has failed, or a publisher
        raise  # has taken over the target
    except StateExchangeError as error:
        _log.warning("%s is not linked, but written again: %s", without_secrets(path), error)


def _files_of(folder: str, comm: Communicator) -> dict[str, FrozenFile]:
    """Return this rank's files in a save that an earlier process wrote; none that cannot be read."""
    files: dict[str, FrozenFile] = {}
    with _writing_again(folder), open_path(folder) as opened:
        manifest = read_manifest(opened.store)
        if manifest.world_size != comm.world_size:
            return files
        for listed in manifest.frozen:
            if listed.rank != comm.rank:
                continue
            with _writing_again(opened.store.path_of(listed.name)):
                file = open_rank_file(opened.store, manifest, listed)
                digests: dict[str, list[str]] = {}
                # This process has not seen the bytes that have these digests: they are read before a link.
                for name, tensor in ShardFile.of_rank(file).tensors.items():
                    boxes = range(len(tensor.byte_ranges))
                    digests[name] = [tensor.read_digest(box, comm.progress).hexdigest() for box in boxes]
                key, identity = str(file.metadata.get(_KEY)), file.file.local_identity
                files[key] = FrozenFile(listed, identity, "", file.shards, digests)
    return files
