"""The matrix: every backend with every operation on every dtype gives the right value, or is refused on every rank.

A cell is (backend, operation, dtype). `expected_outcome` says what it must do:

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
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from equality import equal_bits
from hypothesis import example, given, settings
from hypothesis import strategies as st
from programs import require_mpi
from starting import LAUNCHED_AS, start
from sweeps import by_default

import statexchange as sx
from statexchange.testing import run_ranks

REDUCTIONS = ("sum", "avg", "min", "max", "prod")
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "collectives.md"
VERBS = ("all_reduce", "reduce", "reduce_scatter", "all_reduce_multiple")
MOVES = ("broadcast", "all_gather", "gather", "scatter", "all_to_all", "send")
FLOATS = ("float64", "float32", "float16", "bfloat16")
COMPLEX = ("complex64", "complex128")
INTS = ("int8", "int16", "int32", "int64", "uint8")
MOVED = ("float8_e4m3fn", "float8_e5m2", "uint16")
DTYPES = (*FLOATS, *COMPLEX, *INTS, "bool", *MOVED)
LIMIT_S = 100.0


class Cell(NamedTuple):
    backend: str
    op: str
    dtype: str


def cells() -> dict[Cell, str]:
    """Return every cell with its expected outcome."""
    ops = (*REDUCTIONS, *MOVES)
    return {Cell(b, op, dtype): expected_outcome(op, dtype) for b in LAUNCHED_AS for dtype in DTYPES for op in ops}


def expected_outcome(op: str, dtype: str) -> str:
    if op in MOVES or dtype in FLOATS:
        return "right"
    no_order = dtype in COMPLEX and op in ("min", "max")
    no_average = dtype in (*INTS, "bool") and op == "avg"
    return "refused" if dtype in MOVED or no_order or no_average else "right"


def test_the_page_quotes_the_numbers_of_cells() -> None:
    assert issubclass(sx.errors.UnsupportedError, TypeError)
    assert issubclass(sx.errors.NumericOverflowError, OverflowError)
    outcomes = list(cells().values())
    assert len(outcomes) == len(LAUNCHED_AS) * 11 * 15
    quoted = re.search(r"(\d+) cells: (\d+) give the right value.*?(\d+) raise\s", PAGE.read_text(), re.DOTALL)
    assert quoted is not None
    found = (len(outcomes), outcomes.count("right"), outcomes.count("refused"))
    assert found == tuple(map(int, quoted.groups())), f"{PAGE.name} quotes other numbers"


# Inputs


def torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


NAN, INF = math.nan, math.inf
# A column has the values of ranks 0, 1, ... of one element; a world of two uses the first two.
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


def elements(op: str, dtype: str) -> dict[str, int]:
    """Return sizes on both sides of the limits of shared memory: 64 KiB, and windows of 1 MiB with a short last one."""
    itemsize = 8 if dtype in INTS and op in ("sum", "prod") else torch_dtype(dtype).itemsize  # they are sent as int64
    return {"small": 97, "medium": (1 << 16) // itemsize + 11, "large": (1 << 20) // itemsize + 1003}


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
    periods = [torch.cat([columns[:, rank], random_values(rank, PERIOD, dtype)]) for rank in range(world_size)]
    return Inputs(periods, places(n, len(columns)))


@lru_cache(maxsize=16)
def places(n: int, num_columns: int) -> torch.Tensor:
    """Return for each of `n` elements its place in a period, which begins with the difficult columns."""
    at = num_columns + torch.arange(n) % PERIOD
    for begin in (0, n // 2, n - num_columns) if n > 3 * num_columns else (0,):
        at[begin : begin + num_columns] = torch.arange(num_columns)
    return at


def difficult_columns(op: str, dtype: str, world_size: int) -> list[list[Any]]:
    if dtype in FLOATS:
        return [column[:world_size] for column in HARD_FLOATS]
    if dtype in COMPLEX:
        whole = [[complex(a, -b) for a, b in zip(c, c[::-1], strict=True)] for c in HARD_FLOATS]
        finite = op == "prod"  # infinite complex numbers have several valid products
        return [c[:world_size] for c in whole if not finite or all(np.isfinite(c))]
    if dtype == "bool":
        return [[bool(i >> rank & 1) for rank in range(world_size)] for i in range(8)]
    if dtype in MOVED:
        return [[1] * world_size]
    rows = [[value_of_word(word, dtype) for word in row[:world_size]] for row in HARD_INTS.get(op, HARD_INTS["min"])]
    return [row for row in rows if fits(op, dtype, row)]


def fits(op: str, dtype: str, row: list[int]) -> bool:
    limits, value = torch.iinfo(torch_dtype(dtype)), {"sum": sum, "prod": math.prod}.get(op, min)(row)
    near = 2**13 if dtype == "int64" and op in ("sum", "prod") else 0
    return limits.min + near <= value <= limits.max - near


def wide(dtype: str) -> torch.dtype:
    """Return the dtype in which the reference is exact."""
    if dtype in COMPLEX:
        return torch.complex128
    return torch.float64 if dtype in FLOATS or dtype.startswith("float8") else torch.int64


def bits(rank: int, n: int, dtype: str) -> torch.Tensor:
    """Return random bits, NaNs of all kinds among them."""
    data = random_bytes(rank)[: n * torch_dtype(dtype).itemsize]
    return data > 127 if dtype == "bool" else data.view(torch_dtype(dtype))


@lru_cache(maxsize=4)
def random_bytes(rank: int) -> torch.Tensor:
    """Return as many bytes as the largest tensor that is moved has, and more."""
    return torch.randint(0, 256, (1 << 21,), dtype=torch.uint8, generator=torch.Generator().manual_seed(rank))


@lru_cache(maxsize=16)
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

    def __init__(self, op: str, given: Inputs, dtype: str) -> None:
        self.op = op
        self.given = given
        self.dtype = dtype
        self.value = reference(op, given.periods, dtype)
        self.rounded = self.value.to(torch_dtype(dtype))[given.at]

    def wrong(self, found: torch.Tensor, where: slice = slice(None)) -> str | None:
        """Describe what is wrong with a result, of all or of some elements; None if nothing is."""
        rounded = self.rounded[where]
        if found.dtype != rounded.dtype:
            return f"{found.dtype} came out"
        if found.shape != rounded.shape:
            return f"{list(found.shape)} came out"
        others = (found != rounded).nonzero().flatten()  # NaNs, for example
        at = self.given.at[where][others]
        found, expected = found[others], self.value[at]
        operands = [period[at] for period in self.given.periods]
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


def faults_of(comm: sx.comm.Communicator, op: str, dtype: str) -> Iterator[str]:
    """Return what is wrong with a cell whose results must be right."""
    for size, n in elements(op, dtype).items():
        if op in MOVES:
            parts = [bits(rank, n, dtype) for rank in range(comm.world_size)]
            yield from (f"{size}: {text}" for text in faults_of_moves(comm, op, parts))
        else:
            given = inputs(op, dtype, n, comm.world_size)
            verbs = ("all_reduce",) if size == "large" and dtype not in ("float32", "int8", "float16") else VERBS
            yield from (f"{size}: {text}" for text in faults_of_reductions(comm, op, given, dtype, verbs))
    if op in TOO_MUCH and dtype in INTS:
        for n in elements(op, dtype).values():
            yield from faults_of_overflows(comm, op, dtype, n, TOO_MUCH[op])
        if dtype == "int64" and op in JUST_TOO_LARGE:
            yield from faults_of_overflows(comm, op, dtype, 97, JUST_TOO_LARGE[op])


def faults_of_reductions(
    comm: sx.comm.Communicator, op: str, given: Inputs, dtype: str, verbs: tuple[str, ...]
) -> Iterator[str]:
    """Return what is wrong with the results of several operations, or with their arguments afterwards."""
    expected, before = Expected(op, given, dtype), given.of(comm.rank)
    ours = before.clone()
    n, last = len(ours) // comm.world_size, comm.world_size - 1
    for verb in verbs:
        where = slice(None)
        if verb == "all_reduce":
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


def faults_of_overflows(comm: sx.comm.Communicator, op: str, dtype: str, n: int, row: list[Any]) -> Iterator[str]:
    """Reduce one element that does not fit, among others that do."""
    ours = torch.ones(n, dtype=torch_dtype(dtype))
    ours[n - 3] = value_of_word(row[comm.rank], dtype)
    before, out = ours.clone(), torch.full_like(ours, 42)
    acts: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: comm.all_reduce(ours, op),
        "all_reduce into out": lambda: comm.all_reduce(ours, op, out=out),
        "reduce": lambda: comm.reduce(ours, op, out=out),
    }
    for what, act in acts.items():
        try:
            act()
        except sx.errors.NumericOverflowError:
            pass
        else:
            yield f"{what} of {row} gave {out[n - 3] if 'out' in what else ours[n - 3]} and no NumericOverflowError"
        if not torch.equal(ours, before) or not (out == 42).all():
            yield f"{what} changed a buffer before it refused {row}"
            ours.copy_(before)
            out.fill_(42)


def faults_of_moves(comm: sx.comm.Communicator, op: str, parts: list[torch.Tensor]) -> Iterator[str]:
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
    elif comm.rank == last:
        expected, found = [parts[0]], [comm.recv(torch.zeros_like(ours), 0)]
    else:
        expected = []
        if comm.rank == 0:
            comm.send(ours, last)
    if len(found) != len(expected):
        yield f"{len(found)} parts, not {len(expected)}"
    for i, (a, b) in enumerate(zip(found, expected, strict=False)):
        if a.dtype != b.dtype or not equal_bits(a, b):
            yield f"other bits in part {i}"
    if not equal_bits(ours, parts[comm.rank]):
        yield "what was given has changed"


def faults_of_refusals(comm: sx.comm.Communicator, op: str, dtype: str) -> Iterator[str]:
    for n in (1, 97, 70_001):
        yield from faults_of_refused_calls(comm, op, random_values(comm.rank, n * comm.world_size, dtype).clone())


def faults_of_refused_calls(comm: sx.comm.Communicator, op: str, ours: torch.Tensor) -> Iterator[str]:
    before, out = ours.clone(), torch.zeros_like(ours)
    acts: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: comm.all_reduce(ours, op),
        "all_reduce into out": lambda: comm.all_reduce(ours, op, out=out),
        "reduce": lambda: comm.reduce(ours, op, root=1, out=out),
        "reduce_scatter": lambda: comm.reduce_scatter(ours, op),
        "all_reduce_multiple": lambda: comm.all_reduce_multiple([ours, ours[:5]], op),
    }
    for what, act in acts.items():
        try:
            act()
        except sx.errors.UnsupportedError:
            pass
        else:
            yield f"{what} was not refused"
    if not equal_bits(ours, before) or not equal_bits(out, torch.zeros_like(out)):
        yield "a refused call changed a buffer"


def outcome(comm: sx.comm.Communicator, cell: Cell, expected: str) -> str:
    """Return `expected` if the cell fulfils it, else what is wrong on the first rank that finds it. Collective."""
    attempt = faults_of_refusals if expected == "refused" else faults_of
    try:
        faults = list(attempt(comm, cell.op, cell.dtype))
    except sx.StateExchangeError as error:
        faults = [f"{type(error).__name__}: {error}"]
    fault = faults[0] if faults else None
    by_rank = comm.all_gather_object(fault)
    return next((f"rank {rank}: {text}" for rank, text in enumerate(by_rank) if text is not None), expected)


def outcomes_over(backend: str, directory: str) -> dict[str, str]:
    """Return the outcomes of all cells of a backend."""
    comm = start(backend, directory)
    ours = {cell: expected for cell, expected in cells().items() if cell.backend == backend}
    return {f"{cell.op} {cell.dtype}": outcome(comm, cell, expected) for cell, expected in ours.items()}


WORLDS = [(backend, n) for backend in LAUNCHED_AS for n in (2, 3) if (backend, n) != ("hierarchical", 2)]


@pytest.mark.parametrize(("backend", "world_size"), by_default(WORLDS))
def test_every_cell_is_right_or_refused(backend: str, world_size: int, tmp_path: Path) -> None:
    if backend == "mpi":
        require_mpi()
    args = (backend, str(tmp_path))
    found = run_ranks(outcomes_over, world_size, backend=LAUNCHED_AS[backend], args=args, timeout_s=LIMIT_S, reuse=True)
    expected = {f"{cell.op} {cell.dtype}": outcome for cell, outcome in cells().items() if cell.backend == backend}
    for rank in range(world_size):
        bad = {name: text for name, text in found[rank].items() if text != expected[name]}
        assert not bad, f"rank {rank}: " + "\n".join(f"{name}: {text}" for name, text in bad.items())
        assert found[rank].keys() == expected.keys()


# Random calls, on threads


@lru_cache(maxsize=1)
def fitting_ops() -> list[tuple[str, str]]:
    return [(op, dtype) for op in REDUCTIONS for dtype in DTYPES if expected_outcome(op, dtype) == "right"]


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    op, dtype = draw(st.sampled_from(fitting_ops()))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    return {
        "op": op,
        "dtype": dtype,
        "shape": [*shape, draw(st.sampled_from([20_000, 300_000]))] if draw(st.integers(0, 9)) == 0 else shape,
        "order": draw(st.permutations(range(len(shape)))),
        "steps": draw(st.lists(st.integers(1, 3), min_size=len(shape), max_size=len(shape))),
        "offset": draw(st.integers(0, 7)),
        "world_size": draw(st.integers(1, 4)),
        "into_out": draw(st.booleans()),
        "array": draw(st.booleans()),
        "async_op": draw(st.booleans()),
    }


def laid_out(values: torch.Tensor, order: list[int], steps: list[int], offset: int) -> torch.Tensor:
    """Return the values in larger memory, in another order and with gaps."""
    stride, at = [0] * values.ndim, 1
    for dim in order:
        stride[dim], at = at * steps[dim], at * steps[dim] * max(values.shape[dim], 1)
    memory = torch.zeros(at + offset, dtype=values.dtype)
    return memory.as_strided(values.shape, stride, offset).copy_(values)


@settings(max_examples=120)
@given(call=calls())
def test_any_shape_layout_and_dtype_is_reduced_as_numpy_would(call: dict[str, Any]) -> None:
    op, dtype, n = call["op"], call["dtype"], call["world_size"]
    spread = math.prod(max(size, 1) for size in call["shape"]) * math.prod(call["steps"])  # empty tensors have strides
    shape = call["shape"] if spread < 1_000_000 else call["shape"][-1:]
    ndim = len(shape)
    order = [dim for dim in call["order"] if dim < ndim] + list(range(len(call["order"]), ndim))
    order, steps = (order, (call["steps"] + [1])[:ndim]) if len(order) == ndim else (list(range(ndim)), [1] * ndim)
    parts = [random_values(rank, math.prod(shape), dtype) for rank in range(n)]

    def reduces() -> str | None:
        comm = sx.get_communicator()
        ours: Any = laid_out(parts[comm.rank].view(shape), order, steps, call["offset"])
        if call["array"] and dtype != "bfloat16":
            ours = ours.numpy()
        out = laid_out(torch.zeros(shape, dtype=torch_dtype(dtype)), order, steps, 0) if call["into_out"] else None
        found = comm.all_reduce(ours, op, out=out, async_op=call["async_op"])
        found = found.wait() if call["async_op"] else found
        assert found is (ours if out is None else out)
        reshaped = torch.as_tensor(ours).reshape(-1)
        if out is not None and not equal_bits(reshaped, parts[comm.rank]):
            return "an argument has changed"
        return expected.wrong(torch.as_tensor(found).reshape(-1))

    expected = Expected(op, Inputs(parts, torch.arange(len(parts[0]))), dtype)
    assert run_ranks(reduces, n) == [None] * n


@settings(max_examples=60)
@example([2**63 - 2, 1], "sum", 1)
@example([2**63 - 1, 1], "sum", 1)
@example([-(2**63) + 1, -1], "sum", 1)
@example([-(2**63), -1], "sum", 1)
@example([2**62, -(2**62), 2**63 - 1, -1], "sum", 1)
@example([2**62 - 1, 1], "sum", -2)
@example([2**62 - 1, 1], "sum", 2)
@example([7 * 73, 127 * 337 * 92737 * 649657], "prod", 1)  # 2**63 - 1
@example([2**32, 2**31], "prod", 1)
@example([-(2**32), 2**31], "prod", 1)
@example([2**40, 0, 2**40], "prod", 1)
@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=4),
    st.sampled_from(["sum", "prod"]),
    st.sampled_from([1, 1, -1, 3, 0]),
)
def test_an_int64_is_exact_and_one_that_does_not_fit_is_an_error(numbers: list[int], op: str, scale: int) -> None:
    unscaled = {"sum": sum, "prod": math.prod}[op](numbers)
    fits = all(-(2**63) <= n < 2**63 for n in (unscaled, unscaled * scale))

    def reduces() -> int | None:
        comm = sx.get_communicator()
        try:
            return int(comm.all_reduce(torch.tensor([numbers[comm.rank]]), op, scale=scale))
        except sx.errors.NumericOverflowError:
            return None

    assert run_ranks(reduces, len(numbers)) == [unscaled * scale if fits else None] * len(numbers)
