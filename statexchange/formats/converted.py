"""A source with the names and values of another model family: the same files, other tensors.

A conversion maps boxes to boxes (conversions/patches.py), and a byte range may have strides. So a converted tensor is
read from the source's files as any other tensor is, by every reader of boxes, and nothing is held whole::

    stored       w F32 (4, 2), a box at byte 64          rule: transpose
    converted    v F32 (2, 4), a box at byte 64 with strides (1, 2) in elements
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from statexchange.conversions.choice import check_numbers, choose_conversion
from statexchange.conversions.numbers import KnownConfig
from statexchange.conversions.patches import Patch
from statexchange.conversions.plan import ConversionPlan, Fill, InputFills, plan_conversion
from statexchange.conversions.rules import ConversionRules
from statexchange.errors import CorruptError, StateExchangeError
from statexchange.formats.model_files import CONFIG
from statexchange.formats.source import ShardFile, Source, SourceTensor, strides_of
from statexchange.sharding.options import Selection
from statexchange.sharding.shards import Box, Shard, TensorInfo, c_strides
from statexchange.storage.location import parse_json, read_option_file
from statexchange.storage.store import Budget, ByteRange, ListedDigests, StoredFile
from statexchange.tensors import ITEMSIZE


def read_conversion(options: Selection) -> tuple[ConversionRules | None, dict[str, int]]:
    """Return the conversion that `convert` names, a known one or a JSON file, and its numbers. Not collective.

    Raises:
        InvalidArgumentError: there is no such conversion, or the file has none.
        NotFoundError: there is no such file.
    """
    numbers = check_numbers(options.convert_with, options.convert)
    if options.convert is None:
        return None, numbers
    return choose_conversion(options.convert, partial(read_option_file, what="a conversion")), numbers


def configs_beside(source: Source) -> list[KnownConfig]:
    """Return what describes a source's model: its config.json, and the arguments of its job."""
    configs = config_files_beside(source)
    if source.arguments:
        configs.append(KnownConfig("the arguments of the run", source.arguments))
    return configs


def config_files_beside(source: Source) -> list[KnownConfig]:
    """Return the config.json of a source; [] without one."""
    store = source.config_store
    if store is not None and CONFIG in store.files:
        return config_of(store.path_of(CONFIG), store.read_small(CONFIG), store.budget)
    return []


def config_of(where: str, content: bytes, budget: Budget | None = None) -> list[KnownConfig]:
    """Return the config in a file; [] if it is broken or no object. A file that a caller gives has its own budget."""
    try:
        values = parse_json(content, where, budget or Budget(where))
    except StateExchangeError:
        return []
    return [KnownConfig(where, values)] if isinstance(values, dict) else []


@dataclass(frozen=True, slots=True)
class Converted:
    """A converted source.

    Attributes:
        source: the source with the converted tensors.
        unproven: tensors of the original source, each with the numbers of its boxes whose digests the converted source
            does not have, because their elements lie in several boxes or in another order.
        targets: the names that each original tensor fills.
    """

    source: Source
    unproven: Sequence[tuple[SourceTensor, Sequence[int]]]
    targets: Mapping[str, Sequence[str]]

    def renamed_keys(self, entries: Mapping[str, str]) -> dict[str, str]:
        """Return `entries`, whose keys are the original names, under the names that each of these fills."""
        renamed: dict[str, str] = {}
        for name, entry in entries.items():
            renamed |= dict.fromkeys(self.targets.get(name, ()), entry)
        return renamed

    def check_digests(self) -> None:
        """Raise CorruptError if bytes differ from a digest that the converted source does not have."""
        for tensor, indices in self.unproven:
            for index in indices:
                tensor.read_digest(index)


def convert_source(
    source: Source, conversion: ConversionRules, convert_with: Mapping[str, int], configs: Sequence[KnownConfig]
) -> Converted:
    """Convert all tensors of a source. Not collective; reads no tensor.

    Args:
        source: the source.
        conversion: the rules.
        convert_with: numbers that the caller gave.
        configs: configs of the model.

    Raises:
        InvalidArgumentError, UnsafeError, IncompleteError, UnsupportedError: as `plan_conversion`.
        CorruptError: the source's files disagree on a tensor.
    """
    return converted_by(source, plan_conversion(conversion, tensors_of(source), convert_with, configs))


def converted_by(source: Source, plan: ConversionPlan) -> Converted:
    """Convert all tensors of a source by a plan. Not collective; reads no tensor."""
    files = []
    unproven: list[tuple[SourceTensor, list[int]]] = []
    zeros = plan.zeros  # of no file: the first one lists them
    for shard_file in source.files:
        files.append(_converted_file(shard_file, plan, zeros, unproven))
        zeros = ()
    targets = {}
    for name, fills in plan.fills.items():
        targets[name] = tuple(dict.fromkeys(fill.target for fill in fills))  # each once, in order
    manifest = None
    if source.manifest is not None:
        manifest = {**source.manifest, "aliases": plan.new_aliases(source.manifest.get("aliases", {}))}
    return Converted(replace(source, files=files, sections=(), manifest=manifest, paths={}), unproven, targets)


def tensors_of(source: Source) -> dict[str, TensorInfo]:
    """Return dtype and shape of each tensor."""
    tensors: dict[str, TensorInfo] = {}
    for shard_file, tensor in source.shards():
        shard = tensor.shard
        info = TensorInfo(shard.dtype, shard.global_shape)
        first = tensors.setdefault(shard.name, info)
        if first != info:
            text = "two files disagree on dtype or shape"
            raise CorruptError(text, name=shard.name, path=shard_file.path, expected=first, found=info)
    return tensors


def _converted_file(
    shard_file: ShardFile,
    plan: ConversionPlan,
    zeros: Sequence[Fill],
    unproven: list[tuple[SourceTensor, list[int]]],
) -> ShardFile:
    """Return a file with the converted tensors and some zeros; add its boxes whose digests are lost to `unproven`."""
    outputs: dict[str, list[tuple[Box, ByteRange]]] = {}
    for name, tensor in shard_file.tensors.items():
        fills = plan.fills[name]
        # Tensors without elements have no boxes, and are tensors of the file all the same.
        for fill in fills:
            if not fill.patch.box.numel:
                outputs.setdefault(fill.target, [])
        input_fills = InputFills(fills)
        lost = []
        for index, (box, byte_range) in enumerate(zip(tensor.shard.boxes, tensor.byte_ranges, strict=True)):
            keeps_digest = False
            for fill in input_fills.parts(box):
                converted = _byte_range(byte_range, box, fill.patch, tensor.shard.dtype)
                outputs.setdefault(fill.target, []).append((fill.patch.box, converted))
                keeps_digest = keeps_digest or converted.is_proven
            if byte_range.is_proven and not keeps_digest:
                lost.append(index)
        if lost and fills:  # what is dropped is not read
            unproven.append((tensor, lost))
    for fill in zeros:
        nbytes = fill.patch.box.numel * ITEMSIZE[plan.tensors[fill.target].dtype]
        outputs.setdefault(fill.target, []).append((fill.patch.box, ByteRange(_Zeros(nbytes), 0, nbytes)))
    tensors = {}
    for name, parts in outputs.items():
        shard = Shard(name, plan.tensors[name].dtype, plan.tensors[name].shape, tuple(box for box, _ in parts))
        tensors[name] = SourceTensor(shard, tuple(byte_range for _, byte_range in parts))
    aliases = plan.new_aliases(shard_file.aliases)
    for tied, name in plan.ties.items():
        if tied in tensors and name in tensors:
            aliases[tied] = name
    return replace(shard_file, tensors=tensors, aliases=aliases)


def _byte_range(stored: ByteRange, box: Box, patch: Patch, dtype: str) -> ByteRange:
    """Return the byte range of a patch of a stored box."""
    source_strides = c_strides(box.shape) if stored.strides is None else stored.strides
    moved_strides = patch.strides(source_strides)
    # A run has none, which is read faster. But of indices in another order the strides are needed.
    strides = moved_strides if patch.orders else strides_of(patch.box.shape, moved_strides)
    begin = stored.begin + patch.offset(source_strides) * ITEMSIZE[dtype]
    is_whole = patch.box.numel == box.numel
    nbytes = patch.box.numel * ITEMSIZE[dtype]
    if not is_whole or not patch.is_identity:
        # A digest is of the bytes in C order: it holds for the same run of another shape, as one layer's of a stack.
        keeps_digest = is_whole and strides is None and stored.strides is None
        digest = stored.digest if keeps_digest else None
        return ByteRange(stored.file, begin, nbytes, digest, strides, orders=patch.orders)
    # The box as it is, at another place of the output.
    moved = tuple(map(operator.sub, patch.box.offsets, box.offsets))
    parts = []
    for part, digest in stored.parts:
        parts.append((Box(tuple(map(operator.add, part.offsets, moved)), part.shape), digest))
    return ByteRange(stored.file, begin, nbytes, stored.digest, stored.strides, ListedDigests(parts))


class _Zeros(StoredFile):
    """A file of zeros, for what no input fills."""

    path = "zeros"

    def __init__(self, size: int) -> None:
        self.size = size

    def read_into(self, buffer: memoryview, offset: int) -> None:  # noqa: ARG002 (all bytes are equal)
        """Fill `buffer` with zeros."""
        buffer[:] = bytes(len(buffer))

    def check_unchanged(self) -> None:
        """Do nothing: zeros stay zeros."""

    @property
    def version(self) -> list[str | int]:
        """A JSON value that is equal for equal bytes, on all ranks and hosts."""
        return [self.path, self.size]

    local_identity = shared_identity = version
