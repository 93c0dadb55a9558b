"""Trees: paths are unambiguous, and containers keep their types."""

import enum
import types
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import statexchange as sx
from statexchange.state.tree import nodes, replaced


class Color(enum.Enum):
    RED = 1


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Config:
    rate: float
    inner: Any = None
    hidden: int = field(default=7, init=False)


@dataclass(frozen=True, slots=True)
class Frozen:
    rate: float
    inner: Any = None


def flatten(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree, with their paths."""
    return [(node.path, node.value) for node in nodes(tree) if not node.container]


def rebuild(tree: Any, leaves: Mapping[str, Any]) -> Any:
    """Give a tree new leaves, and return what replaces it."""
    callbacks: list[Callable[[], object]] = []
    new = replaced(tree, leaves, callbacks)
    for change in callbacks:
        change()
    return new


def paths(tree: Any) -> list[str]:
    return [path for path, _ in flatten(tree)]


def test_paths_are_written_as_python_would() -> None:
    tree = {"model": {"layers": [1, (2, Point(3, 4))]}, "config": Config(0.1, Frozen(5)), "a.b": 6, "": 7}
    assert paths(tree) == [
        "config.rate",
        "config.inner.rate",
        "config.inner.inner",
        "config.hidden",
        "model.layers[0]",
        "model.layers[1][0]",
        "model.layers[1][1].x",
        "model.layers[1][1].y",
        "['']",
        "['a.b']",
    ]


def test_keys_that_are_not_text_differ_from_those_that_are() -> None:
    tree = {0: "a", "0": "b", None: "c", Color.RED: "d", (1, "x"): "e", torch.bfloat16: "f", 0.5: "g"}
    found = dict(flatten(tree))
    assert found["[0]"] == "a"
    assert found["['0']"] == "b"
    assert found["[(1, 'x')]"] == "e"
    assert found["[torch.bfloat16]"] == "f"
    assert len(found) == len(tree)


def test_a_single_leaf_and_an_empty_tree_are_flattened() -> None:
    assert flatten(3) == [("", 3)]
    assert flatten(None) == [("", None)]
    assert flatten({}) == flatten([]) == flatten(()) == []
    assert paths([1]) == ["[0]"]


def test_the_order_of_insertion_does_not_matter() -> None:
    assert flatten({"b": 1, "a": {"d": 2, "c": 3}}) == flatten({"a": {"c": 3, "d": 2}, "b": 1})


def test_nodes_distinguish_types_of_empty_containers() -> None:
    tree = [{}, [], (), Point(1, 2), Config(0.1), OrderedDict(a=1), UserDict(), torch.Size([2])]
    kinds = [node.container for node in nodes(tree) if node.container]
    assert kinds == [
        "list of 8",
        "dict",
        "list of 0",
        "tuple of 0",
        "namedtuple Point",
        "dataclass Config",
        "dict",
        "dict",
        "tuple of 1",
    ]


def test_a_tree_that_contains_itself_is_refused_with_its_path() -> None:
    tree: dict[str, Any] = {"a": [1, {}]}
    tree["a"][1]["back"] = tree["a"]
    with pytest.raises(sx.errors.InvalidArgumentError, match=r"itself: a\[1\]\.back"):
        flatten(tree)
    whole: list[Any] = []
    whole.append((whole,))
    with pytest.raises(sx.errors.InvalidArgumentError, match=r"itself: \[0\]\[0\]"):
        flatten(whole)


def test_one_container_in_two_places_is_no_cycle() -> None:
    shared = [1]
    assert paths({"a": shared, "b": shared}) == ["a[0]", "b[0]"]


def test_a_tree_too_deep_is_refused_with_its_path() -> None:
    tree: Any = 0
    for _ in range(5000):
        tree = [tree]
    with pytest.raises(sx.errors.InvalidArgumentError, match=r"deeper than 100, at \[0\]\[0\]"):
        flatten(tree)


def test_keys_that_other_ranks_cannot_know_are_refused_with_the_path() -> None:
    with pytest.raises(sx.errors.UnsupportedError, match="a Parameter as"):
        flatten({"state": {torch.nn.Parameter(torch.ones(1)): 1}})

    class Vague(str):
        def __repr__(self) -> str:
            return "..."

    with pytest.raises(sx.errors.UnsupportedError, match="a Vague as"):
        flatten({Vague("a"): 1})


def test_two_keys_that_look_alike_are_refused() -> None:
    other = enum.Enum("Color", {"RED": 1})
    with pytest.raises(sx.errors.UnsupportedError, match="look alike"):
        flatten({"a": {Color.RED: 1, other.RED: 2}})


def test_mutable_containers_are_changed_in_place() -> None:
    inner, config, ordered = [1, 2], Config(0.1), OrderedDict(z=1, a=2)
    tree = {"list": inner, "config": config, "default": defaultdict(int, k=3), "ordered": ordered}
    assert rebuild(tree, {"list[1]": 9, "config.rate": 0.5, "default.k": 4, "ordered.a": 5}) is tree
    assert tree["list"] is inner == [1, 9]
    assert tree["config"] is config
    assert config.rate == 0.5
    assert tree["default"]["new"] == 0
    assert list(ordered.items()) == [("z", 1), ("a", 5)]


def test_immutable_containers_are_replaced_by_new_ones_of_their_type() -> None:
    frozen = types.MappingProxyType({"k": 1})
    tree = (Point(1, [2]), Frozen(0.1, 3), torch.Size([4, 5]), frozen, torch.ones(2).max(0))
    new = rebuild(tree, {"[0].x": 6, "[1].inner": 7, "[2][1]": 8, "[3].k": 9, "[4][1]": 10})
    assert new[:4] == (Point(6, [2]), Frozen(0.1, 7), torch.Size([4, 8]), {"k": 9})
    assert [type(item) for item in new] == [type(item) for item in tree]
    assert new[0].y is tree[0].y
    assert new[4].indices == 10
    assert tree[0] == Point(1, [2])
    assert tree[1] == Frozen(0.1, 3)


def test_a_tree_without_changes_is_the_same_object() -> None:
    tree = (Point(1, 2), {"a": Frozen(3)}, [torch.ones(2)])
    assert rebuild(tree, {}) is tree
    assert rebuild(tree, {"[1].a.rate": tree[1]["a"].rate}) is tree


TREES = st.recursive(
    st.integers() | st.none() | st.text(),
    lambda child: (
        st.lists(child, max_size=3)
        | st.tuples(child, child)
        | st.builds(Point, child, child)
        | st.builds(Config, st.floats(0, 1), child)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.booleans(), child, max_size=3)
    ),
    max_leaves=12,
)


@given(TREES)
def test_any_tree_is_rebuilt_with_every_leaf_in_its_place(tree: Any) -> None:
    leaves = flatten(tree)
    assert len(dict(leaves)) == len(leaves)
    marks = {path: object() for path, _ in leaves}
    kinds = [(node.path, node.container) for node in nodes(tree)]
    marked = rebuild(tree, marks)
    assert dict(flatten(marked)) == marks
    assert [(node.path, node.container) for node in nodes(marked)] == kinds
