"""Compare a model's config.json with the tensors of a conversion, beside which it is written.

A conversion states what a config of the model's architecture describes, such as the number of layers, and how it
follows from the names and shapes of tensors. A config that contradicts them is of another model: transformers would
load it with random weights, or without some of the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from statexchange.conversions.names import NamePattern
from statexchange.conversions.numbers import KnownConfig, NumberRule, Numbers, number_in
from statexchange.errors import InvalidArgumentError

__all__ = ["ConfigFact", "ModelTensors", "check_configs"]

_MODEL_TYPE = "model_type"


@dataclass(frozen=True, slots=True)
class ConfigFact:
    """The meaning of one key of a config, or of the product of several.

    Exactly one of `count`, `size`, `present`, `absent` and `number` is set.

    Attributes:
        keys: the keys.
        default: the value where a config of the architecture does not have the last key: a number, or an expression of
            other keys; None if it is not known.
        count: a name, of which there is one for each value of its placeholder.
        size: the name of tensors of which `dim` has this size.
        dim: a dim of `size`.
        present: names of which one is there if the value is 1, and none if it is 0.
        absent: a name that is not there if the value is 1, and is there if it is 0.
        number: the conversion's number that has the same value.
    """

    keys: tuple[str, ...]
    default: int | str | None = None
    count: NamePattern | None = None
    size: NamePattern | None = None
    dim: int = 0
    present: tuple[NamePattern, ...] = ()
    absent: NamePattern | None = None
    number: str = ""


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """The tensors of a model whose config is compared.

    Attributes:
        shapes: their shapes by name.
        aliases: names among them that need not be written, because they are tied to another.
        is_whole: whether these are all tensors of the checkpoint, and not a selection.
    """

    shapes: Mapping[str, tuple[int, ...]]
    aliases: Collection[str] = ()
    is_whole: bool = True


def check_configs(
    facts: Sequence[ConfigFact],
    model_type: str,
    model: ModelTensors,
    configs: Sequence[KnownConfig],
    written: KnownConfig | None = None,
    given: Mapping[str, int] = {},
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
            if fact.number:
                found = given.get(fact.number)
                if config is written and found not in (None, value):
                    raise _contradiction(fact, value, config, f"{found} by convert_with (--convert-with)")
                continue
            shown = _other_value(fact, value, model)
            if shown is not None:
                raise _contradiction(fact, value, config, shown)


def _contradiction(fact: ConfigFact, value: int, config: KnownConfig, found: str) -> InvalidArgumentError:
    keys = " x ".join(fact.keys)
    text = f"convert: {keys} is {_shown(fact, value)} in {config.where} and {found}: give the config of this model"
    return InvalidArgumentError(f"{text} (files_from, --files-from)")


def _shown(fact: ConfigFact, value: int) -> str:
    is_truth = fact.present or fact.absent is not None
    return str(bool(value)).lower() if is_truth else str(value)


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


def _other_value(fact: ConfigFact, value: int, model: ModelTensors) -> str | None:
    """Return what the tensors show instead of `value`; None if they do not contradict it."""
    if fact.count is not None:
        return _other_count(fact.count, value, model)
    if fact.size is not None:
        for name, shape in model.shapes.items():
            if fact.size.match(name) is not None and fact.dim < len(shape) and shape[fact.dim] != value:
                return f"{shape[fact.dim]} in the checkpoint, by dim {fact.dim} of {name}"
        return None
    if fact.absent is not None:
        return _other_absence(fact.absent.text, bool(value), model)
    found = next((name for name in model.shapes if any(one.match(name) is not None for one in fact.present)), None)
    if found is not None and not value:
        return f"true in the checkpoint, which has {found}"
    if found is None and value and model.is_whole:
        return f"false in the checkpoint, which has no {fact.present[0].text}"
    return None


def _other_count(pattern: NamePattern, value: int, model: ModelTensors) -> str | None:
    found = sum(pattern.match(name) is not None for name in model.shapes)
    if found > value or (found < value and found and model.is_whole):
        return f"{found} in the checkpoint, which has that many {pattern.text}"
    return None


def _other_absence(name: str, is_absent: bool, model: ModelTensors) -> str | None:
    is_written = name in model.shapes and name not in model.aliases
    if is_absent and is_written:
        return f"false in the checkpoint, which has a {name} of its own"
    if not is_absent and name not in model.shapes and model.is_whole:
        return f"true in the checkpoint, which has no {name}"
    return None
