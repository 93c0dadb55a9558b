"""Export of every sharding of live state: the files are those of the whole model, bit for bit."""

from __future__ import annotations

import copy
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import State, are_same, load_directory
from starting import THREADS_AND_PROCESSES
from sweeps import slow
from torch import nn

import statexchange as sx
from statexchange.testing import run_ranks

IMPORTING = threading.Lock()


def make_model() -> nn.Sequential:
    torch.manual_seed(0)  # in this process only, if ranks are processes
    return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 10), nn.Linear(10, 7, bias=False), nn.LayerNorm(7))


# Meshes


def exports_over_a_mesh(kind: str, out: str) -> bool:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = make_model()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if kind == "tp":
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, {"1": ColwiseParallel(), "2": RowwiseParallel()})
    elif kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model[1], mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    sx.export_checkpoint(model, out)
    return are_same(load_directory(out), expected)


@pytest.mark.parametrize(("kind", "ranks"), [("tp", 2), slow("hsdp", 4), ("ddp", 2)])
def test_modules_over_a_mesh_are_exported_whole(kind: str, ranks: int, tmp_path: Path) -> None:
    assert run_ranks(exports_over_a_mesh, ranks, backend="gloo", args=(kind, str(tmp_path / "out"))) == [True] * ranks


def exports_experts_on_a_submesh(out: str) -> list[bool]:
    """Export two stages, each with experts on a mesh of its two ranks; then experts on one axis of a 2-D mesh."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(0)
    layers = torch.randn(2, 5, 4, 3)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    stage = mesh.get_local_rank("pp")
    own = {f"layers.{stage}.experts.up": distribute_tensor(layers[stage], mesh["ep"], [Shard(0)])}
    sx.export_checkpoint(own, f"{out}-stages", comm=mesh)
    both = {"experts.up": distribute_tensor(layers[0], mesh["ep"], [Shard(0)]), "gate": torch.ones(2)}
    sx.export_checkpoint(both, f"{out}-both", comm=mesh)
    stages = {f"layers.{n}.experts.up": layers[n] for n in range(2)}
    together = {"experts.up": layers[0], "gate": torch.ones(2)}
    return [are_same(load_directory(f"{out}-stages"), stages), are_same(load_directory(f"{out}-both"), together)]


@pytest.mark.slow
def test_experts_on_a_submesh_are_exported_whole(tmp_path: Path) -> None:
    found = run_ranks(exports_experts_on_a_submesh, 4, backend="gloo", args=(str(tmp_path / "out"),))
    assert found == [[True, True]] * 4


def exports_dtensors_with_a_layout(out: str) -> bool:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    rank = mesh.get_rank()
    w = torch.arange(8.0)
    cut = distribute_tensor(w, mesh, [Shard(0)])
    with pytest.raises(ValueError, match="sharded already") as caught:
        sx.export_checkpoint({"w": cut}, out, layout={"w": {"dim": 0}})
    assert caught.value.name == "w"
    scale = distribute_tensor(torch.zeros(2), mesh, [Replicate()])
    scale.to_local().fill_(rank)
    state = {"w.weight": cut, "scale": scale, "v.weight": w.chunk(2)[rank]}
    rules = {"w": "rowwise", "v": "colwise", "scale": {"reduce": "max"}}
    sx.export_checkpoint(state, out, layout=rules)
    return are_same(load_directory(out), {"w.weight": w, "scale": torch.ones(2), "v.weight": w})


def test_a_tp_plan_may_name_dtensors(tmp_path: Path) -> None:
    assert all(run_ranks(exports_dtensors_with_a_layout, 2, backend="gloo", args=(str(tmp_path / "out"),)))


class Chunked(torch.Tensor):
    """Rows that two ranks hold in turn, described by torch's protocol."""

    rank: int
    parts: torch.Tensor

    @staticmethod
    def of(rank: int, parts: torch.Tensor) -> Chunked:
        made = torch.Tensor._make_wrapper_subclass(Chunked, (2 * len(parts), *parts.shape[1:]), dtype=parts.dtype)
        made.rank, made.parts = rank, parts
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} is not for a tensor that lies on several ranks")

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        places = [(2 * row + self.rank, *(0,) * (self.ndim - 1)) for row in range(len(self.parts))]
        return [ChunkStorageMetadata(torch.Size(at), torch.Size((1, *self.shape[1:]))) for at in places]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self.parts[index.offset[0] // 2].unsqueeze(0)


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.filterwarnings("ignore:.*ShardedTensor")
def test_torchs_old_sharded_tensor_is_refused_by_its_name(tmp_path: Path) -> None:
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"])  # type: ignore[arg-type]
    state = {"old.w": sharded_tensor.zeros(spec, 4, 2)}
    for write in (sx.export_checkpoint, sx.save_checkpoint):
        with pytest.raises(sx.errors.UnsupportedError, match=r"ShardedTensor.*use DTensor.*old\.w"):
            write(state, tmp_path / "out")


@pytest.mark.ranks(2, backend="threads")
def test_tensors_with_torchs_chunk_protocol_are_exported_and_loaded(tmp_path: Path) -> None:
    rank = sx.get_communicator().rank
    whole = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    sx.export_checkpoint({"w": Chunked.of(rank, whole[rank::2].clone())}, tmp_path / "out")
    assert are_same(load_directory(tmp_path / "out"), {"w": whole})
    fresh = torch.zeros(3, 3)
    sx.load_checkpoint({"w": Chunked.of(rank, fresh)}, tmp_path / "out")
    assert torch.equal(fresh, whole[rank::2])


# Names


def wrap(kind: str, model: nn.Module) -> nn.Module:
    if kind == "compile":
        return torch.compile(model, backend="eager")  # type: ignore[return-value]
    if kind == "averaged":
        return torch.optim.swa_utils.AveragedModel(model)
    if kind == "distributed":
        return sx.train.DistributedModule(model)
    if kind == "distributed, averaged":
        return torch.optim.swa_utils.AveragedModel(sx.train.DistributedModule(model))
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    return torch.optim.swa_utils.AveragedModel(
        nn.parallel.DistributedDataParallel(torch.compile(model, backend="eager"))
    )


def names_of_wrappers_that_change_names(out: str) -> list[str]:
    wrong = []
    for kind in ("compile", "averaged", "distributed", "distributed, averaged", "ddp", "all"):
        model = make_model()
        expected = copy.deepcopy(model.state_dict())
        sx.export_checkpoint(wrap(kind, model), f"{out}-{kind}")
        if not are_same(load_directory(f"{out}-{kind}"), expected):
            wrong.append(kind)
    return wrong


def test_wrappers_do_not_change_names(tmp_path: Path) -> None:
    assert run_ranks(names_of_wrappers_that_change_names, 2, backend="gloo", args=(str(tmp_path / "out"),)) == [[], []]


@pytest.mark.ranks(2, backend=THREADS_AND_PROCESSES)
def test_lists_of_modules_are_exported_as_the_stages_of_a_pipeline(tmp_path: Path) -> None:
    """Interleaved stages: rank 0 has the first and third, rank 1 the others; the last one has a tied head."""
    comm = sx.get_communicator()
    stages = [nn.ModuleDict({str(n): nn.Linear(3, 3)}) for n in range(4)]
    for n, stage in enumerate(stages):
        nn.init.constant_(stage[str(n)].weight, n)
        nn.init.zeros_(stage[str(n)].bias)
    head = nn.Linear(3, 3, bias=False)
    head.weight = stages[3]["3"].weight
    own: list[Any] = stages[comm.rank :: 2]
    report = sx.export_checkpoint([*own, nn.ModuleDict({"head": head})] if comm.rank else own, tmp_path / "out")
    expected = {name: value for stage in stages for name, value in stage.state_dict().items()}
    assert are_same(load_directory(tmp_path / "out"), expected)
    assert report.aliases == {"head.weight": "3.weight"}
    assert json.loads((tmp_path / "out/statexchange.json").read_text())["aliases"] == report.aliases


# Plain tensors and a layout


@pytest.mark.ranks(2, backend=THREADS_AND_PROCESSES)
def test_plain_tensors_are_exported_by_every_kind_of_rule(tmp_path: Path) -> None:
    from torch.distributed.tensor import Replicate, Shard

    rank = sx.get_communicator().rank
    w = torch.arange(24.0).reshape(4, 6)
    state = {
        "shard": w.chunk(2, 1)[rank],
        "replicate": w,
        "word.weight": w.chunk(2, 1)[rank].clone(),
        "all.boxes": torch.cat([w[:1], w[3:]]) if rank == 0 else w[1:3],
        "own.box": w[2 * rank : 2 * rank + 2],
        "array": w.numpy()[2 * rank : 2 * rank + 2],
        "scale": torch.tensor([1.0, -2.0]) * (1 if rank else -1),
        "turned.scale": (w - 12.25).mul(1 if rank else -1).T,
    }
    boxes = [[[[0, 0], [1, 6]], [[3, 0], [1, 6]]], [[[1, 0], [2, 6]]]]
    layout = {
        "shard": Shard(1),
        "replicate": Replicate(),
        "word": "rowwise",
        "all.boxes": {"global_shape": [4, 6], "boxes": boxes},
        "own.box": {"global_shape": [4, 6], "offsets": [2 * rank, 0], "shape": [2, 6]},
        "array": {"dim": 0},
        "*scale": {"reduce": "max"},
    }
    sx.export_checkpoint(state, tmp_path / "out", layout=layout, dtype="bfloat16")
    expected = {name: w.bfloat16() for name in state} | {"scale": torch.tensor([1.0, 2.0]).bfloat16()}
    expected["turned.scale"] = (w - 12.25).abs().T.bfloat16()
    assert are_same(load_directory(tmp_path / "out"), expected)


def tiny_llama(*, tied: bool) -> Any:
    with IMPORTING:  # one thread at a time
        from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied, attention_bias=True, mlp_bias=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    seed = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in model.parameters():
            value.normal_(generator=seed)
    return model


def cut_as_transformers_does(model: Any, rank: int) -> State:
    """Return this rank's plain tensors: rows of colwise tensors and of the embedding, columns of rowwise ones."""
    dims = {"colwise": 0, "colwise_gather_output": 0, "embedding_rowwise": 0, "rowwise": 1}
    words = {}
    for pattern, word in model.tp_plan.items():
        words |= {pattern.replace("*", str(layer)): word for layer in range(2)}
    found = {}
    for name, value in model.state_dict().items():
        word = words.get(name.rpartition(".")[0])
        whole = word is None or (word == "rowwise" and value.ndim == 1)
        found[name] = value if whole else value.chunk(2, dims[word])[rank]
    return found


@pytest.mark.ranks(2, backend="threads", timeout_s=60)
def test_a_models_tp_plan_is_a_layout_for_live_ranks(tmp_path: Path) -> None:
    rank = sx.get_communicator().rank
    for tied in (False, True):
        model = tiny_llama(tied=tied)
        own = cut_as_transformers_does(model, rank)
        assert own["model.embed_tokens.weight"].shape == (16, 16)
        assert own["model.layers.0.self_attn.o_proj.bias"].shape == (16,)
        report = sx.export_checkpoint(own, tmp_path / f"out{tied}", layout=model.tp_plan)
        expected = dict(model.state_dict())
        if tied:
            del expected["lm_head.weight"]
        assert report.aliases == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
        assert are_same(load_directory(tmp_path / f"out{tied}"), expected)
        sx.get_communicator().barrier()


@pytest.mark.ranks(2)
def test_a_tensor_that_is_called_as_a_box_of_another_is_not_gathered() -> None:
    state = {"w": Chunked.of(sx.get_communicator().rank, torch.ones(2, 3)), "w#0": torch.zeros(1)}
    with pytest.raises(sx.errors.InvalidArgumentError, match="rename it"), sx.gather_state(state):
        pass
