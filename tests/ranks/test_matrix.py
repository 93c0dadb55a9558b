"""The whole matrix of operations and dtypes over every backend; random calls; the numbers in the docs."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.matrix import (
    CELLS,
    REDUCTIONS,
    SIZES,
    VERBS,
    Expected,
    Inputs,
    faults_of_cells,
    random_values,
    torch_dtype,
)
from equality import equal_bits
from hypothesis import example, given, settings
from hypothesis import strategies as st
from programs import require_mpi
from starting import LAUNCHED_AS, start
from sweeps import by_default

import statexchange as sx
from statexchange.testing import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "collectives.md"
LIMIT_S = 100.0


def test_the_page_quotes_the_numbers_of_cells() -> None:
    assert issubclass(sx.errors.UnsupportedError, TypeError)
    assert issubclass(sx.errors.NumericOverflowError, OverflowError)
    outcomes = [*CELLS.values()] * len(LAUNCHED_AS)
    assert len(outcomes) == len(LAUNCHED_AS) * 11 * 15
    quoted = re.search(r"(\d+) cells: (\d+) give the right value.*?(\d+) raise\s", PAGE.read_text(), re.DOTALL)
    assert quoted is not None
    counts = (len(outcomes), outcomes.count("right"), outcomes.count("refused"))
    assert counts == tuple(map(int, quoted.groups())), f"{PAGE.name} quotes other numbers"


def faults_over(backend: str, directory: str) -> list[str]:
    return faults_of_cells(start(backend, directory), CELLS, SIZES, VERBS)


WORLDS = [(backend, n) for backend in LAUNCHED_AS for n in (2, 3) if (backend, n) != ("hierarchical", 2)]


@pytest.mark.parametrize(("backend", "world_size"), by_default(WORLDS))
def test_every_cell_is_right_or_refused(backend: str, world_size: int, tmp_path: Path) -> None:
    if backend == "mpi":
        require_mpi()
    args = (backend, str(tmp_path))
    faults = run_ranks(faults_over, world_size, backend=LAUNCHED_AS[backend], args=args, timeout_s=LIMIT_S, reuse=True)
    for rank, texts in enumerate(faults):
        assert not texts, f"rank {rank}: " + "\n".join(texts)


# Random calls, on threads


FITTING = [cell for cell, outcome in CELLS.items() if cell[0] in REDUCTIONS and outcome == "right"]


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    op, dtype = draw(st.sampled_from(FITTING))
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
