"""Helpers of all checks: the marks of a check, comparisons with named failures, and each rank's data."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import torch
from equality import bits_of, equal_bits

from statexchange.comm.communicator import Communicator
from statexchange.errors import excerpt

Act = Callable[[Communicator], Any]
Body = TypeVar("Body", bound=Callable[[Communicator], None])

SMALL_BYTES = 1 << 16
WINDOW_BYTES = 1 << 20
PROMPTLY_S = 1.0
UNTOUCHED = -77
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def least_ranks(number: int) -> Callable[[Body], Body]:
    """Mark a function as a check of communicators that have at least so many ranks."""

    def mark(body: Body) -> Body:
        body.least_ranks = number  # type: ignore[attr-defined]
        return body

    return mark


check = least_ranks(1)


# Comparisons


def plain(value: Any) -> torch.Tensor:
    """Return a tensor, array or number as a CPU tensor."""
    if isinstance(value, np.ndarray):
        copy = np.array(value, order="C")
        if copy.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(copy.view(np.uint16)).view(torch.bfloat16)
        return torch.from_numpy(copy)
    tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value)
    return tensor.detach().cpu().resolve_conj().resolve_neg()


def expect_same(result: Any, expected: Any, what: str) -> None:
    """Raise unless both have equal dtype, shape and bits."""
    actual, wanted = plain(result), plain(expected)
    about = f"{actual.dtype}{list(actual.shape)}"
    assert (actual.dtype, actual.shape) == (wanted.dtype, wanted.shape), (
        f"{what}: {about} instead of {wanted.dtype}{list(wanted.shape)}"
    )
    if equal_bits(actual, wanted):
        return
    wrong = (actual != wanted).flatten().nonzero().flatten()
    at = int(wrong[0]) if len(wrong) else 0
    pair = f"{actual.flatten()[at].item()} instead of {wanted.flatten()[at].item()}"
    raise AssertionError(f"{what}: {len(wrong)} elements of {about} are wrong, the first at {at}: {pair}")


def expect_all(result: Any, value: float, what: str) -> None:
    """Raise unless every element is `value`."""
    tensor = plain(result)
    expect_same(tensor, torch.full_like(tensor, value), what)


def expect_equal_bits(comm: Communicator, tensor: Any, what: str) -> None:
    """Raise unless all ranks hold the same bits. Collective."""
    digest = hashlib.blake2b(bits_of(plain(tensor))[2], digest_size=8).hexdigest()
    digests = comm.all_gather_object(digest)
    assert len(set(digests)) == 1, f"{what}: ranks hold different bits: {digests}"


def raised(kind: type[BaseException], what: str, act: Callable[..., Any], *args: Any, **named: Any) -> BaseException:
    """Return the error of `kind` that ``act(*args, **named)`` raises; AssertionError if it raises none."""
    try:
        result = act(*args, **named)
    except kind as error:
        return error
    raise AssertionError(f"{what}: no {kind.__name__}, but {excerpt(result, 200)}")


def site(act: Act) -> str:
    """Return file and line of a lambda."""
    code: Any = act.__code__
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"


def expect_sites(error: BaseException, *acts: Act) -> None:
    for act in acts:
        assert site(act) in str(error), f"the message does not name {site(act)}: {error}"


# Each rank's data


def pattern(rank: int, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return small integers that depend on rank and position.

    Sums and products over four ranks are exact in every dtype.
    """
    return counted(shape, dtype) + rank


def counted(shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    sizes = torch.Size((shape,) if isinstance(shape, int) else shape)
    return one_to_thirteen(sizes.numel(), torch.empty(0).device).to(dtype).view(sizes)


@functools.lru_cache(maxsize=32)
def one_to_thirteen(n: int, device: torch.device) -> torch.Tensor:
    return torch.arange(1, 14, dtype=torch.int8, device=device).repeat(n // 13 + 1)[:n]


def summed(comm: Communicator, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the sum of all ranks' patterns."""
    n = comm.world_size
    return counted(shape, dtype) * n + n * (n - 1) // 2


def noise(rank: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Return random bits, NaNs among them; the same on every rank that asks for `rank`'s."""
    data = random_bytes(rank, n * dtype.itemsize)
    tensor = data.view(dtype) if dtype != torch.bool else data > 127
    return tensor.to(torch.empty(0).device)


@functools.lru_cache(maxsize=32)
def random_bytes(rank: int, nbytes: int) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(1000 * nbytes + rank)
    # Words of eight bytes take a seventh of the time that single bytes do. The upper bound is exclusive.
    words = torch.randint(-(2**63), 2**63 - 1, (nbytes // 8 + 1,), generator=generator, dtype=torch.int64, device="cpu")
    return words.view(torch.uint8)[:nbytes]


def roots(comm: Communicator) -> list[int]:
    return sorted({0, comm.world_size - 1})


def edge_sizes(itemsize: int) -> list[int]:
    """Return numbers of elements on both sides of each limit, odd ones, and several windows with a short last one."""
    small, window = SMALL_BYTES // itemsize, WINDOW_BYTES // itemsize
    return [0, 1, 1001, small, small + 1, window, window + 1, 2 * window + 12_347]


def few_sizes(itemsize: int) -> list[int]:
    """Return one number of elements each for the smallest messages, a part of a window and several windows."""
    return [7, SMALL_BYTES // itemsize + 1, WINDOW_BYTES // itemsize + 1001]


def expect_it_still_works(comm: Communicator) -> None:
    """Use every algorithm that a backend may have, twice. This fails if one rank is a message ahead of another."""
    for turn in range(2):
        for n in (3, 20_001, 270_001):
            expect_same(comm.all_reduce(pattern(comm.rank, n)), summed(comm, n), f"all_reduce of {n}, afterwards")
            found = comm.broadcast(pattern(comm.rank, n), root=turn % comm.world_size)
            expect_same(found, pattern(turn % comm.world_size, n), f"broadcast of {n}, afterwards")
        parts = comm.all_gather(pattern(comm.rank, 11 + turn))
        expect_same(torch.stack(parts).sum(0), summed(comm, 11 + turn), "all_gather, afterwards")
    assert comm.all_gather_object(comm.rank) == list(range(comm.world_size)), "objects, afterwards"
