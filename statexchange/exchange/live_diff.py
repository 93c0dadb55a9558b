"""Compare live state with a checkpoint: all ranks compare the rows that they hold, and join what they have found."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace

from statexchange.comm.communicator import Communicator
from statexchange.comm.typed import from_all
from statexchange.errors import InvalidArgumentError, excerpt, without_secrets
from statexchange.exchange.compared_rows import Compared, RowComparison, joined
from statexchange.exchange.converting import Conversion, convert_live
from statexchange.exchange.placing import place_parts
from statexchange.exchange.saved_state import SavedState
from statexchange.formats.open_checkpoint import OpenCheckpoint
from statexchange.formats.registry import open_source
from statexchange.report.diff import DiffReport
from statexchange.sharding.options import CallOptions, ExportOptions
from statexchange.state.describe import Description, LocalTensor

__all__ = ["LiveComparison"]


@dataclass(frozen=True, slots=True)
class LiveComparison:
    """The comparison of a described state with a checkpoint.

    Attributes:
        comm: the communicator.
        saved: the state of this rank.
        conversion: the conversion that the call names.
        names: that of transformers for the state, if no other is to be used.
        options: the options that select and rename names, and the layout.
        call: what is read of the checkpoint, and by how much equal values may differ.
    """

    comm: Communicator
    saved: SavedState
    conversion: Conversion | None
    names: Conversion | None
    options: ExportOptions
    call: CallOptions

    def run(self, path: str | os.PathLike[str]) -> DiffReport:
        """Compare all tensors with those at `path`. Collective."""
        # The patterns are for the names after the conversion.
        placing = ExportOptions(layout=self.options.layout)
        described, _ = convert_live(self.comm, self.saved.described, self.conversion, placing)
        has_layout = any(from_all(self.comm, placing.layout is not None, bool, "its layout"))
        if self.conversion is None and has_layout:
            # With a conversion they are placed already.
            described = place_parts(self.comm, described, self.saved.rules)
        with contextlib.ExitStack() as holding:
            with self.comm.phase("reading the headers"):
                source = open_source(path, section=self.call.section, weights=self.call.weights).unwrapped()
                stored = holding.enter_context(OpenCheckpoint(source))
                names = list(stored)
            live = self._live(described, stored)
            # One phase for all rows: ranks hold different tensors, and a collective for each would have to be the same.
            with self.comm.phase("comparing its rows"):
                facts = {}
                for name, tensor in stored.items():
                    if self.options.wants(name):
                        facts[name] = (tensor.dtype, tensor.shape)
                rows = RowComparison(self.comm, self.call.tolerance)
                rows.check_copies(source, facts)
                compared = rows.compare(live, stored)
        parts: dict[str, list[Compared]] = {}
        nbytes = 0
        sent = from_all(self.comm, compared, tuple[dict[str, Compared], int], "its comparison")
        for of_rank, rank_nbytes in sent:
            nbytes += rank_nbytes
            for name, part in of_rank.items():
                parts.setdefault(name, []).append(part)
        tensors = []
        # A name may come from a, from b or from both.
        for name in sorted(parts.keys() | facts.keys()):
            tensors.append(joined(name, parts.get(name, []), facts.get(name), self.call.tolerance))
        if not tensors and not names:
            raise InvalidArgumentError("there is nothing to compare: neither has a tensor", path=source.path)
        if not tensors:
            raise InvalidArgumentError(f"include and exclude select none of the names, such as {excerpt(names[0])}")
        notes = tuple(f"b: {note}" for note in source.notes)
        return DiffReport("live state", without_secrets(os.fspath(path)), tuple(tensors), nbytes, notes)

    def _live(self, described: Description, stored: OpenCheckpoint) -> dict[str, LocalTensor]:
        """Return the selected live tensors by the names to compare. Collective.

        What a model of transformers has under another name in memory than in files has the checkpoint's name.
        """
        live: dict[str, LocalTensor] = {}
        apart: dict[str, LocalTensor] = {}
        for name, local in described.tensors.items():
            (live if self.options.renamed(name) in stored else apart)[name] = local
        converted, _ = convert_live(self.comm, replace(described, tensors=apart), self.names, ExportOptions())
        wanted = {}
        for name, local in (live | dict(converted.tensors)).items():
            new_name = self.options.renamed(name)
            if self.options.wants(new_name):
                wanted[new_name] = local
        return wanted
