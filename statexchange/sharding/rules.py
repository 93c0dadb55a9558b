"""Layout rules: the sharding of plain tensors, which carry no sharding of their own.

A layout maps name patterns (shell patterns; the first match wins) to rules, and may name the axes of the mesh of ranks,
slowest first. `statexchange merge --layout FILE` reads it as JSON::

    {
      "mesh": {"pp": 2, "tp": 4},
      "rules": {
        "*.embed_tokens.weight":   {"dim": 0, "axis": "tp"},
        "*.o_proj.weight":         {"dim": 1, "axis": "tp"},
        "*.gate_up_proj.weight":   {"dim": 0, "axis": "tp", "blocks": [1, 1]},
        "*.qkv.weight":            {"dim": 0, "axis": "tp", "split": {"qkv": {"q_proj": 4, "k_proj": 1, "v_proj": 1}}},
        "*.input_scale":           {"reduce": "max"},
        "*":                       "replicate"
      }
    }

Without a mesh, the layout may be the rules alone: ``{"*.o_proj.weight": {"dim": 1}}``. Version 0.1 wrote "grid" for
"mesh", which is still read. A rule is one of these, or a list of several:

``"replicate"``
    Every rank has the whole tensor; copies must be equal. This is the default for tensors without a rule.
``{"dim": 1}``
    The ranks' tensors are concatenated along dim 1, in the order of ranks. Their sizes may differ.
``{"dim": 1, "axis": "tp"}``
    The same along one axis of the mesh; ranks that differ only in other axes have copies. A list of axes, slowest
    first, shards along all of them; an empty list shards nothing.
``{"dim": 0, "blocks": [32, 8, 8]}``
    A fused tensor (QKV, gate and up): each rank has its part of each block, one after another. The numbers are sizes or
    ratios.
``{"dim": 0, "split": {"qkv": {"q_proj": 32, "k_proj": 8, "v_proj": 8}}}``
    The same, and each block becomes a tensor of its own, in whose name the part "qkv" is replaced. With
    ``"interleaved": true`` the blocks repeat along the dim (Megatron's groups of heads), and the numbers are the sizes
    in one group.
``{"dim": 0, "axis": "ep"}`` and ``{"renumber": "experts", "axis": "ep"}``
    Experts. The first rule is for experts that are stacked along a dim. The second is for one tensor per expert, with a
    number after the part ``experts`` of its name. Each rank numbers its experts from 0 on; in the output the numbers
    continue over the ranks. ``{"renumber": "layers", "axis": "pp"}`` does the same for layers of pipeline stages.
``{"reduce": "max"}``
    Copies differ; take the largest (or "min", the smallest) value of each element, as for scales of float8 weights.
``{"global_shape": [8, 4], "boxes": [[[[0, 0], [2, 4]]], ...]}``
    Explicit: for each rank a list of boxes, each (offsets, shape). Several boxes of one rank are concatenated along
    "dim" (by default 0).
``{"global_shape": [8, 4], "offsets": [2, 0], "shape": [2, 4]}``
    The box of the rank that gives this rule, for live ranks.
``"colwise"``, ``"rowwise"``, ``"packed_colwise"``, ...
    transformers' keywords: `model.tp_plan` may be given as it is. Such a pattern may also name the tensor's module. The
    axis is "tp" ("ep" for "grouped_gemm") if the mesh has it. A plan also has patterns without tensors in the files (a
    tied lm_head, modules without tensors of their own), so one match is enough for all of them.

torch's ``Shard(dim)`` and ``Replicate()`` are accepted too.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from statexchange.errors import IncompleteError, InvalidArgumentError, excerpt, type_text
from statexchange.sharding.sharding_spec import coordinate_of
from statexchange.sharding.shards import Box, boxes_of_runs, is_inside, sizes_from_json

_MAX_SHOWN = 8  # numbers in a message
# Along one dim. A model has far fewer heads, but a rule of a few bytes could ask for a run of each index.
_MAX_RUNS = 1 << 20
_STEP_KEYS = {"dim", "axis", "blocks", "split", "interleaved"}
_BOXES_KEYS = {"global_shape", "boxes", "dim"}
_BOXES_FORM = "boxes must be a list with an entry for each rank, a list of its boxes: [[[offsets, shape], ...], ...]"
_OWN_BOX_KEYS = {"global_shape", "offsets", "shape"}
REDUCTIONS = ("max", "min")

# transformers' keywords. `_keyword_steps` has which dim each of them divides, and into how many packed blocks.
_COLWISE = ("colwise", "colwise_rep", "colwise_gather_output", "local_colwise")
_ROWWISE = ("rowwise", "rowwise_rep", "rowwise_split_input", "local_rowwise")
_PACKED_ROWWISE = ("packed_rowwise", "local_packed_rowwise")
_WHOLE = {"replicate", "replicated_with_grad_allreduce", "sequence_parallel", "mla_kv_a_proj", "all_reduce", "local"}
_WHOLE |= {"local_params", "gather", "moe_tp_experts", "moe_identity_expert", "ep_dispatch_experts"}
_KEYWORDS = {*_COLWISE, *_ROWWISE, "embedding_rowwise", "embedding_colwise", "packed_colwise", *_PACKED_ROWWISE}
_KEYWORDS |= {"grouped_gemm"} | _WHOLE


@dataclass(frozen=True, slots=True)
class DimSegments:
    """The sharding of a rank's tensor along one dim: `segments` are (block, begin in the rank's tensor, size).

    The global dim is the concatenation, block after block, of the segments of all ranks along `axes` (None: of all
    ranks that have the tensor, in order). Of 4 rows of gate and 4 of up on 2 ranks, each has 2 of either:
    ``((0, 0, 2), (1, 2, 2))``.
    """

    dim: int
    axes: tuple[str, ...] | None
    segments: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's plain tensor, or a slice of it, as a part of the tensor `name`.

    `shape` is that of the rank's tensor. `cuts` has an entry for each dim of which the rank has only segments. `fixed`
    is set if a rule has explicit boxes: the global shape, and the box of each segment.
    """

    name: str
    shape: tuple[int, ...]
    cuts: tuple[DimSegments, ...] = ()
    fixed: tuple[tuple[int, ...], tuple[Box, ...]] | None = None

    def local_boxes(self) -> tuple[Box, ...]:
        """Return each box's block of the rank's tensor, in the order of the boxes that `place_parts` returns."""
        runs = self.uncut_runs()
        for cut in self.cuts:
            runs[cut.dim] = [(begin, size) for _, begin, size in cut.segments]
        return boxes_of_runs(runs)

    def uncut_runs(self) -> list[list[tuple[int, int]]]:
        """Return (begin, size) of one run of each dim, the whole rank's tensor."""
        return [[(0, size)] for size in self.shape]

    def uncut(self) -> object:
        """Return what is equal in all ranks' parts of one tensor."""
        # With explicit boxes, whose sizes are the caller's, each rank may have any.
        if self.fixed is not None:
            return len(self.shape), {cut.dim for cut in self.cuts}
        sizes: list[int | None] = list(self.shape)
        for cut in self.cuts:
            sizes[cut.dim] = None
        return sizes

    def check(self) -> None:
        """Raise ValueError if another rank's part does not fit itself."""
        num_boxes = 1
        for cut in self.cuts:
            num_boxes *= len(cut.segments)
            for _, begin, size in cut.segments:
                if cut.dim >= len(self.shape) or begin + size > self.shape[cut.dim]:
                    raise ValueError(
                        f"a segment of dim {cut.dim} ends at {begin + size}, but the shape is {self.shape}"
                    )
        if self.fixed is not None and len(self.fixed[1]) != num_boxes:
            raise ValueError(f"{len(self.fixed[1])} boxes for {num_boxes} segments")


@dataclass(frozen=True, slots=True)
class _RuleStep:
    """One step of a rule: it shards one dim.

    If each block becomes a tensor of its own, `split` is (part of the name, its replacements).
    """

    dim: int
    axes: tuple[str, ...] | None
    blocks: tuple[int, ...] = (1,)
    split: tuple[str, tuple[str, ...]] | None = None
    interleaved: bool = False

    def names(self, name: str) -> list[str]:
        """Return the names of the tensors that tensor `name` becomes; raise ValueError if it cannot be split."""
        if self.split is None:
            return [name]
        part, replacements = self.split
        parts = name.split(".")
        if part not in parts:
            raise ValueError(f"the name has no part {part!r} to split")
        at = parts.index(part)
        return [".".join([*parts[:at], new, *parts[at + 1 :]]) for new in replacements]


@dataclass(frozen=True, slots=True)
class Rule:
    """One parsed rule.

    Attributes:
        pattern: the name pattern.
        steps: how the tensor is divided, one step for each dim.
        keyword: a tp_plan keyword of transformers, instead of steps.
        keyword_axes: the mesh axes of the keyword; None for all ranks.
        boxes: the explicit boxes of the rule, instead of steps.
        renumber: (name part, mesh axes) of each number in the name that continues over the ranks.
        reduce: "max" or "min" of copies that differ.
    """

    pattern: str
    steps: tuple[_RuleStep, ...] = ()
    keyword: str | None = None
    keyword_axes: tuple[str, ...] | None = None
    boxes: Mapping[str, Any] | None = None
    renumber: tuple[tuple[str, tuple[str, ...] | None], ...] = ()
    reduce: str | None = None

    @property
    def renames(self) -> bool:
        """Whether the rule changes names of tensors."""
        return bool(self.renumber) or any(step.split is not None for step in self.steps)

    def names(self, name: str) -> list[str]:
        """Return the names of the tensors that tensor `name` becomes, before numbers continue over the ranks."""
        names = [name]
        for step in self.steps:
            divided = []
            for old in names:
                try:
                    divided += step.names(old)
                except ValueError as error:
                    raise InvalidArgumentError(f"layout rule for {self.pattern!r}: {error}", name=old) from None
            names = divided
        return names

    @property
    def is_tp_keyword(self) -> bool:
        """Whether this is a tp_plan keyword that only transformers uses."""
        return self.keyword is not None and self.keyword != "replicate"

    @property
    def is_explicit(self) -> bool:
        """Whether the sharding is explicit rather than a tp_plan keyword."""
        return bool(self.steps) or self.boxes is not None

    def parts(self, name: str, shape: tuple[int, ...], rank: int) -> list[Part]:
        """Return the tensors of which a rank's tensor of `shape` is a part.

        Raises:
            InvalidArgumentError: the rule does not fit the tensor.
        """
        try:
            if self.boxes is not None:
                return [_fixed_part(name, shape, rank, self.boxes)]
            steps = self.steps
            if self.keyword is not None:
                steps = _keyword_steps(self.keyword, self.keyword_axes, name, len(shape))
            return _divide(name, shape, steps)
        except (ValueError, TypeError, IndexError, KeyError) as error:
            raise InvalidArgumentError(f"layout rule for {self.pattern!r}: {error}", name=name, rank=rank) from None


@dataclass(slots=True)
class Layout:
    """Rules by name pattern, in order, and the mesh of ranks.

    Attributes:
        rules: the rules by pattern.
        mesh: sizes of the mesh's axes by name, slowest first.
        unused: patterns that have not matched a name yet.
        like: names, such as those of an optimizer's state, with the name (the parameter's) whose rule they use.
    """

    rules: Mapping[str, Rule]
    mesh: Mapping[str, int] = field(default_factory=dict)
    unused: set[str] = field(default_factory=set)
    like: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, raw: Any) -> Layout:
        """Return the layout described at the top of this module; raise InvalidArgumentError for anything else."""
        if not isinstance(raw, Mapping):
            raise InvalidArgumentError(f"layout must map name patterns to rules, not be {type_text(raw)}")
        if "grid" in raw and "mesh" in raw:
            raise InvalidArgumentError("layout has 'mesh' and 'grid', its old name: remove 'grid'")
        axes_key = "grid" if "grid" in raw else "mesh"  # as in layouts of version 0.1
        rules: object = raw
        mesh: object = {}
        # A layout without a mesh may have its rules under "rules", too.
        if axes_key in raw or isinstance(raw.get("rules"), Mapping):
            unknown = set(map(str, raw)) - {axes_key, "rules"}
            if unknown:
                raise InvalidArgumentError(f"layout has the unknown key {min(unknown)!r} beside 'mesh' and 'rules'")
            rules, mesh = raw.get("rules", {}), raw.get(axes_key, {})
        if not isinstance(rules, Mapping):
            raise InvalidArgumentError(f'layout "rules" must map name patterns to rules, not be {excerpt(rules)}')
        if not isinstance(mesh, Mapping) or any(type(size) is not int or size < 1 for size in mesh.values()):
            raise InvalidArgumentError(f'layout mesh must be like {{"pp": 2, "tp": 4}}, not {excerpt(mesh)}')
        parsed = {}
        for pattern, rule in rules.items():
            parsed[str(pattern)] = _parse_rule(str(pattern), rule, mesh)
        return cls(parsed, dict(mesh), set(parsed))

    def rule_for(self, name: str) -> Rule | None:
        """Return the first rule whose pattern matches the name, else the first keyword for its module."""
        if not self.rules:
            return None
        rule = self._rule_for(name)  # always, because it marks the pattern as used
        if name in self.like:
            return self._rule_for(self.like[name]) or rule
        return rule

    def _rule_for(self, name: str) -> Rule | None:
        rule = self._first_that_fits(name, self.rules.values())
        if rule is None:
            # transformers writes a plan for modules, so a keyword's pattern may name the tensor's module. Only if no
            # pattern names the tensor itself: a rule for the weight counts before one for its module.
            keywords = [keyword for keyword in self.rules.values() if keyword.keyword]
            rule = self._first_that_fits(name.rpartition(".")[0], keywords)
        if rule is None:
            return None
        if rule.pattern in self.unused and rule.is_tp_keyword:
            # A plan has patterns without tensors too, so one match is enough for all its keywords.
            self.unused -= {pattern for pattern, other in self.rules.items() if other.is_tp_keyword}
        self.unused.discard(rule.pattern)
        return rule

    @staticmethod
    def _first_that_fits(name: str, rules: Iterable[Rule]) -> Rule | None:
        for rule in rules:
            if _fits(name, rule.pattern):
                return rule
        return None

    def unmatched(self) -> Layout:
        """Return a copy in which no pattern has matched a name yet."""
        return Layout(self.rules, self.mesh, set(self.rules))

    def check_ranks(self, ranks: Sequence[int]) -> None:
        """Raise InvalidArgumentError if these are not all ranks of the mesh."""
        num_ranks = math.prod(self.mesh.values())
        if len(ranks) != num_ranks or sorted(ranks) != list(range(num_ranks)):
            text = f"the layout's mesh ({self.mesh_text}) has {num_ranks} ranks, but there are {len(ranks)}"
            raise InvalidArgumentError(text)

    @property
    def mesh_text(self) -> str:
        """The axes of the mesh and their sizes, for messages."""
        return " x ".join(f"{axis} {size}" for axis, size in self.mesh.items())


def _parse_rule(pattern: str, raw: Any, mesh: Mapping[str, int]) -> Rule:
    steps: list[_RuleStep] = []
    keywords: list[str] = []
    boxes: list[Mapping[str, Any]] = []
    renumber: list[tuple[str, tuple[str, ...] | None]] = []
    reduce: str | None = None
    entries = raw if isinstance(raw, list) else [raw]
    for entry in entries:
        keys: set[object] = set()
        if isinstance(entry, Mapping):
            keys.update(entry)
        if isinstance(entry, str) and entry in _KEYWORDS:
            keywords.append(entry)
        # torch's placements, by the names of their classes: this module does not import torch.
        elif type(entry).__name__ == "Shard":
            steps.append(_RuleStep(int(entry.dim), _axes(pattern, {}, mesh)))
        elif type(entry).__name__ == "Replicate":
            keywords.append("replicate")
        elif keys == {"reduce"} and entry["reduce"] in REDUCTIONS:
            reduce = entry["reduce"]
        elif "renumber" in keys and keys <= {"renumber", "axis"}:
            renumber.append((str(entry["renumber"]), _axes(pattern, entry, mesh)))
        elif "dim" in keys and keys <= _STEP_KEYS:
            steps.append(_parse_step(pattern, entry, mesh))
        elif "global_shape" in keys and (keys <= _BOXES_KEYS or keys == _OWN_BOX_KEYS):
            boxes.append(entry)
        else:
            raise _rule_error(pattern, entry)
    if len(keywords) + len(boxes) + bool(steps) > 1 or len({step.dim for step in steps}) < len(steps):
        raise InvalidArgumentError(f"layout rule for {pattern!r} shards a tensor in two ways: {excerpt(raw, 200)}")
    keyword = next(iter(keywords), None)
    axes = None
    # A keyword that shards nothing needs no axis, which a mesh of several could not choose.
    if keyword is not None and keyword not in _WHOLE:
        axes = _keyword_axes(pattern, keyword, mesh)
    return Rule(pattern, tuple(steps), keyword, axes, next(iter(boxes), None), tuple(renumber), reduce)


def _rule_error(pattern: str, raw: Any) -> InvalidArgumentError:
    """Return the error for something that is not a rule."""
    if isinstance(raw, Mapping):
        unknown = set(map(str, raw)) - {"reduce", "renumber"} - _STEP_KEYS - _BOXES_KEYS - _OWN_BOX_KEYS
        if unknown:
            text = f"layout rule for {pattern!r} has the unknown key {min(unknown)!r}: {excerpt(raw, 200)}"
            return InvalidArgumentError(text)
    return InvalidArgumentError(
        f'layout rule for {pattern!r} must be Shard(dim), Replicate(), a mapping with dim ({{"dim": 0}}), "replicate", '
        f'{{"reduce": "max"}}, {{"renumber": "experts"}}, boxes, a tp_plan keyword, or a list of these, '
        f"not {excerpt(raw, 200)}"
    )


def _axes(pattern: str, raw: Mapping[str, Any], mesh: Mapping[str, int]) -> tuple[str, ...] | None:
    """Return the axes that a rule names; by default the only axis of the mesh; None without a mesh."""
    if "axis" not in raw:
        if len(mesh) > 1:
            raise InvalidArgumentError(f'layout rule for {pattern!r} needs an "axis": one of {list(mesh)}')
        return tuple(mesh) or None
    axes = raw["axis"]
    if not isinstance(axes, list | tuple):
        axes = (axes,)
    for axis in axes:
        if not isinstance(axis, str) or axis not in mesh:
            text = f'layout rule for {pattern!r}: axis {excerpt(axis)} is not in the "mesh" {dict(mesh)}'
            raise InvalidArgumentError(text)
    return tuple(axes)


def _keyword_axes(pattern: str, keyword: str, mesh: Mapping[str, int]) -> tuple[str, ...] | None:
    """Return the axes along which a tp_plan keyword shards."""
    axis = "tp"
    if keyword == "grouped_gemm":  # experts lie along an axis of their own
        axis = "ep"
    if axis in mesh:
        return (axis,)
    return _axes(pattern, {}, mesh)


def _parse_step(pattern: str, raw: Mapping[str, Any], mesh: Mapping[str, int]) -> _RuleStep:
    dim, blocks, split = raw["dim"], raw.get("blocks"), raw.get("split")
    axes = _axes(pattern, raw, mesh)
    names: tuple[str, tuple[str, ...]] | None = None
    try:
        if split is not None:
            # One part of the name is replaced, and its replacements say the blocks: no second list of them.
            ((part, replacements),) = split.items()
            names = str(part), tuple(map(str, replacements))
            if "blocks" in raw:
                raise ValueError
            blocks = list(replacements.values())
        sizes = (1,) if blocks is None else sizes_from_json(blocks)
        if raw.get("interleaved", False) is not False and names is None:
            raise ValueError
        if type(dim) is not int or min(sizes) <= 0:
            raise ValueError
    except (AttributeError, TypeError, ValueError):
        raise InvalidArgumentError(
            f'layout rule for {pattern!r}: a rule with a dim is like {{"dim": 0, "blocks": [32, 8, 8]}} or {{"dim": 0, '
            f'"split": {{"qkv": {{"q": 32, "k": 8, "v": 8}}}}, "interleaved": true}}, not {excerpt(raw, 200)}'
        ) from None
    return _RuleStep(dim, axes, sizes, names, bool(raw.get("interleaved", False)))


def _keyword_steps(keyword: str, axes: tuple[str, ...] | None, name: str, dims: int) -> tuple[_RuleStep, ...]:
    """Return how transformers' tensor parallel style `keyword` shards a parameter with so many dims."""
    is_bias = name.rpartition(".")[2] == "bias"
    if keyword in _WHOLE or not dims:
        return ()
    # From the end, as experts may be stacked in front of a weight's two dims. A bias has the first of these alone.
    if keyword in _COLWISE:
        return (_RuleStep(max(dims - 2, 0), axes),)
    # The bias of such a module is added to the sum over the ranks, so each has all of it.
    if keyword in _ROWWISE and is_bias:
        return ()
    if keyword in _ROWWISE:
        return (_RuleStep(dims - 1, axes),)
    # gate_up_proj is two blocks in each rank's part, one after the other; transformers cuts a bias as if it were one.
    if keyword == "packed_colwise":
        blocks = (1, 1) if dims > 1 else (1,)
        return (_RuleStep(max(dims - 2, 0), axes, blocks),)
    if keyword in _PACKED_ROWWISE:
        if dims == 1:
            return ()
        return (_RuleStep(dims - 1, axes, (1, 1)),)
    return (_RuleStep(int(keyword == "embedding_colwise"), axes),)


def _divide(name: str, shape: tuple[int, ...], steps: Sequence[_RuleStep]) -> list[Part]:
    """Return the parts into which the product of all steps divides a tensor; a split makes several names."""
    divided = [Part(name, shape)]
    for step in steps:
        dim = _counted_from_first(step.dim, shape)
        # Refused when the rule was read only if both steps name the dim alike: -1 may be the same as 1.
        if any(cut.dim == dim for cut in divided[0].cuts):
            raise ValueError(f"dim {dim} is sharded twice, in a tensor of shape {shape}")
        runs = list(_runs(shape[dim], step))
        parts = []
        for part in divided:
            for number, new in enumerate(step.names(part.name)):
                segments = runs
                if step.split is not None:  # each block is a tensor of its own
                    segments = [(0, begin, size) for block, begin, size in runs if block == number]
                parts.append(Part(new, shape, (*part.cuts, DimSegments(dim, step.axes, tuple(segments)))))
        divided = parts
    return divided


def _counted_from_first(dim: int, shape: tuple[int, ...]) -> int:
    """Return the number of a dim from 0 on; -1 is the last dim."""
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"dim {dim}, but the shape is {shape}")
    return dim % len(shape)


def _runs(length: int, step: _RuleStep) -> Iterator[tuple[int, int, int]]:
    """Yield (block, begin, size) along a rank's dim of this length.

    Of 6 indices, blocks [2, 1] are (0, 0, 4) and (1, 4, 2); interleaved they are (0, 0, 2), (1, 2, 1), (0, 3, 2) and
    (1, 5, 1).
    """
    total = sum(step.blocks)
    repeats, unit = 1, length
    if step.interleaved:
        repeats, unit = length // total, total
    # By one division for all: each block is a whole number of indices if total divides unit times each of them.
    if repeats * unit != length or any(unit * block % total for block in step.blocks):
        raise ValueError(
            f"a dim of {length} does not divide into blocks {list(step.blocks)}; whole parts of each are needed"
        )
    sizes = [unit * block // total for block in step.blocks]
    if repeats * len(sizes) > _MAX_RUNS:
        raise ValueError(f"a dim of {length} would be cut into {repeats * len(sizes)} runs")
    begins = [0, *accumulate(sizes)]
    for repeat in range(repeats):
        for block, size in enumerate(sizes):
            yield block, repeat * unit + begins[block], size


def _fixed_part(name: str, shape: tuple[int, ...], rank: int, raw: Mapping[str, Any]) -> Part:
    """Return the part of a rule with explicit boxes, which are concatenated along a dim of the rank's tensor."""
    global_shape = sizes_from_json(raw["global_shape"])
    if "boxes" in raw:
        if not isinstance(raw["boxes"], list | tuple):
            raise ValueError(_BOXES_FORM)
        if rank >= len(raw["boxes"]):
            raise ValueError(f"boxes are given for {len(raw['boxes'])} ranks only")
        try:
            boxes = tuple(map(Box.from_json, raw["boxes"][rank]))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{_BOXES_FORM}; {error}") from None
    else:
        boxes = (Box(sizes_from_json(raw["offsets"]), sizes_from_json(raw["shape"])),)
    for box in boxes:
        if len(global_shape) != len(shape) or not is_inside(box, global_shape):
            raise ValueError(f"box {box} lies outside the global shape {global_shape}")
    # A 0-d tensor has no dim along which boxes could be joined: each rank has all of it.
    if not shape:
        return Part(name, shape)
    dim = _counted_from_first(raw.get("dim", 0), shape)
    segments = []
    begin = 0
    others = {(*shape[:dim], *shape[dim + 1 :])}  # the sizes of all other dims are those of the rank's tensor
    for box in boxes:
        segments.append((0, begin, box.shape[dim]))
        begin += box.shape[dim]
        others.add((*box.shape[:dim], *box.shape[dim + 1 :]))
    if begin != shape[dim] or len(others) > 1:
        raise ValueError(f"boxes {list(map(str, boxes))} and the tensor of shape {shape} differ in shape")
    return Part(name, shape, (DimSegments(dim, (), tuple(segments)),), (global_shape, boxes))


def _coordinates(rank: int, mesh: Mapping[str, int]) -> dict[str, int]:
    """Return a rank's coordinate along each axis of a mesh."""
    return dict(zip(mesh, coordinate_of(rank, tuple(mesh.values())), strict=True))


def _index(rank: int, axes: tuple[str, ...], mesh: Mapping[str, int]) -> int:
    """Return the index of a rank along some axes, the first of which is the slowest."""
    coordinates = _coordinates(rank, mesh)
    index = 0
    for axis in axes:
        index = index * mesh[axis] + coordinates[axis]
    return index


def place_parts(
    parts: Mapping[int, Part], mesh: Mapping[str, int], paths: Mapping[int, str] | None = None
) -> dict[int, tuple[tuple[int, ...], tuple[Box, ...]]]:
    """Return, for each rank, the global shape of one tensor and the rank's boxes, from all ranks' parts of it.

    `paths` are the ranks' files, for messages.

    Raises:
        InvalidArgumentError: the shapes of parts do not fit each other.
        IncompleteError: a coordinate along an axis has no rank.
    """
    first_rank, first = next(iter(parts.items()))
    paths = paths or {}
    for rank, part in parts.items():
        if part.uncut() != first.uncut():
            rules = layout_advice(first.name, [first.shape, part.shape])
            text = "no rule of one dim fits"
            if rules:
                text = f"if each rank holds a part, the layout needs the rule {rules}"
            raise InvalidArgumentError(
                f"ranks {first_rank} and {rank} have shapes {first.shape} and {part.shape}: {text}",
                name=first.name,
                rank=rank,
                path=paths.get(rank),
            )
    if first.fixed is not None:
        return {rank: part.fixed for rank, part in parts.items() if part.fixed is not None}
    # Each dim by itself: a box is the product of one run of each dim, whatever the order of the cuts is.
    shape = list(first.shape)
    runs = {rank: part.uncut_runs() for rank, part in parts.items()}
    for number, cut in enumerate(first.cuts):
        shape[cut.dim] = _place_cut(parts, number, mesh, paths, runs)
    return {rank: (tuple(shape), boxes_of_runs(rank_runs)) for rank, rank_runs in runs.items()}


def _place_cut(
    parts: Mapping[int, Part],
    number: int,
    mesh: Mapping[str, int],
    paths: Mapping[int, str],
    runs: Mapping[int, list[list[tuple[int, int]]]],
) -> int:
    """Compute where each segment of one dim lies, enter that into each rank's `runs`, and return the dim's length."""
    first = next(iter(parts.values()))
    axes, dim = first.cuts[number].axes, first.cuts[number].dim
    ranks = sorted(parts)
    index_of: dict[int, int] = {}  # along the axes
    first_rank: dict[int, int] = {}  # by index along the axes
    placed: list[tuple[int, int, int, int]] = []  # block, index along the axes, number of the segment, size
    for rank in ranks:
        index = index_of[rank] = len(index_of) if axes is None else _index(rank, axes, mesh)
        segments = parts[rank].cuts[number].segments
        other = first_rank.setdefault(index, rank)
        # Ranks that differ only in other axes have copies of a part, which is placed once.
        if other == rank:
            for position, (block, _, size) in enumerate(segments):
                placed.append((block, index, position, size))
        elif parts[other].cuts[number].segments != segments:
            raise InvalidArgumentError(
                f"ranks {other} and {rank} have the same index along {list(axes or ())}, but shapes "
                f'{parts[other].shape} and {parts[rank].shape}: its "axis" must name all axes that shard dim {dim}',
                name=first.name,
                rank=rank,
                path=paths.get(rank),
            )
    num_indices = len(parts) if axes is None else math.prod(map(mesh.__getitem__, axes))
    absent = sorted(set(range(num_indices)) - set(first_rank))
    if absent:
        raise IncompleteError(
            f"no rank with index {_some(absent)} along {list(axes or ())} has a part; ranks {_some(ranks)} do",
            name=first.name,
        )
    begins: dict[tuple[int, int], int] = {}  # by index along the axes and number of the segment
    at = 0
    # Block after block, in each of them rank after rank: so q, k and v of a fused tensor are whole again. Of q0 k0 on
    # one rank and q1 k1 on the next it makes q0 q1 k0 k1.
    for _, index, position, size in sorted(placed):
        begins[index, position] = at
        at += size
    for rank, part in parts.items():
        runs[rank][dim] = []
        for position, (_, _, size) in enumerate(part.cuts[number].segments):
            runs[rank][dim].append((begins[index_of[rank], position], size))
    return at


def _some(numbers: Sequence[int]) -> str:
    """Return the first numbers of a list and their count, for a message."""
    shown = ", ".join(map(str, numbers[:_MAX_SHOWN]))
    if len(numbers) > _MAX_SHOWN:
        shown += f", ... {len(numbers)} of them"
    return f"[{shown}]"


def renumber_names(names: Mapping[int, Mapping[str, str]], layout: Layout) -> dict[int, dict[str, str]]:
    """Return each rank's names, in which the numbers of `renumber` rules continue over the ranks.

    `names` maps each name to the one by which its rule is found, which differs for tensors that a rule has split. If
    ranks 0 and 1 have two layers each, "layers.0.w" of rank 1 becomes "layers.2.w".
    """
    renamed = {rank: dict(zip(rank_names, rank_names, strict=True)) for rank, rank_names in names.items()}
    components: set[str] = set()
    for rule in layout.rules.values():
        components.update(component for component, _ in rule.renumber)
    # One after another, as a name may have two numbers: of a layer, and of an expert in it.
    for component in sorted(components):
        numbered = []
        counts: dict[object, dict[int, int]] = {}  # how many numbers there are, by group and coordinate in it
        for rank, new_names in renamed.items():
            for name, new_name in new_names.items():
                rule_of_name = layout.rule_for(names[rank][name])
                axes_of = {} if rule_of_name is None else dict(reversed(rule_of_name.renumber))
                if component in axes_of:
                    parsed = _parse_numbered(new_name, component, axes_of[component], layout.mesh, rank)
                    numbered.append((rank, name, parsed))
                    group = counts.setdefault(parsed.group, {})
                    # By the highest number of any tensor: some layers lack tensors that others have.
                    group[parsed.coordinate] = max(group.get(parsed.coordinate, 0), parsed.number + 1)
        # Only now, when all ranks' counts are in.
        for rank, name, parsed in numbered:
            before = 0
            for coordinate, count in counts[parsed.group].items():
                if coordinate < parsed.coordinate:
                    before += count
            renamed[rank][name] = f"{parsed.head}{parsed.number + before}{parsed.tail}"
    return renamed


class _NumberedName(NamedTuple):
    """A name whose number continues over a group of ranks.

    `coordinate` is that of the rank in the group; `head` and `tail` are what stands before and after the number.
    """

    group: object
    coordinate: int
    number: int
    head: str
    tail: str


def _parse_numbered(
    name: str, component: str, axes: tuple[str, ...] | None, mesh: Mapping[str, int], rank: int
) -> _NumberedName:
    """Parse a name whose number after `component` continues over the ranks along `axes`."""
    parts = name.split(".")
    at = parts.index(component) + 1 if component in parts else len(parts)
    if at >= len(parts) or not parts[at].isdecimal():
        raise InvalidArgumentError(f"layout renumbers {component!r}, but the name has no number after it", name=name)
    head, number, tail = ".".join([*parts[:at], ""]), int(parts[at]), ".".join(["", *parts[at + 1 :]])
    if axes is None:
        return _NumberedName(head, rank, number, head, tail)
    coordinates = _coordinates(rank, mesh)
    other_axes = tuple((axis, index) for axis, index in coordinates.items() if axis not in axes)
    return _NumberedName((head, other_axes), _index(rank, axes, mesh), number, head, tail)


def with_dots(path: str) -> str:
    """Return a path with dots before indices: "a.0" for "a[0]"."""
    return path.replace("[", ".").replace("]", "").removeprefix(".")


def _fits(name: str, pattern: str) -> bool:
    """Whether a pattern matches a name. An index may stand in brackets in both, as in messages, or after a dot.

    "blocks.*" and "blocks[0]" match "blocks[0]", and "blocks[0]" matches "blocks.0".
    """
    if fnmatch.fnmatchcase(name, pattern) or name == with_dots(pattern):
        return True
    return "[" in name and (name == pattern or fnmatch.fnmatchcase(with_dots(name), pattern))


def layout_advice(name: str, shapes: Sequence[tuple[int, ...]], form: str = '{{"dim": {}}}') -> str:
    """Return the rules of a layout that tensors of these shapes allow, if each is a part of one tensor; "" for none.

    Parts differ in the size of one dim at most. If all have one shape, it may be any dim, and the advice says how to
    find out which.

    Args:
        name: the name of the tensor.
        shapes: shapes of some ranks' tensors.
        form: the format of a rule that divides a tensor along a dim.
    """
    first = shapes[0]
    if set(map(len, shapes)) != {len(first)}:
        return ""
    differing = []
    for dim, sizes in enumerate(zip(*shapes, strict=True)):
        if len(set(sizes)) > 1:
            differing.append(dim)
    if len(differing) > 1 or not first:
        return ""
    dims = differing or range(len(first))
    rules = ", or ".join(f'{{"{name}": {form.format(dim)}}}' for dim in dims)
    if len(dims) == 1:
        return rules
    check = f"it is the dim along which the model's tensor is larger than a rank's {list(first)}"
    words = ""
    if len(first) == 2:
        words = '; in a tp_plan "colwise" is dim 0 of a weight, "rowwise" dim 1'
    return f"{rules} ({check}{words})"
