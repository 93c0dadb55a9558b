"""synchronize of random trees: root's values on every rank, or one error on all ranks and nothing changed."""

from typing import Any, NamedTuple

import drawn_trees
import numpy as np
import pytest
import torch
import tree_atoms
from random_trees import Building
from sweeps import slow
from torch import nn
from tree_atoms import Atom

import statexchange as sx
from statexchange.testing import run_ranks


class Result(NamedTuple):
    """What one rank had before and after a call, which objects these are, and the error."""

    before: dict[str, Atom]
    after: dict[str, Atom]
    moved: list[str]
    error: str


def synchronized(seed: int) -> Result:
    """Synchronize the tree of a seed on this rank."""
    comm = sx.get_communicator()
    case = drawn_trees.draw(seed)
    tree = Building(case, comm.rank).tree()
    before, objects = tree_atoms.atoms(tree), tree_atoms.objects(tree)
    error = ""
    new: Any = tree
    try:
        new = sx.synchronize(tree, root=case.root)
    except sx.StateExchangeError as caught:
        error = f"{type(caught).__name__}: {caught}"
    comm.barrier()
    moved = []
    for path, value in tree_atoms.objects(new).items():
        stays = isinstance(value, dict | list | torch.Tensor | np.ndarray | nn.Module | torch.optim.Optimizer)
        if stays and path in objects and value is not objects[path] and ".state" not in path:
            moved.append(path)
    return Result(before, tree_atoms.atoms(new), moved, error)


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
@pytest.mark.parametrize("first", [*range(0, 60, 10), *map(slow, range(60, 1560, 50))])
def test_ranks_have_roots_values_or_one_error_and_nothing_changed(first: int) -> None:
    seeds = range(first, first + (10 if first < 60 else 50))
    of_ranks = run_ranks(all_of, drawn_trees.WORLD_SIZE, args=(seeds,))
    for seed, *results in zip(seeds, *of_ranks, strict=True):
        case = drawn_trees.draw(seed)
        about = f"seed {seed}, {case.change} on rank {case.rank}, root {case.root}"
        errors = {result.error for result in results}
        assert len(errors) == 1, about
        assert (errors == {""}) == (case.outcome == "same"), f"{about}: {errors}"
        for result in results:
            if case.outcome == "same":
                root = results[case.root]
                assert tree_atoms.shared_atoms(result.after) == tree_atoms.shared_atoms(root.before), about
                assert tree_atoms.own_atoms(result.after) == tree_atoms.own_atoms(result.before), about
                assert not result.moved, about
            elif case.outcome == "error":
                assert result.after == result.before, about


def all_of(seeds: range) -> list[Result]:
    """Synchronize the trees of seeds, one after the other."""
    return list(map(synchronized, seeds))
