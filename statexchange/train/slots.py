"""Slots: where gradients lie in the flat memory of a bucket, and how they get there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from statexchange.comm.work import Work
from statexchange.errors import InvalidArgumentError
from statexchange.tensors import is_dtensor
from statexchange.train.parameter_specs import local_part
from statexchange.train.reducers import densified

__all__ = ["Bucket", "Slot", "copy_in"]


class Slot:
    """A parameter's place in a bucket: `view` of the bucket's memory, and `grad`, the same as its `.grad` has it."""

    __slots__ = (
        "bucket",
        "dtype",
        "grad",
        "index",
        "name",
        "nbytes",
        "own",
        "param",
        "plain",
        "shape",
        "strides",
        "view",
    )

    def __init__(self, index: int, name: str, param: torch.Tensor) -> None:
        local = local_part(param, name).detach()
        self.index = index
        self.name = name
        self.param = param
        self.plain = not is_dtensor(param)
        self.dtype = local.dtype
        self.shape = local.shape
        self.nbytes = local.nbytes
        self.strides = torch.empty_like(local, device="meta").stride()  # dense ones are kept: channels_last
        self.bucket: Bucket | None = None
        self.view = self.grad = local.new_empty(0)  # until it lies in a bucket
        self.own: torch.Tensor | None = None  # without fusion: what the gradient lay in before

    @property
    def device(self) -> torch.device:
        """Where the parameter is."""
        return local_part(self.param, self.name).device

    def place(self, bucket: Bucket, begin: int) -> None:
        """Lie in `bucket` from element `begin`."""
        self.bucket = bucket
        self.view = bucket.flat[begin : begin + self.shape.numel()].as_strided(self.shape, self.strides)
        self.grad = self.wrapped(self.view)

    def wrapped(self, local: torch.Tensor) -> torch.Tensor:
        """`local` as this parameter's gradient."""
        if self.plain:
            return local
        param: Any = self.param
        return type(param).from_local(local, param.device_mesh, param.placements, run_check=False)  # type: ignore[no-any-return]

    def dense(self, grad: torch.Tensor) -> torch.Tensor:
        """What can be copied into the view; an error if the parameter is another than it was."""
        local = grad if self.plain else local_part(grad, self.name)
        if local.dtype is not self.dtype or local.shape != self.shape:
            raise InvalidArgumentError(
                "the gradient is not like the parameter that was given to the reducer: call its reset()",
                name=self.name,
                expected=f"{self.dtype}{list(self.shape)}",
                found=f"{local.dtype}{list(local.shape)}",
            )
        return local if local.layout is torch.strided else densified(local)


class Bucket:
    """Slots in one flat piece of memory, and how far it has come in this round."""

    __slots__ = ("flat", "fusion", "gone", "slots", "waiting", "work")

    def __init__(self, slots: Sequence[Slot], flat: torch.Tensor, *, fusion: bool) -> None:
        self.slots = slots
        self.flat = flat
        self.fusion = fusion
        begin = 0
        for slot in slots:
            slot.place(self, begin)
            begin += slot.shape.numel()
        self.begin_round()

    def begin_round(self) -> None:
        """Nothing has arrived."""
        self.waiting = len(self.slots)
        self.gone = False  # sent during backward
        self.work: Work | None = None

    def wait(self) -> None:
        """Return when it is reduced."""
        if self.work is not None:
            self.work.wait()

    def fill(self, factor: float = 1.0) -> list[Slot]:
        """Put the gradients times `factor` into the flat memory; the slots that have none, which hold zeros."""
        missing = copy_in(self.slots, fusion=self.fusion)
        for slot in missing:
            slot.view.zero_()
        if factor == 0:
            self.flat.zero_()  # not times 0: NaN would stay
        elif factor != 1:
            self.flat.mul_(factor)
        return missing


def copy_in(slots: Iterable[Slot], *, fusion: bool) -> list[Slot]:
    """Put gradients where they belong, and with fusion point `.grad` there; the slots that have none."""
    missing, views, fresh = [], [], []
    for slot in slots:
        grad = slot.param.grad
        if grad is None:
            missing.append(slot)
        elif grad is not slot.grad:
            views.append(slot.view)
            fresh.append(slot.dense(grad))
            if fusion:
                slot.param.grad = slot.grad
            elif grad.layout is torch.strided:
                slot.own = grad
    if fresh:
        torch._foreach_copy_(views, fresh)
    return missing
