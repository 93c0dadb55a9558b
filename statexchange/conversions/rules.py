"""The rules of a conversion, and their form in JSON.

A conversion file is an object::

    {
      "about": "from A to B",
      "numbers": {
        "n_heads": {"about": "attention heads", "config": ["num_attention_heads"]},
        "half": {"value": "head_dim / 2"}
      },
      "rules": [
        {"from": "embed.weight", "to": "model.embed_tokens.weight"},
        {"from": "layers.{layer}.wq.weight", "to": "model.layers.{layer}.self_attn.q_proj.weight",
         "values": [{"permute": {"dim": 0, "shape": ["n_heads", "half", 2], "order": [0, 2, 1]}}]},
        {"from": "layers.{layer}.fc1.weight",
         "to": ["model.layers.{layer}.mlp.gate_proj.weight", "model.layers.{layer}.mlp.up_proj.weight"],
         "values": [{"split": {"dim": 0, "sizes": [1, 1]}}]},
        {"from": "layers.{layer}.rope.freqs", "to": []}
      ]
    }

The first rule that has a pattern for a name counts; a name without a rule is an error. In a pattern, ``{layer}`` stands
for one part of a dotted name and ``{name*}`` for one part or more. Several names of "from" or "to" are a list; an empty
"to" drops the tensor. ``values`` are applied in order:

``{"permute": {"dim": 0, "shape": ["n_heads", "half", 2], "order": [0, 2, 1]}}``
    The dim is viewed as dims of these sizes, which are put into this order and joined again (rotary embeddings).
``{"transpose": {"order": [1, 0]}}``
    The dims in another order.
``{"split": {"dim": 0, "sizes": ["n_heads / n_kv_heads", 1, 1], "groups": "n_kv_heads"}}``
    One tensor becomes several; "sizes" are ratios. With "groups" (by default 1) the tensors alternate along the dim.
``{"fuse": {"dim": 0, "sizes": [1, 1], "groups": 1}}``
    Several become one; the inverse needs the sizes.
``{"unpad": {"dim": 0, "to": "vocab_size", "from": "padded_vocab_size"}}`` and ``pad``
    The dim is cut off at a size, or filled up with zeros. "from" is for the inverse. If the number "to" is not known,
    the tensor stays as it is.

With ``"of": 0`` or ``"of": [0, 1]`` permute, transpose, pad and unpad work on some of several tensors. Sizes are
numbers, or names of numbers joined by * and /. A number's value is what the caller gives (`convert_with`), the
expression "value", or a key of "config" in a config of the model; one unknown size of a permute follows from the
tensor's shape. With ``"must_be": 1`` a model whose number is known to differ is refused.

``"unstack": ["layer"]`` in a rule
    The tensors of "from" have one more dim in front, whose indices become ``{layer}`` in the names of "to"; "values"
    are for the tensors without this dim.
``"stack": ["layer"]``
    The inverse: ``{layer}`` occurs in "from" and becomes the first dim.
``"tied_to": "embed.weight"``
    The tensor is the same as another of "from" where the number ``tie_word_embeddings`` is 1. It is not written then;
    the inverse restores it where it is missing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from statexchange.conversions.numbers import NumberRule, check_expression
from statexchange.conversions.operations import Operation, parse_operation
from statexchange.errors import InvalidArgumentError, excerpt

_KEYS = {"about", "numbers", "rules"}
_NUMBER_KEYS = {"about", "config", "value", "must_be"}
_RULE_KEYS = {"from", "to", "values", "unstack", "stack", "tied_to"}
_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)(\*?)\}")


@dataclass(frozen=True)
class NamePattern:
    """A pattern of names, such as ``layers.{layer}.norm.weight``.

    Raises:
        InvalidArgumentError: a placeholder is malformed or occurs twice.

    Example:
        >>> NamePattern("layers.{layer}.{rest*}").match("layers.12.attention.wq.weight")
        {'layer': '12', 'rest': 'attention.wq.weight'}
        >>> NamePattern("model.layers.{layer}.mlp").filled({"layer": "12"})
        'model.layers.12.mlp'
    """

    text: str

    def __post_init__(self) -> None:
        rest = _PLACEHOLDER.sub("", self.text)
        if not self.text or "{" in rest or "}" in rest:
            text = "is not a name pattern: placeholders are like {layer}, or {name*} for several parts of a name"
            raise InvalidArgumentError(f"convert: {excerpt(self.text)} {text}")
        if len(_PLACEHOLDER.findall(self.text)) != len(self.placeholders):
            raise InvalidArgumentError(f"convert: a placeholder occurs twice in the name pattern {excerpt(self.text)}")

    @cached_property
    def placeholders(self) -> frozenset[str]:
        """The names of the placeholders."""
        return frozenset(name for name, _ in _PLACEHOLDER.findall(self.text))

    @cached_property
    def _start(self) -> str:
        return self.text.partition("{")[0]

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        parts = []
        end = 0
        for match in _PLACEHOLDER.finditer(self.text):
            parts.append(re.escape(self.text[end : match.start()]))
            name, several = match.groups()
            parts.append(f"(?P<{name}>.+)" if several else f"(?P<{name}>[^.]+)")
            end = match.end()
        parts.append(re.escape(self.text[end:]))
        # A foreign file may have a line break in a name, which "." would not match.
        return re.compile("".join(parts), re.DOTALL)

    def match(self, name: str) -> dict[str, str] | None:
        """Return what the placeholders stand for in a name; None if the name does not match."""
        # Each name is compared with the patterns of all rules before its own: most are ruled out here, uncompiled.
        if not name.startswith(self._start):
            return None
        match = self._regex.fullmatch(name)
        if match is None:
            return None
        return match.groupdict()

    def filled(self, values: Mapping[str, str]) -> str:
        """Return the name with these values for the placeholders."""
        return _PLACEHOLDER.sub(lambda match: values[match.group(1)], self.text)


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: the tensors `sources` become the tensors `targets` by `operations`.

    Attributes:
        sources: names of the inputs.
        targets: names of the outputs; none if the inputs are dropped.
        operations: what is done to the values.
        unstack: placeholders of the targets that are leading dims of the sources.
        stack: placeholders of the sources that are leading dims of the targets.
        tied_to: the source that this one equals in a model with tied embeddings.
        restored_from: the target that the target of this rule equals if the source is missing.
    """

    sources: tuple[NamePattern, ...]
    targets: tuple[NamePattern, ...]
    operations: tuple[Operation, ...] = ()
    unstack: tuple[str, ...] = ()
    stack: tuple[str, ...] = ()
    tied_to: str = ""
    restored_from: str = ""

    def __post_init__(self) -> None:
        shown = self.sources[0].text
        names = self.sources[0].placeholders
        for source in self.sources[1:]:
            if source.placeholders != names:
                raise InvalidArgumentError(f"convert: the names of 'from' {shown!r} have different placeholders")
        if not names >= set(self.stack) or names & set(self.unstack):
            raise InvalidArgumentError(f"convert: stack or unstack does not fit the placeholders of {shown!r}")
        # A target needs the unstacked placeholders, or all indices would get one name. Others it may leave out: two
        # inputs that get one name then are refused by the plan, which knows whether there are two.
        available = (names - set(self.stack)) | set(self.unstack)
        for target in self.targets:
            if not target.placeholders <= available or not target.placeholders >= set(self.unstack):
                raise InvalidArgumentError(f"convert: the placeholders of 'to' {target.text!r} do not fit {shown!r}")
        # Without operations each source is renamed to the target at its place.
        if not self.operations and len(self.targets) not in (0, len(self.sources)):
            text = f"convert: the rule for {shown!r} needs values, which make {len(self.targets)} tensors of"
            raise InvalidArgumentError(f"{text} {len(self.sources)}")

    def inverse(self) -> Rule:
        """Return the rule for the other direction; this one must have targets.

        Raises:
            InvalidArgumentError: an operation has no inverse.
        """
        operations = tuple(operation.inverse() for operation in reversed(self.operations))
        # Each pair changes its sides: the sources become targets, what was unstacked is stacked, and the tensor that
        # was not written is restored.
        restored_from, tied_to = self.tied_to, self.restored_from
        return Rule(self.targets, self.sources, operations, self.stack, self.unstack, tied_to, restored_from)

    @classmethod
    def parse(cls, raw: object) -> Rule:
        """Return a rule from its JSON form; raise InvalidArgumentError for anything else."""
        if not isinstance(raw, Mapping) or not {"from", "to"} <= raw.keys() <= _RULE_KEYS:
            raise InvalidArgumentError(
                f"convert: a rule has 'from' and 'to', and may have values, unstack, stack, tied_to; not {excerpt(raw)}"
            )
        values = raw.get("values", [])
        if not isinstance(values, list | tuple):
            raise InvalidArgumentError(f"convert: values are a list of operations, not {excerpt(values)}")
        sources = tuple(map(NamePattern, _texts(raw["from"])))
        if not sources:
            raise InvalidArgumentError("convert: a rule has an empty 'from'")
        return cls(
            sources,
            tuple(map(NamePattern, _texts(raw["to"]))),
            tuple(map(parse_operation, values)),
            _texts(raw.get("unstack", ())),
            _texts(raw.get("stack", ())),
            "".join(_texts(raw.get("tied_to", ()))),
        )


@dataclass(frozen=True, slots=True)
class ConversionRules:
    """The rules of one conversion and the numbers that they need.

    Attributes:
        name: how the user calls it, for messages.
        about: what it converts.
        numbers: where the numbers come from, by name.
        rules: the rules.
    """

    name: str
    about: str
    numbers: Mapping[str, NumberRule]
    rules: tuple[Rule, ...] = field(default=())

    def inverse(self) -> ConversionRules:
        """Return the conversion in the other direction, without rules that drop tensors.

        Of several rules with equal targets, the first counts.
        """
        rules = []
        seen: set[str] = set()
        for rule in self.rules:
            names = {target.text for target in rule.targets}
            # A tensor may have several names, as those of an older release, which come later: they are only read. A
            # rule without targets drops tensors, and nothing restores them.
            if not names <= seen:
                rules.append(rule.inverse())
            seen |= names
        return replace(self, name=f"inverse:{self.name}", rules=tuple(rules))

    @classmethod
    def parse(cls, raw: object, name: str) -> ConversionRules:
        """Return the conversion from its JSON form.

        Args:
            raw: the JSON value.
            name: how the user calls it.

        Raises:
            InvalidArgumentError: it is not a conversion; the message says why.
        """
        if not isinstance(raw, Mapping) or not {"rules"} <= raw.keys() <= _KEYS:
            text = "is not a conversion, which has 'rules' and may have 'numbers' and 'about'"
            raise InvalidArgumentError(f"convert: {name} {text}")
        rules, numbers, about = raw["rules"], raw.get("numbers", {}), raw.get("about", "")
        if not isinstance(rules, list | tuple) or not isinstance(numbers, Mapping) or not isinstance(about, str):
            raise InvalidArgumentError(f"convert: {name}: rules are a list, numbers an object and about a text")
        return cls(
            name,
            about,
            {key: _number_rule(key, number) for key, number in numbers.items()},
            tuple(map(Rule.parse, rules)),
        )


def _texts(raw: object) -> tuple[str, ...]:
    """Return a text or a list of texts as a tuple."""
    if isinstance(raw, str):
        return (raw,)
    if not isinstance(raw, list | tuple) or set(map(type, raw)) - {str}:
        raise InvalidArgumentError(f"convert: {excerpt(raw)} is neither a name nor a list of names")
    return tuple(raw)


def _number_rule(name: object, raw: object) -> NumberRule:
    if not isinstance(name, str) or not isinstance(raw, Mapping) or not raw.keys() <= _NUMBER_KEYS:
        text = 'is like {"about": "attention heads", "config": ["num_attention_heads"]}'
        raise InvalidArgumentError(f"convert: a number {text}, not {excerpt({name: raw})}")
    value = str(check_expression(raw["value"])) if "value" in raw else ""
    must_be = raw.get("must_be")
    if must_be is not None and (type(must_be) is not int or must_be < 0):
        raise InvalidArgumentError(f"convert: must_be is a number, not {excerpt(must_be)}")
    return NumberRule("".join(_texts(raw.get("about", ""))), _texts(raw.get("config", ())), value, must_be)
