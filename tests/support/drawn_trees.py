"""Random trees as plain data, with at most one change on one rank."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

# Changes after which all ranks have root's values, those after which all raise an error and nothing has changed, and
# those after which all raise one and something has.
WORLD_SIZE = 2
HARMLESS = ["nothing", "order", "none", "steps", "no steps", "strides", "hyperparameters"]
HARMFUL = ["shape", "dtype", "kind", "key more", "key less", "length", "container", "untied", "optimizer", "group"]
HARMFUL += ["parameters", "sparse", "meta", "generator", "odd key", "cycle", "longdouble", "moved", "set"]
HARMFUL_ON_ROOT = ["unknown", "helper", "stale"]
HARMFUL_ELSEWHERE = ["expanded", "read-only", "refuses"]
FILLED_FIRST = ["overlap", "raises"]

DTYPES = ["float32", "bfloat16", "float64", "int64", "uint8", "bool", "complex64", "float8_e4m3fn", "float16"]
ARRAYS = ["f4", ">i4", "U3", "bfloat16", "?", "M8[D]", "record", "c16"]
KEYS: list[Any] = ["a", "b", "weight", "my key", "a.b", "0", 0, 1, -3, 2.5, True, None, ("t", 1), "state", "lr"]
MODULES = ["linear", "norm", "tied", "ignoring", "nested", "list"]
OPTIMIZERS = ["sgd", "momentum", "adam", "adamw", "adagrad", "rprop", "tensor lr", "nested", "more", "lbfgs"]
SCHEDULERS = ["step", "multistep", "lambda", "plateau", "sequential", "cosine"]


@dataclass
class Recipe:
    """A place of a tree: its kind, what is drawn of it, and the places inside by their keys."""

    number: int
    kind: str
    detail: Any = None
    items: list[tuple[Any, Recipe]] = field(default_factory=list)

    def walk(self) -> Iterator[Recipe]:
        """Yield this place and all inside."""
        yield self
        for _, item in self.items:
            yield from item.walk()


@dataclass(frozen=True)
class Case:
    """A tree, the root, and a change of the place `number` on the rank `rank`."""

    seed: int
    tree: Recipe
    root: int
    change: str
    rank: int
    number: int

    @property
    def outcome(self) -> str:
        """What comes out: "same", "error", or "filled": an error after tensors were filled."""
        if self.change in FILLED_FIRST:
            return "filled"
        places = {place.number: place for place in self.tree.walk()}
        # An empty tensor has no memory, so that it is never tied.
        if self.change == "untied" and 0 in places[places[self.number].detail].detail[1]:
            return "same"
        is_root = self.rank == self.root
        harmful = HARMFUL + (HARMFUL_ON_ROOT if is_root else HARMFUL_ELSEWHERE)
        return "error" if self.change in harmful else "same"


CONTAINERS = ["dict", "dict", "ordered", "table", "list", "items", "tuple", "pair", "config", "frozen"]
LEAVES = ["tensor"] * 5 + ["array"] * 2 + ["value"] * 5 + ["own", "module", "module", "optimizer", "optimizer"]
LEAVES += ["scheduler", "holder", "tie", "view", "parameter"]

# The kinds of places that a change can be made at; any for those that are not here.
PLACES = {
    "order": ["dict", "ordered", "table"],
    "none": ["value"],
    "steps": ["optimizer"],
    "no steps": ["optimizer"],
    "strides": ["tensor"],
    "hyperparameters": ["optimizer"],
    "shape": ["tensor", "array", "module"],
    "dtype": ["tensor", "array"],
    "kind": ["tensor", "value", "array", "own", "holder"],
    "key more": ["dict", "ordered", "table"],
    "key less": ["dict", "ordered", "table"],
    "length": ["list", "items", "tuple"],
    "container": ["list", "pair", "config", "dict"],
    "untied": ["tie"],
    "optimizer": ["optimizer"],
    "group": ["optimizer"],
    "parameters": ["optimizer"],
    "moved": ["dict"],
    "refuses": ["value"],
    "expanded": ["tensor"],
    "read-only": ["array"],
    "overlap": ["tensor"],
    "unknown": ["value"],
    "helper": ["optimizer"],
    "stale": ["optimizer"],
    "raises": ["holder"],
}
WRAPPED = {"sparse", "meta", "generator", "odd key", "cycle", "longdouble", "set"}


def draw(seed: int) -> Case:
    """Draw a tree and a change."""
    chance = random.Random(seed)
    drawing = _Drawing(chance)
    tree = drawing.place(0)
    root, rank = chance.randrange(WORLD_SIZE), chance.randrange(WORLD_SIZE)
    changes = HARMLESS * 4 + HARMFUL + (HARMFUL_ON_ROOT if rank == root else HARMFUL_ELSEWHERE)
    if rank != root:
        changes += FILLED_FIRST
    change = chance.choice(changes)
    able = [place.number for place in tree.walk() if place.kind in PLACES.get(change, [place.kind])]
    if change == "length" or change == "key less":
        able = [place.number for place in tree.walk() if place.number in able and place.items]
    if change == "strides":  # of a tensor with views they must be equal on all ranks
        able = [number for number in able if number not in [p.detail for p in tree.walk() if p.kind == "view"]]
    if change == "moved":
        able = [p.number for p in tree.walk() if p.number in able and len(p.items) > 0]
    if change == "shape":
        able = [p.number for p in tree.walk() if p.number in able and (p.kind != "tensor" or p.detail[1])]
    if not able:
        change = "nothing"
    return Case(seed, tree, root, change, rank, chance.choice(able) if able else 0)


class _Drawing:
    """Draws places; later ones may refer to tensors and modules that were drawn before."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.count = 0
        self.drawn: dict[str, list[Recipe]] = {}

    def place(self, depth: int) -> Recipe:
        """Draw a place with all inside."""
        self.count += 1
        number, chance = self.count, self.chance
        if depth == 0 or (depth < 4 and chance.random() < 0.35):
            kind = chance.choice(CONTAINERS) if depth or chance.random() < 0.5 else "dict"
            place = Recipe(number, kind)
            keys: list[Any] = list(range(chance.randrange(4)))
            if kind in ("dict", "ordered", "table"):
                keys = chance.sample(KEYS, chance.randrange(1 + 5 * (depth == 0), 4 + 5 * (depth == 0)))
                if True in keys and 1 in keys:
                    keys.remove(1)
                keys = [key for at, key in enumerate(keys) if key not in keys[:at]]
            elif kind in ("pair", "config", "frozen"):
                keys = ["left", "right"]
            for key in keys:
                place.items.append((key, self.place(depth + 1)))
            return place
        kind = chance.choice(LEAVES)
        if kind == "scheduler" and not self.drawn.get("optimizer"):
            kind = "optimizer"
        if kind in ("tie", "view") and not self.drawn.get("tensor"):
            kind = "tensor"
        place = Recipe(number, kind, self._detail(kind))
        self.drawn.setdefault(kind, []).append(place)
        return place

    def _detail(self, kind: str) -> Any:
        chance = self.chance
        if kind == "tensor":
            shape = chance.choice([(), (3,), (2, 3), (2, 3), (4, 2, 2), (0, 2)])
            return chance.choice(DTYPES), shape, chance.choice(["plain", "plain", "strided", "grad", "turned"])
        if kind == "array":
            return chance.choice(ARRAYS)
        if kind == "value":
            return chance.choice(["number", "number", "str", "enum", "dtype", "numpy", "None", "nan"])
        if kind == "own":
            return chance.choice(["object", "device", "bytes", "set", "deque", "function"])
        if kind == "module":
            return chance.choice(MODULES)
        if kind == "optimizer":
            modules = self.drawn.get("module", [])
            module = chance.choice(modules).number if modules and chance.random() < 0.7 else 0
            names = chance.choice(["", "", "named"])
            return chance.choice(OPTIMIZERS), module, chance.randrange(1, 4), names, chance.random() < 0.5
        if kind == "scheduler":
            return chance.choice(SCHEDULERS), chance.choice(self.drawn["optimizer"]).number
        if kind == "holder":
            return chance.choice(
                ["tensors", "array", "plain", "object", "empty", "shared", "joined"]
            ), chance.random() < 0.4
        if kind in ("tie", "view"):
            return chance.choice(self.drawn["tensor"]).number
        return None


# Building
