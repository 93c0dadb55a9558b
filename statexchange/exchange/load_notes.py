"""Notes on a load: values that a cast made infinite, and tied parameters that are several tensors now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from statexchange.checkpoint.tensor_notes import note_on_overflows
from statexchange.comm.communicator import Communicator
from statexchange.exchange.reading import Overflows
from statexchange.formats.source import abbreviated_names
from statexchange.sharding import records
from statexchange.sharding.shards import Box
from statexchange.state.load_plan import LoadPlan

__all__ = ["notes_on_lost_ties", "notes_on_overflows"]


def notes_on_overflows(comm: Communicator, overflows: Sequence[Overflows]) -> tuple[str, ...]:
    """Return a note about what a cast has made infinite on any rank; each box counts once. Collective."""
    sent = comm.all_gather_object([record.to_json() for record in overflows])
    by_box: dict[tuple[str, Box], int] = {}
    what = "the values that overflowed"
    for rank, raw in enumerate(sent):
        records_of_rank = records.parsed(raw, lambda raw: records.items(raw, Overflows.from_json), what, rank)
        by_box |= {(record.name, record.box): record.num_elements for record in records_of_rank}
    counts: Counter[str] = Counter()
    for (name, _), num_elements in by_box.items():
        counts[name] += num_elements
    return note_on_overflows(counts)


def notes_on_lost_ties(plan: LoadPlan, aliases: Mapping[str, str]) -> tuple[str, ...]:
    """Return a note on parameters that are one tensor in the source and several here, as after `to_empty`."""
    live: dict[str, dict[int, str]] = {}
    for target in plan.targets if aliases else ():
        if target.name is not None and getattr(target.live, "requires_grad", False):  # only what trains will differ
            of_tensor = live.setdefault(aliases.get(target.name, target.name), {})
            of_tensor.setdefault(id(target.live), target.path)
    lost = [" and ".join(paths.values()) for paths in live.values() if len(paths) > 1]
    if not lost:
        return ()
    text = (
        f"{abbreviated_names(lost)}: one tensor in the source and several here, which differ after a training "
        "step; to train one, assign it to all these modules after to_empty (transformers: model.tie_weights())"
    )
    return (text,)
