"""What decides how a live state and the entries of a source are matched, beside the live state itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from statexchange.sharding.rules import Layout, with_dots
from statexchange.state.entries import Entries, Entry, SavedTensor
from statexchange.state.flatten import ObjectStates
from statexchange.state.name_filter import NameFilter
from statexchange.state.types import Path

__all__ = ["Matching"]


@dataclass(slots=True)
class Matching:
    """The entries of a source, and what decides which of them fill a live state.

    Attributes:
        names: the filter of the load, with its options.
        entries: the entries of the source.
        objects: the present states of objects.
        has_tree: whether the source is a save of ours, with the names of parameters in the whole state.
        classes: the classes of optimizers that the source records, by path.
        path: that of the source, for errors.
        saved_by: the number of ranks that have saved; None if the source does not record it.
        loaded_by: the number of ranks that load.
        layout: the rules for live tensors that are parts of whole ones; one without rules if the load has none.
        renumbered: the source's names of tensors that the layout renumbers over all ranks.
    """

    names: NameFilter
    entries: Entries
    objects: ObjectStates
    has_tree: bool
    classes: Mapping[str, frozenset[str]]
    path: str
    saved_by: int | None
    loaded_by: int
    layout: Layout = field(init=False)
    renumbered: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # A copy: it notes which patterns have matched, and a load may run twice.
        options = self.names.options
        self.layout = Layout({}) if options.layout is None else options.layout.unmatched()

    def stored(self, text: str, keys: Path) -> list[Entry] | None:
        """Return the entries that fill a live tensor, several if a layout splits it; None if the source lacks one."""
        names = [text]
        if self.layout.rules:
            names = self._names_by_layout(text)
        entries = []
        for name in names:
            entry = self.entries.at(name, keys if name == text else None)
            if entry is None or not isinstance(entry.leaf, SavedTensor):
                return None
            entries.append(entry)
        return entries

    def _names_by_layout(self, name: str) -> list[str]:
        rule = self.layout.rule_for(name)
        names = [name]
        if rule is not None:
            names = rule.names(name)
        return [self.renumbered.get(new, new) for new in names]

    def parameter(self, name: str) -> SavedTensor | None:
        """Return the source's tensor of the parameter that has this name in the state; None if it has none."""
        entry = self.entries.at(with_dots(name)) if name else None
        if entry is not None and isinstance(entry.leaf, SavedTensor):
            return entry.leaf
        return None

    def is_like_parameter(self, saved: SavedTensor, parameter_name: str) -> bool:
        """Whether a tensor of an optimizer's state has its parameter's shape in the source, and a layout shards that.

        Then the live tensor is this rank's part of it, as the parameter is.
        """
        if not parameter_name or self.layout.rule_for(parameter_name) is None:
            return False
        parameter = self.parameter(parameter_name)
        return parameter is not None and parameter.shape == saved.shape
