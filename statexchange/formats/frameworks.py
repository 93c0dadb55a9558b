"""The directories in which training frameworks keep the parts of a checkpoint: a table of names.

`directories.py` reads such a directory. The names of its files also show what one of them alone is: the tensors of an
optimizer, for example, have no key that shows it.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from statexchange.formats.source import SectionName, SourceKind


class Row(NamedTuple):
    """A way in which a part of a job's state is stored.

    Attributes:
        section: what the part is; None if it has several sections, which its names show.
        pattern: the whole names of its files, or of its directories, which end in "/". The names with an equal group
            ``of`` are one part; without such a group each name is one. With a group ``rank`` there is a file for each
            rank: as many as the group ``ranks`` says, or else for each up to the last.
        reader: the format of the files, or of each directory. DCP's ``.metadata`` is a file of the directory itself.
        shows_section: whether the name of one of its files alone shows the section.
    """

    section: SectionName | None
    pattern: str
    reader: Literal["dcp", "huggingface", "torch_file"] = "torch_file"
    shows_section: bool = False

    @property
    def is_directory(self) -> bool:
        """Whether the names are those of directories."""
        return self.pattern.endswith("/")

    def match(self, name: str) -> re.Match[str] | None:
        """Match the name of a file, or of a directory."""
        return re.fullmatch(self.pattern, f"{name}/" if self.is_directory else name)

    def has(self, group: str) -> bool:
        """Whether the pattern has a group of this name."""
        return f"(?P<{group}>" in self.pattern


class Framework(NamedTuple):
    """A framework's directory.

    Attributes:
        kind: the format that `info` shows.
        mark: the directory is recognised if it has an entry of such a name, and a part. A name with a "/" begins with
            the name of the directory itself.
        rows: the parts. Of each section the first way that is there counts.
    """

    kind: SourceKind
    mark: str
    rows: tuple[Row, ...]


TRAINER_STATE = "trainer_state.json"
_INDEX = r"(-[0-9]{5}-of-[0-9]{5})?"
# accelerate writes FSDP's states: sharded as DCP, full as one file, local as one file a rank. A model comes before an
# adapter, as in model_files.py.
_ACCELERATE = (
    Row("model", rf"(?P<of>model(_[0-9]+)?){_INDEX}\.safetensors(\.index\.json)?", "huggingface"),
    Row("model", rf"(?P<of>adapter_model){_INDEX}\.safetensors(\.index\.json)?", "huggingface"),
    Row("model", r"pytorch_model_fsdp_[0-9]+/", "dcp"),
    Row("model", r"pytorch_model_fsdp(_[0-9]+)?\.bin"),
    Row("model", r"pytorch_model_fsdp(?P<of>(_[0-9]+)?)_rank[0-9]+\.bin"),
    Row("model", rf"(?P<of>pytorch_model(_[0-9]+)?){_INDEX}\.bin(\.index\.json)?"),
    Row("model", rf"(?P<of>adapter_model){_INDEX}\.bin(\.index\.json)?"),
    Row("optimizer", r"optimizer_[0-9]+/", "dcp"),
    Row("optimizer", r"optimizer(_[0-9]+)?\.(pt|bin)", shows_section=True),
    Row("optimizer", r"optimizer(?P<of>(_[0-9]+)?)_rank[0-9]+\.(pt|bin)", shows_section=True),
)
_WORLD = r"_world_size_(?P<ranks>[0-9]{1,9})_rank_(?P<rank>[0-9]{1,9})\.pt"
VERL_FILES = "huggingface"  # the directory with config and tokenizer
FRAMEWORKS = (
    Framework(
        "trainer",
        # Trainer writes its state last: a directory of this name that has only the other files is unfinished.
        rf"{re.escape(TRAINER_STATE)}|checkpoint-[0-9]{{1,18}}/(training_args\.bin|optimizer\.pt)",
        (
            *_ACCELERATE,
            Row("scheduler", r"scheduler(_[0-9]+)?\.pt", shows_section=True),
            Row("rng", r"rng_state(_(?P<rank>[0-9]{1,9}))?\.pth", shows_section=True),
            Row("other", r"training_args\.bin|scaler\.pt", shows_section=True),
        ),
    ),
    Framework(
        "accelerate",
        r"random_states_[0-9]+\.pkl|pytorch_model_fsdp.*|optimizer_0",
        (
            *_ACCELERATE,
            Row("scheduler", r"scheduler(_[0-9]+)?\.bin", shows_section=True),
            Row("rng", r"random_states_(?P<rank>[0-9]{1,9})\.pkl", shows_section=True),
            Row("other", r"scaler\.pt|(dl_state_dict|sampler)(_[0-9]+)?\.bin|custom_checkpoint_[0-9]+\.pkl"),
        ),
    ),
    Framework(
        "verl",
        r"(model|optim)_world_size_[^/]*",
        (
            Row("model", rf"(?P<of>model){_WORLD}"),
            Row("optimizer", rf"(?P<of>optim){_WORLD}", shows_section=True),
            Row("other", rf"extra_state{_WORLD}", shows_section=True),
        ),
    ),
    Framework(
        "lightning",
        r"meta\.pt",
        (Row(None, r"\.metadata", "dcp"), Row("other", r"meta\.pt")),
    ),
    Framework(
        "torch_checkpointing",
        r"metadata\.pkl",
        (
            Row("model", r"(?P<of>model)_(?P<rank>[0-9]{1,9})\.pt"),
            Row("optimizer", r"(?P<of>optim|optimizer)_(?P<rank>[0-9]{1,9})\.pt", shows_section=True),
            Row("other", r"(?!(model|optim|optimizer)_[0-9])[^/]+_[0-9]+\.pt"),
        ),
    ),
)


# DeepSpeed's, with the number of the rank and that of the model-parallel rank.
OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_([0-9]{1,9})_mp_rank_([0-9]{1,9})_optim_states\.pt")
UNIVERSAL_OPTIMIZER = "optimizer_state.pt"  # beside the directories of a Universal Checkpoint's parameters


def state_file(name: str) -> SectionName | None:
    """Return the section of a file of this name, if that is known and not the model; else None."""
    if OPTIMIZER_FILE.fullmatch(name) or name == UNIVERSAL_OPTIMIZER:
        return "optimizer"
    for framework in FRAMEWORKS:
        for row in framework.rows:
            if row.shows_section and row.match(name):
                return row.section
    return None
