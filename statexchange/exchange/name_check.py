"""Compare the names of a state and of a source, and say what to do where they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from statexchange.errors import InvalidArgumentError, NotFoundError
from statexchange.formats.sections import SECTIONS
from statexchange.sharding.options import LoadOptions
from statexchange.sharding.rename_hint import suggest_rename
from statexchange.sharding.wrappers import WRAPPERS
from statexchange.state.entries import Entries, SavedTensor
from statexchange.state.load_plan import LoadPlan
from statexchange.state.modules import is_module, live_items
from statexchange.state.tree import walk
from statexchange.tensors import is_tensor

__all__ = ["SHOWN", "check_names", "loads_nothing", "selects_nothing"]

SHOWN = 5


def loads_nothing(plan: LoadPlan) -> bool:
    """Whether the source lacks all tensors of the state, or all that a state without tensors has."""
    lacks_state = not plan.stateful.isdisjoint(plan.missing)
    return bool(plan.missing) and not plan.targets and (lacks_state or plan.is_empty)


def selects_nothing(options: LoadOptions) -> str:
    """Return the message for patterns that leave nothing to load on any rank."""
    given = {"include": list(options.include), "exclude": list(options.exclude)}
    patterns = " and ".join(f"{option}={names}" for option, names in given.items() if names)
    return f"{patterns} selects no tensor and no value that both the source and the state have"


def check_names(state: Any, plan: LoadPlan, entries: Entries, reasons: Sequence[str], path: str) -> None:
    """Raise an error that lists all missing and unexpected names, as torch does.

    `reasons` are those for what is missing. Plain values of a torch checkpoint that no rank has are no error, nor is
    extra state that a source of tensors alone cannot have.
    """
    missing = [name for name in plan.missing if name not in plan.tolerated]
    if not missing and all(name in plan.tolerated for name in plan.unexpected):
        return
    lists = [
        f"{len(names)} {what}: {', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''}"
        for what, names in (("missing in the source", missing), ("not in the state", plan.unexpected))
        if names
    ]
    if not plan.targets and not plan.num_values:
        what, general = "the source has no name of the state", ""
    elif loads_nothing(plan):  # an error without `strict`, too
        what, general = "the source has no tensor of the state", ""
    else:
        what, general = "the names differ", "strict=False loads what both have"
    advice = [*reasons, _hint(state, plan, entries), general]
    text = "; ".join([what, *lists, *filter(None, advice)])
    kind = NotFoundError if missing else InvalidArgumentError
    raise kind(text, path=path)


def _hint(state: Any, plan: LoadPlan, entries: Entries) -> str:
    """Return advice if the source has names for an optimizer's parameters, or the missing ones with another prefix."""
    if plan.nameless:
        return (
            f"the source has the parameters of {min(plan.nameless)!r} by their names in the state that was saved: "
            "give the state what has these parameters, too, under the same name; exclude leaves it as it is"
        )
    # Parameters of optimizers have the names of their tensors in the state. What is missing whole has several names.
    missing = [name for name in plan.missing if name not in plan.parameters]
    inside = {name: _names_in(state[name]) for name in missing if isinstance(state, Mapping) and name in state}
    missing = [f"{name}.{inner}" if inner else name for name in missing for inner in inside.get(name) or [""]]
    tensors = {entry.text for entry in entries if isinstance(entry.leaf, SavedTensor)}
    prefixes = dict.fromkeys(sorted(name.split(".", 1)[0] for name in tensors if "." in name))
    for prefix in sorted(prefixes, key=lambda prefix: (prefix != "model", prefix not in SECTIONS)):
        is_above = not plan.targets and missing and all(f"{prefix}.{name}" in tensors for name in missing)
        if is_above and prefix not in WRAPPERS:
            return f'the source has them under "{prefix}": give {{"{prefix}": state}}'
    free = tensors - plan.loaded
    for prefix in dict.fromkeys(name.split(".", 1)[0] for name in missing if "." in name):
        if free.issuperset(name[len(prefix) + 1 :] for name in missing if name.startswith(f"{prefix}.")):
            is_key = isinstance(state, Mapping) and prefix in state
            if plan.targets and not is_key:  # it would move names that fit
                continue
            advice = f'give state["{prefix}"]' if is_key else f'rename=[("^", "{prefix}.")] gives them this name'
            return f'the source has them without "{prefix}": {advice}'
    found = suggest_rename(free, missing)
    return f"rename=[{found[:2]!r}] gives {found[2]} tensors of the source names of the state" if found else ""


def _names_in(value: Any) -> list[str]:
    """Return the names of the tensors in a module, or in a mapping."""
    if is_module(value):
        return [*live_items(value)[0]]
    return [step.path for step in walk(value) if is_tensor(step.value)] if isinstance(value, Mapping) else []
