"""ModelOpt's `export.distribute`: one test for each function that this package replaces."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from four_systems import on_ranks
from torch import nn

import statexchange as sx
from statexchange.comm.communicator import Communicator
from statexchange.errors import NotFoundError

# ModelOpt


@on_ranks(1, 3)
def test_a_workspace_is_written_and_read_as_by_modelopt(comm: Communicator, directory: Path) -> None:
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
def test_tensors_of_ranks_arrive_as_by_modelopts_get_tensors_parallel(comm: Communicator, directory: Path) -> None:
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
def test_a_block_that_raises_ends_get_tensors_parallel_on_all_ranks(comm: Communicator, directory: Path) -> None:
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
def test_configs_of_ranks_arrive_as_by_modelopts_get_configs_parallel(comm: Communicator, directory: Path) -> None:
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
def test_modelopts_helpers_have_equivalents_of_the_same_values(comm: Communicator, directory: Path) -> None:
    assert (sx.get_rank(), sx.get_world_size()) == (comm.rank, comm.world_size)
    comm.barrier()
    group = comm.new_group([comm.rank])
    group.barrier()
    assert comm.broadcast_object({"a": (1, None)} if comm.rank == 0 else None) == {"a": (1, None)}
    assert comm.all_gather_object([comm.rank, "x"]) == [[rank, "x"] for rank in range(comm.world_size)]
    total = comm.all_reduce(torch.tensor([comm.rank + 1]))
    assert total.item() == comm.world_size * (comm.world_size + 1) // 2


@on_ranks(4)
def test_stages_of_unequal_depth_are_gathered_whole_unlike_by_modelopt(comm: Communicator, directory: Path) -> None:
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
