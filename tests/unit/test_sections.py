"""Sections of a job's state: the model is chosen only where it is certain which part that is."""

from pathlib import Path
from typing import Any

import pytest
import torch
from commands import CommandLine
from safetensors.torch import load_file

import statexchange as sx
from statexchange.checkpoint.merge import merge_checkpoint
from statexchange.errors import CorruptError, IncompleteError, InvalidArgumentError
from statexchange.formats.registry import open_source
from statexchange.report.scan import scan
from statexchange.report.summary import summarize


def one() -> torch.Tensor:
    return torch.ones(1)


MOMENTS = {"state": {0: {"exp_avg": one()}}, "param_groups": [{"lr": 0.5}]}


def sections(path: Path) -> dict[str, int]:
    return {name: section.num_tensors for name, section in summarize(path).sections.items()}


def merged(path: Path, **options: Any) -> set[str]:
    out = path.parent / f"{path.name}-{options.get('section')}"
    merge_checkpoint(path, out, **options)
    return set(load_file(out / "model.safetensors"))


STATES: dict[str, tuple[dict[str, Any], dict[str, int], set[str]]] = {
    "keyed": (
        {"model": {"w": one()}, "optimizer": MOMENTS, "lr_scheduler": {"last": 1}, "rng_state": one(), "step": 3},
        {"model": 1, "optimizer": 1, "rng": 1},
        {"w"},
    ),
    "lightning": (
        {"state_dict": {"w": one()}, "optimizer_states": [MOMENTS], "epoch": 1, "loops": {}},
        {"model": 1, "optimizer": 1},
        {"w"},
    ),
    "an average": ({"model": {"w": one()}, "ema": {"w": one()}, "step": 3}, {"model": 1, "ema": 1}, {"w"}),
    "no key": (
        {"layers": {"0": one()}, "model": {"norm": one()}, "optimizer": MOMENTS},
        {"model": 2, "optimizer": 1},
        {"layers.0", "model.norm"},
    ),
    "several optimizers": (
        {"model": {"w": one()}, "optimizer_0": MOMENTS, "optimizer_1": MOMENTS},
        {"model": 1, "optimizer": 2},
        {"w"},
    ),
    "keys of its own": ({"net": {"w": one()}, "mine": MOMENTS}, {"model": 1, "optimizer": 1}, {"net.w"}),
    "one level down": ({"app": {"model": {"w": one()}, "optimizers": MOMENTS}}, {"model": 1, "optimizer": 1}, {"w"}),
    "any key above": ({"job": {"state_dict": {"w": one()}, "o": MOMENTS}}, {"model": 1, "optimizer": 1}, {"w"}),
    "a module called state": ({"net": {"state": {"w": one()}}}, {}, {"net.state.w"}),
    "only a model": ({"model": {"w": one()}, "lm_head": {"w": one()}}, {}, {"model.w", "lm_head.w"}),
    "a model with a module called scaler": (
        {"model": {"w": one()}, "scaler": {"mean": one()}},
        {},
        {"model.w", "scaler.mean"},
    ),
    "a model with a module called optimizer": ({"w": one(), "optimizer": {"w": one()}}, {}, {"w", "optimizer.w"}),
}


@pytest.mark.parametrize("kind", STATES)
def test_the_model_is_merged_where_it_is_certain_what_it_is(tmp_path: Path, kind: str) -> None:
    state, found, names = STATES[kind]
    torch.save(state, tmp_path / "state.pt")
    assert {name: number for name, number in sections(tmp_path / "state.pt").items() if number} == found
    assert merged(tmp_path / "state.pt") == names


def test_a_save_has_the_sections_of_its_state(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    sx.save_checkpoint({"model": model, "step": 7}, tmp_path / "save")
    assert sections(tmp_path / "save") == {"model": 2, "other": 0}
    assert merged(tmp_path / "save") == {"weight", "bias"}
    assert merged(tmp_path / "save", section="all") == {"model.weight", "model.bias"}


def test_a_save_with_an_optimizers_own_state_dict_has_its_section(tmp_path: Path) -> None:
    sx.save_checkpoint({"model": {"w": one()}, "optimizer": MOMENTS}, tmp_path / "save")
    assert sections(tmp_path / "save") == {"model": 1, "optimizer": 1}
    assert merged(tmp_path / "save") == {"w"}
    sx.save_checkpoint(MOMENTS, tmp_path / "optimizer")
    assert sections(tmp_path / "optimizer") == {"optimizer": 1}
    with pytest.raises(InvalidArgumentError, match="optimizer"):
        merged(tmp_path / "optimizer")


def test_optimizers_in_a_list_of_a_save_are_not_of_the_model(tmp_path: Path) -> None:
    state = {"model": {"w": one()}, "optimizers": [MOMENTS, MOMENTS], "step": 7}
    sx.save_checkpoint(state, tmp_path / "save")
    assert sections(tmp_path / "save") == {"model": 1, "optimizer": 2, "other": 0}
    assert merged(tmp_path / "save") == {"w"}


def test_an_optimizers_own_state_dict_by_qualified_names_has_no_model(tmp_path: Path) -> None:
    torch.save({"state": {"layers.w": {"exp_avg": one()}}, "param_groups": [{"lr": 0.5}]}, tmp_path / "moments.pt")
    with pytest.raises(InvalidArgumentError, match="'model', only 'optimizer'"):
        merged(tmp_path / "moments.pt")


def test_options_apply_to_the_names_without_the_prefix(tmp_path: Path) -> None:
    torch.save({"model": {"a": one(), "b": one()}, "optimizer": MOMENTS}, tmp_path / "state.pt")
    report = merge_checkpoint(
        tmp_path / "state.pt", tmp_path / "out", section="model", include="a", rename=[("a", "c")]
    )
    assert load_file(tmp_path / "out/model.safetensors").keys() == {"c"}
    (note,) = report.notes
    assert note.startswith("only the section 'model' is read, not 'optimizer'; its prefix 'model.' is removed (all:")
    assert merged(tmp_path / "state.pt", section="optimizer") == {"state.0.exp_avg"}


@pytest.mark.parametrize(
    "patterns", [{"include": "model.*"}, {"exclude": "optimizer.*"}, {"rename": [("^model[.]", "model.")]}]
)
def test_patterns_without_a_section_match_the_full_names(tmp_path: Path, patterns: dict[str, Any]) -> None:
    torch.save({"model": {"model": {"w": one()}, "head": one()}, "optimizer": MOMENTS}, tmp_path / "state.pt")
    assert {"model.model.w", "model.head"} <= merged(tmp_path / "state.pt", **patterns)


def test_a_section_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    torch.save(MOMENTS, tmp_path / "moments.pt")
    with pytest.raises(InvalidArgumentError, match="'model', only 'optimizer'"):
        merge_checkpoint(tmp_path / "moments.pt", tmp_path / "out")
    with pytest.raises(InvalidArgumentError, match=r"section must.*'weights'"):
        merge_checkpoint(tmp_path / "moments.pt", tmp_path / "out", section="weights")  # type: ignore[arg-type]
    torch.save({"w": one()}, tmp_path / "w.pt")
    with pytest.raises(InvalidArgumentError, match=r"'optimizer'.*--section all"):
        merge_checkpoint(tmp_path / "w.pt", tmp_path / "out", section="optimizer")
    assert not (tmp_path / "out").exists()


def test_a_broken_file_of_another_section_does_not_count(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import FileSystemWriter, save

    (tmp_path / "both").mkdir()
    torch.save({"model": {"w": one()}, "step": 1}, tmp_path / "both/rank0.pt")
    torch.save({"optimizer": MOMENTS}, tmp_path / "both/rank1.pt")
    (tmp_path / "both/rank1.pt").write_bytes((tmp_path / "both/rank1.pt").read_bytes()[:-100])
    with pytest.raises(CorruptError):  # the content of a file that cannot be read is unknown
        merge_checkpoint(tmp_path / "both", tmp_path / "out")

    state = {"model": {"w": one()}, "optimizer": {"state": {"w": {"exp_avg": one()}}}}
    with pytest.warns(UserWarning, match="single process"):
        save(state, storage_writer=FileSystemWriter(tmp_path / "dcp", single_file_per_rank=False))
    with open_source(tmp_path / "dcp") as source:
        paths = {tensor.shard.name: shard_file.path for shard_file, tensor in source.shards()}
    Path(paths["optimizer.state.w.exp_avg"]).unlink()
    assert merged(tmp_path / "dcp") == {"w"}
    with pytest.raises(IncompleteError, match=r"a file .*missing"):
        merged(tmp_path / "dcp", section="optimizer")


def test_a_section_without_tensors_is_not_merged_to_nothing(tmp_path: Path, call: CommandLine) -> None:
    torch.save({"model": {"w": one()}, "lr_scheduler": {"last": 1}, "step": 3}, tmp_path / "state.pt")
    code, _, err = call("merge", tmp_path / "state.pt", tmp_path / "out", "--section", "scheduler")
    text = "there is nothing to merge: the section 'scheduler' has no tensor, only last (int 1), which a merge does not"
    assert (code, text in err) == (2, True)
    assert not (tmp_path / "out").exists()
    torch.save({"step": 3}, tmp_path / "step.pt")
    with pytest.raises(InvalidArgumentError, match="nothing to merge"):
        merge_checkpoint(tmp_path / "step.pt", tmp_path / "out", section="all")


def test_the_command_line_shows_and_takes_sections(tmp_path: Path, call: CommandLine) -> None:
    torch.save({"model": {"w": one()}, "optimizer": MOMENTS, "step": 1}, tmp_path / "state.pt")
    state = tmp_path / "state.pt"
    code, out, _ = call("info", state)
    assert (code, "sections    model 1 (4 B), optimizer 1 (4 B)\n" in out) == (0, True)
    code, envelope = call.json("info", state)
    assert (code, envelope["data"]["sections"]["model"]) == (0, {"num_tensors": 1, "nbytes": 4})
    assert call("merge", state, tmp_path / "out", "--section", "optimizer")[0] == 0
    assert load_file(tmp_path / "out/model.safetensors").keys() == {"state.0.exp_avg"}


def test_parameters_are_those_of_the_model(tmp_path: Path, call: CommandLine) -> None:
    model = {"w": torch.ones(3, 5), "b": torch.ones(3)}
    (tmp_path / "job").mkdir()
    torch.save({"model": model, "optimizer": MOMENTS, "step": 7}, tmp_path / "job" / "state.pt")
    torch.save(model, tmp_path / "model.pt")
    torch.save(MOMENTS, tmp_path / "moments.pt")
    counts = {"job": "18 in the section model", "model.pt": "18", "moments.pt": "0 of the model, as no section is one"}
    for name, text in counts.items():
        assert f"\nparameters  {text}\n" in call("info", tmp_path / name)[1]
        assert summarize(tmp_path / name).num_parameters == int(text.partition(" ")[0].rstrip(","))
    assert [row.num_parameters for row in scan(tmp_path / "job")] == [18]
