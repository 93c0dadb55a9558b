"""An open checkpoint: its tensors by name, each read on demand, whole or in part."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

from statexchange.errors import (
    CorruptError,
    InvalidArgumentError,
    StateExchangeError,
    UnknownNameError,
    UnsupportedError,
    did_you_mean,
    excerpt,
)
from statexchange.formats.replicas import check_tensor_copies
from statexchange.formats.source import ShardFile, Source
from statexchange.sharding.options import ExportOptions
from statexchange.sharding.plan import plan_tensors
from statexchange.sharding.shards import Box, full_box, intersect, is_inside, selected_box
from statexchange.storage.store import ByteRange
from statexchange.tensors import ITEMSIZE, PACKED, TorchTensor

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Self

    from statexchange.sharding.sharding_spec import ShardingSpec


def _refuse_copy(opened: object) -> NoReturn:  # noqa: ARG001 (it becomes a method)
    """Refuse to pickle or copy what reads from open files."""
    text = "an open checkpoint belongs to its process, and is not copied: open it again by its path"
    raise UnsupportedError(text)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint on disk. Its bytes are read on demand.

    The last dim of F4 counts pairs of elements, as that of torch's float4_e2m1fn_x2 does, and that of F6_E2M3 and
    F6_E3M2 groups of four.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    _stored_boxes: Callable[[], Mapping[Box, ByteRange]]  # raises why the tensor cannot be read

    __reduce__ = _refuse_copy

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor; 0 if its dtype is unknown."""
        return full_box(self.shape).numel * ITEMSIZE.get(self.dtype, 0)

    @overload
    def read(
        self, box: Box | tuple[Sequence[int], Sequence[int]] | None = None, *, framework: Literal["np"] = "np"
    ) -> NDArray[Any]: ...

    @overload
    def read(
        self, box: Box | tuple[Sequence[int], Sequence[int]] | None = None, *, framework: Literal["pt"]
    ) -> TorchTensor: ...

    def read(
        self, box: Box | tuple[Sequence[int], Sequence[int]] | None = None, *, framework: Literal["np", "pt"] = "np"
    ) -> NDArray[Any] | TorchTensor:
        """Read the tensor, or one block of it, into a new array of numpy or tensor of torch.

        Not collective. Stored boxes that are read whole are checked against their digests, where these are known.

        Args:
            box: the block to read as (offsets, shape), with a number for each dim; None for the whole tensor.
            framework: "np" for an array of numpy, "pt" for a tensor of torch in host memory.

        Returns:
            A new array or tensor. ml_dtypes supplies dtypes that numpy lacks. F4, F6_E2M3 and F6_E3M2, which numpy
            and torch lack, come as their packed bytes.

        Raises:
            InvalidArgumentError: `box` is not a box, or lies outside of the tensor; there is no such framework; or the
                checkpoint has been closed.
            MissingExtraError: torch is not installed.
            IncompleteError: a region is in no file.
            ReplacedError: a file was changed or removed since the checkpoint was opened; open it again.
            UnsupportedError: the tensor has an unsupported dtype, or is not a strided tensor.
            ReplicaError: ranks hold different values of a region.
            CorruptError: the bytes differ from their digest.
            StorageError: a file cannot be read.

        Example:
            >>> import numpy
            >>> from safetensors.numpy import save_file
            >>> from statexchange.formats.registry import open_checkpoint
            >>> save_file({"w": numpy.arange(6, dtype="int32").reshape(2, 3)}, "model.safetensors")
            >>> with open_checkpoint("model.safetensors") as checkpoint:
            ...     checkpoint["w"].read(((0, 1), (2, 2))).tolist()
            [[1, 2], [4, 5]]
        """
        import numpy as np

        from statexchange.storage import regions
        from statexchange.tensors import from_bytes

        if framework not in ("np", "pt"):
            raise InvalidArgumentError(f'framework must be "np" or "pt", not {excerpt(framework)}')
        whole = full_box(self.shape)
        target = whole if box is None else _box_of(box, self.name)
        if not is_inside(target, self.shape):
            text = f"box {target} is outside of the tensor, whose shape is {self.shape}"
            raise InvalidArgumentError(text, name=self.name)
        stored_boxes = self._stored_boxes()
        # Not a bytearray, which would be filled with zeros first: all of it is covered by boxes.
        data = np.empty(target.numel * ITEMSIZE[self.dtype], np.uint8)
        for stored_box, stored in stored_boxes.items():
            part = intersect(stored_box, target)
            if part is None:
                continue
            digest = regions.BoxDigest(stored, stored_box, self.dtype, region=part)
            regions.read_part(stored, stored_box, part, self.dtype, data.data, target, digest)
            digest.check(self.name)
            # A file that is written in place while it is read has bytes of two versions, which no digest shows here.
            if not digest:
                stored.file.check_unchanged()
        dtype, shape = self.dtype, target.shape
        if dtype in PACKED:
            dtype, shape = "U8", (*shape[:-1], shape[-1] * ITEMSIZE[dtype])
        tensor: NDArray[Any] | TorchTensor = from_bytes(data, dtype, shape, as_numpy=framework == "np")
        return tensor

    def __getitem__(self, index: int | slice | tuple[int | slice, ...]) -> NDArray[Any]:
        """Read the block that integers and slices of step 1 select, as ``tensor[2:4, :8]`` of an array of numpy.

        Raises:
            InvalidArgumentError: there are more of them than dims, or others.
            IndexError: an integer is outside of its dim.
        """
        keys = index if isinstance(index, tuple) else (index,)
        num_dims = 0 if self.dtype in PACKED else len(self.shape)  # an element of a packed dtype is not one of numpy
        is_block = all(type(key) is int or (isinstance(key, slice) and key.step in (None, 1)) for key in keys)
        if not is_block or len(keys) > num_dims:
            text = f"an index of {self.dtype} must be integers and slices of step 1, {num_dims} at most: read(box=...)"
            raise InvalidArgumentError(text, name=self.name)
        # An integer selects one index here, and its dim is removed from what was read.
        block = self.read(selected_box(self.shape, keys))
        return block[tuple(0 if isinstance(key, int) else slice(None) for key in keys)]


def _box_of(box: Any, name: str) -> Box:
    """Return a box that a caller gave; raise InvalidArgumentError unless it is one, or (offsets, shape)."""
    if isinstance(box, Box):
        return box
    with suppress(TypeError, ValueError):
        offsets, shape = box
        checked = Box(tuple(map(operator.index, offsets)), tuple(map(operator.index, shape)))
        if len(checked.offsets) == len(checked.shape):
            return checked
    text = f"box must be (offsets, shape), such as ((0, 0), (2, 8)), not {excerpt(box)}"
    raise InvalidArgumentError(text, name=name)


def _stored_boxes(source: Source, name: str, files: Sequence[ShardFile]) -> Mapping[Box, ByteRange]:
    """Return the boxes that cover a tensor, with the first copy of each. Copies without digests are read and compared.

    Raises:
        IncompleteError: a region is in none of the files.
        ReplicaError: copies of a box differ.
    """
    first = files[0].tensors[name]
    if len(files) == 1 and first.shard.boxes == (full_box(first.shard.global_shape),):
        return {first.shard.boxes[0]: first.byte_ranges[0]}  # most are: a plan would take three times as long
    parts = [replace(shard_file, tensors={name: shard_file.tensors[name]}, aliases={}) for shard_file in files]
    of_tensor = replace(source, files=parts)
    try:
        (plan,), _ = plan_tensors(of_tensor.rank_shards(), ExportOptions())
    except StateExchangeError as error:
        raise error.located(path=source.path) from None
    check_tensor_copies(of_tensor, plan, "open one of the files")
    boxes = {}
    for piece in plan.pieces:
        boxes[piece.box] = parts[piece.holder].tensors[name].byte_ranges[piece.box_index]
    return boxes


def _boxes_of_spec(source: Source, spec: ShardingSpec) -> Mapping[Box, ByteRange]:
    return _stored_boxes(source, spec.name, [source.files[number] for number in spec.ranks])


def _refuse(error: UnsupportedError) -> NoReturn:
    raise error


class OpenCheckpoint(Mapping[str, StoredTensor]):
    """A lazy mapping of tensor names to `StoredTensor`; `open_checkpoint` returns it.

    Not collective. Shards of one tensor, even in several files, are one entry. Unsupported tensors are entries too, and
    their `read` raises UnsupportedError. The files stay open until `close`, the end of a with block, or until the
    last reference is dropped.
    """

    __reduce__ = _refuse_copy

    def __init__(self, source: Source) -> None:
        self.path = source.path
        self._source = source
        self._tensors: dict[str, StoredTensor] = {}
        for name, spec in source.specs.items():
            boxes = cache(partial(_boxes_of_spec, source, spec))
            self._tensors[name] = StoredTensor(name, spec.dtype, spec.global_shape, boxes)
        files: dict[str, list[ShardFile]] = {}
        for shard_file in source.files_without_specs:
            for name, tensor in shard_file.tensors.items():
                shard = tensor.shard
                files.setdefault(name, []).append(shard_file)
                stored = self._tensors.get(name)
                if stored is None:
                    # A checkpoint may have 100,000 tensors, of which few are read: each is planned when it is.
                    boxes = cache(partial(_stored_boxes, source, name, files[name]))
                    self._tensors[name] = StoredTensor(name, shard.dtype, shard.global_shape, boxes)
                elif (stored.dtype, stored.shape) != (shard.dtype, shard.global_shape):
                    raise CorruptError("two files disagree on dtype or shape", name=name, path=shard_file.path)
        for unreadable in source.unreadable:
            if unreadable.unsupported is not None:
                name, dtype, shape = unreadable.name, unreadable.dtype or "?", unreadable.shape or ()
                self._tensors[name] = StoredTensor(name, dtype, shape, partial(_refuse, unreadable.unsupported))
        source.read_ahead()

    def __getitem__(self, name: str) -> StoredTensor:
        if name in self._tensors:
            return self._tensors[name]
        text = f"there is no tensor of this name{did_you_mean(str(name), self._tensors)}"
        advice = "to read a plain value, call load_checkpoint(state, path) with state = {}"
        raise UnknownNameError(f"{text}; {advice}", name=str(name), path=self.path)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the tensor of this name, or `default`."""
        # Not as Mapping does, by the error of `__getitem__`, which compares the name with all others.
        return self._tensors.get(name, default)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def close(self) -> None:
        """Close all files; then no tensor can be read."""
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
