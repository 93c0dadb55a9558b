"""Whether a source has the state of an optimizer of the live class."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from statexchange.errors import InvalidArgumentError, type_text
from statexchange.state.optimizers import class_name, hyperparameters

__all__ = ["check_class"]

# What schedulers add to param groups: it says nothing of the optimizer's class.
_OF_SCHEDULERS = {"initial_lr", "swa_lr", "min_lr", "max_lr", "base_momentum", "max_momentum"}


def check_class(optimizer: Any, classes: Collection[str], groups: Iterable[Mapping[str, Any]], path: str) -> None:
    """Raise InvalidArgumentError if the state of another class of optimizers was saved at `path`.

    An equal qualified name is enough. Else the name without the module must be equal, as a script is the module
    ``__main__`` when it is run and another when it is imported, and the hyperparameters of one side must contain those
    of the other. Of a source without classes only the hyperparameters are compared.

    Args:
        optimizer: the live optimizer.
        classes: the qualified names that ranks have recorded; none if the source does not record them.
        groups: the saved param groups.
        path: the path of the optimizer in the state.
    """
    live = class_name(optimizer)
    if live in classes:
        return
    live_names = _hyperparameter_names(optimizer.param_groups)
    saved_names = _hyperparameter_names(groups)
    has_name = not classes or live.rpartition(".")[2] in {name.rpartition(".")[2] for name in classes}
    if has_name and (live_names <= saved_names or saved_names <= live_names):
        return
    lacking = ", ".join(sorted(saved_names - live_names))
    leave = f", or pass exclude={path!r} to leave it as it is" if path else ""
    raise InvalidArgumentError(
        f"this is the state of another optimizer than {type_text(optimizer)}: make the optimizer that was saved{leave}",
        name=path or None,
        expected=min(classes, default=f"hyperparameters {lacking}"),
        found=live,
    )


def _hyperparameter_names(groups: Iterable[Mapping[str, Any]]) -> set[str]:
    return {name for group in groups for name in hyperparameters(group)} - _OF_SCHEDULERS
