"""What a source knows of the keys under which its entries were saved: `Source.paths`."""

import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from statexchange.checkpoint.merge import merge_checkpoint
from statexchange.errors import CorruptError
from statexchange.formats.registry import open_source
from statexchange.formats.source import Source
from statexchange.sharding.paths import ListItem, TupleItem

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
Paths = dict[str, tuple[Any, ...]]


def one() -> torch.Tensor:
    return torch.ones(1)


def typed(paths: Any) -> dict[str, list[tuple[type, Any]]]:
    """Paths with the types of their keys: a ListItem equals an int."""
    return {name: [(type(key), key) for key in path] for name, path in paths.items()}


def assert_paths(source: Source, expected: Paths) -> None:
    assert typed(source.paths) == typed(expected)


def paths_of(path: Path, section: str | None = "all") -> Paths:
    with open_source(path, section=section) as source:
        assert source.names >= source.paths.keys()
        return dict(source.paths)


def saved(path: Path, state: Any) -> Path:
    torch.save(state, path)
    return path


def saved_dcp(path: Path, state: dict[str, Any], *, flatten: bool = True) -> Path:
    dcp.save(
        state,
        storage_writer=FileSystemWriter(path, single_file_per_rank=True),
        planner=DefaultSavePlanner(flatten_state_dict=flatten),
        no_dist=True,
    )
    return path


def test_a_file_of_torch_save_has_its_keys_and_the_items_of_lists_and_tuples(tmp_path: Path) -> None:
    state = OrderedDict(
        model={"d.e": one(), "layers": [{"w": one()}, one()]},
        optimizer={"state": {0: {"exp_avg": one()}, "1": {"exp_avg": one()}}, "param_groups": [{"params": [0]}]},
        pair=({"a": one()}, 3),
        milestones={20: 1, 2.5: "x", True: None, None: 4},
        empty={},
        plain=[1, 2],
    )
    expected: Paths = {
        "model.d.e": ("model", "d.e"),
        "model.layers.0.w": ("model", "layers", ListItem(0), "w"),
        "model.layers.1": ("model", "layers", ListItem(1)),
        "optimizer.state.0.exp_avg": ("optimizer", "state", 0, "exp_avg"),
        "optimizer.state.1.exp_avg": ("optimizer", "state", "1", "exp_avg"),
        "optimizer.param_groups.0.params": ("optimizer", "param_groups", ListItem(0), "params"),
        "pair.0.a": ("pair", TupleItem(0), "a"),
        "pair.1": ("pair", TupleItem(1)),
        "milestones.20": ("milestones", 20),
        "milestones.2.5": ("milestones", 2.5),
        "milestones.True": ("milestones", True),
        "milestones.None": ("milestones", None),
        "empty": ("empty",),
        "plain": ("plain",),
    }
    assert typed(paths_of(saved(tmp_path / "a.pt", state))) == typed(expected)


@pytest.mark.parametrize(
    "state",
    [
        one(),
        [1, 2],
        {"": one()},
        {"": {"a": one()}},
        {10**600: one()},
        {(0, 1): one()},
        {torch.float32: one()},
    ],
    ids=["a tensor", "a list", "an empty key", "a key below an empty one", "a long number", "a tuple", "a dtype"],
)
def test_a_name_that_its_keys_do_not_join_to_has_no_path(tmp_path: Path, state: Any) -> None:
    assert paths_of(saved(tmp_path / "a.pt", state)) == {}


def test_an_unreadable_tensor_has_its_path(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", {"a": [{"b.c": one().to_sparse()}]})
    with open_source(path, section="all", strict=False) as source:
        assert [tensor.name for tensor in source.unreadable] == ["a.0.b.c"]
        assert_paths(source, {"a.0.b.c": ("a", ListItem(0), "b.c")})


def test_a_name_whose_path_differs_between_files_has_none(tmp_path: Path) -> None:
    saved(tmp_path / "pytorch_model_rank0.bin", {"same": {"a": 1}, "number": {1: 7}, "item": [one(), one()]})
    saved(tmp_path / "pytorch_model_rank1.bin", {"same": {"a": 1}, "number": {"1": 7}, "item": {0: one(), 2: one()}})
    expected: Paths = {"same.a": ("same", "a"), "item.1": ("item", ListItem(1)), "item.2": ("item", 2)}
    assert typed(paths_of(tmp_path)) == typed(expected)


def test_what_planner_data_says_of_a_dcp(tmp_path: Path) -> None:
    state = {
        "d.e": {"x": one()},
        "lst": [one(), {"a": one(), "n": 3}],
        "numbered": {0: one(), "y": {1: 2}},
        "pair": ({"a": one()}, 1),
        "plain": [1, 2],
    }
    expected: Paths = {
        "d.e.x": ("d.e", "x"),
        "lst.0": ("lst", ListItem(0)),
        "lst.1.a": ("lst", ListItem(1), "a"),
        "lst.1.n": ("lst", ListItem(1), "n"),
        "numbered.0": ("numbered", "0"),  # torch makes texts of keys
        "numbered.y.1": ("numbered", "y", "1"),
        "pair": ("pair",),
        "plain": ("plain",),
    }
    assert typed(paths_of(saved_dcp(tmp_path / "a", state))) == typed(expected)


def test_the_flattened_form_of_an_optimizer_in_a_dcp_is_one_key(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2)).backward()
    optimizer.step()
    state, moments = get_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True, full_state_dict=True)
    )
    path = saved_dcp(tmp_path / "a", {"model": state, "optim": moments})
    assert {name: path for name, path in paths_of(path).items() if "bias" in name and "exp" not in name} == {
        "model.bias": ("model", "bias"),
        "optim.state.bias.step": ("optim", "state.bias.step"),
        **{name: ("optim", name[6:]) for name in paths_of(path) if name.startswith("optim.param_groups.bias")},
    }
    assert paths_of(path, "optimizer")["state.bias.exp_avg"] == ("state.bias.exp_avg",)


def test_a_dcp_that_was_not_flattened_has_no_paths(tmp_path: Path) -> None:
    assert paths_of(saved_dcp(tmp_path / "a", {"w": one(), "d": {"n": 1}}, flatten=False)) == {}


def with_planner_data(path: Path, change: Callable[[Any], Any]) -> Path:
    """Change the planner data of a DCP."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.planner_data = change(metadata.planner_data)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return path


@pytest.mark.parametrize(
    "path",
    [
        None,
        "a.0",
        ["a", 0],
        (),
        ("a", 1),
        ("a",),
        ("a", -1),
        ("a", True),
        ("a", 0.0),
        ("a", None),
        ("a", 1 << 70),
        ("a", ("0",)),
        ("a", 10**600),
        ("a", "0", ""),
        ("a", torch.float32),
        ("a", "b" * 2000),
        ("a",) * 100_000,
    ],
    ids=range(17),
)
def test_foreign_planner_data_is_not_used(tmp_path: Path, path: Any) -> None:
    saved_dcp(tmp_path / "a", {"a": [one()], "b": one()})
    expected: Paths = {"b": ("b",)}
    assert paths_of(with_planner_data(tmp_path / "a", lambda data: {**data, "a.0": path, "c": ("c",)})) == expected


@pytest.mark.parametrize("data", [None, [("a", "a")], "text", 3, {}, {1: (1,), ("a",): "a"}, {"a.0": {"a": 0}}])
def test_planner_data_of_another_form_is_not_used(tmp_path: Path, data: Any) -> None:
    saved_dcp(tmp_path / "a", {"a": [one()]})
    assert paths_of(with_planner_data(tmp_path / "a", lambda _: data)) == {}


def test_one_long_path_of_many_names_takes_no_time(tmp_path: Path) -> None:
    saved_dcp(tmp_path / "a", {f"n{number}": one() for number in range(300)})
    long = ("n",) * 200_000
    assert paths_of(with_planner_data(tmp_path / "a", lambda data: dict.fromkeys(data, long))) == {}


def test_paths_are_counted_against_the_budget(tmp_path: Path) -> None:
    state: Any = [{"a": {}}]
    for _ in range(40):  # lists that refer to one list twice: 2 ** 40 entries
        state = [state, state]
    with pytest.raises(CorruptError):
        paths_of(saved(tmp_path / "a.pt", {"w": state}))


def test_a_section_has_paths_without_the_keys_of_its_prefix(tmp_path: Path) -> None:
    moments = {"state": {0: {"exp_avg": one()}}, "param_groups": [{"lr": 0.5}]}
    path = saved(tmp_path / "a.pt", {"model": {"a.b": one()}, "optimizer": moments, "step": 3})
    assert paths_of(path, "model") == {"a.b": ("a.b",)}
    expected: Paths = {
        "state.0.exp_avg": ("state", 0, "exp_avg"),
        "param_groups.0.lr": ("param_groups", ListItem(0), "lr"),
    }
    assert typed(paths_of(path, "optimizer")) == typed(expected)


def test_a_name_whose_keys_do_not_join_to_the_prefix_has_no_path_in_the_section(tmp_path: Path) -> None:
    moments = {"optimizer.state": {0: {"exp_avg": one()}}, "optimizer": {"param_groups": [{"lr": 0.5}]}}
    path = saved(tmp_path / "a.pt", {"model.a": one(), "model": {"b": one()}, **moments})
    assert paths_of(path, "model") == {"b": ("b",)}
    expected: Paths = {"param_groups.0.lr": ("param_groups", ListItem(0), "lr")}
    assert typed(paths_of(path, "optimizer")) == typed(expected)


def test_a_renamed_source_has_the_paths_that_follow_from_the_names(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", {"a": {"b.c": one(), "d": {1: 2}}, "b.c": 3})
    with open_source(path, section="all") as source:
        assert_paths(source.renamed(lambda name: name), dict(source.paths))
        below: Paths = {"x.y.a.b.c": ("x", "y", "a", "b.c"), "x.y.a.d.1": ("x", "y", "a", "d", 1)}
        assert_paths(source.renamed("x.y.".__add__), {**below, "x.y.b.c": ("x", "y", "b.c")})
        # "a.b.c" and "b.c" get one name and have one path; "c" is a part of a key.
        removed: Paths = {"b.c": ("b.c",), "d.1": ("d", 1)}
        assert_paths(source.renamed(lambda name: name.removeprefix("a.")), removed)
        assert_paths(source.renamed(lambda name: name.removeprefix("a.b.")), {"a.d.1": ("a", "d", 1), "b.c": ("b.c",)})
        assert_paths(
            source.renamed(lambda name: name.replace("d", "e")), {n: source.paths[n] for n in ("a.b.c", "b.c")}
        )


def test_two_names_that_become_one_have_no_path_if_theirs_differ(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", {"a": {1: 2}, "b": {"a": {"1": 3}}})
    with open_source(path, section="all") as source:
        assert_paths(source.renamed(lambda name: name.removeprefix("b.")), {})
        assert_paths(source.renamed(lambda _: "a.1"), {})


def test_a_directory_of_trainer_has_the_paths_of_its_parts(tmp_path: Path) -> None:
    saved(tmp_path / "pytorch_model.bin", {"a.w": one()})
    saved(tmp_path / "optimizer.pt", {"state": {0: {"exp_avg": one()}}, "param_groups": [{"lr": 0.5}]})
    saved(tmp_path / "scheduler.pt", {"last_epoch": 3})
    (tmp_path / "trainer_state.json").write_text('{"global_step": 3}')
    expected: Paths = {
        "model.a.w": ("model", "a.w"),
        "optimizer.state.0.exp_avg": ("optimizer", "state", 0, "exp_avg"),
        "optimizer.param_groups.0.lr": ("optimizer", "param_groups", ListItem(0), "lr"),
        "scheduler.last_epoch": ("scheduler", "last_epoch"),
    }
    assert typed(paths_of(tmp_path)) == typed(expected)
    assert typed(paths_of(tmp_path, "optimizer")) == typed(
        {name.removeprefix("optimizer."): path[1:] for name, path in expected.items() if path[0] == "optimizer"}
    )


def test_sources_of_tensors_alone_have_no_paths(tmp_path: Path) -> None:
    merge_checkpoint(saved(tmp_path / "a.pt", {"a.w": one()}), tmp_path / "out")
    assert paths_of(tmp_path / "out") == {}
