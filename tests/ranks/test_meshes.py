"""Any mesh, placement and shape, over every communicator: the export equals `full_tensor()`, and the load the save."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from equality import bits_of
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from starting import start
from sweeps import by_default
from torch import nn

import statexchange as sx
from statexchange.checkpoint import publication
from statexchange.testing import run_ranks

GATHERED_BY_GLOO = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)  # dtypes for which `full_tensor` works
DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "int64", "uint8", "bool", "complex64")


# Cases, drawn in one process and sent to all ranks


def mesh_shapes(world_size: int) -> list[list[int]]:
    """Return all shapes of one to three axes, also with axes of one rank."""
    sizes = range(1, world_size + 1)
    every = [[a] for a in sizes] + [[a, b] for a in sizes for b in sizes]
    every += [[a, b, c] for a in sizes for b in sizes for c in sizes]
    return [shape for shape in every if math.prod(shape) == world_size]


@st.composite
def mesh_placements(draw: Any, world_size: int, dims: int) -> Any:
    """Draw a mesh, and for each axis: "r" for Replicate, a dim for Shard, "dim/split factor" for _StridedShard."""
    mesh = draw(st.sampled_from(mesh_shapes(world_size)))
    kinds = st.sampled_from(["r", *map(str, range(dims))])
    found = draw(st.lists(kinds, min_size=len(mesh), max_size=len(mesh)))
    strided = draw(st.none() | st.integers(0, len(mesh) - 1))  # one: with more full_tensor is wrong
    if strided is not None and found[strided] != "r":
        found[strided] += f"/{draw(st.integers(2, 3))}"
    return [mesh, found]


@st.composite
def placed_cases(draw: Any, world_size: int) -> Any:
    """Draw the placements of a tensor before and after."""
    shape = draw(st.lists(st.integers(0, 9), max_size=3))
    return {
        "shape": shape,
        "dtype": draw(st.sampled_from(DTYPES)),
        "before": draw(mesh_placements(world_size, len(shape))),
        "after": draw(mesh_placements(world_size, len(shape))),
    }


@st.composite
def plain_cases(draw: Any, world_size: int) -> Any:
    """Draw plain tensors cut anywhere along a dim, in blocks, or into boxes of which a rank has several or none."""
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    case = {"shape": shape, "dim": dim, "dtype": draw(st.sampled_from(DTYPES))}
    ends = st.lists(st.integers(0, shape[dim]), min_size=world_size - 1, max_size=world_size - 1)
    how = draw(st.sampled_from(["cut", "blocks", "boxes"]))
    if how == "cut":
        return {**case, "ends": sorted(draw(ends))}
    if how == "blocks":
        counts = draw(st.lists(st.integers(1, 2), min_size=1, max_size=3))
        shape[dim] = sum(counts) * world_size * draw(st.integers(1, 2))
        return {**case, "blocks": counts}
    owners = draw(st.lists(st.integers(0, world_size - 1), min_size=shape[dim], max_size=shape[dim]))
    return {**case, "owners": owners}


@st.composite
def wrapped_cases(draw: Any, world_size: int) -> Any:
    """Draw layers, and meshes for replicas, FSDP2 and tensor parallelism, each of which may have one rank only."""
    cubes = st.sampled_from([mesh for mesh in mesh_shapes(world_size) if len(mesh) == 3])
    sizes = draw(st.lists(st.integers(1, 11), min_size=3, max_size=4))
    return {"sizes": sizes, "before": draw(cubes), "after": draw(cubes)}


def draw_examples(strategy: Any, count: int) -> list[Any]:
    """Return the first examples of a strategy, the same in every run."""
    found: list[Any] = []

    @settings(max_examples=count, deadline=None, derandomize=True, database=None)
    @given(strategy)
    def take(case: Any) -> None:
        found.append(case)

    take()
    return found


# On the ranks


def random_bits(shape: list[int], dtype: str, seed: int) -> torch.Tensor:
    """Return random bits, NaNs of every kind among them."""
    kind = getattr(torch, dtype)
    nbytes = math.prod(shape) * kind.itemsize
    high = 2 if kind is torch.bool else 256
    data = torch.randint(0, high, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return data.view(kind).reshape(shape) if nbytes else torch.empty(shape, dtype=kind)


def distribute(whole: torch.Tensor, where: Any, mesh_cache: dict[str, Any]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    shape, kinds = where
    if str(shape) not in mesh_cache:
        mesh_cache[str(shape)] = init_device_mesh("cpu", tuple(shape))
    placements: list[Any] = []
    for kind in kinds:
        dim, _, factor = kind.partition("/")
        cut = _StridedShard(int(dim), split_factor=int(factor)) if factor else None
        placements.append(Replicate() if kind == "r" else cut or Shard(int(dim)))
    return distribute_tensor(whole, mesh_cache[str(shape)], placements, src_data_rank=None)


def part_of(whole: torch.Tensor, case: Any, rank: int, world_size: int) -> tuple[torch.Tensor, Any]:
    """Return a rank's plain tensor, and the rule that describes it."""
    dim = case["dim"]
    if "ends" in case:
        return whole.tensor_split(case["ends"], dim)[rank], {"dim": dim}
    if "blocks" in case:
        unit = whole.shape[dim] // sum(case["blocks"])
        blocks = whole.split([unit * count for count in case["blocks"]], dim)
        return torch.cat([block.chunk(world_size, dim)[rank] for block in blocks], dim), {
            "dim": dim,
            "blocks": case["blocks"],
        }
    boxes: list[list[Any]] = [[] for _ in range(world_size)]
    for at, owner in enumerate(case["owners"]):
        offsets = [at if d == dim else 0 for d in range(whole.ndim)]
        boxes[owner].append([offsets, [1 if d == dim else n for d, n in enumerate(whole.shape)]])
    mine = [at for at, owner in enumerate(case["owners"]) if owner == rank]
    return whole.index_select(dim, torch.tensor(mine, dtype=torch.int64)), {
        "global_shape": list(whole.shape),
        "boxes": boxes,
        "dim": dim,
    }


def initialise(backend: str, folder: str) -> sx.comm.Communicator:
    """Return a communicator of this kind; DTensors use torch's own group over Gloo."""
    comm = start(backend, folder)
    if not dist.is_initialized():
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=comm.rank, world_size=comm.world_size
        )
    return comm


def checks_all_cases(backend: str, folder: str, placed: list[Any], plain: list[Any], models: list[Any]) -> None:
    torch.set_num_threads(1)
    comm = initialise(backend, folder)
    checks_placed(folder, placed, plain, comm)
    checks_wrapped(folder, models, comm)
    shut_down(backend, comm)


def checks_placed(folder: str, placed: list[Any], plain: list[Any], comm: sx.comm.Communicator) -> None:
    mesh_cache: dict[str, Any] = {}
    state, live, wholes, layout = {}, {}, {}, {}
    for number, case in enumerate(placed):
        name = f"placed{number}"
        wholes[name] = random_bits(case["shape"], case["dtype"], number)
        state[name] = distribute(wholes[name], case["before"], mesh_cache)
        live[name] = distribute(torch.zeros_like(wholes[name]), case["after"], mesh_cache)
        if wholes[name].dtype in GATHERED_BY_GLOO:
            assert bits_of(state[name].full_tensor()) == bits_of(wholes[name]), case
    sx.save_checkpoint(state, f"{folder}/saved", comm=comm)
    for number, case in enumerate(plain):
        name = f"plain{number}"
        wholes[name] = random_bits(case["shape"], case["dtype"], 1000 + number)
        state[name], layout[name] = part_of(wholes[name], case, comm.rank, comm.world_size)
        live[name] = torch.zeros_like(wholes[name])
    sx.export_checkpoint(state, f"{folder}/exported", comm=comm, layout=layout, max_shard_size=4000)
    # As one with very many boxes, whose digests are no part of the manifest.
    publication._MOST_LISTED = -1
    sx.export_checkpoint(state, f"{folder}/exported_large", comm=comm, layout=layout, max_shard_size=4000)
    publication._MOST_LISTED = 1 << 14
    for path in Path(folder, "exported").glob("*.safetensors"):
        assert path.read_bytes() == Path(folder, "exported_large", path.name).read_bytes()
    exported = {}
    for path in Path(folder, "exported").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            exported |= {name: bits_of(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
    cases = {**{f"placed{n}": c for n, c in enumerate(placed)}, **{f"plain{n}": c for n, c in enumerate(plain)}}
    assert exported.keys() == wholes.keys()
    assert [cases[name] for name in wholes if exported[name] != bits_of(wholes[name])] == []
    for source in (
        f"{folder}/saved",
        f"{folder}/exported",
        f"local://{folder}/exported",
        f"{folder}/exported_large",
        f"local://{folder}/exported_large",
    ):  # from a URL each box is read by one rank of a host
        into = {name: tensor for name, tensor in live.items() if "exported" in source or name.startswith("placed")}
        for tensor in into.values():
            (tensor.to_local() if hasattr(tensor, "to_local") else tensor).zero_()
        sx.load_checkpoint(into, source, comm=comm)
        wrong = [name for name, tensor in into.items() if not is_filled(tensor, wholes[name], cases[name], mesh_cache)]
        assert [(source, cases[name]) for name in wrong] == []


def layers(sizes: list[int], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        *[nn.Linear(a, b, bias=bool(a % 2)) for a, b in itertools.pairwise(sizes)], nn.BatchNorm1d(sizes[-1])
    )


def shard_module(model: nn.Module, mesh_shape: list[int]) -> nn.Module:
    """Apply tensor parallelism and FSDP2 to the layers, with replicas if the mesh has them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", tuple(mesh_shape), mesh_dim_names=("replicate", "shard", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model[0], mesh=mesh["replicate", "shard"])
    return fully_shard(model, mesh=mesh["replicate", "shard"])


def local_bits(model: nn.Module) -> dict[str, Any]:
    return {name: bits_of(t.to_local() if hasattr(t, "to_local") else t) for name, t in model.state_dict().items()}


def checks_wrapped(folder: str, cases: list[Any], comm: sx.comm.Communicator) -> None:
    for number, case in enumerate(cases):
        out = f"{folder}/model{number}"
        sx.export_checkpoint(shard_module(layers(case["sizes"], 1), case["before"]), out, comm=comm)
        with safe_open(f"{out}/model.safetensors", "pt") as file:
            exported = {name: bits_of(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
        assert exported == {name: bits_of(t) for name, t in layers(case["sizes"], 1).state_dict().items()}, case
        live = shard_module(layers(case["sizes"], 2), case["after"])
        sx.load_checkpoint(live, out, comm=comm)
        assert local_bits(live) == local_bits(shard_module(layers(case["sizes"], 1), case["after"])), case


def is_filled(tensor: Any, whole: torch.Tensor, case: Any, mesh_cache: dict[str, Any]) -> bool:
    if not hasattr(tensor, "placements"):
        return bits_of(tensor) == bits_of(whole)
    same = bits_of(tensor.to_local()) == bits_of(distribute(whole, case["after"], mesh_cache).to_local())
    return same and (whole.dtype not in GATHERED_BY_GLOO or bits_of(tensor.full_tensor()) == bits_of(whole))


def shut_down(backend: str, comm: sx.comm.Communicator) -> None:
    comm.barrier()
    dist.barrier()
    if backend == "mpi":
        dist.destroy_process_group()
    if backend != "gloo":
        sx.shutdown()


WORLDS = [("gloo", 1), ("gloo", 2), ("gloo", 3), ("gloo", 4), ("shm", 2), ("shm", 4), ("mpi", 3)]


@pytest.mark.parametrize(("backend", "world_size"), by_default(WORLDS, 1, 4))
def test_any_placement_and_any_rule_is_exported_and_loaded_bit_by_bit(
    backend: str, world_size: int, tmp_path: Path
) -> None:
    cases = [
        draw_examples(placed_cases(world_size), 30),
        draw_examples(plain_cases(world_size), 15),
        draw_examples(wrapped_cases(world_size), 2),
    ]
    launched_as = "mpi" if backend == "mpi" else "gloo"
    run_ranks(checks_all_cases, world_size, backend=launched_as, args=(backend, str(tmp_path), *cases), timeout_s=120)
