"""Notes for the user of a merge about entries that are not written and tensors that may not be wanted."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from statexchange.checkpoint.publication import FORMAT_METADATA
from statexchange.errors import UnsupportedError, excerpt
from statexchange.formats.packed import renamed_torchao
from statexchange.formats.sections import sections_of
from statexchange.formats.source import FLAT_PARAMETERS, abbreviated_list, is_flat_parameter

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


def check_readable(source: Source, options: ExportOptions) -> None:
    """Raise UnsupportedError for a selected tensor that is unsupported or flattened."""
    for name, error in source.unsupported.items():
        if options.wants(name):
            raise error
    for shard_file in source.files:
        for name in filter(is_flat_parameter, shard_file.tensors):
            if options.wants(name):
                raise UnsupportedError(FLAT_PARAMETERS, name=name, path=shard_file.path)


def kept_metadata(source: Source, options: ExportOptions) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the text metadata of the output files, and notes about the source's metadata that is not kept.

    torchao's records of its weights get the names that `options` give to the tensors.
    """
    metadata = renamed_torchao(source.metadata, options.renamed, source.path) if options.rename else source.metadata
    others = {key: value for key, value in metadata.items() if key != "format"}
    written = {key: value for key, value in others.items() if _is_text(key) and _is_text(value)}
    reasons = dict.fromkeys(source.differing, "files differ")
    reasons |= {key: "not valid text" for key in others if key not in written}
    notes = []
    if reasons:
        notes.append(f"metadata keys that are not kept: {abbreviated_list(reasons)}")
    old_format, new_format = source.metadata.get("format"), FORMAT_METADATA["format"]
    if old_format not in (None, new_format):
        notes.append(f"the metadata key format becomes {new_format!r}; it was {excerpt(old_format, 60)}")
    return {**FORMAT_METADATA, **written}, tuple(notes)


def _is_text(value: str) -> bool:
    """Whether a string can be encoded: JSON can contain half of a surrogate pair."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def notes_about(
    source: Source, names: Iterable[str], options: ExportOptions, *, expects_model: bool
) -> tuple[str, ...]:
    """Return notes about entries that are not tensors, and about optimizer state among a model's tensors `names`."""
    notes = []
    others = {name: description for name, description in source.others.items() if options.wants(name)}
    if others:
        count = "1 entry is not a tensor" if len(others) == 1 else f"{len(others):,} entries are not tensors"
        notes.append(f"{count}, not written: {abbreviated_list(others)}")
    groups = Counter(map(_optimizer_group, names) if expects_model else ())
    num_others = groups.pop("", 0)
    if groups and num_others:
        patterns = [pattern for pattern, _ in groups.most_common(_MAX_PATTERNS)]
        argument = ", ".join(f'"{pattern}"' for pattern in patterns)
        command_line = " ".join(f'--exclude "{pattern}"' for pattern in patterns)
        more = "" if len(groups) <= _MAX_PATTERNS else " and others"
        num_found = groups.total()
        finding = f"{num_found:,} of {num_found + num_others:,} tensors look like optimizer state"
        advice = f"to leave them out, exclude=[{argument}]{more} ({command_line})"
        if any(section.name == "model" for section in sections_of(source)):
            advice = 'section="model" (--section model) leaves them out'
        notes.append(f"{finding}: {advice}")
    return tuple(notes)


def _optimizer_group(name: str) -> str:
    """Return the name pattern of the optimizer state to which a tensor seems to belong; "" if to none."""
    first, _, _ = name.partition(".")
    if first in _OPTIMIZERS:
        return f"{first}.*"
    if _BY_NUMBER.fullmatch(name):
        return "state.*"
    slot = name.rpartition(".")[2]
    return f"*.{slot}" if slot in _SLOTS else ""
