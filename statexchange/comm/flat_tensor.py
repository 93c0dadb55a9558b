"""Flat tensors: a caller's tensor or array in the layout that backends take, contiguous and with one dimension."""

from __future__ import annotations

import functools
from typing import Any, Generic, cast

import numpy as np
import torch

from statexchange.comm.backends.backend import Backend
from statexchange.comm.session import Route
from statexchange.errors import UnsupportedError
from statexchange.tensors import TensorT, as_numpy, as_torch, check_dense, check_writable, is_dtensor

__all__ = ["FlatTensor", "flat_for"]


class FlatTensor(Generic[TensorT]):
    """A caller's tensor or array, and `data`: its elements as one contiguous dimension on the backend's device.

    `data` is the caller's own memory where that is possible; else `write_back` copies it there.
    """

    def __init__(self, given: TensorT, device: str, *, written: bool) -> None:
        self.given = given
        self.tensor = tensor = _tensor_of(given, written=written)
        is_on_device = tensor.is_cpu if device == "cpu" else tensor.device.type == device
        self._is_callers_memory = is_on_device and tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj())
        if self._is_callers_memory:
            # torch calls at most one element contiguous whatever its stride, but then refuses to view it as bytes.
            is_flat = tensor.dim() == 1 and tensor.stride(0) == 1
            self.data = tensor if is_flat else tensor.as_strided((tensor.numel(),), (1,))
            return
        moved = tensor if is_on_device else tensor.to(device)
        self.data = moved.resolve_conj().resolve_neg().contiguous().view(-1)

    @property
    def text(self) -> str:
        """Dtype and shape as text."""
        return _text_of(self.tensor.dtype, self.tensor.shape)

    @property
    def bytes(self) -> torch.Tensor:
        """`data` as uint8."""
        return self.data.view(torch.uint8)

    def write_back(self) -> TensorT:
        """Write `data` to what the caller gave, and return that."""
        if not self._is_callers_memory:
            self.tensor.copy_(self.data.view(self.tensor.shape))
        if isinstance(self.given, np.ndarray):
            array = as_numpy(self.tensor)
            if not np.may_share_memory(self.given, array):
                self.given[...] = array
        return self.given

    def start_from(self, given: FlatTensor[Any]) -> torch.Tensor:
        """Return the tensor to reduce in place: for `out` a copy of `given`, as a failed call must not change `out`."""
        return self.data if given is self else given.data.clone()

    def finish_with(self, result: torch.Tensor) -> TensorT:
        """Write `result` to what the caller gave, and return that."""
        if result is not self.data:
            self.data.copy_(result)
        return self.write_back()

    @property
    def kind(self) -> str:
        """The kind of results for this caller: "array", or tensors of "cpu" or "cuda"."""
        return "array" if isinstance(self.given, np.ndarray) else self.tensor.device.type


def flat_for(route: Route, given: TensorT, *, written: bool) -> tuple[FlatTensor[TensorT], Backend]:
    """Return what a caller gave as a flat tensor, and the backend that will move it."""
    backend = route.backend_of(given)
    return FlatTensor(given, backend.device_type, written=written), backend


@functools.lru_cache(maxsize=4096)
def _text_of(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype)[6:]}{list(shape)}"


def _tensor_of(given: object, *, written: bool) -> torch.Tensor:
    if not isinstance(given, torch.Tensor):
        if isinstance(given, np.ndarray):
            return _tensor_of_array(given, written=written)
        raise UnsupportedError(f"expected a torch tensor or numpy array, not {type(given).__name__}")
    if type(given) is not torch.Tensor and is_dtensor(given):
        raise UnsupportedError("a DTensor has parts on other ranks: give its to_local()")
    check_dense(given)
    if written:
        check_writable(given)
    return given.detach() if given.requires_grad else given


def _tensor_of_array(array: np.ndarray[Any, Any], *, written: bool) -> torch.Tensor:
    if written:
        check_writable(array)
    plain = np.ascontiguousarray(array).reshape(array.shape)
    return cast("torch.Tensor", as_torch(plain if plain.flags.writeable else plain.copy()))
