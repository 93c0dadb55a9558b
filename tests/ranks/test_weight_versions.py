"""Versions of weights, as a trainer publishes them and engines take them: by ranks of other layouts, and by others."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scripts import page_block, run_script, with_torchrun
from shared_form import read_version
from sweeps import slow

import statexchange as sx
from statexchange.errors import (
    InvalidArgumentError,
    PeerError,
    ReplicaError,
    StallError,
    TargetExistsError,
    UnsupportedError,
)
from statexchange.exchange import version_publishing
from statexchange.testing import run_ranks

DIMS = {"rows": 0, "columns": 1, "middle": 1, "uneven": 0}
LAYOUT = {name: {"dim": dim} for name, dim in DIMS.items()}


def whole_state(seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return {
        "rows": random(48, 33),
        "columns": random(40, 24),
        "middle": random(3, 12, 5),
        "uneven": random(7, 11),
        "copied": random(77),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(2.5),
        "steps": torch.arange(5),
    }


def changed_state(state: dict[str, torch.Tensor], generator: torch.Generator) -> None:
    """Change a hundredth of the elements of most tensors."""
    for tensor in state.values():
        if tensor.numel() and torch.rand((), generator=generator) < 0.7:
            count = max(1, tensor.numel() // 100)
            tensor.view(-1)[torch.randint(0, tensor.numel(), (count,), generator=generator)] += 1


def part_of(state: dict[str, torch.Tensor], rank: int, world_size: int) -> dict[str, torch.Tensor]:
    parts = {}
    for name, tensor in state.items():
        if name in DIMS:
            parts[name] = tensor.tensor_split(world_size, DIMS[name])[rank].clone(memory_format=torch.contiguous_format)
        else:
            parts[name] = tensor.clone()
    return parts


def run_of(path: str | Path) -> Path:
    (latest,) = Path(path).glob("*/latest")
    return latest.parent


def publish_and_read(path: str, seed: int, dtype: str, frames: str, background: bool) -> list[str]:
    """Publish 8 versions of random states, and read each with our reader, and with that of the shared form on root."""
    comm = sx.get_communicator()
    state = whole_state(seed, getattr(torch, dtype))
    generator = torch.Generator().manual_seed(seed + 1)
    kinds = []
    with sx.Publisher(path, layout=LAYOUT, frames=frames, keep=8, full_every=5) as publisher:  # type: ignore[arg-type]
        for number in range(8):
            if number:
                changed_state(state, generator)
            parts = part_of(state, comm.rank, comm.world_size)
            if background:
                future = publisher.publish(parts, number, background=True)
                for tensor in parts.values():
                    tensor.zero_()
                report = future.result()
            else:
                report = publisher.publish(parts, number)
            kinds.append(report.kind)
            if comm.rank == 0:
                check_version(run_of(path), number, state, one_frame=frames == "one")
            comm.barrier()
    return kinds


def check_version(run: Path, number: int, state: dict[str, torch.Tensor], *, one_frame: bool = False) -> None:
    with sx.open_checkpoint(run / f"weight_v{number:06d}") as version:
        assert set(version) == set(state)
        for name, tensor in state.items():
            assert torch.equal(bytes_of(version[name].read(framework="pt")), bytes_of(tensor)), (number, name)
    for name, raw in read_version(run, number, one_frame=one_frame).items():
        assert raw.data == bytes_of(state[name]).numpy().tobytes(), (number, name)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("frames", ["many", "one"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_version_has_the_published_bytes(tmp_path: Path, world_size: int, frames: str) -> None:
    arguments = (str(tmp_path / "updates"), world_size, "bfloat16", frames, False)
    kinds = run_ranks(publish_and_read, world_size, args=arguments)
    assert kinds == [["full", *["delta"] * 4, "full", *["delta"] * 2]] * world_size


def test_a_reader_of_the_form_reads_50_versions_of_several_files(tmp_path: Path) -> None:
    state, generator = whole_state(50, torch.bfloat16), torch.Generator().manual_seed(50)
    with sx.Publisher(tmp_path / "updates", keep=50, max_shard_size=1500) as publisher:
        for number in range(50):
            publisher.publish(state, number)
            check_version(run_of(tmp_path / "updates"), number, state)
            changed_state(state, generator)
    run = run_of(tmp_path / "updates")
    assert len(list(run.glob("weight_v*"))) == 50
    assert len(list((run / "weight_v000000").glob("*.safetensors"))) > 2


def test_a_version_in_the_background_is_of_the_time_of_the_call(tmp_path: Path) -> None:
    assert run_ranks(publish_and_read, 2, args=(str(tmp_path / "updates"), 7, "float32", "many", True))


def test_processes_publish_and_processes_of_another_layout_follow(tmp_path: Path) -> None:
    path = str(tmp_path / "updates")
    thread = threading.Thread(target=run_ranks, args=(publish_slowly, 2), kwargs={"backend": "gloo", "args": (path,)})
    thread.start()
    seen = run_ranks(follow, 3, backend="gloo", args=(path, 9))
    thread.join()
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][-1] == 9


def publish_slowly(path: str) -> None:
    comm = sx.get_communicator()
    state = whole_state(3, torch.bfloat16)
    generator = torch.Generator().manual_seed(4)
    with sx.Publisher(path, layout=LAYOUT, full_every=4) as publisher:
        for number in range(10):
            state["scalar"].fill_(number)
            publisher.publish(part_of(state, comm.rank, comm.world_size), number)
            changed_state(state, generator)


def follow(path: str, last: int) -> list[int]:
    """Take versions until the last; check that each rank's parts are those of the version."""
    comm = sx.get_communicator()
    live = {name: torch.zeros_like(tensor) for name, tensor in whole_state(0, torch.bfloat16).items()}
    parts = part_of(live, comm.rank, comm.world_size)
    version = None
    numbers = []
    with sx.Subscriber(path) as subscriber:
        while not numbers or numbers[-1] < last:
            version = subscriber.wait(newer_than=version, timeout_s=60)
            with subscriber.stage(version) as staged:
                staged.load_into(parts, layout=LAYOUT)
                with staged.tensors() as tensors:
                    whole = {name: tensors[name].read(framework="pt") for name in tensors}
            expected = part_of(whole, comm.rank, comm.world_size)
            assert all(torch.equal(parts[name], expected[name]) for name in parts)
            assert parts["scalar"].item() == version.number
            numbers.append(version.number)
    return numbers


def read_where_it_lies(path: str) -> list[int]:
    """Load the newest version without a cache; return the bytes of this rank's parts and those that it has read."""
    comm = sx.get_communicator()
    parts = part_of(
        {name: torch.zeros_like(tensor) for name, tensor in newest_of(3).items()}, comm.rank, comm.world_size
    )
    with sx.Subscriber(path, cache=False) as subscriber:
        version = subscriber.wait(timeout_s=60)
        with subscriber.stage(version) as staged:
            report = staged.load_into(parts, layout=LAYOUT)
            if version.number > 1:
                with pytest.raises(InvalidArgumentError, match="no Hugging Face directory"):
                    staged.directory()
            else:
                assert staged.directory().endswith("weight_v000001")
    for name, tensor in part_of(newest_of(version.number), comm.rank, comm.world_size).items():
        assert torch.equal(bytes_of(parts[name]), bytes_of(tensor)), name
    return [sum(part.nbytes for part in parts.values()), report.nbytes]


def newest_of(number: int) -> dict[str, torch.Tensor]:
    """Return the state that is published as a version."""
    state, generator = whole_state(11, torch.bfloat16), torch.Generator().manual_seed(11)
    for _ in range(number):
        changed_state(state, generator)
    return state


@pytest.mark.parametrize("at", ["directory", slow("s3")])
@pytest.mark.parametrize("count", [1, 3])
def test_without_a_cache_each_rank_reads_its_own_boxes(
    at: str, count: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = str(tmp_path / "updates") if at == "directory" else f"{request.getfixturevalue('s3')}/updates"
    with sx.Publisher(path) as publisher:
        for number in range(1, count + 1):
            publisher.publish(newest_of(number), number)
    for of_parts, read in run_ranks(read_where_it_lies, 2, backend="gloo", args=(path,)):
        assert read <= of_parts  # at a URL copies are read by one rank of a host


def test_names_dtype_and_selection_are_those_of_the_options(tmp_path: Path) -> None:
    state = {"layer.w": torch.randn(50, 3), "layer.b": torch.randn(50), "head.w": torch.randn(4)}
    rename = [("^layer\\.", "model.layers.0.")]
    options: dict[str, Any] = {"rename": rename, "dtype": torch.bfloat16, "exclude": "head.*"}
    with sx.Publisher(tmp_path / "updates", **options) as publisher:
        publisher.publish(state, 1)
        state["layer.b"][3] += 1.0
        report = publisher.publish(state, 2)
    assert (report.kind, report.changed, report.num_tensors) == ("delta", 1, 2)
    expected = {"model.layers.0.w": state["layer.w"].bfloat16(), "model.layers.0.b": state["layer.b"].bfloat16()}
    check_version(run_of(tmp_path / "updates"), 2, expected)


def test_a_rename_is_asked_once_for_each_full_version(tmp_path: Path) -> None:
    asked = []

    def rename(name: str) -> str:
        asked.append(name)
        return f"{name}.{len(asked)}"

    weights = {"w": torch.zeros(50)}
    with sx.Publisher(tmp_path / "updates", rename=rename) as publisher:
        publisher.publish(weights, 1)
        count = len(asked)
        weights["w"][2] = 1.0
        publisher.publish(weights, 2)
    assert len(asked) == count
    (name,) = sx.open_checkpoint(run_of(tmp_path / "updates") / "weight_v000001")
    check_version(run_of(tmp_path / "updates"), 2, {name: weights["w"]})


def test_a_layout_that_reduces_is_refused_before_anything_is_published(tmp_path: Path) -> None:
    publisher = sx.Publisher(tmp_path / "updates", layout={"*": {"reduce": "max"}})
    with pytest.raises(UnsupportedError, match="copies that are reduced"):
        publisher.publish({"w": torch.zeros(50)}, 1)
    assert list((tmp_path / "updates").glob("*/weight_v*")) == []


def test_a_delta_is_not_published_on_a_base_that_is_gone(tmp_path: Path) -> None:
    weights = {"w": torch.zeros(50)}
    with sx.Publisher(tmp_path / "updates") as publisher:
        publisher.publish(weights, 1)
        shutil.rmtree(run_of(tmp_path / "updates") / "weight_v000001")
        assert publisher.publish(weights, 2).kind == "full"


def failing_after_writing(path: str) -> None:
    """One rank fails when all has been written: there is no version, and its number is used again."""
    comm = sx.get_communicator()
    publisher = sx.Publisher(path)
    weights = {"w": torch.zeros(50)}
    kept = version_publishing.keep_boxes
    if comm.rank == 1:
        version_publishing.keep_boxes = lambda *_: (_ for _ in ()).throw(MemoryError("no memory"))
    try:
        with pytest.raises((MemoryError, PeerError), match="no memory"):
            publisher.publish(weights, 1)
    finally:
        version_publishing.keep_boxes = kept
    comm.barrier()
    assert list(Path(path).glob("*/weight_v*")) == []
    assert publisher.publish(weights, 1).kind == "full"


def test_a_failure_before_the_commit_leaves_no_version(tmp_path: Path) -> None:
    run_ranks(failing_after_writing, 2, backend="gloo", args=(str(tmp_path / "updates"),))
    assert len(list((tmp_path / "updates" / "runs").iterdir())) == 1


def test_a_change_below_the_published_dtype_is_no_change(tmp_path: Path) -> None:
    weights = {"w": torch.ones(1000)}
    with sx.Publisher(tmp_path / "updates", dtype=torch.bfloat16) as publisher:
        publisher.publish(weights, 1)
        weights["w"] += 1e-6
        report = publisher.publish(weights, 2)
    assert (report.kind, report.changed, report.nbytes) == ("delta", 0, 0)
    check_version(run_of(tmp_path / "updates"), 2, {"w": torch.ones(1000, dtype=torch.bfloat16)})
    index = run_of(tmp_path / "updates") / "weight_v000002"
    assert sorted(file.name for file in index.iterdir()) == ["model.safetensors.index.json", "statexchange.json"]


@pytest.mark.parametrize("change", ["new tensor", "shape", "dtype", "lost tensor"])
def test_other_tensors_make_a_full_version(tmp_path: Path, change: str) -> None:
    state = {"w": torch.randn(10, 3), "b": torch.randn(5)}
    with sx.Publisher(tmp_path / "updates") as publisher:
        publisher.publish(state, 1)
        if change == "new tensor":
            state["c"] = torch.randn(2)
        elif change == "shape":
            state["b"] = torch.randn(6)
        elif change == "dtype":
            state["b"] = state["b"].double()
        else:
            del state["b"]
        assert publisher.publish(state, 2).kind == "full"
        assert publisher.publish(state, 3).kind == "delta"
    check_version(run_of(tmp_path / "updates"), 3, state)


def test_a_delta_that_is_too_large_becomes_a_full_version(tmp_path: Path) -> None:
    state = {"w": torch.randn(100_000)}
    with sx.Publisher(tmp_path / "updates", max_delta=0.3) as publisher:
        publisher.publish(state, 1)
        state["w"].normal_()
        assert publisher.publish(state, 2).kind == "full"
        state["w"][5] = 1.0
        assert publisher.publish(state, 3).kind == "delta"
    check_version(run_of(tmp_path / "updates"), 3, state)


def test_tied_tensors_are_written_once(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"embed": torch.nn.Linear(4, 6, bias=False), "head": torch.nn.Linear(4, 6, bias=False)})
    model["head"].weight = model["embed"].weight
    with sx.Publisher(tmp_path / "updates") as publisher:
        publisher.publish(model, 1)
        with torch.no_grad():
            model["embed"].weight[2] = 7.0
        publisher.publish(model, 2)
    live = {"embed.weight": torch.zeros(6, 4), "head.weight": torch.zeros(6, 4)}
    with sx.Subscriber(tmp_path / "updates") as subscriber, subscriber.stage(subscriber.wait()) as staged:
        staged.load_into(live)
    assert torch.equal(live["head.weight"], model["embed"].weight)
    assert torch.equal(live["embed.weight"], model["embed"].weight)


def differing_copies(path: str) -> list[str]:
    """Publish equal copies, then copies of which one rank's differs, then equal ones again."""
    comm = sx.get_communicator()
    weights = {"w": torch.ones(100)}
    publisher = sx.Publisher(path)
    kinds = [publisher.publish(weights, 1).kind]
    weights["w"][3] += comm.rank
    with pytest.raises(ReplicaError, match=r"hold different values"):
        publisher.publish(weights, 2)
    weights["w"][3] = 5.0
    kinds.append(publisher.publish(weights, 2).kind)
    kinds.append(publisher.publish(weights, 3).kind)
    return kinds


def test_after_a_failure_the_next_version_is_full(tmp_path: Path) -> None:
    path = tmp_path / "updates"
    assert run_ranks(differing_copies, 2, args=(str(path),)) == [["full", "full", "delta"]] * 2
    check_version(run_of(path), 3, {"w": torch.ones(100).index_fill(0, torch.tensor([3]), 5.0)})


def test_versions_of_a_run_follow_one_another(tmp_path: Path) -> None:
    publisher = sx.Publisher(tmp_path / "updates")
    weights = {"w": torch.ones(3)}
    publisher.publish(weights, 5)
    with pytest.raises(InvalidArgumentError, match="version 6 has not been"):
        publisher.publish(weights, 7)
    with pytest.raises(InvalidArgumentError, match="a whole number"):
        publisher.publish(weights, 1.5)  # type: ignore[call-overload]
    publisher.publish(weights, 6)


def other_numbers(path: str) -> None:
    comm = sx.get_communicator()
    with pytest.raises(InvalidArgumentError, match="version is 1 on rank 0"):
        sx.Publisher(path).publish({"w": torch.ones(3)}, 1 + comm.rank)


def test_ranks_must_give_one_number(tmp_path: Path) -> None:
    run_ranks(other_numbers, 2, args=(str(tmp_path / "updates"),))


def test_a_second_trainer_ends_the_first(tmp_path: Path) -> None:
    weights = {"w": torch.ones(3)}
    first, second = sx.Publisher(tmp_path / "updates"), sx.Publisher(tmp_path / "updates")
    first.publish(weights, 1)
    second.publish(weights, 1)
    with pytest.raises(TargetExistsError, match="another trainer has begun"):
        first.publish(weights, 2)
    second.publish(weights, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 0}, "keep must be"),
        ({"max_delta": 2}, "max_delta must be"),
        ({"frames": "few"}, "frames must be"),
        ({"path": "s3://"}, "names no bucket"),
    ],
)
def test_options_are_checked(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        sx.Publisher(**{"path": tmp_path / "updates", **options})


def test_a_wait_without_a_version_says_how_old_the_last_one_is(tmp_path: Path) -> None:
    with sx.Subscriber(tmp_path / "updates") as subscriber:
        with pytest.raises(StallError, match="does not exist yet"):
            subscriber.wait(timeout_s=0.1)
        sx.Publisher(tmp_path / "updates").publish({"w": torch.ones(3)}, 4)
        version = subscriber.wait(timeout_s=0)
        with pytest.raises(StallError, match=r"is 0\.0 min old"):
            subscriber.wait(newer_than=version, timeout_s=0)


def publish_random(path: str, seed: int) -> None:
    """Publish some versions of a random state by random options, and check each by both readers."""
    comm = sx.get_communicator()
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    dtype = [torch.bfloat16, torch.float32, torch.float8_e4m3fn][int(rng.integers(3))]
    state, dims = {}, {}
    for index in range(int(rng.integers(1, 6))):
        shape = [int(size) for size in rng.integers(0, 30, int(rng.integers(0, 4)))]
        name = f"t{index}"
        if shape and rng.random() < 0.7:
            dims[name] = int(rng.integers(len(shape)))
            shape[dims[name]] = max(shape[dims[name]], comm.world_size)
        state[name] = torch.randn(shape, generator=generator).to(dtype)
    frames: Any = ["many", "one"][int(rng.integers(2))]
    options: dict[str, Any] = {"frames": frames, "full_every": int(rng.integers(1, 6)), "keep": int(rng.integers(1, 4))}
    layout = {name: {"dim": dim} for name, dim in dims.items()}
    with sx.Publisher(path, layout=layout or None, max_delta=1.0, **options) as publisher:
        for number in range(int(rng.integers(2, 7))):
            for tensor in state.values():
                if tensor.numel() and rng.random() < 0.6:
                    bits = tensor.view(torch.uint8) if tensor.ndim else tensor.reshape(1).view(torch.uint8)
                    places = torch.randint(0, bits.numel(), (int(rng.integers(1, 9)),), generator=generator)
                    bits.view(-1)[places] ^= 1
            parts = {}
            for name, tensor in state.items():
                whole = tensor.clone()
                if name in dims:
                    whole = whole.tensor_split(comm.world_size, dims[name])[comm.rank].contiguous()
                parts[name] = whole
            publisher.publish(parts, number)
            if comm.rank == 0:
                check_version(run_of(path), number, state, one_frame=frames == "one")
            comm.barrier()


@pytest.mark.parametrize("first", [0, *(slow(first) for first in range(200, 1000, 200))])
def test_random_chains_have_the_published_bytes(tmp_path: Path, first: int) -> None:
    """A few by default, and all 1,000 under `slow`."""
    for seed in range(first, first + (200 if first else 6)):
        run_ranks(publish_random, 1 + seed % 4, args=(str(tmp_path / f"updates-{seed}"), seed))


@pytest.mark.slow
def test_the_engines_of_the_page_have_what_the_trainer_has(tmp_path: Path) -> None:
    done = run_script(with_torchrun(5), "rollouts.py", page_block("block: rollouts.py"), tmp_path)
    digests: dict[str, set[str]] = {}
    last = []
    for line in done.stdout.splitlines():
        _, number, digest, who = line.split(maxsplit=3)
        digests.setdefault(number, set()).add(digest)
        if number == "30":
            last.append(who)
    assert sorted(last) == ["engine on 1", "engine on 2", "engine on 2", "trainer", "trainer"]
    assert len(digests) == 30
    assert all(len(of_version) == 1 for of_version in digests.values())
    assert len(set().union(*digests.values())) == 30
