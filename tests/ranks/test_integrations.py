"""Trainings of other frameworks, killed and started again: they end as if they had not been killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import assert_same
from safetensors.torch import load_file
from scripts import ALONE, page_block, run_script, warm_command, with_torchrun
from sweeps import slow
from tiny_models import llama_of_pages

import statexchange as sx

# Put before the Trainer is made: kills rank 0 once, after a step that was not saved.
KILLS = """
import os, signal
from transformers import TrainerCallback

class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5 and state.is_world_process_zero and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)

"""
WRITES = """
if trainer.is_world_process_zero():
    import json
    with open("history.json", "w") as file:
        json.dump(trainer.state.log_history, file)
sx.export_checkpoint(model, "last")
"""
SHARDED = {
    "model = LlamaForCausalLM(config)": "from transformers.distributed import DistributedConfig\n"
    "model = LlamaForCausalLM.from_pretrained('start', config=config, "
    "distributed_config=DistributedConfig(fsdp_size=2))\n"
    "assert type(model.lm_head.weight).__name__ == 'DTensor'",
    "save_steps=2,": "save_steps=2, save_only_model=True,",
}


def script_of_page(*, kills: bool, replace: dict[str, str] | None = None) -> str:
    """Return the script of the page, with changes, that also writes what it has trained."""
    script = page_block("block: fit_trainer.py")
    changes = dict(replace or {})
    if kills:
        changes |= {"args = Train": f"{KILLS}args = Train", "saves=saves)": "saves=saves, callbacks=[Kill()])"}
    for old, new in changes.items():
        assert script.count(old) == 1, old
        script = script.replace(old, new)
    return script + WRITES


def run_until_killed(launcher: tuple[str, ...], name: str, script: str, folder: Path) -> None:
    (folder / name).write_text(script)
    command, environ = warm_command(launcher, script)
    done = subprocess.run([*command, name], cwd=folder, env=environ, capture_output=True, timeout=100)
    assert done.returncode != 0


def training_in(folder: Path) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Return number, epoch, loss and learning rate of each step, and the weights."""
    history = json.loads((folder / "history.json").read_text())
    steps = [[entry[key] for key in ("step", "epoch", "loss", "learning_rate")] for entry in history if "loss" in entry]
    return steps, load_file(folder / "last/model.safetensors")


@pytest.mark.parametrize("way", [slow("ddp"), slow("fsdp2"), "alone"])
def test_a_killed_trainer_goes_on_as_if_it_had_not_been_killed(way: str, tmp_path: Path) -> None:
    launcher = ALONE if way == "alone" else with_torchrun(2)
    replace = SHARDED if way == "fsdp2" else None
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        torch.manual_seed(0)
        llama_of_pages().save_pretrained(tmp_path / name / "start")
    run_script(launcher, "fit_trainer.py", script_of_page(kills=False, replace=replace), tmp_path / "whole")
    script = script_of_page(kills=True, replace=replace)
    run_until_killed(launcher, "fit_trainer.py", script, tmp_path / "killed")
    assert sx.Checkpoints(tmp_path / "killed/saves").steps() == [2, 4]
    run_script(launcher, "fit_trainer.py", script, tmp_path / "killed")
    assert sx.Checkpoints(tmp_path / "killed/saves").steps() == [4, 6]
    assert not list((tmp_path / "killed/run").glob("checkpoint-*"))
    expected, found = training_in(tmp_path / "whole"), training_in(tmp_path / "killed")
    assert len(expected[0]) == 6
    assert found[0] == expected[0]
    assert_same(found[1], expected[1])


@pytest.mark.slow
def test_a_trainer_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    evaluates = {
        "save_steps=2,": "save_steps=2, eval_strategy='steps', eval_steps=2,",
        "train_dataset=rows": "train_dataset=rows, eval_dataset=rows",
    }
    script = script_of_page(kills=True, replace=evaluates)
    run_until_killed(with_torchrun(2), "fit_trainer.py", script, tmp_path)
    done = run_script(ALONE, "fit_trainer.py", script, tmp_path)
    assert "the save was made on 2 ranks and this job has 1: random states are not restored" in done.stderr
    steps, _ = training_in(tmp_path)
    assert [step for step, *_ in steps] == [1, 2, 3, 4, 5, 6]


def test_an_option_that_no_export_has_is_refused_before_the_training() -> None:
    for wrong in ("dtpye", "state"):
        with pytest.raises(sx.errors.InvalidArgumentError, match=f"option '{wrong}'"):
            sx.integrations.ExportCallback("exports", **{wrong: "bfloat16"})


def arguments(folder: Path, **given: Any) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(str(folder / "run"), use_cpu=True, report_to="none", disable_tqdm=True, **given)


def random_rows(count: int = 8) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": row, "labels": row} for row in torch.randint(50, (count, 16))]


def test_a_trainers_metrics_keep_the_best_save_and_a_signal_ends_it(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    class Signal(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 5:
                os.kill(os.getpid(), signal.SIGUSR1)

    args = arguments(tmp_path, max_steps=9, save_strategy="no", eval_strategy="steps", eval_steps=2)
    kept = {"keep": 1, "best": ("eval_loss", "min"), "on_signal": "SIGUSR1", "every_steps": 2, "agree_every": 2}
    with sx.Checkpoints(tmp_path / "saves", **kept) as saves:
        model = llama_of_pages()
        trainer = sx.integrations.CheckpointsTrainer(
            model,
            args,
            train_dataset=random_rows(32),
            eval_dataset=random_rows(),
            saves=saves,
            callbacks=[Signal()],
            background=True,
        )
        assert trainer.train(resume_from_checkpoint=True).global_step == 6
        assert saves.is_stopping
    losses = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    assert list(losses) == [2, 4, 6]
    assert saves.steps() == sorted({6, min(losses, key=lambda step: losses[step])})
    found: dict[str, Any] = {"trainer": {}}
    sx.load_checkpoint(found, tmp_path / "saves/step-000000006", include="trainer.*")
    assert found["trainer"]["global_step"] == 6


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"save_total_limit": 2}, "keep"),
        ({"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 500}, "best"),
    ],
    ids=["save_total_limit", "load_best_model_at_end"],
)
def test_a_trainer_refuses_what_its_saves_do_not_have(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    saves = sx.Checkpoints(tmp_path / "saves")
    with pytest.raises(sx.errors.UnsupportedError, match=f"{message}="):
        sx.integrations.CheckpointsTrainer(
            llama_of_pages(), arguments(tmp_path, **given), eval_dataset=random_rows(), saves=saves
        )


def test_a_trainer_refuses_a_save_of_another_loop(tmp_path: Path) -> None:
    saves = sx.Checkpoints(tmp_path / "saves")
    model = llama_of_pages()
    saves.save({"model": model}, 3)
    trainer = sx.integrations.CheckpointsTrainer(model, arguments(tmp_path), train_dataset=random_rows(), saves=saves)
    with pytest.raises(sx.errors.NotFoundError, match="CheckpointsTrainer"):
        trainer.train(resume_from_checkpoint=True)


def test_a_path_as_saves_of_a_trainer_makes_checkpoints_there(tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=2, save_steps=2)
    for path in (str(tmp_path / "text"), tmp_path / "path"):
        trainer = sx.integrations.CheckpointsTrainer(llama_of_pages(), args, train_dataset=random_rows(), saves=path)
        trainer.train(resume_from_checkpoint=True)
        assert trainer.saves.steps() == sx.Checkpoints(path).steps() == [2]
    with pytest.raises(sx.errors.InvalidArgumentError):
        sx.integrations.CheckpointsTrainer(llama_of_pages(), args, saves=None)


@pytest.mark.parametrize("exclude", [(), "model.model.embed_tokens.*"], ids=["linked", "left out"])
def test_a_trainer_writes_what_does_not_train_once_or_never(exclude: Any, tmp_path: Path) -> None:
    def train(folder: str, steps: int) -> Any:
        torch.manual_seed(5)
        model = llama_of_pages()
        model.model.embed_tokens.requires_grad_(requires_grad=False)
        saves = sx.Checkpoints(tmp_path / folder, keep=None, exclude=exclude)
        args = arguments(tmp_path, max_steps=steps, save_steps=2, lr_scheduler_type="constant")
        trainer = sx.integrations.CheckpointsTrainer(model, args, train_dataset=random_rows(32), saves=saves)
        trainer.train(resume_from_checkpoint=True)
        return model.state_dict()

    train("saves", 4)
    first, second = (set(os.listdir(tmp_path / "saves" / f"step-00000000{step}")) for step in (2, 4))
    assert first == second
    linked = [file.stat().st_nlink for file in (tmp_path / "saves").rglob("*.frozen-*")]
    assert linked == ([] if exclude else [2, 2])
    resumed, whole = train("saves", 6), train("another", 6)
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name]), name


# Instead of printing the loss: notes it for each rank, and kills rank 0 once, after a step that was not saved.
NOTES = """            import os
            with open(f"rank{accelerator.process_index}.txt", "a") as file:
                file.write(f"{state['step']} {loss.item()!r}\\n")
            if KILLS and state["step"] == 7 and accelerator.is_main_process and not os.path.exists("killed"):
                open("killed", "w").close()
                os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(("launcher", "ranks"), [slow(with_torchrun(2), 2), (ALONE, 1)], ids=["torchrun", "alone"])
def test_a_killed_accelerate_loop_goes_on_as_if_it_had_not_been_killed(
    launcher: tuple[str, ...], ranks: int, tmp_path: Path
) -> None:
    script = page_block("block: loop.py")
    (line,) = re.findall(r"^ +accelerator\.print\(.*\n", script, re.MULTILINE)
    script = script.replace(line, NOTES)
    found = {}
    for name in ("whole", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        text = f"KILLS = {name == 'killed'}\n{script}"
        if name == "killed":
            run_until_killed(launcher, "loop.py", text, folder)
            assert sx.Checkpoints(folder / "loop-saves").latest() == 4
        run_script(launcher, "loop.py", text, folder)
        files = [folder / f"rank{rank}.txt" for rank in range(ranks)]
        found[name] = [[line.split() for line in file.read_text().splitlines()] for file in files]
    for whole, resumed in zip(found["whole"], found["killed"], strict=True):
        assert [int(step) for step, _ in whole] == [*range(1, len(whole) + 1)]
        again = next(at for at, (step, _) in enumerate(resumed) if step == "5" and at >= 5)
        assert [*resumed[:4], *resumed[again:]] == whole


def test_a_second_training_from_the_start_does_not_pass_over_a_save_of_the_first(tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=2, save_steps=2)
    saves = sx.Checkpoints(tmp_path / "saves")
    trainer = sx.integrations.CheckpointsTrainer(llama_of_pages(), args, train_dataset=random_rows(), saves=saves)
    trainer.train()
    with pytest.raises(sx.errors.TargetExistsError, match="step-000000002"):
        trainer.train()
