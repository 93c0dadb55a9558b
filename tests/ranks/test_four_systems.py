"""Functions of the four systems that this package replaces: one test for each, with that system's own values.

These are ModelOpt's `export.distribute`, Lux's `DistributedUtils` (with FluxMPI's and Flux's differences), Bagua's
`torch_api.distributed` and Flashlight's `fl::distributed`, as docs/migration.md lists them. A test is named after the
system and its function: it expects what that returns, except where a comment names what is different on purpose.
By default ranks are threads; under `slow` they use shared memory, Gloo, MPI and two simulated hosts.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from bagua import bagua_net
from programs import require_mpi
from starting import LAUNCHED_AS, start
from sweeps import slow
from torch import nn

import statexchange as sx
from statexchange.comm import bootstrap, defaults
from statexchange.comm.communicator import Communicator
from statexchange.errors import InvalidArgumentError, MissingExtraError, NotFoundError, UnsupportedError
from statexchange.testing import run_ranks
from statexchange.train.algorithms import Decentralized, dequantize, quantize
from statexchange.train.buckets.plan import split_buckets
from statexchange.train.parameter_specs import ParameterSpec

Body = Callable[[Communicator, Path], Any]
BODIES: dict[str, Body] = {}


def on_ranks(*sizes: int, backends: tuple[str, ...] = ("shm", "gloo", "mpi", "hierarchical")) -> Callable[[Body], Any]:
    """Make a test of a function that each rank runs: on threads in worlds of `sizes`, under `slow` over `backends`."""

    def make(body: Body) -> Any:
        BODIES[body.__name__] = body
        cases = [("threads", size) for size in sizes]
        size = 2 if 2 in sizes else max(sizes)
        cases += [slow(backend, max(3, size) if backend == "hierarchical" else size) for backend in backends]

        @pytest.mark.parametrize(("backend", "world_size"), cases)
        def test(backend: str, world_size: int, tmp_path: Path) -> None:
            if backend == "mpi":
                require_mpi()
            if backend == "threads":
                run_ranks(lambda: body(sx.get_communicator(), tmp_path), world_size)
                return
            args = (body.__name__, backend, str(tmp_path))
            run_ranks(run_body, world_size, backend=LAUNCHED_AS[backend], args=args, timeout_s=120, reuse=True)

        test.__name__ = body.__name__
        return test

    return make


def run_body(name: str, backend: str, directory: str) -> None:
    """Run the function of a test by its name, on a rank in a process of its own."""
    identity = bootstrap.host_identity
    try:
        comm = start(backend, directory)
        BODIES[name](comm, Path(directory))
        comm.barrier()
    finally:
        bootstrap.host_identity = identity


def filled(value: float, n: int = 512, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.full((n,), value, dtype=dtype)


def same_everywhere(comm: Communicator, tensor: torch.Tensor) -> bool:
    return all(torch.equal(part, tensor) for part in comm.all_gather(tensor.detach()))


# ModelOpt


@on_ranks(1, 3)
def test_modelopt_nfs_workspace(comm: Communicator, directory: Path) -> None:
    nothing = sx.NFSWorkspace(None)
    assert not nothing.is_initialized
    with pytest.raises(ValueError, match="not initialized"):
        nothing.write_configs_and_weights({}, {})
    with pytest.raises(ValueError, match="not initialized"):
        nothing.read_configs_and_weights_from_rank(0)
    assert sx.NFSWorkspace("").is_initialized
    workspace = sx.NFSWorkspace(directory / "not" / "yet" / "there")
    assert workspace.is_initialized
    weights = {"w": torch.full((2, 3), comm.rank + 0.5, dtype=torch.bfloat16), "empty": torch.empty(0, 4)}
    workspace.write_configs_and_weights({"layers": [1, 2], "rank": comm.rank}, weights)
    comm.barrier()
    for rank in range(comm.world_size):
        config, found = workspace.read_configs_and_weights_from_rank(rank)
        assert config == {"layers": [1, 2], "rank": rank}
        assert torch.equal(found["w"], torch.full((2, 3), rank + 0.5, dtype=torch.bfloat16))
        assert found["empty"].shape == (0, 4)
    with pytest.raises(NotFoundError, match=f"rank {comm.world_size} has written"):  # ModelOpt returns (None, None)
        workspace.read_configs_and_weights_from_rank(comm.world_size)
    comm.barrier()


def workspace_if_needed(comm: Communicator, directory: Path) -> dict[str, Any]:
    """Return the option that gathers need on ranks that share no memory: a workspace."""
    return {} if comm.shared_memory else {"workspace_path": directory / "shared"}


@on_ranks(3)
def test_modelopt_get_tensors_parallel(comm: Communicator, directory: Path) -> None:
    ranks = [2, 0, 1]  # the first of these, not the lowest, gets the list
    ours = torch.full((2 + comm.rank, 3), comm.rank + 1.0, dtype=torch.bfloat16)
    for where in (workspace_if_needed(comm, directory), {"workspace_path": directory / "nfs"}):
        with sx.get_tensors_parallel(ours, ranks, **where) as tensors:
            assert len(tensors) == (3 if comm.rank == 2 else 0)
            kept = list(tensors)
        if comm.rank == 2:
            assert kept[0] is ours
            assert [tuple(tensor.shape) for tensor in kept] == [(4, 3), (2, 3), (3, 3)]
            assert all(tensor.eq(rank + 1).all() for tensor, rank in zip(kept, ranks, strict=True))
    parameter = nn.Parameter(torch.arange(8.0).view(2, 4).t())  # not contiguous
    with sx.get_tensors_parallel(parameter, ranks, **workspace_if_needed(comm, directory)) as tensors:
        for tensor in tensors:
            assert isinstance(tensor, nn.Parameter)
            assert torch.equal(tensor, parameter)
    with sx.get_tensors_parallel(ours, [comm.rank]) as tensors:  # ModelOpt asserts that there are several
        assert tensors[0] is ours
    with pytest.raises(ValueError, match="distinct"), sx.get_tensors_parallel(ours, [0, 0, 1, 2]):
        pass


@on_ranks(3)
def test_modelopt_get_tensors_parallel_when_the_block_raises(comm: Communicator, directory: Path) -> None:
    with (
        pytest.raises(KeyError if comm.rank == 0 else sx.errors.PeerError, match="mine"),  # in ModelOpt the peers hang
        sx.get_tensors_parallel(torch.ones(3), [0, 1, 2], **workspace_if_needed(comm, directory)),
    ):
        if comm.rank == 0:
            raise KeyError("mine")
    comm.barrier()


@sx.register_config  # so that the first rank can build it also if it has None itself
@dataclasses.dataclass
class LinearConfig:
    weight: torch.Tensor
    bias: torch.Tensor | None
    names: list[str]


@on_ranks(3)
def test_modelopt_get_configs_parallel(comm: Communicator, directory: Path) -> None:
    where = workspace_if_needed(comm, directory)
    ours = LinearConfig(torch.full((2, 3), comm.rank + 1.0), None, ["a", str(comm.rank)])
    for absent in range(4):  # None keeps its place; ModelOpt drops it
        local_config = None if comm.rank == absent else ours
        with sx.get_configs_parallel(local_config, [0, 1, 2], **where) as configs:
            assert [config is None for config in configs] == ([r == absent for r in range(3)] if comm.rank == 0 else [])
            for rank, config in enumerate(configs):
                if config is not None:
                    assert config.names == ["a", str(rank)]
                    assert config.weight.eq(rank + 1).all()
                    assert config.bias is None
    big = torch.arange(1 << 20, dtype=torch.float32)
    strange = {"view": big[:10], "expanded": torch.ones(1).expand(5), "0-d": torch.tensor(2.0), "empty": {}}
    for count in (1, 39, 40, 1000):  # ModelOpt fails with 40
        local_config = {"many": {str(i): torch.tensor([float(i)]) for i in range(count)}, **strange}
        with sx.get_configs_parallel(local_config, [0, 1, 2], **where) as configs:
            for config in configs:
                assert config["many"].keys() == local_config["many"].keys()
                assert config["many"][str(count - 1)].item() == count - 1
                assert config["view"].tolist() == list(range(10))
                assert config["expanded"].tolist() == [1.0] * 5
                assert config["0-d"].item() == 2
                assert config["empty"] == {}


@on_ranks(1, 3)
def test_modelopt_helpers_size_rank_barrier_broadcast_allgather(comm: Communicator, directory: Path) -> None:
    assert (sx.get_rank(), sx.get_world_size()) == (comm.rank, comm.world_size)
    comm.barrier()
    group = comm.new_group([comm.rank])
    group.barrier()
    assert comm.broadcast_object({"a": (1, None)} if comm.rank == 0 else None) == {"a": (1, None)}
    assert comm.all_gather_object([comm.rank, "x"]) == [[rank, "x"] for rank in range(comm.world_size)]
    total = comm.all_reduce(torch.tensor([comm.rank + 1]))
    assert total.item() == comm.world_size * (comm.world_size + 1) // 2


@on_ranks(4)
def test_modelopt_pipeline_then_tensor_parallel(comm: Communicator, directory: Path) -> None:
    """TP 2 x PP 2: ranks [0, 2] and [1, 3] are the stages, of unequal depth; ModelOpt's zip truncates them."""
    where = workspace_if_needed(comm, directory)
    stage, part = divmod(comm.rank, 2)
    layers = [torch.full((2, 2), 10.0 * (stage * 3 + i) + part) for i in range((3, 1)[stage])]
    with sx.get_configs_parallel(layers, [part, part + 2], **where) as stages:
        if stage == 0:
            mine = [layer.clone() for found in stages for layer in found]
            with sx.get_tensors_parallel(torch.stack(mine), [0, 1], **where) as parts:
                if comm.rank == 0:
                    whole = torch.cat(parts, 1)
                    assert whole.shape == (4, 4, 2)
                    assert whole[:, ::2, 0].tolist() == [[10.0 * i, 10.0 * i + 1] for i in range(4)]


# Lux


@on_ranks(1, 2)
def test_lux_initialize_initialized_and_get_distributed_backend(comm: Communicator, directory: Path) -> None:
    with defaults.use(comm):
        assert sx.is_initialized()
        assert sx.init() is comm  # idempotent
        assert sx.get_communicator() is comm
    with pytest.raises(InvalidArgumentError, match="devices is"), defaults.use(None):
        sx.init("single", devices=5)
    with pytest.raises(InvalidArgumentError, match="local_rank 0"), defaults.use(None):
        sx.init("single", devices=[])
    with defaults.use(None):
        assert sx.init("single", devices=["cpu"]).device.type == "cpu"
        sx.shutdown()


def test_lux_nccl_backend_without_its_extension() -> None:
    kinds = (MissingExtraError, UnsupportedError)  # as torch is built for CUDA or not
    with pytest.raises(kinds, match="CUDA build"), defaults.use(None):
        sx.init("nccl")


@on_ranks(1, 3)
def test_lux_local_rank_and_total_workers(comm: Communicator, directory: Path) -> None:
    assert 0 <= comm.rank < comm.world_size == sx.get_world_size()
    assert sx.get_rank() == comm.rank  # Lux's local_rank is the world rank
    assert 0 <= comm.local_rank < comm.local_world_size


@on_ranks(1, 2, 3)
def test_lux_bcast(comm: Communicator, directory: Path) -> None:
    for root in {0, comm.world_size - 1}:
        value = filled(comm.rank == root)
        out = filled(7.0)
        assert comm.broadcast(value, root=root, out=out) is out
        assert out.eq(1).all()  # on root, too; Lux leaves it unchanged there
        assert value.eq(float(comm.rank == root)).all()
        assert comm.broadcast(value, root=root) is value
        assert value.eq(1).all()
    with pytest.raises(InvalidArgumentError, match="root"):
        comm.broadcast(filled(1), root=comm.world_size)


@on_ranks(1, 2, 3)
def test_lux_reduce(comm: Communicator, directory: Path) -> None:
    n = comm.world_size
    for op, expected in (("sum", n * (n + 1) / 2), ("avg", (n + 1) / 2)):
        for root in {0, n - 1}:
            given, out = filled(comm.rank + 1), filled(7.0)
            comm.reduce(given, op, root=root, out=out)
            assert given.eq(comm.rank + 1).all()
            assert out.eq(expected if comm.rank == root else 7).all()
            comm.reduce(given, op, root=root)
            assert given.eq(expected if comm.rank == root else comm.rank + 1).all()  # Lux divides on all ranks


@on_ranks(1, 2, 3)
def test_lux_allreduce(comm: Communicator, directory: Path) -> None:
    n = comm.world_size
    for op, expected in (("sum", n * (n + 1) / 2), ("avg", (n + 1) / 2)):
        given, out = filled(comm.rank + 1), filled(7.0)
        assert comm.all_reduce(given, op, out=out) is out
        assert given.eq(comm.rank + 1).all()
        assert out.eq(expected).all()
        assert comm.all_reduce(given, op) is given
        assert given.eq(expected).all()


@on_ranks(2)
def test_lux_op_argument_and_avg(comm: Communicator, directory: Path) -> None:
    n = comm.world_size
    maximum = torch.distributed.ReduceOp.MAX
    cases = (("max", n), ("min", 1), ("prod", math.factorial(n)), ("sum", n * (n + 1) / 2), (maximum, n))
    for op, expected in cases:
        assert comm.all_reduce(torch.tensor([comm.rank + 1.0]), op).item() == expected
    with pytest.raises(InvalidArgumentError, match="unknown op"):
        comm.all_reduce(filled(1), "median")
    with pytest.raises(TypeError, match=r"avg of torch\.int64"):  # Lux: InexactError afterwards, or truncation
        comm.all_reduce(torch.tensor([comm.rank]), "avg")


@on_ranks(2)
def test_lux_arrays_on_the_host_of_any_kind(comm: Communicator, directory: Path) -> None:
    """CPU arrays work on every backend; Lux's NCCLBackend sends them over MPI."""
    array = np.full((3, 4), comm.rank + 1.0)
    n = comm.world_size
    assert comm.all_reduce(array.T) is not None
    assert (array == n * (n + 1) / 2).all()


class Nested(NamedTuple):
    a: Any
    d: Any


@on_ranks(1, 3)
def test_lux_synchronize(comm: Communicator, directory: Path) -> None:
    def value() -> torch.Tensor:
        return torch.full((2, 3), float(comm.rank == 0))

    for tree in (Nested({"b": value(), "c": value()}, value()), ((value(), value()), value()), value()):
        found = sx.synchronize(tree)
        assert type(found) is type(tree)
        leaves = list(leaves_of(found))
        assert all(leaf.eq(1).all() for leaf in leaves)
        assert all(new is old for new, old in zip(leaves, leaves_of(tree), strict=True))
    assert sx.synchronize(comm.rank) == 0
    assert sx.synchronize(None) is None
    assert sx.synchronize(()) == ()
    assert sx.synchronize(f"symbol{comm.rank}") == "symbol0"  # Lux does not change symbols
    ours = object()
    assert sx.synchronize(ours) is ours
    for kind in (torch.optim.Adam, torch.optim.SGD):
        parameter = nn.Parameter(torch.zeros(4))
        optimizer = kind([parameter], lr=0.1)
        parameter.grad = filled(float(comm.rank == 0), 4, torch.float32)
        optimizer.step()
        sx.synchronize(optimizer)
        state = optimizer.state[parameter]
        assert all(same_everywhere(comm, state[key]) for key in state if isinstance(state[key], torch.Tensor))
        if kind is torch.optim.Adam:
            torch.testing.assert_close(state["exp_avg"], torch.full((4,), 0.1))  # root's


def leaves_of(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    else:
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves_of(value)


@on_ranks(1, 2, 3)
def test_lux_distributed_optimizer(comm: Communicator, directory: Path) -> None:
    plain = [nn.Parameter(filled(0, 4)) for _ in range(2)]
    ours = [nn.Parameter(filled(0, 4)) for _ in range(2)]
    inner = torch.optim.Adam(ours, lr=1e-3)
    optimizer = sx.DistributedOptimizer(inner)
    alone = torch.optim.Adam(plain, lr=1e-3)
    assert optimizer.state_dict() == alone.state_dict()
    for step in range(2):
        for parameter in ours:
            parameter.sum().backward()  # ones
        for parameter in plain:
            parameter.grad = filled(1, 4)
        optimizer.step()
        alone.step()
        for one, other in zip(ours, plain, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
        optimizer.zero_grad()
        if step == 0:
            for group in (*optimizer.param_groups, *alone.param_groups):
                group["lr"] = 0.1  # Optimisers.adjust!
    assert inner.param_groups[0]["lr"] == 0.1
    sx.synchronize(optimizer)


@on_ranks(1, 2, 3, 4)
def test_lux_distributed_data_container(comm: Communicator, directory: Path) -> None:
    n, data = comm.world_size, torch.arange(10.0)
    part = sx.train.DistributedDataContainer(data)
    chunk = -(-10 // n)
    assert len(part) == max(0, min(chunk, 10 - comm.rank * chunk))
    total = sum(part[i] for i in range(len(part))) + torch.zeros(1)
    assert comm.all_reduce(total).item() == 45
    for count in (0, 1, 5, 9):  # Lux raises BoundsError if ceil-chunking gives too few chunks
        sizes = comm.all_gather_object(len(sx.train.DistributedDataContainer(list(range(count)))))
        assert sum(sizes) == count
    pair = sx.train.DistributedDataContainer((data, data.view(10, 1)))
    assert len(pair) == len(part)  # the length counts samples, not fields


@on_ranks(1, 2, 3)
def test_fluxmpi_differences(comm: Communicator, directory: Path) -> None:
    n = comm.world_size
    for op, expected in (("sum", n), ("prod", 1)):
        buffer = filled(1, 4)
        work = comm.all_reduce(buffer, op, async_op=True)
        assert work.wait() is buffer
        assert buffer.eq(expected).all()
    buffer = filled(comm.rank, 4)
    assert comm.broadcast(buffer, async_op=True).wait().eq(0).all()
    ours, plain = nn.Parameter(filled(0, 4)), nn.Parameter(filled(0, 4))
    summing = sx.DistributedOptimizer(torch.optim.SGD([ours], lr=0.1), scale=1.0)  # FluxMPI's sums
    ours.sum().backward()
    summing.step()
    plain.grad = filled(n, 4)
    torch.optim.SGD([plain], lr=0.1).step()
    torch.testing.assert_close(ours, plain)
    gradients = [filled(1, 4), filled(1, 4)]
    assert comm.all_reduce_multiple(gradients) is not None  # allreduce_gradients
    assert all(gradient.eq(n).all() for gradient in gradients)


@on_ranks(1, 2, 3)
def test_flux_differences(comm: Communicator, directory: Path) -> None:
    n = comm.world_size
    integers = torch.full((4,), comm.rank + 1)
    comm.reduce(integers)
    assert integers.eq(n * (n + 1) // 2 if comm.rank == 0 else comm.rank + 1).all()
    for count in (4 * n, 7, 10):
        part = sx.train.DistributedDataContainer(torch.arange(float(count)), uneven="pad")
        assert len(part) == -(-count // n)
        total = comm.all_reduce(sum(part[i] for i in range(len(part))) + torch.zeros(1)).item()
        padding = n * len(part) - count
        assert total == sum(range(count)) + sum(range(padding))
    used, unused = nn.Parameter(torch.ones(5, 3)), nn.Parameter(filled(1, 8).view(2, 4))
    optimizer = sx.DistributedOptimizer(torch.optim.SGD([used, unused], lr=1.0))
    (used.sum() + (unused.sum() if comm.rank == n - 1 else 0)).backward()
    optimizer.step()
    assert torch.equal(used.grad, torch.ones(5, 3))
    assert unused.grad.dtype == torch.float64
    assert unused.grad.eq(1 / n).all()  # zeros for a missing gradient


# Bagua


def sgd(module: nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=lr)


def loss_of(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    data, target = torch.randn(4, 2, generator=generator), torch.randn(4, 4, generator=generator)
    return nn.functional.mse_loss(module(data), target)


def train(module: nn.Module, optimizer: Any, rank: int, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(module, rank, step).backward()
        optimizer.step()


def flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


@on_ranks(2)
def test_bagua_init_process_group_twice(comm: Communicator, directory: Path) -> None:
    assert sx.init("gloo") is comm  # a warning; Bagua raises RepeatedInitializationError


@on_ranks(1, 2, 3)
def test_bagua_allreduce_broadcast_and_their_coalesced(comm: Communicator, directory: Path) -> None:
    n = comm.world_size
    floats = (torch.float32, torch.float16, torch.bfloat16, torch.float64)  # Bagua refuses the last two
    for dtype in (*floats, torch.uint8, torch.int64, torch.int32):
        tensor = filled(comm.rank + 1, 100, dtype)
        assert comm.all_reduce(tensor).eq(n * (n + 1) / 2).all()
        assert comm.broadcast(filled(comm.rank + 1, 100, dtype), root=n - 1).eq(n).all()
        if dtype in floats:
            average = comm.all_reduce(filled(comm.rank + 1, 100, dtype), "avg")
            assert torch.equal(average, tensor / n)  # AVG is SUM / n exactly
    several = [torch.tensor([1.0, 2, 3]) * (comm.rank + 1), torch.tensor([4.0, 5, 6]) * (comm.rank + 1)]
    comm.all_reduce_multiple(several, "avg")
    assert torch.cat(several).tolist() == [i * (n + 1) / 2 for i in range(1, 7)]
    sx.synchronize(several, root=n - 1)  # broadcast_coalesced


@on_ranks(1, 2)
def test_bagua_distributed_module(comm: Communicator, directory: Path) -> None:
    inner = bagua_net(comm.rank)
    inner._ddp_params_and_buffers_to_ignore = ["0.weight"]
    wrapped = sx.train.DistributedModule(inner)
    data = torch.randn(3, 2)
    assert wrapped.module is wrapped.unwrap() is inner
    assert torch.equal(wrapped(data), inner(data))
    wrapped, optimizer = sx.train.data_parallel(inner, sgd(inner))
    train(wrapped, optimizer, comm.rank, 2)
    parts = comm.all_gather(flat(inner))
    ignored = inner[0].weight.numel()
    assert all(torch.equal(part[ignored:], parts[0][ignored:]) for part in parts)
    assert all(not torch.equal(part[:ignored], parts[0][:ignored]) for part in parts[1:])


@on_ranks(1, 2)
def test_bagua_reducer_arguments_and_bucket_types(comm: Communicator, directory: Path) -> None:
    with pytest.raises(ValueError, match="bucket_type"):
        sx.train.BucketReducer(bagua_net(), bucket_type="momentum")  # type: ignore[arg-type] (refused at run time, too)
    for bucket_type in ("gradient", "weight"):
        module = nn.ParameterList([nn.Parameter(torch.full((3,), comm.rank + 1.0)) for _ in range(2)])
        reducer = sx.train.BucketReducer(module, bucket_type=bucket_type)
        for parameter in module:
            (parameter * (comm.rank + 1)).sum().backward()
        reducer.finalize()
        mean = (comm.world_size + 1) / 2
        found = [p.grad if bucket_type == "gradient" else p.detach() for p in module]  # fill_slot
        assert all(tensor.eq(mean).all() for tensor in found)
        assert all(nbytes % (64 * comm.world_size) == 0 for nbytes in reducer.bucket_nbytes)  # align_bytes, chunking
        reducer.close()


def specs_of(kinds: dict[str, str]) -> list[ParameterSpec]:
    sizes = dict(zip("ABCDE", range(1, 6), strict=True))
    return [ParameterSpec(name, kinds.get(name, "float32"), (sizes[name] << 20,)) for name in kinds]


@pytest.mark.parametrize(
    ("order", "halves", "expected"),
    [
        ("ABCDE", "", ["ABC", "D", "E"]),
        ("ABCDE", "CD", ["CD", "AB", "E"]),
        ("DEABC", "", ["D", "E", "ABC"]),
    ],
)
def test_bagua_bucket_split(order: str, halves: str, expected: list[str]) -> None:
    tensors = specs_of({name: "float16" if name in halves else "float32" for name in order})
    found = split_buckets(tensors, 20 << 20)
    assert ["".join(tensors[i].name for i in bucket) for bucket in found] == expected
    assert all(len({tensors[i].dtype for i in bucket}) == 1 for bucket in found)  # Bagua mixes two of these


@on_ranks(2, 3)
def test_bagua_unused_parameters_and_two_backwards(comm: Communicator, directory: Path) -> None:
    """mark_tensor_ready: in Bagua a parameter without a gradient never makes its bucket ready, and the step hangs."""
    module = bagua_net()
    reducer = sx.train.BucketReducer(module, bucket_bytes=256)
    for step in range(3):
        for parameter in module.parameters():
            parameter.grad = None
        loss = module[0].weight.sum() if comm.rank == 0 and step else loss_of(module, comm.rank, step)
        loss.backward()
        loss_of(module, comm.rank, step + 10).backward()  # in Bagua only the first counts after one forward
        reducer.finalize()
        assert all(same_everywhere(comm, parameter.grad) for parameter in module.parameters())
    assert len(reducer.buckets) > 1
    reducer.reset(buckets=[["0.weight", "4.weight"], ["2.weight"]])  # reset_reducer
    assert reducer.buckets == [["0.weight", "4.weight"], ["2.weight"]]


@on_ranks(2, 3)
def test_bagua_switch_to(comm: Communicator, directory: Path) -> None:
    module = bagua_net(comm.rank)
    wrapped, optimizer = sx.train.data_parallel(module, torch.optim.Adam(module.parameters(), lr=0.01))
    assert torch.equal(flat(module), flat(bagua_net(0)))  # at first the weights are those of root
    for name in ("sg-allreduce", "decentralize", "quantize", "allreduce"):
        with torch.no_grad():
            module[0].weight.fill_(comm.rank + 1)
        assert wrapped.switch_to(name) is wrapped
        assert module[0].weight.eq((comm.world_size + 1) / 2).all()  # after a switch they are averages
        train(wrapped, optimizer, comm.rank, 2)
    assert optimizer.state[module[0].weight]["step"].item() == 8
    with pytest.raises(ValueError, match="unknown algorithm") as caught:  # Bagua raises KeyError
        wrapped.switch_to("unknown")
    assert "quantize" in str(caught.value)


@on_ranks(1, 2)
def test_bagua_state_dict_and_forward(comm: Communicator, directory: Path) -> None:
    module = bagua_net()
    wrapped, optimizer = sx.train.data_parallel(module, sgd(module), tune_every=3)
    assert list(wrapped.state_dict()) == list(module.state_dict())  # without a prefix
    wrapped.load_state_dict({name: value * 0 for name, value in module.state_dict().items()})
    assert flat(module).eq(0).all()
    wrapped.eval()
    for _ in range(4):
        wrapped(torch.zeros(1, 2))  # it counts in training mode only
    wrapped.train()
    for step in range(6):
        optimizer.zero_grad()
        loss_of(wrapped, comm.rank, step).backward()
        optimizer.step()
        assert len(wrapped.tuning_history) == (step + 1) // 3


@on_ranks(1, 2)
def test_bagua_report_metrics_and_ask_and_update_hyperparameters(comm: Communicator, directory: Path) -> None:
    module = bagua_net()
    wrapped, optimizer = sx.train.data_parallel(module, sgd(module), bucket_bytes=1024)
    assert wrapped.ask_and_update_hyperparameters() is False  # Bagua averages an empty list to NaN
    train(wrapped, optimizer, comm.rank, 2)
    wrapped.report_metrics([1.0, 1.0])
    before = optimizer.setting
    assert wrapped.ask_and_update_hyperparameters() is True
    assert optimizer.setting != before  # a no-op in Bagua
    wrapped.switch_to("decentralize")
    wrapped.report_metrics([1.0])
    assert wrapped.ask_and_update_hyperparameters() is False


@on_ranks(1, 2, 3)
def test_bagua_broadcast_parameters_and_allreduce_parameters(comm: Communicator, directory: Path) -> None:
    def module() -> nn.Module:
        model = nn.BatchNorm1d(3)
        for value in (*model.parameters(), *model.buffers()):
            value.data.fill_(comm.rank + 1)
        return model

    n = comm.world_size
    model = module()
    sx.train.broadcast_parameters(model, root=n - 1)
    assert all(value.eq(n).all() for value in model.state_dict().values())
    model = module()
    sx.train.broadcast_parameters(model, broadcast_buffers=False)
    assert model.weight.eq(1).all()
    assert model.running_mean.eq(comm.rank + 1).all()
    model = module()
    sx.train.allreduce_parameters(model)
    assert model.weight.eq((n + 1) / 2).all()
    assert model.running_mean.eq((n + 1) / 2).all()
    assert model.num_batches_tracked.item() == 1  # an integer is root's; Bagua averages it wrongly


@on_ranks(1, 2)
def test_bagua_init(comm: Communicator, directory: Path) -> None:
    model = nn.Sequential(bagua_net(comm.rank), nn.BatchNorm1d(4))
    model[1].running_mean.fill_(comm.rank)
    first = torch.optim.SGD(model[0].parameters(), lr=0.01)
    second = torch.optim.Adam(model[1].parameters(), lr=0.01)
    module, optimizers = sx.train.data_parallel(
        model, [first, second], "allreduce", broadcast_buffers=False, bucket_bytes=1 << 10, overlap=False
    )
    assert [optimizer.inner for optimizer in optimizers] == [first, second]
    assert model[1].running_mean.eq(comm.rank).all()
    assert same_everywhere(comm, flat(model))
    for name in ("quantize", "decentralize", "allreduce"):
        for step in range(2):
            loss_of(module, comm.rank, step).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        module.switch_to(name)
        assert all(optimizer.algorithm.name == name for optimizer in optimizers)
    loss_of(module, comm.rank, 2).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert same_everywhere(comm, flat(model))
    assert len(optimizers[0].reducer.buckets) > 1  # message_size is honoured


@on_ranks(4, backends=())
def test_bagua_hierarchical_reduce_on_one_host(comm: Communicator, directory: Path) -> None:
    assert weight_after("shift_one", comm, hierarchical=True) == 3.75


def weight_after(peers: Any, comm: Communicator, *, hierarchical: bool) -> float:
    """Return the weight after a step, if it was 1, 2, 4, 8 by rank."""
    module = nn.ParameterList([nn.Parameter(torch.full((5,), 0.0))])
    _, optimizer = sx.train.data_parallel(module, sgd(module), Decentralized(peers, hierarchical=hierarchical), comm)
    module[0].data.fill_(2.0**comm.rank)
    optimizer.step()
    assert module[0].eq(module[0][0]).all()
    return module[0][0].item()


def on_two_hosts(directory: str) -> list[float]:
    comm = start("hierarchical", directory, "aabb")
    found = [weight_after(peers, comm, hierarchical=True) for peers in ("shift_one", "ring", "all")]
    found.append(weight_after("shift_one", comm, hierarchical=False))
    mean = comm.all_reduce(torch.tensor([2.0**comm.rank]), "avg").item()
    comm.barrier()
    return [*found, mean]


@pytest.mark.slow
def test_bagua_hierarchical_reduce_on_two_hosts(tmp_path: Path) -> None:
    results = run_ranks(on_two_hosts, 4, backend="processes", args=(str(tmp_path),), timeout_s=120)
    assert [result[:3] for result in results] == [[3.75] * 3] * 4
    assert [result[3] for result in results] == [2.5, 5.0, 2.5, 5.0]
    assert [result[4] for result in results] == [3.75] * 4


@on_ranks(2, 3)
def test_bagua_gradient_allreduce(comm: Communicator, directory: Path) -> None:
    module = bagua_net(comm.rank)
    train(module, sgd(module), comm.rank, 3)  # ranks now have different weights
    wrapped, optimizer = sx.train.data_parallel(module, sgd(module), "allreduce")
    train(wrapped, optimizer, comm.rank, 10)
    assert same_everywhere(comm, flat(module))


@on_ranks(2, 4)
def test_bagua_decentralized(comm: Communicator, directory: Path) -> None:
    for peers in ("all", "shift_one"):
        module = bagua_net(comm.rank)
        algorithm = Decentralized(peers, hierarchical=False)
        wrapped, optimizer = sx.train.data_parallel(module, sgd(module), algorithm)
        train(wrapped, optimizer, comm.rank, 10)
        optimizer.finalize()  # the communication, with which the next step begins
        parts = comm.all_gather(flat(module))
        met = algorithm.peers_of(comm.rank, comm.world_size, 10)
        assert all(torch.equal(parts[peer], parts[comm.rank]) for peer in met)
        n, r, s = comm.world_size, comm.rank, 10
        if peers == "shift_one" and n % 2 == 0:
            assert met == [((s + r) % ((n + 1) // 2)) + n // 2 if r < n // 2 else (r - n // 2 - s) % (n // 2)]


@on_ranks(2, 3)
def test_bagua_quantize(comm: Communicator, directory: Path) -> None:
    chunk = torch.randn(1, 1000, generator=torch.Generator().manual_seed(3))
    step = (chunk.max() - chunk.min()) / 255
    assert (dequantize(quantize(chunk)[0]) - chunk[0]).abs().max() <= step * 0.5001
    module = bagua_net(comm.rank)
    wrapped, optimizer = sx.train.data_parallel(module, sgd(module), "quantize")
    train(wrapped, optimizer, comm.rank, 10)
    assert same_everywhere(comm, flat(module))


@on_ranks(2)
def test_bagua_broadcast_state(comm: Communicator, directory: Path) -> None:
    for kind, settings in (
        (torch.optim.SGD, {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.1}),
        (torch.optim.Adam, {"lr": 0.2, "weight_decay": 0.1}),
        (torch.optim.Rprop, {"lr": 0.2}),
    ):
        module = bagua_net(comm.rank)
        optimizer = kind(module.parameters(), **settings)
        if comm.rank == 0:  # the other ranks have no state, on which Bagua hangs
            train(module, optimizer, comm.rank, 50)
        sx.synchronize([module, optimizer])
        assert same_everywhere(comm, flat(module))
        for parameter in module.parameters():
            for value in optimizer.state[parameter].values():
                assert not isinstance(value, torch.Tensor) or same_everywhere(comm, value)


@on_ranks(2)
def test_bagua_multi_models(comm: Communicator, directory: Path) -> None:
    algorithm = sx.train.algorithms.GradientAllReduce()
    nets = [bagua_net(1), bagua_net(2)]
    pairs = [sx.train.data_parallel(module, sgd(module), algorithm) for module in nets]
    for step in range(5):
        for wrapped, optimizer in pairs:
            optimizer.zero_grad()
            loss_of(wrapped, comm.rank, step).backward()
            optimizer.step()
    for seed, module in zip((1, 2), nets, strict=True):
        alone = bagua_net(seed)
        optimizer = sgd(alone)
        for step in range(5):
            optimizer.zero_grad()
            (sum(loss_of(alone, rank, step) for rank in range(comm.world_size)) / comm.world_size).backward()
            optimizer.step()
        torch.testing.assert_close(flat(module), flat(alone))


@on_ranks(2, 4)
def test_bagua_communicator(comm: Communicator, directory: Path) -> None:
    n, r = comm.world_size, comm.rank
    local = torch.randn(100, generator=torch.Generator().manual_seed(r))
    gathered = comm.all_gather(local)
    total = comm.all_reduce(local.clone())
    torch.testing.assert_close(total, torch.stack(gathered).sum(0))
    assert torch.equal(comm.all_reduce(local.clone(), "avg"), total / n)
    part = comm.reduce_scatter(torch.cat([local] * n))
    torch.testing.assert_close(part, total)
    assert [tensor[0].item() for tensor in comm.all_to_all([torch.tensor([10 * r + i]) for i in range(n)])] == [
        10 * i + r for i in range(n)
    ]
    if n % 2 == 0:  # from even to odd ranks
        peer = r + 1 - 2 * (r % 2)
        moved = comm.recv(torch.empty(100), peer) if r % 2 else comm.send(local, peer)
        assert torch.equal(moved, gathered[r - r % 2])
    sent = {"lr": 0.02, "weight_decay": 1e-4, "momentum": 0.9}
    assert comm.broadcast_object(sent if r == 0 else None) == sent


@on_ranks(3)
def test_bagua_process_group(comm: Communicator, directory: Path) -> None:
    group = comm.split(comm.rank % 2)
    assert group is not None
    members = [rank for rank in range(comm.world_size) if rank % 2 == comm.rank % 2]
    assert (group.rank, group.world_size) == (members.index(comm.rank), len(members))
    assert group.all_reduce(torch.tensor([comm.rank])).item() == sum(members)
    assert comm.split(1 if comm.rank else None) is None or comm.rank


# Flashlight


@on_ranks(2)
def test_flashlight_distributed_init_twice(comm: Communicator, directory: Path) -> None:
    assert sx.init("auto", timeout_s=5.0) is comm  # with a warning
    assert sx.is_initialized()
    assert (sx.get_rank(), sx.get_world_size()) == (comm.rank, comm.world_size)
    assert sx.comm.get_backend() == comm.backend


def test_flashlight_uninitialised_values() -> None:
    with defaults.use(None):
        assert not sx.is_initialized()
        assert (sx.get_rank(), sx.get_world_size()) == (0, 1)
        assert sx.comm.get_backend() == "single"
        scaled = sx.get_communicator().all_reduce(torch.ones(3), scale=2.0)  # Flashlight throws; here it is scaled
        assert scaled.tolist() == [2.0] * 3


def through_a_directory(directory: str) -> int:
    comm = sx.init("auto", rendezvous=f"file://{directory}")
    value = comm.all_reduce(torch.tensor([comm.rank + 1])).item()
    comm.barrier()
    sx.shutdown()
    return int(value)


@pytest.mark.slow
def test_flashlight_file_store(tmp_path: Path) -> None:
    for _ in range(2):  # the first rendezvous has left nothing behind
        assert run_ranks(through_a_directory, 2, backend="processes", args=(str(tmp_path),), timeout_s=120) == [3, 3]
        assert not list(tmp_path.iterdir())


@on_ranks(1, 2, 3, 4)
def test_flashlight_all_reduce(comm: Communicator, directory: Path) -> None:
    n = comm.world_size
    for async_op in (False, True):  # Flashlight's Gloo does not support this
        tensor = filled(comm.rank, 10, torch.float32)
        result = comm.all_reduce(tensor, scale=2.0, async_op=async_op)
        if async_op:
            comm.wait_all()
            result = result.wait()
        assert result is tensor
        assert tensor.eq(n * (n - 1)).all()
    assert comm.all_reduce(torch.full((3, 3), float(comm.rank))).eq(n * (n - 1) / 2).all()  # 6 on four ranks
    for dtype in (torch.float16, torch.float32, torch.float64, torch.int32, torch.int64):
        assert comm.all_reduce(filled(comm.rank, 10, dtype)).eq(n * (n - 1) / 2).all()
    with pytest.raises(TypeError, match="float8"):
        comm.all_reduce(torch.ones(4).to(torch.float8_e4m3fn))


@on_ranks(1, 2, 3)
def test_flashlight_all_reduce_multiple(comm: Communicator, directory: Path) -> None:
    n = comm.world_size
    for contiguous in (False, True):
        for async_op in (False, True):
            tensors = [filled(comm.rank + 1, 1 << 12, torch.float32) for _ in range(5)]
            work = comm.all_reduce_multiple(tensors, scale=2.0, contiguous=contiguous, async_op=async_op)
            if async_op:
                work.wait()
            assert all(tensor.eq(n * (n + 1)).all() for tensor in tensors)
            mixed = [filled(1, 3), filled(1, 3, torch.float32)]  # in Flashlight these cannot be contiguous
            comm.all_reduce_multiple(mixed, contiguous=contiguous)
            assert all(tensor.eq(n).all() for tensor in mixed)
    assert comm.all_reduce_multiple([]) == []


@pytest.mark.slow
@on_ranks(2, backends=("shm",))
def test_flashlight_all_reduce_set_of_20_mib(comm: Communicator, directory: Path) -> None:
    n = comm.world_size
    for count in (5, 30):  # 120 MiB throw in Flashlight
        tensors = [filled(comm.rank + 1, 1 << 20, torch.float32) for _ in range(count)]
        comm.all_reduce_multiple(tensors, scale=2.0, async_op=True).wait()
        assert all(tensor.eq(n * (n + 1)).all() for tensor in tensors)


@on_ranks(1, 2)
def test_flashlight_sync_distributed(comm: Communicator, directory: Path) -> None:
    comm.wait_all()  # nothing is pending
    tensor = filled(comm.rank + 1, 1 << 16, torch.float32)
    comm.all_reduce(tensor, scale=0.5, async_op=True)
    comm.wait_all()
    n = comm.world_size
    assert tensor.eq(n * (n + 1) / 4).all()  # scaled after the sum, in any order of streams


@on_ranks(1, 2, 3)
def test_flashlight_barrier(comm: Communicator, directory: Path) -> None:
    time.sleep(0.02 * comm.rank)  # the order in which ranks arrive
    (directory / f"rank-{comm.rank}").touch()
    comm.barrier()
    found = {path.name for path in directory.glob("rank-*")}
    assert found == {f"rank-{rank}" for rank in range(comm.world_size)}
    comm.barrier()
    (directory / f"rank-{comm.rank}").unlink()
    comm.barrier()
    assert not list(directory.glob("rank-*"))
    comm.barrier()


@on_ranks(1, 2, 3, 4)
def test_flashlight_inline_reducer(comm: Communicator, directory: Path) -> None:
    n = comm.world_size
    reducer = sx.train.InlineReducer(comm, 1 / n)
    tensor = filled(comm.rank, 10, torch.float32)
    reducer.add(tensor)
    assert (tensor * 2 * n).eq(n * (n - 1)).all()
    reducer.finalize()  # a no-op
    assert (tensor * 2 * n).eq(n * (n - 1)).all()


@on_ranks(1, 2, 3)
def test_flashlight_coalescing_reducer(comm: Communicator, directory: Path) -> None:
    n = comm.world_size
    small = 1 << 10  # five of these fill the cache
    for async_op in (False, True):
        for contiguous in (False, True):
            reducer = sx.train.CoalescingReducer(
                comm, 1 / n, async_op=async_op, contiguous=contiguous, cache_bytes=5 * 4 * small
            )
            tensors = [filled(comm.rank + 1, small, torch.float32) for _ in range(100)]
            for count, tensor in enumerate(tensors, 1):
                reducer.add(tensor)
                if count % 10 == 0:
                    reducer.finalize()
            assert all((tensor * 2 * n).eq(n * (n + 1)).all() for tensor in tensors)
    reducer = sx.train.CoalescingReducer(comm, 1.0, async_op=False, cache_bytes=5 * 4 * small)
    fit = [filled(1, small, torch.float32) for _ in range(5)]
    for tensor in fit:
        reducer.add(tensor)
    assert all(tensor.eq(1).all() for tensor in fit)  # a tensor of exactly the threshold fits
    reducer.add(big := filled(1, 6 * small, torch.float32))
    assert all(tensor.eq(n).all() for tensor in (*fit, big))  # flushed, then sent alone, as it is too large
    reducer.finalize()


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    gc.collect()
    texts = [record.getMessage() for record in caplog.records]
    return [text for text in texts if f"CoalescingReducer, made at {__file__}:" in text]


def test_flashlight_coalescing_reducer_that_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """Flashlight's destructor finalizes, which communicates.

    Here a warning names what was not reduced, and nothing is sent.
    """
    for end in ("finalize", "discard"):
        reducer = sx.train.CoalescingReducer()
        reducer.add(torch.ones(3))
        getattr(reducer, end)()
        del reducer
    with sx.train.CoalescingReducer() as reducer:
        reducer.add(torch.ones(3))
    del reducer
    assert not warned(caplog)

    def work() -> list[float]:
        reducer = sx.train.CoalescingReducer()
        tensors = [torch.full((3,), float(sx.get_rank())) for _ in range(2)]
        for tensor in tensors:
            reducer.add(tensor)
        del reducer
        return tensors[0].tolist()

    with caplog.at_level(logging.WARNING, "statexchange"):
        assert run_ranks(work, 2) == [[0.0] * 3, [1.0] * 3]
    found = warned(caplog)
    assert len(found) == 2
    assert all("2 tensors" in text for text in found)


@on_ranks(1, 2)
def test_flashlight_distribute_module_grads(comm: Communicator, directory: Path) -> None:
    module = nn.Linear(3, 2)
    reducer = sx.train.BucketReducer(module)  # 1 / N by default
    (module(torch.ones(1, 3)).sum() * (comm.rank + 1)).backward()
    reducer.finalize()
    assert module.bias.grad.eq((comm.world_size + 1) / 2).all()


@on_ranks(1, 2, 3)
def test_flashlight_all_reduce_parameters_and_gradients(comm: Communicator, directory: Path) -> None:
    n = comm.world_size
    module = nn.Linear(3, 2)
    for parameter in module.parameters():
        parameter.data.fill_(comm.rank + 1)
        parameter.grad = torch.full_like(parameter, comm.rank + 1)
    sx.train.allreduce_parameters(module)
    sx.average_gradients(module)
    for parameter in module.parameters():
        assert parameter.eq((n + 1) / 2).all()  # averaged
        assert parameter.grad.eq((n + 1) / 2).all()
    with pytest.raises(InvalidArgumentError):
        sx.train.allreduce_parameters(None)  # type: ignore[arg-type]


@on_ranks(2)
def test_flashlight_sync_meter(comm: Communicator, directory: Path) -> None:
    """An average over ranks of unequal counts is computed from sums of values times counts, and of counts."""
    value, count = float(comm.rank + 1), comm.rank + 1
    total, counts = comm.all_reduce(torch.tensor([value * count, count], dtype=torch.float64)).tolist()
    n = comm.world_size
    assert total / counts == sum(i * i for i in range(1, n + 1)) / sum(range(1, n + 1))


@on_ranks(2)
def test_flashlight_example_trains_a_perceptron(comm: Communicator, directory: Path) -> None:
    """10 to 100 to 1, momentum 0.9, each rank trains on half of the samples: the whole loss falls to a twentieth."""
    generator = torch.Generator().manual_seed(5)
    module = nn.Sequential(nn.Linear(10, 100), nn.ReLU(), nn.Linear(100, 1))
    for parameter in module.parameters():
        nn.init.uniform_(parameter, -0.3, 0.3, generator=generator)
    data = torch.rand(1000, 10, generator=generator) * 2 - 1
    target = (data * torch.arange(1.0, 11)).sum(1, keepdim=True)
    part = sx.train.DistributedDataContainer((data, target))
    rows = part.__getitems__(list(range(len(part))))
    inputs, targets = (torch.stack(column) for column in zip(*rows, strict=True))
    sx.train.broadcast_parameters(module)
    optimizer = sx.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=1e-2, momentum=0.9))
    losses = []
    for _ in range(100):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(module(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(comm.all_reduce(loss.detach().clone(), "avg").item())
    assert losses[-1] < losses[0] / 20
    assert same_everywhere(comm, flat(module))
