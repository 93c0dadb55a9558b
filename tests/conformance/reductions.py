"""Checks of all_reduce, reduce, reduce_scatter and all_reduce_multiple, beside the matrix of operations and dtypes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from conformance.checking import (
    FLOATS,
    UNTOUCHED,
    WINDOW_BYTES,
    check,
    edge_sizes,
    expect_all,
    expect_equal_bits,
    expect_same,
    few_sizes,
    pattern,
    raised,
    roots,
    summed,
)
from statexchange.comm.communicator import Communicator
from statexchange.comm.work import Work
from statexchange.errors import InvalidArgumentError, MismatchError, NumericOverflowError, UnsupportedError


@check
def inference_tensors_are_changed_in_inference_mode_only(comm: Communicator) -> None:
    """Collectives change inference tensors inside torch.inference_mode, also asynchronously, and refuse them outside.

    This check runs first: what a backend sets up in its first call, which is made here, must work outside, too.
    """
    n = comm.world_size
    with torch.inference_mode():
        ours = torch.ones(5)
        expect_all(comm.all_reduce(ours, async_op=True).wait(), n, "asynchronous all_reduce in inference mode")
        expect_all(comm.all_reduce(ours), n * n, "all_reduce in inference mode")
        parts = comm.all_gather(ours)
    raised(UnsupportedError, "all_reduce of an inference tensor outside", comm.all_reduce, ours)
    expect_all(ours, n * n, "an inference tensor")
    expect_same(comm.all_reduce(torch.stack(list(parts)).sum(0)), torch.full((5,), float(n**4)), "a sum of results")


@check
def the_result_is_the_argument_or_out(comm: Communicator) -> None:
    """all_reduce, broadcast and reduce return the tensor, or `out`, and change nothing else.

    On other ranks than root a reduce returns the tensor, and changes nothing.
    """
    for root in roots(comm):
        results = {
            "all_reduce": summed(comm, 512),
            "broadcast": pattern(root, 512),
            "reduce": summed(comm, 512) if comm.rank == root else None,
        }
        for verb, result in results.items():
            operation = getattr(comm, verb) if verb == "all_reduce" else partial(getattr(comm, verb), root=root)
            tensor, out = pattern(comm.rank, 512), torch.full((512,), float(UNTOUCHED))
            returned = operation(tensor, out=out)
            assert returned is (tensor if result is None else out), f"{verb} to {root} with out must return it"
            expect_same(tensor, pattern(comm.rank, 512), f"the input of {verb} to {root} with out")
            expect_same(out, torch.full_like(out, UNTOUCHED) if result is None else result, f"out of {verb} to {root}")
            assert operation(tensor) is tensor, f"{verb} to {root} must return the tensor"
            expect_same(tensor, pattern(comm.rank, 512) if result is None else result, f"{verb} to {root} in place")


@check
def ops_are_taken_by_name_and_as_reduce_op(comm: Communicator) -> None:
    """sum, avg, min, max and prod are accepted by name, by name in capitals, and as torch's ReduceOp."""
    n, names = comm.world_size, ("sum", "avg", "min", "max", "prod")
    parts = torch.stack([pattern(rank, 101, torch.float64) * (-1) ** rank for rank in range(n)])
    expected = dict(
        zip(names, (parts.sum(0), parts.sum(0) / n, parts.amin(0), parts.amax(0), parts.prod(0)), strict=True)
    )
    torchs = {name: getattr(dist.ReduceOp, {"prod": "PRODUCT"}.get(name, name.upper())) for name in names}
    for name in names:
        for op in (name, name.upper(), torchs[name]):
            found = comm.all_reduce(parts[comm.rank].clone(), op)
            close = torch.allclose(found, expected[name], rtol=1e-15)
            assert close, f"{op} gives {found[:3].tolist()}, not {expected[name][:3].tolist()}"


@check
def reductions_are_correct_at_every_size(comm: Communicator) -> None:
    """all_reduce, reduce and reduce_scatter are right at sizes on both sides of limits: float32, int8, bfloat16."""
    cells = [(torch.float32, n) for n in edge_sizes(4)]
    cells += [(torch.int8, n) for n in few_sizes(8)]  # integers are added up as int64
    cells += [(torch.bfloat16, n) for n in few_sizes(2)]
    for dtype, n in cells:
        expected = summed(comm, n, dtype)
        expect_same(comm.all_reduce(pattern(comm.rank, n, dtype)), expected, f"all_reduce of {dtype}[{n}]")
        reduce_sums(comm, n, dtype)
        scatter_sums(comm, n, dtype)


def reduce_sums(comm: Communicator, n: int, dtype: torch.dtype) -> None:
    for root in roots(comm):
        ours = pattern(comm.rank, n, dtype)
        comm.reduce(ours, root=root)
        expected = summed(comm, n, dtype) if comm.rank == root else pattern(comm.rank, n, dtype)
        expect_same(ours, expected, f"reduce of {dtype}[{n}] to {root}")


def scatter_sums(comm: Communicator, n: int, dtype: torch.dtype) -> None:
    rows = -(-n // comm.world_size)
    whole = pattern(comm.rank, (rows * comm.world_size, 1), dtype)
    before = whole.clone()
    part = comm.reduce_scatter(whole)
    expected = summed(comm, (rows * comm.world_size, 1), dtype)[comm.rank * rows :][:rows]
    expect_same(part, expected, f"reduce_scatter of {dtype}[{len(whole)}, 1]")
    expect_same(whole, before, "the input of reduce_scatter")


@check
def ranks_get_equal_bits(comm: Communicator) -> None:
    """All ranks get the same bits, in whatever order the backend adds, for every float dtype and size."""
    for dtype in FLOATS:
        for n in few_sizes(dtype.itemsize):
            generator = torch.Generator("cpu").manual_seed(comm.rank)
            values = torch.randn(n, generator=generator, device="cpu", dtype=torch.float32).to(dtype)
            for op in ("sum", "avg", "prod"):
                found = comm.all_reduce(values.clone(), op, scale=0.3)
                expect_equal_bits(comm, found, f"all_reduce {op} of {dtype}[{n}]")


@check
def scale_is_applied_to_the_reduced_value(comm: Communicator) -> None:
    """`scale` multiplies the result, not the inputs: with avg, integers, async, and float16 sums out of range."""
    n = comm.world_size
    for size in (7, 3 * WINDOW_BYTES // 4 + 5):
        works = [comm.all_reduce(torch.full((size,), 1.0 + i), scale=0.5, async_op=True) for i in range(4)]
        for i, work in enumerate(works):
            expect_all(work.wait(), n * (1.0 + i) * 0.5, f"an asynchronous scaled sum of {size}")
    expect_all(comm.all_reduce(torch.full((7,), 1.0 + comm.rank), scale=2.0), n * (n + 1), "twice a sum")
    expect_all(comm.all_reduce(torch.full((7,), 6.0), "avg", scale=0.5), 3.0, "half the average of 6")
    expect_all(comm.all_reduce(torch.full((7,), 3), scale=4.0), 12 * n, "four times a sum of integers")
    expect_all(comm.all_reduce(torch.full((7,), comm.rank), "max", scale=3), 3 * (n - 1), "three times a max")
    halves = torch.full((7,), 60_000.0, dtype=torch.float16)
    expect_all(comm.all_reduce(halves, scale=1 / n), 60_000.0, "a float16 sum that only fits when scaled")


@check
def a_scaled_integer_that_does_not_fit_is_an_error(comm: Communicator) -> None:
    """A scaled result that does not fit its dtype raises NumericOverflowError on all ranks; nothing is written."""
    cells = [(torch.int8, 127, "sum", 2), (torch.uint8, 200, "sum", 2.0), (torch.int64, 2**62, "prod", 4.0)]
    cells += [(torch.int32, 1, "max", 1e30), (torch.int64, 3, "sum", -(2.0**62))]
    for dtype, value, op, scale in cells:
        for n in (3, 20_001):
            ours = torch.ones(n, dtype=dtype)
            ours[-1] = value
            before, out = ours.clone(), torch.full_like(ours, 5)
            what = f"{op} of {dtype} {value}"
            raised(NumericOverflowError, what, comm.all_reduce, ours, op, scale=scale)
            raised(NumericOverflowError, f"{what} into out", comm.all_reduce, ours, op, scale=scale, out=out)
            expect_same(ours, before, f"the tensor after an overflow of {dtype}")
            expect_all(out, 5, f"out after an overflow of {dtype}")


# Several tensors in one call


@check
def several_tensors_are_reduced_like_each_alone(comm: Communicator) -> None:
    """all_reduce_multiple takes tensors of mixed dtypes, shapes and layouts, and arrays, and returns them."""
    dtypes = (torch.float32, torch.float64, torch.int16, torch.bfloat16, torch.float32)
    shapes: tuple[tuple[int, ...], ...] = ((5,), (2, 3), (), (0, 3), (70_001,))
    for contiguous in (True, False):
        tensors: list[Any] = [pattern(comm.rank, s, d) for s, d in zip(shapes, dtypes, strict=True)]
        tensors.append(pattern(comm.rank, (6, 4)).t())
        tensors.append(pattern(comm.rank, (4, 3)).cpu().numpy()[::2])
        expected: list[Any] = [summed(comm, s, d) for s, d in zip(shapes, dtypes, strict=True)]
        expected += [summed(comm, (6, 4)).t(), summed(comm, (4, 3))[::2]]
        found = comm.all_reduce_multiple(tensors, contiguous=contiguous)
        assert len(found) == len(tensors), "all_reduce_multiple must return its tensors"
        for i, (ours, tensor, theirs) in enumerate(zip(found, tensors, expected, strict=True)):
            assert ours is tensor, "all_reduce_multiple must return its own arguments"
            expect_same(ours, theirs, f"tensor {i} of several, contiguous={contiguous}")


@check
def several_tensors_take_op_scale_and_async(comm: Communicator) -> None:
    """all_reduce_multiple takes op, scale and async_op as all_reduce does; an empty list completes and stays empty.

    In shared memory a set may have many windows: here 20 MiB.
    """
    n = comm.world_size
    length = 1 << 20 if comm.backend == "shm" else 1 << 10
    tensors = [torch.full((length,), comm.rank + 1.0) for _ in range(5)]
    work = comm.all_reduce_multiple(tensors, scale=2.0, async_op=True)
    comm.wait_all()
    assert work.is_completed(), "wait_all must leave no work undone"
    for tensor in tensors:
        expect_all(tensor, n * (n + 1), "a tensor of a large set")
    for contiguous in (True, False):
        pair = [torch.full((3,), comm.rank + 1.0), torch.full((2,), comm.rank + 1.0, dtype=torch.float64)]
        work = comm.all_reduce_multiple(pair, "avg", scale=2.0, contiguous=contiguous, async_op=True)
        assert isinstance(work, Work), "async_op must give a Work"
        for tensor in work.wait():
            expect_all(tensor, n + 1.0, "twice the average of several")
        assert list(comm.all_reduce_multiple([], contiguous=contiguous)) == [], "an empty list must stay empty"
    assert list(comm.all_reduce_multiple([], async_op=True).wait()) == [], "an empty list must stay empty"


@check
def numbers_of_python_are_reduced_in_64_bits(comm: Communicator) -> None:
    """A float gives a float, an int an int; what does not fit, and options of tensors, are refused on all ranks."""
    n = comm.world_size
    total = comm.all_reduce(0.1 * (comm.rank + 1))
    assert type(total) is float, total
    assert abs(total - 0.1 * n * (n + 1) / 2) < 1e-14, total
    assert comm.all_reduce(float(comm.rank), "max") == n - 1.0
    assert comm.all_reduce(1.0, "avg", scale=3.0) == 3.0
    count = comm.all_reduce(2**40 + comm.rank)
    assert type(count) is int, count
    assert count == n * 2**40 + n * (n - 1) // 2
    raised(UnsupportedError, "the average of ints", comm.all_reduce, 1, "avg")
    raised(UnsupportedError, "a bool", comm.all_reduce, True)
    raised(InvalidArgumentError, "an int beyond int64", comm.all_reduce, 2**63)
    raised(InvalidArgumentError, "a number with async_op", comm.all_reduce, 1.0, async_op=True)
    if n > 1:
        raised(NumericOverflowError, "a sum beyond int64", comm.all_reduce, 2**62 + 2**61)
        raised(MismatchError, "an int and floats", comm.all_reduce, 1 if comm.rank else 1.0)
    assert comm.all_reduce(1.0) == n
