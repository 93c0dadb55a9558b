"""Tests that need a GPU: NCCL with one rank, and CUDA tensors on every other backend. Run with -m gpu."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import statexchange as sx
from statexchange.testing import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is False"),
]


def checks_operations(comm: sx.comm.Communicator, device: str) -> None:
    """Run every operation on tensors of `device`: results are on it, too, and staged ones are always copied back."""
    n, rank = comm.world_size, comm.rank
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64):
        t = torch.full((100_003,), rank + 1, device=device).to(dtype)
        assert comm.all_reduce(t) is t
        assert bool((t == n * (n + 1) // 2).all())
        out = torch.zeros_like(t)
        comm.broadcast(torch.full_like(t, rank), root=n - 1, out=out)
        assert bool((out == n - 1).all())
        parts = comm.all_gather(torch.full((5,), rank, device=device).to(dtype))
        assert [int(p[0]) for p in parts] == list(range(n))
        assert all(p.device == t.device for p in parts)
        assert int(comm.reduce_scatter(torch.full((3 * n,), 2, device=device).to(dtype))[0]) == 2 * n
        swapped = comm.all_to_all([torch.full((2,), rank, device=device).to(dtype) for _ in range(n)])
        assert [int(s[0]) for s in swapped] == list(range(n))
        work = comm.all_reduce(torch.ones(7, device=device, dtype=dtype), async_op=True)
        assert int(work.wait()[0]) == n
    both = [torch.ones(3, device=device), torch.ones(4, device=device, dtype=torch.float64)]
    comm.all_reduce_multiple(both)
    assert [float(t[0]) for t in both] == [n, n]
    strided = torch.ones(4, 6, device=device).t()
    comm.all_reduce(strided)
    assert bool((strided == n).all())
    with pytest.raises(TypeError):
        comm.all_reduce(torch.ones(3, dtype=torch.int32, device=device), "avg")
    comm.wait_all()


def on_every_backend(backend: str) -> str:
    comm = sx.init(backend)
    checks_operations(comm, "cuda:0")
    if comm.world_size > 1:
        received = torch.zeros(1000, device="cuda:0")
        work = comm.send(torch.full((1000,), float(comm.rank), device="cuda:0"), 1 - comm.rank, async_op=True)
        comm.recv(received, 1 - comm.rank)
        work.wait()
        assert float(received[-1]) == 1 - comm.rank
    return str(comm.device)


@pytest.mark.parametrize("backend", ["auto", "shm", "mpi", "gloo"])
def test_cuda_tensors_go_through_a_cpu_backend_and_come_back(backend: str) -> None:
    assert len(run_ranks(on_every_backend, 2, backend="mpi", args=(backend,), timeout_s=120)) == 2


def one_rank_of_nccl() -> list[Any]:
    comm = sx.init("nccl")
    checks_operations(comm, "cuda:0")
    checks_operations(comm, "cpu")
    found = [comm.backend, str(comm.device)]
    sx.shutdown()
    torch.distributed.destroy_process_group()
    return found


def test_every_operation_runs_over_nccl_on_one_rank() -> None:
    assert run_ranks(one_rank_of_nccl, 1, backend="processes", timeout_s=120) == [["nccl", "cuda:0"]]


def scales_while_computing() -> float:
    """Reduce with a scale while a long kernel still computes the tensor; return an element."""
    comm = sx.init("nccl")
    t = torch.ones(50_000_000, device="cuda:0")
    torch.cuda._sleep(100_000_000)
    t.mul_(3)
    work = comm.all_reduce(t, scale=0.5, async_op=True)
    return float(work.wait()[-1])


def test_the_scale_is_applied_after_the_reduction() -> None:
    assert run_ranks(scales_while_computing, 1, backend="processes", timeout_s=120) == [1.5]


def device_of_rank() -> str:
    return str(sx.init("auto").device)


def test_ranks_get_gpus_in_turn() -> None:
    count = torch.cuda.device_count()
    found = run_ranks(device_of_rank, 2, backend="mpi", timeout_s=120)
    assert found == [f"cuda:{rank % count}" for rank in range(2)]


def state_on(device: str) -> dict[str, Any]:
    """Return tensors in C order and not, of more than one window, and empty."""
    numbers = torch.arange(3_000_000, device=device)
    return {
        "plain": numbers.float().reshape(3000, 1000),
        "strided": numbers.double().reshape(3000, 1000).T,
        "half": numbers[:1_000_001].bfloat16(),
        "scalar": torch.tensor(2.5, device=device),
        "none": torch.zeros(0, 3, device=device),
    }


def exports_and_loads(folder: str) -> None:
    comm = sx.init("auto")
    layout = {"plain": {"dim": 0}, "strided": {"dim": 1}}
    for way in ("now", "background"):
        state = state_on("cuda:0")
        options: dict[str, Any] = {"layout": layout, "replicas": "equal"}
        if way == "now":
            sx.export_checkpoint(state, f"{folder}/{way}", **options)
        else:
            future = sx.export_checkpoint(state, f"{folder}/{way}", background=True, **options)
            for tensor in state.values():
                tensor.zero_()
            future.result(60)
        merged = load_file(f"{folder}/{way}/model.safetensors")
        expected = state_on("cpu")
        for name, dim in (("plain", 0), ("strided", 1), ("half", None), ("scalar", None), ("none", None)):
            whole = expected[name] if dim is None else torch.cat([expected[name]] * comm.world_size, dim)
            assert torch.equal(merged[name], whole), (way, name)
    sx.export_checkpoint(state_on("cuda:0"), f"{folder}/whole")
    live = {name: torch.zeros_like(tensor) for name, tensor in state_on("cuda:0").items()}
    sx.load_checkpoint(live, f"{folder}/whole")
    for name, tensor in state_on("cuda:0").items():
        assert torch.equal(live[name], tensor), name
    sx.save_checkpoint({"model": live, "step": 3}, f"{folder}/saved")
    again = {"model": {name: torch.zeros_like(tensor) for name, tensor in live.items()}, "step": 0}
    sx.load_checkpoint(again, f"{folder}/saved")
    assert again["step"] == 3
    assert all(torch.equal(again["model"][name], tensor) for name, tensor in live.items())


@pytest.mark.parametrize("world_size", [1, 2])
def test_state_is_exported_from_a_gpu_and_loaded_back(world_size: int, tmp_path: Path) -> None:
    run_ranks(exports_and_loads, world_size, backend="mpi", args=(str(tmp_path),), timeout_s=120)


def takes_a_fused_step_after_a_load(folder: str) -> None:
    """Check that an optimizer whose `step` is on the GPU continues after a load as if it had not stopped."""

    def job() -> dict[str, Any]:
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8, device="cuda:0")
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), fused=True)}

    def step(state: dict[str, Any]) -> None:
        state["model"](torch.ones(4, 8, device="cuda:0")).square().mean().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()

    first, second = job(), job()
    step(first)
    sx.save_checkpoint(first, folder)
    sx.load_checkpoint(second, folder)
    for state in (first, second):
        step(state)
    assert torch.equal(first["model"].weight, second["model"].weight)


def test_a_fused_optimizer_continues_after_a_load(tmp_path: Path) -> None:
    run_ranks(takes_a_fused_step_after_a_load, 1, backend="processes", args=(str(tmp_path / "saved"),), timeout_s=120)
