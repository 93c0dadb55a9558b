"""Tests that need a GPU: NCCL with one rank, and CUDA tensors on every other backend. Run with -m gpu."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from state_kinds import CALLS, KINDS, outcome, table
from torch import nn

import statexchange as sx
from statexchange.testing import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is False"),
]
DEVICE = "cuda:0"


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
    return [comm.backend, str(comm.device)]


def test_a_world_of_one_needs_no_nccl() -> None:
    assert run_ranks(one_rank_of_nccl, 1, backend="processes", timeout_s=120) == [["single", "cuda:0"]]


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


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model(torch.randn(6, 8, generator=generator).to(DEVICE)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def sharded_job(seed: int) -> dict[str, Any]:
    """Return a model under FSDP2 and an optimizer whose `step` is on the GPU; each layer is a group of its own."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).to(DEVICE)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    return {"model": model, "optimizer": optimizer, "random": sx.integrations.RandomState(), "step": seed}


def resumes_under_fsdp2(folder: str) -> None:
    """Check that a model under FSDP2 over torch's own NCCL group continues after a load as if it had not stopped."""
    torch.distributed.init_process_group("nccl", rank=0, world_size=1, store=torch.distributed.HashStore())
    sx.init()
    job = sharded_job(1)
    trained(job["model"], job["optimizer"], 1)
    sx.save_checkpoint(job, f"{folder}/now")
    future = sx.save_checkpoint(job, f"{folder}/background", background=True)
    drawn = torch.rand(4, device=DEVICE)
    trained(job["model"], job["optimizer"], 2)  # while the save above writes
    future.result(60)
    expected = {name: tensor.full_tensor() for name, tensor in job["model"].state_dict().items()}
    for way in ("now", "background"):
        again = sharded_job(2)
        sx.load_checkpoint(again, f"{folder}/{way}")
        assert again["step"] == 1
        assert torch.equal(torch.rand(4, device=DEVICE), drawn)
        trained(again["model"], again["optimizer"], 2)
        for name, tensor in again["model"].state_dict().items():
            assert torch.equal(tensor.full_tensor(), expected[name]), (way, name)
    sx.export_checkpoint(job["model"], f"{folder}/exported")
    merged = load_file(f"{folder}/exported/model.safetensors", device=DEVICE)
    assert all(torch.equal(merged[name], tensor) for name, tensor in expected.items())
    whole = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    sx.load_checkpoint({"model": whole}, f"{folder}/now", include="model.*")
    sx.shutdown()
    torch.distributed.destroy_process_group()


def test_a_model_under_fsdp2_resumes(tmp_path: Path) -> None:
    run_ranks(resumes_under_fsdp2, 1, backend="processes", args=(str(tmp_path),), timeout_s=120)


def sharded_over(comm: sx.comm.Communicator, seed: int) -> dict[str, Any]:
    """Return DTensors on the GPU, sharded unevenly over all ranks, replicated, and as an optimizer's state."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    n, rank = comm.world_size, comm.rank
    torch.cuda.set_device(DEVICE)  # of which there are fewer than ranks
    mesh = init_device_mesh("cuda", (n,))
    whole = torch.arange(7 * 5, device=DEVICE).float().reshape(7, 5) * seed
    rows = -(-7 // n)

    def make(whole: torch.Tensor, dim: int | None) -> DTensor:
        local = whole if dim is None else whole[rows * rank : rows * (rank + 1)].clone()
        placement = Replicate() if dim is None else Shard(dim)
        return DTensor.from_local(local, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride())

    parameter = nn.Parameter(make(whole, 0))
    optimizer = torch.optim.Adam([parameter])
    optimizer.state[parameter] = {
        "step": torch.tensor(float(seed)),
        "exp_avg": make(whole + 1, 0),
        "exp_avg_sq": make(whole + 2, 0),
    }
    model = nn.Module()
    model.register_parameter("weight", parameter)
    return {"model": model, "optimizer": optimizer, "copy": make(whole + 3, None)}


def local_parts(state: dict[str, Any]) -> list[torch.Tensor]:
    parameter = state["model"].weight
    tensors = [parameter, *state["optimizer"].state[parameter].values(), state["copy"]]
    return [tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]


def moves_shards(folder: str, way: str) -> None:
    comm = sx.get_communicator()
    expected = local_parts(sharded_over(comm, 2))
    if way == "save":
        sx.save_checkpoint(sharded_over(comm, 2), f"{folder}/saved")
        sx.export_checkpoint({"w": sharded_over(comm, 2)["copy"]}, f"{folder}/exported")
    live = sharded_over(comm, 3)
    sx.load_checkpoint(live, f"{folder}/saved")
    for found, wanted in zip(local_parts(live), expected, strict=True):
        assert found.device == wanted.device
        assert torch.equal(found, wanted)


def test_dtensors_on_a_gpu_are_loaded_on_another_number_of_ranks(tmp_path: Path) -> None:
    for world_size, way in ((2, "save"), (3, "load"), (1, "load")):
        run_ranks(moves_shards, world_size, backend="gloo", args=(str(tmp_path), way), timeout_s=120)


def trains_together(backend: str) -> str:
    """Check the training layer with a model on the GPU: ranks hold the same bits, and what one rank alone computes."""
    comm = sx.init(backend)
    torch.manual_seed(comm.rank)
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 8)).to(DEVICE)
    sx.train.broadcast_parameters(model)
    alone = copy.deepcopy(model)
    reference = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    optimizer = sx.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), module=model)
    for seed in range(3):
        trained(model, optimizer, seed)
        trained(alone, reference, seed)
    for name, tensor in model.named_parameters():
        assert torch.allclose(tensor, dict(alone.named_parameters())[name], rtol=1e-5, atol=1e-6), name
    for tensor in model.parameters():
        copies = comm.all_gather(tensor.detach())
        assert torch.equal(copies[0], copies[-1])
    with torch.no_grad():
        model[0].weight.fill_(comm.rank)
    sx.train.allreduce_parameters(model)
    assert bool((model[0].weight == (comm.world_size - 1) / 2).all())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, comm.rank)
    sx.average_gradients(model)
    assert all(bool((parameter.grad == (comm.world_size - 1) / 2).all()) for parameter in model.parameters())
    found = sx.synchronize({"w": torch.full((3,), comm.rank, device=DEVICE)}, root=comm.world_size - 1)
    assert found["w"].tolist() == [comm.world_size - 1] * 3
    with sx.gather_state({"w": torch.full((3,), comm.rank, device=DEVICE)}) as states:
        if comm.rank == 0:
            assert [state["w"].tolist() for state in states] == [[rank] * 3 for rank in range(comm.world_size)]
    return str(found["w"].device)


@pytest.mark.parametrize(("backend", "world_size"), [("nccl", 1), ("auto", 2), ("shm", 3), ("mpi", 2), ("gloo", 2)])
def test_models_on_a_gpu_train_together(backend: str, world_size: int) -> None:
    launched_as = "processes" if backend == "nccl" else "mpi"
    found = run_ranks(trains_together, world_size, backend=launched_as, args=(backend,), timeout_s=120)
    assert found == [DEVICE] * world_size


def scales_and_draws(folder: str, form: str) -> None:
    """Check that a GradScaler, a capturable optimizer and CUDA's generator continue as if nothing had stopped."""
    sx.init()

    def job(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Linear(8, 8, device=DEVICE)
        state: dict[str, Any] = {
            "model": model,
            "optimizer": torch.optim.Adam(model.parameters(), capturable=True, lr=torch.tensor(0.1, device=DEVICE)),
            "scaler": torch.amp.GradScaler("cuda", init_scale=2.0**seed, growth_interval=1),
        }
        return state | {"random": sx.integrations.RandomState()} if form == "own" else state

    def step(state: dict[str, Any]) -> torch.Tensor:
        if "random" not in state:
            torch.manual_seed(1)
        with torch.autocast("cuda", torch.float16):
            loss = state["model"](torch.rand(4, 8, device=DEVICE)).square().mean()
        state["scaler"].scale(loss).backward()
        state["scaler"].step(state["optimizer"])
        state["scaler"].update()
        state["optimizer"].zero_grad()
        return torch.stack([state["model"].weight.sum(), torch.tensor(state["scaler"].get_scale(), device=DEVICE)])

    one, other = job(3), job(7)
    step(one)
    step(other)
    states = {name: value.state_dict() for name, value in one.items()}
    if form == "own":
        sx.save_checkpoint(one, folder)
    elif form == "pt":
        torch.save(states, folder)  # the format under test
    else:
        dcp.save(states, checkpoint_id=folder, no_dist=True)
    expected = step(one)
    sx.load_checkpoint(other, folder)
    assert torch.equal(step(other), expected)
    state = other["optimizer"].state[other["model"].weight]
    assert {value.device for value in state.values()} == {torch.device(DEVICE)}
    fresh = job(7)
    sx.load_checkpoint(fresh, folder)
    assert torch.equal(step(fresh), expected)
    for optimizer in (other["optimizer"], fresh["optimizer"]):
        assert optimizer.param_groups[0]["lr"].device == torch.device(DEVICE)


@pytest.mark.parametrize("form", ["own", "pt", "dcp"])
def test_scalers_generators_and_capturable_optimizers_continue(form: str, tmp_path: Path) -> None:
    run_ranks(scales_and_draws, 1, backend="processes", args=(str(tmp_path / "saved"), form), timeout_s=120)


def saves_on_a_stream(folder: str) -> None:
    """Save in the background what a stream other than the default one still computes, then change it there."""
    sx.init()
    tensor, stream = torch.ones(20_000_000, device=DEVICE), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        tensor.mul_(3)
        future = sx.save_checkpoint({"w": tensor}, folder, background=True)
        tensor.mul_(5)
        future.result(60)
        loaded = torch.zeros_like(tensor)
        sx.load_checkpoint({"w": loaded}, folder)
        total = loaded.sum()
    assert float(total) == 3 * tensor.numel()


def test_what_a_stream_still_computes_is_saved_as_it_will_be(tmp_path: Path) -> None:
    run_ranks(saves_on_a_stream, 1, backend="processes", args=(str(tmp_path / "saved"),), timeout_s=120)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "quantized" not in kind])
def test_each_call_keeps_or_refuses_a_kind_of_state_on_a_gpu(kind: str, tmp_path: Path) -> None:
    def make(seed: int) -> Any:
        with torch.device(DEVICE):
            return KINDS[kind](seed)

    for number, (call, expected) in enumerate(zip(CALLS, table()[kind], strict=True)):
        if call != "gather":  # it returns tensors on the CPU
            assert outcome(make, call, str(tmp_path / str(number))) == expected, call


def makes_a_child_with_a_world() -> str:
    """Use CUDA, then fork a child that calls init, and return its error."""
    import multiprocessing

    torch.zeros(1, device=DEVICE)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(error_of_init)


def error_of_init() -> str:
    try:
        sx.init("single")
    except sx.errors.UnsupportedError as error:
        return str(error)
    return ""


def test_a_child_that_was_forked_after_cuda_is_told_what_to_do() -> None:
    found = run_ranks(makes_a_child_with_a_world, 1, backend="processes", timeout_s=120)
    assert "give init devices=False" in found[0]
