"""Gathering through shared memory and a workspace: everything arrives bit-equal, in rank order, on the first rank."""

import enum
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from equality import equal_bits
from programs import require_mounts
from shared_names import no_names_left
from starting import THREADS_AND_PROCESSES

import statexchange as sx
from statexchange.exchange import gather_transport
from statexchange.testing import run_ranks


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


# Failures


@pytest.mark.ranks(2, backend="threads")
@pytest.mark.parametrize("ranks", [[], [0, 0], [0, 5], [-1, 0]], ids=str)
def test_bad_ranks_are_refused(ranks: list[int]) -> None:
    with (
        pytest.raises(ValueError, match="ranks must be"),
        sx.get_tensors_parallel(torch.ones(1), ranks),
    ):
        pass


@pytest.mark.ranks(2, backend="threads")
def test_a_caller_outside_of_ranks_is_refused() -> None:
    if sx.get_communicator().rank == 1:
        with pytest.raises(ValueError, match=r"among ranks \[0\]"), sx.get_configs_parallel({}, [0]):
            pass


@pytest.mark.ranks(3, backend=THREADS_AND_PROCESSES)
@pytest.mark.parametrize("who", [0, 1])
def test_an_exception_in_the_block_is_raised_on_every_member(who: int, tmp_path: Path) -> None:
    rank = sx.get_communicator().rank
    for workspace in (None, tmp_path / "ws"):
        with (
            pytest.raises(KeyError if rank == who else sx.errors.PeerError) as caught,
            sx.gather_state({"w": torch.ones(3)}, workspace=workspace),
        ):
            if rank == who:
                raise KeyError("boo")
        if rank != who:
            assert caught.value.rank == who
            assert "KeyError: 'boo'" in str(caught.value)
    sx.get_communicator().barrier()  # each rank removes its own file after the agreement
    assert not list(tmp_path.rglob("*.safetensors"))
    with sx.gather_state({"w": torch.ones(3)}) as states:  # the communicator still works
        assert len(states) in (0, 3)


@pytest.mark.ranks(3, backend=THREADS_AND_PROCESSES)
def test_a_value_that_cannot_be_sent_is_named_on_every_rank() -> None:
    rank = sx.get_communicator().rank
    bad = torch.ones(3).to_sparse() if rank == 1 else torch.ones(3)
    with (
        pytest.raises(sx.errors.UnsupportedError, match="sparse") as caught,
        sx.gather_state({"layer.w": bad}),
    ):
        pass
    assert (caught.value.name, caught.value.rank) == ("layer.w", 1)
    with (
        pytest.raises(sx.errors.UnsupportedError, match=r"object.* at \.a\[1\]"),
        sx.get_configs_parallel({"a": [1, object() if rank == 2 else 2]}, [0, 1, 2]),
    ):
        pass


@pytest.mark.ranks(2, backend="gloo")
def test_an_impossible_workspace_is_an_error_with_its_path_on_every_rank(tmp_path: Path) -> None:
    rank = sx.get_communicator().rank
    target = tmp_path / "file"
    if rank == 0:
        target.touch()
    sx.get_communicator().barrier()
    with (
        pytest.raises(sx.errors.NotFoundError, match="not a directory"),
        sx.gather_state({"w": torch.ones(3)}, workspace=target / "ws"),
    ):
        pass


def gathers_where_others_may_write(workspace: str) -> str:
    """Gather; the directory of root is opened to other users before anything is written there."""
    begin = gather_transport._FileTransport.begin

    def begin_and_open(transport: gather_transport._FileTransport, root: int) -> None:
        begin(transport, root)
        for path in Path(workspace).glob(".gather-*.partial"):
            path.chmod(0o777)

    gather_transport._FileTransport.begin = begin_and_open
    with pytest.raises(sx.errors.UnsafeError) as caught, sx.gather_state({"w": torch.ones(2)}, workspace=workspace):
        pass
    return str(caught.value)


def test_nothing_is_written_where_other_users_may_change_it(tmp_path: Path) -> None:
    for text in run_ranks(gathers_where_others_may_write, 2, backend="gloo", args=(str(tmp_path),)):
        assert "others may write in this directory" in text
    assert os.listdir(tmp_path) == []


def gathers_in_own_directory(workspace: str) -> str:
    comm = sx.get_communicator()
    own = Path(workspace, str(comm.rank))
    own.mkdir(parents=True)
    with pytest.raises(sx.errors.NotFoundError) as caught, sx.gather_state({"w": torch.ones(2)}, workspace=own):
        pass
    return str(caught.value)


def test_ranks_that_see_different_directories_get_an_error(tmp_path: Path) -> None:
    for text in run_ranks(gathers_in_own_directory, 2, args=(str(tmp_path),)):
        assert "pass the same shared directory, or URL, on all ranks" in text
        assert "rank 1" in text
        assert str(tmp_path / "1") in text
    assert [os.listdir(tmp_path / str(rank)) for rank in range(2)] == [[], []]


IN_MEMORY = """
import os, sys
import torch
import statexchange as sx
with sx.gather_state({"w": torch.ones(3)}, workspace="shm://gathered") as (state,):
    assert state["w"].tolist() == [1, 1, 1]
base = f"/dev/shm/statexchange-{os.getuid()}"
print(oct(os.stat(base).st_mode & 0o777), os.listdir(base))
os.chmod(base, 0o777)
try:
    with sx.gather_state({"w": torch.ones(3)}, workspace="shm://gathered"):
        pass
except sx.errors.UnsafeError as error:
    print("others may write" in error.message)
"""


def test_a_gather_on_tmpfs_is_private_and_leaves_nothing() -> None:
    """It uses a /dev/shm of its own: other tests use the directory of this user."""
    require_mounts()
    script = 'mount -t tmpfs t /dev/shm && exec "$0" -c "$1"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, sys.executable, IN_MEMORY], capture_output=True, text=True
    )
    assert done.stdout == "0o700 []\nTrue\n", done.stderr


def dies_in_block(how: str, workspace: str | None) -> str:
    comm = sx.get_communicator()
    try:
        with sx.gather_state({"w": torch.ones(1000)}, workspace=workspace):
            if comm.rank == 1:
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                sys.exit(3)
    except sx.errors.PeerError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_a_rank_that_dies_in_the_block_is_named_by_the_others(how: str) -> None:
    with no_names_left():
        outcomes = run_ranks(dies_in_block, 3, backend="gloo", args=(how, None), allow_failure=True)
    assert outcomes[0].value is not None
    assert "rank 1" in outcomes[0].value
    assert "rank 1" in outcomes[2].value


def test_the_file_of_a_rank_that_dies_in_the_block_is_removed(tmp_path: Path) -> None:
    args = ("kill", str(tmp_path / "ws"))
    outcomes = run_ranks(dies_in_block, 3, backend="gloo", args=args, allow_failure=True)
    assert "rank 1" in outcomes[0].value
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def is_killed_as_root(workspace: str) -> None:
    comm = sx.get_communicator()
    with sx.gather_state({"w": torch.ones(1000)}, workspace=workspace):
        comm.barrier()
        os.kill(os.getpid(), signal.SIGKILL)


def gathers_through(workspace: str) -> list[float]:
    with sx.gather_state({"w": torch.ones(2)}, workspace=workspace) as states:
        return [float(state["w"].sum()) for state in states]


def test_files_of_a_job_whose_ranks_were_all_killed_are_removed_by_the_next(tmp_path: Path) -> None:
    workspace = str(tmp_path / "ws")
    run_ranks(is_killed_as_root, 2, backend="gloo", args=(workspace,), allow_failure=True)
    assert [path for path in tmp_path.rglob("*") if path.is_file()]
    assert run_ranks(gathers_through, 2, backend="gloo", args=(workspace,))[0] == [2.0, 2.0]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def never_calls(timeout_s: float) -> list[int]:
    import torch.distributed as dist

    comm = sx.comm.from_process_group(dist.group.WORLD, timeout_s=timeout_s)
    if comm.rank == 1:
        time.sleep(1.5)
        return []
    with (
        pytest.raises(sx.errors.StallError, match="gather_state") as caught,
        sx.gather_state({"w": torch.ones(3)}, comm=comm),
    ):
        pass
    assert caught.value.missing == (1,)
    return list(caught.value.missing)


def test_a_rank_that_never_calls_is_named_at_the_deadline() -> None:
    assert run_ranks(never_calls, 3, backend="gloo", args=(0.5,))[::2] == [[1], [1]]


def gathers_many_times(seed: int) -> list[float]:
    rank = sx.get_communicator().rank
    found = []
    for i in range(20):
        with sx.get_tensors_parallel(torch.full((2000,), float(seed * 1000 + i * 10 + rank)), [0, 1]) as tensors:
            found += [float(t[0]) for t in tensors]
    return found


def test_two_jobs_at_once_on_one_host_do_not_interfere() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(run_ranks, gathers_many_times, 2, backend="gloo", args=(seed,)) for seed in (1, 2)]
        for seed, job in zip((1, 2), jobs, strict=True):
            assert job.result()[0] == [float(seed * 1000 + i * 10 + r) for i in range(20) for r in range(2)]


@pytest.mark.ranks(2, backend="threads")
def test_views_of_one_memory_that_differ_in_value_or_kind_are_separate_tensors() -> None:
    z = torch.tensor([1 + 2j, 3 - 1j])
    p = torch.nn.Parameter(torch.ones(2))
    state = {"z": z, "conj": z.conj(), "p": p, "data": p.detach()}
    with sx.gather_state(state) as states:
        for found in states:
            assert all(equal_bits(found[name], tensor) for name, tensor in state.items())
            assert type(found["data"]) is torch.Tensor


@pytest.mark.ranks(2, backend=THREADS_AND_PROCESSES)
def test_ranks_stay_synchronised_after_many_errors() -> None:
    comm = sx.get_communicator()
    tensor = torch.ones(10)
    for i in range(100):
        with pytest.raises((sx.errors.PeerError, ZeroDivisionError)), sx.gather_state({"w": tensor}, root=i % 2):
            if comm.rank == i % 2:
                raise ZeroDivisionError
        with sx.get_tensors_parallel(tensor, [0, 1]) as tensors:
            assert len(tensors) == (0 if comm.rank else 2)


@pytest.mark.ranks(2, backend="threads")
def test_tensors_without_plain_bytes_are_refused_on_every_rank() -> None:
    rank = sx.get_communicator().rank
    freed = torch.randn(1000)
    freed.untyped_storage().resize_(0)
    masked = np.ma.masked_array([1, 2], [0, 1])
    for bad, match in [(freed, "freed"), (masked, "mask"), (torch.empty(2, device="meta"), "meta")]:
        with (
            pytest.raises(sx.errors.UnsupportedError, match=match),
            sx.gather_state({"w": bad if rank else torch.ones(2)}),
        ):
            pass
    nothing = None if rank else torch.ones(1)
    with (
        pytest.raises(sx.errors.InvalidArgumentError, match="tensor must be"),
        sx.get_tensors_parallel(nothing, [0, 1]),
    ):
        pass


def starts_over(folder: str) -> list[list[int]]:
    """Destroy torch.distributed's group, and make one with the ranks swapped."""
    import torch.distributed as dist

    found = []
    for turn in range(2):
        rank = dist.get_rank()
        with sx.get_tensors_parallel(torch.tensor(rank), [0, 1]) as tensors:
            found.append([int(t) for t in tensors])
        dist.barrier()
        dist.destroy_process_group()
        store = dist.FileStore(f"{folder}/store{turn}", 2)
        dist.init_process_group("gloo", store=store, rank=1 - rank, world_size=2)
    return found


def test_a_new_default_group_gets_new_members(tmp_path: Path) -> None:
    assert run_ranks(starts_over, 2, backend="gloo", args=(str(tmp_path),)) == [[[0, 1], []], [[], [0, 1]]]
