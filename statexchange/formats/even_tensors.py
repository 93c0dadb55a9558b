"""Tensors that are cut evenly over very many files: one sharding spec for each, in place of a box for each part.

What looks at a checkpoint and plans from it needs no more of them than the specs (`Source.specs`). A part is opened
when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from typing_extensions import Self

    from statexchange.sharding.sharding_spec import ShardingSpec

__all__ = ["EvenParts", "FileTensors", "listed_tensors"]

_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)


class EvenParts(Protocol[_T_co]):
    """The parts of all files of a source.

    Attributes:
        specs: the tensors, whose `ranks` are the numbers of the files.
        num_files: the number of files.
        version: a JSON value that changes whenever a part may lie elsewhere.
    """

    specs: Mapping[str, ShardingSpec]
    num_files: int
    version: list[str | int]

    def names_in(self, file: int) -> list[str]:
        """Return the names of the tensors of which a file has a part."""

    def read(self, file: int, name: str) -> _T_co:
        """Return the part that a file has of a tensor; raise KeyError if it has none."""

    def renamed(self, new_name: Callable[[str], str | None]) -> Self:
        """Return the parts with other names, and without those whose new name is None."""


class FileTensors(Mapping[str, _T], Generic[_T]):
    """The tensors of one of these files, by name: parts of tensors that are cut evenly, and those that are `listed`."""

    def __init__(self, listed: Mapping[str, _T], parts: EvenParts[_T], file: int) -> None:
        self.listed = listed
        self.parts = parts
        self.file = file

    def __getitem__(self, name: str) -> _T:
        if name in self.listed:
            return self.listed[name]
        return self.parts.read(self.file, name)

    def __contains__(self, name: object) -> bool:
        return name in self.listed or (name in self.parts.specs and name in self.parts.names_in(self.file))

    def __iter__(self) -> Iterator[str]:
        yield from self.parts.names_in(self.file)
        yield from self.listed

    def __len__(self) -> int:
        return len(self.listed) + len(self.parts.names_in(self.file))


def listed_tensors(tensors: Mapping[str, _T]) -> Mapping[str, _T]:
    """Return the tensors of a file without the parts of those that are cut evenly."""
    return tensors.listed if isinstance(tensors, FileTensors) else tensors
