"""Read the parts that both kinds of Megatron checkpoints have: the arguments of the run, and sections by names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from statexchange.errors import CorruptError
from statexchange.formats.pickles import OpaqueObject
from statexchange.formats.source import SectionName

__all__ = ["RunArguments", "section_of_key"]

_NAMESPACES = ("argparse.Namespace", "types.SimpleNamespace")
_MAX_NUMBER = 1 << 20
_HEADS, _GROUPS = "num_attention_heads", "num_query_groups"
_MODEL = (
    *(_HEADS, _GROUPS, "kv_channels", "num_layers", "hidden_size", "ffn_hidden_size", "vocab_size"),
    *("padded_vocab_size", "swiglu", "apply_layernorm_1p", "rotary_interleaved"),
)
_OPTIMIZER = re.compile(r"(?:chained_[0-9]+\.)?optimizer(?:\.|$)")
_KEYS: dict[str, SectionName] = {"opt_param_scheduler": "scheduler", "lr_scheduler": "scheduler", "rng_state": "rng"}


@dataclass(frozen=True, slots=True)
class RunArguments:
    """The arguments of a run of Megatron, as far as the layout of its files depends on them.

    Attributes:
        tensor: number of tensor-parallel ranks.
        pipeline: number of pipeline stages.
        expert: number of expert-parallel ranks.
        expert_tensor: number of tensor-parallel ranks of experts.
        chunks: chunks of layers on each pipeline stage.
        num_layers: layers of the model; None if not known.
        num_experts: experts of each layer; None if not known.
        is_tied: whether the output layer is the embedding; None if not known.
        iteration: training iteration; None if not known.
        num_arguments: number of all arguments.
        model: numbers and truth values that tell the model's shape, by their names in Megatron.
    """

    tensor: int
    pipeline: int
    expert: int
    expert_tensor: int
    chunks: int
    num_layers: int | None
    num_experts: int | None
    is_tied: bool | None
    iteration: int | None
    num_arguments: int
    model: Mapping[str, int] = field(default_factory=dict, compare=False)

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
        untied = arguments.get("untie_embeddings_and_output_weights")
        tensor = _number(arguments, "tensor_model_parallel_size", path) or 1
        return cls(
            tensor=tensor,
            pipeline=_number(arguments, "pipeline_model_parallel_size", path) or 1,
            expert=_number(arguments, "expert_model_parallel_size", path) or 1,
            expert_tensor=_number(arguments, "expert_tensor_parallel_size", path) or tensor,
            chunks=_number(arguments, "virtual_pipeline_model_parallel_size", path) or 1,
            num_layers=_number(arguments, "num_layers", path),
            num_experts=_number(arguments, "num_experts", path),
            is_tied=not untied if type(untied) is bool else None,
            iteration=_number(state, "iteration", path),
            num_arguments=len(arguments),
            model=_model_numbers(arguments),
        )

    @property
    def num_ranks(self) -> int:
        """The number of model-parallel ranks."""
        return self.tensor * self.pipeline * self.expert

    def __str__(self) -> str:
        sizes = {"tensor": self.tensor, "pipeline": self.pipeline, "expert": self.expert}
        parallel = ", ".join(f"{axis} parallel {size}" for axis, size in sizes.items() if size > 1 or axis != "expert")
        layers = "" if self.num_layers is None else f", {self.num_layers} layers"
        return f"{self.num_arguments} arguments of the run: {parallel}{layers}"


def _model_numbers(arguments: Mapping[Any, Any]) -> dict[str, int]:
    """Return the arguments with the model's sizes. Without grouped queries there are as many groups as heads."""
    numbers = {}
    for name in _MODEL:
        value = arguments.get(name)
        if isinstance(value, int) and 0 <= value < _MAX_NUMBER:
            numbers[name] = int(value)
    if _HEADS in numbers and (arguments.get("group_query_attention") is False or not numbers.get(_GROUPS)):
        numbers[_GROUPS] = numbers[_HEADS]
    return numbers


def _number(arguments: Mapping[Any, Any], name: str, path: str) -> int | None:
    value = arguments.get(name)
    if value is None:
        return None
    # An iteration has no limit that would matter here.
    if type(value) is not int or value < 0 or (value > _MAX_NUMBER and name != "iteration"):
        raise CorruptError(f"not what Megatron writes: {name} is not a small number", path=path)
    return value


def section_of_key(name: str) -> SectionName | None:
    """Return the section of an entry of a job's state by its first key; None for an unknown key."""
    if _OPTIMIZER.match(name):
        return "optimizer"
    return _KEYS.get(name.partition(".")[0].partition("/")[0])
