"""Gather the index of a save on root: which file has which boxes of each tensor, for its manifest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from statexchange.comm.communicator import Communicator
from statexchange.exchange.frozen_files import FrozenFile
from statexchange.exchange.rank_metadata import gather_distinct
from statexchange.messages import decode, encoded
from statexchange.sharding.shards import Shard
from statexchange.state.describe import Description
from statexchange.state.state_dict import SavedState
from statexchange.storage.files import digest
from statexchange.storage.publish.build import WrittenFile
from statexchange.storage.save_index import Content, IndexedState, IndexedTensor, SavedLayout, SaveIndex, layout_of
from statexchange.tensors import collector_paused

__all__ = ["Held", "content_of", "gather_index", "joined"]

_MAX_TEXT = (
    32 << 20
)  # of boxes that follow no pattern: a load then opens all files, as it did before there was an index


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank's files have, and its state beside the tensors. Equal on ranks that hold all of it over one mesh."""

    contents: Sequence[Content]
    state: IndexedState


def gather_index(
    comm: Communicator,
    saved: SavedState,
    described: Description,
    file: WrittenFile,
    frozen: Mapping[str, FrozenFile],
) -> str:
    """Return the text of the index on root, "" elsewhere and for an index that would be too large. Collective.

    Args:
        comm: the communicator.
        saved: this rank's state.
        described: its tensors, whose meshes say where uneven parts lie.
        file: its file.
        frozen: its files of frozen parameters, in the order of the manifest.
    """
    files: list[Iterable[Shard]] = [file.content.shards]
    files += [of_key.shards.values() for of_key in frozen.values()]
    with collector_paused():
        contents: list[Content] = []
        coordinates_here: list[list[int]] = []
        for shards in files:
            content, coordinates = content_of(shards, described, comm.rank)
            contents.append(content)
            coordinates_here.append(coordinates)
        facts = {"config": digest(saved.common.encode()), "aliases": dict(saved.described.aliases), **saved.owners}
        state = IndexedState.from_json(facts)
        sent, _ = gather_distinct(comm, encoded(Held(contents, state), Held), root=0)
        # Apart from what is equal: on each rank they differ.
        placed = comm.all_gather_bytes(
            encoded(coordinates_here, list[list[int]]), root=0, operation="the coordinates of its files"
        )
        text = ""
        with comm.phase("indexing"):
            if comm.rank == 0:
                text = joined(sent, placed).to_text()
        return text if len(text) <= _MAX_TEXT else ""


def content_of(shards: Iterable[Shard], described: Description, rank: int) -> tuple[Content, list[int]]:
    """Return what a file has, and its coordinate on each of the layouts."""
    tensors: list[IndexedTensor] = []
    numbers: list[int] = []
    number_of: dict[tuple[SavedLayout, int], int] = {}
    seen: dict[int, int] = {}  # the number of each object below: to compare layouts takes longer than all else here
    kept: list[object] = []  # whose ids stay theirs
    for shard in shards:
        # A mesh also says where an uneven or an empty part lies.
        placement = described.tensors[shard.name].placement
        origin: object = placement or layout_of(shard.global_shape, shard.boxes)
        number = seen.get(id(origin))
        if number is None:
            place = layout_of(shard.global_shape, shard.boxes)
            if placement is not None:
                place = SavedLayout(placement), rank
            number = seen[id(origin)] = number_of.setdefault(place, len(number_of))
            kept.append(origin)
        tensors.append(IndexedTensor(shard.name, shard.dtype, shard.global_shape))
        numbers.append(number)
    layouts = [layout for layout, _ in number_of]
    return Content(tensors, layouts, numbers), [coordinate for _, coordinate in number_of]


def joined(sent: Sequence[bytes], placed: Sequence[bytes]) -> SaveIndex:
    """Return the index of what ranks have sent: what they hold, and the coordinates of their files."""
    held: dict[bytes, Held] = {}
    states: dict[bytes, int] = {}
    state_of: list[int] = []
    files: list[tuple[Content, Sequence[int]]] = []
    frozen: list[tuple[Content, Sequence[int]]] = []
    listed_states = []
    for rank, (data, coordinates_data) in enumerate(zip(sent, placed, strict=True)):
        if data not in held:
            held[data] = decode(data, Held, "what its files hold", rank)
        of_rank = held[data]
        key = encoded(of_rank.state, IndexedState)
        if key not in states:
            states[key] = len(states)
            listed_states.append(of_rank.state)
        state_of.append(states[key])
        coordinates = decode(coordinates_data, list[list[int]], "the coordinates of its files", rank)
        own, *others = zip(of_rank.contents, coordinates, strict=True)
        files.append(own)
        frozen += others
    return SaveIndex.of([*files, *frozen], listed_states, state_of)
