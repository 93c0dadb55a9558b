"""Gathering through shared memory and a workspace: everything arrives bit-equal, in rank order, on the first rank."""

import enum
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from equality import equal_bits
from starting import THREADS_AND_PROCESSES

import statexchange as sx


class Kind(enum.Enum):
    ROW = "row"
    COLUMN = 2


class Span(NamedTuple):
    low: int
    high: float


@dataclass
class Layer:
    name: str
    weight: Any
    span: Span = field(default_factory=lambda: Span(0, float("nan")))
    kind: Kind = Kind.ROW
    dtype: Any = torch.bfloat16
    by_rank: dict[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Unknown:
    x: int


def odd_tensors() -> dict[str, torch.Tensor]:
    """Return tensors of every kind that a state dict may hold, equal on every rank."""
    base = torch.arange(1 << 20, dtype=torch.float32)
    grid = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tied = torch.arange(3.0)
    return {
        "view": base[10:20],
        "strided": base[::1000],
        "expanded": torch.tensor([1.5]).expand(7),
        "transposed": grid.t(),
        "flipped": grid.flip(0),
        "zero_dim": torch.tensor(4.6052),
        "empty": torch.empty(0, 5),
        "bool": torch.tensor([True, False, True]),
        "int8": torch.tensor([-128, 127], dtype=torch.int8),
        "int16": torch.tensor([-3], dtype=torch.int16),
        "uint16": torch.tensor([65535], dtype=torch.uint16),
        "int64": torch.tensor([[2**62]]),
        "half": torch.tensor([6e4, 1e-7], dtype=torch.float16),
        "bf16": torch.tensor([3.14, float("nan"), float("inf")], dtype=torch.bfloat16),
        "fp8": torch.tensor([1.0, -448.0], dtype=torch.float8_e4m3fn),
        "fp8b": torch.tensor([1.0, float("inf")], dtype=torch.float8_e5m2),
        "double": torch.tensor([0.1], dtype=torch.float64),
        "complex64": torch.tensor([1 + 2j]),
        "complex128": torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex128),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
        "parameter": torch.nn.Parameter(torch.arange(4.0), requires_grad=False),
        "needs_grad": torch.arange(2.0).requires_grad_(),
        "channels_last": torch.arange(48.0).reshape(1, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        "tied": tied,
        "tied_too": tied,
    }


@pytest.mark.ranks(1, 3, backend=THREADS_AND_PROCESSES)
def test_every_kind_of_tensor_comes_back_bit_equal_from_every_rank(tmp_path: Path) -> None:
    comm = sx.get_communicator()
    for workspace in (None, tmp_path / "ws"):
        with sx.gather_state(odd_tensors(), workspace=workspace) as states:
            assert len(states) == (comm.world_size if comm.rank == 0 else 0)
            for state in states:
                assert list(state) == list(odd_tensors())
                for name, expected in odd_tensors().items():
                    assert equal_bits(state[name], expected), name
                assert state["tied"] is state["tied_too"]
                assert isinstance(state["parameter"], torch.nn.Parameter)
                assert not state["parameter"].requires_grad
                assert state["needs_grad"].requires_grad
    sx.get_communicator().barrier()  # each rank removes its own file after the agreement
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.ranks(3, backend=THREADS_AND_PROCESSES)
def test_shapes_may_differ_and_the_first_entry_is_the_callers_own_tensor(tmp_path: Path) -> None:
    rank = sx.get_communicator().rank
    mine = torch.full((2 + rank, 3), float(rank), dtype=torch.bfloat16)
    for path in (None, tmp_path / "ws"):
        with sx.get_tensors_parallel(mine, [0, 1, 2], None, path) as tensors:
            if rank:
                assert tensors == []
                continue
            assert tensors[0] is mine
            assert [tuple(t.shape) for t in tensors] == [(2, 3), (3, 3), (4, 3)]
            assert [float(t[0, 0]) for t in tensors] == [0.0, 1.0, 2.0]


@pytest.mark.ranks(2, backend=THREADS_AND_PROCESSES)
@pytest.mark.parametrize("count", [0, 1, 39, 40, 1000])
def test_any_number_of_tensors_in_a_config_arrives(count: int, tmp_path: Path) -> None:
    rank = sx.get_communicator().rank
    for path in (None, tmp_path / "ws"):
        weights = {f"w{i}": torch.full((i % 5,), float(rank * 10_000 + i)) for i in range(count)}
        with sx.get_configs_parallel({"weights": weights}, [0, 1], None, path) as configs:
            for r, config in enumerate(configs):
                assert list(config["weights"]) == list(weights)
                assert all(
                    torch.equal(t, torch.full((i % 5,), float(r * 10_000 + i)))
                    for i, t in enumerate(config["weights"].values())
                )


@pytest.mark.ranks(4, backend=THREADS_AND_PROCESSES)
def test_none_keeps_its_place_and_entries_are_in_the_order_of_ranks() -> None:
    rank = sx.get_communicator().rank
    for nobody in range(4):
        config = None if rank == nobody else {"rank": rank}
        with sx.get_configs_parallel(config, [2, 0, 3, 1]) as configs:
            expected = [None if r == nobody else {"rank": r} for r in (2, 0, 3, 1)]
            assert configs == (expected if rank == 2 else [])
    with sx.get_configs_parallel(None, [0, 1, 2, 3]) as configs:
        assert configs == ([None] * 4 if rank == 0 else [])


@pytest.mark.ranks(1, 2, backend=THREADS_AND_PROCESSES)
def test_configs_of_any_structure_arrive_equal(tmp_path: Path) -> None:
    comm = sx.get_communicator()
    for path in (None, tmp_path / "ws"):
        layer = Layer(f"layer{comm.rank}", torch.arange(4.0) + comm.rank, by_rank={3: (1, 2), -1: ()})
        with sx.get_configs_parallel(
            [layer, {"nested": (layer.kind, [None, 1.5])}], list(range(comm.world_size)), None, path
        ) as configs:
            for rank, config in enumerate(configs):
                found = config[0]
                assert type(found) is Layer
                assert (found.name, found.kind, found.dtype) == (f"layer{rank}", Kind.ROW, torch.bfloat16)
                assert torch.equal(found.weight, torch.arange(4.0) + rank)
                assert type(found.span) is Span
                assert found.span.high != found.span.high
                assert found.by_rank == {3: (1, 2), -1: ()}
                assert config[1] == {"nested": (Kind.ROW, [None, 1.5])}


@pytest.mark.ranks(2, backend="gloo")
def test_a_dataclass_that_the_first_rank_cannot_build_is_a_mapping() -> None:
    rank = sx.get_communicator().rank
    with sx.get_configs_parallel(Unknown(7) if rank else None, [0, 1]) as configs:
        if rank == 0:
            assert configs[1] == {"__name__": "Unknown", "x": 7}
            sx.register_config(Unknown)
    with sx.get_configs_parallel(Unknown(7) if rank else None, [0, 1]) as configs:
        if rank == 0:
            assert configs[1] == Unknown(7)


@pytest.mark.ranks(1, backend=THREADS_AND_PROCESSES)
def test_one_rank_alone_gets_its_own_values() -> None:
    tensor = torch.arange(3)
    with sx.get_tensors_parallel(tensor, [0]) as tensors:
        assert tensors == [tensor]
    with sx.get_configs_parallel({"a": 1}, [0]) as configs:
        assert configs == [{"a": 1}]


def test_without_any_launcher_a_script_is_a_world_of_one() -> None:
    with sx.gather_state({"w": torch.ones(2)}) as (state,):
        assert torch.equal(state["w"], torch.ones(2))
    with sx.get_tensors_parallel(torch.ones(2), [0]) as (only,):
        assert torch.equal(only, torch.ones(2))


@pytest.mark.ranks(4, backend="gloo")
def test_sets_of_ranks_gather_at_once_without_the_others() -> None:
    """torch.distributed runs, sx.init was not called, and the sets make different numbers of calls."""
    import torch.distributed as dist

    rank = dist.get_rank()
    if rank == 3:
        return
    ranks = [1, 0] if rank < 2 else [2]
    for i in range(3 if rank < 2 else 7):
        with sx.get_tensors_parallel(torch.tensor(rank * 100 + i), ranks) as tensors:
            assert [int(t) for t in tensors] == ([r * 100 + i for r in ranks] if rank == ranks[0] else [])


@pytest.mark.ranks(2, backend=THREADS_AND_PROCESSES)
def test_a_kept_tensor_stays_valid_and_unchanged() -> None:
    rank = sx.get_communicator().rank
    kept = []
    for i in range(6):
        with sx.gather_state({"w": torch.full((5000,), rank * 100.0 + i)}) as states:
            kept += [(100.0 + i, states[1]["w"][10:])] if rank == 0 and i % 2 else []
    for expected, tensor in kept:
        assert torch.equal(tensor, torch.full((4990,), expected))


@pytest.mark.ranks(2, backend="gloo")
def test_memory_is_reused_once_no_view_of_it_is_left() -> None:
    comm = sx.get_communicator()
    seen = set()
    for i in range(8):
        with sx.get_tensors_parallel(
            torch.full((100_000,), float(i)), [0, 1]
        ) as tensors:  # the list is used after the block
            assert [float(t[-1]) for t in tensors] == ([float(i)] * 2 if comm.rank == 0 else [])
            seen |= set(sx.get_communicator().arenas.attached_ids())
    assert len(seen) <= 2


@pytest.mark.ranks(2, backend="threads")
def test_a_state_is_closed_after_its_block() -> None:
    with sx.gather_state({"a": torch.ones(1), "b": torch.ones(1)}) as states:
        pass
    for state in states:
        with pytest.raises(sx.errors.InvalidArgumentError, match="ended"):
            state["a"]


@pytest.mark.ranks(2, backend=THREADS_AND_PROCESSES)
def test_numpy_arrays_come_back_as_numpy_arrays(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.int32).reshape(3, 4).T
    for path in (None, tmp_path / "ws"):
        with sx.get_tensors_parallel(array, [0, 1], None, path) as arrays:
            for found in arrays:
                assert isinstance(found, np.ndarray)
                np.testing.assert_array_equal(found, array)


@pytest.mark.ranks(2, backend="threads")
def test_nested_blocks_on_another_root_have_their_own_values() -> None:
    rank = sx.get_communicator().rank
    with sx.gather_state({"w": torch.full((9,), float(rank))}, root=1) as outer:
        with sx.gather_state({"w": torch.full((9,), rank + 10.0)}, root=1) as inner:
            if rank == 1:
                assert [float(s["w"][0]) for s in inner] == [10.0, 11.0]
        if rank == 1:
            assert [float(s["w"][0]) for s in outer] == [0.0, 1.0]
