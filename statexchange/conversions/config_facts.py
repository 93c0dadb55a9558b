"""Compare a model's config.json with the tensors of a conversion, beside which it is written.

A conversion states what a config of the model's architecture describes, such as the number of layers, and how it
follows from the names and shapes of tensors. A config that contradicts them is of another model: transformers would
load it with random weights, or without some of the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from statexchange.conversions.names import NamePattern
from statexchange.conversions.numbers import KnownConfig, NumberRule, Numbers, number_in
from statexchange.errors import InvalidArgumentError

__all__ = ["ConfigFact", "FactKind", "ModelTensors", "check_configs"]

FactKind = Literal["count", "size", "present", "absent", "number"]

_MODEL_TYPE = "model_type"


@dataclass(frozen=True, slots=True)
class ConfigFact:
    """The meaning of one key of a config, or of the product of several.

    Attributes:
        keys: the keys.
        kind: what the value is. "count": there are so many of the first name, one for each value of its placeholder.
            "size": `dim` of the tensors of the first name has this size. "present": it is 1 if one of the names is
            there, else 0. "absent": it is 1 if the first name is not there, else 0. "number": it is the conversion's
            number of this name.
        names: patterns of names; the name of a number.
        default: the value where a config of the architecture does not have the last key: a number, or an expression of
            other keys; None if it is not known.
        dim: a dim of the tensors.
    """

    keys: tuple[str, ...]
    kind: FactKind
    names: tuple[NamePattern, ...]
    default: int | str | None = None
    dim: int = 0


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """The tensors of a model whose config is compared.

    Attributes:
        shapes: their shapes by name.
        aliases: names among them that need not be written, because they are tied to another.
        is_whole: whether these are all tensors of the checkpoint, and not a selection.
    """

    shapes: Mapping[str, tuple[int, ...]]
    aliases: Collection[str]
    is_whole: bool


def check_configs(
    facts: Sequence[ConfigFact],
    model_type: str,
    model: ModelTensors,
    configs: Sequence[KnownConfig],
    written: KnownConfig | None,
    given: Mapping[str, int],
) -> None:
    """Compare configs with the tensors of a model.

    Args:
        facts: what a config describes.
        model_type: the architecture, whose defaults apply where a config is of this type.
        model: the tensors.
        configs: the configs.
        written: the one of them that is written beside the tensors, if one is.
        given: numbers that the caller gave, with which `written` must agree.

    Raises:
        InvalidArgumentError: a config contradicts the tensors, or `written` a number.
    """
    for config in configs:
        is_of_type = config.values.get(_MODEL_TYPE) == model_type
        for fact in facts:
            value = _value_in(config, fact, has_defaults=is_of_type)
            if value is None:
                continue
            shown = _other_value(fact, value, model, given if config is written else {})
            if shown is not None:
                raise _contradiction(fact, value, config, shown)


def _contradiction(fact: ConfigFact, value: int, config: KnownConfig, shown: str) -> InvalidArgumentError:
    keys = " x ".join(fact.keys)
    text = f"convert: {keys} is {_shown(fact, value)} in {config.where} and {shown}: give the config of this model"
    return InvalidArgumentError(f"{text} (files_from, --files-from)")


def _shown(fact: ConfigFact, value: int) -> str:
    return str(bool(value)).lower() if fact.kind in ("present", "absent") else str(value)


def _value_in(config: KnownConfig, fact: ConfigFact, *, has_defaults: bool) -> int | None:
    """Return the value that a config has; None if it has none."""
    values = []
    for key in fact.keys:
        value = number_in(config.values, key)
        if value is None and has_defaults and key == fact.keys[-1]:
            value = _default(config, fact.default)
        if value is None:
            return None
        values.append(value)
    return math.prod(values)


def _default(config: KnownConfig, default: int | str | None) -> int | None:
    if not isinstance(default, str):
        return default
    rules = {key: NumberRule(config=(key,)) for key in config.values}
    return Numbers(rules, configs=[config]).known(default)


def _other_value(fact: ConfigFact, value: int, model: ModelTensors, given: Mapping[str, int]) -> str | None:
    """Return what the tensors, or the numbers that the caller gave, show instead of `value`; None if they agree."""
    text = fact.names[0].text
    if fact.kind == "number":
        number = given.get(text, value)
        return None if number == value else f"{number} by convert_with (--convert-with)"
    matching = []
    for name in model.shapes:
        if any(pattern.match(name) is not None for pattern in fact.names):
            matching.append(name)
    if fact.kind == "size":
        for name in matching:
            shape = model.shapes[name]
            if fact.dim < len(shape) and shape[fact.dim] != value:
                return f"{shape[fact.dim]} in the checkpoint, by dim {fact.dim} of {name}"
        return None
    if fact.kind == "count":
        count = len(matching)
        if count > value or (count < value and count and model.is_whole):
            return f"{count} in the checkpoint, which has that many {text}"
        return None
    shown = f"{str(not value).lower()} in the checkpoint, which has"
    if bool(value) == (fact.kind == "present"):  # one of the names should be there
        return f"{shown} no {text}" if model.is_whole and not matching else None
    written = [name for name in matching if name not in model.aliases]
    return f"{shown} {written[0]}" if written else None
