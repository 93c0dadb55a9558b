"""`statexchange demo`: the job that it trains, kills and resumes, and the directory that it exports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import HOME, page_block, run_commands

from statexchange.demo import DemoReport, run_demo
from statexchange.errors import MissingExtraError, TargetExistsError


def _check(report: DemoReport, first_world_size: int, steps: int) -> None:
    world_size = min(first_world_size, 2)
    assert report.ok
    assert report.mismatches == ()
    assert report.tensors_equal == report.tensors_total == 30
    assert report.world_size == report.mesh[0] * report.mesh[1] == world_size
    assert report.first_world_size == report.first_mesh[0] * report.first_mesh[1] == first_world_size
    assert len(report.losses) == report.resumed_step + len(report.step_seconds) == steps
    assert report.resumed_step == steps // 2
    assert report.resumed_step < len(report.first_losses) or len(report.first_losses) == steps - 1
    repeated = zip(report.first_losses[report.resumed_step :], report.losses[report.resumed_step :], strict=False)
    assert all(abs(one - other) < 1e-4 for one, other in repeated), "it does not go on where the killed job was"
    assert report.losses[-1] < report.losses[0]
    assert report.model_bytes == report.export_bytes == sum(report.rank_bytes) == 4 * report.parameters
    assert len(report.shard_bytes) == len(report.rank_bytes) == world_size
    assert report.root_peak_bytes > report.model_bytes
    assert report.prompt
    assert report.text
    assert all(char.isprintable() or char == "\n" for char in report.text)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[DemoReport, list[dict[str, object]]]:
    events: list[dict[str, object]] = []
    keep = tmp_path_factory.mktemp("demo")
    return run_demo(4, keep=os.fspath(keep), steps=6, on_progress=events.append), events


@pytest.mark.slow
def test_four_ranks_train_are_killed_and_two_go_on(kept: tuple[DemoReport, list[dict[str, object]]]) -> None:
    report, events = kept
    _check(report, 4, 6)
    assert (report.first_mesh, report.mesh) == ((2, 2), (1, 2))
    first, second = ["train"] * 4 + ["killed"], ["resumed"] + ["train"] * 3 + ["export", "load"]
    assert [event["phase"] for event in events] == first + second
    assert [event["loss"] for event in events[:4]] == list(report.first_losses)
    assert [event["loss"] for event in events[6:9]] == list(report.losses[3:])
    assert report.path == events[-1]["path"]
    assert {"config.json", "model.safetensors", "statexchange.json"} <= dict(report.files).keys()
    assert all((Path(report.path) / name).stat().st_size == size for name, size in report.files)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_existing_target_is_refused_before_the_training(demo: tuple[Path, str]) -> None:
    path = demo[0] / "merged"
    before = sorted(os.listdir(path))
    with pytest.raises(TargetExistsError) as raised:
        run_demo(4, keep=os.fspath(demo[0]))
    assert raised.value.path == os.fspath(path)
    assert sorted(os.listdir(path)) == before


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_pictures_of_the_docs_are_those_of_the_demos_checkpoint(demo: tuple[Path, str], tmp_path: Path) -> None:
    """Run the commands of the page; the first one, the demo itself, has run."""
    first, *commands = page_block("commands: pictures").splitlines(keepends=True)
    assert first == "$ statexchange demo --keep demo\n"
    (tmp_path / "demo").symlink_to(demo[0])
    (tmp_path / "docs/pictures").mkdir(parents=True)
    run_commands("".join(commands), tmp_path)
    made = sorted((tmp_path / "docs/pictures").iterdir())
    assert [path.name for path in made] == ["parameters.svg", "supply.svg"]
    for path in made:
        assert path.read_text() == (HOME / "docs/pictures" / path.name).read_text(), "run the page's commands"
    assert made[1].read_text() == (demo[0] / "supply.svg").read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_transformers_loads_the_export_and_gives_the_same_logits(demo: tuple[Path, str]) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from statexchange.demo_model import Llama, LlamaConfig, byte_tokens

    path = demo[0] / "merged"
    theirs, loading = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(loading.values()), loading
    ours = Llama(LlamaConfig())
    ours.load_state_dict(load_file(path / "model.safetensors"))
    tokens = byte_tokens(b"An assignment statement evaluates the expression list.")[None]
    with torch.no_grad():
        expected, found = ours(tokens), theirs(tokens).logits
    assert type(theirs).__name__ == "LlamaForCausalLM"
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.slow
@pytest.mark.ranks(4, backend="gloo")
def test_one_altered_bit_is_found(tmp_path: Path) -> None:
    import torch
    import torch.distributed as dist
    from safetensors.torch import save_file

    from statexchange.demo_model import LlamaConfig, shard_model
    from statexchange.demo_ranks import _mesh, _mismatches

    name = "model.layers.1.mlp.up_proj.weight"
    state = shard_model(LlamaConfig(num_hidden_layers=2), _mesh()).state_dict()
    whole = {key: tensor.full_tensor() for key, tensor in state.items()}
    whole[name].view(torch.int32)[-1, -1] ^= 1
    del whole["lm_head.weight"]
    if dist.get_rank() == 0:
        save_file(whole, tmp_path / "model.safetensors")
    dist.barrier()
    assert list(_mismatches(state, os.fspath(tmp_path))) == [name, "lm_head.weight"]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 3])
def test_one_and_three_ranks_train_and_go_on(world_size: int) -> None:
    report = run_demo(world_size, steps=2)
    _check(report, world_size, 2)
    assert report.first_mesh == (world_size, 1)
    assert report.path is None


def test_importing_the_demo_imports_no_torch() -> None:
    code = "import sys, statexchange.demo; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_torch_the_demo_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match=r'pip install "statexchange\[torch\]"'):
        run_demo(2, keep=os.fspath(tmp_path / "kept"))
    assert not (tmp_path / "kept").exists()
