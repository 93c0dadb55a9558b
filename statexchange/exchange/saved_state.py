"""A rank's state as a save has it: its tensors, described, all other values as JSON text, and whose they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from statexchange.errors import InvalidArgumentError, type_text
from statexchange.exchange.placing import names_in_optimizer_state
from statexchange.sharding.rules import Layout
from statexchange.state.describe import Description, State, describe
from statexchange.state.flatten import is_leaf
from statexchange.state.state_dict import encode_state, note_on_stale_optimizers, owners_of
from statexchange.state.tree import children
from statexchange.tensors import TensorLike, collector_paused

__all__ = ["SavedState", "describe_save"]


@dataclass(frozen=True, slots=True)
class SavedState:
    """A rank's state as it is written: the tensors, described, all other values as JSON text, and what is whose.

    `notes` are for the report.
    """

    config: str
    owners: Mapping[str, object]
    described: Description
    rules: Layout
    notes: tuple[str, ...]


def describe_save(state: State, layout: Mapping[str, object] | None, rank: int) -> SavedState:
    """Describe the state of this rank. Not collective."""
    if not is_leaf(state) and children(state) is None:
        what = "a module, an optimizer, or a mapping or list of these and of tensors and values"
        raise InvalidArgumentError(f"the state is {type_text(state)}: give {what}")
    with collector_paused():
        config, tensors, places, names = encode_state(state)
        rules = _parse_layout(layout, tensors)
        described = describe(tensors, rules, rank)
        placed = {name for name, local in described.tensors.items() if local.part is not None}
        owners = owners_of(places, names, placed.__contains__)
        return SavedState(config, owners, described, rules, note_on_stale_optimizers(places, names))


def _parse_layout(layout: Mapping[str, object] | None, tensors: Mapping[str, TensorLike]) -> Layout:
    """Parse the layout; an optimizer's tensor follows its parameter's rule if both have the same shape."""
    rules = Layout.parse({} if layout is None else layout)
    if not rules.rules:
        return rules
    for rule in rules.rules.values():
        if rule.renames or rule.reduce is not None:
            what = "renames tensors" if rule.renames else "reduces copies"
            raise InvalidArgumentError(
                f"layout rule for {rule.pattern!r} {what}, and save_checkpoint saves tensors as they are: leave it "
                "out, or use export_checkpoint"
            )
    like = {}
    for name, tensor in tensors.items():
        for parameter in names_in_optimizer_state(name):
            # A scalar of the optimizer, such as a step, belongs to the whole parameter.
            if parameter in tensors and tuple(tensors[parameter].shape) == tuple(tensor.shape):
                like[name] = parameter
    return replace(rules, like=like)
