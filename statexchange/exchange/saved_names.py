"""The names and parts under which transformers saves a model, found by tracing its own conversion.

transformers 5 keeps some weights fused in memory, such as all experts of a layer in one tensor, and its
`save_pretrained` writes them one by one, as other programs read them. Here transformers converts tensors without memory
(device "meta"): the storage, offset and strides of each result show which part of which tensor it is. So no rule about
a model family is needed. What joins or reorders tensors, or computes values, cannot be traced: the names in memory are
used then.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from statexchange.comm.communicator import Communicator
from statexchange.conversions.patches import Dim, Patch
from statexchange.conversions.plan import ConversionPlan, Fill
from statexchange.errors import InvalidArgumentError, NotFoundError, UnsupportedError, excerpt
from statexchange.exchange.pretrained import pretrained_model, with_own_classes
from statexchange.exchange.rank_metadata import decode_distinct, gather_distinct, tensors_of
from statexchange.messages import encoded
from statexchange.sharding.options import ExportOptions, LoadOptions
from statexchange.sharding.shards import Box, TensorInfo, c_strides, full_box
from statexchange.state.describe import Description

_log = logging.getLogger(__name__)
_SHOWN = 3  # names in a message


class _UntracedError(Exception):
    """The conversion cannot be traced; the text says what it does."""


@dataclass(frozen=True, slots=True)
class SavedNames:
    """The conversion that transformers applies to the tensors of a live model when it saves it; None: no conversion."""

    model: Any

    def texts(self) -> dict[str, str]:
        """Return no text: the stages of a pipeline may be different models."""
        return {}

    def plan(self, comm: Communicator, described: Description, options: ExportOptions) -> ConversionPlan:
        """Return what `save_pretrained` writes of the tensors that this rank has. Collective.

        Raises:
            InvalidArgumentError: ranks would write a tensor by different names, or two tensors by one name; or a
                pattern matches names in memory, and none that is written.
        """
        with comm.phase("naming its tensors"):
            tensors = tensors_of(described)
            parts = self._parts({name: info.shape for name, info in tensors.items()})
        # Stages of one model have other tensors: one may be traced where another is not, and all need the same names.
        kind = ""
        if self.model is not None:
            kind = type(self.model).__name__
        untraced = comm.all_gather_object(kind if parts is None else "")
        if kind in untraced:
            parts = None
        with comm.phase("naming its tensors"):
            plan = _plan_to_save(tensors, parts)
        names = {name: [fill.target for fill in fills] for name, fills in plan.fills.items()}
        sent = gather_distinct(comm, encoded(names, dict[str, tuple[str, ...]]), root=0)
        with comm.phase("comparing the names"):
            if comm.rank == 0:
                _check_patterns(options, _names_of_all(sent), "in memory")
        return plan

    def left_options(self, options: ExportOptions) -> ExportOptions:
        """Return the options that apply to the converted tensors: the patterns match the names that are written."""
        return replace(options, layout=None)

    def plan_to_load(
        self, shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, TensorInfo], options: LoadOptions
    ) -> ConversionPlan | None:
        """Return how stored tensors fill those of the model, given by shape; None if no stored name has to change.

        A tensor that is stored under its name in memory stays as it is, and so does a name that the model does not
        know. The parts of a tensor that the options leave out fill nothing.

        Raises:
            NotFoundError: only some parts of a tensor are stored, or one in another shape.
            UnsupportedError: parts of one tensor are stored in several dtypes.
            InvalidArgumentError: a pattern matches names of parts, and none in memory; or the source has further parts
                of a tensor, which has another shape there.
        """
        # What is not a part of a tensor in memory stays as it is.
        outputs = dict(stored)
        fills = {name: [Fill(name, _whole(info.shape))] for name, info in stored.items()}
        by_name: dict[str, dict[str, Patch]] = {}
        for saved, (name, patch) in (self._parts(shapes) or _whole_tensors(shapes)).items():
            by_name.setdefault(name, {})[saved] = patch
        self._check_no_more(shapes, by_name, {name for name in stored if name not in shapes}, options)
        parts: dict[str, tuple[str, ...]] = {}  # the tensor in memory, by the stored names of its parts
        for name, patches in by_name.items():
            kept = [saved for saved in patches if saved in stored]
            if name in stored or not kept:  # it is stored as it is in memory, or `match` names it as missing
                continue
            parts |= dict.fromkeys(kept, (name,))
            if not options.wants(name):
                for saved in kept:
                    del outputs[saved]
                    fills[saved] = []
                continue
            for saved, patch in patches.items():
                # Parts of a model of other sizes are no parts of this one.
                if saved not in stored or stored[saved].shape != patch.box.shape:
                    text = (
                        f"of its parts the source lacks {saved} of shape {patch.box.shape}: exclude leaves it as it is"
                    )
                    raise NotFoundError(text, name=name)
            dtypes = {stored[saved].dtype: saved for saved in patches}
            # A cast to the wider one would be a guess: the load refuses other dtypes elsewhere, too.
            if len(dtypes) > 1:
                listed = ", ".join(f"{saved} is {dtype}" for dtype, saved in sorted(dtypes.items()))
                text = f"tensors of different dtypes would become one: {listed}; merge with dtype (--dtype) first"
                raise UnsupportedError(text, name=name)
            outputs[name] = TensorInfo(min(dtypes), shapes[name])
            for saved, patch in patches.items():
                del outputs[saved]
                fills[saved] = [Fill(name, _inverse(patch))]
        _check_patterns(options, {**parts, **{name: (name,) for name in shapes}}, "in the source")
        is_changed = outputs.keys() != stored.keys()
        return ConversionPlan(outputs, fills) if is_changed else None

    def _parts(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[str, Patch]] | None:
        """Return, for each name in a file, the tensor in memory and its part that has this name.

        None without a trace, or a model: each tensor has its name in memory then, which transformers reads, too.
        """
        if self.model is None:
            return None
        try:
            return _traced(self.model, shapes)
        except _UntracedError as error:
            text = "%s.save_pretrained %s: names in memory are used instead, which from_pretrained reads, too"
            _log.warning(text, type(self.model).__name__, error)
            return None

    def _check_no_more(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        by_name: Mapping[str, Mapping[str, Patch]],
        stored: Collection[str],
        options: LoadOptions,
    ) -> None:
        """Raise InvalidArgumentError if a tensor with one more item in its first dim has a part that is stored.

        So the source has more experts than the model in memory, whose tensor would be filled with the first of them.
        """
        longer = dict(shapes)
        fused = set()
        for name, patches in by_name.items():
            if len(patches) > 1 and options.wants(name):
                fused.add(name)
                longer[name] = (shapes[name][0] + 1, *shapes[name][1:])
        try:
            parts = _traced(self.model, longer) if fused else {}
        except _UntracedError:  # such a tensor cannot be
            return
        for saved, (name, _) in parts.items():
            if name in fused and saved in stored and saved not in by_name[name]:
                text = (
                    f"the source has {saved}, too: there this tensor has another shape; make the model as it was saved"
                )
                raise InvalidArgumentError(text, name=name, found=shapes[name])


def _plan_to_save(tensors: Mapping[str, TensorInfo], parts: Mapping[str, tuple[str, Patch]] | None) -> ConversionPlan:
    """Return the plan that writes these parts; without them, each tensor as it is."""
    outputs: dict[str, TensorInfo] = {}
    fills: dict[str, list[Fill]] = {name: [] for name in tensors}
    parts = parts or _whole_tensors({name: info.shape for name, info in tensors.items()})
    for saved, (name, patch) in parts.items():
        outputs[saved] = TensorInfo(tensors[name].dtype, patch.box.shape)
        fills[name].append(Fill(saved, patch))
    return ConversionPlan(outputs, fills, single=frozenset(outputs))


def _whole_tensors(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[str, Patch]]:
    return {name: (name, _whole(shape)) for name, shape in shapes.items()}


def saved_names(state: Any) -> SavedNames | None:
    """Return the conversion of a live model of transformers that has one; None for any other state. Not collective."""
    loading = sys.modules.get("transformers.core_model_loading")
    revert = getattr(loading, "revert_weight_conversion", None)
    if revert is None:  # transformers is not imported, or older than 5
        return None
    model = pretrained_model(state)
    if model is None:
        return None
    model = with_own_classes(model)
    # Without a conversion, transformers returns the same mapping.
    unchanged: dict[str, Any] = {}
    return None if revert(model, unchanged) is unchanged else SavedNames(model)


def _names_of_all(sent: Sequence[bytes]) -> dict[str, tuple[str, ...]]:
    """Return the names by which each tensor of any rank is written, by its name in memory."""
    names: dict[str, tuple[str, ...]] = {}
    tensors: dict[str, str] = {}  # the name in memory of each written tensor
    for rank, of_rank in decode_distinct(sent, dict[str, tuple[str, ...]], "its names"):
        for name, written in of_rank.items():
            first = names.setdefault(name, written)
            if first != written:
                text = (
                    f"ranks would write this tensor by different names, {_shown(first)} and {_shown(written)}: give "
                    "all ranks that have it a model of the same class and size, by from_pretrained on all or on none"
                )
                raise InvalidArgumentError(text, name=name, rank=rank)
            for new in written:
                if tensors.setdefault(new, name) != name:
                    text = f"both {tensors[new]!r} and {name!r} would be written by this name"
                    raise InvalidArgumentError(text, name=new, rank=rank)
    return names


def _check_patterns(options: ExportOptions | LoadOptions, names: Mapping[str, Sequence[str]], where: str) -> None:
    """Raise InvalidArgumentError for a pattern that matches names in `names`, but none of those that these become."""
    new_names: set[str] = set()
    for news in names.values():
        new_names.update(news)
    for option in ("include", "exclude"):
        for pattern in getattr(options, option):
            matches = type(options)(include=pattern).wants
            old = next(filter(matches, names), None)
            if old is not None and not any(map(matches, new_names)):
                new = _shown(names[old])
                text = f"{option} pattern {pattern!r} matches only names {where}: match {new} instead of {old}"
                raise InvalidArgumentError(text, name=names[old][0])


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def _traced(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[str, Patch]]:
    """Return, for each name in a file, the tensor in memory and its part, by running the conversion of transformers.

    "experts.gate_up_proj" of shape (8, 6, 4), of which the file has 8 "experts.N.gate_proj.weight" of shape (3, 4):
    that of expert 2 is a view of storage offset 48, from which `_patch` finds that it begins at (2, 0, 0).
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Tracing(TorchDispatchMode):  # type: ignore[no-untyped-call]
        """Returns the tensor itself for a copy of it, so that copied results stay views of the inputs."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.clone.default:
                return args[0]
            return func(*args, **(kwargs or {}))

    inputs = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    # On the meta device all data pointers are 0: only the storage objects differ.
    by_storage = {tensor.untyped_storage()._cdata: name for name, tensor in inputs.items()}  # noqa: SLF001
    loading = sys.modules["transformers.core_model_loading"]
    with Tracing():  # type: ignore[no-untyped-call]
        try:
            saved = loading.revert_weight_conversion(model, dict(inputs))
        except RuntimeError as error:  # torch's: a view needs a copy of another order
            raise _UntracedError("reorders elements of tensors, or computes new ones") from error
        except Exception as error:
            raise _UntracedError(f"raises {excerpt(error)}") from error
    parts = {}
    traced = dict.fromkeys(shapes, 0)  # elements
    for saved_name, tensor in saved.items():
        name = by_storage.get(tensor.untyped_storage()._cdata)  # noqa: SLF001
        if name is None:
            raise _UntracedError(f"joins tensors, or computes values, to write {saved_name}")
        parts[saved_name] = (name, _patch(saved_name, tensor, shapes[name]))
        traced[name] += tensor.numel()
    # Fewer would be lost, and more be written twice: either is a conversion that this tracing does not understand.
    for name, shape in shapes.items():
        if traced[name] != math.prod(shape):
            raise _UntracedError(f"does not write each element of {name} once")
    return parts


def _patch(name: str, view: Any, shape: tuple[int, ...]) -> Patch:
    """Return which part of a dense tensor of this shape a view shows."""
    strides = c_strides(shape)
    begin, rest = [], view.storage_offset()
    for stride in strides:  # the offset of the view, as indices of its first element
        begin.append(rest // stride if stride else 0)
        rest -= begin[-1] * stride
    dims = []
    for size, stride in zip(view.shape, view.stride(), strict=True):
        # By its stride each dim of the view runs along one of the tensor; dims of one element have any stride.
        along = [dim for dim, dense in enumerate(strides) if dense == stride and shape[dim] >= size]
        if size == 1:
            dims.append(Dim(None))
        elif len(along) == 1:
            dims.append(Dim(along[0], range(size)))
        else:
            raise _UntracedError(f"reorders the elements of {name}")
    return Patch(0, Box((0,) * len(dims), tuple(view.shape)), tuple(begin), tuple(dims))


def _whole(shape: tuple[int, ...]) -> Patch:
    """Return the patch of a tensor that stays as it is; an empty one has a patch, too, or it would get lost."""
    box = full_box(shape)
    return Patch(0, box, box.offsets, tuple(Dim(dim, range(size)) for dim, size in enumerate(shape)))


def _inverse(patch: Patch) -> Patch:
    """Return the patch of the whole from a part: dims and begin change their sides.

    The part of shape (3, 4) that begins at (2, 0, 0) of a tensor of 3 dims, the first of which it does not have, fills
    the box [2:3, 0:3, 0:4] from its beginning (0, 0).
    """
    target = patch.input_box
    dims = [Dim(None)] * len(patch.begin)
    for dim, along in enumerate(patch.dims):
        if along.dim is not None:
            dims[along.dim] = Dim(dim, along.indices)
    return Patch(0, target, (0,) * len(patch.dims), tuple(dims))
