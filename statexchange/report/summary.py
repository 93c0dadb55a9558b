"""Summarize a checkpoint from its headers: format, ranks, tensors, dtypes and bytes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from statexchange.errors import StateExchangeError, without_secrets
from statexchange.formats.config_check import source_warnings
from statexchange.formats.model_files import CONFIG
from statexchange.formats.registry import open_source
from statexchange.formats.sections import sections_of
from statexchange.formats.source import FLAT_PARAMETERS, Part, SectionName, Source, is_flat_parameter
from statexchange.report.tensor_facts import (
    ModuleNode,
    TensorRow,
    aliases_of,
    known_bytes,
    module_tree,
    tensor_rows,
    uncovered,
)
from statexchange.storage.location import parse_json
from statexchange.storage.store import Store

_MAX_MODEL = 60  # characters of a model's class


@dataclass(frozen=True, slots=True)
class SectionSummary:
    """Number and bytes of the tensors of one section."""

    num_tensors: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Summary:
    """A checkpoint in a few numbers.

    Attributes:
        kind: the format.
        path: the path.
        num_tensors: number of tensors, unreadable ones included.
        num_parameters: number of elements of the model's tensors, where `sections` show which these are; else of all
            tensors with known shapes.
        nbytes: bytes of all tensors, each counted once.
        dtypes: number of tensors by dtype.
        num_files: number of files.
        file_nbytes: bytes of all files.
        run: run of a workspace, or of the job that made a save.
        round: round of a workspace.
        step: training step of a save or of Trainer's directory, or iteration of a Megatron checkpoint.
        created: time of a save, in seconds since the epoch.
        metrics: numbers that a job gave with a save.
        world_size: number of ranks, where the format has it.
        ranks: ranks that have files.
        sections: tensors and their bytes by the section of a job's state: "model", "optimizer" ...; empty if not known.
        aliases: names of tied tensors, with the names under which they are kept.
        num_unreadable: number of tensors that are listed but cannot be read.
        proven: whether digests of all bytes are known.
        others: descriptions, by name, of entries that are not tensors.
        unsupported: reasons, by name, why tensors cannot be read although their files can.
        parts: the parts of a training framework's directory.
        problems: errors for everything that is missing or broken.
        notes: what was not looked at; differences between a config and the tensors beside it.
        tree: the modules in the names of the tensors, if they were asked for.
    """

    kind: str
    path: str
    num_tensors: int
    num_parameters: int
    nbytes: int
    dtypes: dict[str, int]
    num_files: int
    file_nbytes: int
    run: str | None
    round: int | None
    step: int | None
    created: float | None
    metrics: dict[str, float]
    world_size: int | None
    ranks: tuple[int, ...]
    sections: Mapping[SectionName, SectionSummary]
    aliases: dict[str, str]
    num_unreadable: int
    proven: bool
    others: dict[str, str]
    unsupported: dict[str, str]
    parts: tuple[Part, ...]
    problems: tuple[StateExchangeError, ...]
    notes: tuple[str, ...] = ()
    tree: ModuleNode | None = None


def summarize(path: str | os.PathLike[str], *, tree_depth: int | None = None) -> Summary:
    """Summarize a checkpoint.

    Not collective. Reads headers only. Problems are in the summary, not raised.

    Args:
        path: a path or URL of any format that `open_checkpoint` reads.
        tree_depth: add the tree of modules, down to so many parts of a name.

    Returns:
        The summary.

    Raises:
        NotFoundError: there is no checkpoint at the path.

    Example:
        >>> import numpy
        >>> from safetensors.numpy import save_file
        >>> save_file({"w": numpy.zeros((2, 3), "float32")}, "model.safetensors")
        >>> summary = summarize("model.safetensors")
        >>> summary.kind, summary.num_parameters, summary.dtypes
        ('huggingface', 6, {'F32': 1})
    """
    with open_source(path, strict=False) as source:
        rows = tensor_rows(source)
        sections = {}
        for section in sections_of(source):
            # By rows, as some of a section's tensors may be entries that cannot be read.
            of_section = [row for row in rows if row.name in section.names]
            sections[section.name] = SectionSummary(len(of_section), known_bytes(of_section))
        ranks: tuple[int, ...] = ()
        if source.has_ranks:
            # A rank may have several files.
            ranks = tuple(dict.fromkeys(map(attrgetter("rank"), source.files)))
        return Summary(
            kind=source.kind,
            path=without_secrets(os.fspath(path)),
            num_tensors=len(rows),
            num_parameters=sum(map(attrgetter("num_parameters"), model_rows(source, rows))),
            nbytes=known_bytes(rows),
            dtypes=dict(sorted(Counter(map(attrgetter("dtype"), rows)).items())),
            num_files=len(source.files),
            file_nbytes=source.nbytes,
            run=source.run,
            round=source.round,
            step=source.step,
            created=source.created,
            metrics=dict(source.metrics),
            world_size=source.world_size,
            ranks=ranks,
            sections=sections,
            aliases=aliases_of(source),
            num_unreadable=sum(not row.holders for row in rows),
            proven=_is_proven(source),
            others=dict(source.others),
            unsupported={name: error.message for name, error in source.unsupported.items()},
            parts=source.parts,
            problems=(*source.problems, *source.empty_weights(), *uncovered(source)),
            notes=_notes(source),
            tree=None if tree_depth is None else module_tree(rows, tree_depth),
        )


def _is_proven(source: Source) -> bool:
    # A spec has no digests, and this opens none of its parts.
    if not source.files or source.problems or source.specs:
        return False
    for _, tensor in source.shards():
        for stored in tensor.byte_ranges:
            if not stored.is_proven:
                return False
    return True


def model_rows(source: Source, rows: Iterable[TensorRow]) -> list[TensorRow]:
    """Return the rows of the model's tensors; all rows if it is not known which are the model's.

    Not collective.
    """
    sections = sections_of(source)
    if not sections:
        return list(rows)
    # No section of a job's state need be the model: then none of its rows is.
    model: set[str] = set()
    for section in sections:
        if section.name == "model":
            model.update(section.names)
    return [row for row in rows if row.name in model]


def _notes(source: Source) -> tuple[str, ...]:
    """Return the notes on a source that belong beside its numbers."""
    notes = [*source.notes]
    if any(map(is_flat_parameter, source.tensor_names)):
        notes.append(FLAT_PARAMETERS)
    return (*notes, *source_warnings(source))


def model_config(store: Store | None) -> Any:
    """Return the content of the config.json in a source's `config_store`; None if there is none. Not collective.

    Raises:
        CorruptError: it is broken.
    """
    if store is None or CONFIG not in store.files:
        return None
    return parse_json(store.read_small(CONFIG), store.path_of(CONFIG), store.budget)


def model_of(source: Source) -> str | None:
    """Return the class or type of the model that config.json names; None without one that can be read.

    Frameworks that save shards, such as verl, keep the model's config.json in a folder ``huggingface``.
    """
    store = source.config_store
    try:
        if store is not None and CONFIG not in store.files and "huggingface" in store.directories:
            store = store.below("huggingface")
        config = model_config(store)
    except StateExchangeError:  # a broken config is a warning of its own, and no reason to have no summary
        return None
    if not isinstance(config, dict):
        return None
    name = config.get("model_type")
    classes = config.get("architectures")
    if isinstance(classes, list) and classes:
        name = classes[0]
    # Whoever wrote the config may have put anything there.
    if not isinstance(name, str):
        return None
    return name[:_MAX_MODEL]
