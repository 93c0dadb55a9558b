"""Look up a checkpoint's tensors and its saved tree by the names of the live state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from statexchange.errors import CorruptError, ReplicaError, UnsafeError
from statexchange.formats.source import Source, SourceTensor
from statexchange.sharding.options import LoadOptions, renamed
from statexchange.sharding.plan import HolderLabel, holders_text
from statexchange.sharding.rules import Layout
from statexchange.sharding.shards import Box, Shard, full_box
from statexchange.sharding.wrappers import without_wrappers
from statexchange.storage.byte_range import ByteRange

__all__ = ["Catalog", "differing_text"]


class _SavedPart(NamedTuple):
    """The part of a tensor that one rank has saved."""

    rank: int
    tensor: SourceTensor
    path: str
    label: HolderLabel


class Catalog:
    """The tensors of a source by the state's names: dtype, shape, and the byte range of every box.

    If as many ranks load as have saved, `own_rank` is this rank, and its own part comes first. Otherwise `own_rank` is
    None, and the lowest rank's part comes first. `old_names` has the source's own names. `renumbered` maps the state's
    names to the source's where a layout renumbers tensors over all ranks. `lacking` has, for a tensor that is missing,
    a part of it that the source lacks. With `strips_wrappers` names lose what torch.compile and others put into them,
    as those of live modules do. `progress` is called again and again while copies are read to be compared.
    """

    def __init__(
        self,
        source: Source,
        options: LoadOptions,
        rank: int,
        world_size: int,
        progress: Callable[[], None],
        *,
        strips_wrappers: bool = False,
    ) -> None:
        self._progress = progress
        self._boxes: dict[str, dict[Box, ByteRange]] = {}  # what `boxes_of` has returned
        self.source = source
        self.options = options
        self._strips_wrappers = strips_wrappers
        self.layout = Layout({}) if options.layout is None else options.layout.unmatched()
        self.renumbered: Mapping[str, str] = {}
        self.lacking: Mapping[str, str] = {}
        self.world_size = world_size
        self.own_rank = rank if source.world_size == world_size else None
        self._aliases: dict[str, str] = {}
        self._parts: dict[str, list[_SavedPart]] = {}
        self.old_names: dict[str, str] = {}
        for shard_file in sorted(source.files, key=lambda file: (file.rank != self.own_rank, file.rank)):
            for tensor in shard_file.tensors.values():
                new = self._only_name(tensor.shard.name)
                self._parts.setdefault(new, []).append(
                    _SavedPart(shard_file.rank, tensor, shard_file.path, source.label_of(shard_file))
                )
        for name in source.others:
            self._only_name(name)
        for shard_file in source.files:
            self._add_aliases(shard_file.aliases)
        if source.manifest is not None:
            self._add_aliases(source.manifest.get("aliases", {}))

    def _only_name(self, old: str) -> str:
        """Return the state's name of an entry; raise UnsafeError if another one has it, too."""
        new = self.new_name(old)
        first = self.old_names.setdefault(new, old)
        if first != old:
            raise self._two_of_one_name(new, first, old)
        return new

    def _two_of_one_name(self, new: str, first: str, second: str) -> UnsafeError:
        text = f"rename gives one name to both {first!r} and {second!r}"
        return UnsafeError(text, name=new, path=self.source.path)

    def _add_aliases(self, aliases: Mapping[str, str]) -> None:
        """Add other names of tensors. Two of one tensor may become one name; those of two tensors may not."""
        for alias, name in aliases.items():
            new, stored = self.new_name(alias), self.new_name(name)
            first = self.old_names.setdefault(new, alias)
            if first != alias and self._aliases.get(new, new) != stored:
                raise self._two_of_one_name(new, first, alias)
            if new != stored:
                self._aliases[new] = stored

    def keep_aliases(self, original: Catalog) -> None:
        """Add the aliases that the same source has before a conversion, of tensors that stay as they are."""
        self._aliases |= {alias: name for alias, name in original._aliases.items() if name in self._parts}

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.stored(name) in self._parts

    def new_name(self, name: str) -> str:
        """Return the state's name of the source's tensor `name`, as `rename` gives it, and without wrappers."""
        new = renamed(name, self.options.rename) if self.options.rename else name
        return without_wrappers(new) if self._strips_wrappers else new

    def stored(self, name: str) -> str:
        """Return the name under which a tensor was written; a tied tensor was written under one of its names."""
        return name if name in self._parts else self._aliases.get(name, name)

    def names_of(self, name: str) -> list[str]:
        """Return the catalog's names for a live tensor: several if a layout splits it."""
        if not self.layout.rules:
            return [name]
        rule = self.layout.rule_for(name)
        names = [name] if rule is None else rule.names(name)
        return [self.renumbered.get(new, new) for new in names]

    def has(self, name: str) -> bool:
        """Whether the source has the live tensor `name`."""
        return all(stored_name in self for stored_name in self.names_of(name))

    def shape_like(self, name: str, parameters: Iterable[str]) -> str | None:
        """Return the first of these parameters that has the shape of a tensor, if a layout shards it."""
        shape = self.shard_of(name).global_shape
        for parameter in parameters:
            if parameter in self and self.shard_of(parameter).global_shape == shape:
                return parameter if self.layout.rule_for(parameter) is not None else None
        return None

    def _parts_to_read(self, name: str) -> list[_SavedPart]:
        """Return the parts of a tensor to read from: one if that is the whole tensor, and this rank's own or root's."""
        parts = self._parts[self.stored(name)]
        shard = parts[0].tensor.shard
        is_enough = parts[0].rank == self.own_rank or self.options.replicas == "root"
        return parts[:1] if is_enough and shard.boxes == (full_box(shard.global_shape),) else parts

    def shard_of(self, name: str) -> Shard:
        """Return a tensor's dtype and shape; raise CorruptError if the source's files disagree."""
        parts = self._parts_to_read(name)
        first = parts[0].tensor.shard
        for part in parts[1:]:
            shard = part.tensor.shard
            if (shard.dtype, shard.global_shape) != (first.dtype, first.global_shape):
                wholes = [one.boxes == (full_box(one.global_shape),) for one in (first, shard)]
                if all(wholes) and self.source.world_size not in (None, self.world_size):
                    what = f"{first.dtype} {list(first.global_shape)} and {shard.dtype} {list(shard.global_shape)} here"
                    text = differing_text(what, name, parts[0].label, part.label)
                    raise ReplicaError(text, name=name, rank=part.rank, path=part.path)
                raise CorruptError(
                    "two files disagree on dtype or shape",
                    name=name,
                    path=part.path,
                    expected=f"{first.dtype} {first.global_shape}",
                    found=f"{shard.dtype} {shard.global_shape}",
                )
        return first

    def boxes_of(self, name: str) -> dict[Box, ByteRange]:
        """Return the byte range of each box. Copies without digests, as in torch's files, are read and compared.

        Raise ReplicaError if copies differ, unless this rank saved one itself or `replicas` is "root".
        """
        if name in self._boxes:
            return self._boxes[name]
        boxes: dict[Box, ByteRange] = {}
        firsts: dict[Box, tuple[_SavedPart, int]] = {}  # the first part with each box, and its number there
        digests: dict[Box, str] = {}  # of the first copies that others were compared with
        for part in self._parts_to_read(name):
            for number, box in enumerate(part.tensor.shard.boxes):
                if not box.numel:
                    continue
                if box not in firsts:
                    firsts[box], boxes[box] = (part, number), part.tensor.byte_ranges[number]
                    continue
                first, index = firsts[box]
                if first.rank == self.own_rank or self.options.replicas == "root":
                    continue
                if box not in digests:
                    digests[box] = first.tensor.digest_of(index, self._progress)
                if part.tensor.digest_of(number, self._progress) != digests[box]:
                    text = differing_text(f"different values for region {box}", name, first.label, part.label)
                    raise ReplicaError(text, name=name, rank=part.rank, path=part.path)
        self._boxes[name] = boxes
        return boxes

    def holders_of(self, name: str) -> dict[Box, list[HolderLabel]]:
        """Return what messages call the holders of each box that is not empty."""
        holders: dict[Box, list[HolderLabel]] = {}
        for part in self._parts_to_read(name):
            for box in part.tensor.shard.boxes:
                if box.numel:
                    holders.setdefault(box, []).append(part.label)
        return holders


def differing_text(what: str, exclude: str | list[str], holder: HolderLabel, other: HolderLabel) -> str:
    """Return the message for a difference between the saves of two ranks, or files, with the remedies.

    `exclude` is "" if the whole state differs.
    """
    holders = holders_text(holder, other)
    leave = f"pass exclude={exclude!r} to leave the state as it is there, " if exclude else ""
    if isinstance(holder, int) and isinstance(other, int):
        return (
            f"{holders} saved {what}: load on as many ranks as have saved, so that each gets its own, {leave}or pass "
            f'replicas="root" to take rank {min(holder, other)}\'s'
        )
    return f'{holders} have {what}: give one of the files, {leave}or pass replicas="root" to take the first file\'s'
