"""Names of files in which frameworks keep the parts of a job's state that are not the model.

Only the name of such a file shows what it is: the tensors of an optimizer, for example, have no key that shows it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from statexchange.formats.source import SectionName

__all__ = ["OPTIMIZER_FILE", "StateFile", "state_file"]

# DeepSpeed's, with the number of the rank and that of the model-parallel rank.
OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_([0-9]{1,9})_mp_rank_([0-9]{1,9})_optim_states\.pt")


@dataclass(frozen=True, slots=True)
class StateFile:
    """A file of another part than the model.

    Attributes:
        section: the part.
        about: what it is, for a message.
    """

    section: SectionName
    about: str


_FILES: tuple[tuple[re.Pattern[str], StateFile], ...] = (
    (OPTIMIZER_FILE, StateFile("optimizer", "a rank's part of DeepSpeed's optimizer")),
    # Of Trainer, accelerate and torch_checkpointing; then verl's.
    (
        re.compile(r"optimizer(_[0-9]+)?(_rank[0-9]+)?\.(pt|bin)|optim_[0-9]+\.pt"),
        StateFile("optimizer", "the state of an optimizer"),
    ),
    (
        re.compile(r"optim_world_size_[0-9]+_rank_[0-9]+\.pt"),
        StateFile("optimizer", "a rank's part of the state of an optimizer"),
    ),
    (
        re.compile(r"extra_state_world_size_[0-9]+_rank_[0-9]+\.pt"),
        StateFile("other", "a rank's random states and scheduler"),
    ),
    (re.compile(r"scheduler(_[0-9]+)?\.(pt|bin)"), StateFile("scheduler", "the state of a learning rate's scheduler")),
    (
        re.compile(r"rng_state(_[0-9]+)?\.pth|random_states_[0-9]+\.pkl"),
        StateFile("rng", "the states of random number generators"),
    ),
    (re.compile(r"training_args\.bin"), StateFile("other", "the arguments of Trainer")),
)


def state_file(name: str) -> StateFile | None:
    """Return what a file of this name is, if it is known and not the model; else None."""
    return next((file for pattern, file in _FILES if pattern.fullmatch(name)), None)
