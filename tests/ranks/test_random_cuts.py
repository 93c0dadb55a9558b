"""save, load, export, gather, synchronize and diff of random states: these bits, or the error that the case expects."""

from __future__ import annotations

import fnmatch
import json
import random
import re
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import job_values
import pytest
import random_jobs
import torch
from equality import assert_same, bits_of, load_directory
from random_cuts import EXACT, NAMES, Cut, States, laid_out, live, local, nested
from safetensors.torch import save_file
from sweeps import slow

import statexchange as sx
from statexchange.errors import IncompleteError, InvalidArgumentError, ReplicaError, UnsupportedError
from statexchange.testing import RankFailure, report, run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

BUILDING = threading.Lock()
"""torch's seed, from which `random_jobs` builds, is one for all ranks that are threads."""


class Case:
    """A drawn case: what is the same on all ranks."""

    def __init__(self, seed: int, mesh: tuple[int, int], device_mesh: Any) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self.states = States(self.chance, mesh, device_mesh is not None)
        self.device_mesh = device_mesh
        self.rank = sx.get_communicator().rank

    def draw(self, **options: Any) -> dict[str, Cut]:
        names = self.chance.sample(NAMES, self.chance.randint(1, 5))
        return {name: self.states.cut(self.states.whole(**options)) for name in names}

    def live(self, cuts: dict[str, Cut], *, is_blank: bool = False) -> dict[str, Any]:
        return live(self.states, cuts, self.rank, self.device_mesh, seed=self.seed, is_blank=is_blank)

    def layout(self, cuts: dict[str, Cut]) -> dict[str, Any] | None:
        return None if self.device_mesh is not None else self.states.layout(cuts, self.rank)

    def break_copy(self, cuts: dict[str, Cut]) -> bool:
        """Change one element of the last rank's copy of a declared replica; return whether there is one."""
        for cut in cuts.values():
            if cut.kind == "replicate" and cut.whole.numel() and self.states.world_size > 1:
                cut.parts[-1] = _changed(cut.whole)
                return True
        return False

    def break_box(self, cuts: dict[str, Cut]) -> bool:
        """Make a sharded tensor lack its last row; return whether there is one with a row."""
        for cut in cuts.values():
            if cut.kind == "boxes":
                for number, part in enumerate(cut.parts):
                    assert part is not None
                    if part.numel():
                        offsets, shape = cut.rule["boxes"][number][0]
                        cut.rule["boxes"][number][0] = [offsets, [shape[0] - 1, *shape[1:]]]
                        cut.parts[number] = part[: shape[0] - 1]
                        return True
        return False


def _changed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in which one bit of the last element differs."""
    changed = tensor.clone(memory_format=torch.contiguous_format)
    last = changed.view(-1)[-1:]
    if tensor.dtype == torch.bool:
        last.logical_not_()
    else:
        last.view(torch.uint8)[0] ^= 1
    return changed


def _of_other_dtype(tensor: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Return a tensor of another dtype, and whether its values are the same."""
    wider = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.uint8: torch.int64}
    if tensor.dtype in wider and bool(tensor.isfinite().all()):
        return tensor.to(wider[tensor.dtype]).contiguous(), True
    zeros = torch.zeros(tensor.shape, dtype=torch.int16)
    return zeros, not bool((tensor.to(torch.complex128) != 0).any())


def refuses(error: type[Exception], call: Callable[[], Any]) -> None:
    with pytest.raises(error):
        call()
    sx.get_communicator().barrier()


def checks_save(case: Case, path: Path) -> None:
    cuts, fault = case.draw(), case.chance.choice(["", "", "", "", "copy", "box", "reduce"])
    is_copy, is_box = fault == "copy" and case.break_copy(cuts), fault == "box" and case.break_box(cuts)
    if fault == "reduce" and not case.states.is_dtensor:
        cuts["reduced"] = case.states.reduced([2])
    job = random_jobs.draw(case.chance.randrange(1 << 20)).saved if case.chance.random() < 0.25 else None
    state: dict[str, Any] = {"tensors": nested(case.live(cuts)), "step": 7, "note": ["text", (None, 2.5, True)]}
    in_state = {f"tensors.{name}": cut for name, cut in cuts.items()}
    if job is not None:
        job.wrapper = ""
        with BUILDING:
            built = random_jobs.build(job, case.seed)
        state["job"], expected = built.state, job_values.plain(job_values.atoms(built.state, built))
    save = partial(sx.save_checkpoint, state, path / "saved", layout=case.layout(in_state))
    if "reduced" in cuts:  # a save keeps tensors as they are
        return refuses(InvalidArgumentError, save)
    if is_copy:  # the layout says that copies are equal
        return refuses(ReplicaError, save)
    if is_box:  # no rank has the last row
        refuses(IncompleteError, save)
        assert not (path / "saved").exists()
        return None
    save()
    again = {name: case.states.cut(cut.whole) for name, cut in cuts.items()}
    fresh: dict[str, Any] = {
        "tensors": nested(case.live(again, is_blank=True)),
        "step": 0,
        "note": ["", (1, 0.0, False)],
    }
    if job is not None:
        with BUILDING:
            fresh["job"] = (other := random_jobs.build(job, case.seed + 1)).state
    again_in_state = {f"tensors.{name}": cut for name, cut in again.items()}
    load = partial(sx.load_checkpoint, fresh, path / "saved", layout=case.layout(again_in_state))
    load()
    assert (fresh["step"], fresh["note"]) == (7, ["text", (None, 2.5, True)])
    loaded = dict(_flat(fresh["tensors"]))
    assert_same(loaded, {name: cut.parts[case.rank] for name, cut in again.items()})
    if job is not None:
        loaded_atoms = job_values.plain(job_values.atoms(other.state, other))
        assert loaded_atoms == expected, {*loaded_atoms.items()} ^ {*expected.items()}
    return None


def _flat(tree: Any, prefix: str = "") -> Any:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        if isinstance(value, dict | list):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", local(value)


def checks_export(case: Case, path: Path) -> None:
    dtype = case.chance.choice([None, None, *EXACT])
    cuts = case.draw(is_finite=True, dtypes=[*EXACT, torch.bool, torch.int64]) if dtype else case.draw()
    fault = case.chance.choice(["", "", "", "copy", "root", "box", "reduce", "reduce"])
    is_copy = fault in ("copy", "root") and case.break_copy(cuts)
    is_box = fault == "box" and case.break_box(cuts)
    if fault == "reduce" and not case.states.is_dtensor:
        cuts["reduced"] = case.states.reduced(case.chance.choice([[], [3], [2, 2]]))
    options: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch.") if dtype else None}
    selected = dict(cuts)
    if not (is_copy or is_box) and case.chance.random() < 0.4:
        pattern, option = (
            case.chance.choice(["layer.*", "*w*", "x.[01]", "*"]),
            case.chance.choice(["include", "exclude"]),
        )
        options[option] = pattern
        keeps = option == "include"
        selected = {name: cut for name, cut in cuts.items() if fnmatch.fnmatchcase(name, pattern) == keeps}
    if fault == "root":
        options["replicas"] = "root"
    if case.chance.random() < 0.3:
        options["rename"] = [(r"^layer\.", "block."), ("x", "y")]
    if case.chance.random() < 0.4:
        options["max_shard_size"] = case.chance.choice([1, 64, 300])
    state, layout = case.live(cuts), case.layout(cuts)
    export = partial(sx.export_checkpoint, state, path / "out", layout=layout, **options)
    # Copies are compared as they are written: a cast may make them equal.
    differ = any(
        bits_of(_cast(part, dtype)) != bits_of(_cast(cut.whole, dtype))
        for cut in cuts.values()
        for part in cut.parts
        if cut.kind == "replicate" and part is not None
    )
    if differ and fault == "copy":
        return refuses(ReplicaError, export)
    if is_box:  # no rank has the last row
        return refuses(IncompleteError, export)
    if not selected:  # nothing is left to export
        return refuses(InvalidArgumentError, export)
    export()
    expected = {}
    for name, cut in selected.items():
        for regex, replacement in options.get("rename", []):
            name = re.sub(regex, replacement, name)
        expected[name] = _cast(cut.whole, dtype)
    assert_same(load_directory(path / "out"), expected)
    if options.get("max_shard_size") == 1 and sum(tensor.numel() > 0 for tensor in expected.values()) > 1:
        index = json.loads((path / "out" / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == expected.keys()
        files = [index["weight_map"][name] for name, tensor in expected.items() if tensor.numel()]
        assert len({*files}) == len(files)
    return None


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def checks_gather(case: Case, path: Path) -> None:
    cuts = case.draw()
    root = case.chance.randrange(case.states.world_size)
    state = case.live(cuts)
    workspace = path / "workspace" if case.chance.random() < 0.3 else None
    with sx.gather_state(state, root=root, workspace=workspace) as states:
        assert len(states) == (case.states.world_size if case.rank == root else 0)
        for rank, gathered in enumerate(states):
            assert gathered.rank == rank
            found = {name: torch.as_tensor(gathered[name]).clone() for name in gathered}
            assert_same(found, {name: cut.parts[rank] for name, cut in cuts.items()})


def checks_synchronize(case: Case, path: Path) -> None:
    wholes = {name: [case.states.whole()] for name in case.chance.sample(NAMES, 3)}
    for values in wholes.values():
        first = values[0]
        values += [case.states.filled(first.shape, first.dtype) for _ in range(case.states.world_size - 1)]
    root = case.chance.randrange(case.states.world_size)
    fault = case.chance.choice(["", "", "", "shape"]) if case.states.world_size > 1 else ""
    tree = {name: laid_out(values[case.rank], case.chance.randrange(3)) for name, values in wholes.items()}
    before = {name: bits_of(tensor) for name, tensor in tree.items()}
    if fault and case.rank == case.states.world_size - 1:
        name = next(iter(tree))
        tree[name] = torch.cat([tree[name].reshape(-1), torch.zeros(1, dtype=tree[name].dtype)])
        before[name] = bits_of(tree[name])
    value = {"tensors": nested(tree), "step": case.rank, "pair": (case.rank, ["a", None])}
    if fault:  # shapes differ, and nothing changes
        refuses(sx.errors.MismatchError, lambda: sx.synchronize(value, root=root))
        assert {name: bits_of(tensor) for name, tensor in tree.items()} == before
        return
    result = sx.synchronize(value, root=root)
    assert_same(tree, {name: values[root] for name, values in wholes.items()})
    assert (result["step"], result["pair"]) == (root, (root, ["a", None]))
    if case.states.is_dtensor:
        cuts = case.draw()
        is_sharded = any(not all(p.is_replicate() for p in cut.placements) for cut in cuts.values())
        state = case.live(cuts)
        if is_sharded:  # a shard of root is no value for another rank
            refuses(UnsupportedError, lambda: sx.synchronize(state, root=root))
        else:
            sx.synchronize(state, root=root)
            assert_same({k: local(v) for k, v in state.items()}, {k: cut.whole for k, cut in cuts.items()})


def checks_diff(case: Case, path: Path) -> None:
    cuts = case.draw()
    expected, stored = {}, {}
    for name, cut in cuts.items():
        status = case.chance.choice(["equal", "equal", "values", "dtype", "shape", "only in a"])
        if status == "values" and not cut.whole.numel():
            status = "equal"
        whole = cut.whole
        if status == "values":
            stored[name] = _changed(whole)
        elif status == "dtype":
            stored[name], is_same = _of_other_dtype(whole)
            status = "dtype" if is_same else "values"
        elif status == "shape":
            stored[name] = torch.zeros([*whole.shape, 2], dtype=whole.dtype)
        elif status == "equal":
            stored[name] = whole.clone(memory_format=torch.contiguous_format)
        expected[name] = status
    if case.chance.random() < 0.3 or not stored:
        stored["more"], expected["more"] = torch.ones(2), "only in b"
    options: dict[str, Any] = {}
    if case.chance.random() < 0.3:
        options["exclude"] = "layer.*"
        expected = {name: status for name, status in expected.items() if not name.startswith("layer.")}
    if case.rank == 0:
        save_file(stored, path / "b.safetensors")
        save_file(
            {n: c.whole.clone(memory_format=torch.contiguous_format) for n, c in cuts.items()}, path / "a.safetensors"
        )
    sx.get_communicator().barrier()
    b, state = path / "b.safetensors", case.live(cuts)
    compare = [lambda: sx.diff_checkpoints(state, b, layout=case.layout(cuts), **options)]
    compare += [lambda: sx.diff_checkpoints(path / "a.safetensors", b, **options)]
    for call in compare:
        if not expected:  # the patterns select no name
            refuses(InvalidArgumentError, call)
            continue
        result = call()
        found = {tensor.name: tensor.status for tensor in result.differing}
        differing = {name: status for name, status in expected.items() if status != "equal"}
        assert found == differing, (found, differing)
        assert result.equal == (not found)


CALLS = [checks_save, checks_export, checks_gather, checks_synchronize, checks_diff]


def check(seed: int, mesh: list[int], root: str, device_mesh: Any = None) -> None:
    """Check the case of a seed on this rank."""
    path = Path(root) / str(seed)
    if sx.get_communicator().rank == 0:
        path.mkdir()
    sx.get_communicator().barrier()
    try:
        CALLS[seed % len(CALLS)](Case(seed, (mesh[0], mesh[1]), device_mesh), path)
    except BaseException as error:
        error.add_note(f"seed {seed}, {CALLS[seed % len(CALLS)].__name__}, mesh {mesh}")
        raise


def check_dtensors(seeds: list[int], mesh: list[int], root: str) -> None:
    """Check cases on ranks that are processes, whose tensors are DTensors."""
    from torch.distributed.device_mesh import init_device_mesh

    device_mesh = init_device_mesh("cpu", (mesh[0], mesh[1]), mesh_dim_names=("a", "b"))
    for seed in seeds:
        report(seed)
        check(seed, mesh, root, device_mesh)


MESHES = [[1, 1], [1, 2], [2, 1], [3, 1], [1, 3], [2, 2]]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", [0, 20, 40, *map(slow, range(1000, 3400, 100))])
def test_a_call_gives_the_bits_of_the_whole_tensors(first: int, sweep_path: Path) -> None:
    for seed in range(first, first + (20 if first < 1000 else 100)):
        mesh = MESHES[seed // len(CALLS) % len(MESHES)]
        try:
            run_ranks(check, mesh[0] * mesh[1], args=(seed, mesh, str(sweep_path)))
        except RankFailure as error:
            pytest.fail(f"seed {seed}, mesh {mesh}: {error}")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("mesh", "count"), [([2, 1], 10), *(slow(mesh, 150) for mesh in ([1, 1], [1, 2], [3, 1], [2, 2]))]
)
def test_a_call_gives_the_bits_of_dtensors(mesh: list[int], count: int, sweep_path: Path) -> None:
    seeds = [*range(10_000, 10_000 + count)]
    args, begun = (seeds, mesh, str(sweep_path)), list[Any]()
    try:
        run_ranks(
            check_dtensors,
            mesh[0] * mesh[1],
            backend="gloo",
            args=args,
            timeout_s=240,
            on_message=lambda rank, seed: begun.append((rank, seed)),
        )
    except RankFailure as error:
        pytest.fail(f"begun last (rank, seed): {begun[-len(mesh) * 2 :]}, mesh {mesh}: {error}")
