"""Loading into live state from any source: names, dtypes, shapes and digests, bit by bit."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loaded_jobs import NAN, equal, model_of
from safetensors.torch import save_file
from stored import flip_bit, json_header
from torch import nn

import statexchange as sx
from statexchange.testing import run_ranks

# One process


def test_tensors_of_every_dtype_come_back_in_place(tmp_path: Path) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool, torch.complex64]
    saved = {f"t{i}": torch.arange(12).reshape(3, 4).to(d) for i, d in enumerate(dtypes)}
    saved |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3), "one": torch.ones(1, 1)}
    sx.export_checkpoint(saved, tmp_path / "out")
    live = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    before = {name: tensor.data_ptr() for name, tensor in live.items()}
    report = sx.load_checkpoint(live, tmp_path / "out")
    assert {name: tensor.data_ptr() for name, tensor in live.items()} == before
    assert all(
        torch.equal(live[name].view(torch.uint8), saved[name].view(torch.uint8)) for name in saved if name != "scalar"
    )
    assert live["scalar"] == 2.5
    assert (report.num_tensors, report.nbytes) == (10, sum(t.nbytes for t in saved.values()))
    assert (report.missing, report.unexpected) == ((), ())


def test_strided_live_tensors_and_arrays_are_filled(tmp_path: Path) -> None:
    save_file({"a": torch.arange(12.0).reshape(3, 4), "b": torch.arange(6.0)}, tmp_path / "model.safetensors")
    turned, spread = torch.zeros(4, 3).T, np.zeros(12, np.float32)[::2]
    sx.load_checkpoint({"a": turned, "b": spread}, tmp_path)
    assert torch.equal(turned, torch.arange(12.0).reshape(3, 4))
    assert spread.tolist() == list(range(6))


@pytest.mark.slow  # torch.compile imports its compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # a warning of torch.compile
def test_a_compiled_model_with_tied_weights_is_loaded_and_stays_tied(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(6, 3)
            self.head = nn.Linear(3, 6, bias=False)
            self.head.weight = self.embed.weight

    one, other = Tied(), Tied()
    sx.export_checkpoint(one, tmp_path / "out")
    sx.load_checkpoint(torch.compile(other), tmp_path / "out")
    assert torch.equal(other.embed.weight, one.embed.weight)
    assert other.head.weight is other.embed.weight


def test_all_names_that_differ_are_in_one_error_and_nothing_is_changed(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "model.safetensors")
    live = {"a": torch.zeros(2), "c": torch.zeros(2)}
    with pytest.raises(FileNotFoundError, match=r"missing.*: c;.*: b;.*strict=False"):
        sx.load_checkpoint(live, tmp_path)
    assert live["a"].tolist() == [0, 0]
    report = sx.load_checkpoint(live, tmp_path, strict=False)
    assert (report.missing, report.unexpected) == (("c",), ("b",))
    assert live["a"].tolist() == [1, 1]
    with pytest.raises(ValueError, match=r"not in.*\bb;"):
        sx.load_checkpoint({"a": torch.zeros(2)}, tmp_path)


@pytest.mark.parametrize(
    ("live", "differs", "sides"),
    [
        (torch.zeros(3), "shape differs", ((2,), (3,))),
        (torch.zeros(2, dtype=torch.float16), "dtype differs", ("F32", "F16")),
    ],
    ids=["shape", "dtype"],
)
def test_shapes_and_dtypes_must_be_equal(live: torch.Tensor, differs: str, sides: Any, tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=differs) as caught:
        sx.load_checkpoint({"a": live}, tmp_path)
    assert caught.value.name == "a"
    assert (caught.value.expected, caught.value.found) == sides


def test_changed_bytes_are_detected(tmp_path: Path) -> None:
    sx.export_checkpoint({"a": torch.ones(1000)}, tmp_path / "out")
    flip_bit(tmp_path / "out/model.safetensors", -9)
    with pytest.raises(sx.errors.CorruptError, match="digest") as caught:
        sx.load_checkpoint({"a": torch.zeros(1000)}, tmp_path / "out")
    assert caught.value.name == "a"


@settings(max_examples=25)
@given(
    st.lists(st.sampled_from([0, 1, 7, 500, 1030, 20_000]), min_size=1, max_size=40), st.randoms(use_true_random=False)
)
def test_any_choice_of_tensors_is_read_in_any_order(sizes: list[int], chance: random.Random) -> None:
    numbers = torch.arange(20_000)
    saved = {
        f"{i:02}": (numbers[:size] + i).to(chance.choice([torch.int32, torch.uint8])) for i, size in enumerate(sizes)
    }
    chosen = chance.sample(sorted(saved), chance.randint(1, len(saved)))
    with tempfile.TemporaryDirectory() as folder:
        if chance.random() < 0.5:
            save_file(saved, f"{folder}/model.safetensors")  # without digests
        else:
            sx.export_checkpoint(saved, folder, overwrite=True)
        for path in (folder, f"local://{folder}"):
            state = {name: torch.zeros_like(saved[name]) for name in chosen}
            if (rows := next((name for name in chosen if saved[name].numel() == 500), None)) is not None:
                state[rows] = torch.zeros(1000, dtype=saved[rows].dtype)[::2]  # not in C order
            report = sx.load_checkpoint(state, path, strict=False)
            assert equal(state, {name: saved[name] for name in chosen})
            assert report.nbytes == sum(saved[name].nbytes for name in chosen)


@pytest.mark.parametrize("size", [4, 4000, 40_000])
@pytest.mark.parametrize("scheme", ["", "local://"])
def test_values_that_differ_for_one_memory_are_not_called_corrupt(size: int, scheme: str, tmp_path: Path) -> None:
    saved = {"a": torch.ones(size), "b": torch.full((size,), 2.0), "c": torch.ones(size)}
    sx.export_checkpoint(saved, tmp_path / "out")
    memory = torch.zeros(2 * size - 1)
    for state in ({"a": memory[:size], "b": memory[:size]}, {"a": memory[:size], "b": memory[size - 1 :]}):
        with pytest.raises(sx.errors.ReplicaError, match="shares memory") as caught:
            sx.load_checkpoint(state, f"{scheme}{tmp_path}/out", strict=False)
        assert caught.value.name in ("a", "b")
    state = {"a": memory[:size], "c": memory[:size]}
    sx.load_checkpoint(state, f"{scheme}{tmp_path}/out", strict=False)
    assert equal(state, {"a": saved["a"], "c": saved["a"]})


def test_an_array_without_dims_is_filled_with_a_cast(tmp_path: Path) -> None:
    sx.export_checkpoint({"a": torch.tensor(3.0)}, tmp_path / "out")
    state = {"a": np.zeros((), np.float64)}
    sx.load_checkpoint(state, tmp_path / "out", dtype="state")
    assert state["a"] == 3.0


def test_thousands_of_tensors_are_read(tmp_path: Path) -> None:
    saved = {str(i): torch.tensor([i]) for i in range(2500)}
    sx.export_checkpoint(saved, tmp_path / "out")
    state = {name: torch.zeros(1, dtype=torch.int64) for name in reversed(saved)}
    sx.load_checkpoint(state, tmp_path / "out")
    assert equal(state, saved)


@pytest.mark.parametrize("damaged", [0, 20, 39])
def test_of_many_tensors_the_one_with_changed_bytes_is_named(damaged: int, tmp_path: Path) -> None:
    sx.export_checkpoint({f"{i:02}": torch.full((100,), i) for i in range(40)}, tmp_path / "out")
    flip_bit(tmp_path / "out/model.safetensors", -(39 - damaged) * 800 - 400)
    with pytest.raises(sx.errors.CorruptError, match="digest") as caught:
        sx.load_checkpoint({f"{i:02}": torch.zeros(100, dtype=torch.int64) for i in range(40)}, tmp_path / "out")
    assert caught.value.name == f"{damaged:02}"


def test_a_module_on_the_meta_device_needs_memory_first(tmp_path: Path) -> None:
    model = model_of(1)
    sx.export_checkpoint(model, tmp_path / "out")
    with torch.device("meta"):
        live = model_of(2)
    with pytest.raises(sx.errors.UnsupportedError, match="to_empty") as caught:
        sx.load_checkpoint(live, tmp_path / "out")
    assert caught.value.name in live.state_dict()
    live.to_empty(device="cpu")
    sx.load_checkpoint(live, tmp_path / "out")
    assert equal(live.state_dict(), model.state_dict())


LARGE = 1 << 17  # elements, too many to be read together with others


def damage(folder: Path, state: dict[str, torch.Tensor], name: str) -> None:
    """Export a state to `out` in the folder, and change a byte in the middle of one tensor."""
    sx.export_checkpoint(state, folder / "out")
    file = folder / "out/model.safetensors"
    begin, end = json_header(file)[name]["data_offsets"]
    data_bytes = sum(tensor.nbytes for tensor in state.values())
    flip_bit(file, (begin + end) // 2 - data_bytes)


def test_small_tensors_are_checked_before_any_changes(tmp_path: Path) -> None:
    damage(tmp_path, {f"{i:02}": torch.full((100,), i) for i in range(40)}, "39")
    live = {f"{i:02}": torch.full((100,), -7) for i in range(40)}
    with pytest.raises(sx.errors.CorruptError, match="unchanged") as caught:
        sx.load_checkpoint(live, tmp_path / "out")
    assert caught.value.name == "39"
    assert equal(live, {name: torch.full((100,), -7) for name in live})


@pytest.mark.parametrize(
    ("dtype", "invalid"),
    [(torch.float32, NAN), (torch.bfloat16, NAN), (torch.complex64, NAN), (torch.int64, -1), (torch.bool, True)],
    ids=str,
)
def test_a_large_tensor_with_changed_bytes_keeps_none_of_them(dtype: torch.dtype, invalid: Any, tmp_path: Path) -> None:
    saved = {name: torch.arange(LARGE).to(dtype) for name in "abc"}
    damage(tmp_path, saved, "b")
    live = {name: torch.zeros(LARGE, dtype=dtype) for name in "abc"}
    with pytest.raises(sx.errors.CorruptError, match="2 of 3") as caught:
        sx.load_checkpoint(live, tmp_path / "out")
    assert caught.value.name == "b"
    assert equal(live["a"], saved["a"])
    expected = torch.full((LARGE,), invalid, dtype=dtype)
    assert torch.equal(live["b"].isnan(), expected.isnan())
    assert invalid is NAN or equal(live["b"], expected)
    assert not live["c"].any()


@pytest.mark.parametrize(("elements", "left"), [(LARGE, 0.0), (3 << 20, NAN)], ids=["a window", "windows"])
def test_of_a_tensor_that_is_cast_no_rejected_byte_stays(elements: int, left: float, tmp_path: Path) -> None:
    """One that is read in one part is checked before it changes."""
    damage(tmp_path, {"a": torch.ones(elements)}, "a")
    live = {"a": torch.zeros(elements, dtype=torch.float64)}
    with pytest.raises(sx.errors.CorruptError, match="NaN" if left else "unchanged"):
        sx.load_checkpoint(live, tmp_path / "out", dtype="state")
    np.testing.assert_array_equal(live["a"].numpy(), left)


def test_a_tensor_that_was_read_in_part_is_invalid(tmp_path: Path) -> None:
    sx.export_checkpoint({"a": torch.ones(5 << 20)}, tmp_path / "out")
    live = {"a": torch.zeros(5 << 20)}

    def fails(done: int, total: int) -> None:
        raise RuntimeError(f"{done} of {total}")

    with pytest.raises(RuntimeError):
        sx.load_checkpoint(live, tmp_path / "out", on_progress=fails)
    assert live["a"].isnan().all()
    sx.load_checkpoint(live, tmp_path / "out")
    assert live["a"].eq(1).all()


def loads_damaged(out: str) -> tuple[str, int | None, list[float]]:
    live = {"a": torch.zeros(LARGE), "b": torch.zeros(LARGE)}
    with pytest.raises(sx.errors.CorruptError, match="of rank 1") as caught:
        sx.load_checkpoint(live if sx.get_rank() == 1 else {"a": live["a"]}, out, strict=False)
    return str(caught.value.name), caught.value.rank, [float(tensor[0]) for tensor in live.values()]


def test_the_error_says_on_all_ranks_what_has_changed_on_the_one_that_failed(tmp_path: Path) -> None:
    damage(tmp_path, {"a": torch.ones(LARGE), "b": torch.ones(LARGE)}, "b")
    intact, failed = run_ranks(loads_damaged, 2, args=(str(tmp_path / "out"),))
    assert intact[:2] == failed[:2] == ("b", 1)
    np.testing.assert_array_equal(failed[2], [1, NAN])
    # The other rank may have seen the failure before, during or after its own reading.
    assert intact[2][0] in (0, 1) or np.isnan(intact[2][0])


def exports_halves(out: str) -> None:
    rank = sx.get_rank()
    sx.export_checkpoint({"a": torch.full((40 + rank, 30), 1.0 + rank)}, out, layout={"a": {"dim": 0}})


@pytest.mark.parametrize("rank", [0, 1])
def test_the_digest_of_each_ranks_box_is_checked(rank: int, tmp_path: Path) -> None:
    run_ranks(exports_halves, 2, args=(str(tmp_path / "out"),))
    whole = {"a": torch.zeros(81, 30)}
    sx.load_checkpoint(whole, tmp_path / "out")
    assert whole["a"][:, 0].tolist() == [1.0] * 40 + [2.0] * 41
    flip_bit(tmp_path / "out/model.safetensors", -81 * 30 * 4 if rank == 0 else -1)
    with pytest.raises(sx.errors.CorruptError, match="digest") as caught:
        sx.load_checkpoint(whole, tmp_path / "out")
    assert caught.value.name == "a"


@pytest.mark.parametrize("name", ["nothing", "file.txt"])
def test_an_absent_source_is_not_found(name: str, tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("hello")
    with pytest.raises(FileNotFoundError):
        sx.load_checkpoint({"a": torch.zeros(1)}, tmp_path / name)
