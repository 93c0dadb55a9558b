"""The matrix: every operation on every dtype gives the right value, or is refused on every rank.

A cell is (operation, dtype). `expected_outcome` says what it must do:

* "right": the result is compared with a reference in float64 or complex128 (exact integers for integers) made from all
  ranks' inputs. The inputs are difficult ones: sums that leave float16's and int8's range on the way and come back,
  values where every rounding on the way would show, NaN and infinities on different ranks.
* "refused": an UnsupportedError, which is a TypeError, on every rank, and no buffer has changed.

A result that does not fit into its integer dtype is a NumericOverflowError on every rank, and no buffer has changed.

Tolerances. Moves, min, max, integers and bool: none. float16 and bfloat16: one rounding at the end, to the neighbours
of the reference plus or minus `world_size + 1` roundings of float32. float32, float64: `world_size + 1` roundings,
relative to the sum (or product) of the magnitudes; complex: `4 * world_size`. A sum or average that on its way leaves
the range of float32 (for float32, bfloat16 and complex64) or of float64 is infinite, as in IEEE 754, and not
tested here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from equality import equal_bits

from conformance.checking import check, noise
from statexchange.comm.communicator import Communicator
from statexchange.errors import NumericOverflowError, StateExchangeError, UnsupportedError

REDUCTIONS = ("sum", "avg", "min", "max", "prod")
VERBS = ("all_reduce", "all_reduce into out", "reduce", "reduce_scatter", "all_reduce_multiple")
MOVES = ("broadcast", "all_gather", "gather", "scatter", "all_to_all", "send")
FLOATS = ("float64", "float32", "float16", "bfloat16")
COMPLEX = ("complex64", "complex128")
INTS = ("int8", "int16", "int32", "int64", "uint8")
MOVED = ("float8_e4m3fn", "float8_e5m2", "uint16")
DTYPES = (*FLOATS, *COMPLEX, *INTS, "bool", *MOVED)
SIZES = ("small", "medium", "large")


def expected_outcome(op: str, dtype: str) -> str:
    if op in MOVES or dtype in FLOATS:
        return "right"
    no_order = dtype in COMPLEX and op in ("min", "max")
    no_average = dtype in (*INTS, "bool") and op == "avg"
    return "refused" if dtype in MOVED or no_order or no_average else "right"


CELLS = {(op, dtype): expected_outcome(op, dtype) for dtype in DTYPES for op in (*REDUCTIONS, *MOVES)}


@check
def every_operation_is_right_or_refused_on_every_dtype(comm: Communicator) -> None:
    """all_reduce is right or refused for every op and dtype, and what moves data keeps the bits of unusual dtypes.

    These are the small tensors; test_matrix.py tries all cells, with all verbs and larger tensors, which take seconds.
    """
    moved = ("float8_e4m3fn", "uint16", "bool", "complex64")
    cells = [(op, dtype) for op, dtype in CELLS if op in REDUCTIONS or dtype in moved]
    faults = faults_of_cells(comm, cells, sizes=["small"], verbs=["all_reduce"])
    assert not faults, "\n".join(faults)


def faults_of_cells(
    comm: Communicator, cells: Iterable[tuple[str, str]], sizes: Sequence[str], verbs: Sequence[str]
) -> list[str]:
    """Return what this rank finds wrong with cells. `verbs` are those that reduce. Collective."""
    faults = []
    for op, dtype in cells:
        attempt = faults_of_refusals if CELLS[op, dtype] == "refused" else faults_of
        for size in sizes:
            try:
                faults += [f"{op} of {dtype}, {size}: {text}" for text in attempt(comm, op, dtype, size, verbs)]
            except StateExchangeError as error:
                faults.append(f"{op} of {dtype}, {size}: {type(error).__name__}: {error}")
    return faults


# Inputs


def torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


NAN, INF = math.nan, math.inf
# A column has the values of ranks 0, 1, ... of one element; ranks beyond it have its last value.
HARD_FLOATS = [
    [60_000.0, 60_000.0, -60_000.0],  # an intermediate sum leaves the range of float16
    [-60_000.0, 59_968.0, 60_000.0],
    [1.0, 2.0**-9, 2.0**-9],  # each intermediate rounding to bfloat16 loses one
    [1.0, 2.0**-12, 2.0**-12],  # the same for float16
    [2048.0, 1.0, 1.0],
    [256.0, 1.0, 1.0],
    [-256.0, -1.0, -1.0],
    [300.0, 300.0, 1 / 512],  # an intermediate product leaves the range of float16
    [6.1e-5, 3e-5, 1024.0],  # and an intermediate product of its subnormal numbers
    [0.0, -0.0, 0.0],
    [-0.0, -0.0, -0.0],
    [NAN, 1.0, 2.0],
    [1.0, NAN, 2.0],
    [-3.0, 2.0, NAN],
    [NAN, NAN, NAN],
    [INF, 1.0, -2.0],
    [1.0, INF, 2.0],
    [1.0, -INF, 0.5],
    [INF, -INF, 1.0],
    [INF, INF, INF],
    [-INF, -INF, 1.0],
    [INF, 0.0, 1.0],
    [NAN, INF, -INF],
    [0.1, 0.2, 0.3],
    [1e-3, -1e-3, 1e-7],
]
# Random values recur after so many elements, so references are computed for these only. A prime: a result of another
# window or of another part of a tensor is wrong.
PERIOD = 4099
# By operation, since an element that does not fit is an error for the whole tensor.
HARD_INTS = {
    "sum": [["max", 1, "-1"], ["min", "max", 1], ["half", "half", "-half"], [0, 0, 0], ["-1", 1, 3]],
    "prod": [["16", "4", 0], ["-1", "half", 1], [3, 5, 2], ["16", 0, "16"], [0, "max", "max"]],
}
HARD_INTS["min"] = HARD_INTS["max"] = [["max", "min", 0], ["min", "max", 1], ["-1", 0, 1], [7, 7, 7]]
TOO_MUCH = {"sum": ["max", 1, 0], "prod": ["half", 4, 1]}
# Products just beyond int64, which in float64 equal ones that just fit.
JUST_TOO_LARGE = {"prod": [89_547_301_328_687_144, 103, 1]}


def value_of_word(word: Any, dtype: str) -> int:
    """Return the value of a word in a dtype."""
    limits = torch.iinfo(torch_dtype(dtype))
    half = limits.max // 2
    named = {"max": limits.max, "min": limits.min, "half": half, "-half": -half, "-1": -1, "16": 16, "4": 4}
    value = named.get(word, word)
    return max(int(value), limits.min)


def value_on(rank: int, row: list[Any]) -> Any:
    """Return a rank's value of a column: the last one, if the column has fewer."""
    return row[min(rank, len(row) - 1)]


def elements(op: str, dtype: str, size: str) -> int:
    """Return a size that is on one side of the limits of shared memory: 64 KiB, and windows of 1 MiB.

    The large one has a short last window.
    """
    itemsize = 8 if dtype in INTS and op in ("sum", "prod") else torch_dtype(dtype).itemsize  # they are sent as int64
    return {"small": 97, "medium": (1 << 16) // itemsize + 11, "large": (1 << 20) // itemsize + 1003}[size]


class Inputs(NamedTuple):
    """Each rank's values of one period, and `at`: for each element its place in the period, on every rank."""

    periods: list[torch.Tensor]
    at: torch.Tensor

    def of(self, rank: int) -> torch.Tensor:
        """Return the tensor of a rank."""
        return self.periods[rank][self.at]


def inputs(op: str, dtype: str, n: int, world_size: int) -> Inputs:
    """Return each rank's values: the difficult columns at the beginning, middle and end, and random values between."""
    columns = torch.tensor(difficult_columns(op, dtype, world_size), dtype=wide(dtype)).to(torch_dtype(dtype))
    columns = columns[:n]
    length = min(n, PERIOD)
    periods = [torch.cat([columns[:, rank], random_values(rank, length, dtype)]) for rank in range(world_size)]
    return Inputs(periods, places(n, len(columns)))


@lru_cache(maxsize=16)
def places(n: int, num_columns: int) -> torch.Tensor:
    """Return for each of `n` elements its place in a period, which begins with the difficult columns."""
    at = num_columns + torch.arange(n) % PERIOD
    for begin in (0, n // 2, n - num_columns) if n > 3 * num_columns else (0,):
        at[begin : begin + num_columns] = torch.arange(num_columns)
    return at


def difficult_columns(op: str, dtype: str, world_size: int) -> list[list[Any]]:
    columns: list[list[Any]] = [[1]]
    if dtype in FLOATS:
        columns = HARD_FLOATS
    elif dtype in COMPLEX:
        columns = [[complex(a, -b) for a, b in zip(c, c[::-1], strict=True)] for c in HARD_FLOATS]
    elif dtype == "bool":
        columns = [[bool(i >> rank & 1) for rank in range(world_size)] for i in range(8)]
    elif dtype in INTS:
        columns = [[value_of_word(word, dtype) for word in row] for row in HARD_INTS.get(op, HARD_INTS["min"])]
    rows = [[value_on(rank, column) for rank in range(world_size)] for column in columns]
    if dtype in INTS:
        return [row for row in rows if fits(op, dtype, row)]
    if dtype in COMPLEX and op == "prod":  # infinite complex numbers have several valid products
        return [row for row in rows if all(np.isfinite(row))]
    return rows


def fits(op: str, dtype: str, row: list[int]) -> bool:
    limits, value = torch.iinfo(torch_dtype(dtype)), {"sum": sum, "prod": math.prod}.get(op, min)(row)
    near = 2**13 if dtype == "int64" and op in ("sum", "prod") else 0
    return limits.min + near <= value <= limits.max - near


def wide(dtype: str) -> torch.dtype:
    """Return the dtype in which the reference is exact."""
    if dtype in COMPLEX:
        return torch.complex128
    return torch.float64 if dtype in FLOATS or dtype.startswith("float8") else torch.int64


@lru_cache(maxsize=64)
def random_values(rank: int, n: int, dtype: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    if dtype in FLOATS:
        return torch.randn(n, generator=generator, dtype=torch.float64).to(torch_dtype(dtype))
    if dtype in COMPLEX:
        return torch.randn(n, generator=generator, dtype=torch.complex128).to(torch_dtype(dtype))
    if dtype == "bool":
        return torch.randint(0, 2, (n,), generator=generator).bool()
    least = 0 if dtype.startswith(("uint", "float8")) else -3
    most = 4 if dtype in ("int8", "uint8") else 6  # the products of four ranks must fit
    return torch.randint(least, most, (n,), generator=generator).to(torch_dtype(dtype))


# Expected results


class Expected:
    """The reference for the inputs of all ranks, and the tolerance."""

    def __init__(self, op: str, data: Inputs, dtype: str) -> None:
        self.op = op
        self.data = data
        self.dtype = dtype
        self.value = reference(op, data.periods, dtype)
        self.rounded = self.value.to(torch_dtype(dtype))[data.at]

    def wrong(self, found: torch.Tensor, where: slice = slice(None)) -> str | None:
        """Describe what is wrong with a result, of all or of some elements; None if nothing is."""
        rounded = self.rounded[where]
        if found.dtype != rounded.dtype:
            return f"{found.dtype} came out"
        if found.shape != rounded.shape:
            return f"{list(found.shape)} came out"
        others = (found != rounded).nonzero().flatten()  # NaNs, for example
        at = self.data.at[where][others]
        found, expected = found[others], self.value[at]
        operands = [period[at] for period in self.data.periods]
        slack = margin(self.op, operands, self.dtype)
        if self.dtype in COMPLEX:
            bad = [is_outside(getattr(found, c), getattr(expected, c), slack, self.dtype) for c in ("real", "imag")]
            is_wrong = bad[0] | bad[1]
        elif self.dtype in FLOATS:
            is_wrong = is_outside(found, expected, slack, self.dtype)
        else:
            is_wrong = found.to(torch.int64) != expected
        if not is_wrong.any():
            return None
        i = int(is_wrong.nonzero()[0])
        values = [operand[i].item() for operand in operands]
        return f"{values} at {int(others[i])} gave {found[i].item()!r}, not {expected[i].item()!r}"


def reference(op: str, parts: list[torch.Tensor], dtype: str) -> torch.Tensor:
    """Return the exact result; NaN wherever an operand of min or max is NaN."""
    stack = torch.stack([part.to(wide(dtype)) for part in parts])
    if dtype == "bool":
        return stack.amax(0) if op in ("sum", "max") else stack.amin(0)
    if op in ("min", "max"):
        return stack.amin(0) if op == "min" else stack.amax(0)
    if op == "prod":
        return stack.prod(0)
    if dtype in COMPLEX:  # by components, as an infinite component does not change the other
        stack = torch.view_as_real(stack)
    total = stack.sum(0) if op == "sum" else stack.sum(0) / len(parts)
    return torch.view_as_complex(total) if dtype in COMPLEX else total


def margin(op: str, parts: list[torch.Tensor], dtype: str) -> torch.Tensor:
    """Return the tolerance: how far a result may be from the reference."""
    if op in ("min", "max") or dtype not in FLOATS + COMPLEX:
        return torch.zeros(1, dtype=torch.float64)
    sizes = torch.stack([part.to(wide(dtype)).abs() for part in parts])
    magnitude = sizes.prod(0) if op == "prod" else sizes.sum(0) / (len(parts) if op == "avg" else 1)
    narrow = torch.finfo(torch.float32 if dtype in ("float16", "bfloat16") else torch_dtype(dtype))
    roundings = len(parts) + 1 if dtype not in COMPLEX else 4 * len(parts)
    return magnitude * narrow.eps / 2 * roundings + narrow.smallest_normal * narrow.eps * roundings


def is_outside(found: torch.Tensor, expected: torch.Tensor, slack: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return where a result is neither the rounded reference nor within the tolerance."""
    narrow = torch_dtype({"complex64": "float32", "complex128": "float64"}.get(dtype, dtype))
    rounded = expected.to(narrow)
    same = (found == rounded) | (found.isnan() & rounded.isnan())
    if dtype in ("float16", "bfloat16"):  # the last rounding, to its neighbours
        low, high = (expected - slack).to(narrow), (expected + slack).to(narrow)
        return ~(same | ((found >= low) & (found <= high)))
    return ~(same | ((found.to(torch.float64) - expected).abs() <= slack))


# Running the cells


def faults_of(comm: Communicator, op: str, dtype: str, size: str, verbs: Sequence[str]) -> Iterator[str]:
    """Return what is wrong with a cell whose results must be right."""
    n = elements(op, dtype, size)
    if op in MOVES:
        yield from faults_of_moves(comm, op, [noise(rank, n, torch_dtype(dtype)) for rank in range(comm.world_size)])
        return
    if size == "large" and dtype not in ("float32", "int8", "float16"):
        verbs = ["all_reduce"]
    yield from faults_of_reductions(comm, op, inputs(op, dtype, n, comm.world_size), dtype, verbs)
    if op in TOO_MUCH and dtype in INTS and comm.world_size > 1:  # each value alone fits
        yield from faults_of_overflows(comm, op, dtype, n, TOO_MUCH[op], verbs)
        if dtype == "int64" and op in JUST_TOO_LARGE and size == "small":
            yield from faults_of_overflows(comm, op, dtype, n, JUST_TOO_LARGE[op], verbs)


def faults_of_reductions(comm: Communicator, op: str, data: Inputs, dtype: str, verbs: Sequence[str]) -> Iterator[str]:
    """Return what is wrong with the results of several operations, or with their arguments afterwards."""
    expected, before = Expected(op, data, dtype), data.of(comm.rank)
    ours = before.clone()
    n, last = len(ours) // comm.world_size, comm.world_size - 1
    for verb in verbs:
        where = slice(None)
        if verb == "all_reduce":
            found = comm.all_reduce(ours.clone(), op)
        elif verb == "all_reduce into out":
            found = comm.all_reduce(ours, op, out=torch.zeros_like(ours))
        elif verb == "reduce":
            out = before.clone()
            comm.reduce(ours, op, root=last, out=out)
            if comm.rank != last and not equal_bits(out, ours):
                yield "reduce changed the out of another rank than root"
            found = out if comm.rank == last else None
        elif verb == "reduce_scatter":
            where = slice(comm.rank * n, (comm.rank + 1) * n)
            found = comm.reduce_scatter(ours[: n * comm.world_size], op)
        else:
            found, short = comm.all_reduce_multiple([ours.clone(), ours[:5].clone()], op)
            yield from with_verb(verb, expected.wrong(short, slice(5)))
        yield from with_verb(verb, None if found is None else expected.wrong(found, where))
    if not equal_bits(ours, before):
        yield "what was given has changed"


def with_verb(verb: str, fault: str | None) -> list[str]:
    return [] if fault is None else [f"{verb}: {fault}"]


def faults_of_overflows(
    comm: Communicator, op: str, dtype: str, n: int, row: list[Any], verbs: Sequence[str]
) -> Iterator[str]:
    """Reduce one element that does not fit, among others that do."""
    ours = torch.ones(n, dtype=torch_dtype(dtype))
    ours[n - 3] = value_of_word(value_on(comm.rank, row), dtype)
    before, out = ours.clone(), torch.full_like(ours, 42)
    acts: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: comm.all_reduce(ours, op),
        "all_reduce into out": lambda: comm.all_reduce(ours, op, out=out),
        "reduce": lambda: comm.reduce(ours, op, out=out),
    }
    for what in [verb for verb in verbs if verb in acts]:
        try:
            acts[what]()
        except NumericOverflowError:
            pass
        else:
            yield f"{what} of {row} gave {out[n - 3] if 'out' in what else ours[n - 3]} and no NumericOverflowError"
        if not torch.equal(ours, before) or not (out == 42).all():
            yield f"{what} changed a buffer before it refused {row}"
            ours.copy_(before)
            out.fill_(42)


def faults_of_moves(comm: Communicator, op: str, parts: list[torch.Tensor]) -> Iterator[str]:
    ours, n, last = parts[comm.rank].clone(), comm.world_size, comm.world_size - 1
    expected, found = parts, []
    if op == "broadcast":
        expected, found = [parts[last]] * 2, [comm.broadcast(ours, root=last, out=torch.zeros_like(ours))]
        found.append(comm.broadcast(ours.clone(), root=last))
    elif op == "all_gather":
        found = comm.all_gather(ours)
    elif op == "gather":
        expected, found = (parts if comm.rank == last else []), comm.gather(ours, root=last)
    elif op == "scatter":
        expected, found = [parts[comm.rank]], [comm.scatter(parts if comm.rank == last else None, root=last)]
    elif op == "all_to_all":
        expected, found = [parts[comm.rank]] * n, comm.all_to_all(parts)
    elif n == 1:
        expected = []  # a rank cannot send to itself
    elif comm.rank == last:
        expected, found = [parts[0]], [comm.recv(torch.zeros_like(ours), 0)]
    else:
        expected = []
        if comm.rank == 0:
            comm.send(ours, last)
    if op == "send":
        comm.barrier()  # ranks in between would begin the next cell, which may fail on purpose
    if len(found) != len(expected):
        yield f"{len(found)} parts, not {len(expected)}"
    for i, (a, b) in enumerate(zip(found, expected, strict=False)):
        if a.dtype != b.dtype or not equal_bits(a, b):
            yield f"other bits in part {i}"
    if not equal_bits(ours, parts[comm.rank]):
        yield "what was given has changed"


def faults_of_refusals(comm: Communicator, op: str, dtype: str, size: str, verbs: Sequence[str]) -> Iterator[str]:
    """Return which calls of a cell that must be refused are not."""
    if size == "large":
        return  # nothing is sent, so the size does not matter
    ours = torch.full((elements(op, dtype, size) * comm.world_size,), comm.rank + 1).to(torch_dtype(dtype))
    before, out = ours.clone(), torch.zeros_like(ours)
    acts: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: comm.all_reduce(ours, op),
        "all_reduce into out": lambda: comm.all_reduce(ours, op, out=out),
        "reduce": lambda: comm.reduce(ours, op, root=comm.world_size - 1, out=out),
        "reduce_scatter": lambda: comm.reduce_scatter(ours, op),
        "all_reduce_multiple": lambda: comm.all_reduce_multiple([ours, ours[:5]], op),
    }
    for verb in verbs:
        try:
            acts[verb]()
        except UnsupportedError:
            pass
        else:
            yield f"{verb} was not refused"
    if not equal_bits(ours, before) or not equal_bits(out, torch.zeros_like(out)):
        yield "a refused call changed a buffer"
