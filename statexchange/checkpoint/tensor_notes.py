"""Notes about the tensors of a merge, export or load: what a cast does to them, and what is missing of them."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from typing import TYPE_CHECKING

from statexchange.formats.source import abbreviated_list, abbreviated_names, empty_weights_text
from statexchange.sharding.options import FLOATS
from statexchange.sharding.plan import is_packed_weight
from statexchange.tensors import ITEMSIZE, LONG_NAMES
from statexchange.units import format_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from statexchange.sharding.options import ExportOptions
    from statexchange.sharding.plan import Plan, RankShards, TensorPlan

__all__ = ["note_on_extra_state", "note_on_overflows", "notes_on_tensors"]

_MAX_PATTERNS = 16
_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.)")
# Tensors without which quantised weights cannot be read: their names after that of the module or the weight.
_SCALES = re.compile(r"\.[^.]*(scale|zero|g_idx|SCB|absmax|quant_map|weight_shape)[^.]*$|\.quant_state\.[^.]+$")
# Tensors that writers of model families keep in float32 (`_keep_in_fp32_modules` in transformers).
_KEPT_WIDE = re.compile(
    r"e_score_correction_bias$|\.expert_bias$|\.moe_statics\.|\.indexer\.weights_proj\.|\.time_(decay|first)$"
)


def note_on_extra_state(names: Iterable[str], options: ExportOptions) -> tuple[str, ...]:
    """Return a note that names the selected extra state of modules, which an export leaves out."""
    selected = [name for name in dict.fromkeys(names) if options.wants(name)]
    if not selected:
        return ()
    return (f"extra state is no weight and is left out: {abbreviated_names(selected)}; save_checkpoint keeps it",)


def note_on_overflows(counts: Mapping[str, int]) -> tuple[str, ...]:
    """Return a note about finite elements that a cast has made infinite; `counts` has their number by tensor."""
    counts = {name: count for name, count in counts.items() if count}
    if not counts:
        return ()
    total = sum(counts.values())
    became = "1 finite value became infinite" if total == 1 else f"{total:,} finite values became infinite"
    named = abbreviated_list({name: f"{count:,}" for name, count in counts.items()})
    return (f"{became} as they were cast, in {named}: a dtype with a wider range keeps them, such as bfloat16",)


def notes_on_tensors(rank_shards: Sequence[RankShards], plan: Plan, options: ExportOptions) -> tuple[str, ...]:
    """Return notes about weights that are empty or lack their scales, and about what a cast leaves or narrows.

    Args:
        rank_shards: what the plan was made of.
        plan: the plan of the output.
        options: the options of the plan.
    """
    tensors: list[TensorPlan] = []
    for file in plan.files:
        tensors += file.tensors
    notes = []
    empty: dict[str, tuple[int, ...]] = {}
    for tensor in tensors:
        if 0 in tensor.shape:
            empty[tensor.name] = tensor.shape
    text = empty_weights_text(empty) if empty else ""
    if text:
        notes.append(text)
    if options.dtype or options.include or options.exclude:
        dtypes = {shard.name: shard.dtype for holder in rank_shards for shard in holder.shards}
        notes += _notes_on_scales(tensors, dtypes, options)
        if options.dtype:
            notes += _notes_on_casts(tensors, dtypes, options)
    return tuple(notes)


def _notes_on_scales(tensors: Sequence[TensorPlan], dtypes: Mapping[str, str], options: ExportOptions) -> Iterable[str]:
    """Yield a note if quantised weights are selected without their scales, zero points or the like."""
    packed = {tensor.source for tensor in tensors if is_packed_weight(tensor.source, dtypes[tensor.source])}
    owners = packed | {name.rpartition(".")[0] for name in packed}
    lacking = {}
    for name, dtype in dtypes.items():
        if not options.wants(name) and _SCALES.search(name) and _SCALES.split(name)[0] in owners:
            lacking[name] = dtype
    if lacking:
        yield f"quantised weights cannot be read without tensors that are left out: {abbreviated_list(lacking)}"


def _notes_on_casts(tensors: Sequence[TensorPlan], dtypes: Mapping[str, str], options: ExportOptions) -> Iterable[str]:
    """Yield notes about quantised tensors, which keep their dtypes, and about those that a cast should not narrow."""
    kept: dict[str, str] = {}
    floats = []
    for tensor in tensors:
        name, dtype = tensor.source, dtypes[tensor.source]
        if dtype in FLOATS and tensor.dtype == options.output_dtype(name, dtype):
            floats.append(tensor)
        elif dtype in FLOATS or (is_packed_weight(name, dtype) and options.casts(name)):
            kept[name] = dtype
    if kept:
        count = "1 tensor keeps its dtype" if len(kept) == 1 else f"{len(kept):,} tensors keep their dtypes"
        reason = "as a cast does not unpack quantised weights or change their scales"
        yield f"{count}, {reason}: {abbreviated_list(kept)}"
    yield from _notes_on_narrowed(floats, dtypes, options)


def _notes_on_narrowed(
    floats: Sequence[TensorPlan], dtypes: Mapping[str, str], options: ExportOptions
) -> Iterable[str]:
    """Yield a note about the tensors that the cast narrows and should not, with the option that keeps them.

    These are in a wider dtype than most elements of the source, or writers of their family keep the name in float32.
    """
    elements: Counter[str] = Counter()
    for tensor in floats:
        elements[dtypes[tensor.source]] += tensor.nbytes // ITEMSIZE[tensor.dtype]
    bulk = max((ITEMSIZE[dtype] for dtype, _ in elements.most_common(1)), default=0)
    narrowed = {}
    for tensor in floats:
        dtype = dtypes[tensor.source]
        is_wide = ITEMSIZE[dtype] > bulk or _KEPT_WIDE.search(tensor.source)
        if is_wide and ITEMSIZE[dtype] > ITEMSIZE[tensor.dtype]:
            narrowed[tensor.source] = dtype
    if not narrowed:
        return
    patterns = _patterns(narrowed, dtypes)
    shown = patterns if len(patterns) <= _MAX_PATTERNS else dict(list(patterns.items())[:1])
    # The caller's own patterns follow: the first that matches a name counts.
    rules = {pattern: LONG_NAMES[dtype] for pattern, dtype in (*options.dtype, *shown.items())}
    rules = {pattern: rules[pattern] for pattern in (*shown, *rules)}
    arguments = [f'--dtype "{pattern}={dtype}"' for pattern, dtype in rules.items()]
    count = format_number(len(narrowed), "tensor")
    text = (
        f"the cast narrows {count} that the source, or writers of such models, keep wide: {abbreviated_list(narrowed)}"
    )
    keep = "keep them" if shown is patterns else f"keep those of the first of {len(patterns):,} patterns"
    yield f"{text}. To {keep}, dtype={rules} ({' '.join(arguments)})"


def _patterns(narrowed: Mapping[str, str], dtypes: Mapping[str, str]) -> dict[str, str]:
    """Return patterns that select the tensors, with their dtypes: one for all layers where it selects no other."""
    fits: dict[str, bool] = {}  # whether a pattern selects tensors of one dtype alone
    patterns: dict[str, str] = {}
    for name, dtype in narrowed.items():
        pattern = _NUMBER.sub("*", name)
        if pattern not in fits:
            fits[pattern] = all(dtypes[other] == dtype for other in fnmatch.filter(dtypes, pattern))
        patterns[pattern if fits[pattern] else name] = dtype
    return patterns
