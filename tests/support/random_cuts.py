"""Random states of tensors, drawn from a seed, and how ranks cut them: by layout rules, or as DTensors.

A case is drawn as whole tensors and cut by torch alone, so that what a call must give is known without the package. The
state may also have a job of `random_jobs`: modules, optimizers, schedulers and plain values.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.int64, torch.uint8]
DTYPES += [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64]
NAMES = ["w", "layer.weight", "layer.bias", "x.0", "x.1", "deep.a.b", "scale", "norm.running_mean"]
EXACT = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
"""Floating dtypes whose casts are torch's for every finite value."""


@dataclass
class Cut:
    """A whole tensor and its parts.

    Attributes:
        kind: how it is cut.
        whole: the whole tensor.
        parts: the tensor of each rank; None where a rank has none.
        rule: its rule in a layout; None for no rule.
        placements: the placements of a DTensor.
    """

    kind: str
    whole: torch.Tensor
    parts: list[torch.Tensor | None]
    rule: Any = None
    placements: tuple[Any, ...] = ()


@dataclass
class States:
    """The state drawn for a number of ranks.

    Attributes:
        random: the source of all choices.
        mesh: the sizes of the two axes of the mesh, "a" and "b".
        is_dtensor: whether tensors are DTensors, over a mesh of torch, and not cut by rules.
        names_axes: whether the layout names the axes of the mesh.
    """

    random: random.Random
    mesh: tuple[int, int]
    is_dtensor: bool
    generator: torch.Generator = field(default_factory=torch.Generator)
    names_axes: bool = field(init=False)

    def __post_init__(self) -> None:
        # Where a layout names the axes of a mesh, each rule that shards must name an axis.
        self.names_axes = self.random.random() < 0.5

    @property
    def world_size(self) -> int:
        return prod(self.mesh)

    def whole(self, *, is_finite: bool = False, dtypes: Sequence[torch.dtype] = DTYPES) -> torch.Tensor:
        """Draw a tensor of any bits, 0-d, empty or larger, or of small finite numbers."""
        shape = [self.random.choice([0, 1, 2, 3, 4, 5, 7]) for _ in range(self.random.choice([0, 1, 1, 2, 2, 2, 3]))]
        return self.filled(shape, self.random.choice(dtypes), is_finite=is_finite)

    def filled(self, shape: Sequence[int], dtype: torch.dtype, *, is_finite: bool = False) -> torch.Tensor:
        """Return a tensor of drawn values."""
        self.generator.manual_seed(self.random.randrange(1 << 30))
        if dtype == torch.bool:
            return torch.randint(0, 2, shape, generator=self.generator).bool()
        if is_finite:
            return (torch.randn(shape, generator=self.generator) * 3).to(dtype)
        size = prod(shape) * dtype.itemsize
        data = torch.randint(0, 256, (size,), generator=self.generator, dtype=torch.uint8)
        return data.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)

    def sizes(self, total: int, count: int) -> list[int]:
        """Divide a number into `count` sizes, some of them 0."""
        ends = sorted(self.random.randint(0, total) for _ in range(count - 1))
        return [end - begin for begin, end in zip([0, *ends], [*ends, total], strict=True)]

    def cut(self, whole: torch.Tensor) -> Cut:
        """Cut a tensor in a drawn way."""
        if self.is_dtensor:
            return self._cut_by_placements(whole)
        kinds = ["none", "replicate"]
        if whole.ndim:
            kinds += ["axis", "axes", "boxes", "own box"] if self.names_axes else ["shard", "shard", "boxes", "own box"]
        kind = self.random.choice(kinds)
        return getattr(self, f"_{kind.replace(' ', '_')}")(whole)

    def _cut_by_placements(self, whole: torch.Tensor) -> Cut:
        choices = [Replicate(), *(Shard(dim) for dim in range(whole.ndim))]
        placements = tuple(self.random.choice(choices) for _ in self.mesh)
        parts: list[torch.Tensor | None] = []
        for rank in range(self.world_size):
            part = whole
            for size, position, placement in zip(self.mesh, divmod(rank, self.mesh[1]), placements, strict=True):
                if isinstance(placement, Shard):
                    # torch gives each rank as many rows as fit, and the last ones fewer or none.
                    rows = -(-part.shape[placement.dim] // size)
                    begin = min(position * rows, part.shape[placement.dim])
                    rows = min(rows, part.shape[placement.dim] - begin)
                    part = part.narrow(placement.dim, begin, rows)
            parts.append(part)
        return Cut("dtensor", whole, parts, placements=placements)

    def _none(self, whole: torch.Tensor) -> Cut:
        return Cut("none", whole, [whole] * self.world_size)

    def _replicate(self, whole: torch.Tensor) -> Cut:
        rule = self.random.choice(["replicate", Replicate()])
        return Cut("replicate", whole, [whole] * self.world_size, rule)

    def _shard(self, whole: torch.Tensor) -> Cut:
        dim = self.random.randrange(whole.ndim)
        parts = whole.split(self.sizes(whole.shape[dim], self.world_size), dim)
        return Cut("shard", whole, [*parts], self.random.choice([Shard(dim), {"dim": dim}]))

    def _axis(self, whole: torch.Tensor) -> Cut:
        dim, axis = self.random.randrange(whole.ndim), self.random.randrange(2)
        parts = whole.split(self.sizes(whole.shape[dim], self.mesh[axis]), dim)
        of_ranks = [parts[divmod(rank, self.mesh[1])[axis]] for rank in range(self.world_size)]
        return Cut("axis", whole, [*of_ranks], {"dim": dim, "axis": "ab"[axis]})

    def _axes(self, whole: torch.Tensor) -> Cut:
        if whole.ndim < 2:
            return self._axis(whole)
        dims = self.random.sample(range(whole.ndim), 2)
        sizes = [self.sizes(whole.shape[dim], size) for dim, size in zip(dims, self.mesh, strict=True)]
        parts: list[torch.Tensor | None] = []
        for rank in range(self.world_size):
            part = whole
            for dim, of_dim, position in zip(dims, sizes, divmod(rank, self.mesh[1]), strict=True):
                part = part.split(of_dim, dim)[position]
            parts.append(part)
        return Cut("axes", whole, parts, [{"dim": dim, "axis": axis} for dim, axis in zip(dims, "ab", strict=True)])

    def boxes(self, shape: Sequence[int]) -> list[tuple[list[int], list[int]]]:
        """Divide a shape into one box for each rank, some of them empty, in no order."""
        boxes = [([0] * len(shape), [*shape])]
        while len(boxes) < self.world_size:
            offsets, sizes = boxes.pop(self.random.randrange(len(boxes)))
            dim = self.random.randrange(len(shape))
            size = self.random.randint(0, sizes[dim])
            second = [*offsets]
            second[dim] += size
            boxes += [(offsets, [*sizes[:dim], size, *sizes[dim + 1 :]])]
            boxes += [(second, [*sizes[:dim], sizes[dim] - size, *sizes[dim + 1 :]])]
        self.random.shuffle(boxes)
        return boxes

    def _boxes(self, whole: torch.Tensor) -> Cut:
        boxes = self.boxes(whole.shape)
        rule = {"global_shape": [*whole.shape], "boxes": [[[*box]] for box in boxes]}
        return Cut("boxes", whole, [part_of(whole, *box) for box in boxes], rule)

    def _own_box(self, whole: torch.Tensor) -> Cut:
        boxes = self.boxes(whole.shape)
        rules = [{"global_shape": [*whole.shape], "offsets": offsets, "shape": shape} for offsets, shape in boxes]
        return Cut("own box", whole, [part_of(whole, *box) for box in boxes], rules)

    def reduced(self, shape: Sequence[int]) -> Cut:
        """Draw copies that differ, which a rule reduces."""
        dtype = self.random.choice([torch.float32, torch.bfloat16, torch.int64])
        parts = [(self.filled(shape, torch.float32, is_finite=True) * 9).to(dtype) for _ in range(self.world_size)]
        word = self.random.choice(["max", "min"])
        stacked = torch.stack(parts)
        whole = stacked.amax(0) if word == "max" else stacked.amin(0)
        return Cut("reduce", whole, [*parts], {"reduce": word})

    def layout(self, cuts: dict[str, Cut], rank: int) -> dict[str, Any]:
        """Return the layout of a rank."""
        rules = {}
        for name, cut in cuts.items():
            if cut.rule is not None:
                rules[name] = cut.rule[rank] if cut.kind == "own box" else cut.rule
        return {"mesh": dict(zip("ab", self.mesh, strict=True)), "rules": rules} if self.names_axes else rules


def part_of(whole: torch.Tensor, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """Return a box of a tensor."""
    for dim, (offset, size) in enumerate(zip(offsets, shape, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole


def laid_out(part: torch.Tensor, choice: int) -> torch.Tensor:
    """Return a copy of a tensor that is contiguous, transposed, or every second element of another."""
    if choice == 0 or part.ndim == 0:
        return part.clone(memory_format=torch.contiguous_format)
    if choice == 1:
        copy = torch.empty([*reversed(part.shape)], dtype=part.dtype).permute(*reversed(range(part.ndim)))
    else:
        copy = torch.zeros([*part.shape, 2], dtype=part.dtype)[..., 0]
    return copy.copy_(part)


def live(states: States, cuts: dict[str, Cut], rank: int, mesh: Any, *, seed: int, is_blank: bool = False) -> Any:
    """Return the tensors of a rank, in memory of its own, zeros if `is_blank`."""
    chance = random.Random(seed * 31 + rank)
    state: dict[str, Any] = {}
    for name, cut in cuts.items():
        part = cut.parts[rank]
        if part is None:
            continue
        tensor = laid_out(torch.zeros_like(part) if is_blank else part, chance.randrange(3))
        if cut.placements:
            stride = torch.empty(cut.whole.shape, device="meta").stride()
            shape = cut.whole.shape
            state[name] = DTensor.from_local(tensor, mesh, cut.placements, run_check=False, shape=shape, stride=stride)
        else:
            state[name] = tensor
    return state


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def nested(flat: dict[str, Any]) -> Any:
    """Nest a mapping by the dots of its names; the items of 0, 1, ... are a list."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, last = name.split(".")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = value
    return _with_lists(tree)


def _with_lists(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    items = {key: _with_lists(value) for key, value in tree.items()}
    if items and [*items] == [str(number) for number in range(len(items))]:
        return [*items.values()]
    return items
