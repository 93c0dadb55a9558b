"""TRL's SFTTrainer with the Trainer and the callback of this package, as docs/how-to/trainer.md describes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from equality import assert_same

pytestmark = pytest.mark.slow

SCRIPT = """
import json, sys
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer
import statexchange as sx

class SavingTrainer(sx.integrations.CheckpointsTrainer, SFTTrainer):
    pass

class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step == int(sys.argv[1])

torch.manual_seed(0)
config = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4)
config.attention_dropout = 0.1
words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(50)}, "w0"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")
rows = Dataset.from_list([{"input_ids": row} for row in torch.randint(50, (32, 16)).tolist()])
args = SFTConfig("run", max_steps=6, save_steps=2, logging_steps=1, use_cpu=True, bf16=False, report_to="none")
with sx.Checkpoints("saves") as saves:
    trainer = SavingTrainer(
        LlamaForCausalLM(config), args, train_dataset=rows, processing_class=tokenizer, saves=saves,
        callbacks=[Stop(), sx.integrations.ExportCallback("exports")],
    )
    trainer.train(resume_from_checkpoint=True)
    with open("losses.json", "w") as file:
        json.dump([entry["loss"] for entry in trainer.state.log_history if "loss" in entry], file)
"""


def train(folder: Path, stop: int) -> list[float]:
    command = [sys.executable, "-c", SCRIPT, str(stop)]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    losses: list[float] = json.loads((folder / "losses.json").read_text())
    return losses


def exported(folder: Path) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / "exports/checkpoint-6").state_dict()


def test_an_sft_trainer_resumes_bit_by_bit_and_exports(tmp_path: Path) -> None:
    for package in ("trl", "datasets"):
        if find_spec(package) is None:
            pytest.skip(f'no framework: {package}: pip install ".[frameworks]"')
    once, twice = tmp_path / "once", tmp_path / "twice"
    once.mkdir()
    twice.mkdir()
    expected = train(once, 6)
    assert train(twice, 4) == expected[:4]
    assert train(twice, 6) == expected
    assert_same(exported(twice), exported(once))
