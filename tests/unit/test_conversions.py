"""Conversions: names and values of another model family, from files of any sharding, and back."""

import importlib.util
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from archives import unpack
from commands import CommandLine
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from scripts import HOME, page_block, run_commands
from stored import DATA, flip_bit, write_raw

import statexchange as sx
from statexchange.checkpoint.merge import merge_checkpoint
from statexchange.errors import (
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    StateExchangeError,
    UnsafeError,
    UnsupportedError,
)

TORCHTITAN = DATA / "torchtitan"
LLAMA3 = "torchtitan:llama3"
Arrays = Mapping[str, np.ndarray]


def same(found: Arrays, expected: Arrays) -> bool:
    """Assert that the names are equal; return whether shapes and bytes are."""
    assert set(found) == set(expected)
    return all(
        found[name].shape == tensor.shape and found[name].tobytes() == tensor.tobytes()
        for name, tensor in expected.items()
    )


def merged(source: Path, out: Path, **options: Any) -> dict[str, np.ndarray]:
    merge_checkpoint(source, out, **options)
    with sx.open_checkpoint(out) as checkpoint:
        return {name: tensor.read() for name, tensor in checkpoint.items()}


def titan(kind: str) -> Path:
    return TORCHTITAN / kind / "checkpoint" / "step-3"


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


def fused(**changes: Any) -> dict[str, Any]:
    return {"from": ["{n}.a", "{n}.b"], "to": "{n}.ab", "values": [{"fuse": {"dim": 0, **changes}}]}


@pytest.mark.parametrize(
    ("tensors", "rule", "error", "message"),
    [
        ({"0.a": (2, 2)}, fused(), IncompleteError, "'{n}.b'"),
        ({"0.a": (2, 2), "0.b": (2, 3)}, fused(), InvalidArgumentError, "do not fuse"),
        ({"0.a": (2, 2), "0.b": (3, 2)}, fused(groups=2), InvalidArgumentError, "in 2 groups"),
        ({"0.a": (2, 2), "0.b": (4, 2)}, fused(sizes=[1, 1]), InvalidArgumentError, "ratios"),
        ({"0.a": (2,), "1.a": (2,)}, {"from": "{n}.a", "to": "c"}, UnsafeError, "to two tensors"),
        ({"0.a": (2,), "2.a": (2,)}, {"from": "{n}.a", "to": "c", "stack": ["n"]}, IncompleteError, "some are missing"),
        (
            {"0.a": (2,), "1.a": (3,)},
            {"from": "{n}.a", "to": "c", "stack": ["n"]},
            InvalidArgumentError,
            "shapes differ",
        ),
        ({"x.a": (2,)}, {"from": "{n}.a", "to": "c", "stack": ["n"]}, InvalidArgumentError, "is no number"),
        ({"a": ()}, {"from": "a", "to": "{n}", "unstack": ["n"]}, InvalidArgumentError, "leading dims"),
        (
            {"a": (2,)},
            {"from": "a", "to": "b", "values": [{"split": {"dim": 1, "sizes": [1]}}]},
            InvalidArgumentError,
            "no dim 1",
        ),
        (
            {"a": (3,)},
            {"from": "a", "to": ["b", "c"], "values": [{"split": {"sizes": [1, 1]}}]},
            InvalidArgumentError,
            "equal parts",
        ),
        (
            {"a": (3,)},
            {"from": "a", "to": "b", "values": [{"split": {"sizes": [1, 2]}}]},
            InvalidArgumentError,
            "make 2 tensors",
        ),
        ({"a": (3,)}, {"from": "a", "to": "b", "values": [{"unpad": {"to": 4}}]}, InvalidArgumentError, "unpad to 4"),
        (
            {"a": (3, 2)},
            {"from": "a", "to": "b", "values": [{"transpose": {"order": [0]}}]},
            InvalidArgumentError,
            "does not fit",
        ),
    ],
)
def test_tensors_that_do_not_fit_a_rule_are_named(
    tmp_path: Path,
    tensors: dict[str, tuple[int, ...]],
    rule: dict[str, Any],
    error: type[StateExchangeError],
    message: str,
) -> None:
    save_file({name: np.zeros(shape, "f4") for name, shape in tensors.items()}, tmp_path / "s.safetensors")
    with pytest.raises(error, match=message):
        merge_checkpoint(tmp_path / "s.safetensors", tmp_path / "out", convert={"rules": [rule]})
    assert not (tmp_path / "out").exists()


def test_tensors_of_different_dtypes_do_not_become_one(tmp_path: Path) -> None:
    save_file({"0.a": np.zeros(2, "f4"), "0.b": np.zeros(2, "f8")}, tmp_path / "s.safetensors")
    with pytest.raises(UnsupportedError, match="different dtypes"):
        merge_checkpoint(tmp_path / "s.safetensors", tmp_path / "out", convert={"rules": [fused()]})


def rule(*values: Any, **changes: Any) -> dict[str, Any]:
    return {"rules": [{"from": "a", "to": "b", "values": list(values), **changes}]}


@pytest.mark.parametrize(
    ("conversion", "message"),
    [
        ([], "is not a conversion"),
        ({"rules": {}}, "rules are a list"),
        ({"rule": []}, "is not a conversion"),
        ({"rules": [{"from": "a"}]}, "a rule has 'from' and 'to'"),
        ({"rules": [{"from": [], "to": "b"}]}, "empty 'from'"),
        ({"rules": [{"from": "a{", "to": "b"}]}, "not a name pattern"),
        ({"rules": [{"from": "{n}.{n}", "to": "b"}]}, "occurs twice"),
        ({"rules": [{"from": "a", "to": "{n}"}]}, "placeholders of 'to'"),
        ({"rules": [{"from": "a", "to": ["b", "c"]}]}, "needs values"),
        ({"rules": [], "numbers": {"n": {"key": "x"}}}, "a number is like"),
        ({"rules": [], "numbers": {"n": {"value": "import os"}}}, "neither a number nor an expression"),
        (rule({"rotate": {}}), "is no operation; there are permute"),
        (rule({"permute": {"shape": [2], "order": [1]}}), "not an order"),
        (rule({"permute": {"shape": [2], "order": [0, 1]}}), "1 sizes and an order of 2"),
        (rule({"permute": {"order": [0]}}), "needs 'shape'"),
        (rule({"transpose": {"order": [0], "dims": 2}}), "no option 'dims'"),
        (rule({"split": {"sizes": [0]}}), "neither a number"),
        (rule({"pad": {"to": 2.5}}), "neither a number"),
        (rule({"split": {"sizes": [1]}}, stack=["n"]), "stack or unstack"),
    ],
)
def test_a_file_that_is_no_conversion_is_refused_with_the_reason(
    tmp_path: Path, call: CommandLine, conversion: Any, message: str
) -> None:
    save_file({"a": np.zeros(2, "f4")}, tmp_path / "s.safetensors")
    (tmp_path / "own.json").write_text(json.dumps(conversion))
    code, _, err = call("merge", tmp_path / "s.safetensors", tmp_path / "out", "--convert", tmp_path / "own.json")
    assert code == 2
    assert message in err


def test_a_rule_without_an_inverse_is_refused_in_the_other_direction(tmp_path: Path) -> None:
    save_file({"0.ab": np.zeros(4, "f4")}, tmp_path / "s.safetensors")
    (tmp_path / "own.json").write_text(json.dumps({"rules": [fused()]}))
    with pytest.raises(InvalidArgumentError, match="without 'sizes'"):
        merge_checkpoint(tmp_path / "s.safetensors", tmp_path / "out", convert=f"inverse:{tmp_path / 'own.json'}")


@pytest.mark.parametrize("name", ["a.w", "b"])
def test_bytes_that_differ_from_their_digest_are_found_in_tensors_that_are_cut(tmp_path: Path, name: str) -> None:
    sx.export_checkpoint({"a.w": np.arange(8, dtype="f4"), "b": np.arange(8, dtype="f4")}, tmp_path / "s")
    rules = [
        {"from": "{n}.w", "to": ["{n}.x", "{n}.y"], "values": [{"split": {"sizes": [1, 1]}}]},
        {"from": "b", "to": "c"},
    ]
    found = merged(tmp_path / "s", tmp_path / "whole", convert={"rules": rules})
    assert same(
        found, {"a.x": np.arange(4, dtype="f4"), "a.y": np.arange(4, 8, dtype="f4"), "c": np.arange(8, dtype="f4")}
    )
    file = tmp_path / "s" / "model.safetensors"
    flip_bit(file, file.stat().st_size - (40 if name == "a.w" else 4))
    with pytest.raises(CorruptError, match="digest") as caught:
        merge_checkpoint(tmp_path / "s", tmp_path / "out", convert={"rules": rules})
    assert caught.value.name in (name, "c")
    assert not (tmp_path / "out").exists()


def test_wrappers_prefixes_are_removed_before_and_empty_tensors_stay(tmp_path: Path) -> None:
    arrays = {"module.a": np.zeros((0, 3), "f4"), "module.b": np.zeros((2, 3), "f4"), "module.s": np.ones((), "f4")}
    save_file(arrays, tmp_path / "s.safetensors")
    rules = [{"from": "a", "to": "A", "values": [{"transpose": {"order": [1, 0]}}]}, {"from": "{x}", "to": "{x}.w"}]
    report = merge_checkpoint(tmp_path / "s.safetensors", tmp_path / "out", convert={"rules": rules})
    expected = {"A": np.zeros((3, 0), "f4"), "b.w": arrays["module.b"], "s.w": arrays["module.s"]}
    assert same(load_file(tmp_path / "out" / "model.safetensors"), expected)
    assert any("module." in note for note in report.notes)


def test_a_tied_tensor_that_differs_is_refused(tmp_path: Path) -> None:
    rows = np.ones((2, 2), "f4")
    save_file({"tok_embeddings.weight": rows, "lm_head.weight": rows + 1}, tmp_path / "s.safetensors")
    config = {"config.json": json.dumps({"tie_word_embeddings": True})}
    with pytest.raises(StateExchangeError, match="listed as tied"):
        merge_checkpoint(tmp_path / "s.safetensors", tmp_path / "out", convert=LLAMA3, files_from=config)


def test_a_layouts_reductions_go_with_their_tensor(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    for rank in range(2):
        save_file({"w.scale": np.full(1, rank, "f4")}, tmp_path / "ranks" / f"rank-{rank}.safetensors")
    convert = {"rules": [{"from": "{n}.scale", "to": "{n}.weight_scale"}]}
    found = merged(tmp_path / "ranks", tmp_path / "out", layout={"*.scale": {"reduce": "max"}}, convert=convert)
    assert same(found, {"w.weight_scale": np.ones(1, "f4")})


def test_a_dry_run_shows_the_converted_tensors(tmp_path: Path, call: CommandLine) -> None:
    options = ["--convert", LLAMA3, "--convert-with", "n_heads=4", "--dry-run"]
    code, out, _ = call("merge", titan("fused"), tmp_path / "hf", *options)
    assert code == 0
    assert "model.layers.1.self_attn.q_proj.weight" in out
    assert call("merge", titan("fused"), tmp_path / "hf", "--convert-with", "heads")[0] == 2


# Megatron


MEGATRON = DATA / "megatron"
GPT = "megatron:gpt"


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the samples that Megatron-Core wrote, as torch_dist and as mp_rank directories."""
    folder = tmp_path_factory.mktemp("megatron")
    for archive in MEGATRON.glob("*.tar.xz"):
        unpack(archive, folder / archive.name.partition(".")[0])
    return folder


def llama_of(stacked: Arrays, groups: int) -> dict[str, np.ndarray]:
    """Return the tensors of torch_dist, divided with numpy by layer, into queries, keys and values, and gate and up."""
    found = {"model.embed_tokens.weight": stacked["embedding.word_embeddings.weight"]}
    found["model.norm.weight"] = stacked["decoder.final_layernorm.weight"]
    if "output_layer.weight" in stacked:
        found["lm_head.weight"] = stacked["output_layer.weight"]
    renamed = {
        "self_attention.linear_proj.": "self_attn.o_proj.",
        "mlp.linear_fc2.": "mlp.down_proj.",
        "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
        "mlp.linear_fc1.layer_norm_": "post_attention_layernorm.",
    }
    for name, tensor in stacked.items():
        if not name.startswith("decoder.layers."):
            continue
        rest, kind = name.removeprefix("decoder.layers."), name.rpartition(".")[2]
        for layer, rows in enumerate(tensor):
            prefix = f"model.layers.{layer}."
            if rest in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
                parts = rows.reshape(groups, 3, -1, *rows.shape[1:])  # the samples have one query for each key
                for part, letter in enumerate("qkv"):
                    found[f"{prefix}self_attn.{letter}_proj.{kind}"] = parts[:, part].reshape(-1, *rows.shape[1:])
            elif rest in ("mlp.linear_fc1.weight", "mlp.linear_fc1.bias"):
                found[f"{prefix}mlp.gate_proj.{kind}"], found[f"{prefix}mlp.up_proj.{kind}"] = np.split(rows, 2)
            else:
                old = next(old for old in renamed if rest.startswith(old))
                found[prefix + rest.replace(old, renamed[old])] = rows
    return found


@pytest.mark.parametrize("sample", ["tp2_pp2", "pp2_tied", "pp2_vpp2"])
def test_megatrons_gpt_becomes_llama_from_either_of_its_formats(tmp_path: Path, megatron: Path, sample: str) -> None:
    stacked = merged(megatron / sample / "torch_dist", tmp_path / "plain")
    expected = llama_of(stacked, groups=2)
    assert same(merged(megatron / sample / "torch_dist", tmp_path / "a", convert=GPT), expected)
    assert same(merged(megatron / sample / "legacy", tmp_path / "b", convert=GPT), expected)
    numbers = {"n_heads": 2, "n_kv_heads": 2}
    assert same(merged(tmp_path / "a", tmp_path / "c", convert=f"inverse:{GPT}", convert_with=numbers), stacked)


def test_a_padded_vocabulary_of_megatron_is_cut_to_that_of_the_config(tmp_path: Path, megatron: Path) -> None:
    config = {"config.json": json.dumps({"vocab_size": 13})}
    found = merged(megatron / "pp2_vpp2" / "torch_dist", tmp_path / "a", convert=GPT, files_from=config)
    assert found["model.embed_tokens.weight"].shape == found["lm_head.weight"].shape == (13, 8)
    numbers = {"n_heads": 2, "n_kv_heads": 2, "padded_vocab_size": 16}
    back = merged(tmp_path / "a", tmp_path / "b", convert=f"inverse:{GPT}", convert_with=numbers)
    rows = back["output_layer.weight"]
    assert (rows.shape, rows[13:].view("u2").any()) == ((16, 8), False)


def test_a_config_that_contradicts_the_arguments_of_the_run_is_refused(tmp_path: Path, megatron: Path) -> None:
    """It would reshape queries, keys and values to another model's heads."""
    source = megatron / "tp2_pp2" / "torch_dist"
    config = {"config.json": json.dumps({"num_attention_heads": 4, "num_key_value_heads": 4})}
    with pytest.raises(InvalidArgumentError, match=r"\b4 in .*\b2 in .*n_heads=N"):
        merge_checkpoint(source, tmp_path / "out", convert=GPT, files_from=config)
    right = merged(source, tmp_path / "right", convert=GPT)
    numbers = {"n_heads": 2, "n_kv_heads": 2}
    with pytest.raises(InvalidArgumentError, match=r"n_heads is 4.*and 2"):
        merge_checkpoint(source, tmp_path / "out", convert=GPT, files_from=config, convert_with=numbers)
    shutil.copytree(source, tmp_path / "beside")
    (tmp_path / "beside" / "config.json").write_text(config["config.json"])  # it is not written
    assert same(merged(tmp_path / "beside", tmp_path / "given", convert=GPT, convert_with=numbers), right)


@pytest.mark.parametrize("files", [None, {"config.json": "{}"}])
def test_a_number_of_the_caller_replaces_that_of_the_conversion(tmp_path: Path, files: dict[str, str] | None) -> None:
    save_file({"a": np.arange(6)}, tmp_path / "model.safetensors")
    values = [{"permute": {"dim": 0, "shape": ["n", "rest"], "order": [1, 0]}}]
    conversion = {"numbers": {"n": {"value": "2"}, "rest": {}}, "rules": [{"from": "a", "to": "b", "values": values}]}
    (tmp_path / "conversion.json").write_text(json.dumps(conversion))
    options = {"convert": str(tmp_path / "conversion.json"), "convert_with": {"n": 3}, "files_from": files}
    written = merged(tmp_path / "model.safetensors", tmp_path / "out", **options)
    assert written["b"].tolist() == [0, 2, 4, 1, 3, 5]


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "vocab_size": 14,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("form", ["torch_dist", "legacy"])
@pytest.mark.parametrize("is_beside", [False, True])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"intermediate_size": 16}, r"^convert: ffn .*\b16 .*\b12 in"),
        ({"vocab_size": 17}, "vocab_size = 17 .* 16"),
        ({"num_key_value_heads": 1}, r"n_kv_heads .*\b1 .*\b2 in"),
    ],
)
def test_a_config_that_contradicts_megatrons_numbers_is_refused(
    tmp_path: Path, megatron: Path, form: str, is_beside: bool, change: dict[str, Any], text: str
) -> None:
    config = {**LLAMA, **change}
    source, options = tmp_path / "source", {}
    shutil.copytree(megatron / "tp2_pp2" / form, source)
    where = "config.json of files_from"
    if is_beside:
        where = str(source / "config.json")
        (source / "config.json").write_text(json.dumps(config))
    else:
        options["files_from"] = {"config.json": json.dumps(config)}
    with pytest.raises(InvalidArgumentError, match=text) as caught:
        merge_checkpoint(source, tmp_path / "out", convert=GPT, **options)
    assert where in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_hidden_layers": 1}, "num_hidden_layers is 1, and there are 2 layers"),
        ({"num_hidden_layers": 6}, "num_hidden_layers is 6, and there are 2 layers"),
    ],
)
def test_a_config_that_contradicts_converted_tensors_is_named_as_in_any_merge(
    tmp_path: Path, megatron: Path, change: dict[str, Any], text: str
) -> None:
    for number, form in enumerate(("torch_dist", "legacy")):
        files = {"config.json": json.dumps({**LLAMA, **change})}
        source = megatron / "tp2_pp2" / form
        notes = merge_checkpoint(source, tmp_path / f"{number}", convert=GPT, files_from=files).notes
        assert [note for note in notes if text in note], notes


def test_a_config_that_fits_is_taken_and_a_selection_may_have_less(tmp_path: Path, megatron: Path) -> None:
    source = megatron / "tp2_pp2" / "torch_dist"
    config = {"config.json": json.dumps(LLAMA)}
    report = merge_checkpoint(source, tmp_path / "all", convert=GPT, files_from=config)
    assert not [note for note in report.notes if "differ" in note]
    merge_checkpoint(source, tmp_path / "some", convert=GPT, files_from=config, exclude="output_layer.weight")


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4},
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    ],
)
def test_a_config_whose_heads_do_not_fit_torchtitans_tensors_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    config = json.loads((TORCHTITAN / "fused" / "config.json").read_text())
    files = {"config.json": json.dumps({**config, **change})}
    with pytest.raises(InvalidArgumentError, match="dim of size"):
        merge_checkpoint(titan("fused"), tmp_path / "out", convert=LLAMA3, files_from=files)


def megatron_names(ffn: int, **more: np.ndarray) -> dict[str, np.ndarray]:
    prefix = "decoder.layers.0.mlp."
    return {
        f"{prefix}linear_fc1.weight": np.zeros((ffn, 4), "f4"),
        f"{prefix}linear_fc2.weight": np.zeros((4, 6), "f4"),
        **more,
    }


def test_a_model_that_is_no_llama_is_refused(tmp_path: Path, megatron: Path) -> None:
    source = tmp_path / "s.safetensors"
    save_file(megatron_names(12), source)
    assert len(merged(source, tmp_path / "gated", convert=GPT)) == 3
    save_file(megatron_names(6), source)
    with pytest.raises(InvalidArgumentError, match="dim of size 6"):
        merge_checkpoint(source, tmp_path / "out", convert=GPT)
    save_file(megatron_names(12, **{"decoder.layers.0.input_layernorm.bias": np.zeros(4, "f4")}), source)
    with pytest.raises(UnsafeError, match=r"no rule.*\bdecoder\.layers\.0\.input_layernorm\.bias"):
        merge_checkpoint(source, tmp_path / "out", convert=GPT)
    save_file(megatron_names(12), source)
    for numbers in ({"gated": 0}, {"norms_1p": 1}, {"interleaved": 1}):
        with pytest.raises(UnsupportedError, match="models in which") as caught:
            merge_checkpoint(source, tmp_path / "out", convert=GPT, convert_with=numbers)
        assert f"{next(iter(numbers))} is" in str(caught.value)
    with pytest.raises(UnsafeError, match=r"no rule.*router"):
        merge_checkpoint(megatron / "ep2_moe" / "torch_dist", tmp_path / "out", convert=GPT)


def test_halves_of_the_gate_may_have_names_of_their_own(tmp_path: Path) -> None:
    """As with singleton_local_shards."""
    halves = {half: np.full((3, 2), number, "f4") for number, half in enumerate("wv")}
    arrays = {f"decoder.layers.1.mlp.linear_fc1.weight_{half}": rows for half, rows in halves.items()}
    save_file(arrays, tmp_path / "s.safetensors")
    found = merged(tmp_path / "s.safetensors", tmp_path / "out", convert=GPT)
    names = {"gate": halves["w"], "up": halves["v"]}
    assert same(found, {f"model.layers.1.mlp.{name}_proj.weight": rows for name, rows in names.items()})


# Pages


def test_the_commands_of_the_pages_print_what_they_show(tmp_path: Path, megatron: Path) -> None:
    shutil.copytree(TORCHTITAN / "fused", tmp_path / "titan")
    run_commands(page_block("commands: torchtitan"), tmp_path / "titan")
    shutil.copytree(megatron / "tp2_pp2" / "torch_dist", tmp_path / "gpt" / "checkpoints")
    (tmp_path / "gpt" / "config.json").write_text(json.dumps({"vocab_size": 14}))
    run_commands(page_block("commands: megatron to llama"), tmp_path / "gpt")


def test_the_conversion_of_the_page_and_its_inverse_give_the_first_tensors_back(tmp_path: Path) -> None:
    (tmp_path / "own.json").write_text(page_block("block: own.json"))
    arrays = {
        "embed.weight": np.ones((3, 4), "f4"),
        "blocks.0.qkv.weight": np.random.default_rng(0).random((24, 4), "f4"),
    }
    save_file({**arrays, "blocks.0.rope.freqs": np.ones(2, "f4")}, tmp_path / "s.safetensors")
    options = {"convert": str(tmp_path / "own.json"), "convert_with": {"n_heads": 2}}
    found = merged(tmp_path / "s.safetensors", tmp_path / "out", **options)
    value = arrays["blocks.0.qkv.weight"].reshape(2, 3, 4, 4)[:, 2].reshape(8, 4)
    assert found["model.layers.0.self_attn.v_proj.weight"].tolist() == value.tolist()
    options["convert"] = f"inverse:{options['convert']}"
    assert same(merged(tmp_path / "out", tmp_path / "back", **options), arrays)


def test_the_reference_lists_the_built_in_conversions() -> None:
    spec = importlib.util.spec_from_file_location("conversions_reference", HOME / "tools" / "conversions_reference.py")
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    page = (HOME / "docs" / "reference" / "conversions.md").read_text(encoding="utf-8")
    assert page == program.page(), "run tools/conversions_reference.py"


# Packed dtypes and numbers that cannot be


def float4(path: Path) -> Path:
    write_raw(path, {"w": ("F4", [2, 4], bytes([1, 2, 3, 4]))})
    return path


@pytest.mark.parametrize(
    "operation",
    [
        {"transpose": {"order": [1, 0]}},
        {"permute": {"dim": 1, "shape": [2, 1], "order": [1, 0]}},
        {"permute": {"dim": -1, "shape": [2, 1], "order": [1, 0]}},
    ],
)
def test_elements_that_share_a_byte_are_not_moved_apart(tmp_path: Path, operation: dict[str, Any]) -> None:
    rules = {"rules": [{"from": "w", "to": "v", "values": [operation]}]}
    with pytest.raises(UnsupportedError, match="only whole rows") as caught:
        merge_checkpoint(float4(tmp_path / "w.safetensors"), tmp_path / "out", convert=rules)
    assert caught.value.name == "w"


def test_whole_rows_of_a_packed_dtype_are_moved(tmp_path: Path) -> None:
    rules = {"rules": [{"from": "w", "to": ["a", "b"], "values": [{"split": {"dim": 0, "sizes": [1, 1]}}]}]}
    merge_checkpoint(float4(tmp_path / "w.safetensors"), tmp_path / "out", convert=rules)
    with sx.open_checkpoint(tmp_path / "out") as found:
        assert {name: tensor.read().tobytes() for name, tensor in found.items()} == {"a": b"\1\2", "b": b"\3\4"}


@pytest.mark.parametrize(
    "values",
    [{"split": {"sizes": ["n", "n"]}}, {"split": {"sizes": [1, 1], "groups": "n"}}, {"split": {"sizes": ["loop", 1]}}],
)
def test_a_number_that_is_0_or_refers_to_itself_is_an_error(tmp_path: Path, values: dict[str, Any]) -> None:
    save_file({"w": np.arange(4.0)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"n": 0}')
    rules = {
        "numbers": {"n": {"config": "n"}, "loop": {"value": "again"}, "again": {"value": "loop"}},
        "rules": [{"from": "w", "to": ["a", "b"], "values": [values]}],
    }
    with pytest.raises(InvalidArgumentError, match=r"n is|known"):
        merge_checkpoint(tmp_path, tmp_path / "out", convert=rules)


@pytest.mark.parametrize("convert_with", [None, {"vocab_size": 0}])
def test_a_dim_is_not_cut_off_at_0(tmp_path: Path, convert_with: dict[str, int] | None) -> None:
    save_file({"w": np.arange(4.0)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"vocab_size": 0}')
    rules = {
        "numbers": {"vocab_size": {"config": "vocab_size"}},
        "rules": [{"from": "w", "to": "a", "values": [{"unpad": {"to": "vocab_size"}}]}],
    }
    with pytest.raises(InvalidArgumentError, match="vocab_size is 0"):
        merge_checkpoint(tmp_path, tmp_path / "out", convert=rules, convert_with=convert_with)
