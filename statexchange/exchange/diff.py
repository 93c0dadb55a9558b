"""Compare two checkpoints, or a checkpoint with live state: each rank compares its own rows."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from statexchange.comm.communicator import CommLike, Communicator, from_all
from statexchange.comm.defaults import as_communicator, public_call
from statexchange.errors import InvalidArgumentError, excerpt, without_secrets
from statexchange.exchange.chosen_conversion import ChosenConversion, Conversion, chosen_conversion
from statexchange.exchange.compared_rows import Compared, compared_rows, joined
from statexchange.exchange.export import converted_description
from statexchange.exchange.placing import place_parts
from statexchange.formats.open_checkpoint import OpenCheckpoint
from statexchange.formats.registry import open_source
from statexchange.formats.source import SectionName
from statexchange.report.diff import DiffReport, diff_paths
from statexchange.sharding.options import CallOptions, Convert, ExportOptions, LoadOptions, Rename
from statexchange.state.describe import Description, LocalTensor, State
from statexchange.state.state_dict import SavedState, describe_save


def diff_checkpoints(
    a: State | str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    comm: CommLike | None = None,
    layout: Mapping[str, Any] | None = None,
    section: SectionName | Literal["all"] | None = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    rename: Rename = (),
    convert: Convert | None = None,
    convert_with: Mapping[str, int] | None = None,
    tolerance: float | None = None,
    threads: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> DiffReport:
    """Compare two checkpoints of any formats and shardings, or live state with a checkpoint.

    Not collective for two paths; memory is bounded, whatever the size of the tensors. Collective over `comm` for live
    state: each rank compares the rows that it holds, and all get the same report, so a job can verify a load. Only
    tensors are compared.

    Args:
        a: a path or URL of any format that `open_checkpoint` reads; or live state, as for `save_checkpoint`.
        b: another path or URL.
        comm: for live state, a Communicator, ProcessGroup, DeviceMesh or MPI communicator; by default the current one.
        layout: for live state, the sharding of plain tensors, as for `save_checkpoint`.
        section: what to compare of a job's state, as for `merge_checkpoint`: by default the model, where it is known.
        include: shell patterns of names to compare; by default all. They are matched after `rename` and `convert`. A
            live model of transformers, such as one with all experts in one tensor, is compared by the names in b.
        exclude: shell patterns of names to leave out.
        rename: a function of a name, or (regex, replacement) pairs, for the names in a.
        convert: a conversion of the names and values in a, as for `merge_checkpoint`; `rename` applies after it. Live
            state must then be a model alone.
        convert_with: numbers that the conversion needs, by name. Others come from the config of a live model of
            transformers, or from a config.json beside a path.
        tolerance: values are equal if they differ by at most this, whatever their dtypes, and NaN equals NaN. By
            default bits and dtypes must be equal.
        threads: for two paths, the number of tensors read at once; by default one per core.
        on_progress: for two paths, called with (bytes compared, bytes in total).

    Returns:
        The report. A tied name is listed if the other checkpoint stores a tensor under it.

    Raises:
        NotFoundError: there is no checkpoint at a path.
        IncompleteError: something is missing in one of them.
        CorruptError: a file is broken; `statexchange verify` names what.
        ReplicaError: the copies that ranks have of one tensor differ.
        ReplacedError: a checkpoint was changed while it was read.
        InvalidArgumentError: an option is wrong, or the patterns select no name.
        PeerError: another rank has failed.

    Example:
        >>> import numpy
        >>> from safetensors.numpy import save_file
        >>> save_file({"w": numpy.ones(4), "b": numpy.zeros(2)}, "a.safetensors")
        >>> save_file({"w": numpy.array([1.0, 1, 1.5, 1]), "b": numpy.zeros(2)}, "b.safetensors")
        >>> report = diff_checkpoints("a.safetensors", "b.safetensors")
        >>> for tensor in report.differing:
        ...     tensor.name, tensor.status, tensor.values.max_abs, tensor.values.first
        ('w', 'values', 0.5, (2,))
        >>> import torch
        >>> diff_checkpoints({"w": torch.ones(4, dtype=torch.float64)}, "a.safetensors", include="w").equal
        True
    """
    arguments = locals()
    if isinstance(a, str | os.PathLike):
        return diff_paths(a, b, ExportOptions.of(arguments), CallOptions.of(arguments))
    with public_call("diff_checkpoints"):
        communicator = as_communicator(comm)
        with communicator.phase("describing its state"):
            options, call = ExportOptions.of(arguments), CallOptions.of(arguments)
            conversion = chosen_conversion(options, a, None)
            saved = describe_save(a, layout, LoadOptions(), communicator.rank)
            # The conversion of `save_pretrained` is not for all: what the checkpoint has under the name in memory is
            # compared as it is. A layout's rules are for these names, too.
            names = None
            if not isinstance(conversion, ChosenConversion):
                if layout is None:
                    names = conversion
                conversion = None
                if section is None and isinstance(a, Mapping):
                    call = replace(call, section="all")  # the names of a job's state begin with its sections
        return _diff_live(communicator, saved, (conversion, names), options, call, b)


def _diff_live(
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
