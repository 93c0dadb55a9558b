"""Rows of the table of model directories: indexes, and numbered files."""

from __future__ import annotations

import torch
from model_rows import (
    BIN_INDEX,
    EMBED,
    INDEX,
    NO_UNION,
    NUMBERED,
    Folder,
    Refused,
    Tensors,
    halves,
    llama,
    row,
)

from statexchange.errors import (
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    NotFoundError,
    StateExchangeError,
)

# ---------------------------------------------------------------------------------------------------------- indexes


@row("Blaizzy/mlx-vlm#638", "causal", agrees=False)
def index_of_the_source_of_a_conversion(folder: Folder) -> Refused:
    """The converted files are numbered by 2, the copied index lists those of the source, by 3: not to be guessed."""
    folder.config()
    folder.shards(llama(), index=None)
    folder.index(INDEX, {NUMBERED.format(number, 3): [name] for number, name in enumerate(llama(), 1) if number < 4})
    return Refused(IncompleteError, (NUMBERED.format(1, 3),))


@row("vllm-project/vllm#34859", "causal", agrees=False)
def listed_shard_is_missing(folder: Folder) -> Refused:
    """Quantized models were served with random weights in the place of the missing shard."""
    folder.config()
    names = folder.shards(llama())
    (folder.path / names[1]).unlink()
    return Refused(IncompleteError, (names[1],))


@row("JustVugg/colibri#1487", "causal", agrees=False)
def tensor_lies_in_another_shard_than_listed(folder: Folder) -> Refused:
    """The index and the headers contradict each other: one of them is of another revision."""
    folder.config()
    first, second = folder.shards(llama())
    parts = halves(llama())
    moved = next(iter(parts[0]))
    folder.index(INDEX, {first: list(parts[0])[1:], second: [moved, *parts[1]]})
    return Refused((CorruptError, IncompleteError), (moved,))


@row("huggingface/huggingface_hub#4728", "causal", agrees=False)
def listed_tensor_lies_nowhere(folder: Folder) -> Refused:
    """An index was written for tensors that the shard does not have."""
    folder.config()
    first, second = folder.shards(llama())
    parts = halves(llama())
    folder.index(INDEX, {first: parts[0], second: [*parts[1], "mtp.fc.weight"]})
    return Refused((CorruptError, IncompleteError), ("mtp.fc.weight",))


@row("jundot/omlx#2062", "causal")
def listed_file_of_another_name(folder: Folder) -> Tensors:
    """A loader that takes model*.safetensors alone loses the tensors of mtp.safetensors, which is listed."""
    folder.config()
    first, second = folder.shards(llama())
    parts = halves(llama())
    extra = {"mtp.fc.weight": torch.full((12, 24), 7.0)}
    folder.write("mtp.safetensors", extra)
    folder.index(INDEX, {first: parts[0], second: parts[1], "mtp.safetensors": extra})
    return Tensors({**llama(), **extra})


@row("jundot/omlx#1962", "causal")
def file_that_the_index_does_not_list(folder: Folder) -> Tensors:
    """The index lists the model; a person wants to know that model-mtp-of-00002.safetensors is not in it."""
    folder.config()
    folder.shards(llama())
    folder.write("model-mtp-of-00002.safetensors", {"mtp.fc.weight": torch.full((12, 24), 7.0)})
    return Tensors(llama(), notes=("model-mtp-of-00002.safetensors",))


@row("vllm-project/compressed-tensors#756", "causal")
def index_lists_the_single_file_and_another(folder: Folder) -> Tensors:
    """transformers takes model.safetensors before the index, which lists a second file, too: that one is named."""
    folder.config()
    extra = {"mtp.fc.weight": torch.full((12, 24), 7.0)}
    folder.write("model.safetensors", llama())
    folder.write("model_mtp.safetensors", extra)
    folder.index(INDEX, {"model.safetensors": llama(), "model_mtp.safetensors": extra})
    return Tensors(llama(), notes=("model_mtp.safetensors",))


@row("huggingface/transformers#16343", "causal", agrees=False)
def index_without_metadata(folder: Folder) -> Tensors:
    """The entry "metadata" says nothing that is needed; transformers needs it, so a merge helps."""
    folder.config()
    first, second = folder.shards(llama())
    parts = halves(llama())
    folder.write_json(INDEX, {"weight_map": dict.fromkeys(parts[0], first) | dict.fromkeys(parts[1], second)})
    return Tensors(llama())


@row("NVIDIA/Model-Optimizer#2199", "causal")
def index_of_an_earlier_save_whose_shards_are_gone(folder: Folder) -> Tensors:
    """A later save is one file; the old index lists files that no longer exist."""
    folder.config()
    for name in folder.shards(llama(2)):
        (folder.path / name).unlink()
    folder.write("model.safetensors", llama())
    return Tensors(llama())


@row("huggingface/diffusers#14769", "causal", agrees=False)
def index_of_an_earlier_save_before_a_torch_file(folder: Folder) -> Refused:
    """The index comes before pytorch_model.bin, and its shards are gone: all loaders fail, so no guess."""
    folder.config()
    names = folder.shards(llama(2))
    for name in names:
        (folder.path / name).unlink()
    folder.write("pytorch_model.bin", llama())
    return Refused(IncompleteError, (names[0],))


@row("liltom-eth/llama2-webui#7", "causal", agrees=False)
def index_whose_shards_were_not_downloaded(folder: Folder) -> Refused:
    """Only the .bin files were downloaded, but both indexes."""
    folder.config()
    folder.shards(llama(), "pytorch_model-{:05d}-of-{:05d}.bin", BIN_INDEX)
    folder.index(INDEX, dict(zip((NUMBERED.format(1, 2), NUMBERED.format(2, 2)), halves(llama()), strict=True)))
    return Refused(IncompleteError, (NUMBERED.format(1, 2),))


@row("liltom-eth/llama2-webui#7")
def path_of_an_index(folder: Folder) -> Tensors:
    """A user names the candidate that is whole by the path of its index."""
    index_whose_shards_were_not_downloaded(folder)
    folder.opened = folder.path / BIN_INDEX
    return Tensors(llama())


@row("Neph0s/CoSER#3", "causal")
def files_that_are_fewer_than_their_numbers_say(folder: Folder) -> Tensors:
    """Files are numbered of 30, there are 15, and the index lists these alone: they are the model."""
    folder.config()
    names = (NUMBERED.format(1, 4), NUMBERED.format(2, 4))
    parts = dict(zip(names, halves(llama()), strict=True))
    for name, part in parts.items():
        folder.write(name, part)
    folder.index(INDEX, parts)
    return Tensors(llama())


@row("hyperonym/basaran#160", "causal", agrees=False)
def index_of_the_unquantized_model_beside_another_file(folder: Folder) -> Refused:
    """The .bin index of the source was copied; its files are not there, and the other file may be another model."""
    folder.config()
    missing = "pytorch_model-00001-of-00001.bin"
    folder.index(BIN_INDEX, {missing: llama()})
    folder.write("vicuna-13b-4bit-128g.safetensors", llama())
    return Refused((IncompleteError, InvalidArgumentError), (missing,))


@row("huggingface/diffusers#10634", "causal:bf16")
def variant_of_several_files_alone(folder: Folder) -> Tensors:
    """All there is is the variant bf16, in numbered files and with an index of its own name."""
    folder.config()
    folder.shards(llama(), "model.bf16-{:05d}-of-{:05d}.safetensors", "model.safetensors.index.bf16.json")
    return Tensors(llama())


@row("huggingface/diffusers#9061", "causal")
def variant_of_several_files_beside_the_model(folder: Folder) -> Tensors:
    """Both have an index; that of the variant is not the model's."""
    folder.config()
    folder.shards(llama())
    names = folder.shards(llama(2), "model.fp16-{:05d}-of-{:05d}.safetensors", "model.safetensors.index.fp16.json")
    return Tensors(llama(), notes=(names[0],))


# ---------------------------------------------------------------------------------------------------- numbered files


@row("unslothai/unsloth#2355", "causal", agrees=False)
def numbered_files_without_an_index(folder: Folder) -> Tensors:
    """push_to_hub_merged forgot the index; the numbers say that the set is whole."""
    folder.config()
    folder.shards(llama(), index=None)
    return Tensors(llama())


@row("unslothai/unsloth#1122", "causal", agrees=False)
def some_of_the_numbered_files(folder: Folder) -> Refused:
    """A save ended after 2 of 4 files."""
    folder.config()
    for number, part in enumerate(halves(llama()), 1):
        folder.write(NUMBERED.format(number, 4), part)
    return Refused(IncompleteError, (NUMBERED.format(3, 4),))


@row("sgl-project/sglang#24237", "causal", agrees=False)
def numbers_from_zero(folder: Folder) -> Tensors:
    """Files 0 and 1 of 2 are all."""
    folder.config()
    folder.shards(llama(), index=None, first=0)
    return Tensors(llama())


@row("unslothai/unsloth#10857", "causal")
def numbers_from_zero_with_an_index(folder: Folder) -> Tensors:
    """The index lists the only file, number 0 of 1."""
    folder.config()
    folder.write(NUMBERED.format(0, 1), llama())
    folder.index(INDEX, {NUMBERED.format(0, 1): llama()})
    return Tensors(llama())


@row("unslothai/unsloth#10857")
def gap_in_numbers_from_zero(folder: Folder) -> Refused:
    """Numbers 0 and 2 of 3."""
    for number, part in zip((0, 2), halves(llama()), strict=True):
        folder.write(NUMBERED.format(number, 3), part)
    return Refused(IncompleteError, (NUMBERED.format(1, 3),))


@row("lyogavin/airllm#214")
def total_of_more_digits_than_the_number(folder: Folder) -> Tensors:
    """DeepSeek writes model-00001-of-000002.safetensors."""
    folder.shards(llama(), "model-{:05d}-of-{:06d}.safetensors", index=None)
    return Tensors(llama())


@row("lyogavin/airllm#214")
def missing_file_of_a_total_of_more_digits(folder: Folder) -> Refused:
    """The second of two is missing."""
    names = folder.shards(llama(), "model-{:05d}-of-{:06d}.safetensors", index=None)
    (folder.path / names[1]).unlink()
    return Refused(IncompleteError, (names[1],))


@row("JustVugg/colibri#1317")
def counted_files_and_another_of_their_stem(folder: Folder) -> Refused:
    """Nothing says whether out-mtp-00000 belongs to out-00000 and out-00001, or is a model."""
    for number, part in enumerate(halves(llama())):
        folder.write(f"out-{number:05d}.safetensors", part)
    folder.write("out-mtp-00000.safetensors", {"mtp.fc.weight": torch.ones(2)})
    return Refused(InvalidArgumentError, ("out-mtp-00000.safetensors", "out-00000.safetensors"))


@row("ggml-org/llama.cpp#10756")
def equal_tensor_in_two_numbered_files(folder: Folder) -> Tensors:
    """A tied weight was written into both files: the same bits, so there is nothing to choose."""
    first, second = halves(llama())
    folder.write(NUMBERED.format(1, 2), first)
    folder.write(NUMBERED.format(2, 2), {**second, EMBED: first[EMBED]})
    return Tensors(llama())


@row("ggml-org/llama.cpp#10756")
def different_tensors_of_one_name_in_numbered_files(folder: Folder) -> Refused:
    """One of the files is of another save, and nothing says which."""
    first, second = halves(llama())
    folder.write(NUMBERED.format(1, 2), first)
    folder.write(NUMBERED.format(2, 2), {**second, EMBED: llama(2)[EMBED]})
    words = (EMBED, NUMBERED.format(1, 2), NUMBERED.format(2, 2))
    return Refused(StateExchangeError, words, NO_UNION, by_bytes=True)


@row("ggml-org/llama.cpp#10756")
def dtypes_that_differ_by_file(folder: Folder) -> Tensors:
    """One shard is in bfloat16, one in float32: each tensor keeps its own."""
    first, second = halves(llama())
    rounded = {name: tensor.bfloat16() for name, tensor in first.items()}
    folder.write(NUMBERED.format(1, 2), rounded)
    folder.write(NUMBERED.format(2, 2), second)
    folder.index(INDEX, {NUMBERED.format(1, 2): first, NUMBERED.format(2, 2): second})
    return Tensors({**rounded, **second})


@row("osaurus-ai/vmlx-swift#217", "causal", agrees=False)
def shard_that_is_cut(folder: Folder) -> Refused:
    """Mapped into memory, the end of a cut file reads as zeros."""
    folder.config()
    _, second = folder.shards(llama())
    data = (folder.path / second).read_bytes()
    folder.write_bytes(second, data[:-100])
    return Refused(CorruptError, (second,))


@row("EricTan7/VeritasPP#2", "causal", agrees=False)
def shard_of_zeros(folder: Folder) -> Refused:
    """A download that reserved the space of the file and did not write it."""
    folder.config()
    _, second = folder.shards(llama())
    folder.write_bytes(second, bytes((folder.path / second).stat().st_size))
    return Refused(CorruptError, (second,))


@row("microsoft/OmniParser#18", "causal", agrees=False)
def shard_that_is_a_pointer_of_git_lfs(folder: Folder) -> Refused:
    """A clone without Git LFS: one of the shards was fetched by hand."""
    folder.config()
    _, second = folder.shards(llama())
    folder.write_bytes(second, b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 4976698672\n")
    return Refused(CorruptError, (second, "LFS"))


@row("debpalash/VoiceStudio#1056", "causal", agrees=False)
def shard_that_is_a_link_to_nothing(folder: Folder) -> Refused:
    """The blob of the Hub's cache is gone."""
    folder.config()
    _, second = folder.shards(llama())
    (folder.path / second).unlink()
    (folder.path / second).symlink_to("../../blobs/c1b9b30e")
    return Refused((IncompleteError, NotFoundError), (second,))


@row("debpalash/VoiceStudio#1056", "causal", agrees=False)
def model_that_is_a_link_to_nothing(folder: Folder) -> Refused:
    """transformers then reads pytorch_model.bin; a person wants to know that the model is not there."""
    folder.config()
    (folder.path / "model.safetensors").symlink_to("../../blobs/c1b9b30e")
    folder.write("pytorch_model.bin", llama(2))
    return Refused((IncompleteError, NotFoundError), ("model.safetensors",))


@row("Comfy-Org/Comfy-Desktop#1322", "causal", agrees=False)
def empty_model_beside_a_torch_file(folder: Folder) -> Refused:
    """A download or conversion that has only begun."""
    folder.config()
    folder.write_bytes("model.safetensors", b"")
    folder.write("pytorch_model.bin", llama(2))
    return Refused(CorruptError, ("model.safetensors",))
