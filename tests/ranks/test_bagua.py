"""Bagua's `torch_api.distributed`: one test for each function that this package replaces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bagua import bagua_net
from four_systems import filled, flat, on_ranks, same_everywhere
from starting import start
from torch import nn

import statexchange as sx
from statexchange.comm.communicator import Communicator
from statexchange.testing import run_ranks
from statexchange.train.algorithms import Decentralized, dequantize, quantize
from statexchange.train.buckets.plan import split_buckets
from statexchange.train.buckets.views import BucketView

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


@on_ranks(2)
def test_a_second_init_returns_the_communicator_unlike_in_bagua(comm: Communicator, directory: Path) -> None:
    assert sx.init("gloo") is comm  # a warning; Bagua raises RepeatedInitializationError


@on_ranks(1, 2, 3)
def test_collectives_and_coalesced_ones_give_the_values_of_bagua(comm: Communicator, directory: Path) -> None:
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
def test_a_module_is_wrapped_as_baguas_distributed_module(comm: Communicator, directory: Path) -> None:
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
def test_a_reducer_takes_baguas_arguments_and_bucket_types(comm: Communicator, directory: Path) -> None:
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


def views_of(dtypes: dict[str, torch.dtype]) -> list[BucketView]:
    sizes = dict(zip("ABCDE", range(1, 6), strict=True))
    tensors = {name: torch.empty(sizes[name] << 20, dtype=dtype, device="meta") for name, dtype in dtypes.items()}
    return [BucketView(0, name, tensor, "cpu 0") for name, tensor in tensors.items()]


@pytest.mark.parametrize(
    ("order", "halves", "expected"),
    [
        ("ABCDE", "", ["ABC", "D", "E"]),
        ("ABCDE", "CD", ["CD", "AB", "E"]),
        ("DEABC", "", ["D", "E", "ABC"]),
    ],
)
def test_buckets_are_split_as_by_bagua(order: str, halves: str, expected: list[str]) -> None:
    tensors = views_of({name: torch.float16 if name in halves else torch.float32 for name in order})
    found = split_buckets(tensors, 20 << 20)
    assert ["".join(tensors[i].name for i in bucket) for bucket in found] == expected
    assert all(len({tensors[i].dtype for i in bucket}) == 1 for bucket in found)  # Bagua mixes two of these


@on_ranks(2, 3)
def test_unused_parameters_do_not_hang_a_step_unlike_in_bagua(comm: Communicator, directory: Path) -> None:
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
def test_a_switch_changes_the_algorithm_as_baguas_switch_to(comm: Communicator, directory: Path) -> None:
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
def test_state_dict_and_forward_are_those_of_the_module_as_in_bagua(comm: Communicator, directory: Path) -> None:
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
def test_metrics_are_reported_to_the_tuner_as_in_bagua(comm: Communicator, directory: Path) -> None:
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
def test_parameters_are_broadcast_and_averaged_as_by_bagua(comm: Communicator, directory: Path) -> None:
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
def test_a_training_starts_as_by_baguas_init(comm: Communicator, directory: Path) -> None:
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
def test_a_hierarchical_reduce_on_one_host_gives_baguas_weight(comm: Communicator, directory: Path) -> None:
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
def test_a_hierarchical_reduce_on_two_hosts_gives_baguas_weight(tmp_path: Path) -> None:
    results = run_ranks(on_two_hosts, 4, backend="processes", args=(str(tmp_path),), timeout_s=120)
    assert [result[:3] for result in results] == [[3.75] * 3] * 4
    assert [result[3] for result in results] == [2.5, 5.0, 2.5, 5.0]
    assert [result[4] for result in results] == [3.75] * 4


@on_ranks(2, 3)
def test_gradients_are_averaged_as_by_baguas_gradient_allreduce(comm: Communicator, directory: Path) -> None:
    module = bagua_net(comm.rank)
    train(module, sgd(module), comm.rank, 3)  # ranks now have different weights
    wrapped, optimizer = sx.train.data_parallel(module, sgd(module), "allreduce")
    train(wrapped, optimizer, comm.rank, 10)
    assert same_everywhere(comm, flat(module))


@on_ranks(2, 4)
def test_weights_are_averaged_as_by_baguas_decentralized_algorithm(comm: Communicator, directory: Path) -> None:
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
def test_values_are_quantised_as_by_bagua(comm: Communicator, directory: Path) -> None:
    chunk = torch.randn(1, 1000, generator=torch.Generator().manual_seed(3))
    step = (chunk.max() - chunk.min()) / 255
    assert (dequantize(quantize(chunk)[0]) - chunk[0]).abs().max() <= step * 0.5001
    module = bagua_net(comm.rank)
    wrapped, optimizer = sx.train.data_parallel(module, sgd(module), "quantize")
    train(wrapped, optimizer, comm.rank, 10)
    assert same_everywhere(comm, flat(module))


@on_ranks(2)
def test_the_state_of_an_optimizer_is_broadcast_as_by_bagua(comm: Communicator, directory: Path) -> None:
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
def test_one_algorithm_trains_several_models_as_in_bagua(comm: Communicator, directory: Path) -> None:
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
def test_a_communicator_gives_the_values_of_baguas(comm: Communicator, directory: Path) -> None:
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
def test_a_group_of_some_ranks_works_as_baguas_process_group(comm: Communicator, directory: Path) -> None:
    group = comm.split(comm.rank % 2)
    assert group is not None
    members = [rank for rank in range(comm.world_size) if rank % 2 == comm.rank % 2]
    assert (group.rank, group.world_size) == (members.index(comm.rank), len(members))
    assert group.all_reduce(torch.tensor([comm.rank])).item() == sum(members)
    assert comm.split(1 if comm.rank else None) is None or comm.rank
