"""Notes for the user of a merge about entries that are not written and tensors that may not be wanted."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from statexchange.checkpoint.publication import FORMAT_METADATA
from statexchange.errors import UnsupportedError, excerpt
from statexchange.formats.source import abbreviated_list

if TYPE_CHECKING:
    from collections.abc import Iterable

    from statexchange.formats.source import Source
    from statexchange.sharding.options import ExportOptions

__all__ = ["check_readable", "kept_metadata", "notes_about"]

_OPTIMIZERS = ("optim", "optimizer", "optimizers", "optim_state", "optimizer_state", "optimizer_states")
_BY_NUMBER = re.compile(r"state\.[0-9]+\.[^.]+")  # names in an optimizer's state dict
_SLOTS = (
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta"
)  # fmt: skip
_MAX_PATTERNS = 4
_DEEPSPEED = ("ds_version", "ds_config", "param_shapes")


def check_readable(source: Source, options: ExportOptions) -> None:
    """Raise UnsupportedError for a selected tensor that is unsupported, or that DeepSpeed ZeRO-3 keeps elsewhere."""
    for name, error in source.unsupported.items():
        if options.wants(name):
            raise error
    if source.kind != "torch" or not any(name.startswith(_DEEPSPEED) for name in source.others):
        return
    for shard_file in source.files:
        empty = [t.shard.name for t in shard_file.tensors.values() if t.shard.global_shape == (0,)]
        partitioned = list(filter(options.wants, empty))
        if partitioned:
            raise UnsupportedError(
                f"DeepSpeed ZeRO-3 wrote {len(partitioned)} tensors of shape [0] here; their values are in the "
                "*_optim_states.pt files: run DeepSpeed's zero_to_fp32.py there, or leave them out with exclude "
                "(--exclude)",
                name=partitioned[0],
                path=shard_file.path,
            )


def kept_metadata(source: Source) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the text metadata of the output files, and notes about the source's metadata that is not kept."""
    others = {key: value for key, value in source.metadata.items() if key != "format"}
    kept = {key: value for key, value in others.items() if _is_text(key) and _is_text(value)}
    lost = [*source.differing, *(key for key in others if key not in kept)]
    notes = []
    if lost:
        reasons = {key: "files differ" if key in source.differing else "not valid text" for key in lost}
        notes.append(f"metadata keys that are not kept: {abbreviated_list(reasons)}")
    given, written = source.metadata.get("format"), FORMAT_METADATA["format"]
    if given not in (None, written):
        notes.append(f"the metadata key format becomes {written!r}; it was {excerpt(given, 60)}")
    return {**FORMAT_METADATA, **kept}, tuple(notes)


def _is_text(value: str) -> bool:
    """Whether a string can be encoded: JSON can contain half of a surrogate pair."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def notes_about(source: Source, names: Iterable[str], options: ExportOptions) -> tuple[str, ...]:
    """Return notes about entries that are not tensors, and about optimizer state among the tensors `names`."""
    notes = []
    others = {name: what for name, what in source.others.items() if options.wants(name)}
    if others:
        count = "1 entry is not a tensor" if len(others) == 1 else f"{len(others):,} entries are not tensors"
        notes.append(f"{count}, not written: {abbreviated_list(others)}")
    groups = Counter(map(_optimizer_group, names))
    rest = groups.pop("", 0)
    if groups and rest:
        shown = [pattern for pattern, _ in groups.most_common(_MAX_PATTERNS)]
        given = ", ".join(f'"{pattern}"' for pattern in shown)
        line = " ".join(f'--exclude "{pattern}"' for pattern in shown)
        more = "" if len(groups) <= _MAX_PATTERNS else " and others"
        found = sum(groups.values())
        what = f"{found:,} of {found + rest:,} tensors look like optimizer state"
        notes.append(f"{what}: to leave them out, exclude=[{given}]{more} ({line})")
    return tuple(notes)


def _optimizer_group(name: str) -> str:
    """Return a pattern of the optimizer state to which a tensor seems to belong; "" if to none."""
    first, _, _ = name.partition(".")
    if first in _OPTIMIZERS:
        return f"{first}.*"
    if _BY_NUMBER.fullmatch(name):
        return "state.*"
    slot = name.rpartition(".")[2]
    return f"*.{slot}" if slot in _SLOTS else ""
