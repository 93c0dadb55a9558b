"""The numbers of a model that a conversion needs, such as the number of heads, and where they come from.

A number is, in this order: what the caller gave; what an expression of other numbers says (``head_dim / 2``); the value
of a key in a config of the model; the one unknown in the factors of a tensor's dim, which then follows from the
tensor's shape.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from statexchange.errors import InvalidArgumentError, UnsupportedError, excerpt

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPERAND = rf"(?:{_NAME.pattern}|[0-9]{{1,18}})"
_EXPRESSION = re.compile(rf"\s*{_OPERAND}(?:\s*[*/]\s*{_OPERAND})*\s*")
_TOKEN = re.compile(rf"{_OPERAND}|[*/]")
_MAX_NUMBER = 1 << 63


@dataclass(frozen=True, slots=True)
class NumberRule:
    """The source of a number: keys of configs, or an expression.

    Attributes:
        about: what it is, for messages.
        config: keys of configs that have it, in the order in which they are tried.
        value: an expression of other numbers, "" for none.
        must_be: the one value that the conversion is for; None if any is.
    """

    about: str = ""
    config: tuple[str, ...] = ()
    value: str = ""
    must_be: int | None = None


@dataclass(frozen=True, slots=True)
class KnownConfig:
    """A config of the model: `where` it lies, for messages, and its values."""

    where: str
    values: Mapping[str, object]


class UnknownNumberError(InvalidArgumentError):
    """A number that the conversion needs is not known."""


def check_expression(expression: object) -> str | int:
    """Return a number, or names and numbers joined by * and /; raise InvalidArgumentError for anything else."""
    if type(expression) is int and 0 < expression < 1 << 48:
        return expression
    if isinstance(expression, str) and len(expression) < 200 and _EXPRESSION.fullmatch(expression):
        return expression
    raise InvalidArgumentError(
        f"convert: {excerpt(expression)} is neither a number nor an expression like 'n_heads / n_kv_heads'"
    )


class Numbers:
    """The numbers of one model.

    Args:
        rules: where numbers come from, by name.
        convert_with: numbers that the caller gave.
        configs: configs of the model, which have to agree.

    Raises:
        InvalidArgumentError: the caller gave a number that the conversion does not use.
    """

    def __init__(
        self, rules: Mapping[str, NumberRule], convert_with: Mapping[str, int] = {}, configs: Sequence[KnownConfig] = ()
    ) -> None:
        # A misspelt name would leave the number to a config, or to the shapes, without a word.
        unused = sorted(convert_with.keys() - rules.keys())
        if unused:
            names = ", ".join(rules) or "none"
            raise InvalidArgumentError(f"convert_with: this conversion uses no {unused[0]!r}; its numbers: {names}")
        self._rules = rules
        self._convert_with = convert_with
        self._configs = configs
        self._values: dict[str, int | None] = {}  # of numbers that are expressions, until another number is solved
        self._solved: dict[str, int] = {}  # of numbers that follow from the shapes of tensors

    def check(self) -> None:
        """Check what is known before any tensor is.

        Raises:
            InvalidArgumentError: two configs have different values of a number that the caller has not given.
            UnsupportedError: a number shows that the conversion is not for this model.
        """
        for name, rule in self._rules.items():
            about = f" ({rule.about})" if rule.about else ""
            values = self.in_configs(name)
            for value, where in values[1:]:
                first, first_where = values[0]
                if value != first:
                    raise InvalidArgumentError(
                        f"convert: {name}{about} is {first} in {first_where} and {value} in {where}: give the config "
                        f'of this model, or the right number as convert_with={{"{name}": N}} (--convert-with {name}=N)'
                    )
            number = self.get(name) if rule.must_be is not None else None
            if number not in (None, rule.must_be):
                text = f"convert: this conversion is for models in which {name} is {rule.must_be}{about}"
                raise UnsupportedError(f"{text}, and it is {number}{self._origin(name)}")

    def in_configs(self, name: str) -> list[tuple[int, str]]:
        """Return the number's value in each config that has one, and where that is; [] if the caller gave it."""
        if name in self._convert_with:
            return []
        rule = self._rules.get(name, NumberRule())
        values = []
        for config in self._configs:
            # transformers and Megatron have different names for a number: the first that a config has counts.
            for key in rule.config:
                value = _number_in(config.values, key)
                if value is not None:
                    values.append((value, config.where))
                    break
        return values

    def get(self, name: str) -> int | None:
        """Return a number; None if it is not known."""
        if name in self._convert_with:
            return self._convert_with[name]
        # A name without a rule stands for a number that only the shapes of tensors tell.
        rule = self._rules.get(name, NumberRule())
        if rule.value and name not in self._values:
            self._values[name] = None  # an expression that refers to itself has no value
            self._values[name] = self.known(rule.value)
        value = self._values.get(name)
        if value is not None:
            return value
        values = self.in_configs(name)
        if values:
            return values[0][0]
        return self._solved.get(name)

    def known(self, expression: str | int) -> int | None:
        """Return the value of an expression, computed from left to right; None if a number in it is not known."""
        tokens = _TOKEN.findall(str(expression))
        value = 1
        # "a / b" is read as "1 * a / b".
        for operator, token in zip(["*", *tokens[1::2]], tokens[::2], strict=True):
            number = int(token) if token.isdigit() else self.get(token)
            if number is None:
                return None
            if operator == "*":
                value *= number
                # A file may multiply 200 characters of numbers, by as many rules as it likes.
                if value >= _MAX_NUMBER:
                    raise InvalidArgumentError(f"convert: {expression} is larger than any tensor")
            elif number == 0 or value % number:
                text = f"convert: {expression} is no whole number{self.shown(str(expression))}"
                raise InvalidArgumentError(text)
            else:
                value //= number
        return value

    def value(self, expression: str | int) -> int:
        """Return the value of an expression.

        Raises:
            UnknownNumberError: a number in it is not known; the message says how to give it.
            InvalidArgumentError: it is 0, which no count or ratio is.
        """
        value = self.known(expression)
        if value is None:
            raise self._unknown(str(expression))
        if value == 0:
            raise InvalidArgumentError(f"convert: {expression} is 0{self.shown(str(expression))}")
        return value

    def factors(self, expressions: Sequence[str | int], size: int, name: str) -> tuple[int, ...]:
        """Return the factors of a dim of `size` of tensor `name`; one unknown number follows from the size.

        Raises:
            UnknownNumberError: two numbers are unknown.
            InvalidArgumentError: the product of the factors is not `size`.

        Example:
            >>> Numbers({}, {}).factors(["n_heads", 64, 2], 512, "wq.weight")  # n_heads follows
            (4, 64, 2)
        """
        factors, unknown = [], []
        for expression in expressions:
            value = self.known(expression)
            if value is None:
                unknown.append(str(expression))
                value = 1
            factors.append(value)
        product = math.prod(factors)
        # "n_heads" alone follows from the size. An expression of several numbers would have to be solved for one.
        if len(unknown) == 1 and _NAME.fullmatch(unknown[0]):
            if product and size and size % product == 0:
                factors[expressions.index(unknown[0])] = self._solved[unknown[0]] = size // product
                product = size
                # An expression that had no value may have one now.
                self._values.clear()
        elif unknown:
            raise self._unknown(unknown[0])
        # An empty dim says nothing of its other factors, as one of them is 0.
        if product != size or (unknown and not size):
            shown = " x ".join(map(str, expressions))
            details = "".join(self.shown(str(expression)) for expression in expressions)
            raise InvalidArgumentError(
                f"convert: a dim of size {size} is not {shown}{details}: is this the config of this model?", name=name
            )
        return tuple(factors)

    def shown(self, expression: str) -> str:
        """Return the values of the names in an expression, and the configs that they are from, for a message."""
        texts = []
        for token in dict.fromkeys(_NAME.findall(expression)):
            value = self.get(token)
            if value is not None:
                texts.append(f"{token} = {value}{self._origin(token)}")
        return f" ({', '.join(texts)})" if texts else ""

    def _origin(self, name: str) -> str:
        values = self.in_configs(name)
        if not values:
            return ""
        return f" in {values[0][1]}"

    def _unknown(self, expression: str) -> UnknownNumberError:
        """Return the error for the first number of an expression that is missing."""
        name = next(name for name in _NAME.findall(expression) if self.get(name) is None)
        rule = self._rules.get(name, NumberRule())
        text = f"convert: {name} is not known"
        if rule.about:
            text += f" ({rule.about})"
        text += f': give convert_with={{"{name}": N}} (--convert-with {name}=N)'
        if rule.config:
            text += f", or a config.json with {rule.config[0]} (files_from, --files-from)"
        return UnknownNumberError(text)


def _number_in(values: Mapping[str, object], key: str) -> int | None:
    """Return a whole number or a truth value in a config, or in its text_config; None if it has none."""
    value = values.get(key)
    inner = values.get("text_config")
    if value is None and isinstance(inner, Mapping):
        value = inner.get(key)
    if isinstance(value, int) and 0 <= value < 1 << 48:  # a truth value is 1 or 0
        return int(value)
    return None
