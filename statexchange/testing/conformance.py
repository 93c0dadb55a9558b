"""The conformance suite of communicators, for our backends and for those of other packages.

To check a `Backend` (one with only `all_gather_bytes`, `new_group`, `send` and `recv` will do), call on each rank

    comm = conformance.communicator_of(MyBackend(...))
    conformance.run(comm)

Each check is a function that all ranks of a communicator call with it. It raises AssertionError if the communicator
violates the requirement that the check's docstring states. Tensor sizes lie on both sides of the limits at which our
own backends change their algorithms: 64 KiB, and windows of 1 MiB.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch
import torch.distributed as dist

from statexchange.comm.backends.backend import Backend
from statexchange.comm.bootstrap import form_communicator
from statexchange.comm.communicator import Communicator
from statexchange.comm.work import Work
from statexchange.errors import (
    InvalidArgumentError,
    MismatchError,
    NumericOverflowError,
    PeerError,
    StallError,
    StateExchangeError,
    UnsupportedError,
    excerpt,
)

__all__ = ["CHECKS", "Check", "communicator_of", "run"]

Act = Callable[[Communicator], Any]

_SMALL_BYTES = 1 << 16
_WINDOW_BYTES = 1 << 20
_PROMPTLY_S = 1.0
_UNTOUCHED = -77
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
_checks: list[Check] = []


@dataclass(frozen=True, slots=True)
class Check:
    """One requirement and its test.

    `name` is what `run` takes in `only`, `contract` is the requirement in words. `body` raises AssertionError on a rank
    that finds the requirement violated. A communicator of fewer than `least_ranks` ranks is not checked.
    """

    name: str
    contract: str
    body: Callable[[Communicator], None]
    least_ranks: int = 1

    def __call__(self, comm: Communicator) -> None:
        """Run the test. Collective over all ranks of `comm`."""
        self.body(comm)

    def applies_to(self, comm: Communicator) -> bool:
        """Whether `comm` has as many ranks as the check needs."""
        return comm.world_size >= self.least_ranks


def communicator_of(backend: Backend, timeout_s: float = 30.0) -> Communicator:
    """Return a communicator whose ranks communicate over `backend` only.

    Collective. Blocks until all ranks have called, `timeout_s` at most, which also bounds its later waits for peers.
    """
    return form_communicator(backend, timeout_s, prefer="transport")


def run(comm: Communicator, only: Iterable[str] | None = None) -> list[str]:
    """Run all checks that apply to `comm`, or only those that `only` names, and return the names of those that ran.

    Collective. The first failed check raises AssertionError on every rank; the message names the rank that failed and
    what it found. An unknown name raises InvalidArgumentError.
    """
    known = {check.name: check for check in CHECKS}
    names = list(known) if only is None else list(only)
    if unknown := [name for name in names if name not in known]:
        raise InvalidArgumentError(f"no check is called {', '.join(unknown)}; known: {', '.join(known)}")
    chosen = [known[name] for name in names if known[name].applies_to(comm)]
    for check in chosen:
        try:
            with comm.phase(f"the check {check.name}"):
                check(comm)
        except StateExchangeError as error:
            raise AssertionError(str(error)) from error
    return [check.name for check in chosen]


def _check(least_ranks: int = 1) -> Callable[[Callable[[Communicator], None]], Callable[[Communicator], None]]:
    """Register a function as a check; its docstring is the contract."""

    def register(body: Callable[[Communicator], None]) -> Callable[[Communicator], None]:
        contract = " ".join((body.__doc__ or "").split())
        _checks.append(Check(body.__name__, contract, body, least_ranks))
        return body

    return register


# Assertions


def _expect(condition: object, message: str) -> None:
    """Raise AssertionError unless `condition`. An assert statement would be removed by ``python -O``."""
    if not condition:
        raise AssertionError(message)


def _plain(value: Any) -> torch.Tensor:
    """Return a tensor, array or number as a contiguous CPU tensor."""
    if isinstance(value, np.ndarray):
        copy = np.array(value, order="C")
        if copy.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(copy.view(np.uint16)).view(torch.bfloat16)
        return torch.from_numpy(copy)
    tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value)
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    # A tensor of at most one element may be contiguous and have any stride; `view(torch.uint8)` requires stride 1.
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _expect_same(found: Any, expected: Any, what: str) -> None:
    """Raise unless both have equal dtype, shape and bits."""
    actual, wanted = _plain(found), _plain(expected)
    about = f"{actual.dtype}{list(actual.shape)}"
    _expect(
        (actual.dtype, actual.shape) == (wanted.dtype, wanted.shape),
        f"{what}: {about} instead of {wanted.dtype}{list(wanted.shape)}",
    )
    if np.array_equal(_bits(actual).numpy(), _bits(wanted).numpy()):  # torch.equal takes nine times as long for bytes
        return
    wrong = (actual != wanted).flatten().nonzero().flatten()
    at = int(wrong[0]) if len(wrong) else 0
    pair = f"{actual.flatten()[at].item()} instead of {wanted.flatten()[at].item()}"
    raise AssertionError(f"{what}: {len(wrong)} elements of {about} are wrong, the first at {at}: {pair}")


def _expect_all(found: Any, value: float, what: str) -> None:
    """Raise unless every element is `value`."""
    tensor = _plain(found)
    _expect_same(tensor, torch.full_like(tensor, value), what)


def _expect_equal_bits(comm: Communicator, tensor: Any, what: str) -> None:
    """Raise unless all ranks hold the same bits. Collective."""
    digest = hashlib.blake2b(_bits(_plain(tensor)).numpy().data, digest_size=8).hexdigest()
    digests = comm.all_gather_object(digest)
    _expect(len(set(digests)) == 1, f"{what}: ranks hold different bits: {digests}")


def _raised(kind: type[BaseException], what: str, act: Callable[..., Any], *args: Any, **named: Any) -> BaseException:
    """Return the error of `kind` that ``act(*args, **named)`` raises; AssertionError if it raises none."""
    try:
        result = act(*args, **named)
    except kind as error:
        return error
    raise AssertionError(f"{what}: no {kind.__name__}, but {excerpt(result, 200)}")


# Test data


def _pattern(rank: int, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return small integers that depend on rank and position.

    Sums and products over four ranks are exact in every dtype.
    """
    return _counted(shape, dtype) + rank


def _counted(shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    sizes = torch.Size((shape,) if isinstance(shape, int) else shape)
    return _one_to_thirteen(sizes.numel(), torch.empty(0).device).to(dtype).view(sizes)


@functools.lru_cache(maxsize=32)
def _one_to_thirteen(n: int, device: torch.device) -> torch.Tensor:
    return torch.arange(1, 14, dtype=torch.int8, device=device).repeat(n // 13 + 1)[:n]


def _sum(comm: Communicator, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the sum of all ranks' patterns."""
    n = comm.world_size
    return _counted(shape, dtype) * n + n * (n - 1) // 2


def _noise(rank: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Return random bits, NaNs among them; the same on every rank that asks for `rank`'s."""
    data = _random_bytes(rank, n * dtype.itemsize)
    tensor = data.view(dtype) if dtype != torch.bool else data > 127
    return tensor.to(torch.empty(0).device)


@functools.lru_cache(maxsize=32)
def _random_bytes(rank: int, nbytes: int) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(1000 * nbytes + rank)
    # Words of eight bytes take a seventh of the time that single bytes do. The upper bound is exclusive.
    words = torch.randint(-(2**63), 2**63 - 1, (nbytes // 8 + 1,), generator=generator, dtype=torch.int64, device="cpu")
    return words.view(torch.uint8)[:nbytes]


def _fresh(like: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape and dtype, filled with a value that no check expects as a result."""
    return torch.full_like(like, _UNTOUCHED if like.dtype.is_signed else 77)


def _roots(comm: Communicator) -> list[int]:
    return sorted({0, comm.world_size - 1})


def _sizes(itemsize: int) -> list[int]:
    """Return numbers of elements on both sides of each limit, odd ones, and several windows with a short last one."""
    small, window = _SMALL_BYTES // itemsize, _WINDOW_BYTES // itemsize
    return [0, 1, 1001, small, small + 1, window, window + 1, 2 * window + 12_347]


def _few_sizes(itemsize: int) -> list[int]:
    """Return one number of elements each for the smallest messages, a part of a window and several windows."""
    return [7, _SMALL_BYTES // itemsize + 1, _WINDOW_BYTES // itemsize + 1001]


# Reductions


@_check()
def inference_tensors_are_changed_in_inference_mode_only(comm: Communicator) -> None:
    """Collectives change inference tensors inside torch.inference_mode, also asynchronously, and refuse them outside.

    This check runs first: what a backend sets up in its first call, which is made here, must work outside, too.
    """
    n = comm.world_size
    with torch.inference_mode():
        ours = torch.ones(5)
        _expect_all(comm.all_reduce(ours, async_op=True).wait(), n, "asynchronous all_reduce in inference mode")
        _expect_all(comm.all_reduce(ours), n * n, "all_reduce in inference mode")
        parts = comm.all_gather(ours)
    _raised(UnsupportedError, "all_reduce of an inference tensor outside", comm.all_reduce, ours)
    _expect_all(ours, n * n, "an inference tensor")
    _expect_same(comm.all_reduce(torch.stack(list(parts)).sum(0)), torch.full((5,), float(n**4)), "a sum of results")


@_check()
def all_reduce_gives_the_values_of_lux(comm: Communicator) -> None:
    """all_reduce of f64[512] filled with rank + 1 gives N(N+1)/2 (sum) or (N+1)/2 (avg), in place or in `out`."""
    n = comm.world_size
    for op, expected in (("sum", n * (n + 1) / 2), ("avg", (n + 1) / 2)):
        ours = torch.full((512,), comm.rank + 1.0, dtype=torch.float64)
        out = torch.zeros_like(ours)
        _expect(comm.all_reduce(ours, op, out=out) is out, "all_reduce must return out")
        _expect_all(out, expected, f"all_reduce {op} into out")
        _expect_all(ours, comm.rank + 1.0, f"the input of all_reduce {op} with out")
        _expect(comm.all_reduce(ours, op) is ours, "all_reduce must return the tensor")
        _expect_all(ours, expected, f"all_reduce {op} in place")


@_check()
def broadcast_gives_the_values_of_lux(comm: Communicator) -> None:
    """A broadcast of root's f64[512] of ones writes in place, or only into `out`, on root too."""
    for root in _roots(comm):
        mine = float(comm.rank == root)
        ours = torch.full((512,), mine, dtype=torch.float64)
        out = torch.zeros_like(ours)
        _expect(comm.broadcast(ours, root=root, out=out) is out, "broadcast must return out")
        _expect_all(out, 1.0, f"out of a broadcast from {root}")
        _expect_all(ours, mine, f"the input of a broadcast from {root} with out")
        _expect(comm.broadcast(ours, root=root) is ours, "broadcast must return the tensor")
        _expect_all(ours, 1.0, f"broadcast from {root} in place")


@_check()
def reduce_gives_the_values_of_lux(comm: Communicator) -> None:
    """A reduce of rank + 1 gives N(N+1)/2 (sum) or (N+1)/2 (avg) on root; on other ranks tensor and `out` stay."""
    n = comm.world_size
    cells = [("sum", torch.float64, n * (n + 1) / 2), ("avg", torch.float64, (n + 1) / 2)]
    cells.append(("sum", torch.int64, n * (n + 1) / 2))
    for op, dtype, expected in cells:
        for root in _roots(comm):
            ours = torch.full((512 if dtype.is_floating_point else 4,), comm.rank + 1, dtype=dtype)
            out = _fresh(ours)
            found = comm.reduce(ours, op, root=root, out=out)
            _expect(found is (out if comm.rank == root else ours), "reduce must return out on root only")
            _expect_all(ours, comm.rank + 1, f"the input of reduce {op} with out")
            _expect_all(out, expected if comm.rank == root else _UNTOUCHED, f"out of a reduce {op} to {root}")
            _expect(comm.reduce(ours, op, root=root) is ours, "reduce must return the tensor")
            _expect_all(ours, expected if comm.rank == root else comm.rank + 1, f"reduce {op} to {root} in place")


@_check()
def all_reduce_gives_the_values_of_flashlight(comm: Communicator) -> None:
    """all_reduce of f32[10] filled with rank gives N(N-1) at scale 2 and (N-1)/2 at scale 1/N; f32[3, 3] is summed."""
    n = comm.world_size
    for async_op in (False, True):
        ours = torch.full((10,), float(comm.rank))
        found = comm.all_reduce(ours, scale=2.0, async_op=async_op)
        _expect((found.wait() if isinstance(found, Work) else found) is ours, "the result must be the tensor")
        _expect_all(ours, n * (n - 1), f"rank times 2, async_op {async_op}")
    ours = torch.full((10,), float(comm.rank))
    comm.all_reduce(ours, scale=1 / n)
    _expect(torch.allclose(ours * 2 * n, torch.full((10,), float(n * (n - 1)))), f"rank over N: {ours[0]}")
    nine = torch.full((3, 3), float(comm.rank))
    _expect_all(comm.all_reduce(nine), n * (n - 1) / 2, "full((3, 3), rank)")


@_check()
def all_reduce_multiple_gives_the_values_of_flashlight(comm: Communicator) -> None:
    """all_reduce_multiple of five tensors of rank + 1 gives N(N+1) at scale 2; in shared memory they are 20 MiB."""
    n = comm.world_size
    length = 1 << 20 if comm.backend == "shm" else 1 << 10
    tensors = [torch.full((length,), comm.rank + 1.0) for _ in range(5)]
    work = comm.all_reduce_multiple(tensors, scale=2.0, contiguous=True, async_op=True)
    comm.wait_all()
    _expect(work.is_completed(), "wait_all must leave no work undone")
    for tensor in tensors:
        _expect_all(tensor, n * (n + 1), "a tensor of a set")


@_check()
def ops_are_taken_by_name_and_as_reduce_op(comm: Communicator) -> None:
    """sum, avg, min, max and prod are accepted by name, by name in capitals, and as torch's ReduceOp."""
    n, names = comm.world_size, ("sum", "avg", "min", "max", "prod")
    parts = torch.stack([_pattern(rank, 101, torch.float64) * (-1) ** rank for rank in range(n)])
    expected = dict(
        zip(names, (parts.sum(0), parts.sum(0) / n, parts.amin(0), parts.amax(0), parts.prod(0)), strict=True)
    )
    torchs = {name: getattr(dist.ReduceOp, {"prod": "PRODUCT"}.get(name, name.upper())) for name in names}
    for name in names:
        for op in (name, name.upper(), torchs[name]):
            found = comm.all_reduce(parts[comm.rank].clone(), op)
            close = torch.allclose(found, expected[name], rtol=1e-15)
            _expect(close, f"{op} gives {found[:3].tolist()}, not {expected[name][:3].tolist()}")


@_check()
def every_dtype_is_reduced_correctly_or_refused(comm: Communicator) -> None:
    """Every op is right for small numbers of every dtype (booleans: or, and), or refused where no value is right."""
    for dtype in (*_FLOATS, *_INTEGERS, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.float8_e5m2):
        parts = [_small(rank, dtype) for rank in range(comm.world_size)]
        for op in ("sum", "avg", "min", "max", "prod"):
            if _is_refused(op, dtype):
                _raised(UnsupportedError, f"{op} of {dtype}", comm.all_reduce, parts[comm.rank].clone(), op)
                continue
            found, expected = comm.all_reduce(parts[comm.rank].clone(), op), _reference(op, parts)
            close = torch.allclose(found.to(expected.dtype), expected, rtol=1e-2 if dtype.itemsize == 2 else 1e-6)
            _expect(found.dtype == dtype and close, f"{op} of {dtype} gives {found[:9]}, not {expected[:9]}")


def _small(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a vector of ones, twos and threes, or of true and false."""
    numbers = (_counted(29, torch.int64) + rank) % 3
    return numbers.bool() if dtype == torch.bool else (numbers + 1).to(dtype)


def _is_refused(op: str, dtype: torch.dtype) -> bool:
    if dtype.is_complex:
        return op in ("min", "max")
    return dtype not in (*_FLOATS, *_INTEGERS, torch.bool) or (op == "avg" and dtype not in _FLOATS)


def _reference(op: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    stack = torch.stack(list(parts))
    if stack.dtype == torch.bool:
        return stack.any(0) if op in ("sum", "max") else stack.all(0)
    wide = stack.to(torch.complex128 if stack.is_complex() else torch.float64)
    if op in ("sum", "avg"):
        return wide.sum(0) / (len(parts) if op == "avg" else 1)
    if op == "prod":
        return wide.prod(0)
    return wide.amin(0) if op == "min" else wide.amax(0)


@_check()
def nan_and_infinity_do_not_depend_on_order(comm: Communicator) -> None:
    """A NaN on one rank gives NaN on all, for every op; infinities follow IEEE 754; averages do not overflow."""
    nan, inf, n = float("nan"), float("inf"), comm.world_size
    for dtype in _FLOATS:
        for op in ("sum", "avg", "min", "max", "prod"):
            ours = torch.ones(n + 1, dtype=dtype)
            ours[comm.rank] = nan
            found = comm.all_reduce(ours, op)
            _expect(bool(found[:n].isnan().all()), f"{op} of {dtype} lost a NaN: {found}")
            _expect(float(found[n]) == (n if op == "sum" else 1), f"{op} of {dtype} spread a NaN: {found}")
        ends = torch.tensor([inf if comm.rank == 0 else 2.0, -inf if comm.rank == n - 1 else 2.0], dtype=dtype)
        for op, expected in (("sum", [inf, -inf]), ("min", [2.0 if n > 1 else inf, -inf]), ("avg", [inf, -inf])):
            found = comm.all_reduce(ends.clone(), op)
            _expect_same(found, torch.tensor(expected, dtype=dtype), f"{op} of infinities of {dtype}")
        full = torch.full((5,), 60_000.0, dtype=dtype)
        _expect_same(comm.all_reduce(full.clone(), "avg"), full, f"the average of large {dtype}")


@_check()
def reductions_are_correct_at_every_size(comm: Communicator) -> None:
    """all_reduce, reduce and reduce_scatter are right at sizes on both sides of limits: float32, int8, bfloat16."""
    cells = [(torch.float32, n) for n in _sizes(4)]
    cells += [(torch.int8, n) for n in _few_sizes(8)]  # integers are added up as int64
    cells += [(torch.bfloat16, n) for n in _few_sizes(2)]
    for dtype, n in cells:
        expected = _sum(comm, n, dtype)
        _expect_same(comm.all_reduce(_pattern(comm.rank, n, dtype)), expected, f"all_reduce of {dtype}[{n}]")
        _reduce_sums(comm, n, dtype)
        _scatter_sums(comm, n, dtype)


def _reduce_sums(comm: Communicator, n: int, dtype: torch.dtype) -> None:
    for root in _roots(comm):
        ours = _pattern(comm.rank, n, dtype)
        comm.reduce(ours, root=root)
        expected = _sum(comm, n, dtype) if comm.rank == root else _pattern(comm.rank, n, dtype)
        _expect_same(ours, expected, f"reduce of {dtype}[{n}] to {root}")


def _scatter_sums(comm: Communicator, n: int, dtype: torch.dtype) -> None:
    rows = -(-n // comm.world_size)
    whole = _pattern(comm.rank, (rows * comm.world_size, 1), dtype)
    before = whole.clone()
    part = comm.reduce_scatter(whole)
    expected = _sum(comm, (rows * comm.world_size, 1), dtype)[comm.rank * rows :][:rows]
    _expect_same(part, expected, f"reduce_scatter of {dtype}[{len(whole)}, 1]")
    _expect_same(whole, before, "the input of reduce_scatter")


@_check()
def ranks_get_equal_bits(comm: Communicator) -> None:
    """All ranks get the same bits, in whatever order the backend adds, for every float dtype and size."""
    for dtype in _FLOATS:
        for n in _few_sizes(dtype.itemsize):
            generator = torch.Generator("cpu").manual_seed(comm.rank)
            values = torch.randn(n, generator=generator, device="cpu", dtype=torch.float32).to(dtype)
            for op in ("sum", "avg", "prod"):
                found = comm.all_reduce(values.clone(), op, scale=0.3)
                _expect_equal_bits(comm, found, f"all_reduce {op} of {dtype}[{n}]")


@_check()
def scale_is_applied_to_the_reduced_value(comm: Communicator) -> None:
    """`scale` multiplies the result, not the inputs: with avg, integers, async, and float16 sums out of range."""
    n = comm.world_size
    large = 3 * _WINDOW_BYTES // 4 + 5
    works = [comm.all_reduce(torch.full((large,), 1.0 + i), scale=0.5, async_op=True) for i in range(4)]
    for i, work in enumerate(works):
        _expect_all(work.wait(), n * (1.0 + i) * 0.5, "an asynchronous scaled sum")
    _expect_all(comm.all_reduce(torch.full((7,), 6.0), "avg", scale=0.5), 3.0, "half the average of 6")
    _expect_all(comm.all_reduce(torch.full((7,), 3), scale=4.0), 12 * n, "four times a sum of integers")
    _expect_all(comm.all_reduce(torch.full((7,), comm.rank), "max", scale=3), 3 * (n - 1), "three times a max")
    halves = torch.full((7,), 60_000.0, dtype=torch.float16)
    _expect_all(comm.all_reduce(halves, scale=1 / n), 60_000.0, "a float16 sum that only fits when scaled")


@_check()
def integer_overflow_is_an_error_on_every_rank(comm: Communicator) -> None:
    """A result that does not fit its integer dtype raises NumericOverflowError on all ranks; nothing is written."""
    cells = [(torch.int8, 127, "sum", 2), (torch.uint8, 200, "sum", 2.0), (torch.int64, 2**62, "prod", 4.0)]
    cells += [(torch.int32, 1, "max", 1e30), (torch.int64, 3, "sum", -(2.0**62))]
    for dtype, value, op, scale in cells:
        for n in (3, 20_001):
            ours = torch.ones(n, dtype=dtype)
            ours[-1] = value
            before, out = ours.clone(), torch.full_like(ours, 5)
            what = f"{op} of {dtype} {value}"
            error = _raised(OverflowError, what, comm.all_reduce, ours, op, scale=scale)
            _expect(isinstance(error, NumericOverflowError), f"{type(error).__name__} is not ours")
            _raised(NumericOverflowError, f"{what} into out", comm.all_reduce, ours, op, scale=scale, out=out)
            _expect_same(ours, before, f"the tensor after an overflow of {dtype}")
            _expect_all(out, 5, f"out after an overflow of {dtype}")


# Several tensors in one call


@_check()
def several_tensors_are_reduced_like_each_alone(comm: Communicator) -> None:
    """all_reduce_multiple takes tensors of mixed dtypes, shapes and layouts, and arrays, and returns them."""
    dtypes = (torch.float32, torch.float64, torch.int16, torch.bfloat16, torch.float32)
    shapes: tuple[tuple[int, ...], ...] = ((5,), (2, 3), (), (0, 3), (70_001,))
    for contiguous in (True, False):
        tensors: list[Any] = [_pattern(comm.rank, s, d) for s, d in zip(shapes, dtypes, strict=True)]
        tensors.append(_pattern(comm.rank, (6, 4)).t())
        tensors.append(_pattern(comm.rank, (4, 3)).cpu().numpy()[::2])
        expected: list[Any] = [_sum(comm, s, d) for s, d in zip(shapes, dtypes, strict=True)]
        expected += [_sum(comm, (6, 4)).t(), _sum(comm, (4, 3))[::2]]
        found = comm.all_reduce_multiple(tensors, contiguous=contiguous)
        _expect(len(found) == len(tensors), "all_reduce_multiple must return its tensors")
        for i, (ours, tensor, theirs) in enumerate(zip(found, tensors, expected, strict=True)):
            _expect(ours is tensor, "all_reduce_multiple must return its own arguments")
            _expect_same(ours, theirs, f"tensor {i} of several, contiguous={contiguous}")


@_check()
def several_tensors_take_op_scale_and_async(comm: Communicator) -> None:
    """all_reduce_multiple takes op, scale and async_op as all_reduce does; an empty list completes and stays empty."""
    n = comm.world_size
    for contiguous in (True, False):
        pair = [torch.full((3,), comm.rank + 1.0), torch.full((2,), comm.rank + 1.0, dtype=torch.float64)]
        work = comm.all_reduce_multiple(pair, "avg", scale=2.0, contiguous=contiguous, async_op=True)
        _expect(isinstance(work, Work), "async_op must give a Work")
        for tensor in work.wait():
            _expect_all(tensor, n + 1.0, "twice the average of several")
        _expect(list(comm.all_reduce_multiple([], contiguous=contiguous)) == [], "an empty list must stay empty")
    _expect(list(comm.all_reduce_multiple([], async_op=True).wait()) == [], "an empty list must stay empty")


# Collectives that move data


@_check()
def moves_keep_every_bit_at_every_size(comm: Communicator) -> None:
    """broadcast, all_gather, gather, scatter and all_to_all keep every bit, at sizes on both sides of limits."""
    dtypes = (torch.float32, torch.uint8, torch.float8_e4m3fn, torch.complex64, torch.uint16, torch.bool)
    cells = [(torch.float32, n) for n in _sizes(4)] + [(torch.uint8, _WINDOW_BYTES + 1)]
    for i, (dtype, n) in enumerate(cells + [(dtype, 997) for dtype in dtypes]):
        theirs = [_noise(rank, n, dtype) for rank in range(comm.world_size)]
        _moves_with_root(comm, theirs, _roots(comm)[i % len(_roots(comm))])
        for rank, part in enumerate(comm.all_gather(theirs[comm.rank])):
            _expect_same(part, theirs[rank], f"part {rank} of all_gather of {dtype}[{n}]")
        for rank, part in enumerate(comm.all_to_all([part[comm.rank :] for part in theirs])):
            _expect_same(part, theirs[comm.rank][rank:], f"part {rank} of all_to_all of {dtype}[{n}]")


def _moves_with_root(comm: Communicator, theirs: list[torch.Tensor], root: int) -> None:
    what, ours = f"{theirs[0].dtype}[{len(theirs[0])}] with root {root}", comm.rank == root
    target = theirs[root].clone() if ours else torch.zeros_like(theirs[0])
    _expect_same(comm.broadcast(target, root=root), theirs[root], f"broadcast of {what}")
    parts = comm.gather(theirs[comm.rank], root=root)
    _expect(len(parts) == (comm.world_size if ours else 0), f"gather of {what} gave {len(parts)} parts")
    for rank, part in enumerate(parts):
        _expect_same(part, theirs[rank], f"part {rank} of gather of {what}")
    part = comm.scatter(theirs if ours else None, root=root)
    _expect_same(part, theirs[comm.rank], f"scatter of {what}")


@_check()
def parts_may_differ_in_shape_and_dtype(comm: Communicator) -> None:
    """Tensors that scatter and all_to_all deliver have the shape and dtype that they had on the sender."""
    n, dtypes = comm.world_size, (torch.float64, torch.uint8, torch.bool, torch.bfloat16)

    def part(src: int, dst: int) -> torch.Tensor:
        shape = (src, dst + 1, 3) if (src + dst) % 3 else (src + 1, 150_001)
        return _noise(src * n + dst, torch.Size(shape).numel(), dtypes[(src + dst) % 4]).view(shape)

    for root in _roots(comm):
        tensors = [part(root, dst) for dst in range(n)] if comm.rank == root else None
        _expect_same(comm.scatter(tensors, root=root), part(root, comm.rank), f"scatter from {root}")
    found = comm.all_to_all([part(comm.rank, dst) for dst in range(n)])
    for src, ours in enumerate(found):
        _expect_same(ours, part(src, comm.rank), f"the tensor that all_to_all delivered from {src}")


@_check()
def results_share_no_memory_with_arguments(comm: Communicator) -> None:
    """all_gather, gather, scatter, reduce_scatter and all_to_all return new memory, and leave their arguments alone."""
    ours = _pattern(comm.rank, (comm.world_size, 3))
    results = [*comm.all_gather(ours), *comm.gather(ours), comm.reduce_scatter(ours)]
    results += [comm.scatter([ours] * comm.world_size), *comm.all_to_all([ours] * comm.world_size)]
    for result in results:
        result.fill_(_UNTOUCHED)
    _expect_same(ours, _pattern(comm.rank, (comm.world_size, 3)), "an argument, after the results were overwritten")


# Point to point


@_check(least_ranks=2)
def messages_arrive_in_order(comm: Communicator) -> None:
    """Tensors sent round a ring arrive in order, at every size, asynchronously or not; recv returns its tensor."""
    following, before = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    sizes = _sizes(4)
    works = [comm.send(_noise(comm.rank, n, torch.float32), following, async_op=True) for n in sizes]
    for n in sizes:
        into = torch.zeros(n)
        _expect(comm.recv(into, before) is into, "recv must return its tensor")
        _expect_same(into, _noise(before, n, torch.float32), f"float32[{n}] from rank {before}")
    for work in works:
        work.wait()
    targets = [torch.zeros(5) for _ in range(3)]
    receives = [comm.recv(target, before, async_op=True) for target in targets]
    for i in range(3):
        comm.send(torch.full((5,), 10.0 * comm.rank + i), following)
    for i, receive in enumerate(receives):
        _expect_all(receive.wait(), 10.0 * before + i, f"message {i} of three from rank {before}")


@_check(least_ranks=2)
def send_and_recv_must_agree_on_shape_and_dtype(comm: Communicator) -> None:
    """A send and a recv that differ in shape or dtype raise MismatchError on both ranks, with both lines of code.

    The communicator works afterwards.
    """
    pairs: list[tuple[Act, Act]] = [
        (lambda c: c.send(torch.ones(3), 1), lambda c: c.recv(torch.ones(4), 0)),
        (lambda c: c.send(torch.ones(3), 1), lambda c: c.recv(torch.ones(3).double(), 0)),
        (lambda c: c.send(torch.ones(9**6), 1), lambda c: c.recv(torch.ones(3), 0)),
    ]
    for send, recv in pairs:
        if comm.rank < 2:
            act = (send, recv)[comm.rank]
            error = _raised(MismatchError, "send and recv that differ", act, comm)
            _expect_sites(error, send, recv)
    _expect_it_still_works(comm)


@_check()
def send_and_recv_refuse_ranks_that_are_no_peers(comm: Communicator) -> None:
    """Sending to, or receiving from, itself or an absent rank raises InvalidArgumentError on the calling rank only."""
    for peer in (comm.rank, comm.world_size, -1):
        _raised(InvalidArgumentError, f"send to {peer}", comm.send, torch.ones(3), peer)
        _raised(InvalidArgumentError, f"recv from {peer}", comm.recv, torch.ones(3), peer)
    comm.barrier()


# Layouts


def _layouts(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return tensors of shape (4, 6) with different layouts in memory."""

    def memory(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    return {
        "contiguous": memory(4, 6),
        "transposed": memory(6, 4).t(),
        "sliced with steps": memory(8, 18)[::2, 1::3],
        "inside a larger storage": memory(100)[11:35].view(4, 6),
        "a block of rows and columns": memory(9, 9)[3:7, 2:8],
        "a column of a larger one": memory(4, 6, 3)[:, :, 1],
    }


def _other_layouts(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return tensors of various shapes and layouts."""
    return {
        "0-d": torch.zeros((), dtype=dtype),
        "0-d inside a larger storage": torch.zeros(9, dtype=dtype)[4],
        "empty": torch.zeros((0, 5), dtype=dtype),
        "empty, with a step": torch.zeros(8, dtype=dtype)[3:3:2],
        "one element, with a step": torch.zeros(8, dtype=dtype)[3:5:2],
        "empty inside a larger storage": torch.zeros((7, 5), dtype=dtype)[3:3],
        "permuted": torch.zeros((2, 3, 4), dtype=dtype).permute(2, 0, 1),
        "channels_last": torch.zeros((2, 3, 4, 5), dtype=dtype).to(memory_format=torch.channels_last),
        "diagonal": torch.zeros((7, 7), dtype=dtype).diagonal(),
        "dimension of one": torch.zeros((6, 4), dtype=dtype)[:, 1:2],
        "large, sliced with a step": torch.zeros((_SMALL_BYTES + 99, 2), dtype=dtype)[:, 1],
        "large, transposed": torch.zeros((301, 203), dtype=dtype).t(),
    }


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return all elements of the storage of `tensor`."""
    n = tensor.untyped_storage().nbytes() // tensor.itemsize
    return tensor.as_strided((n,), (1,), 0)


def _beside(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of the storage that do not belong to `tensor`, as a vector."""
    memory = _memory_of(tensor)
    mask = torch.ones(memory.shape, dtype=torch.bool)
    mask.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(False)
    return memory[mask]


@contextlib.contextmanager
def _only_the_tensor_changes(tensor: torch.Tensor, what: str) -> Iterator[None]:
    """Expect that the block changes nothing in the storage but `tensor`, and neither its address nor its strides."""
    before, layout = _beside(tensor).clone(), (tensor.data_ptr(), tensor.stride())
    yield
    _expect_same(_beside(tensor), before, f"the storage beside the tensor that is {what}")
    _expect((tensor.data_ptr(), tensor.stride()) == layout, f"the tensor that is {what} was moved")


@_check()
def results_are_written_in_place_in_every_layout(comm: Communicator) -> None:
    """Results are written in place, and nothing beside them, into tensors of every layout.

    Transposed, with steps, 0-d, empty, channels_last, inside a larger storage.
    """
    for dtype in (torch.float32, torch.int16):
        layouts = {**_layouts(dtype), **_other_layouts(dtype)}
        for what, tensor in layouts.items():
            _memory_of(tensor).fill_(_UNTOUCHED)
            shape = tensor.shape
            for verb, expected in (("all_reduce", _sum(comm, shape, dtype)), ("broadcast", _pattern(0, shape, dtype))):
                tensor.copy_(_pattern(comm.rank, shape, dtype))
                with _only_the_tensor_changes(tensor, what):
                    found = getattr(comm, verb)(tensor)
                _expect(found is tensor, f"{verb} must return the tensor that is {what}")
                _expect_same(tensor, expected, f"{verb} of a tensor that is {what}")
            _write_out(comm, tensor, what)


def _write_out(comm: Communicator, out: torch.Tensor, what: str) -> None:
    """Write into `out`, whose layout is `what`, from a contiguous tensor."""
    shape, dtype, last = out.shape, out.dtype, comm.world_size - 1
    ours = _pattern(comm.rank, shape, dtype)
    with _only_the_tensor_changes(out, what):
        _expect_same(comm.all_reduce(ours, out=out), _sum(comm, shape, dtype), f"all_reduce into out, {what}")
        _expect_same(
            comm.broadcast(ours, root=last, out=out), _pattern(last, shape, dtype), f"broadcast into out, {what}"
        )
        out.fill_(_UNTOUCHED)
        comm.reduce(ours, out=out)
    if comm.rank == 0:
        _expect_same(out, _sum(comm, shape, dtype), f"reduce into out, {what}")
    else:
        _expect_all(out, _UNTOUCHED, f"out of a reduce to another rank that is {what}")


@_check()
def ranks_may_use_different_layouts(comm: Communicator) -> None:
    """Only shape and dtype must agree: a tensor may be transposed on one rank and a slice on another."""
    for turn in range(6):
        ours = list(_layouts(torch.float32).values())[(turn + comm.rank) % 6]
        ours.copy_(_pattern(comm.rank, (4, 6)))
        for rank, part in enumerate(comm.all_gather(ours)):
            _expect_same(part, _pattern(rank, (4, 6)), f"all_gather, part {rank}")
        parts = comm.all_to_all([ours] * comm.world_size)
        for rank, part in enumerate(parts):
            _expect_same(part, _pattern(rank, (4, 6)), f"all_to_all, part {rank}")
        tensors = [ours] * comm.world_size if comm.rank == 0 else None
        _expect_same(comm.scatter(tensors), _pattern(0, (4, 6)), "scatter")
        _expect_same(comm.all_reduce(ours), _sum(comm, (4, 6)), "all_reduce")


@_check()
def only_some_ranks_may_pass_out_or_async_op(comm: Communicator) -> None:
    """Each rank decides for itself whether it passes `out`, and whether it passes `async_op`."""
    for n in (7, _SMALL_BYTES // 4 + 1, _WINDOW_BYTES // 4 + 1):
        for chosen in _roots(comm):
            out = torch.zeros(n) if comm.rank == chosen else None
            found = comm.all_reduce(_pattern(comm.rank, n), out=out)
            _expect_same(found, _sum(comm, n), f"all_reduce of {n} where rank {chosen} passes out")
            found = comm.broadcast(_pattern(comm.rank, n), out=out)
            _expect_same(found, _pattern(0, n), f"broadcast of {n} where rank {chosen} passes out")
            work = comm.all_reduce(_pattern(comm.rank, n), async_op=comm.rank == chosen)
            found = work.wait() if isinstance(work, Work) else work
            _expect_same(found, _sum(comm, n), f"all_reduce of {n} where rank {chosen} waits later")


@_check(least_ranks=2)
def strided_tensors_can_be_sent_and_received(comm: Communicator) -> None:
    """Tensors of every layout can be sent and received, and recv writes nothing beside its tensor."""
    for what, tensor in {**_layouts(torch.float32), **_other_layouts(torch.float32)}.items():
        _memory_of(tensor).fill_(_UNTOUCHED)
        if comm.rank == 0:
            tensor.copy_(_pattern(0, tensor.shape))
            comm.send(tensor, comm.world_size - 1)
        if comm.rank == comm.world_size - 1:
            with _only_the_tensor_changes(tensor, what):
                comm.recv(tensor, 0)
            _expect_same(tensor, _pattern(0, tensor.shape), f"recv into a tensor that is {what}")


@_check()
def conjugate_and_negative_views_hold_the_result(comm: Communicator) -> None:
    """A lazy conjugate or negative view holds the result after the call like any tensor, or is refused on all ranks."""
    n = comm.world_size
    for kind in ("conjugate", "negative"):
        memory = torch.zeros(4, dtype=torch.complex64)
        view = memory.conj() if kind == "conjugate" else memory.conj().imag
        view.fill_(comm.rank + 1)
        with contextlib.suppress(UnsupportedError):
            comm.all_reduce(view)
            _expect_all(view.real if kind == "conjugate" else view, n * (n + 1) / 2, f"a {kind} view")


@_check()
def the_default_device_has_no_effect(comm: Communicator) -> None:
    """Under any default device of torch all operations work, and results are on the device of their arguments."""
    n, ours = comm.world_size, _pattern(comm.rank, (comm.world_size, 3))
    following, before = (comm.rank + 1) % n, (comm.rank - 1) % n
    integers, into, array = _pattern(comm.rank, 5, torch.int64), torch.zeros(n, 3), np.ones(3)
    with torch.device("meta"):
        found = [*comm.all_gather(ours), *comm.gather(ours), comm.scatter([ours] * n), *comm.all_to_all([ours] * n)]
        found += [comm.reduce_scatter(ours), comm.broadcast(ours.clone()), comm.all_reduce(ours.clone())]
        found += comm.all_reduce_multiple([ours.clone(), integers, ours.clone()])
        arrays = [comm.all_reduce(array), comm.scatter([array] * n)]
        shared = comm.empty((3,), torch.float32)
        if n > 1:
            work = comm.send(ours, following, async_op=comm.rank % 2 == 0)
            comm.recv(into, before)
            if isinstance(work, Work):
                work.wait()
    _expect(all(tensor.device == ours.device for tensor in found), "a result is on another device")
    _expect(shared.device.type == "cpu", f"empty gave a tensor on {shared.device}")
    _expect_same(found[-1], _sum(comm, (n, 3)), "all_reduce_multiple")
    _expect_same(integers, _sum(comm, 5, torch.int64), "all_reduce of integers")
    _expect_all(arrays[0], n, "all_reduce of an array")
    _expect_same(into, _pattern(before, (n, 3)) if n > 1 else torch.zeros(n, 3), "recv")


# Tensors that require grad, and numpy's arrays


@_check()
def leaves_that_require_grad_stay_leaves(comm: Communicator) -> None:
    """Parameters and tensors that require grad are written in place, also as `out`, and stay leaves without grad_fn."""
    n = comm.world_size
    for make in (lambda: torch.ones(5, requires_grad=True), lambda: torch.nn.Parameter(torch.ones(5))):
        for act in _writers(make):
            leaf, what, expected = act(comm)
            _expect(leaf.is_leaf and leaf.requires_grad and leaf.grad_fn is None, f"after {what} the tensor is no leaf")
            _expect_all(leaf, expected if expected else n, what)
    received = [*comm.all_gather(torch.ones(5, requires_grad=True)), comm.broadcast(torch.nn.Parameter(torch.ones(5)))]
    _expect(all(tensor.grad_fn is None for tensor in received), "a result has a grad_fn")


def _writers(make: Callable[[], torch.Tensor]) -> list[Callable[[Communicator], tuple[torch.Tensor, str, float]]]:
    """Return functions that each write into a new tensor of `make`.

    Each returns the tensor, a description, and the value that its elements must have (0: world size).
    """

    def in_place(comm: Communicator) -> tuple[torch.Tensor, str, float]:
        leaf = make()
        _expect(comm.all_reduce(leaf) is leaf, "all_reduce must return the leaf")
        return leaf, "all_reduce", 0

    def out(comm: Communicator) -> tuple[torch.Tensor, str, float]:
        leaf = make()
        comm.all_reduce(torch.ones(5), out=leaf)
        return leaf, "all_reduce into out", 0

    def several(comm: Communicator) -> tuple[torch.Tensor, str, float]:
        leaf = make()
        comm.all_reduce_multiple([leaf, torch.ones(2)])
        return leaf, "all_reduce_multiple", 0

    def broadcast(comm: Communicator) -> tuple[torch.Tensor, str, float]:
        leaf = make()
        comm.broadcast(leaf, root=comm.world_size - 1)
        return leaf, "broadcast", 1

    def later(comm: Communicator) -> tuple[torch.Tensor, str, float]:
        leaf = make()
        comm.all_reduce(leaf, "max", async_op=True).wait()
        return leaf, "asynchronous all_reduce", 1

    return [in_place, out, several, broadcast, later]


def _arrays(comm: Communicator) -> dict[str, np.ndarray[Any, Any]]:
    """Return arrays of shape (3, 4) that hold this rank's pattern."""
    values = _pattern(comm.rank, (3, 4)).cpu().numpy()
    stepped = np.zeros((6, 8), np.float32)[::2, ::2]
    stepped[...] = values
    backwards = np.zeros((3, 4), np.int64)[:, ::-1]
    backwards[...] = values
    half, double = values.astype(np.float16), np.asfortranarray(values.astype(np.float64))
    bfloat16 = values.astype(ml_dtypes.bfloat16)
    stepped_bfloat16 = np.zeros((3, 8), ml_dtypes.bfloat16)[:, ::2]
    stepped_bfloat16[...] = bfloat16
    return {
        "stepped": stepped,
        "backwards": backwards,
        "float16": half,
        "Fortran": double,
        "bfloat16": bfloat16,
        "stepped bfloat16": stepped_bfloat16,
    }


@_check()
def numpy_arrays_are_accepted_in_place_of_tensors(comm: Communicator) -> None:
    """Arrays are written in place, also strided ones and ml_dtypes' bfloat16; new results are arrays, too."""
    for what, array in _arrays(comm).items():
        before = _plain(array).clone()
        dtype = before.dtype
        out = np.zeros_like(array)
        _expect(comm.all_reduce(array, out=out) is out, "all_reduce must return out")
        _expect_same(out, _sum(comm, (3, 4), dtype), f"all_reduce of an array that is {what} into out")
        _expect_same(array, before, f"the input array, {what}, with out")
        parts = comm.all_gather(array)
        _expect(all(isinstance(part, np.ndarray) and part.dtype == array.dtype for part in parts), f"types of {what}")
        for rank, part in enumerate(parts):
            _expect_same(part, _pattern(rank, (3, 4), dtype), f"all_gather of an array that is {what}")
        _expect(comm.all_reduce(array) is array, "all_reduce must return the array")
        _expect_same(array, _sum(comm, (3, 4), dtype), f"all_reduce of an array that is {what}")
        _expect_same(comm.broadcast(out, root=comm.world_size - 1), array, "broadcast of an array")


@_check()
def read_only_arrays_can_be_read(comm: Communicator) -> None:
    """A read-only array may be reduced into `out`, gathered, and broadcast by root; as a target it is refused."""
    array = np.arange(6.0) + comm.rank
    array.flags.writeable = False
    expected = sum(np.arange(6.0) + rank for rank in range(comm.world_size))
    _expect_same(comm.all_reduce(array, out=np.zeros(6)), expected, "all_reduce of a read-only array into out")
    _expect(len(comm.all_gather(array)) == comm.world_size, "all_gather of a read-only array")
    found = comm.broadcast(array if comm.rank == 0 else np.zeros(6))
    _expect_same(found, np.arange(6.0), "broadcast of root's read-only array")
    _raised(InvalidArgumentError, "all_reduce of a read-only array", comm.all_reduce, array)
    _expect_same(array, np.arange(6.0) + comm.rank, "a read-only array")


# Refusals


@_check()
def impossible_arguments_are_refused_on_every_rank(comm: Communicator) -> None:
    """A dtype without a right result raises UnsupportedError (a TypeError), a wrong value InvalidArgumentError."""
    n, ones = comm.world_size, torch.ones(4)
    expanded, wrong = torch.zeros(1).expand(4), torch.zeros(5)
    invalid: dict[str, Callable[[], Any]] = {
        "an unknown op": lambda: comm.all_reduce(ones, "median"),
        "an expanded target": lambda: comm.all_reduce(expanded),
        "an expanded out": lambda: comm.all_reduce(ones, out=expanded),
        "an out of another shape": lambda: comm.all_reduce(ones, out=wrong),
        "an out of another dtype": lambda: comm.broadcast(ones, out=wrong[:4].double()),
        "an absent root": lambda: comm.broadcast(ones, root=n),
        "a negative root": lambda: comm.reduce(ones, root=-1),
        "too many tensors": lambda: comm.all_to_all([ones] * (n + 1)),
        "too few tensors": lambda: comm.scatter([ones] * (n - 1)),
        "a 0-d reduce_scatter": lambda: comm.reduce_scatter(torch.tensor(1.0)),
    }
    unsupported: dict[str, Callable[[], Any]] = {
        "an average of integers": lambda: comm.all_reduce(torch.ones(4, dtype=torch.int32), "avg"),
        "an average of booleans": lambda: comm.reduce(torch.ones(4, dtype=torch.bool), "avg"),
        "integers scaled by a half": lambda: comm.all_reduce(torch.ones(4, dtype=torch.int64), scale=0.5),
        "a sum of float8": lambda: comm.all_reduce(torch.zeros(4, dtype=torch.float8_e4m3fn)),
        "the minimum of complex numbers": lambda: comm.reduce_scatter(torch.ones(n, dtype=torch.complex64), "min"),
        "a list": lambda: comm.all_gather([1.0, 2.0]),
        "a sparse tensor": lambda: comm.all_reduce(torch.eye(3).to_sparse()),
        "an array of objects": lambda: comm.broadcast(np.array([None, 1])),
    }
    for what, act in invalid.items():
        _raised(InvalidArgumentError, what, act)
    for what, act in unsupported.items():
        _expect(isinstance(_raised(UnsupportedError, what, act), TypeError), f"{what}: no TypeError")
    _expect_all(ones, 1.0, "a tensor of refused calls")
    _expect_all(wrong, 0.0, "an out of refused calls")
    _expect_it_still_works(comm)


@_check(least_ranks=2)
def a_refusal_on_one_rank_is_an_error_on_all(comm: Communicator) -> None:
    """If one rank's arguments are refused, all ranks raise the refusal, and the communicator works afterwards."""
    read_only = np.ones(4)
    read_only.flags.writeable = False
    cells: list[tuple[type[BaseException], Act, Act]] = [
        (
            UnsupportedError,
            lambda c: c.all_reduce(torch.ones(4, dtype=torch.int32), "avg"),
            lambda c: c.all_reduce(torch.ones(4), "avg"),
        ),
        (ValueError, lambda c: c.all_reduce(read_only), lambda c: c.all_reduce(np.ones(4))),
        (ValueError, lambda c: c.all_reduce(torch.ones(1).expand(4)), lambda c: c.all_reduce(torch.ones(4))),
        (ValueError, lambda c: c.broadcast(torch.ones(4), root=99), lambda c: c.broadcast(torch.ones(4))),
        (ValueError, lambda c: c.all_reduce(torch.ones(4), out=torch.ones(3)), lambda c: c.all_reduce(torch.ones(4))),
        (UnsupportedError, lambda c: c.all_gather(None), lambda c: c.all_gather(torch.ones(4))),
        (ValueError, lambda c: c.all_to_all([]), lambda c: c.all_to_all([torch.ones(4)] * c.world_size)),
        (UnsupportedError, lambda c: c.all_reduce_multiple([None]), lambda c: c.all_reduce_multiple([torch.ones(4)])),
    ]
    for kind, bad, good in cells:
        for chosen in (0, comm.world_size - 1):
            act = bad if comm.rank == chosen else good
            _raised(kind, "a refusal on one rank", act, comm)
            later = bad if comm.rank == chosen else functools.partial(_asynchronously, good)
            _raised(kind, "a refusal of asynchronous work", later, comm)
    _expect_it_still_works(comm)


@_check(least_ranks=2)
def wrong_types_on_one_rank_are_an_error_on_all(comm: Communicator) -> None:
    """An argument of a wrong type raises on its rank, and within a second on ranks with valid arguments, too."""
    cells: list[tuple[Callable[[Any], Any], Act]] = [
        (lambda c: c.all_to_all(None), lambda c: c.all_to_all([torch.ones(4)] * c.world_size)),
        (lambda c: c.all_reduce_multiple(7), lambda c: c.all_reduce_multiple([torch.ones(4)])),
        (lambda c: c.all_reduce(torch.ones(4), ["sum"]), lambda c: c.all_reduce(torch.ones(4))),
        (lambda c: c.all_reduce(torch.ones(4), scale="half"), lambda c: c.all_reduce(torch.ones(4))),
        (lambda c: c.broadcast(torch.ones(4), root="me"), lambda c: c.broadcast(torch.ones(4))),
        (lambda c: c.empty((3,), "float32"), lambda c: c.empty((3,), torch.float32)),
        (lambda c: c.gather_object(1, root=-1), lambda c: c.gather_object(1)),
    ]
    for bad, good in cells:
        for chosen in (0, comm.world_size - 1):
            comm.barrier()
            began = time.monotonic()
            _raised(Exception, f"a wrong type at {_site(bad)}", bad if comm.rank == chosen else good, comm)
            took = time.monotonic() - began
            _expect(took < _PROMPTLY_S, f"a wrong type at {_site(bad)} was reported after {took:.1f} s")
    _expect_it_still_works(comm)


def _asynchronously(act: Act, comm: Communicator) -> Any:
    """Run `act` with `async_op=True` added to its call, and wait for the result."""
    return act(_AsyncOperations(comm)).wait()  # type: ignore[arg-type]


class _AsyncOperations:
    """A communicator that adds `async_op=True` to every call."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.world_size = comm.world_size

    def __getattr__(self, verb: str) -> Any:
        return functools.partial(getattr(self._comm, verb), async_op=True)


# Asynchronous work


@_check()
def asynchronous_calls_keep_their_order(comm: Communicator) -> None:
    """Every operation takes `async_op`; `wait` returns what the call would have; operations keep their order."""
    n, last = comm.world_size, comm.world_size - 1
    ours = _pattern(comm.rank, (n, 5))
    into = torch.zeros(n, 5)
    total = _sum(comm, (n, 5))
    works: dict[str, Work[Any]] = {
        "all_reduce": comm.all_reduce(ours, out=into, async_op=True),
        "broadcast": comm.broadcast(into, root=last, async_op=True),  # of the sum
        "reduce": comm.reduce(ours.clone(), root=last, async_op=True),
        "all_gather": comm.all_gather(ours, async_op=True),
        "gather": comm.gather(ours, root=last, async_op=True),
        "scatter": comm.scatter(list(ours) if comm.rank == last else None, root=last, async_op=True),
        "reduce_scatter": comm.reduce_scatter(ours, async_op=True),
        "all_to_all": comm.all_to_all(list(ours), async_op=True),
    }
    comm.wait_all()
    _expect(all(isinstance(work, Work) and work.is_completed() for work in works.values()), "wait_all left work undone")
    found = {verb: work.wait() for verb, work in works.items()}
    _expect(works["all_gather"].wait() is found["all_gather"], "a second wait must give the same")
    _expect_same(found["broadcast"], total, "a broadcast of what was summed before")
    _expect_same(found["reduce"], total if comm.rank == last else ours, "reduce")
    _expect_same(torch.stack(found["all_gather"])[last], _pattern(last, (n, 5)), "all_gather")
    _expect(len(found["gather"]) == (n if comm.rank == last else 0), "gather")
    _expect_same(found["scatter"], _pattern(last, (n, 5))[comm.rank], "scatter")
    _expect_same(found["reduce_scatter"], total[comm.rank : comm.rank + 1], "reduce_scatter")
    _expect_same(found["all_to_all"][last], _pattern(last, (n, 5))[comm.rank], "all_to_all")


@_check(least_ranks=2)
def work_completes_when_all_ranks_have_called(comm: Communicator) -> None:
    """Until all ranks have called, `is_completed` is false and `wait` with a timeout raises StallError."""
    began = time.monotonic()
    comm.barrier()
    if comm.rank == 0:
        work = comm.all_reduce(torch.ones(3), async_op=True)
        done = work.is_completed()
        if time.monotonic() - began < 0.2:  # the others are surely still asleep
            _expect(not done, "work cannot be completed before all ranks have called")
            _raised(StallError, "waiting for 20 ms", work.wait, 0.02)
        _expect_all(work.wait(), comm.world_size, "the sum")
        _expect(work.is_completed(), "work is completed after wait")
    else:
        time.sleep(0.3)
        comm.all_reduce(torch.ones(3))


@_check(least_ranks=2)
def send_and_recv_do_not_wait_for_collectives(comm: Communicator) -> None:
    """Sends and receives do not wait for collectives under way: the last rank calls one only after it has received."""
    last, n = comm.world_size - 1, 70_001
    if comm.rank == last:
        _expect_same(comm.recv(torch.zeros(n), 0), _pattern(0, n), "a message sent during a collective")
        work = comm.all_reduce(_pattern(comm.rank, n), async_op=True)
        comm.send(_pattern(comm.rank, n), 0)
    else:
        work = comm.all_reduce(_pattern(comm.rank, n), async_op=True)
        if comm.rank == 0:
            comm.send(_pattern(0, n), last)
            _expect_same(comm.recv(torch.zeros(n), last), _pattern(last, n), "a message received during a collective")
    _expect_same(work.wait(), _sum(comm, n), "the collective")


@_check()
def a_blocking_call_does_not_overtake_earlier_work(comm: Communicator) -> None:
    """A blocking call returns only after the asynchronous work that was begun before it is completed."""
    n = comm.world_size
    for follow in ("all_reduce", "barrier", "object", "agree"):
        tensor = torch.full((100_001,), 1.0)
        work = comm.all_reduce(tensor, async_op=True)
        if follow == "all_reduce":
            _expect_all(comm.all_reduce(tensor), n * n, "a sum of sums")
        elif follow == "barrier":
            comm.barrier()
        elif follow == "object":
            _expect(comm.all_gather_object(comm.rank) == list(range(n)), "objects after work")
        else:
            comm.agree()
        _expect(work.is_completed(), f"{follow} overtook the work")
    comm.wait_all()
    comm.wait_all()  # with nothing to wait for


# Objects and agreement


@_check()
def objects_arrive_unchanged(comm: Communicator) -> None:
    """Objects arrive equal: JSON values with tuples, NaN, integer keys and long text, from any root and to any root."""
    n = comm.world_size
    theirs = [{"rank": rank, 3: (1, None, "x" * 5000 * rank), "nested": [[rank], {}]} for rank in range(n)]
    _expect(comm.all_gather_object(theirs[comm.rank]) == theirs, "all_gather_object")
    for root in _roots(comm):
        found = comm.gather_object(theirs[comm.rank], root=root)
        _expect(found == (theirs if comm.rank == root else []), f"gather_object on {root}")
        received = comm.broadcast_object(theirs[root] if comm.rank == root else None, root=root)
        _expect(received == theirs[root], f"broadcast_object from {root}")
    nan = comm.broadcast_object(float("nan") if comm.rank == 0 else 0.0)
    _expect(nan != nan, f"NaN arrived as {nan}")
    _raised(InvalidArgumentError, "an absent root", comm.gather_object, 1, root=n)


@_check()
def a_barrier_waits_for_all_ranks(comm: Communicator) -> None:
    """Files that ranks create before a barrier exist after it; if ranks remove them, they are gone after the next."""
    node = comm.node
    directory = node.broadcast_object(tempfile.mkdtemp() if node.rank == 0 else None)
    try:
        time.sleep(0.02 * comm.rank)
        ours = os.path.join(directory, str(node.rank))
        open(ours, "w").close()
        comm.barrier()
        found = sorted(os.listdir(directory))
        _expect(found == sorted(str(rank) for rank in range(node.world_size)), f"after the first barrier: {found}")
        comm.barrier(tag="all have looked")
        os.unlink(ours)
        comm.barrier(20.0)
        _expect(not os.listdir(directory), f"after the last barrier: {os.listdir(directory)}")
        comm.barrier()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@_check()
def agree_raises_the_error_of_one_rank_on_all(comm: Communicator) -> None:
    """`agree` raises the error of one rank on all: a StateExchangeError as it is, any other in a PeerError.

    Ranks in another call raise it, too.
    """
    last = comm.world_size - 1
    _expect(comm.agree(note=comm.rank) == list(range(comm.world_size)), "agree must return all notes")
    ours = MismatchError("salt", rank=last) if comm.rank == last else None
    error = _raised(MismatchError, "agree with an error of ours", comm.agree, ours)
    _expect("salt" in str(error), f"the message was lost: {error}")
    if comm.world_size > 1:
        foreign = KeyError("pepper") if comm.rank == last else None
        error = _raised(PeerError, "agree with a KeyError", comm.agree, foreign, phase="cooking")
        _expect("pepper" in str(error) and f"rank {last}" in str(error), f"the rank and the cause are missing: {error}")
        act, argument = (comm.agree, ValueError("sugar")) if comm.rank == last else (comm.all_reduce, _ones(9))
        error = _raised(PeerError, "a failure while others are in a collective", act, argument)
        _expect("sugar" in str(error), f"the cause is missing: {error}")
    _expect_it_still_works(comm)


# Tensors from `empty`


@_check()
def empty_returns_ordinary_tensors(comm: Communicator) -> None:
    """`empty` returns a writable contiguous tensor of any shape and dtype."""
    for shape, dtype in (((5,), torch.float32), ((3, 0), torch.int8), ((), torch.float64), ((7, 5), torch.bfloat16)):
        tensor = comm.empty(shape, dtype)
        _expect((tuple(tensor.shape), tensor.dtype) == (shape, dtype), f"{dtype}{shape} became {tensor.dtype}")
        _expect(tensor.is_contiguous() and not tensor.requires_grad, "empty gave a strided tensor, or grad")
        tensor.copy_(_pattern(comm.rank, shape, dtype))
        _expect_same(comm.all_reduce(tensor), _sum(comm, shape, dtype), f"all_reduce of empty({shape})")


@_check()
def tensors_from_empty_are_reduced_in_place(comm: Communicator) -> None:
    """all_reduce, reduce and broadcast are right for tensors of `empty`, views of them, and if one rank has one."""
    n, last = 2 * _WINDOW_BYTES // 4 + 12_347, comm.world_size - 1
    tensor = comm.empty((n,), torch.float32)
    for ours in (tensor, tensor[:-1], tensor[1001:], tensor[::2], tensor[16 * comm.rank :][: n - 64]):
        ours.copy_(_pattern(comm.rank, len(ours)))
        _expect_same(comm.all_reduce(ours), _sum(comm, len(ours)), f"all_reduce of {len(ours)} elements of an empty")
        ours.copy_(_pattern(comm.rank, len(ours)))
        _expect_same(comm.broadcast(ours, root=last), _pattern(last, len(ours)), f"broadcast of {len(ours)} elements")
        ours.copy_(_pattern(comm.rank, len(ours)))
        comm.reduce(ours, root=last)
        theirs = _sum(comm, len(ours)) if comm.rank == last else _pattern(comm.rank, len(ours))
        _expect_same(ours, theirs, f"reduce of {len(ours)} elements")
    mixed = tensor if comm.rank == 0 else torch.zeros(n)
    mixed.copy_(_pattern(comm.rank, n))
    _expect_same(comm.all_reduce(mixed), _sum(comm, n), "all_reduce of an empty with others' ordinary tensors")


@_check()
def memory_of_empty_is_reused_only_when_dropped(comm: Communicator) -> None:
    """`empty` may return memory of a dropped tensor, never of a live one, also if only some ranks dropped theirs."""
    n = _WINDOW_BYTES // 4 + 17
    kept = comm.empty((n,), torch.float32).fill_(comm.rank + 1)
    for turn in range(4):
        other = comm.empty((n,), torch.float32).fill_(100.0 * turn)
        comm.all_reduce(other)
        del other
    _expect_all(kept, comm.rank + 1, "a live tensor of empty, after others were made and dropped")
    ours: torch.Tensor | None = comm.empty((n,), torch.float32)
    if comm.rank:
        ours = None
    newer = comm.empty((n,), torch.float32)
    used = newer if ours is None else ours
    for verb, expected in (("all_reduce", _sum(comm, n)), ("broadcast", _pattern(0, n))):
        used.copy_(_pattern(comm.rank, n))
        _expect_same(getattr(comm, verb)(used), expected, f"{verb} where ranks use different empties")


# Groups


@_check()
def groups_are_communicators_of_their_ranks(comm: Communicator) -> None:
    """`new_group` numbers its ranks in the given order, is called by them alone, and returns one object for one list.

    Wrong ranks raise InvalidArgumentError.
    """
    n = comm.world_size
    backwards = comm.new_group(list(reversed(range(n))))
    _expect((backwards.rank, backwards.world_size) == (n - 1 - comm.rank, n), f"ranks of {backwards}")
    _expect(backwards.all_gather_object(comm.rank) == list(reversed(range(n))), "objects in the order of the group")
    found = backwards.broadcast(torch.full((3,), float(comm.rank)))
    _expect_all(found, n - 1, "rank 0 of the reversed group is the last")
    _expect(comm.new_group(list(reversed(range(n)))) is backwards, "a group must be made once")
    if comm.rank < max(n - 1, 1):
        some = comm.new_group(list(range(max(n - 1, 1))))
        _expect_all(some.all_reduce(torch.ones(70_001)), some.world_size, "a sum over some ranks")
    for ranks in ([], [0, 0], [n], [comm.rank, n + 1], [(comm.rank + 1) % n] if n > 1 else [1]):
        _raised(InvalidArgumentError, f"new_group({ranks})", comm.new_group, ranks)
    comm.barrier()


@_check(least_ranks=3)
def new_group_with_different_orders_is_a_mismatch(comm: Communicator) -> None:
    """Ranks that call `new_group` with the same ranks in different orders all raise MismatchError."""
    for n in {comm.world_size, comm.world_size - 1} - {2}:
        if comm.rank < n:
            orders = [[*range(1, n), 0], [n - 1, *range(n - 1)]]
            error = _raised(MismatchError, f"two orders of {n} ranks", comm.new_group, orders[comm.rank == 0])
            _expect(all(f"new_group({order})" in str(error) for order in orders), f"an order is missing: {error}")
            _expect_all(comm.new_group(orders[0]).all_reduce(_ones(3)), n, f"a sum over {n} ranks")
    _expect_it_still_works(comm)


@_check()
def split_puts_ranks_of_one_color_together(comm: Communicator) -> None:
    """`split` orders the ranks of one color by key, then rank; a rank that passes None gets None."""
    n = comm.world_size
    part = comm.split(comm.rank % 2, key=-comm.rank)
    expected = [rank for rank in reversed(range(n)) if rank % 2 == comm.rank % 2]
    _expect(part is not None and part.all_gather_object(comm.rank) == expected, "ranks of one color, backwards")
    alone = comm.split(None if comm.rank else 7)
    _expect((alone is None) == (comm.rank > 0), "None must give None")
    if alone is not None:
        _expect((alone.world_size, alone.rank) == (1, 0), "one rank is a world of one")
        _expect_all(alone.all_reduce(torch.ones(3)), 1.0, "a sum over one rank")


@_check()
def node_and_leaders_match_the_hosts(comm: Communicator) -> None:
    """`node` holds the ranks of this host by local rank, `leaders` the local ranks 0 of all hosts by node rank."""
    n, node, leaders = comm.world_size, comm.node, comm.leaders
    _expect((node.rank, node.world_size) == (comm.local_rank, comm.local_world_size), f"ranks of {node}")
    _expect((leaders is None) == (comm.local_rank > 0), "leaders are the first ranks of their hosts")
    places = comm.all_gather_object([comm.node_rank, comm.local_rank, comm.hosts[comm.rank]])
    _expect(len({place[0] for place in places}) == comm.num_nodes, f"hosts: {places}")
    by_node = sorted(range(n), key=lambda rank: places[rank][:2])  # need not be rank order
    _expect(node.all_gather_object(comm.rank) == [r for r in by_node if places[r][0] == comm.node_rank], "node")
    if leaders is not None:
        _expect((leaders.rank, leaders.world_size) == (comm.node_rank, comm.num_nodes), f"ranks of {leaders}")
        _expect(leaders.all_gather_object(comm.rank) == [r for r in by_node if places[r][1] == 0], "leaders")
    _expect(comm.device.type in ("cpu", "cuda"), f"device {comm.device}")
    _expect(len(set(comm.all_gather_object(comm.run))) == 1, "a run has one identity")


# Ranks in different calls


def _ones(n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(n, dtype=dtype)


def _site(act: Act) -> str:
    """Return file and line of a lambda."""
    code: Any = act.__code__
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"


def _expect_sites(error: BaseException, *acts: Act) -> None:
    for act in acts:
        _expect(_site(act) in str(error), f"the message does not name {_site(act)}: {error}")


_DIFFERENT: dict[str, tuple[Act, Act]] = {
    "shape": (lambda c: c.all_reduce(_ones(5)), lambda c: c.all_reduce(_ones(6))),
    "number of dimensions": (lambda c: c.all_reduce(_ones(6)), lambda c: c.all_reduce(_ones(6).view(2, 3))),
    "small or large": (lambda c: c.all_reduce(_ones(5)), lambda c: c.all_reduce(_ones(100_000))),
    "large shape": (lambda c: c.all_reduce(_ones(300_000)), lambda c: c.all_reduce(_ones(300_001))),
    "dtype": (lambda c: c.all_reduce(_ones(5)), lambda c: c.all_reduce(_ones(5, torch.int32))),
    "dtype of one size": (
        lambda c: c.all_reduce(_ones(5, torch.half)),
        lambda c: c.all_reduce(_ones(5, torch.bfloat16)),
    ),
    "op": (lambda c: c.all_reduce(_ones(5)), lambda c: c.all_reduce(_ones(5), "max")),
    "sum or avg": (lambda c: c.all_reduce(_ones(5)), lambda c: c.all_reduce(_ones(5), "avg")),
    "scale": (lambda c: c.all_reduce(_ones(5)), lambda c: c.all_reduce(_ones(5), scale=2.0)),
    "scale by a billionth": (
        lambda c: c.all_reduce(_ones(5), scale=1 / 3),
        lambda c: c.all_reduce(_ones(5), scale=1 / 3 + 1e-9),
    ),
    "root of broadcast": (lambda c: c.broadcast(_ones(5)), lambda c: c.broadcast(_ones(5), root=1)),
    "root of a large broadcast": (lambda c: c.broadcast(_ones(9**6)), lambda c: c.broadcast(_ones(9**6), root=1)),
    "root of reduce": (lambda c: c.reduce(_ones(5)), lambda c: c.reduce(_ones(5), root=1)),
    "root of gather": (lambda c: c.gather(_ones(5)), lambda c: c.gather(_ones(5), root=1)),
    "root of scatter": (
        lambda c: c.scatter([_ones(5)] * c.world_size),
        lambda c: c.scatter([_ones(5)] * c.world_size, root=1),
    ),
    "root of objects": (lambda c: c.gather_object(1), lambda c: c.gather_object(1, root=1)),
    "shape of broadcast": (lambda c: c.broadcast(_ones(5)), lambda c: c.broadcast(_ones(6))),
    "shape of all_gather": (lambda c: c.all_gather(_ones(5)), lambda c: c.all_gather(_ones(6))),
    "dtype of gather": (lambda c: c.gather(_ones(6)), lambda c: c.gather(_ones(6).double())),
    "shape of reduce_scatter": (lambda c: c.reduce_scatter(_ones(12)), lambda c: c.reduce_scatter(_ones(24))),
    "verb": (lambda c: c.all_reduce(_ones(5)), lambda c: c.reduce(_ones(5))),
    "all_gather or gather": (lambda c: c.all_gather(_ones(5)), lambda c: c.gather(_ones(5))),
    "all_to_all or scatter": (
        lambda c: c.all_to_all([_ones(5)] * c.world_size),
        lambda c: c.scatter([_ones(5)] * c.world_size),
    ),
    "broadcast or all_reduce": (lambda c: c.broadcast(_ones(70_000)), lambda c: c.all_reduce(_ones(70_000))),
    "one more call on some ranks": (lambda c: c.barrier(), lambda c: c.all_reduce(_ones(5))),
    "one more large call on some ranks": (lambda c: c.barrier(), lambda c: c.all_reduce(_ones(9**6))),
    "objects or tensors": (lambda c: c.all_gather_object(1), lambda c: c.all_gather(_ones(5))),
    "all_gather_object or broadcast_object": (lambda c: c.all_gather_object(1), lambda c: c.broadcast_object(1)),
    "barriers": (lambda c: c.barrier(tag="lunch"), lambda c: c.barrier(tag="tea")),
    "number of tensors": (
        lambda c: c.all_reduce_multiple([_ones(5)]),
        lambda c: c.all_reduce_multiple([_ones(5), _ones(5)]),
    ),
    "shapes of several": (
        lambda c: c.all_reduce_multiple([_ones(5), _ones(3)]),
        lambda c: c.all_reduce_multiple([_ones(3), _ones(5)]),
    ),
    "contiguous or not": (
        lambda c: c.all_reduce_multiple([_ones(5), _ones(5)]),
        lambda c: c.all_reduce_multiple([_ones(5), _ones(5)], contiguous=False),
    ),
    "several or none": (lambda c: c.all_reduce_multiple([]), lambda c: c.all_reduce_multiple([_ones(5)])),
    "empty": (lambda c: c.empty((5,), torch.float32), lambda c: c.empty((6,), torch.float32)),
    "dtype of empty": (lambda c: c.empty((4,), torch.int32), lambda c: c.empty((4,), torch.float32)),
    "asynchronous": (
        lambda c: c.all_reduce(_ones(5), async_op=True).wait(),
        lambda c: c.broadcast(_ones(5), async_op=True).wait(),
    ),
    "one asynchronous": (lambda c: c.all_reduce(_ones(70_000), async_op=True).wait(), lambda c: c.all_gather(_ones(5))),
}


@_check(least_ranks=2)
def ranks_in_different_calls_all_raise_promptly(comm: Communicator) -> None:
    """If one rank differs in shape, dtype, op, root, scale, operation or number of calls, all raise MismatchError.

    They raise within a second; the message names both call sites, and the communicator works afterwards.
    """
    for what, (usual, odd) in _DIFFERENT.items():
        for chosen in (0, comm.world_size - 1):
            _differ(comm, what, usual, odd, chosen)
    _expect_it_still_works(comm)


def _differ(comm: Communicator, what: str, usual: Act, odd: Act, chosen: int) -> None:
    act = odd if comm.rank == chosen else usual
    comm.barrier()
    began = time.monotonic()
    error = _raised(MismatchError, f"ranks that differ in {what}", act, comm)
    took = time.monotonic() - began
    _expect(took < _PROMPTLY_S, f"that ranks differ in {what} was reported after {took:.1f} s")
    _expect_sites(error, usual, odd)
    ours = _pattern(comm.rank, 9)
    _expect_same(comm.all_reduce(ours), _sum(comm, 9), f"a sum after ranks differed in {what}")


@_check(least_ranks=2)
def different_calls_after_equal_ones_are_detected(comm: Communicator) -> None:
    """Calls that matched before are compared again: one rank repeats them in another order, and all raise."""
    first: Act = lambda c: c.all_reduce(_ones(5))  # noqa: E731 (the message names its line)
    second: Act = lambda c: c.broadcast(_ones(5))  # noqa: E731
    for _ in range(3):
        first(comm)
        second(comm)
    _differ(comm, "order", first, second, comm.world_size - 1)
    _differ(comm, "order", second, first, comm.world_size - 1)
    _expect_it_still_works(comm)


@_check(least_ranks=2)
def a_mismatch_changes_no_buffers(comm: Communicator) -> None:
    """If ranks are in different calls, neither tensors nor `out` change."""
    for n in (5, 70_000):
        ours, out = _pattern(comm.rank, n), torch.full((n,), float(_UNTOUCHED))
        op = "max" if comm.rank == 0 else "sum"
        root = 1 if comm.rank == 0 else 0
        _raised(MismatchError, "different ops", comm.all_reduce, ours, op)
        _raised(MismatchError, "different ops", comm.all_reduce, ours, op, out=out)
        _raised(MismatchError, "different roots", comm.broadcast, ours, root=root, out=out)
        _raised(MismatchError, "different ops", comm.reduce, ours, op, out=out)
        _expect_same(ours, _pattern(comm.rank, n), "a tensor after a mismatch")
        _expect_all(out, _UNTOUCHED, "an out after a mismatch")


def _expect_it_still_works(comm: Communicator) -> None:
    """Use every algorithm that a backend may have, twice. This fails if one rank is a message ahead of another."""
    for turn in range(2):
        for n in (3, 20_001, 270_001):
            _expect_same(comm.all_reduce(_pattern(comm.rank, n)), _sum(comm, n), f"all_reduce of {n}, afterwards")
            found = comm.broadcast(_pattern(comm.rank, n), root=turn % comm.world_size)
            _expect_same(found, _pattern(turn % comm.world_size, n), f"broadcast of {n}, afterwards")
        parts = comm.all_gather(_pattern(comm.rank, 11 + turn))
        _expect_same(torch.stack(parts).sum(0), _sum(comm, 11 + turn), "all_gather, afterwards")
    _expect(comm.all_gather_object(comm.rank) == list(range(comm.world_size)), "objects, afterwards")


CHECKS: tuple[Check, ...] = tuple(_checks)
"""All checks, in the order in which `run` tries them."""
