"""What a load is asked for, and what it returns."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias

from statexchange.checkpoint.notes import note_on_overflows
from statexchange.comm.communicator import Communicator, from_all
from statexchange.exchange.chosen_conversion import ChosenConversion
from statexchange.exchange.reading import Overflows, ReadItem
from statexchange.formats.source import Source, abbreviated_names
from statexchange.sharding.options import CallOptions, LoadOptions
from statexchange.sharding.shards import Box
from statexchange.state.describe import State
from statexchange.state.load_plan import LoadPlan
from statexchange.units import format_transfer

Reading: TypeAlias = Callable[
    [Source, Sequence[ReadItem], Communicator], AbstractContextManager[tuple[Sequence[ReadItem], int]]
]
"""Opened on all ranks around the reading of a source's items: gives the items to read instead, and the number of their
files that lie in memory."""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What a call of `load_checkpoint`, or of `Checkpoints.load`, asks for.

    Attributes:
        state: the live state.
        path: the source.
        options: the options that decide what is loaded.
        call: the options that decide how it goes.
        began: when the call began, by `time.perf_counter`.
        conversion: the conversion of the source's model; None for none.
        reading: opened around the reading; None reads from the source alone.
    """

    state: State
    path: str | os.PathLike[str]
    options: LoadOptions
    call: CallOptions
    began: float
    conversion: ChosenConversion | None = None
    reading: Reading | None = None


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The result of a load on this rank.

    `nbytes` were read from the source for `num_tensors`; `missing` are paths of the state that the source lacks,
    `unexpected` those of the source that the state lacks; each is the highest path below which the other side has
    nothing. `step` is that of the save, None for any other source. `notes` are about values that a cast has made
    infinite, on any rank, and about this rank's parameters that are one tensor in the source. Root's are logged, too.
    `num_in_memory` of the files in which its tensors lie were in the host's memory (`Checkpoints(memory=True)`).
    """

    path: str
    num_tensors: int
    nbytes: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    seconds: float
    step: int | None = None
    notes: tuple[str, ...] = ()
    num_in_memory: int = 0

    def __str__(self) -> str:
        # Numbers alone, as this is a line of the log: the names may be thousands.
        text = f"{format_transfer(self.num_tensors, self.nbytes, self.seconds)} <- {self.path}"
        if self.missing:
            text += f", {len(self.missing)} missing"
        if self.unexpected:
            text += f", {len(self.unexpected)} unexpected"
        if self.num_in_memory:
            text += f", {self.num_in_memory} file{'s' * (self.num_in_memory > 1)} in memory"
        return text


def notes_on_overflows(comm: Communicator, overflows: Sequence[Overflows]) -> tuple[str, ...]:
    """Return a note about what a cast has made infinite on any rank; each box counts once. Collective."""
    by_box: dict[tuple[str, Box], int] = {}
    for of_rank in from_all(comm, overflows, list[Overflows], "the values that overflowed"):
        for name, box, num_elements in of_rank:
            # Ranks that have copies of a box have read, and cast, the same elements.
            by_box[name, box] = num_elements
    counts: Counter[str] = Counter()
    for (name, _), num_elements in by_box.items():
        counts[name] += num_elements
    return note_on_overflows(counts)


def notes_on_lost_ties(plan: LoadPlan, aliases: Mapping[str, str]) -> tuple[str, ...]:
    """Return a note on parameters that are one tensor in the source and several here, as after `to_empty`."""
    paths: dict[str, dict[int, str]] = {}  # of the live tensors, by id, for each tensor of the source
    for target in plan.targets:
        # Only what trains will differ: other copies stay equal.
        if target.name is not None and getattr(target.live, "requires_grad", False):
            paths.setdefault(aliases.get(target.name, target.name), {}).setdefault(id(target.live), target.path)
    # A tensor under two paths of which each is the same live tensor is still tied.
    lost = [" and ".join(of_tensor.values()) for of_tensor in paths.values() if len(of_tensor) > 1]
    if not lost:
        return ()
    text = (
        f"{abbreviated_names(lost)}: one tensor in the source and several here, which differ after a training "
        "step; to train one, assign it to all these modules after to_empty (transformers: model.tie_weights())"
    )
    return (text,)
