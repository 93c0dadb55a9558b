"""Renames and patterns in a load: what is asked for, or a refusal by name. A refused load changes nothing."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from load_choices import WRITERS, Counted, Write, trained, write_save, write_torch
from torch import nn

import statexchange as sx
from statexchange.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


# rename


RENAMED: list[tuple[Any, Any, Any, Any]] = [
    (
        {"hist": {0: 0.5, None: 1, (1, 2): 4, "k": 5}},
        {"s": {"hist": {}}},
        lambda name: f"s.{name}",
        {"s": {"hist": {0: 0.5, None: 1, (1, 2): 4, "k": 5}}},
    ),
    (
        {"m": {0: 1, 1: 2}},
        {"m": {0: 0, 1: 0}},
        lambda name: {"m.0": "m.1", "m.1": "m.0"}.get(name, name),
        {"m": {1: 1, 0: 2}},
    ),
    ({"m": {"a": {"b": 1}, "c": 2}}, {"n": {}}, [(r"^m\b", "n")], {"n": {"a": {"b": 1}, "c": 2}}),
    ({"m": {"a": {"b": 1}, "c": 2}}, {"n": {"a": {}}}, [(r"^m\b", "n")], {"n": {"a": {"b": 1}, "c": 2}}),
    ({"m": {"a": {"b": 1}}}, {"m": {"z": {"b": 0}}}, [(r"\.a\.", ".z.")], {"m": {"z": {"b": 1}}}),
    ({"a": 1}, {"x.y": 0}, [("^a$", "x.y")], {"x.y": 1}),
    ({"m": {"l.w": torch.ones(1)}}, {"l": {"w": torch.zeros(1)}}, [("^m.", "")], {"l": {"w": torch.ones(1)}}),
    ({"x": {"sched": Counted(n=4)}}, {"sched": Counted(n=0)}, [(r"^x\.", "")], {"sched": Counted(n=4)}),
    ({"sched": Counted(n=4)}, {"scheduler": Counted(n=0)}, [("^sched$", "scheduler")], {"scheduler": Counted(n=4)}),
    ({"sched": Counted(n=4)}, {"scheduler": Counted(n=0)}, [(r"^sched\b", "scheduler")], {"scheduler": Counted(n=4)}),
]


@pytest.mark.parametrize(("saved", "live", "rename", "expected"), RENAMED)
def test_what_moves_keeps_its_keys(saved: Any, live: Any, rename: Any, expected: Any, tmp_path: Path) -> None:
    live = copy.deepcopy(live)
    sx.load_checkpoint(live, write_save(saved, tmp_path), rename=rename)
    assert repr(live) == repr(expected)


def test_a_path_whose_keys_are_not_known_is_refused(tmp_path: Path) -> None:
    live: dict[str, Any] = {"n": {}, "w": torch.zeros(1)}
    path = write_save({"m": {"a": 1}, "w": torch.ones(1)}, tmp_path)
    with pytest.raises(sx.errors.InvalidArgumentError, match="not known") as caught:
        sx.load_checkpoint(live, path, rename=[(r"^m\b", "n.x.y")])
    assert caught.value.name == "n"
    assert "'x.y.a'" in str(caught.value)
    assert repr(live) == "{'n': {}, 'w': tensor([0.])}"


def test_other_names_of_two_tensors_do_not_become_one(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(1, 1, bias=False), "b": nn.Linear(1, 1, bias=False)})
    model["x"], model["y"] = model["a"], model["b"]
    sx.export_checkpoint(model, tmp_path / "out")
    for rename, first in (("^[xy]", "x"), ("^[xy].*", "x")):
        state = {"z.weight" if rename == "^[xy]" else "z": torch.zeros(1, 1)}
        with pytest.raises(sx.errors.UnsafeError, match="one name") as caught:
            sx.load_checkpoint(state, tmp_path / "out", rename=[(rename, "z")], strict=False)
        assert all(repr(name) in str(caught.value) for name in (f"{first}.weight", "y.weight"))
    with pytest.raises(sx.errors.UnsafeError, match="one name") as caught:
        sx.load_checkpoint({"b.weight": torch.zeros(1, 1)}, tmp_path / "out", rename=[("^x", "b")], strict=False)
    assert all(repr(name) in str(caught.value) for name in ("b.weight", "x.weight"))
    state = {"x.weight": torch.zeros(1, 1)}
    sx.load_checkpoint(state, tmp_path / "out", rename=[("^a", "x")], strict=False)
    assert torch.equal(state["x.weight"], model["a"].weight)


def test_values_that_ranks_saved_differently_are_found_under_their_new_name(tmp_path: Path) -> None:
    def saves() -> None:
        sx.save_checkpoint({"sched": Counted(n=sx.get_rank()), "w": torch.ones(1)}, tmp_path / "two")

    run_ranks(saves, 2)
    state = {"scheduler": Counted(n=9), "w": torch.zeros(1)}
    with pytest.raises(sx.errors.ReplicaError, match=r"values of 'scheduler\.n'"):
        sx.load_checkpoint(state, tmp_path / "two", rename=[("^sched$", "scheduler")])
    assert repr(state) == "{'scheduler': Counted({'n': 9}), 'w': tensor([0.])}"


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_rename_that_raises_names_the_tensor(world_size: int, tmp_path: Path) -> None:
    path = write_torch({"w": torch.ones(2)}, tmp_path)

    def loads() -> str:
        with pytest.raises(sx.errors.InvalidArgumentError, match="KeyError") as caught:
            sx.load_checkpoint({"w": torch.zeros(2)}, path, rename={"a": "b"}.__getitem__)
        assert caught.value.name == "w"
        return "refused"

    assert run_ranks(loads, world_size) == ["refused"] * world_size


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"rename": [("a{99999999999999}", "b")]}, r"rename pattern 'a\{99999999999999\}'"),
        ({"rename": [("(" * 5000 + ")" * 5000, "b")]}, "rename pattern"),
        ({"strict": "no"}, "strict must be.*'no'"),
        ({"strict": None}, "strict must be"),
    ],
)
def test_options_of_no_sense_are_refused(options: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(sx.errors.InvalidArgumentError, match=match):
        sx.load_checkpoint({"w": torch.zeros(2)}, write_torch({"w": torch.ones(2)}, tmp_path), **options)
    with pytest.raises(sx.errors.InvalidArgumentError, match="not a size"):
        sx.export_checkpoint({"w": torch.ones(2)}, tmp_path / "out", max_shard_size="9" * 5000)


@pytest.mark.parametrize("more", [{}, {"step": 0}])
@pytest.mark.parametrize("strict", [True, False])
def test_a_state_with_a_key_too_many_is_refused_with_the_names_of_both(more: Any, strict: bool, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    sx.save_checkpoint(model, tmp_path / "save")
    sx.save_checkpoint(model.state_dict(), tmp_path / "states")
    sx.export_checkpoint(model, tmp_path / "exported")
    torch.save(model.state_dict(), tmp_path / "torch.pt")  # the format under test
    for name in ("save", "states", "exported", "torch.pt"):
        for state in ({"model": model, **more}, {"model": model.state_dict(), **more}):
            with pytest.raises(sx.errors.NotFoundError, match=r'state\["prefix"\]'):
                sx.load_checkpoint(state, tmp_path / name, strict=strict)
            sx.load_checkpoint(state["model"], tmp_path / name, strict=strict)


def test_names_that_differ_are_listed_with_the_options_that_map_them(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    encoder, state = nn.Linear(3, 3), Net()
    for source in (write_save(encoder, tmp_path), write_torch(encoder, tmp_path)):
        with pytest.raises(sx.errors.NotFoundError, match=r"weight.*bias.*rename="):
            sx.load_checkpoint(state, source)
        sx.load_checkpoint(state, source, rename=[("^", "encoder.")], strict=False)
        assert torch.equal(state.encoder.weight, encoder.weight)
    (tmp_path / "job").mkdir()
    net, other = nn.Sequential(encoder), nn.Sequential(nn.Linear(3, 3))
    path = write_save({"net": net, "optimizer": trained(net)}, tmp_path / "job")
    live = {"model": other, "optimizer": torch.optim.Adam(other.parameters())}
    for one in (live, {"model": other}):
        with pytest.raises(sx.errors.NotFoundError, match=r"source: model\b.*\bnet\b.*rename="):
            sx.load_checkpoint(one, path)
    sx.load_checkpoint(live, path, rename=[(r"^net\.", "model.")])
    assert torch.equal(other[0].weight, encoder.weight)


@pytest.mark.parametrize("write", WRITERS)
def test_a_part_of_a_model_is_loaded_alone(write: Write, tmp_path: Path) -> None:
    model = nn.ModuleDict({"encoder": nn.Linear(3, 3), "head": nn.Linear(3, 2)})
    path = write({"model": model, "optimizer": trained(model), "step": 7}, tmp_path)
    parts = nn.ModuleDict({key: nn.Linear(*size) for key, size in {"encoder": (3, 3), "head": (3, 2)}.items()})
    state: dict[str, Any] = {"model": {"encoder": parts["encoder"]}}
    report = sx.load_checkpoint(state, path, strict=False)
    assert report.missing == ()
    assert torch.equal(parts["encoder"].weight, model["encoder"].weight)
    sx.load_checkpoint({"model": {"head": parts["head"]}}, path, include="model.head")
    assert torch.equal(parts["head"].weight, model["head"].weight)
    states = {key: {name: torch.zeros_like(one) for name, one in part.items()} for key, part in named_parts(model)}
    optimizer = torch.optim.Adam(parts.parameters())
    both = {"model": {"encoder": parts["encoder"], "head": parts["head"]}, "optimizer": optimizer, "step": 0}
    if write is write_save:
        sx.load_checkpoint(both, path)
        assert both["step"] == 7
        assert len(optimizer.state) == 4
        sx.load_checkpoint({"model": states}, path, strict=False)
        assert torch.equal(states["head"]["bias"], model["head"].bias)


def test_a_key_with_a_dot_is_no_part_of_another_entry(tmp_path: Path) -> None:
    sx.save_checkpoint({"a.b": torch.ones(2), "c": torch.ones(1)}, tmp_path / "save")
    state = {"a": {"x": torch.zeros(2)}, "a.b": torch.zeros(2), "c": torch.zeros(1)}
    report = sx.load_checkpoint(state, tmp_path / "save", strict=False)
    assert report.missing == ("a.x",)  # the source has an entry of the name "a.b"
    assert torch.equal(state["a.b"], torch.ones(2))  # type: ignore[arg-type]


def test_a_rename_of_all_names_is_not_advised_if_some_fit(tmp_path: Path) -> None:
    saved = nn.ModuleDict({"w": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    sx.save_checkpoint(saved, tmp_path / "save")
    live = nn.ModuleDict({"a": nn.ModuleDict({"w": nn.Linear(2, 2)}), "b": nn.Linear(2, 2)})
    with pytest.raises(sx.errors.NotFoundError) as caught:
        sx.load_checkpoint(live, tmp_path / "save")
    assert '("^"' not in str(caught.value)


def named_parts(model: nn.ModuleDict) -> list[tuple[str, dict[str, torch.Tensor]]]:
    return [(key, part.state_dict()) for key, part in model.items()]


@pytest.mark.parametrize("write", WRITERS)
def test_an_entry_is_renamed_by_a_pattern_for_what_is_inside(write: Write, tmp_path: Path) -> None:
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    optimizer = trained(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    path = write({"net": model, "opt": optimizer, "sch": scheduler}, tmp_path)
    new = torch.optim.Adam(other.parameters())
    live = {"model": other, "optimizer": new, "scheduler": torch.optim.lr_scheduler.StepLR(new, 1)}
    rename = [(r"^net\.", "model."), (r"^opt\.", "optimizer."), (r"^sch\.", "scheduler.")]
    report = sx.load_checkpoint(live, path, rename=rename)
    assert not report.missing + report.unexpected
    assert torch.equal(new.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


def test_a_dtype_that_differs_is_told_how_to_cast(tmp_path: Path) -> None:
    sx.save_checkpoint({"w": torch.ones(2)}, tmp_path / "save")
    with pytest.raises(sx.errors.InvalidArgumentError, match='dtype="state"'):
        sx.load_checkpoint({"w": torch.ones(2, dtype=torch.float16)}, tmp_path / "save")


# include and exclude


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"exclude": "t.0"}, [[0, 2, 3], 1]),
        ({"exclude": "t[0]"}, [[0, 2, 3], 1]),
        ({"include": "t.1"}, [[0, 2, 0], 0]),
        ({"include": ["t[2]", "w"]}, [[0, 0, 3], 1]),
        ({"include": "*.n"}, [[0, 0, 3], 0]),
        ({"exclude": ["t.2.n", "w"]}, [[1, 2, 0], 0]),
    ],
)
def test_items_of_a_list_that_holds_state_are_selected(
    write: Write, options: dict[str, Any], expected: Any, tmp_path: Path
) -> None:
    def state(one: int, two: int, three: int, four: int) -> dict[str, Any]:
        return {"t": [torch.tensor(one), two, Counted(n=three)], "w": torch.tensor(four)}

    live = state(0, 0, 0, 0)
    report = sx.load_checkpoint(live, write(state(1, 2, 3, 1), tmp_path), **options)
    one, two, three = live["t"]
    assert [[int(one), two, three.values["n"]], int(live["w"])] == expected
    assert (report.missing, report.unexpected) == ((), ())


@pytest.mark.parametrize("write", WRITERS)
def test_an_object_stays_whole_if_its_present_state_has_what_is_excluded(write: Write, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    path = write({"o": torch.optim.Adam(model.parameters()), "x": Counted(a=1), "w": torch.ones(1)}, tmp_path)
    for pattern, kept in (("*exp_avg", 2), ("o.state.*", 2), ("o.state.0.step", 1)):  # of one parameter the state
        state = {"o": trained(model), "x": Counted(a=0), "w": torch.zeros(1)}
        sx.load_checkpoint(state, path, exclude=pattern)
        assert [parameter in state["o"].state for parameter in model.parameters()] == [True, kept == 2]
    state = {"o": trained(model), "x": Counted(a=0, b=7), "w": torch.zeros(1)}
    sx.load_checkpoint(state, path, exclude="x.b")
    assert state["x"].values == {"a": 0, "b": 7}


class Raising(Counted):
    def state_dict(self) -> dict[str, Any]:
        raise KeyError("x")


@pytest.mark.parametrize("write", WRITERS)
def test_an_object_that_is_left_out_is_not_asked(write: Write, tmp_path: Path) -> None:
    path = write({"o": Counted(n=1), "w": {"0": torch.ones(2)}}, tmp_path)
    state = {"o": Raising(n=0), "w": {"0": torch.zeros(2)}}
    sx.load_checkpoint(state, path, exclude="o")
    assert state["w"]["0"].tolist() == [1, 1]
    if write is write_torch:
        sx.load_checkpoint(state, path, exclude="o", layout={r"w.(\d+)": {"renumber": True}})
    with pytest.raises(sx.errors.InvalidArgumentError, match="KeyError") as caught:
        sx.save_checkpoint(state, tmp_path / "other")
    assert caught.value.name == "o"


@pytest.mark.parametrize("write", WRITERS)
def test_a_whole_state_that_is_one_object_is_loaded_whole(write: Write, tmp_path: Path) -> None:
    path = write(Counted(a=4, b=5), tmp_path)
    one = Counted(a=0, b=0)
    for pattern in ("b", "*"):
        with pytest.raises(sx.errors.InvalidArgumentError, match="selects no"):
            sx.load_checkpoint(one, path, exclude=pattern)
    assert one.values == {"a": 0, "b": 0}
    sx.load_checkpoint(one, path, include="b")
    assert one.values == {"a": 4, "b": 5}


def test_the_state_of_one_parameter_is_loaded_whole(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    path = write_save(trained(model, lr=0.5), tmp_path)
    fresh = torch.optim.Adam(model.parameters(), lr=0.25)
    sx.load_checkpoint(fresh, path, include="state.0.exp_avg")
    assert [{*state} for state in fresh.state.values()] == [{"step", "exp_avg", "exp_avg_sq"}]
    assert (*fresh.state, fresh.param_groups[0]["lr"]) == (model.weight, 0.25)
    fresh = torch.optim.Adam(model.parameters(), lr=0.25)
    sx.load_checkpoint(fresh, path, exclude="state.*.exp_avg")
    assert (len(fresh.state), fresh.param_groups[0]["lr"]) == (0, 0.5)


def test_parameters_that_the_source_lacks_are_missing_from_an_included_optimizer(tmp_path: Path) -> None:
    small = nn.Sequential(nn.Linear(2, 2))
    path = write_save({"model": small, "optimizer": trained(small)}, tmp_path)
    large = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    state = {"model": large, "optimizer": torch.optim.Adam(large.parameters())}
    for include in ("optimizer", "optimizer.state.*", "optimizer.param_groups"):
        with pytest.raises(sx.errors.NotFoundError, match=r"missing.*\boptimizer\.state\.model\.1\.weight\b"):
            sx.load_checkpoint(state, path, include=include)


@pytest.mark.parametrize("write", WRITERS)
def test_an_included_value_that_was_not_saved_is_missing(write: Write, tmp_path: Path) -> None:
    path = write({"b": {"y": 1}, "w": torch.ones(1)}, tmp_path)
    state = {"b": {"x": 5, "y": 0}, "w": torch.zeros(1)}
    with pytest.raises(sx.errors.NotFoundError, match=r"missing.*\bb\.x;"):
        sx.load_checkpoint(state, path, include=["b.x", "w"])
    assert sx.load_checkpoint(state, path, include=["b.x", "w"], strict=False).missing == ("b.x",)
    assert repr(state) == "{'b': {'x': 5, 'y': 0}, 'w': tensor([1.])}"


def test_the_order_of_a_mapping_stays(tmp_path: Path) -> None:
    path = write_save({"b": {"x": 1, "y": 2, "z": 3}}, tmp_path)
    state = {"b": {"z": 0, "x": 0, "y": 0}}
    sx.load_checkpoint(state, path, exclude="b.x")
    assert repr(state) == "{'b': {'z': 3, 'x': 0, 'y': 2}}"
