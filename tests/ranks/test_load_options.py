"""The options of a load: dtype, include, rename, strict; progress; wrong ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loaded_jobs import NAN, equal, model_of, trained
from stateful import Holder
from torch import nn

import statexchange as sx
from statexchange.testing import run_ranks


def test_dtype_state_casts_values_to_the_dtype_of_the_state(tmp_path: Path) -> None:
    values = torch.tensor([1.0, 1 / 3, -1e30, NAN, 7.0, 0.1])
    sx.save_checkpoint({"a": values, "b": values.double(), "c": values, "n": torch.arange(6)}, tmp_path / "saved")
    live: dict[str, Any] = {
        "a": torch.zeros(6, dtype=torch.bfloat16),
        "b": torch.zeros(12)[::2],
        "c": np.zeros(6, np.float16),
        "n": torch.zeros(6, dtype=torch.int64),
    }
    with pytest.raises(sx.errors.InvalidArgumentError, match='dtype="state"') as caught:
        sx.load_checkpoint(live, tmp_path / "saved")
    assert (caught.value.expected, caught.value.found) == ("F32", "BF16")
    sx.load_checkpoint(live, tmp_path / "saved", dtype="state")
    assert torch.equal(live["a"].view(torch.int16), values.bfloat16().view(torch.int16))
    assert torch.equal(live["b"].view(torch.int32), values.double().float().view(torch.int32))
    assert np.array_equal(live["c"], values.half().numpy(), equal_nan=True)
    assert live["n"].tolist() == list(range(6))
    with pytest.raises(sx.errors.InvalidArgumentError, match="dtype differs") as caught:
        sx.load_checkpoint({**live, "n": torch.zeros(6)}, tmp_path / "saved", dtype="state")
    assert caught.value.name == "n"
    assert (caught.value.expected, caught.value.found) == ("I64", "F32")


def test_an_optimizer_of_another_dtype_continues(tmp_path: Path) -> None:
    model, fresh = nn.Linear(3, 2), nn.Linear(3, 2).bfloat16()
    optimizer, its = (torch.optim.Adam(one.parameters()) for one in (model, fresh))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    sx.save_checkpoint({"model": model, "optimizer": optimizer}, tmp_path / "saved")
    sx.load_checkpoint({"model": fresh, "optimizer": its}, tmp_path / "saved", dtype="state")
    state = its.state[fresh.weight]
    assert {key: value.dtype for key, value in state.items()} == {
        "step": torch.float32,
        "exp_avg": torch.bfloat16,
        "exp_avg_sq": torch.bfloat16,
    }
    assert torch.equal(state["exp_avg"], optimizer.state[model.weight]["exp_avg"].bfloat16())
    fresh(torch.ones(1, 3).bfloat16()).sum().backward()
    its.step()


def casts_from_a_store(url: str) -> None:
    """Load one tensor in two dtypes, on ranks of one host."""
    rank = sx.get_rank()
    live = {"w": torch.zeros(4, dtype=torch.float32 if rank == 2 else torch.bfloat16)}
    sx.load_checkpoint(live, url, dtype="state")
    assert live["w"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_ranks_may_load_a_tensor_in_different_dtypes(tmp_path: Path) -> None:
    sx.export_checkpoint({"w": torch.arange(4.0)}, tmp_path / "out")
    run_ranks(casts_from_a_store, 3, args=(f"local://{tmp_path}/out",))


@pytest.mark.parametrize("nested", [True, False])
def test_names_that_are_not_included_do_not_change(nested: bool, tmp_path: Path) -> None:
    saved = {"enc": model_of(1), "head": nn.Linear(2, 2)}
    live = {"enc": model_of(2), "head": nn.Linear(3, 3), "new": nn.Linear(1, 1), "step": 0}
    if nested:
        sx.save_checkpoint({**saved, "step": 7, "more": [1, 2]}, tmp_path / "out")
    else:
        flat = {f"{part}.{name}": tensor for part in saved for name, tensor in saved[part].state_dict().items()}
        sx.export_checkpoint(flat, tmp_path / "out")
    before = {name: tensor.clone() for name, tensor in live["head"].state_dict().items()}
    bias = live["enc"][0].bias.tolist()
    report = sx.load_checkpoint(live, tmp_path / "out", include="enc.*.weight")
    assert (report.num_tensors, report.missing, report.unexpected) == (3, (), ())
    assert report.nbytes == sum(saved["enc"][i].weight.nbytes for i in range(3))
    assert torch.equal(live["enc"][0].weight, saved["enc"][0].weight)
    assert (live["enc"][0].bias.tolist(), live["step"]) == (bias, 0)
    assert equal(live["head"].state_dict(), before)
    with pytest.raises(FileNotFoundError, match=r"missing.*\bnew\b"):
        sx.load_checkpoint(live, tmp_path / "out", include=["enc.*", "new.*"])
    if nested:
        assert sx.load_checkpoint(live, tmp_path / "out", include=["enc.*", "step"]).num_tensors == 9
        assert live["step"] == 7


def test_include_loads_an_optimizer_whole(tmp_path: Path) -> None:
    model, fresh = model_of(1), model_of(2)
    optimizer, its = (torch.optim.Adam(one.parameters(), lr=lr) for one, lr in ((model, 0.5), (fresh, 0.1)))
    trained(model, optimizer)
    sx.save_checkpoint({"model": model, "optimizer": optimizer}, tmp_path / "saved")
    weight = fresh[0].weight.tolist()
    sx.load_checkpoint({"model": fresh, "optimizer": its}, tmp_path / "saved", include="optimizer.*")
    assert (fresh[0].weight.tolist(), its.param_groups[0]["lr"]) == (weight, 0.5)
    sx.load_checkpoint({"model": fresh, "optimizer": its}, tmp_path / "saved", include="*.weight")
    assert fresh[0].weight.tolist() == model[0].weight.tolist()
    sx.load_checkpoint({"model": fresh, "optimizer": its}, tmp_path / "saved", include="model.*")
    assert equal(fresh.state_dict(), model.state_dict())


def test_rename_maps_names_of_the_source_to_the_state(tmp_path: Path) -> None:
    model, fresh = model_of(1), model_of(2)
    flat = {f"module.net.{name}": tensor for name, tensor in model.state_dict().items()}
    sx.export_checkpoint(flat, tmp_path / "flat")
    for rename in ([(r"^module\.", ""), ("^net", "model")], lambda name: name.replace("module.net", "model")):
        for tensor in fresh.state_dict().values():
            tensor.zero_()
        sx.load_checkpoint({"model": fresh}, tmp_path / "flat", rename=rename)
        assert equal(fresh.state_dict(), model.state_dict())
    with pytest.raises(sx.errors.UnsafeError, match="one name") as caught:
        sx.load_checkpoint({"model": fresh}, tmp_path / "flat", rename=lambda name: "w")
    assert caught.value.name == "w"
    for wrong in (5, ("^net", "model")):
        with pytest.raises(sx.errors.InvalidArgumentError, match="rename must be"):
            sx.load_checkpoint({"model": fresh}, tmp_path / "flat", rename=wrong)  # type: ignore[arg-type]
    for strict in (True, False):  # loading nothing is never intended
        with pytest.raises(FileNotFoundError, match=r"missing.*\bmodel;"):
            sx.load_checkpoint({"model": fresh}, tmp_path / "flat", strict=strict)


def test_a_saved_tree_is_loaded_under_other_names(tmp_path: Path) -> None:
    model = nn.ModuleDict({"old": model_of(1)})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    trained(model["old"], optimizer)
    sx.save_checkpoint({"net": model, "optimizer": optimizer, "at": {"step": 7}}, tmp_path / "saved")
    fresh = model_of(2)
    its = torch.optim.Adam(fresh.parameters())
    state = {"model": fresh, "optimizer": its, "step": 0}
    sx.load_checkpoint(state, tmp_path / "saved", rename=[(r"^net\.old", "model"), (r"^at\.", "")])
    assert equal(fresh.state_dict(), model["old"].state_dict())
    assert (state["step"], its.param_groups[0]["lr"]) == (7, 0.5)
    for one, other in zip(model.parameters(), fresh.parameters(), strict=True):
        assert equal(optimizer.state[one], its.state[other])
    with pytest.raises(sx.errors.UnsafeError, match="change rename") as caught:
        sx.load_checkpoint(state, tmp_path / "saved", rename=[("^at.step$", "optimizer")])
    assert caught.value.name == "optimizer"
    assert "'at.step'" in str(caught.value)
    alone = model_of(3)
    sx.load_checkpoint(alone, tmp_path / "saved", rename=[(r"^net\.old\.", "")], include=["[0-9]*"])
    assert equal(alone.state_dict(), fresh.state_dict())


def test_progress_is_reported_in_bytes(tmp_path: Path) -> None:
    state = {"a": torch.zeros(5 << 20), "b": torch.zeros(7, 3).T, "c": torch.zeros(2, dtype=torch.bfloat16)}
    saved = {"a": torch.ones(5 << 20), "b": torch.ones(3, 7), "c": torch.ones(2)}
    sx.export_checkpoint(saved, tmp_path / "out")
    progress: list[tuple[int, int]] = []
    report = sx.load_checkpoint(
        state, tmp_path / "out", dtype="state", on_progress=lambda done, total: progress.append((done, total))
    )
    assert progress[-1] == (report.nbytes, report.nbytes)
    assert report.nbytes == sum(tensor.nbytes for tensor in saved.values())
    assert {total for _, total in progress} == {report.nbytes}
    assert [done for done, _ in progress] == sorted({done for done, _ in progress})
    assert len(progress) > 4


def gives_wrong_or_different_options(folder: str) -> None:
    rank = sx.get_rank()
    options: list[tuple[dict[str, Any], str]] = [
        ({"dtype": "state"} if rank else {}, "dtype .* default .*'state'"),
        ({"strict": rank > 0}, "strict is False .* default"),
        ({"replicas": "root"} if rank else {}, "replicas .* default .*'root'"),
        ({"dtype": "float16"}, "dtype must be"),
        ({"replicas": "any"}, "replicas must be"),
        ({"include": 5}, "include must be"),
        ({"layout": 5} if rank else {}, "layout must map"),
    ]
    for given_options, message in options:
        with pytest.raises(sx.errors.InvalidArgumentError, match=message):
            sx.load_checkpoint({"w": torch.zeros(2)}, folder, **given_options)


def test_options_of_a_load_that_are_wrong_or_differ_are_named(tmp_path: Path) -> None:
    sx.save_checkpoint({"w": torch.ones(2)}, tmp_path / "saved")
    run_ranks(gives_wrong_or_different_options, 2, args=(str(tmp_path / "saved"),))


def test_a_load_without_any_matching_name_names_the_options(tmp_path: Path) -> None:
    model = model_of(1)
    sx.save_checkpoint({"model": model}, tmp_path / "nested")
    sx.export_checkpoint(model, tmp_path / "flat")
    for strict in (True, False):
        with pytest.raises(FileNotFoundError, match=r'\{"prefix": state\}'):
            sx.load_checkpoint(model_of(2), tmp_path / "nested", strict=strict)
        with pytest.raises(FileNotFoundError, match=r'rename=\[\("pattern", "replacement"\)\]'):
            sx.load_checkpoint({"model": model_of(2)}, tmp_path / "flat", strict=strict)


def test_a_load_without_strict_that_lacks_all_state_is_refused_though_a_plain_value_fits(tmp_path: Path) -> None:
    sx.save_checkpoint({"step": 3}, tmp_path / "saved")
    live: dict[str, Any] = {"step": 0, "more": {"epoch": 1, "sampler": Holder({"n": 1})}}
    with pytest.raises(FileNotFoundError, match="in the source: more"):
        sx.load_checkpoint(live, tmp_path / "saved", strict=False)
    assert live["step"] == 0
    del live["more"]["sampler"]
    report = sx.load_checkpoint(live, tmp_path / "saved", strict=False)
    assert (report.missing, live) == (("more",), {"step": 3, "more": {"epoch": 1}})
