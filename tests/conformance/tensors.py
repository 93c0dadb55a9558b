"""Checks of tensors of all kinds: layouts, views, gradients, numpy's arrays, memory of `empty`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import torch

from conformance.checking import (
    SMALL_BYTES,
    UNTOUCHED,
    WINDOW_BYTES,
    check,
    expect_all,
    expect_same,
    least_ranks,
    pattern,
    plain,
    raised,
    roots,
    summed,
)
from statexchange.comm.communicator import Communicator
from statexchange.comm.work import Work
from statexchange.errors import InvalidArgumentError, UnsupportedError


def layouts_2d(dtype: torch.dtype) -> dict[str, torch.Tensor]:
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


def other_layouts(dtype: torch.dtype) -> dict[str, torch.Tensor]:
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
        "large, sliced with a step": torch.zeros((SMALL_BYTES + 99, 2), dtype=dtype)[:, 1],
        "large, transposed": torch.zeros((301, 203), dtype=dtype).t(),
    }


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return all elements of the storage of `tensor`."""
    n = tensor.untyped_storage().nbytes() // tensor.itemsize
    return tensor.as_strided((n,), (1,), 0)


def beside(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of the storage that do not belong to `tensor`, as a vector."""
    memory = memory_of(tensor)
    mask = torch.ones(memory.shape, dtype=torch.bool)
    mask.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(False)
    return memory[mask]


@contextlib.contextmanager
def only_the_tensor_changes(tensor: torch.Tensor, what: str) -> Iterator[None]:
    """Expect that the block changes nothing in the storage but `tensor`, and neither its address nor its strides."""
    before, layout = beside(tensor).clone(), (tensor.data_ptr(), tensor.stride())
    yield
    expect_same(beside(tensor), before, f"the storage beside the tensor that is {what}")
    assert (tensor.data_ptr(), tensor.stride()) == layout, f"the tensor that is {what} was moved"


@check
def results_are_written_in_place_in_every_layout(comm: Communicator) -> None:
    """Results are written in place, and nothing beside them, into tensors of every layout.

    Transposed, with steps, 0-d, empty, channels_last, inside a larger storage.
    """
    for dtype in (torch.float32, torch.int16):
        layouts = {**layouts_2d(dtype), **other_layouts(dtype)}
        for what, tensor in layouts.items():
            memory_of(tensor).fill_(UNTOUCHED)
            shape = tensor.shape
            for verb, expected in (
                ("all_reduce", summed(comm, shape, dtype)),
                ("broadcast", pattern(0, shape, dtype)),
            ):
                tensor.copy_(pattern(comm.rank, shape, dtype))
                with only_the_tensor_changes(tensor, what):
                    found = getattr(comm, verb)(tensor)
                assert found is tensor, f"{verb} must return the tensor that is {what}"
                expect_same(tensor, expected, f"{verb} of a tensor that is {what}")
            write_out(comm, tensor, what)


def write_out(comm: Communicator, out: torch.Tensor, what: str) -> None:
    """Write into `out`, whose layout is `what`, from a contiguous tensor."""
    shape, dtype, last = out.shape, out.dtype, comm.world_size - 1
    ours = pattern(comm.rank, shape, dtype)
    with only_the_tensor_changes(out, what):
        expect_same(comm.all_reduce(ours, out=out), summed(comm, shape, dtype), f"all_reduce into out, {what}")
        expect_same(
            comm.broadcast(ours, root=last, out=out), pattern(last, shape, dtype), f"broadcast into out, {what}"
        )
        out.fill_(UNTOUCHED)
        comm.reduce(ours, out=out)
    if comm.rank == 0:
        expect_same(out, summed(comm, shape, dtype), f"reduce into out, {what}")
    else:
        expect_all(out, UNTOUCHED, f"out of a reduce to another rank that is {what}")


@check
def ranks_may_use_different_layouts(comm: Communicator) -> None:
    """Only shape and dtype must agree: a tensor may be transposed on one rank and a slice on another."""
    for turn in range(6):
        ours = list(layouts_2d(torch.float32).values())[(turn + comm.rank) % 6]
        ours.copy_(pattern(comm.rank, (4, 6)))
        for rank, part in enumerate(comm.all_gather(ours)):
            expect_same(part, pattern(rank, (4, 6)), f"all_gather, part {rank}")
        parts = comm.all_to_all([ours] * comm.world_size)
        for rank, part in enumerate(parts):
            expect_same(part, pattern(rank, (4, 6)), f"all_to_all, part {rank}")
        tensors = [ours] * comm.world_size if comm.rank == 0 else None
        expect_same(comm.scatter(tensors), pattern(0, (4, 6)), "scatter")
        expect_same(comm.all_reduce(ours), summed(comm, (4, 6)), "all_reduce")


@check
def only_some_ranks_may_pass_out_or_async_op(comm: Communicator) -> None:
    """Each rank decides for itself whether it passes `out`, and whether it passes `async_op`."""
    for n in (7, SMALL_BYTES // 4 + 1, WINDOW_BYTES // 4 + 1):
        for chosen in roots(comm):
            out = torch.zeros(n) if comm.rank == chosen else None
            found = comm.all_reduce(pattern(comm.rank, n), out=out)
            expect_same(found, summed(comm, n), f"all_reduce of {n} where rank {chosen} passes out")
            found = comm.broadcast(pattern(comm.rank, n), out=out)
            expect_same(found, pattern(0, n), f"broadcast of {n} where rank {chosen} passes out")
            work = comm.all_reduce(pattern(comm.rank, n), async_op=comm.rank == chosen)
            found = work.wait() if isinstance(work, Work) else work
            expect_same(found, summed(comm, n), f"all_reduce of {n} where rank {chosen} waits later")


@least_ranks(2)
def strided_tensors_can_be_sent_and_received(comm: Communicator) -> None:
    """Tensors of every layout can be sent and received, and recv writes nothing beside its tensor."""
    for what, tensor in {**layouts_2d(torch.float32), **other_layouts(torch.float32)}.items():
        memory_of(tensor).fill_(UNTOUCHED)
        if comm.rank == 0:
            tensor.copy_(pattern(0, tensor.shape))
            comm.send(tensor, comm.world_size - 1)
        if comm.rank == comm.world_size - 1:
            with only_the_tensor_changes(tensor, what):
                comm.recv(tensor, 0)
            expect_same(tensor, pattern(0, tensor.shape), f"recv into a tensor that is {what}")


@check
def conjugate_and_negative_views_hold_the_result(comm: Communicator) -> None:
    """A lazy conjugate or negative view holds the result after the call like any tensor, or is refused on all ranks."""
    n = comm.world_size
    for kind in ("conjugate", "negative"):
        memory = torch.zeros(4, dtype=torch.complex64)
        view = memory.conj() if kind == "conjugate" else memory.conj().imag
        view.fill_(comm.rank + 1)
        with contextlib.suppress(UnsupportedError):
            comm.all_reduce(view)
            expect_all(view.real if kind == "conjugate" else view, n * (n + 1) / 2, f"a {kind} view")


@check
def the_default_device_has_no_effect(comm: Communicator) -> None:
    """Under any default device of torch all operations work, and results are on the device of their arguments."""
    n, ours = comm.world_size, pattern(comm.rank, (comm.world_size, 3))
    following, before = (comm.rank + 1) % n, (comm.rank - 1) % n
    integers, into, array = pattern(comm.rank, 5, torch.int64), torch.zeros(n, 3), np.ones(3)
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
    assert all(tensor.device == ours.device for tensor in found), "a result is on another device"
    assert shared.device.type == "cpu", f"empty gave a tensor on {shared.device}"
    expect_same(found[-1], summed(comm, (n, 3)), "all_reduce_multiple")
    expect_same(integers, summed(comm, 5, torch.int64), "all_reduce of integers")
    expect_all(arrays[0], n, "all_reduce of an array")
    expect_same(into, pattern(before, (n, 3)) if n > 1 else torch.zeros(n, 3), "recv")


# Tensors that require grad, and numpy's arrays


@check
def leaves_that_require_grad_stay_leaves(comm: Communicator) -> None:
    """Parameters and tensors that require grad are written in place, also as `out`, and stay leaves without grad_fn."""
    n = comm.world_size
    for make in (lambda: torch.ones(5, requires_grad=True), lambda: torch.nn.Parameter(torch.ones(5))):
        for act in writers(make):
            leaf, what, expected = act(comm)
            state = (leaf.is_leaf, leaf.requires_grad, leaf.grad_fn)
            assert state == (True, True, None), f"after {what} the tensor is no leaf"
            expect_all(leaf, expected if expected else n, what)
    received = [*comm.all_gather(torch.ones(5, requires_grad=True)), comm.broadcast(torch.nn.Parameter(torch.ones(5)))]
    assert all(tensor.grad_fn is None for tensor in received), "a result has a grad_fn"


def writers(make: Callable[[], torch.Tensor]) -> list[Callable[[Communicator], tuple[torch.Tensor, str, float]]]:
    """Return functions that each write into a new tensor of `make`.

    Each returns the tensor, a description, and the value that its elements must have (0: world size).
    """

    def in_place(comm: Communicator) -> tuple[torch.Tensor, str, float]:
        leaf = make()
        assert comm.all_reduce(leaf) is leaf, "all_reduce must return the leaf"
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


def arrays_of(comm: Communicator) -> dict[str, np.ndarray[Any, Any]]:
    """Return arrays of shape (3, 4) that hold this rank's pattern."""
    values = pattern(comm.rank, (3, 4)).cpu().numpy()
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


@check
def numpy_arrays_are_accepted_in_place_of_tensors(comm: Communicator) -> None:
    """Arrays are written in place, also strided ones and ml_dtypes' bfloat16; new results are arrays, too."""
    for what, array in arrays_of(comm).items():
        before = plain(array).clone()
        dtype = before.dtype
        out = np.zeros_like(array)
        assert comm.all_reduce(array, out=out) is out, "all_reduce must return out"
        expect_same(out, summed(comm, (3, 4), dtype), f"all_reduce of an array that is {what} into out")
        expect_same(array, before, f"the input array, {what}, with out")
        parts = comm.all_gather(array)
        assert all(isinstance(part, np.ndarray) and part.dtype == array.dtype for part in parts), f"types of {what}"
        for rank, part in enumerate(parts):
            expect_same(part, pattern(rank, (3, 4), dtype), f"all_gather of an array that is {what}")
        assert comm.all_reduce(array) is array, "all_reduce must return the array"
        expect_same(array, summed(comm, (3, 4), dtype), f"all_reduce of an array that is {what}")
        expect_same(comm.broadcast(out, root=comm.world_size - 1), array, "broadcast of an array")


@check
def read_only_arrays_can_be_read(comm: Communicator) -> None:
    """A read-only array may be reduced into `out`, gathered, and broadcast by root; as a target it is refused."""
    array = np.arange(6.0) + comm.rank
    array.flags.writeable = False
    expected = sum(np.arange(6.0) + rank for rank in range(comm.world_size))
    expect_same(comm.all_reduce(array, out=np.zeros(6)), expected, "all_reduce of a read-only array into out")
    assert len(comm.all_gather(array)) == comm.world_size, "all_gather of a read-only array"
    found = comm.broadcast(array if comm.rank == 0 else np.zeros(6))
    expect_same(found, np.arange(6.0), "broadcast of root's read-only array")
    raised(InvalidArgumentError, "all_reduce of a read-only array", comm.all_reduce, array)
    expect_same(array, np.arange(6.0) + comm.rank, "a read-only array")


# Refusals


@check
def empty_returns_ordinary_tensors(comm: Communicator) -> None:
    """`empty` returns a writable contiguous tensor of any shape and dtype."""
    for shape, dtype in (((5,), torch.float32), ((3, 0), torch.int8), ((), torch.float64), ((7, 5), torch.bfloat16)):
        tensor = comm.empty(shape, dtype)
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype), f"{dtype}{shape} became {tensor.dtype}"
        assert tensor.is_contiguous(), "empty gave a strided tensor"
        assert not tensor.requires_grad, "empty gave a tensor that requires grad"
        tensor.copy_(pattern(comm.rank, shape, dtype))
        expect_same(comm.all_reduce(tensor), summed(comm, shape, dtype), f"all_reduce of empty({shape})")


@check
def tensors_from_empty_are_reduced_in_place(comm: Communicator) -> None:
    """all_reduce, reduce and broadcast are right for tensors of `empty`, views of them, and if one rank has one."""
    n, last = 2 * WINDOW_BYTES // 4 + 12_347, comm.world_size - 1
    tensor = comm.empty((n,), torch.float32)
    for ours in (tensor, tensor[:-1], tensor[1001:], tensor[::2], tensor[16 * comm.rank :][: n - 64]):
        ours.copy_(pattern(comm.rank, len(ours)))
        expect_same(comm.all_reduce(ours), summed(comm, len(ours)), f"all_reduce of {len(ours)} elements of an empty")
        ours.copy_(pattern(comm.rank, len(ours)))
        expect_same(comm.broadcast(ours, root=last), pattern(last, len(ours)), f"broadcast of {len(ours)} elements")
        ours.copy_(pattern(comm.rank, len(ours)))
        comm.reduce(ours, root=last)
        theirs = summed(comm, len(ours)) if comm.rank == last else pattern(comm.rank, len(ours))
        expect_same(ours, theirs, f"reduce of {len(ours)} elements")
    mixed = tensor if comm.rank == 0 else torch.zeros(n)
    mixed.copy_(pattern(comm.rank, n))
    expect_same(comm.all_reduce(mixed), summed(comm, n), "all_reduce of an empty with others' ordinary tensors")


@check
def memory_of_empty_is_reused_only_when_dropped(comm: Communicator) -> None:
    """`empty` never returns memory of a live tensor, also if only some ranks dropped theirs."""
    n = WINDOW_BYTES // 4 + 17
    kept = comm.empty((n,), torch.float32).fill_(comm.rank + 1)
    for turn in range(4):
        other = comm.empty((n,), torch.float32).fill_(100.0 * turn)
        comm.all_reduce(other)
        del other
    expect_all(kept, comm.rank + 1, "a live tensor of empty, after others were made and dropped")
    ours: torch.Tensor | None = comm.empty((n,), torch.float32)
    if comm.rank:
        ours = None
    newer = comm.empty((n,), torch.float32)
    used = newer if ours is None else ours
    for verb, expected in (("all_reduce", summed(comm, n)), ("broadcast", pattern(0, n))):
        used.copy_(pattern(comm.rank, n))
        expect_same(getattr(comm, verb)(used), expected, f"{verb} where ranks use different empties")


# Groups
