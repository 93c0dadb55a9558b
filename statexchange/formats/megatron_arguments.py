"""Read the parts that both kinds of Megatron checkpoints have: the arguments of the run, and sections by names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from statexchange.errors import CorruptError
from statexchange.formats.pickles import OpaqueObject
from statexchange.formats.sections import sections_from
from statexchange.formats.source import SectionName, Source

_NAMESPACES = ("argparse.Namespace", "types.SimpleNamespace")
_MAX_NUMBER = 1 << 20
_HEADS, _GROUPS = "num_attention_heads", "num_query_groups"
_MODEL = (
    *(_HEADS, _GROUPS, "kv_channels", "num_layers", "hidden_size", "ffn_hidden_size", "vocab_size"),
    *("padded_vocab_size", "swiglu", "apply_layernorm_1p", "rotary_interleaved"),
)
RANK_DIRECTORY = re.compile(r"mp_rank_[0-9]{2,6}(_[0-9]{3,6}){0,2}")
_OF_RANK = re.compile(rf"^{RANK_DIRECTORY.pattern}\.")  # in front of what each rank has for itself
_OPTIMIZER = re.compile(r"(?:chained_[0-9]+\.)?optimizer(?:\.|$)|distrib_optim\.pt$")
_KEYS: dict[str, SectionName] = {"opt_param_scheduler": "scheduler", "lr_scheduler": "scheduler", "rng_state": "rng"}


@dataclass(frozen=True, slots=True)
class RunArguments:
    """The arguments of a run of Megatron, as far as the layout of its files depends on them.

    Attributes:
        tensor: number of tensor-parallel ranks.
        pipeline: number of pipeline stages.
        expert: number of expert-parallel ranks.
        expert_tensor: number of tensor-parallel ranks of experts.
        num_experts: experts of each layer; 0 if not known.
        is_tied: whether it is known that the output layer is the embedding.
        iteration: training iteration; None if not known.
        model: numbers and truth values that tell the model's shape, by their names in Megatron.
    """

    tensor: int
    pipeline: int
    expert: int
    expert_tensor: int
    num_experts: int
    is_tied: bool
    iteration: int | None
    model: Mapping[str, int]

    @classmethod
    def parse(cls, state: object, path: str) -> RunArguments:
        """Return the arguments in a checkpoint's state, the value of its pickle.

        Raises:
            CorruptError: it has no arguments, or an argument is not what Megatron writes.
        """
        arguments = state.get("args") if type(state) is dict else None
        if type(arguments) is OpaqueObject and arguments.name in _NAMESPACES:
            arguments = arguments.state
        if type(state) is not dict or type(arguments) is not dict:
            raise CorruptError("not what Megatron writes: there are no 'args' of the run in it", path=path)
        tensor = _number(arguments, "tensor_model_parallel_size", path, 1)
        return cls(
            tensor=tensor,
            pipeline=_number(arguments, "pipeline_model_parallel_size", path, 1),
            expert=_number(arguments, "expert_model_parallel_size", path, 1),
            expert_tensor=_number(arguments, "expert_tensor_parallel_size", path, tensor),
            num_experts=_number(arguments, "num_experts", path, 0),
            is_tied=arguments.get("untie_embeddings_and_output_weights") is False,
            iteration=None if state.get("iteration") is None else _number(state, "iteration", path, 0),
            model=_model_numbers(arguments),
        )

    @property
    def num_ranks(self) -> int:
        """The number of model-parallel ranks."""
        return self.tensor * self.pipeline * self.expert

    def __str__(self) -> str:
        return f"tensor parallel {self.tensor}, pipeline parallel {self.pipeline}, expert parallel {self.expert}"


def _model_numbers(arguments: Mapping[object, object]) -> dict[str, int]:
    """Return the arguments with the model's sizes. Without grouped queries there are as many groups as heads."""
    numbers = {}
    for name in _MODEL:
        value = arguments.get(name)
        # Truth values, such as swiglu, are 1 and 0.
        if isinstance(value, int) and 0 <= value < _MAX_NUMBER:
            numbers[name] = int(value)
    if _HEADS in numbers and (arguments.get("group_query_attention") is False or not numbers.get(_GROUPS)):
        numbers[_GROUPS] = numbers[_HEADS]
    return numbers


def _number(arguments: Mapping[object, object], name: str, path: str, default: int) -> int:
    """Return a number of the arguments, `default` if it is 0 or None; raise CorruptError for anything else."""
    value = arguments.get(name)
    # An iteration has no limit that would matter here.
    if value is not None and (type(value) is not int or value < 0 or (value > _MAX_NUMBER and name != "iteration")):
        raise CorruptError(f"not what Megatron writes: {name} is not a small number", path=path)
    return value or default


def with_sections(source: Source) -> Source:
    """Return the source with its sections: tensors without the first key of another section are the model's."""
    tensors = source.tensor_names.union(tensor.name for tensor in source.unreadable)

    def section_of(name: str) -> SectionName:
        key = _OF_RANK.sub("", name)
        if _OPTIMIZER.match(key):
            return "optimizer"
        section = _KEYS.get(key.partition(".")[0].partition("/")[0])  # a key may be "rng_state/shard_0.0_1.1"
        return section or ("model" if name in tensors and key == name else "other")

    return replace(source, sections=sections_from(source.names, section_of))
