"""Rows of the table of model directories: files beside a model, levels below, names and configs."""

from __future__ import annotations

import json

import numpy as np
import torch
from model_rows import (
    BERT,
    BIN_INDEX,
    EMBED,
    HEAD,
    NO_UNION,
    NORM,
    QUERY,
    Folder,
    Refused,
    Tensors,
    halves,
    llama,
    lora,
    row,
)

from statexchange.errors import (
    CorruptError,
    InvalidArgumentError,
    NotFoundError,
    StateExchangeError,
    UnsupportedError,
)

# ------------------------------------------------------------------------------------------------- files beside a model

_APPLE_DOUBLE = b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X        " + bytes(4072)


@row("SceneWorks/SceneWorks#1333", "causal")
def files_of_macos_beside_a_model(folder: Folder) -> Tensors:
    """macOS writes ._model.safetensors on volumes without attributes: it is no file of weights."""
    folder.config()
    folder.write("model.safetensors", llama())
    folder.write_bytes("._model.safetensors", _APPLE_DOUBLE)
    return Tensors(llama())


@row("lmstudio-ai/mlx-engine#79")
def files_of_macos_beside_a_lone_file(folder: Folder) -> Tensors:
    """They are no second candidate."""
    folder.write("weights-4bit.safetensors", llama())
    folder.write_bytes("._weights-4bit.safetensors", _APPLE_DOUBLE)
    return Tensors(llama())


@row("unslothai/unsloth#8919")
def files_of_macos_beside_numbered_files(folder: Folder) -> Tensors:
    """They are no second set."""
    for name in folder.shards(llama(), index=None):
        folder.write_bytes(f"._{name}", _APPLE_DOUBLE)
    return Tensors(llama())


@row("kohya-ss/musubi-tuner#60", "causal")
def state_of_accelerate(folder: Folder) -> Tensors:
    """save_state writes the optimizer, scheduler and random states beside the model."""
    folder.config()
    folder.write("model.safetensors", llama())
    folder.write("optimizer.bin", {"state": torch.ones(2)})
    folder.write("scheduler.bin", {"last": torch.ones(2)})
    folder.write_bytes("random_states_0.pkl", b"")
    return Tensors(llama())


@row("vllm-project/vllm#373")
def arguments_of_trainer_beside_numbered_torch_files(folder: Folder) -> Tensors:
    """training_args.bin is no weights."""
    folder.shards(llama(), "pytorch_model-{:05d}-of-{:05d}.bin", index=None)
    torch.save({"learning_rate": 0.1}, folder.path / "training_args.bin")
    return Tensors(llama())


@row("deepspeedai/DeepSpeed#6658")
def directory_with_the_name_of_a_torch_file(folder: Folder) -> Tensors:
    """zero_to_fp32.py . pytorch_model.bin makes a directory of that name."""
    below = Folder(folder.path / "pytorch_model.bin")
    below.shards(llama(), "pytorch_model-{:05d}-of-{:05d}.bin", BIN_INDEX)
    folder.opened = below.path
    return Tensors(llama())


@row("JIA-Lab-research/LISA#155", "causal", agrees=False)
def directory_above_the_one_with_the_name_of_a_torch_file(folder: Folder) -> Refused:
    """The weights lie one level down: the message says what lists them."""
    folder.config()
    Folder(folder.path / "pytorch_model.bin").shards(llama(), "pytorch_model-{:05d}-of-{:05d}.bin", BIN_INDEX)
    return Refused(NotFoundError, ("statexchange scan",), scan=("source/pytorch_model.bin",))


@row("haotian-liu/LLaVA#784", "peft")
def trained_weights_beside_an_adapter(folder: Folder) -> Tensors:
    """LLaVA's projector is in non_lora_trainables.bin; PEFT does not read it either, so it is named."""
    folder.adapter_config()
    folder.write("adapter_model.bin", lora())
    folder.write("non_lora_trainables.bin", {"base_model.model.model.mm_projector.weight": torch.ones(2)})
    return Tensors(lora(), notes=("non_lora_trainables.bin",))


@row("haotian-liu/LLaVA#852", "causal")
def projector_beside_a_model(folder: Folder) -> Tensors:
    """The index is of the model."""
    folder.config()
    folder.shards(llama(), "pytorch_model-{:05d}-of-{:05d}.bin", BIN_INDEX)
    folder.write("mm_projector.bin", {"model.mm_projector.weight": torch.ones(2)})
    return Tensors(llama(), notes=("mm_projector.bin",))


@row("huggingface/transformers#31210", "causal")
def weights_of_other_frameworks(folder: Folder) -> Tensors:
    """They may be of another revision."""
    folder.config()
    folder.write("pytorch_model.bin", llama())
    folder.write_bytes("tf_model.h5", b"\x89HDF\r\n\x1a\n")
    folder.write_bytes("flax_model.msgpack", b"\x81")
    return Tensors(llama(), notes=("tf_model.h5", "flax_model.msgpack"))


@row("huggingface/optimum-intel#923", "causal")
def openvino_beside_a_model(folder: Folder) -> Tensors:
    """openvino_model.bin is no file of torch.save."""
    folder.config()
    folder.write("model.safetensors", llama())
    folder.write_bytes("openvino_model.bin", bytes(64))
    folder.write_bytes("openvino_model.xml", b"<net/>")
    return Tensors(llama(), notes=("openvino_model.bin",))


@row("huggingface/optimum-intel#923", "causal", agrees=False)
def openvino_alone(folder: Folder) -> Refused:
    """Nothing here can be read: the file is named."""
    folder.config()
    folder.write_bytes("openvino_model.bin", bytes(64))
    folder.write_bytes("openvino_model.xml", b"<net/>")
    return Refused((CorruptError, UnsupportedError, NotFoundError), ("openvino_model.bin",))


@row("mzbac/mlx-llm-server#1", "causal", agrees=False)
def arrays_of_mlx_alone(folder: Folder) -> Refused:
    """Early models of MLX are weights.npz: what is there is named."""
    folder.config()
    np.savez(folder.path / "weights.npz", w=np.ones(2))
    return Refused((NotFoundError, UnsupportedError), ("weights.npz",))


@row("AutoGPTQ/AutoGPTQ#526", "causal", agrees=False)
def lone_file_of_any_name(folder: Folder) -> Tensors:
    """There is one file of weights, so it is the model."""
    folder.config()
    folder.write("gptq_model-4bit-128g.safetensors", llama())
    return Tensors(llama())


@row("huggingface/trl#86", "causal")
def value_head_in_the_file(folder: Folder) -> Tensors:
    """transformers ignores v_head; who merges for TRL wants it."""
    folder.config()
    head = {"v_head.summary.weight": torch.full((1, 12), 7.0)}
    folder.write("pytorch_model.bin", {**llama(), **head})
    return Tensors({**llama(), **head})


@row("huggingface/diffusers#12690", "causal")
def lora_of_diffusers_beside_a_model(folder: Folder) -> Tensors:
    """The LoRA is not in the model."""
    folder.config()
    folder.write("model.safetensors", llama())
    folder.write("pytorch_lora_weights.safetensors", {"unet.lora.up.weight": torch.ones(2)})
    return Tensors(llama(), notes=("pytorch_lora_weights.safetensors",))


@row("kohya-ss/musubi-tuner#60")
def two_epochs_of_one_adapter(folder: Folder) -> Refused:
    """The numbers count epochs; both files have all tensors."""
    names = [f"Ag3d-{epoch:06d}.safetensors" for epoch in (1, 2)]
    for epoch, name in enumerate(names):
        folder.write(name, lora(epoch))
    return Refused(StateExchangeError, tuple(names), NO_UNION, by_bytes=True)


@row("ml-explore/mlx-examples#812")
def steps_of_an_adapter_of_mlx(folder: Folder) -> Refused:
    """adapters.safetensors is the last, but no loader of ours knows that."""
    for save, name in enumerate(("adapters", "0000100_adapters", "0000200_adapters")):
        folder.write(f"{name}.safetensors", lora(save))
    return Refused(InvalidArgumentError, ("adapters.safetensors", "0000100_adapters.safetensors"), NO_UNION)


@row("meta-pytorch/torchtune#2048")
def files_of_torchtune(folder: Folder) -> Tensors:
    """hf_model_0001_0.pt: the first number is the file, the second the epoch."""
    for number, part in enumerate(halves(llama()), 1):
        folder.write(f"hf_model_{number:04d}_0.pt", part)
    return Tensors(llama())


@row("meta-pytorch/torchtune#2048")
def two_epochs_of_torchtune(folder: Folder) -> Refused:
    """Two models, each of two files."""
    for epoch in (0, 1):
        for number, part in enumerate(halves(llama(epoch)), 1):
            folder.write(f"hf_model_{number:04d}_{epoch}.pt", part)
    return Refused(StateExchangeError, ("hf_model_0001_0.pt", "hf_model_0001_1.pt"), NO_UNION)


@row("NovaSky-AI/SkyRL#603")
def files_of_two_numbers_of_ranks(folder: Folder) -> Refused:
    """A job was resumed on more ranks and saved into the same directory."""
    for ranks in (2, 4):
        for rank in range(ranks):
            folder.write(f"model_world_size_{ranks}_rank_{rank}.pt", {f"{rank}.weight": torch.full((2,), float(ranks))})
    return Refused((InvalidArgumentError, CorruptError), ("2 and 4 ranks",), NO_UNION)


@row("vllm-project/vllm#4690")
def parts_of_one_rank(folder: Folder) -> Tensors:
    """The sharded state of vLLM for one rank: its tensors lie in two parts."""
    for part, state in enumerate(halves(llama())):
        folder.write(f"model-rank-0-part-{part}.safetensors", state)
    return Tensors(llama())


@row("vllm-project/vllm#4690")
def parts_of_two_ranks(folder: Folder) -> Refused:
    """Each rank has its slice under the same name; nothing says along which dim."""
    for rank in range(2):
        folder.write(f"model-rank-{rank}-part-0.safetensors", {QUERY: torch.full((6, 12), float(rank))})
    return Refused(StateExchangeError, (QUERY,), by_bytes=True)


@row("black-forest-labs/flux#457")
def two_parts_of_a_pipeline(folder: Folder) -> Refused:
    """The transformer and the autoencoder are two models."""
    folder.write("flux1-dev.safetensors", {"img_in.weight": torch.ones(2)})
    folder.write("ae.safetensors", {"decoder.conv_in.weight": torch.ones(2)})
    return Refused(InvalidArgumentError, ("flux1-dev.safetensors", "ae.safetensors"), NO_UNION)


@row("huggingface/lerobot#826", "causal")
def numbered_files_without_an_index_beside_the_single_file(folder: Folder) -> Tensors:
    """from_pretrained reads model.safetensors; the others are named."""
    folder.config()
    folder.write("model.safetensors", llama())
    names = folder.shards(llama(2), index=None)
    return Tensors(llama(), notes=(names[0],))


@row("huggingface/diffusers#14769")
def torch_twin_of_a_part_of_diffusers(folder: Folder) -> Tensors:
    """diffusers reads the safetensors file; the .bin may be newer, so it is named."""
    folder.write("diffusion_pytorch_model.safetensors", llama())
    folder.write("diffusion_pytorch_model.bin", llama(2))
    return Tensors(llama(), notes=("diffusion_pytorch_model.bin",))


# ------------------------------------------------------------------------------------------------------- levels below


@row("huggingface/huggingface_hub#4487")
def directory_of_the_cache_of_the_hub(folder: Folder) -> Refused:
    """The model is below snapshots/REVISION: the message says what lists it."""
    folder.write_bytes("refs/main", b"c0ffee")
    folder.write("snapshots/c0ffee/model.safetensors", llama())
    (folder.path / "blobs").mkdir()
    return Refused(NotFoundError, ("statexchange scan",), scan=("source/snapshots/c0ffee",))


@row("huggingface/diffusers#10634")
def directory_of_a_pipeline(folder: Folder) -> Refused:
    """A pipeline is several models, each in its own directory: the message says what lists them."""
    folder.write_json("model_index.json", {"_class_name": "SanaPipeline", "vae": ["diffusers", "AutoencoderDC"]})
    for part in ("transformer", "vae"):
        folder.write(f"{part}/diffusion_pytorch_model.safetensors", {"w": torch.ones(2)})
    return Refused(NotFoundError, ("statexchange scan",), scan=("source/transformer", "source/vae"))


@row("hiyouga/LlamaFactory#9659", "causal", agrees=False)
def directory_of_checkpoints(folder: Folder) -> Refused:
    """The output of a job: its checkpoints are named."""
    folder.config()
    for step in (42, 84):
        folder.write(f"checkpoint-{step}/model.safetensors", llama(step))
    return Refused((NotFoundError, InvalidArgumentError), ("checkpoint-42", "checkpoint-84"))


@row("pytorch/torchtitan#4190")
def shards_below_the_consolidated_files(folder: Folder) -> Tensors:
    """torchtitan leaves the ranks' files in sharded/ beside what was made of them: no part of the model, but said."""
    folder.config()
    folder.shards(llama(), index=None)
    folder.write("sharded/model_0.safetensors", {"w": torch.ones(17 << 20)})
    return Tensors(llama(), merge_notes=("sharded",))


# ------------------------------------------------------------------------------------- names, metadata and configs


def _new_name(name: str) -> str:
    return name.replace("gamma", "weight").replace("beta", "bias")


@row("huggingface/transformers#11809", "bert", renamed=_new_name)
def old_names_of_layer_norms(folder: Folder) -> Tensors:
    """transformers renames gamma and beta as it loads; a merge keeps the names of the file."""
    folder.write_json("config.json", BERT)
    state = {
        "embeddings.LayerNorm.gamma": torch.full((12,), 3.0),
        "embeddings.LayerNorm.beta": torch.full((12,), 4.0),
        "embeddings.word_embeddings.weight": torch.full((30, 12), 5.0),
    }
    folder.write("pytorch_model.bin", state)
    return Tensors(state)


@row("huggingface/transformers#217", "causal", renamed=lambda name: name if name == HEAD else f"model.{name}")
def names_of_the_model_without_its_head(folder: Folder) -> Tensors:
    """The base model's names lack its prefix; transformers adds it."""
    folder.config()
    state = {name.removeprefix("model."): tensor for name, tensor in llama().items()}
    folder.write("model.safetensors", state)
    return Tensors(state)


@row("huggingface/transformers#34759", "causal", agrees=False)
def tied_weight_under_the_name_of_the_head(folder: Folder) -> Tensors:
    """The file has lm_head.weight alone, and the config says that they are tied."""
    folder.config(tie_word_embeddings=True)
    state = {name: tensor for name, tensor in llama().items() if name != EMBED}
    folder.write("model.safetensors", state)
    return Tensors(state)


@row("ml-explore/mlx#743", "merged")
def file_without_metadata(folder: Folder) -> Tensors:
    """Some loaders want the format in the metadata; what is merged has it."""
    folder.config()
    folder.write("model.safetensors", llama(), metadata={})
    return Tensors(llama())


@row("huggingface/transformers#29335", "merged")
def file_of_mlx(folder: Folder) -> Tensors:
    """The format in the metadata is mlx; the tensors are as any other's."""
    folder.config()
    folder.write("model.safetensors", llama(), metadata={"format": "mlx"})
    return Tensors(llama())


@row("foundation-model-stack/fastsafetensors#96", "merged")
def file_with_empty_metadata(folder: Folder) -> Tensors:
    """The header has "__metadata__": {}."""
    folder.config()
    folder.write("model.safetensors", llama())
    data = (folder.path / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.dumps({**json.loads(data[8 : 8 + length]), "__metadata__": {}}).encode()
    header += b" " * (-len(header) % 8)
    folder.write_bytes("model.safetensors", len(header).to_bytes(8, "little") + header + data[8 + length :])
    return Tensors(llama())


@row("hiyouga/LlamaFactory#1097", "peft")
def two_files_of_an_adapter(folder: Folder) -> Tensors:
    """PEFT takes the safetensors file."""
    folder.adapter_config()
    folder.write("adapter_model.bin", lora(2))
    folder.write("adapter_model.safetensors", lora())
    return Tensors(lora(), notes=("adapter_model.bin",))


@row("h2oai/h2ogpt#217", "peft", agrees=False)
def adapter_without_tensors(folder: Folder) -> Refused:
    """A save that gathered nothing: a file of 443 bytes."""
    folder.adapter_config()
    folder.write("adapter_model.bin", {})
    return Refused(StateExchangeError, ("no tensor",), by_bytes=True)


@row("huggingface/peft#276", "peft", agrees=False)
def adapter_of_another_rank_than_its_config(folder: Folder) -> Tensors:
    """The tensors decide; PEFT will refuse them, so both ranks are said."""
    folder.adapter_config(r=8)
    folder.write("adapter_model.safetensors", lora(rank=2))
    return Tensors(lora(rank=2), merge_notes=("adapter_config.json", "8"))


@row("redai-studio/Relax#262", "peft", agrees=False)
def adapter_without_the_prefix_of_peft(folder: Folder) -> Tensors:
    """PEFT loads it without an error and leaves each lora_B zero: the prefix that is missing is named."""
    folder.adapter_config()
    state = {name.removeprefix("base_model.model."): tensor for name, tensor in lora().items()}
    folder.write("adapter_model.safetensors", state)
    return Tensors(state, merge_notes=("base_model.model.",))


@row("huggingface/peft#1457", "peft")
def adapter_with_the_embedding(folder: Folder) -> Tensors:
    """save_embedding_layers writes the whole embedding into the adapter."""
    folder.adapter_config()
    state = {**lora(), f"base_model.model.{EMBED}": torch.full((30, 12), 7.0)}
    folder.write("adapter_model.safetensors", state)
    return Tensors(state)


@row("NVIDIA-NeMo/Automodel#2096", "causal", agrees=False)
def layers_of_one_stage(folder: Folder) -> Tensors:
    """A rank of a pipeline saved its own layers; transformers makes the others at random."""
    folder.config(num_hidden_layers=2)
    state = {name: tensor for name, tensor in llama().items() if name not in (HEAD, NORM)}
    folder.write("model.safetensors", state)
    return Tensors(state, merge_notes=("num_hidden_layers",))


@row("huggingface/transformers#38152", "causal", agrees=False)
def config_that_names_the_file(folder: Folder) -> Tensors:
    """transformers 5 reads the file that config.json names; ours is another one, so that is said."""
    folder.config(transformers_weights="other.safetensors")
    folder.write("model.safetensors", llama())
    folder.write("other.safetensors", llama(2))
    return Tensors(llama(), notes=("other.safetensors",), merge_notes=("transformers_weights",))
