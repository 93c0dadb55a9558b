"""Buckets, the flat memory in which gradients are reduced, and each parameter's view of its bucket."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from statexchange.comm.work import Work
from statexchange.errors import InvalidArgumentError, UnsupportedError
from statexchange.tensors import is_dtensor
from statexchange.train.comparison import Entry
from statexchange.train.parameters import local_part


class BucketView:
    """A parameter and its place in a bucket.

    `local` is a part of the bucket's memory, with the parameter's shape and strides. `grad` is the same memory as a
    gradient: a DTensor if the parameter is one.

    `kind` is the name of the dtype, and the device as a type and a count of this rank's devices, as "cuda 0": torch's
    own indices may differ between ranks. All parameters of a bucket have one kind.
    """

    def __init__(self, index: int, name: str, param: torch.Tensor, device: str) -> None:
        local = local_part(param, name).detach()
        self.index = index
        self.name = name
        self.param = param
        self.is_plain = not is_dtensor(param)
        self.dtype = local.dtype
        self.shape = local.shape
        self.nbytes = local.nbytes
        self.kind = str(local.dtype).removeprefix("torch."), device
        # Those of a dense tensor, also where the parameter's memory has gaps; channels_last stays.
        self.strides = torch.empty_like(local, device="meta").stride()
        self.bucket: Bucket | None = None
        self.local = self.grad = local.new_empty(0)  # until the parameter gets a bucket

    @property
    def device(self) -> torch.device:
        """The device of the parameter."""
        return local_part(self.param, self.name).device

    @property
    def entry(self) -> Entry:
        """Name, dtype, shape and device of the parameter, which ranks compare."""
        dtype, device = self.kind
        return Entry(self.name, f"{dtype}{list(self.shape)} {device}")

    def place(self, bucket: Bucket, begin: int) -> None:
        """Make this a view of `bucket` from element `begin` on."""
        self.bucket = bucket
        self.local = bucket.flat[begin : begin + self.shape.numel()].as_strided(self.shape, self.strides)
        self.grad = self.local
        if not self.is_plain:
            param: Any = self.param
            # The check would be a collective of torch's, on the mesh.
            self.grad = type(param).from_local(self.local, param.device_mesh, param.placements, run_check=False)

    def dense(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the dense local gradient; raise InvalidArgumentError if dtype or shape changed."""
        local = grad
        if not self.is_plain:
            local = local_part(grad, self.name)
        if local.dtype is not self.dtype or local.shape != self.shape:
            raise InvalidArgumentError(
                "the gradient's dtype or shape is not the parameter's when the reducer was made: call reset()",
                name=self.name,
                expected=f"{self.dtype}{list(self.shape)}",
                found=f"{local.dtype}{list(local.shape)}",
            )
        if local.layout is torch.strided:
            return local
        # Not to_dense(), which loses the only entry of a matrix of one column where autograd made it (torch 2.13).
        entries = local.coalesce()
        dense = torch.zeros(local.shape, dtype=local.dtype, device=local.device)
        return dense.index_put_(tuple(entries.indices()), entries.values())


def views_of(named: Mapping[str, torch.Tensor]) -> list[BucketView]:
    """Return a view of each parameter, which has no bucket yet. Not collective.

    Raises:
        UnsupportedError: a parameter is lazy, a meta tensor, or a DTensor that is not replicated.
        InvalidArgumentError: a tensor is no leaf of the graph.
    """
    devices: dict[torch.device, str] = {}
    views: list[BucketView] = []
    for name, parameter in named.items():
        # First, as a lazy parameter raises an error of torch's where it is asked for its shape.
        if torch.nn.parameter.is_lazy(parameter):
            raise UnsupportedError("a lazy parameter has no shape yet: run a forward first", name=name)
        if parameter.is_meta:
            raise UnsupportedError("a meta tensor has no memory: materialise it first", name=name)
        if not parameter.is_leaf:
            raise InvalidArgumentError("this tensor is no leaf of autograd's graph, and gets no gradient", name=name)
        # Counted as they come: a rank's GPU may be cuda:0, and another rank's cuda:1.
        device = local_part(parameter, name).device
        text = devices.setdefault(device, f"{device.type} {len(devices)}")
        views.append(BucketView(len(views), name, parameter, text))
    return views


class Bucket:
    """The views of several parameters in one flat tensor, and the bucket's progress in the present round.

    `num_waiting` counts the parameters whose gradient has not arrived in this round. `in_flight` is set if the bucket
    was sent during backward; `work` is its reduction, if that may still be running.
    """

    def __init__(self, views: Sequence[BucketView], flat: torch.Tensor) -> None:
        self.views = views
        self.flat = flat
        begin = 0
        for view in views:
            view.place(self, begin)
            begin += view.shape.numel()
        self.begin_round()

    def begin_round(self) -> None:
        """Wait for all gradients again; forget what was sent."""
        self.num_waiting = len(self.views)
        self.in_flight = False
        self.work: Work[Any] | None = None

    def wait(self) -> None:
        """Return when the bucket is reduced; raise the reduction's error."""
        if self.work is not None:
            self.work.wait()

    def fill(self, factor: float = 1.0) -> list[BucketView]:
        """Fill the bucket with gradients times `factor`, zeros where there is none; return the views without one."""
        missing = copy_gradients(self.views)
        for view in missing:
            view.local.zero_()
        if factor == 0:
            self.flat.zero_()  # multiplying by 0 would keep NaN
        elif factor != 1:
            self.flat.mul_(factor)
        return missing


def copy_gradients(views: Iterable[BucketView]) -> list[BucketView]:
    """Copy gradients into their views and make `.grad` the view; return the views without a gradient."""
    missing, targets, fresh = [], [], []
    for view in views:
        grad = view.param.grad
        # A gradient that is the view already was copied before, or accumulated there by another backward.
        if grad is None:
            missing.append(view)
        elif grad is not view.grad:
            targets.append(view.local)
            fresh.append(view.dense(grad))
            view.param.grad = view.grad
    if fresh:  # all at once: a call for each parameter would take longer than most copies
        torch._foreach_copy_(targets, fresh)
    return missing


def publish_gradients(views: Sequence[BucketView], has_gradient: Sequence[bool] | None) -> None:
    """Set every parameter's `.grad` to its average, or to None where `has_gradient` is False.

    `has_gradient` None means that all have one. A parameter whose bucket was dissolved keeps its gradient.
    """
    for i, view in enumerate(views):
        if has_gradient is not None and not has_gradient[i]:
            view.param.grad = None
        elif view.bucket is not None and view.param.grad is not view.grad:
            view.param.grad = view.grad
