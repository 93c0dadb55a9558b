"""Open the source of a load, and find what it has by the names of the state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from statexchange.comm.communicator import Communicator
from statexchange.errors import InvalidArgumentError, NotFoundError, StateExchangeError
from statexchange.exchange.load_converting import ConvertedSource, converted_for_load
from statexchange.exchange.load_report import LoadRequest
from statexchange.exchange.source_entries import StoredTensors, source_entries
from statexchange.formats.registry import open_source
from statexchange.formats.sections import ALL, MODEL_OF_PARTS, SECTIONS, sections_of, select_section
from statexchange.formats.source import Source
from statexchange.state.flatten import LiveState
from statexchange.state.install import Matching, NameFilter, strips_wrappers
from statexchange.state.units import ObjectStates, is_module, module_items

__all__ = ["LoadSource", "located", "open_for_state", "source_content"]

_KEYED_KINDS = ("dcp", "deepspeed", "torch")  # formats whose first keys show the sections


@dataclass(frozen=True, slots=True)
class LoadSource:
    """A source by the names of the state.

    Attributes:
        converted: the source as it is loaded, and what a conversion has left out.
        tensors: its tensors by its own names.
        matching: its entries, and what decides which of them fill the state.
    """

    converted: ConvertedSource
    tensors: StoredTensors
    matching: Matching


def open_for_state(request: LoadRequest, comm: Communicator) -> Source:
    """Open the part of the source that the state needs; on several hosts NotFoundError names the one that lacks it.

    For a conversion that is the model. From a training framework's directory it is the model, too, unless the state is
    a mapping with sections as keys, which needs all parts.
    """
    section: str | None = MODEL_OF_PARTS
    if request.conversion is not None:
        section = None
    elif isinstance(request.state, Mapping) and not set(SECTIONS).isdisjoint(request.state):
        section = ALL
    try:
        source = open_source(request.path, section=section)
    except NotFoundError as error:
        if comm.num_nodes == 1:
            raise
        text = f"{error.message} on {comm.hosts[comm.rank]}; all hosts must see the source"
        raise NotFoundError(text, rank=comm.rank, path=error.path) from error
    # A mapping says by its keys what it wants of a job's state; a module wants the model.
    if section is None or not is_module(request.state) or source.kind not in _KEYED_KINDS:
        return source
    return _model_of_job(request, source)


def _model_of_job(request: LoadRequest, source: Source) -> Source:
    """Return the model's section alone if the source is a job's state, unless the module has its prefix in names."""
    for section in sections_of(source):
        if section.name == "model" and section.prefix:
            # A wrapper of the user's own may have the model under that very name.
            names = module_items(request.state, keep_vars=True).keys()
            if section.names.isdisjoint(names):
                return select_section(source, section.name)
    return source


def source_content(request: LoadRequest, source: Source, live: LiveState, comm: Communicator) -> LoadSource:
    """Return what an opened source has by the names of the state. Not collective; reads no tensor."""
    state, options = request.state, request.options
    stored: set[str] = set()
    for file in source.files:
        stored.update(file.tensors)
    names = NameFilter(options, live.units, strips_wrappers=strips_wrappers(stored, state))
    converted = ConvertedSource(source, names)
    # Only a module can be a model of transformers or PEFT, whose names in files are others.
    if request.conversion is not None or is_module(state):
        converted = converted_for_load(request, source, names)
    source, names = converted.source, converted.names
    # From here on the source is the converted one; the opened one only holds the files.
    tensors = StoredTensors(source, options.replicas, comm, converted.aliases)
    objects = ObjectStates()
    matching = Matching(
        names=names,
        entries=source_entries(source, tensors, names, state, live, objects),
        objects=objects,
        has_tree=tensors.has_tree,
        classes={names.place(path): classes for path, classes in source.optimizers.items()},
        path=source.path,
        saved_by=source.world_size,
        loaded_by=comm.world_size,
    )
    if matching.has_tree:
        _check_layout(matching)
    return LoadSource(converted, tensors, matching)


def _check_layout(matching: Matching) -> None:
    """Raise InvalidArgumentError for a rule that renames tensors, as for an export, and a source that is a save."""
    for rule in matching.layout.rules.values():
        if rule.renames:
            text = (
                f"layout rule for {rule.pattern!r} renames tensors, and this source was saved with the names that the "
                "state has: leave it out"
            )
            raise InvalidArgumentError(text)


@contextlib.contextmanager
def located(path: str) -> Iterator[None]:
    """Let an error about the state name the source, too."""
    try:
        yield
    except StateExchangeError as error:
        if error.path is not None:
            raise
        raise error.located(path=path) from error.__cause__
