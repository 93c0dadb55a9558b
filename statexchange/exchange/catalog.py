"""Look up a checkpoint's tensors and its saved tree by the names of the live state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from statexchange.errors import CorruptError, ReplicaError, UnsafeError
from statexchange.exchange.placing import parameter_names
from statexchange.formats.source import Source, SourceTensor
from statexchange.sharding.options import LoadOptions, renamed
from statexchange.sharding.plan import HolderLabel, holders_text
from statexchange.sharding.rules import Layout
from statexchange.sharding.shards import Box, Shard, full_box
from statexchange.state.load_plan import Conflicts, is_state_of_optimizer
from statexchange.state.modules import is_module
from statexchange.state.tree import WalkStep, walk
from statexchange.storage.byte_range import ByteRange

__all__ = ["Catalog", "LivePlaces", "paths_of", "with_new_names", "without_unwanted"]

_MOST_NAMES = 3  # that a message lists


class _SavedPart(NamedTuple):
    """The part of a tensor that one rank has saved."""

    rank: int
    tensor: SourceTensor
    path: str
    label: HolderLabel


class Catalog:
    """The tensors of a source by the state's names: dtype, shape, and the byte range of every box.

    If as many ranks load as have saved, `own_rank` is this rank, and its own part comes first. Otherwise `own_rank` is
    None, and the lowest rank's part comes first. `renumbered` maps the state's names to the source's where a layout
    renumbers tensors over all ranks. `progress` is called again and again while copies are read to be compared.
    """

    def __init__(
        self,
        source: Source,
        options: LoadOptions,
        rank: int,
        world_size: int,
        progress: Callable[[], None],
    ) -> None:
        self._progress = progress
        self._boxes: dict[str, dict[Box, ByteRange]] = {}  # what `boxes_of` has returned
        self.source = source
        self.options = options
        self.layout = Layout({}) if options.layout is None else options.layout.unmatched()
        self.renumbered: Mapping[str, str] = {}
        self.world_size = world_size
        self.own_rank = rank if source.world_size == world_size else None
        self._aliases: dict[str, str] = {}
        self._parts: dict[str, list[_SavedPart]] = {}
        old_names: dict[str, str] = {}
        for shard_file in sorted(source.files, key=lambda file: (file.rank != self.own_rank, file.rank)):
            self._add_aliases(shard_file.aliases)
            for tensor in shard_file.tensors.values():
                new = self._only_name(tensor.shard.name, old_names)
                self._parts.setdefault(new, []).append(
                    _SavedPart(shard_file.rank, tensor, shard_file.path, source.label_of(shard_file))
                )
        for name in source.others:
            self._only_name(name, old_names)
        if source.manifest is not None:
            self._add_aliases(source.manifest.get("aliases", {}))

    def _only_name(self, old: str, old_names: dict[str, str]) -> str:
        """Return the state's name of an entry; raise UnsafeError if another one in `old_names` has it, too."""
        new = self.new_name(old)
        if old_names.setdefault(new, old) != old:
            text = f"rename gives one name to both {old_names[new]!r} and {old!r}"
            raise UnsafeError(text, name=new, path=self.source.path)
        return new

    def _add_aliases(self, aliases: Mapping[str, str]) -> None:
        for alias, name in aliases.items():
            self._aliases[self.new_name(alias)] = self.new_name(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.stored(name) in self._parts

    def new_name(self, name: str) -> str:
        """Return the state's name of the source's tensor `name`."""
        return renamed(name, self.options.rename) if self.options.rename else name

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

    def shape_like(self, name: str) -> str | None:
        """Return the parameter of the same shape as this optimizer tensor, if a layout shards that parameter."""
        shape = self.shard_of(name).global_shape
        for parameter in parameter_names(name):
            if parameter in self and self.shard_of(parameter).global_shape == shape:
                return parameter if self.layout.rule_for(parameter) is not None else None
        return None

    def _parts_to_read(self, name: str) -> list[_SavedPart]:
        """Return the parts of a tensor to read from: only this rank's own part if that is the whole tensor."""
        parts = self._parts[self.stored(name)]
        shard = parts[0].tensor.shard
        has_whole = parts[0].rank == self.own_rank and shard.boxes == (full_box(shard.global_shape),)
        return parts[:1] if has_whole else parts

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
                    text = _differing(what, name, parts[0].label, part.label)
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
                    text = _differing(f"different values for region {box}", name, first.label, part.label)
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

    def check_values(self, saved: Any, conflicts: Conflicts) -> None:
        """Raise ReplicaError for values in the saved tree that ranks saved differently, if they are to be equal.

        Args:
            saved: the tree under the state's names, without what is not loaded.
            conflicts: two ranks that saved different values, by the keys that lead there.
        """
        if self.own_rank is not None or self.options.replicas == "root" or not conflicts:
            return
        loaded = paths_of(saved)
        names = {self.new_name(".".join(map(str, keys))): ranks for keys, ranks in conflicts.items()}
        found = [name for name in names if name in loaded]
        if found:
            rank, other = names[found[0]]
            others = ""
            if len(found) > 1:
                others = " and 1 other entry" if len(found) == 2 else f" and {len(found) - 1} other entries"
            text = _differing(f"different values of {found[0]!r}{others}", _excluding(found), rank, other)
            raise ReplicaError(text, rank=other, path=self.source.path)

    def check_unions(self, plain: Collection[str], differing: Collection[str], unions: Conflicts) -> None:
        """Raise ReplicaError for lists of param groups that are not to be joined, if ranks saved different ones.

        Args:
            plain: the paths of the plain values that are loaded, and whose lists are to be equal.
            differing: the paths of the groups of optimizers that have different values for one parameter.
            unions: two ranks that saved different lists, by the keys that lead there.
        """
        loaded = {_with_dots(path) for path in (*plain, *differing)}
        for keys, (rank, other) in unions.items():
            name = self.new_name(".".join(map(str, keys)))
            steps = _with_dots(name).split(".")
            if any(".".join(steps[:count]) in loaded for count in range(1, len(steps) + 1)):
                text = _differing(f"different values of {name!r}", name, rank, other)
                raise ReplicaError(text, rank=other, path=self.source.path)

    def check_loaders(self, saved: Any, places: LivePlaces) -> None:
        """Raise ReplicaError for a data loader if its position was saved on another number of ranks.

        The position counts within one rank's share of the data, and is often equal on all ranks: restored on another
        number of ranks, it would silently repeat or skip samples.
        """
        ranks = self.source.world_size
        if ranks in (None, self.world_size) or self.options.replicas == "root" or not places.loaders:
            return
        loaded = paths_of(saved)
        for path in sorted(places.loaders):
            if any(name == path or name.startswith(f"{path}.") for name in loaded):
                raise ReplicaError(
                    f"the data loader {path!r} was saved with its position in the share of each of {ranks} ranks, and "
                    f"the world size is {self.world_size} now: pass exclude='{path}.*' and compute the position from "
                    'the step, or pass replicas="root" to take rank 0\'s position as it is',
                    path=self.source.path,
                )


def _with_dots(path: str) -> str:
    """Return a path with dots before indices, as in the names of conflicts."""
    return path.replace("[", ".").replace("]", "")


def _excluding(names: Sequence[str]) -> str | list[str]:
    """Return what to pass as `exclude`: a few names, or patterns for the entries of the state that hold many."""
    if len(names) > _MOST_NAMES:
        parts = (name.partition(".") for name in names)
        names = sorted({f"{entry}.*" if rest else entry for entry, _, rest in parts})
    return names[0] if len(names) == 1 else list(names)


def _differing(what: str, exclude: str | list[str], holder: HolderLabel, other: HolderLabel) -> str:
    """Return the message for a difference between the saves of two ranks, or files, with the remedies."""
    holders, leave = holders_text(holder, other), f"pass exclude={exclude!r} to leave the state as it is there"
    if isinstance(holder, int) and isinstance(other, int):
        return (
            f"{holders} saved {what}: load on as many ranks as have saved, so that each gets its own, {leave}, or pass "
            f'replicas="root" to take rank {min(holder, other)}\'s'
        )
    return f'{holders} have {what}: give one of the files, {leave}, or pass replicas="root" to take the first file\'s'


# The saved tree


@dataclass(frozen=True, slots=True)
class LivePlaces:
    """The containers and stateful objects of a live state, by dotted path.

    `containers` are mappings and modules, with the keys that lead to them; `objects` are optimizers, schedulers,
    scalers and other objects with a state of their own. Of these `loaders` are data loaders with a position.
    """

    containers: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    objects: set[str] = field(default_factory=set)
    loaders: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, state: Any) -> LivePlaces:
        """Find the containers and objects of a state."""
        places = cls()
        for step in walk(state, lambda _, value: isinstance(value, Mapping) and not is_module(value)):
            if not step.is_leaf or is_module(step.value):
                places.containers[step.path] = step.keys
            elif hasattr(step.value, "load_state_dict") or hasattr(step.value, "param_groups"):
                places.objects.add(step.path)
                if type(step.value).__module__.startswith("torchdata."):
                    places.loaders.add(step.path)
        return places

    def may_want(self, path: str, options: LoadOptions) -> bool:
        """Whether the entry at a path of the state, or anything inside it, is to be loaded."""
        if path in self.containers or path in self.objects:
            return options.may_want(path)
        return options.wants(path)


def with_new_names(saved: Any, catalog: Catalog, places: LivePlaces) -> Any:
    """Return a saved tree with its entries moved to the paths that `rename` gives them.

    A moved entry goes into the innermost mapping or module of the live state that contains its new path; the rest of
    the path is its key. The parameters in an optimizer's state are renamed too.
    """
    if not catalog.options.rename or not isinstance(saved, Mapping):
        return saved
    moved: dict[Any, Any] = {}
    for unit in _units(saved, places):
        new = catalog.new_name(unit.path)
        target: Any = moved
        *outer_keys, last_key = unit.keys if new == unit.path else _split(new, places)
        for key in outer_keys:
            target = target.setdefault(key, {}) if isinstance(target, dict) else None
        if not isinstance(target, dict) or last_key in target:
            raise UnsafeError("rename gives one name to two entries of the source", name=new, path=catalog.source.path)
        target[last_key] = _renamed_optimizer(unit.value, catalog) if is_state_of_optimizer(unit.value) else unit.value
    return moved


def _split(path: str, places: LivePlaces) -> list[Any]:
    """Return the keys of the innermost live mapping or module that contains `path`, and the rest of the path."""
    containing = [container for container in places.containers if container and path.startswith(f"{container}.")]
    if not containing:
        return [path]
    innermost = max(containing, key=len)
    return [*places.containers[innermost], path[len(innermost) + 1 :]]


def _renamed_optimizer(saved: Mapping[str, Any], catalog: Catalog) -> dict[str, Any]:
    """Return an optimizer's saved state with its parameters renamed; numbers of parameters and other keys stay."""
    listed = {key for group in saved["param_groups"] for key in group["params"]}

    def new_key(key: Any) -> Any:
        is_name = isinstance(key, str) and key in listed and not key.isdecimal()
        return catalog.new_name(key) if is_name else key

    groups = [{**group, "params": [new_key(key) for key in group["params"]]} for group in saved["param_groups"]]
    state = {new_key(key): entry for key, entry in saved["state"].items()}
    return {**saved, "state": state, "param_groups": groups}


def without_unwanted(saved: Any, options: LoadOptions, places: LivePlaces) -> Any:
    """Return a saved tree without the entries that `include` does not select or `exclude` does.

    A list, a tuple or the state of one object is kept or left out whole.
    """
    if not (options.include or options.exclude) or not isinstance(saved, Mapping):
        return saved
    selected: dict[Any, Any] = {}
    for unit in _units(saved, places):
        if options.wants_object([step.path for step in walk(unit.value, path=unit.path)]):
            target = selected
            for key in unit.keys[:-1]:
                target = target.setdefault(key, {})
            target[unit.keys[-1]] = unit.value
    return selected


def _units(saved: Mapping[Any, Any], places: LivePlaces) -> Iterator[WalkStep]:
    """Yield the entries that are loaded as a unit: values in nested mappings, and whole states of objects."""

    def enters(path: str, value: Any) -> bool:
        if value is saved:
            return True
        return (
            isinstance(value, Mapping)
            and bool(value)
            and not is_state_of_optimizer(value)
            and path not in places.objects
        )

    return (step for step in walk(saved, enters) if step.is_leaf)


def paths_of(saved: Any) -> set[str]:
    """Return the paths of all entries of nested mappings."""
    return {step.path for step in walk(saved, lambda _, value: isinstance(value, Mapping)) if step.keys}
