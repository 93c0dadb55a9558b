"""Compare live state with a checkpoint: all ranks compare the rows that they hold, and join what they have found."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace

from statexchange.comm.communicator import Communicator, from_all
from statexchange.errors import InvalidArgumentError, excerpt, without_secrets
from statexchange.exchange.chosen_conversion import Conversion
from statexchange.exchange.compared_rows import Compared, compared_rows, joined
from statexchange.exchange.export import converted_description
from statexchange.exchange.placing import place_parts
from statexchange.formats.open_checkpoint import OpenCheckpoint
from statexchange.formats.registry import open_source
from statexchange.report.diff import DiffReport
from statexchange.sharding.options import CallOptions, ExportOptions
from statexchange.state.describe import Description, LocalTensor
from statexchange.state.state_dict import SavedState

__all__ = ["diff_live"]


def diff_live(
    comm: Communicator,
    saved: SavedState,
    conversions: tuple[Conversion | None, Conversion | None],
    options: ExportOptions,
    call: CallOptions,
    path: str | os.PathLike[str],
) -> DiffReport:
    """Compare all tensors of a described state with those at `path`. Collective.

    Args:
        comm: the communicator.
        saved: the state of this rank.
        conversions: the one that the call names; and that of transformers for the state, if no other is to be used.
        options: the options that select and rename names, and the layout.
        call: what is read of the checkpoint, and by how much equal values may differ.
        path: the checkpoint.
    """
    conversion, names = conversions
    # Without the patterns, which are for the names after the conversion.
    placing = ExportOptions(layout=options.layout)
    described, _ = converted_description(comm, saved.described, conversion, placing)
    has_layout = any(from_all(comm, placing.layout is not None, bool, "its layout"))
    if conversion is None and has_layout:
        # With a conversion they are placed already.
        described = place_parts(comm, described, saved.rules)
    with contextlib.ExitStack() as holding:
        with comm.phase("reading the headers"):
            source = open_source(path, section=call.section).unwrapped()
            stored = holding.enter_context(OpenCheckpoint(source))
            stored_names = list(stored)
        live = _live_tensors(comm, described, stored, names, options)
        # One phase for all rows: ranks hold different tensors, and a collective for each would have to be the same.
        with comm.phase("comparing its rows"):
            facts = {}
            for name, tensor in stored.items():
                if options.wants(name):
                    facts[name] = (tensor.dtype, tensor.shape)
            compared = {}
            for name, local in live.items():
                compared[name] = compared_rows(local, stored.get(name), call.tolerance, comm.progress)
                comm.progress()
    parts: dict[str, list[Compared]] = {}
    nbytes = 0
    for of_rank in from_all(comm, compared, dict[str, Compared], "its comparison"):
        for name, part in of_rank.items():
            nbytes += part.nbytes
            parts.setdefault(name, []).append(part)
    tensors = []
    # A name may come from a, from b or from both.
    for name in sorted(parts.keys() | facts.keys()):
        tensors.append(joined(name, parts.get(name, []), facts.get(name), call.tolerance))
    if not tensors and not stored_names:
        raise InvalidArgumentError("there is nothing to compare: neither has a tensor", path=source.path)
    if not tensors:
        raise InvalidArgumentError(f"include and exclude select none of the names, such as {excerpt(stored_names[0])}")
    notes = tuple(f"b: {note}" for note in source.notes)
    return DiffReport("live state", without_secrets(os.fspath(path)), tuple(tensors), nbytes, notes)


def _live_tensors(
    comm: Communicator,
    described: Description,
    stored: OpenCheckpoint,
    names: Conversion | None,
    options: ExportOptions,
) -> dict[str, LocalTensor]:
    """Return the selected live tensors by the names to compare. Collective.

    What a model of transformers has under another name in memory than in files has the checkpoint's name.
    """
    live: dict[str, LocalTensor] = {}
    apart: dict[str, LocalTensor] = {}
    for name, local in described.tensors.items():
        (live if options.renamed(name) in stored else apart)[name] = local
    converted, _ = converted_description(comm, replace(described, tensors=apart), names, ExportOptions())
    wanted = {}
    for name, local in (live | dict(converted.tensors)).items():
        new_name = options.renamed(name)
        if options.wants(new_name):
            wanted[new_name] = local
    return wanted
