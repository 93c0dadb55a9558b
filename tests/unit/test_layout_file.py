"""Layout files: tensors that are cut by hand and written to plain files are merged by rules."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import CommandLine
from equality import assert_same
from hypothesis import given, settings
from layout_files import refuse, write_ranks
from random_layouts import State, cut_by_rules
from safetensors.torch import load_file, save_file
from workspaces import part, write_round

from statexchange.checkpoint.merge import merge_checkpoint
from statexchange.errors import (
    IncompleteError,
    InvalidArgumentError,
    ReplicaError,
)
from statexchange.sharding.rules import Layout
from statexchange.sharding.shards import Box, full_box


def merged(path: Path, layout: Any, *states: State, **options: Any) -> State:
    """Return the tensors that a merge of the ranks' tensors by the layout gives."""
    merge_checkpoint(write_ranks(path / "in", *states), path / "out", layout=layout, **options)
    return load_file(path / "out" / "model.safetensors")


def test_parts_of_different_sizes_are_joined_along_a_dim_and_replicas_are_kept(tmp_path: Path) -> None:
    w, v = torch.randn(7, 6), torch.randn(5, 8).bfloat16()
    states = [
        {"a.w": w[:3], "a.v": v[:, :1], "norm": torch.ones(3)},
        {"a.w": w[3:], "a.v": v[:, 1:], "norm": torch.ones(3)},
    ]
    layout = {"*.w": {"dim": 0}, "a.*": {"dim": -1}, "norm": "replicate"}
    assert_same(merged(tmp_path, layout, *states), {"a.w": w, "a.v": v, "norm": torch.ones(3)})


def test_the_command_line_reads_a_layout_file(tmp_path: Path, call: CommandLine) -> None:
    w = torch.arange(40.0).reshape(4, 10)
    source = write_ranks(tmp_path / "in", *[{"w": part} for part in w.split(5, dim=1)])
    layout = tmp_path / "layout.json"
    layout.write_text(json.dumps({"rules": {"w": {"dim": 1}}}))
    code, _, err = call("merge", source, tmp_path / "out", "--layout", layout)
    assert code == 0, err
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["w"], w)
    layout.write_text("{")
    code, _, err = call("merge", source, tmp_path / "new", "--layout", layout)
    assert code == 2
    assert "hint" not in err  # nothing is wrong with the source


def test_tensors_of_pipeline_tensor_and_expert_parallel_ranks_are_merged(tmp_path: Path) -> None:
    """pp 2 x ep 2 x tp 2: each stage has a layer, each ep rank two stacked experts, and tp cuts their columns."""
    layers = [torch.randn(4, 6, 10) for _ in range(2)]
    embedding = torch.randn(12, 3)
    states = []
    for pp in range(2):
        for ep in range(2):
            for tp in range(2):
                state = {f"layers.{pp}.experts.up": layers[pp][2 * ep : 2 * ep + 2, :, 5 * tp : 5 * tp + 5]}
                state |= {"embed": embedding[6 * tp : 6 * tp + 6]} if pp == 0 else {"norm": torch.arange(3)}
                states.append(state)
    rules = {
        "*.experts.up": [{"dim": 0, "axis": "ep"}, {"dim": 2, "axis": "tp"}],
        "embed": {"dim": 0, "axis": "tp"},
    }
    expected = {"layers.0.experts.up": layers[0], "layers.1.experts.up": layers[1]}
    expected |= {"embed": embedding, "norm": torch.arange(3)}
    layout = {"mesh": {"pp": 2, "ep": 2, "tp": 2}, "rules": rules}
    assert_same(merged(tmp_path, layout, *states), expected)


def test_a_layout_of_version_0_1_that_calls_the_mesh_a_grid_is_accepted(tmp_path: Path) -> None:
    w = torch.randn(10, 2)
    layout = {"grid": {"tp": 2}, "rules": {"w": {"dim": 0, "axis": "tp"}}}
    assert torch.equal(merged(tmp_path, layout, {"w": w[:5]}, {"w": w[5:]})["w"], w)
    with pytest.raises(InvalidArgumentError, match="remove 'grid'"):
        Layout.parse({**layout, "mesh": {"tp": 2}})


def test_of_two_axes_that_cut_one_dim_the_first_is_the_slowest(tmp_path: Path) -> None:
    w = torch.randn(10, 2)
    states = [{"w": part} for part in w.split([3, 2, 3, 2])]
    layout = {"mesh": {"tp": 2, "dp": 2}, "rules": {"w": {"dim": 0, "axis": ["tp", "dp"]}}}
    assert torch.equal(merged(tmp_path, layout, *states)["w"], w)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_parts_of_each_fused_block_are_joined(tmp_path: Path, dim: int) -> None:
    """Each rank has its part of the query, of the key and of the value, one after another."""
    blocks = [torch.randn(*(s if d == dim else 4 for d in range(3))) for s in (8, 2, 2)]
    parts = [torch.cat([block.chunk(2, dim)[rank] for block in blocks], dim) for rank in range(2)]
    whole = merged(tmp_path, {"qkv": {"dim": dim, "blocks": [8, 2, 2]}}, *[{"qkv": part} for part in parts])
    assert torch.equal(whole["qkv"], torch.cat(blocks, dim))


def test_a_fused_tensor_is_split_into_several(tmp_path: Path) -> None:
    blocks = {"q": torch.randn(8, 3), "k": torch.randn(2, 3), "v": torch.randn(2, 3)}
    states = [{"l.qkv.weight": torch.cat([b.chunk(2)[rank] for b in blocks.values()])} for rank in range(2)]
    states = [{**s, "up.weight": torch.cat([torch.zeros(2, 2), torch.ones(2, 2)])} for s in states]
    layout = {
        "mesh": {"tp": 2},
        "rules": {
            "*.qkv.*": {"dim": 0, "split": {"qkv": {"q": 4, "k": 1, "v": 1}}},
            "up.*": {"dim": 0, "axis": [], "split": {"up": {"gate": 1, "up": 1}}},
        },
    }
    expected = {f"l.{name}.weight": block for name, block in blocks.items()}
    expected |= {"gate.weight": torch.zeros(2, 2), "up.weight": torch.ones(2, 2)}
    assert_same(merged(tmp_path, layout, *states), expected)


def test_interleaved_groups_of_heads_are_split_into_queries_keys_and_values(tmp_path: Path) -> None:
    """Megatron's fused projection: for each group its queries, its key, its value; ranks hold two groups each."""
    q, k, v = torch.randn(4, 6, 5), torch.randn(4, 2, 5), torch.randn(4, 2, 5)  # group, head x dim, hidden
    fused = torch.cat([q, k, v], 1).reshape(40, 5)
    rule = {"dim": 0, "split": {"linear_qkv": {"q_proj": 6, "k_proj": 2, "v_proj": 2}}, "interleaved": True}
    states = [{"linear_qkv.weight": part} for part in fused.chunk(2)]
    expected = {f"{name}_proj.weight": part.reshape(-1, 5) for name, part in (("q", q), ("k", k), ("v", v))}
    assert_same(merged(tmp_path, {"linear_qkv.*": rule}, *states), expected)


def test_experts_and_layers_are_renumbered_over_the_ranks(tmp_path: Path) -> None:
    mesh = {"pp": 2, "ep": 2, "tp": 2}
    states, expected = [], {}
    layers_at = [2, 1]  # stage 0 has two layers
    for pp in range(2):
        for ep in range(2):
            for tp in range(2):
                state = {}
                for layer in range(layers_at[pp]):
                    for expert in range(3):
                        name = f"layers.{2 * pp + layer}.mlp.experts.{3 * ep + expert}.w"
                        whole = expected.setdefault(name, torch.randn(4, 6))
                        state[f"layers.{layer}.mlp.experts.{expert}.w"] = whole[:, 3 * tp : 3 * tp + 3]
                states.append(state)
    renumber = [{"renumber": "layers", "axis": "pp"}, {"renumber": "experts", "axis": "ep"}]
    layout = {"mesh": mesh, "rules": {"*.w": [*renumber, {"dim": 1, "axis": "tp"}]}}
    assert_same(merged(tmp_path, layout, *states), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn])
@pytest.mark.parametrize("reduce", ["max", "min"])
def test_scales_that_differ_are_reduced(tmp_path: Path, dtype: torch.dtype, reduce: str) -> None:
    copies = [torch.randint(-9, 9, (50, 3)).float() for _ in range(3)]
    expected = getattr(torch.stack(copies), "a" + reduce)(0).to(dtype)
    layout = {"*_scale": {"reduce": reduce}}
    found = merged(tmp_path, layout, *[{"a_scale": copy.to(dtype), "w": torch.ones(2)} for copy in copies])
    assert torch.equal(found["a_scale"].view(torch.uint8), expected.view(torch.uint8))


def test_a_reduction_goes_window_by_window_and_with_a_cut(tmp_path: Path) -> None:
    whole = torch.randn(2, 1000, 900)
    copies = [{"s": whole[n, :, 450 * tp : 450 * tp + 450]} for n in range(2) for tp in range(2)]
    layout = {"mesh": {"dp": 2, "tp": 2}, "rules": {"s": [{"dim": 1, "axis": "tp"}, {"reduce": "max"}]}}
    assert torch.equal(merged(tmp_path, layout, *copies, dtype="bfloat16")["s"], whole.amax(0).bfloat16())


def test_parts_are_placed_by_explicit_boxes(tmp_path: Path) -> None:
    w = torch.arange(32).reshape(8, 4)
    states = [{"w": torch.cat([w[0:1], w[5:8]])}, {"w": w[1:5]}]
    boxes = [[[[0, 0], [1, 4]], [[5, 0], [3, 4]]], [[[1, 0], [4, 4]]]]
    assert torch.equal(merged(tmp_path, {"w": {"global_shape": [8, 4], "boxes": boxes}}, *states)["w"], w)


def test_the_documented_example_is_valid() -> None:
    from statexchange.sharding import rules

    text = str(rules.__doc__)
    example = text[text.index("    {\n") : text.index("    }\n\n") + 6]
    assert len(Layout.parse(json.loads(example)).rules) == 6
    for rule in re.findall(r"^``(\{.*?\})``", text, re.MULTILINE):
        axes = {"mesh": {"pp": 1, "tp": 1, "ep": 1}} if "axis" in rule else {}
        Layout.parse({**axes, "rules": {"w": json.loads(rule.replace(", ...]}", "]}"))}})


class Experts(torch.nn.Module):
    """Stacked weights, as in transformers' mixtures of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 8, 12))
        self.bias = torch.nn.Parameter(torch.randn(8))


@pytest.fixture
def two_ranks() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers the backend)

    torch.distributed.init_process_group("fake", rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.distributed.destroy_process_group()


def test_keywords_cut_as_the_styles_of_transformers_do(two_ranks: Any) -> None:
    from torch.distributed.tensor import DTensor
    from transformers.distributed import expert_parallel  # noqa: F401 (registers its styles)
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    for word in sorted(ALL_PARALLEL_STYLES):
        modules: list[torch.nn.Module] = [torch.nn.Linear(8, 12), Experts()]
        if word.startswith("embedding"):
            modules = [torch.nn.Embedding(12, 8)]
        for module in modules:
            layout = Layout.parse({"layer": word})
            for name, value in list(module.named_parameters()):
                ALL_PARALLEL_STYLES[word].shard_param(module, name, two_ranks)
                theirs = getattr(module, name)
                rule = layout.rule_for(f"layer.{name}")
                assert rule is not None
                placed = theirs.placements[0] if isinstance(theirs, DTensor) else None
                local = list(value.shape)
                if placed is not None and hasattr(placed, "dim"):
                    local[placed.dim] //= 2
                (part,) = rule.parts(f"layer.{name}", tuple(local), 0)
                cuts = [(cut.dim, len(cut.segments)) for cut in part.cuts]
                if placed is None or placed.is_replicate():
                    assert cuts == [], (word, name)
                else:
                    assert cuts == [(placed.dim % value.ndim, getattr(placed, "split_factor", 1))], (word, name)


def test_a_models_own_tp_plan_is_a_layout(tmp_path: Path) -> None:
    """Cut a tiny Llama by hand as its plan says, and merge it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, attention_bias=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    plan = {f"model.{name}": word for name, word in config.base_model_tp_plan.items()}
    plan["lm_head"] = "colwise_gather_output"
    states: list[State] = [{}, {}]
    for name, value in model.state_dict().items():
        module = re.sub(r"\d+", "*", name.rpartition(".")[0])
        word = plan.get(module, "replicate")
        dim = {"colwise": 0, "colwise_gather_output": 0, "rowwise": 1}.get(word)
        cut = dim is not None and not (word == "rowwise" and name.endswith("bias"))
        for rank in range(2):
            states[rank][name] = value.chunk(2, dim)[rank] if cut else value
    assert_same(merged(tmp_path, plan, *states), dict(model.state_dict()))


def test_a_tp_plan_may_name_tensors_that_the_files_lack(tmp_path: Path) -> None:
    plan = {"a": "rowwise", "lm_head": "colwise", "layers.*.experts": "moe_tp_experts"}
    w = torch.randn(3, 4)
    states: list[State] = [{"a.weight": part} for part in w.chunk(2, 1)]
    assert torch.equal(merged(tmp_path, plan, *states)["a.weight"], w)
    (tmp_path / "b").mkdir()  # a tensor that the plan lacks is found by its copies, which differ
    both = [{**state, "b.weight": state["a.weight"]} for state in states]
    error = refuse(ReplicaError, r"give a layout \(--layout FILE\.json\)", tmp_path / "b", plan, *both)
    assert error.name == "b.weight"


@settings(max_examples=25)
@given(cut_by_rules())
def test_random_layouts_restore_the_whole_tensors(tmp_path_factory: pytest.TempPathFactory, case: Any) -> None:
    layout, whole, states = case
    assert_same(merged(tmp_path_factory.mktemp("rules", numbered=True), layout, *states), whole)


def test_a_layout_applies_to_plain_tensors_of_workspaces_only(tmp_path: Path) -> None:
    w = torch.arange(8.0)
    write_round(tmp_path / "ws", *[[part("w", half, full_box((4,)))] for half in w.chunk(2)])
    merge_checkpoint(tmp_path / "ws", tmp_path / "out", layout={"w": {"dim": 0}})
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["w"], w)
    write_round(tmp_path / "cut", *[[part("w", w, Box((4 * r,), (4,)))] for r in range(2)])
    with pytest.raises(InvalidArgumentError, match="already has") as caught:
        merge_checkpoint(tmp_path / "cut", tmp_path / "new", layout={"w": {"dim": 0}})
    assert caught.value.name == "w"
    assert (caught.value.name, caught.value.rank) == ("w", 0)


def test_a_layout_applies_to_files_of_torch_save(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    whole = torch.randn(3, 8, 5)
    for rank, half in enumerate(torch.cat([whole[:, :4], whole[:, 4:]]).chunk(2)):
        torch.save({"w": half.transpose(1, 2)}, tmp_path / "in" / f"rank{rank}.pt")
    layout = {"w": {"dim": 2, "split": {"w": {"a": 1, "b": 1}}}}
    merge_checkpoint(tmp_path / "in", tmp_path / "out", layout=layout)
    parts = whole.transpose(1, 2).split(2, 2)
    expected = {"a": torch.cat([parts[0], parts[2]], 2), "b": torch.cat([parts[1], parts[3]], 2)}
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), expected)


def test_a_layout_complements_the_offsets_of_torchs_writer(tmp_path: Path) -> None:
    w, v = torch.arange(8.0), torch.arange(6.0)
    (tmp_path / "in").mkdir()
    for rank in range(2):
        metadata = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [4 * rank]}}), "DCP_VERSION": "1.0"}
        name = f"shard-0000{rank + 1}-model-00001-of-00001.safetensors"
        save_file({"w": w[4 * rank :][:4].clone(), "v": v[3 * rank :][:3].clone()}, tmp_path / "in" / name, metadata)
    merge_checkpoint(tmp_path / "in", tmp_path / "out", layout={"v": {"dim": 0}})
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), {"w": w, "v": v})


def test_files_are_ranks_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    path = write_ranks(tmp_path / "in", *[{"w": torch.tensor([r])} for r in range(12)], name="model-tp{}.safetensors")
    merge_checkpoint(path, tmp_path / "out", layout={"w": {"dim": 0}})
    assert load_file(tmp_path / "out" / "model.safetensors")["w"].tolist() == list(range(12))
    (path / "model-tp7.safetensors").unlink()
    with pytest.raises(IncompleteError, match="number 7 is missing"):
        merge_checkpoint(path, tmp_path / "new", layout={"w": {"dim": 0}})
    few = write_ranks(tmp_path / "few", {"w": torch.ones(1)}, name="x-0000{}-of-00003.safetensors")
    with pytest.raises(IncompleteError, match=r"3 files, .* 1\b"):
        merge_checkpoint(few, tmp_path / "new", layout={"w": {"dim": 0}})
