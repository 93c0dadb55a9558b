"""Write checkpoints of transformers.Trainer on a CPU: torchrun --nproc-per-node N trainer_write.py OUT KIND.

KIND is plain (data parallel, or one process), sharded or full (FSDP2, by accelerate). OUT/checkpoint-N are Trainer's,
OUT/expected.safetensors is the model after the last one, gathered by torch.
"""

import sys

import torch
from safetensors.torch import save_file
from sharding_on_cpu import allow_sharding
from tiny_model import TinyModel, rows
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import Trainer, TrainingArguments


def main(out, kind):
    options = {}
    if kind != "plain":
        allow_sharding()
        options["fsdp"] = True
        options["fsdp_config"] = {
            "version": 2,
            "fsdp_version": 2,
            "state_dict_type": f"{kind.upper()}_STATE_DICT",
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["Block"],
        }
    options |= {"optim": "sgd", "optim_args": "momentum=0.9"}  # has few entries to save
    arguments = TrainingArguments(out, max_steps=2, save_steps=1, use_cpu=True, report_to="none", **options)
    trainer = Trainer(TinyModel(), arguments, train_dataset=rows(32))
    trainer.train()
    model = trainer.model_wrapped if kind != "plain" else trainer.model
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if arguments.process_index == 0:
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, f"{out}/expected.safetensors")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
