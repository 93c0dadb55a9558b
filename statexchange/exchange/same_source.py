"""All ranks of a load read the same checkpoint with the same options, or all of them raise an error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from statexchange.comm.communicator import Communicator
from statexchange.comm.typed import from_all
from statexchange.errors import InvalidArgumentError, ReplacedError
from statexchange.exchange.load_report import LoadRequest
from statexchange.exchange.rank_metadata import check_equal_options
from statexchange.formats.source import Source
from statexchange.storage.files import digest

__all__ = ["check_same_source"]


@dataclass(frozen=True, slots=True)
class _OpenedSource:
    """The checkpoint that a rank has opened, and its options; ranks compare these records.

    `content` and `files` are digests. Equal `content` means the same checkpoint. Equal `files`, on ranks of one host,
    means the same files.
    """

    content: str
    files: str
    path: str
    shown: str
    options: Mapping[str, str]
    has_layout: bool

    @classmethod
    def of(cls, source: Source, request: LoadRequest) -> _OpenedSource:
        """Describe the source that this rank has opened."""
        content: list[object] = [source.kind, source.run, source.round, source.manifest]
        local = []
        for holder in source.files:
            # Two publications may have files of equal names and sizes. So ranks of one host also compare the files'
            # local identity, and all ranks compare their identity on a file system that hosts share.
            content += [holder.name, holder.nbytes, len(holder.tensors), holder.file.shared_identity]
            local.append(holder.file.local_identity)
        shown = source.path
        if source.round is not None:
            shown += f", round {source.round} of {source.run}"
        options = request.options.texts()
        if request.conversion is not None:
            options |= request.conversion.texts()
        return cls(_digest(content), _digest(local), source.path, shown, options, request.options.layout is not None)


def check_same_source(source: Source, request: LoadRequest, comm: Communicator) -> bool:
    """Return whether any rank has a layout; raise, on all ranks, for different checkpoints or options. Collective.

    Raises:
        ReplacedError: ranks have opened different checkpoints at one path.
        InvalidArgumentError: they have opened different paths, or have different options.
    """
    opened_here = _OpenedSource.of(source, request)
    opened = from_all(comm, opened_here, _OpenedSource, "the description of the checkpoint")
    for rank, of_rank in enumerate(opened):
        first_rank = 0
        if of_rank.content == opened[0].content:
            # Each host may have a copy of its own: files are compared with those of the host's first rank.
            first_rank = comm.nodes.index(comm.nodes[rank])
            if of_rank.files == opened[first_rank].files:
                continue
        first = opened[first_rank]
        if of_rank.path == first.path:
            raise ReplacedError(
                f"ranks {first_rank} and {rank} opened different versions of this checkpoint, because it was replaced "
                "during the load: load again when nothing publishes to this path",
                path=of_rank.path,
            )
        raise InvalidArgumentError(
            f"rank {first_rank} opened {first.shown} and rank {rank} opened {of_rank.shown}: pass the same path on "
            "all ranks",
            rank=rank,
            path=of_rank.path,
        )
    check_equal_options([of_rank.options for of_rank in opened])
    return any(of_rank.has_layout for of_rank in opened)


def _digest(value: object) -> str:
    return digest(json.dumps(value).encode())
