"""Open the source of a load on each rank, and make sure that all ranks have opened the same one, with equal options."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from statexchange.comm.communicator import Communicator
from statexchange.errors import InvalidArgumentError, NotFoundError, ReplacedError
from statexchange.exchange.converting import ChosenConversion
from statexchange.exchange.rank_metadata import check_equal_options
from statexchange.formats.registry import open_source
from statexchange.formats.sections import ALL, MODEL_OF_PARTS, SECTIONS, sections_of, select_section
from statexchange.formats.source import Source
from statexchange.sharding import records
from statexchange.sharding.options import LoadOptions
from statexchange.state.modules import is_module, module_items
from statexchange.storage.tensorfile import digest

__all__ = ["check_same", "opened"]

_KEYED_KINDS = ("dcp", "deepspeed", "torch")  # formats whose first keys show the sections


def opened(path: str | os.PathLike[str], state: Any, comm: Communicator, conversion: ChosenConversion | None) -> Source:
    """Open the part of the source that the state needs; on several hosts NotFoundError names the one that lacks it.

    For a conversion that is the model. From a training framework's directory it is the model, too, unless the state is
    a mapping with sections as keys, which needs all parts.
    """
    names_sections = isinstance(state, Mapping) and any(key in SECTIONS for key in state)
    try:
        if conversion is not None:
            return open_source(path, section=None)
        source = open_source(path, section=ALL if names_sections else MODEL_OF_PARTS)
        return _model_for(state, source)
    except NotFoundError as error:
        if comm.num_nodes == 1:
            raise
        text = f"{error.message} on {comm.hosts[comm.rank]}; all hosts must see the source"
        raise NotFoundError(text, rank=comm.rank, path=error.path) from error


def _model_for(state: Any, source: Source) -> Source:
    """Return only the model's section of a job's state if `state` is a module without the section's prefix in names."""
    if not is_module(state) or source.kind not in _KEYED_KINDS:
        return source
    models = [section for section in sections_of(source) if section.name == "model" and section.prefix]
    if not models:
        return source
    (model,) = models
    own = module_items(state, keep_vars=True)
    return source if model.names & own.keys() else select_section(source, model.name)


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
    def of(cls, source: Source, options: LoadOptions, texts: Mapping[str, str]) -> _OpenedSource:
        """Describe the source that this rank has opened; `texts` are further options.

        Two publications may have files of equal names and sizes. So ranks of one host also compare the files' local
        identity, and all ranks compare their identity on a file system that hosts share.
        """
        holders = [[os.path.basename(holder.path), holder.nbytes, len(holder.tensors)] for holder in source.files]
        shared = [holder.file.shared_identity for holder in source.files]
        local = [holder.file.local_identity for holder in source.files]
        content = [source.kind, source.run, source.round, holders, source.manifest, shared]
        where = f", round {source.round} of {source.run}" if source.round is not None else ""
        shown = source.path + where
        has_layout = options.layout is not None
        return cls(_digest(content), _digest(local), source.path, shown, {**options.texts(), **texts}, has_layout)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value that `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Any) -> _OpenedSource:
        """Return the record that `to_json` wrote; raise ValueError for anything else."""
        *texts, options, has_layout = records.fields(raw, *cls.__dataclass_fields__)
        content, files, path, shown = map(records.text, texts)
        return cls(content, files, path, shown, records.texts(options), records.flag(has_layout))


def check_same(source: Source, options: LoadOptions, texts: Mapping[str, str], comm: Communicator) -> bool:
    """Raise, on all ranks, if they have opened different checkpoints or were given different options. Collective.

    Different checkpoints at one path are a ReplacedError, at different paths an InvalidArgumentError. Return whether
    any rank has a layout.
    """
    if comm.world_size == 1:
        return options.layout is not None
    ours = _OpenedSource.of(source, options, texts)
    sent = comm.all_gather_object(ours.to_json())
    found = [
        records.parsed(raw, _OpenedSource.from_json, "the description of the checkpoint", rank)
        for rank, raw in enumerate(sent)
    ]
    for rank, theirs in enumerate(found):
        other = next(first for first, node in enumerate(comm.nodes) if node == comm.nodes[rank])
        same_content, same_files = theirs.content == found[0].content, theirs.files == found[other].files
        if same_content and same_files:
            continue
        first = 0 if not same_content else other
        if theirs.path == found[first].path:
            raise ReplacedError(
                f"ranks {first} and {rank} opened different versions of this checkpoint, because it was replaced "
                "during the load: load again when nothing publishes to this path",
                path=theirs.path,
            )
        raise InvalidArgumentError(
            f"rank {first} opened {found[first].shown} and rank {rank} opened {theirs.shown}: pass the same path on "
            "all ranks",
            rank=rank,
            path=theirs.path,
        )
    check_equal_options([one.options for one in found])
    return any(one.has_layout for one in found)


def _digest(value: Any) -> str:
    return digest(json.dumps(value).encode())
