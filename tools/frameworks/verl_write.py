"""Write an actor's directory with verl on a CPU: torchrun --nproc-per-node N verl_write.py OUT FLAGS.

FLAGS are any of lora (PEFT) and fsdp1. OUT/run is verl's; OUT/expected.safetensors the model as torch gathers it. Needs
verl 0.9.1 (--no-deps) with tensordict, omegaconf, cloudpickle and orjson; what else it imports is stubbed here.
"""

import importlib.abc
import importlib.machinery
import sys
from pathlib import Path
from unittest import mock

STUBS = (
    *("PIL", "cachetools", "codetiming", "datasets", "dill", "hydra", "msgspec", "pandas", "pyarrow", "pylatexenc"),
    *("ray", "tensorboard", "torchdata", "uvicorn", "vllm", "wandb", "zmq"),
)


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a mock for each module of STUBS that is not installed."""

    def find_spec(self, name, *_):
        if name.partition(".")[0] in STUBS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = mock.MagicMock(name=spec.name)
        module.__name__, module.__path__, module.__version__ = spec.name, [], "99.0.0"
        return module

    def exec_module(self, module):
        pass


sys.meta_path.append(Stubs())

import torch  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaDecoderLayer  # noqa: E402
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager  # noqa: E402


def main(out, flags):
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "hidden_size": 6, "intermediate_size": 7, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "architectures": ["LlamaForCausalLM"]}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=16))
    layers = list(model.model.layers)
    if "lora" in flags:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
        model.can_generate = lambda: True  # verl asks the unwrapped model
    mesh = torch.distributed.device_mesh.init_device_mesh(
        "cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("fsdp",)
    )
    if "fsdp1" in flags:
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        policy = ModuleWrapPolicy({LlamaDecoderLayer})
        cpu = torch.device("cpu")
        model = FullyShardedDataParallel(model, device_mesh=mesh, auto_wrap_policy=policy, device_id=cpu)
    else:
        from torch.distributed.fsdp import fully_shard

        for layer in [*layers, model]:
            fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    tokens = torch.arange(8).reshape(1, 8) + torch.distributed.get_rank()
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    scheduler.step()
    contents = ["model", "optimizer", "extra"]
    config = OmegaConf.create({"save_contents": contents, "load_contents": contents, "async_save": False})
    manager = FSDPCheckpointManager(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, processing_class=None, checkpoint_config=config
    )
    manager.save_checkpoint(f"{out}/run/global_step_1/actor", global_step=1)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if torch.distributed.get_rank() == 0:
        Path(f"{out}/run/latest_checkpointed_iteration.txt").write_text("1")
        save_file({name: tensor.contiguous() for name, tensor in full.items()}, f"{out}/expected.safetensors")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
