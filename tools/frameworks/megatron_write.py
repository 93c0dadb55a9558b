"""Write checkpoints with Megatron-Core on a CPU: a small GPT, as `torch_dist` and as mp_rank directories.

    pip install torch megatron-core==0.16.1 psutil
    torchrun --nproc-per-node 4 tools/frameworks/megatron_write.py OUT --tp 2 --pp 2 --optimizer dp_reshardable

writes OUT/torch_dist and OUT/legacy of the same model, each with its latest_checkpointed_iteration.txt. Then

    python tools/frameworks/megatron_write.py OUT --expected

writes OUT/expected.json: dtype, shape and SHA-256 of each tensor that `dist_checkpointing` loads from OUT/torch_dist
in a world of one. tests/data/megatron and tests/slow/test_megatron_core.py have the commands that are used.

Megatron-Core expects CUDA in a few places, which `pretend_cuda` fills in. The files of the legacy format are written by
Megatron-LM's training loop, which is in no wheel: `write_legacy` names and fills them as that does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

ITERATION = 7
STEP_DIRECTORY = f"iter_{ITERATION:07d}"
TRACKER = "latest_checkpointed_iteration.txt"
LAYERS, HIDDEN, HEADS, GROUPS, FFN, VOCABULARY = 2, 8, 2, 2, 12, 16


class PretendCuda(TorchFunctionMode):
    """Run what asks for a CUDA device on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and str(args[1]).startswith("cuda"):
            args = (args[0], "cpu", *args[2:])
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


class PretendStream:
    """A CUDA stream or event that does nothing."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def wait_stream(self, *args: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


def pretend_cuda() -> None:
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.empty_cache = lambda: None
    torch.cuda.Stream = torch.cuda.Event = PretendStream
    PretendCuda().__enter__()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    for axis in ("tp", "pp", "ep"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    parser.add_argument("--vpp", type=int, default=None, help="chunks of layers on each pipeline stage")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--heads", type=int, default=HEADS)
    parser.add_argument("--first-stage-layers", type=int, default=None)
    parser.add_argument("--optimizer", default=None, help="'plain', or a sharding type of the distributed optimizer")
    for flag in ("gelu", "moe", "tied", "singleton", "bias", "qk-norm", "expected"):
        parser.add_argument(f"--{flag}", action="store_true")
    return parser.parse_args()


def build(options: argparse.Namespace, dtype: torch.dtype = torch.bfloat16, **more: Any) -> tuple[Any, list[Any]]:
    """Return the config and this rank's chunks of the model; `more` are further entries of the config."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    if options.moe:
        more |= {"num_moe_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall"}
        more |= {"moe_shared_expert_intermediate_size": 8}
    if options.first_stage_layers is not None:
        more["num_layers_in_first_pipeline_stage"] = options.first_stage_layers
    config = TransformerConfig(
        num_layers=options.layers,
        hidden_size=HIDDEN,
        num_attention_heads=options.heads,
        num_query_groups=GROUPS,
        ffn_hidden_size=FFN,
        gated_linear_unit=not options.gelu,
        activation_func=torch.nn.functional.gelu if options.gelu else torch.nn.functional.silu,
        normalization="LayerNorm" if options.gelu else "RMSNorm",
        add_bias_linear=options.bias,
        add_qkv_bias=options.bias,
        qk_layernorm=options.qk_norm,
        use_cpu_initialization=True,
        tensor_model_parallel_size=options.tp,
        pipeline_model_parallel_size=options.pp,
        virtual_pipeline_model_parallel_size=options.vpp,
        expert_model_parallel_size=options.ep,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        **more,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=4 if options.moe else None,
        moe_grouped_gemm=False,
        qk_layernorm=options.qk_norm,
        normalization=config.normalization,
    )
    chunks = []
    for chunk in range(options.vpp or 1):
        position = {"ignore_virtual": False, "vp_stage": chunk} if options.vpp else {}
        model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=VOCABULARY,
            max_sequence_length=8,
            pre_process=parallel_state.is_pipeline_first_stage(**position),
            post_process=parallel_state.is_pipeline_last_stage(**position),
            share_embeddings_and_output_weights=options.tied,
            position_embedding_type="rope",
            vp_stage=chunk if options.vpp else None,
        )
        # Values that differ everywhere, also in norms and biases, which Megatron begins with ones and zeros.
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                seed = int.from_bytes(hashlib.sha256(f"{name} {chunk} {options.pp}".encode()).digest()[:4], "little")
                generator = torch.Generator().manual_seed(seed + stage_of(name))
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
        chunks.append(model.to(dtype))
    return config, chunks


def stage_of(name: str) -> int:
    """Return a number that differs for the parts of a parameter, and is equal for copies of it."""
    from megatron.core import parallel_state

    number = 1000 * parallel_state.get_pipeline_model_parallel_rank() if ".layers." in name else 0
    if name.endswith(("linear_qkv.bias", "linear_fc1.bias")):
        number += 1 + parallel_state.get_tensor_model_parallel_rank()
    if "local_experts" in name:
        number += 100 * (1 + parallel_state.get_expert_model_parallel_rank())
    return number


def train(options: argparse.Namespace, config: Any, chunks: list[Any]) -> Any:
    """Return Megatron's optimizer after two steps along random gradients."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    is_sharded = options.optimizer != "plain"
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=is_sharded, overlap_grad_reduce=False)
    wrapped = [DistributedDataParallel(config, ddp, chunk) for chunk in chunks]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=is_sharded,
            clip_grad=0.0,
        ),
        wrapped,
    )
    for chunk in wrapped:
        for name, parameter in chunk.named_parameters():
            # The same for copies of a parameter on several ranks, which stay equal in this way.
            text = "tied" if options.tied and name.endswith(("word_embeddings.weight", "output_layer.weight")) else name
            own = f"{text} {parallel_state.get_pipeline_model_parallel_rank() if '.layers.' in name else 0}"
            if getattr(parameter, "tensor_model_parallel", False):
                own += f" {parallel_state.get_tensor_model_parallel_rank()}"
            if "local_experts" in name:
                own += f" {parallel_state.get_expert_model_parallel_rank()}"
            seed = int.from_bytes(hashlib.sha256(own.encode()).digest()[:4], "little")
            gradient = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            parameter.main_grad.copy_(gradient)
    for _ in range(2):
        optimizer.step()
    return optimizer


def arguments(options: argparse.Namespace, config: Any) -> argparse.Namespace:
    """Return what Megatron-LM's training loop saves as its arguments, as far as the layout depends on them."""
    from megatron.core.transformer.enums import AttnBackend

    return argparse.Namespace(
        tensor_model_parallel_size=options.tp,
        pipeline_model_parallel_size=options.pp,
        virtual_pipeline_model_parallel_size=options.vpp,
        expert_model_parallel_size=options.ep,
        expert_tensor_parallel_size=options.tp,
        num_layers=options.layers,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=options.heads,
        num_query_groups=GROUPS,
        num_experts=4 if options.moe else None,
        padded_vocab_size=VOCABULARY,
        swiglu=not options.gelu,
        normalization=config.normalization,
        position_embedding_type="rope",
        untie_embeddings_and_output_weights=not options.tied,
        params_dtype=torch.bfloat16,
        attention_backend=AttnBackend.auto,
        consumed_train_samples=448,
    )


def common(options: argparse.Namespace, config: Any) -> dict[str, Any]:
    return {
        "args": arguments(options, config),
        "checkpoint_version": 3.0,
        "iteration": ITERATION,
        "num_floating_point_operations_so_far": 0,
        "opt_param_scheduler": {"max_lr": 0.01, "num_steps": ITERATION * 64},
    }


def random_states() -> list[dict[str, Any]]:
    state = torch.get_rng_state()[:16].clone()  # the whole state has 5,056 bytes
    return [{"random_rng_state": (3, (1, 2, 3), None), "torch_rng_state": state}]


def write_torch_dist(options: argparse.Namespace, config: Any, chunks: list[Any], optimizer: Any) -> None:
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    metadata = {
        "singleton_local_shards": options.singleton,
        "chained_optim_avoid_prefix": True,
        "distrib_optim_sharding_type": None if options.optimizer == "plain" else options.optimizer,
    }
    state = common(options, config)
    for name, chunk in model_entries(chunks):
        state[name] = chunk.sharded_state_dict(metadata=metadata)
    pipeline, tensor = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    state["rng_state"] = ShardedObject(
        "rng_state",
        random_states(),
        (options.pp, options.tp),
        (pipeline, tensor),
        replica_id=parallel_state.get_data_parallel_rank(),
    )
    if optimizer is not None:
        models = {name: state[name] for name, _ in model_entries(chunks)}
        flat = models["model"] if options.optimizer == "plain" and "model" in models else models
        state["optimizer"] = optimizer.sharded_state_dict(flat, metadata=metadata)
    top = options.out / "torch_dist"
    directory = top / STEP_DIRECTORY
    if dist.get_rank() == 0:
        directory.mkdir(parents=True)
        (top / TRACKER).write_text(str(ITERATION))
    dist.barrier()
    dist_checkpointing.save(state, str(directory), content_metadata=metadata)


def write_legacy(options: argparse.Namespace, config: Any, chunks: list[Any], optimizer: Any) -> None:
    from megatron.core import parallel_state

    state = common(options, config)
    for name, chunk in model_entries(chunks):
        state[name] = chunk.state_dict_for_save_checkpoint()
    if optimizer is not None:
        state["optimizer"] = optimizer.state_dict()
    state["rng_state"] = random_states()
    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if options.pp > 1:
        name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    if options.ep > 1:
        name += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
    top = options.out / "legacy"
    directory = top / STEP_DIRECTORY / name
    if dist.get_rank() == 0:
        (top / STEP_DIRECTORY).mkdir(parents=True)
        (top / TRACKER).write_text(str(ITERATION))
    dist.barrier()
    is_first = parallel_state.get_expert_data_parallel_rank() == 0
    if options.ep == 1:
        is_first = parallel_state.get_data_parallel_rank() == 0
    if is_first:
        directory.mkdir()
    if optimizer is not None and options.optimizer != "plain":
        optimizer.save_parameter_state(str(directory / "distrib_optim.pt"))
    if is_first:
        torch.save(state, directory / "model_optim_rng.pt")


def model_entries(chunks: list[Any]) -> list[tuple[str, Any]]:
    if len(chunks) == 1:
        return [("model", chunks[0])]
    return [(f"model{number}", chunk) for number, chunk in enumerate(chunks)]


def write(options: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    pretend_cuda()
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=options.tp,
        pipeline_model_parallel_size=options.pp,
        virtual_pipeline_model_parallel_size=options.vpp,
        expert_model_parallel_size=options.ep,
    )
    torch.manual_seed(0)
    config, chunks = build(options)
    optimizer = train(options, config, chunks) if options.optimizer else None
    write_torch_dist(options, config, chunks, optimizer)
    write_legacy(options, config, chunks, optimizer)
    dist.barrier()
    dist.destroy_process_group()


def write_expected(out: Path) -> None:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    dist.init_process_group("gloo")
    pretend_cuda()
    from megatron.core import dist_checkpointing

    found = {}
    loaded = dist_checkpointing.load_plain_tensors(str(out / "torch_dist" / STEP_DIRECTORY))
    for name, tensor in loaded.items():
        if isinstance(tensor, torch.Tensor):
            data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            dtype = str(tensor.dtype).removeprefix("torch.")
            found[name] = {"dtype": dtype, "shape": list(tensor.shape), "sha256": hashlib.sha256(data).hexdigest()}
    (out / "expected.json").write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":  # torch_dist starts a multiprocessing manager, which imports this file again
    chosen = parsed()
    if chosen.expected:
        write_expected(chosen.out)
    else:
        write(chosen)
