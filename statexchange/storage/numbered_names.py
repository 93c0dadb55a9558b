"""Names that are a prefix and a number: ``step-000000700``, ``weight_v000012``, ``000003``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NumberedNames:
    """The names of numbers, each in one form.

    Attributes:
        prefix: what the names begin with.
        digits: the least number of digits; shorter numbers begin with zeros, so that names sort as numbers do.
        most_digits: the most that a name may have.

    Example:
        >>> steps = NumberedNames("step-", 9, 18)
        >>> steps.name(700), steps.numbers(["step-000000700", "step-700", "step-0000000008", "notes"])
        ('step-000000700', [700])
    """

    prefix: str
    digits: int
    most_digits: int

    def name(self, number: int) -> str:
        """Return the name of a number."""
        return f"{self.prefix}{number:0{self.digits}d}"

    def number(self, name: str) -> int | None:
        """Return the number in a name; None for any other name."""
        digits = name.removeprefix(self.prefix)
        # The length first, as Python refuses to convert thousands of digits.
        if len(digits) <= self.most_digits and digits.isdecimal() and self.name(int(digits)) == name:
            return int(digits)
        return None

    def numbers(self, names: Iterable[str]) -> list[int]:
        """Return the numbers in those of some names that have one, in order."""
        numbers = []
        for name in names:
            number = self.number(name)
            if number is not None:
                numbers.append(number)
        return sorted(numbers)
