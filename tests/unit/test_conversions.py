"""Conversions: names and values of another model family, from files of any sharding, and back."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import CommandLine
from converted import GPT, LLAMA3, TORCHTITAN, merged, same, titan
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from stored import flip_bit

import statexchange as sx
from statexchange.checkpoint.merge import merge_checkpoint
from statexchange.errors import (
    CorruptError,
    InvalidArgumentError,
    UnsafeError,
)

# torchtitan


@pytest.mark.parametrize("kind", ["fused", "tied"])
def test_torchtitan_is_merged_to_what_its_to_hf_gives(tmp_path: Path, kind: str) -> None:
    config = TORCHTITAN / kind / "config.json"
    found = merged(titan(kind), tmp_path / "hf", convert=LLAMA3, files_from=[config])
    assert same(found, load_file(TORCHTITAN / kind / "to_hf.safetensors"))
    assert (tmp_path / "hf" / "config.json").read_bytes() == config.read_bytes()


def test_a_merge_without_the_conversion_that_its_names_have_names_it(tmp_path: Path, megatron: Path) -> None:
    """Else config.json and these names are a directory that transformers loads with random weights."""
    moe = merge_checkpoint(megatron / "ep2_moe/torch_dist", tmp_path / "moe")
    assert not [note for note in moe.notes if "convert=" in note]  # no conversion has rules for experts
    sources = [(titan("fused"), LLAMA3), (titan("tied"), LLAMA3)]
    sources += [(megatron / "tp2_pp2" / kind, GPT) for kind in ("torch_dist", "legacy")]
    config = {"config.json": (TORCHTITAN / "fused/config.json").read_text()}
    for number, (source, known) in enumerate(sources):
        for files in ({}, config):
            notes = merge_checkpoint(source, tmp_path / "never", dry_run=True, files_from=files).notes
            (note,) = [note for note in notes if "convert=" in note]
            assert note.startswith(f'transformers does not know these names: convert="{known}" (--convert {known}) ')
        numbers = None if known == GPT else {"n_heads": 4}
        converted = merge_checkpoint(source, tmp_path / f"hf{number}", convert=known, convert_with=numbers)
        again = merge_checkpoint(tmp_path / f"hf{number}", tmp_path / "never", dry_run=True)
        assert not [note for note in (*converted.notes, *again.notes) if "convert=" in note]
    optimizer = merge_checkpoint(megatron / "tp2_pp2/torch_dist", tmp_path / "never", dry_run=True, section="optimizer")
    assert not [note for note in optimizer.notes if "convert=" in note]


def test_numbers_can_be_given_and_others_follow_from_shapes(tmp_path: Path, call: CommandLine) -> None:
    expected = load_file(TORCHTITAN / "fused" / "to_hf.safetensors")
    assert same(merged(titan("fused"), tmp_path / "a", convert=LLAMA3, convert_with={"n_heads": 4}), expected)
    assert same(merged(titan("fused"), tmp_path / "b", convert=LLAMA3, convert_with={"head_dim": 4}), expected)
    options = ["--convert", LLAMA3, "--convert-with", "n_heads=4"]
    assert call("merge", titan("fused"), tmp_path / "c", *options)[0] == 0
    assert same(load_file(tmp_path / "c" / "model.safetensors"), expected)


def test_a_missing_number_is_named_with_the_option_that_gives_it(tmp_path: Path, call: CommandLine) -> None:
    code, _, message = call("merge", titan("fused"), tmp_path / "hf", "--convert", LLAMA3)
    assert code == 2
    for part in ("n_heads is not known", "--convert-with n_heads=N", "num_attention_heads", "--files-from"):
        assert part in message
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"n_heads": 3}, "dim of size 16"),
        ({"n_heads": 4, "n_kv_heads": 4}, "dim of size 8"),
        ({"n_head": 4}, "uses no 'n_head'"),
        ({"n_heads": -4}, "a number"),
    ],
)
def test_numbers_that_do_not_fit_the_tensors_are_refused(tmp_path: Path, numbers: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        merge_checkpoint(titan("fused"), tmp_path / "hf", convert=LLAMA3, convert_with=numbers)
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("kind", ["fused", "tied"])
def test_the_inverse_gives_torchtitan_its_own_names_and_values(tmp_path: Path, kind: str) -> None:
    config = TORCHTITAN / kind / "config.json"
    merge_checkpoint(titan(kind), tmp_path / "hf", convert=LLAMA3, files_from=[config], max_shard_size=4000)
    found = merged(tmp_path / "hf", tmp_path / "back", convert=f"inverse:{LLAMA3}")  # numbers: the config.json there
    assert same(found, merged(titan(kind), tmp_path / "plain"))


def test_shards_of_fused_weights_are_split_by_groups_of_heads(tmp_path: Path) -> None:
    """torchtitan's wqkv: for each head of keys its queries, the key and the value, as its hooks split them."""
    heads, kv, size, dim = 6, 2, 4, 5
    fused = np.random.default_rng(0).random((kv, heads // kv + 2, size, dim), "f4")
    q, k, v = (part.reshape(-1, dim) for part in np.split(fused, [heads // kv, heads // kv + 1], axis=1))
    parts = np.array_split(fused.reshape(-1, dim), [7, 13])
    prefix = "layers.0.attention.qkv_linear"
    layout = write_parts(tmp_path / "ranks", {f"{prefix}.wqkv.weight": parts}, 0)
    numbers = {"n_heads": heads, "n_kv_heads": kv}
    found = merged(tmp_path / "ranks", tmp_path / "hf", layout=layout, convert=LLAMA3, convert_with=numbers)
    separate = {f"{prefix}.{name}.weight": value for name, value in (("wq", q), ("wk", k), ("wv", v))}
    save_file(
        {name: np.ascontiguousarray(value) for name, value in separate.items()}, tmp_path / "separate.safetensors"
    )
    expected = merged(tmp_path / "separate.safetensors", tmp_path / "hf2", convert=LLAMA3, convert_with=numbers)
    assert same(found, expected)
    assert found["model.layers.0.self_attn.q_proj.weight"].shape == (heads * size, dim)


def test_a_checkpoint_is_compared_with_one_of_another_family(call: CommandLine) -> None:
    options = ["--convert", LLAMA3, "--convert-with", "n_heads=4"]
    pair = titan("fused"), TORCHTITAN / "fused" / "to_hf.safetensors"
    code, out, _ = call("diff", *pair, *options)
    assert code == 0
    assert "21 of 21 tensors are equal" in out
    assert sx.diff_checkpoints(*pair, convert=LLAMA3, convert_with={"n_heads": 4}).equal
    assert call("diff", *pair)[0] == 1
    back = ["--convert", f"inverse:{LLAMA3}", "--convert-with", "n_heads=4"]
    assert call("diff", *reversed(pair), *back)[0] == 0
    assert sx.diff_checkpoints(*reversed(pair), convert=f"inverse:{LLAMA3}", convert_with={"n_heads": 4}).equal


# Conversions of a user's own


def write_parts(path: Path, tensors: Mapping[str, Sequence[np.ndarray]], dim: int) -> dict[str, Any]:
    """Write a file per rank with its parts of the tensors; return the layout."""
    path.mkdir()
    for rank, parts in enumerate(zip(*tensors.values(), strict=True)):
        held = {name: np.ascontiguousarray(part) for name, part in zip(tensors, parts, strict=True)}
        save_file(held, path / f"rank-{rank}.safetensors")
    return {name: {"dim": dim} for name in tensors}


@dataclass(frozen=True)
class Case:
    """Tensors, a rule, numbers for it, and the tensors that numpy gives by it."""

    inputs: dict[str, np.ndarray]
    rule: dict[str, Any]
    expected: dict[str, np.ndarray]
    numbers: dict[str, int]


SIZES = st.integers(1, 4)


@st.composite
def _array(draw: st.DrawFn, *shape: int) -> np.ndarray:
    dtype = draw(st.sampled_from(["f4", "i2", "u1", "f8"]))
    return np.arange(int(np.prod(shape)), dtype="i8").reshape(shape).astype(dtype)


@st.composite
def permutes(draw: st.DrawFn) -> Case:
    factors, order = draw(st.lists(SIZES, min_size=1, max_size=3)), None
    order = draw(st.permutations(range(len(factors))))
    dim, other = draw(st.integers(0, 1)), draw(SIZES)
    shape = [other, other]
    shape[dim] = int(np.prod(factors))
    array = draw(_array(*shape))
    outer = array.shape[:dim]
    view = array.reshape(*outer, *factors, *array.shape[dim + 1 :])
    axes = [*range(dim), *(dim + axis for axis in order), *range(dim + len(factors), view.ndim)]
    rule = {"from": "a", "to": "b", "values": [{"permute": {"dim": dim, "shape": factors, "order": list(order)}}]}
    return Case({"a": array}, rule, {"b": view.transpose(axes).reshape(array.shape)}, {})


@st.composite
def transposes(draw: st.DrawFn) -> Case:
    shape = draw(st.lists(SIZES, min_size=1, max_size=3))
    order = draw(st.permutations(range(len(shape))))
    array = draw(_array(*shape))
    rule = {"from": "a", "to": "b", "values": [{"transpose": {"order": list(order)}}]}
    return Case({"a": array}, rule, {"b": array.transpose(order)}, {})


@st.composite
def splits(draw: st.DrawFn) -> Case:
    ratios, groups, unit = draw(st.lists(SIZES, min_size=1, max_size=3)), draw(SIZES), draw(SIZES)
    array = draw(_array(groups * sum(ratios) * unit, draw(SIZES)))
    grouped = array.reshape(groups, -1, array.shape[1])
    parts = np.split(grouped, np.cumsum(ratios)[:-1] * unit, axis=1)
    names = [f"part.{number}" for number in range(len(ratios))]
    rule = {"from": "a", "to": names, "values": [{"split": {"sizes": ratios, "groups": "groups"}}]}
    expected = {name: part.reshape(-1, array.shape[1]) for name, part in zip(names, parts, strict=True)}
    return Case({"a": array}, rule, expected, {"groups": groups})


@st.composite
def stacks(draw: st.DrawFn) -> Case:
    layers, experts = draw(SIZES), draw(SIZES)
    array = draw(_array(layers, experts, draw(SIZES), draw(SIZES)))
    names = {(layer, expert): f"{layer}.mlp.{expert}.w" for layer in range(layers) for expert in range(experts)}
    rule = {
        "from": "experts.w",
        "to": "{layer}.mlp.{expert}.w",
        "unstack": ["layer", "expert"],
        "values": [{"transpose": {"order": [1, 0]}}],
    }
    return Case({"experts.w": array}, rule, {name: array[index].T for index, name in names.items()}, {})


@st.composite
def several_operations(draw: st.DrawFn) -> Case:
    """Draw operations like those of Megatron's attention: layers, groups of heads, a rotation of the queries alone."""
    layers, groups, per_group, half = draw(SIZES), draw(SIZES), draw(SIZES), draw(SIZES)
    array = draw(_array(layers, groups * (per_group + 2) * 2 * half, draw(SIZES)))
    names = ["q", "k", "v"]
    rule = {
        "from": "qkv",
        "to": ["{layer}.q", "{layer}.k", "{layer}.v"],
        "unstack": ["layer"],
        "values": [
            {"split": {"dim": 0, "sizes": ["heads / groups", 1, 1], "groups": "groups"}},
            {"permute": {"of": 0, "dim": 0, "shape": ["heads", "half", 2], "order": [0, 2, 1]}},
        ],
    }
    expected = {}
    for layer in range(layers):
        grouped = array[layer].reshape(groups, per_group + 2, 2 * half, -1)
        for name, part in zip(names, np.split(grouped, [per_group, per_group + 1], axis=1), strict=True):
            expected[f"{layer}.{name}"] = part.reshape(-1, array.shape[2])
        q = expected[f"{layer}.q"].reshape(groups * per_group, half, 2, -1)
        expected[f"{layer}.q"] = q.transpose(0, 2, 1, 3).reshape(-1, array.shape[2])
    return Case({"qkv": array}, rule, expected, {"heads": groups * per_group, "groups": groups})


@settings(max_examples=25)
@given(case=st.one_of(permutes(), transposes(), splits(), stacks(), several_operations()), data=st.data())
def test_any_rule_gives_numpys_values_from_any_shards_and_its_inverse_gives_them_back(
    case: Case, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        dim = data.draw(st.integers(0, min(array.ndim for array in case.inputs.values()) - 1))
        cuts = data.draw(st.lists(st.integers(0, 6), max_size=3).map(sorted))
        parts = {}
        for name, array in case.inputs.items():
            parts[name] = np.split(array, [min(cut, array.shape[dim]) for cut in cuts], axis=dim)
        layout = write_parts(path / "ranks", parts, dim)
        conversion = {"numbers": {name: {} for name in ("groups", "heads", "half")}, "rules": [case.rule]}
        (path / "own.json").write_text(json.dumps(conversion))
        found = merged(path / "ranks", path / "out", layout=layout, convert=conversion, convert_with=case.numbers)
        assert same(found, case.expected)
        inverse = f"inverse:{path / 'own.json'}"
        back = merged(path / "out", path / "back", convert=inverse, convert_with=case.numbers, max_shard_size=50_000)
        assert same(back, case.inputs)


INTERLEAVED = {"from": "a", "to": "b", "values": [{"permute": {"shape": [4, 2, 8], "order": [0, 2, 1]}}]}


@pytest.mark.parametrize("convert", ["{}", "inverse:{}"])
def test_a_permutation_is_read_as_one_box_of_each_file(tmp_path: Path, convert: str) -> None:
    array = np.arange(64 * 3, dtype="f4").reshape(64, 3)
    name = "a" if convert == "{}" else "b"
    for ranks, num_boxes in ((1, 1), (2, 2), (4, 4)):
        layout = write_parts(tmp_path / f"of-{ranks}", {name: np.split(array, ranks)}, 0)
        own(tmp_path / "own.json", INTERLEAVED)
        options: dict[str, Any] = {"convert": convert.format(tmp_path / "own.json"), "layout": layout}
        report = merge_checkpoint(tmp_path / f"of-{ranks}", tmp_path / "out", **options, dry_run=True)
        assert [tensor.num_boxes for tensor in report.tensors] == [num_boxes]


def test_boxes_that_lie_one_after_another_are_permuted_as_one(tmp_path: Path) -> None:
    array = np.arange(64 * 3, dtype="f4").reshape(64, 3)
    layout = write_parts(tmp_path / "ranks", {"a": np.split(array, 16)}, 0)
    merge_checkpoint(tmp_path / "ranks", tmp_path / "sealed", layout=layout)
    own(tmp_path / "own.json", INTERLEAVED)
    options = {"convert": str(tmp_path / "own.json")}
    (planned,) = merge_checkpoint(tmp_path / "sealed", tmp_path / "out", **options, dry_run=True).tensors
    assert planned.num_boxes == 1
    found = merged(tmp_path / "sealed", tmp_path / "out", **options)
    assert same(found, {"b": array.reshape(4, 2, 8, 3).swapaxes(1, 2).reshape(64, 3)})
    file = tmp_path / "sealed" / "model.safetensors"
    flip_bit(file, file.stat().st_size - 4)  # in the last of the 16 boxes
    with pytest.raises(CorruptError, match="digest in region") as caught:
        merge_checkpoint(tmp_path / "sealed", tmp_path / "again", **options)
    assert caught.value.name == "a"


def own(path: Path, *rules: dict[str, Any]) -> str:
    path.write_text(json.dumps({"numbers": {"vocab": {"config": ["vocab_size"]}}, "rules": rules}))
    return str(path)


def test_a_padded_vocabulary_is_cut_off_and_the_inverse_fills_it_up_with_zeros(tmp_path: Path) -> None:
    padded = np.arange(16, dtype="f4").reshape(8, 2) + 1
    layout = write_parts(tmp_path / "ranks", {"embed": np.split(padded, 2)}, 0)
    rule = {"from": "embed", "to": "tokens", "values": [{"unpad": {"dim": 0, "to": "vocab", "from": 8}}]}
    options = {"convert": own(tmp_path / "own.json", rule), "layout": layout}
    assert same(merged(tmp_path / "ranks", tmp_path / "a", **options), {"tokens": padded})  # the number is not known
    config = {"config.json": json.dumps({"vocab_size": 5})}
    found = merged(tmp_path / "ranks", tmp_path / "b", files_from=config, **options)
    assert same(found, {"tokens": padded[:5]})
    back = merged(tmp_path / "b", tmp_path / "c", convert=f"inverse:{options['convert']}")
    assert same(back, {"embed": np.concatenate([padded[:5], np.zeros((3, 2), "f4")])})


def test_names_before_are_selected_and_names_after_are_renamed_and_cast(tmp_path: Path) -> None:
    save_file(
        {"a.w": np.ones((2, 2), "f4"), "b.w": np.ones(2, "f4"), "x": np.ones(1, "f4")}, tmp_path / "s.safetensors"
    )
    rules = [{"from": "{part}.w", "to": "model.{part}.weight"}]
    options: dict[str, Any] = {"convert": {"rules": rules}, "exclude": "x", "rename": [("^model", "m")]}
    found = merged(tmp_path / "s.safetensors", tmp_path / "out", dtype={"model.a.*": "float16"}, **options)
    assert {name: str(array.dtype) for name, array in found.items()} == {
        "m.a.weight": "float16",
        "m.b.weight": "float32",
    }


def test_names_without_a_rule_are_an_error_unless_they_are_excluded(tmp_path: Path) -> None:
    save_file({"a": np.ones(2, "f4"), "b.x": np.ones(2, "f4")}, tmp_path / "s.safetensors")
    source, convert = tmp_path / "s.safetensors", own(tmp_path / "own.json", {"from": "a", "to": "c"})
    with pytest.raises(UnsafeError, match=r"rule.*: b\.x;.*--exclude"):
        merge_checkpoint(source, tmp_path / "out", convert=convert)
    assert set(merged(source, tmp_path / "out", convert=convert, exclude="b.*")) == {"c"}
    with pytest.raises(InvalidArgumentError, match=r"\ba, b\.x\b"):
        merge_checkpoint(source, tmp_path / "out2", convert=LLAMA3)
    with pytest.raises(InvalidArgumentError, match=r"'llama'.*torchtitan:llama3"):
        merge_checkpoint(source, tmp_path / "out2", convert="llama")
