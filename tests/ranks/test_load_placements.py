"""Loading on any number of ranks and in any placement, bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loaded_jobs import mesh_of, model_of, placed, trained
from safetensors.torch import save_file
from starting import AND_MPI, launched_communicator
from sweeps import slow
from torch import nn

import statexchange as sx
from statexchange.testing import run_ranks


def saves_and_loads(folder: str, placement_cases: list[Any]) -> None:
    """Save tensors with one placement, and load them into tensors with another."""
    import torch.distributed as dist

    state, live, wholes = {}, {}, {}
    meshes: dict[str, Any] = {}
    for number, (shape, before, after) in enumerate(placement_cases):
        whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 0.5
        wholes[f"t{number}"] = whole
        for target, (mesh_shape, text) in ((state, before), (live, after)):
            mesh = meshes.setdefault(str(mesh_shape), mesh_of(mesh_shape) if str(mesh_shape) not in meshes else None)
            target[f"t{number}"] = placed(whole if target is state else torch.zeros(shape), mesh, text)
    sx.save_checkpoint(state, f"{folder}/saved")
    sx.export_checkpoint(state, f"{folder}/exported")
    for source in ("saved", "exported"):
        for tensor in live.values():
            tensor.to_local().zero_()
        sx.load_checkpoint(live, f"{folder}/{source}")
        for name, tensor in live.items():
            assert torch.equal(tensor.full_tensor(), wholes[name]), (source, name)
    dist.barrier()


MESHES = {2: [[2]], 3: [[3]], 4: [[4], [2, 2]]}


@st.composite
def placement_cases(draw: Any, world_size: int) -> Any:
    def mesh_and_placements(dims: int) -> Any:
        mesh = draw(st.sampled_from(MESHES[world_size]))
        return [mesh, "".join(draw(st.sampled_from(["r", *map(str, range(dims))])) for _ in mesh)]

    found = []
    for _ in range(12):
        shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
        found.append([shape, mesh_and_placements(len(shape)), mesh_and_placements(len(shape))])
    return found


@pytest.mark.parametrize("world_size", [2, slow(3), slow(4)])
def test_any_placement_is_loaded_into_any_other(world_size: int, tmp_path: Path) -> None:
    numbers = iter(range(100))

    @settings(max_examples=3, derandomize=True)
    @given(placement_cases(world_size))
    def check(found: Any) -> None:
        folder = str(tmp_path / str(next(numbers)))
        run_ranks(saves_and_loads, world_size, backend="gloo", args=(folder, found), timeout_s=120)

    check()


def sharded(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 33), nn.ReLU(), nn.Linear(33, 5))
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def trains_and_saves(folder: str) -> list[Any]:
    import torch.distributed as dist

    model, optimizer = sharded(1)
    trained(model, optimizer)
    sx.save_checkpoint({"model": model, "optimizer": optimizer, "step": 3}, folder)
    dist.barrier()
    return [sums(model, optimizer)]


def resumes(folder: str) -> list[Any]:
    import torch.distributed as dist

    model, optimizer = sharded(2)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    sx.load_checkpoint(state, folder)
    assert state["step"] == 3
    assert optimizer.param_groups[0]["lr"] == 0.1
    kinds = {type(value).__name__ for values in optimizer.state.values() for value in values.values()}
    assert kinds == {"Tensor", "DTensor"}
    found = sums(model, optimizer)
    trained(model, optimizer, 1)  # continues
    dist.barrier()
    return [found]


def sums(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Return a state as numbers that contain every bit."""
    tensors = list(model.state_dict().values())
    for parameter in model.parameters():
        tensors += [optimizer.state[parameter][key] for key in ("step", "exp_avg", "exp_avg_sq")]
    full = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]
    return [t.double().flatten().tolist() for t in full]


@pytest.mark.parametrize("after", [1, slow(3)])
def test_a_sharded_job_resumes_on_another_number_of_ranks(after: int, tmp_path: Path) -> None:
    before = run_ranks(trains_and_saves, 2, backend="gloo", args=(str(tmp_path / "ckpt"),), timeout_s=120)
    found = run_ranks(resumes, after, backend="gloo", args=(str(tmp_path / "ckpt"),), timeout_s=120)
    assert all(rank == before[0] for rank in found)


def loads_before_backward(folder: str) -> None:
    mesh = mesh_of([sx.get_world_size()])
    for of_local in (False, True):
        weight = nn.Parameter(placed(torch.ones(4, 2), mesh, "0"))
        used = weight.to_local() if of_local else weight
        loss = (used * used).sum()
        sx.load_checkpoint({"w": weight}, folder)
        with pytest.raises(RuntimeError, match="modified"):
            loss.backward()


@pytest.mark.parametrize("world_size", [1, slow(2)])
def test_a_load_increments_the_version_of_a_shard(world_size: int, tmp_path: Path) -> None:
    save_file({"w": torch.zeros(4, 2)}, tmp_path / "model.safetensors")
    run_ranks(loads_before_backward, world_size, backend="gloo", args=(str(tmp_path),), timeout_s=120)


def casts_into_shards(folder: str) -> None:
    """Load a model of float32 into one of bfloat16, and into one whose shards are columns."""
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (sx.get_world_size(),))
    for dtype, dim in ((torch.bfloat16, 0), (torch.bfloat16, 1), (torch.float32, 1)):
        weight = distribute_tensor(torch.zeros(6, 4, dtype=dtype), mesh, [Shard(dim)])
        model = distribute_module(nn.Linear(4, 6, bias=False, dtype=dtype), mesh)
        model.weight = nn.Parameter(weight)
        sx.load_checkpoint(model, folder, dtype="state")
        assert torch.equal(model.weight.full_tensor(), torch.arange(24.0).reshape(6, 4).to(dtype))
        assert model.weight.requires_grad
    model, _ = sharded(2)
    sx.export_checkpoint(model, f"{folder}/rounded", dtype="bfloat16")
    sx.load_checkpoint(model, f"{folder}/rounded", dtype="state")
    assert all(torch.equal(one, one.bfloat16()) for one in (p.full_tensor() for p in model.parameters()))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_sharded_model_of_another_dtype_is_filled(world_size: int, tmp_path: Path) -> None:
    save_file({"weight": torch.arange(24.0).reshape(6, 4)}, tmp_path / "model.safetensors")
    run_ranks(casts_into_shards, world_size, backend="gloo", args=(str(tmp_path),), timeout_s=120)


def does_not_fit(backend: str, folder: str) -> None:
    comm = launched_communicator(backend)
    live = {"a": torch.zeros(2 + comm.rank)}
    with pytest.raises(ValueError, match="shape differs") as caught:
        sx.load_checkpoint(live, folder)
    assert (caught.value.name, caught.value.rank) == ("a", 1)
    assert (caught.value.expected, caught.value.found) == ((2,), (3,))
    assert not live["a"].any()


@pytest.mark.parametrize("backend", AND_MPI)
def test_an_error_of_one_rank_is_raised_on_all(backend: str, tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    run_ranks(does_not_fit, 2, backend=backend, args=(backend, str(tmp_path)))


def builds_stages(folder: str) -> list[Any]:
    """Save a pipeline of two stages, whose optimizers number their parameters alike."""
    rank = sx.get_communicator().rank
    torch.manual_seed(rank)
    stage = nn.ModuleDict({f"layer{rank}": nn.Linear(3, 3)})
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1 * (rank + 1), momentum=0.9)
    stage[f"layer{rank}"](torch.ones(1, 3)).sum().backward()
    optimizer.step()
    sx.save_checkpoint({"model": stage, "optimizer": optimizer}, folder)
    return [
        [t.flatten().tolist() for t in stage.state_dict().values()],
        optimizer.state[stage[f"layer{rank}"].bias]["momentum_buffer"].tolist(),
    ]


def test_stages_of_a_pipeline_are_loaded_into_one_process(tmp_path: Path) -> None:
    stages = run_ranks(builds_stages, 2, backend="gloo", args=(str(tmp_path / "saved"),))
    model = nn.ModuleDict({f"layer{i}": nn.Linear(3, 3) for i in range(2)})
    optimizer = torch.optim.SGD([{"params": model[name].parameters()} for name in model], lr=1.0, momentum=0.9)
    sx.load_checkpoint({"model": model, "optimizer": optimizer}, tmp_path / "saved")
    for i, (tensors, momentum) in enumerate(stages):
        assert [t.flatten().tolist() for t in model[f"layer{i}"].state_dict().values()] == tensors
        assert optimizer.state[model[f"layer{i}"].bias]["momentum_buffer"].tolist() == momentum
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]


def resumes_stages(folder: str) -> None:
    """Load on the same number of ranks: each stage finds its own state, with strict=True."""
    rank = sx.get_communicator().rank
    stage = nn.ModuleDict({f"layer{rank}": nn.Linear(3, 3)})
    optimizer = torch.optim.SGD(stage.parameters(), lr=1.0, momentum=0.9)
    report = sx.load_checkpoint({"model": stage, "optimizer": optimizer}, folder)
    assert (report.missing, report.unexpected) == ((), ())
    assert optimizer.param_groups[0]["lr"] == 0.1 * (rank + 1)


def test_stages_of_a_pipeline_resume_on_their_ranks(tmp_path: Path) -> None:
    run_ranks(builds_stages, 2, backend="gloo", args=(str(tmp_path / "saved"),))
    run_ranks(resumes_stages, 2, backend="gloo", args=(str(tmp_path / "saved"),))


def saves_different_values(folder: str) -> None:
    """Check that each rank gets back what it saved under one name, as the state of a generator."""
    comm = sx.get_communicator()
    saved = {"rng": torch.full((3,), comm.rank), "seed": 10 + comm.rank, "same": torch.ones(2)}
    sx.save_checkpoint(saved, folder)
    live = {"rng": torch.zeros(3, dtype=torch.int64), "seed": 0, "same": torch.zeros(2)}
    sx.load_checkpoint(live, folder)
    assert (live["rng"].tolist(), live["seed"]) == ([comm.rank] * 3, 10 + comm.rank)


def test_values_that_differ_between_ranks_are_loaded_on_their_ranks(tmp_path: Path) -> None:
    run_ranks(saves_different_values, 2, backend="gloo", args=(str(tmp_path / "saved"),))
    live = {"rng": torch.zeros(3, dtype=torch.int64), "seed": 0, "same": torch.zeros(2)}
    with pytest.raises(sx.errors.ReplicaError, match=r"'seed'.*exclude='seed'") as caught:
        sx.load_checkpoint(live, tmp_path / "saved")
    assert caught.value.rank == 1
    with pytest.raises(sx.errors.ReplicaError, match="different values") as caught:
        sx.load_checkpoint(live, tmp_path / "saved", exclude="seed")
    assert caught.value.name == "rng"
    assert caught.value.rank == 1
    assert sx.load_checkpoint(live, tmp_path / "saved", exclude=["seed", "rng"]).missing == ()
    assert (live["rng"].tolist(), live["seed"], live["same"].tolist()) == ([0, 0, 0], 0, [1.0, 1.0])


def test_the_saved_tree_can_be_read(tmp_path: Path) -> None:
    """The files have names of parameters, not numbers."""
    model = model_of(1)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    trained(model, optimizer, 1)
    sx.save_checkpoint({"model": model, "optimizer": optimizer}, tmp_path / "saved")
    from statexchange.formats.registry import open_source

    source = open_source(tmp_path / "saved")
    names = [tensor.shard.name for _, tensor in source.shards()]
    assert "optimizer.state.model.0.weight.momentum_buffer" in names
    assert json.loads(source.configs[0])["optimizer"]["param_groups"][0]["params"][0] == "model.0.weight"
