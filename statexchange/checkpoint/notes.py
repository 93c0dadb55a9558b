"""Notes for the user of a merge, export, save or load: what is not written, and what a cast does to tensors."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from statexchange.checkpoint.publication import FORMAT_METADATA
from statexchange.errors import UnsupportedError, excerpt
from statexchange.formats import torchao
from statexchange.formats.config_check import config_warnings
from statexchange.formats.model_files import ADAPTER_CONFIG, CONFIG
from statexchange.formats.source import (
    FLAT_PARAMETERS,
    abbreviated_list,
    abbreviated_names,
    empty_weights_text,
    is_flat_parameter,
)
from statexchange.sharding.options import FLOATS
from statexchange.sharding.paths import is_adapter, note_on_adapters
from statexchange.sharding.pieces import boxes_of
from statexchange.sharding.plan import is_packed_weight
from statexchange.tensors import ITEMSIZE, LONG_NAMES, PACKED, numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from statexchange.checkpoint.publication import Provenance
    from statexchange.formats.source import Source
    from statexchange.sharding.options import ExportOptions
    from statexchange.sharding.plan import Plan, RankShards, TensorPlan
    from statexchange.sharding.rules import Layout

_TRANSFORMERS_NAMES = re.compile(r"(^|[._])embed|(^|\.)lm_head\.|(^|\.)(layers?|h|blocks?)\.[0-9]+\.")
# Names under an optimizer's key, in its state dict, or with the name of a moment at the end.
_OPTIMIZER_STATE = re.compile(
    r"(optim|optimizer|optimizers|optim_state|optimizer_state|optimizer_states)(\..*)?|state\.[0-9]+\.[^.]+|"
    r"(.*\.)?(exp_avg|exp_avg_sq|max_exp_avg_sq|exp_inf|momentum_buffer|square_avg|grad_avg|acc_delta)",
    re.DOTALL,
)
_MAX_RANKS = 4  # sets of equal ranks that are shown
_WINDOW = 1 << 18  # elements of a constant that are hashed at a time


def check_readable(source: Source, options: ExportOptions) -> None:
    """Raise UnsupportedError for a selected tensor that is unsupported or flattened."""
    for name, error in source.unsupported.items():
        if options.wants(name):
            raise error
    for shard_file in source.files_without_specs:
        for name in filter(is_flat_parameter, shard_file.tensors):
            if options.wants(name):
                raise UnsupportedError(FLAT_PARAMETERS, name=name, path=shard_file.path)


def kept_metadata(source: Source, options: ExportOptions) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the text metadata of the output files, and notes about the source's metadata that is not kept.

    torchao's records of its weights get the names that `options` give to the tensors.
    """
    metadata = dict(source.metadata)
    old_format, new_format = metadata.pop("format", None), FORMAT_METADATA["format"]
    if options.rename:
        metadata = torchao.renamed_records(metadata, options.renamed, source.path)
    reasons = dict.fromkeys(source.differing, "files differ")
    written = dict(FORMAT_METADATA)
    for key, value in metadata.items():
        if _is_text(key) and _is_text(value):
            written[key] = value
        else:
            reasons[key] = "not valid text"
    notes = []
    if reasons:
        notes.append(f"metadata keys that are not kept: {abbreviated_list(reasons)}")
    if old_format not in (None, new_format):
        notes.append(f"the metadata key format becomes {new_format!r}; it was {excerpt(old_format, 60)}")
    return written, tuple(notes)


def _is_text(value: str) -> bool:
    """Whether a string can be encoded: JSON can contain half of a surrogate pair."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def note_on_others(source: Source, options: ExportOptions) -> tuple[str, ...]:
    """Return a note about the selected entries that are not tensors."""
    others = {name: description for name, description in source.others.items() if options.wants(name)}
    if not others:
        return ()
    count = "1 entry is not a tensor" if len(others) == 1 else f"{len(others):,} entries are not tensors"
    return (f"{count}, not written: {abbreviated_list(others)}",)


def notes_on_names(plan: Plan, files: Collection[str], *, is_converted: bool) -> tuple[str, ...]:
    """Return notes on what the names of a model's tensors show: what does not belong to it, or is missing beside it.

    Args:
        plan: what is written.
        files: the names of the small files beside the tensors.
        is_converted: whether the names are those that a conversion gives.
    """
    names = [tensor.source for tensor in plan.tensors.values()]
    notes = []
    of_optimizer = list(filter(_OPTIMIZER_STATE.fullmatch, names))
    # Who merges an optimizer alone means to: only a mixture is a surprise.
    if 0 < len(of_optimizer) < len(names):
        finding = f"{len(of_optimizer):,} of {len(names):,} tensors look like optimizer state"
        advice = 'exclude (--exclude), or in a job\'s state section="model" (--section model), leaves them out'
        notes.append(f"{finding}, such as {of_optimizer[0]}: {advice}")
    if not {CONFIG, ADAPTER_CONFIG}.intersection(files):
        notes += _note_on_missing_config(plan.tensors)
    # Built-in conversions are of models with layers: for other names their tables need not be read.
    if not is_converted and any(".layers." in f".{name}" for name in plan.tensors):
        notes += _note_on_foreign_names(list(plan.tensors))
    return tuple(notes)


def _note_on_missing_config(names: Collection[str]) -> Iterator[str]:
    """Yield a note if transformers loads no model, or PEFT no adapter, of these names without a config."""
    # No program loads the names of a live model of PEFT, whatever config lies beside them.
    if not any(map(_TRANSFORMERS_NAMES.search, names)) or note_on_adapters(names):
        return
    program, missing = "transformers", CONFIG
    if is_adapter(names):
        program, missing = "PEFT", ADAPTER_CONFIG
    yield f"no {missing}: {program} will not load this directory; give one by files_from (--files-from)"


def _note_on_foreign_names(names: Collection[str]) -> Iterator[str]:
    """Yield a note if a built-in conversion to names of transformers has a rule for the name of every tensor."""
    from statexchange.conversions.choice import conversion_of  # reads the rules of each family

    conversion = conversion_of(names)
    if conversion is not None:
        option = f'convert="{conversion}" (--convert {conversion})'
        yield f"transformers does not know these names: {option} writes the names and values that it knows"


def notes_on_model(
    plan: Plan, files: Mapping[str, bytes], digests: Mapping[str, Sequence[str] | bytes]
) -> tuple[str, ...]:
    """Return notes on names that no program finds, and on what a config says against the tensors of a whole model.

    Args:
        plan: what is written.
        files: the small files beside the tensors.
        digests: the digests of each tensor's boxes, in order, where they are known.
    """
    notes = note_on_adapters(plan.tensors)
    if CONFIG in files or ADAPTER_CONFIG in files:
        notes += config_warnings(plan.tensors, files, digests)
    return notes


def notes_on_written(
    plan: Plan,
    provenance: Mapping[str, Provenance],
    layout: Layout,
    model_files: Mapping[str, bytes] | None,
) -> tuple[str, ...]:
    """Return the notes on what was written: overflows, equal parts of ranks, and what a config says against it.

    Args:
        plan: what was written.
        provenance: the boxes of each tensor.
        layout: the layout by which parts were joined.
        model_files: the small files beside a whole model; None if what was written may be a part of one.
    """
    notes = note_on_overflows({name: boxes.num_overflows for name, boxes in provenance.items()})
    notes += notes_on_equal_parts(layout, _joined_parts(plan, provenance))
    if model_files is not None:
        notes += notes_on_model(plan, model_files, {name: boxes.digests for name, boxes in provenance.items()})
    return notes


class JoinedParts(NamedTuple):
    """The parts that a layout joins to one tensor.

    Attributes:
        name: the name of the tensor.
        dtype: its dtype.
        digests: the digests of each rank's boxes, or the first digits of these.
        numel: the number of elements of a box, by such a digest; of some of the boxes at least.
    """

    name: str
    dtype: str
    digests: Mapping[int, Sequence[str]]
    numel: Mapping[str, int]


def _joined_parts(plan: Plan, provenance: Mapping[str, Provenance]) -> Iterator[JoinedParts]:
    """Yield the parts of each tensor in a plan, from the ranks and digests of its boxes."""
    for tensor in plan.tensors.values():
        digests: dict[int, list[str]] = {}
        numel = {}
        boxes = provenance[tensor.name]
        for box, rank, digest in zip(boxes_of(tensor.pieces), boxes.ranks, boxes.hex_digests(), strict=True):
            digests.setdefault(int(rank), []).append(digest)
            numel[digest] = box.numel
        yield JoinedParts(tensor.source, tensor.dtype, digests, numel)


def notes_on_equal_parts(layout: Layout, joined: Iterable[JoinedParts]) -> tuple[str, ...]:
    """Return a note on each rule without a mesh by which ranks with equal bytes hold parts of one tensor.

    They are most often copies of data parallelism, and the tensor then has too many rows. This is no proof, as experts
    that were made of one dense layer are equal too, so it is not refused. Zeros, ones and scalars prove nothing.

    Ranks 0 to 3 hold "w" by ``{"dim": 0}``. If ranks 0 and 2 have equal bytes, and 1 and 3 have, the note says "ranks
    [0, 2], [1, 3] have equal parts": two copies of two parts were joined to four.
    """
    if layout.mesh or not layout.rules:
        return ()
    repeated: dict[str, tuple[list[list[int]], list[str]]] = {}  # by pattern: equal ranks, names
    for parts in joined:
        rule = layout.rule_for(parts.name)
        # Moments of parts may well be equal where the parts are not; those of copies come with their parameter.
        if rule is None or rule.boxes is not None or ".state." in parts.name:
            continue
        groups: dict[tuple[str, ...], list[int]] = {}
        for rank, digests in sorted(parts.digests.items()):
            groups.setdefault(tuple(digests), []).append(rank)
        # One rank without an equal is enough: copies of data parallelism have equals for all parts.
        are_copied = len(parts.digests) > 1 and all(len(ranks) > 1 for ranks in groups.values())
        if are_copied and not all(_is_constant(text, numel, parts.dtype) for text, numel in parts.numel.items()):
            repeated.setdefault(rule.pattern, (list(groups.values()), []))[1].append(parts.name)
    notes = []
    for pattern, (equal_ranks, names) in repeated.items():
        shown = ", ".join(map(str, equal_ranks[:_MAX_RANKS]))
        finding = f"{abbreviated_names(list(map(repr, names)))}: ranks {shown} have equal parts"
        advice = f'give the layout a "mesh" and its rule for {pattern!r} an "axis", or make it "replicate"'
        notes.append(f"{finding}; if these are copies, {advice}")
    return tuple(notes)


def _is_constant(start: str, numel: int, dtype: str) -> bool:
    """Whether the digest that begins with `start` is that of one element, or of zeros or ones."""
    from statexchange.storage.files import digest

    if numel <= 1:
        return True
    # The tensor's bytes are not here any more, only their digest: so constants of its size are hashed.
    contents = [b"\0" * ITEMSIZE[dtype]]
    if dtype not in PACKED:
        contents.append(numpy_dtype(dtype).type(1).tobytes())
    num_windows, num_left = divmod(numel, _WINDOW)
    for element in contents:
        # One window many times over: a constant of the size of a tensor may not fit into memory.
        if digest(*[element * _WINDOW] * num_windows, element * num_left).startswith(start):
            return True
    return False


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
    total = sum(counts.values())
    if not total:
        return ()
    became = "1 finite value became infinite" if total == 1 else f"{total:,} finite values became infinite"
    named = abbreviated_list({name: f"{count:,}" for name, count in counts.items() if count})
    return (f"{became} as they were cast, in {named}: a dtype with a wider range keeps them, such as bfloat16",)


def notes_on_tensors(rank_shards: Sequence[RankShards], plan: Plan, options: ExportOptions) -> tuple[str, ...]:
    """Return notes about weights that are empty or lack their scales, and about what a cast leaves or narrows.

    Args:
        rank_shards: what the plan was made of.
        plan: the plan of the output.
        options: the options of the plan.
    """
    tensors = list(plan.tensors.values())
    notes = []
    # ZeRO-3 leaves weights of shape [0] in a state dict that is taken without gathering them.
    empty = {tensor.name: tensor.shape for tensor in tensors if 0 in tensor.shape}
    if empty and (text := empty_weights_text(empty)):
        notes.append(text)
    # By default nothing is left out or cast, so that an export of 50,000 tensors need not look for what follows.
    if options.dtype or options.include or options.exclude:
        dtypes = {shard.name: shard.dtype for holder in rank_shards for shard in holder.shards}
        notes += _notes_on_scales(tensors, dtypes, options)
        if options.dtype:
            notes += _notes_on_casts(tensors, dtypes, options)
    return tuple(notes)


def _notes_on_scales(tensors: Sequence[TensorPlan], dtypes: Mapping[str, str], options: ExportOptions) -> Iterable[str]:
    """Yield a note if quantised weights are selected without their scales, zero points or the like."""
    # Scales have the name of the weight ("fc.weight.absmax" of bitsandbytes) or of its module ("fc.weight_scale").
    owners = set()
    for tensor in tensors:
        if is_packed_weight(tensor.source, dtypes[tensor.source]):
            owners |= {tensor.source, tensor.source.rpartition(".")[0]}
    missing = {}
    for name, dtype in dtypes.items():
        if not options.wants(name) and _SCALES.search(name) and _SCALES.split(name)[0] in owners:
            missing[name] = dtype
    if missing:
        yield f"quantised weights cannot be read without tensors that are left out: {abbreviated_list(missing)}"


def _notes_on_casts(tensors: Sequence[TensorPlan], dtypes: Mapping[str, str], options: ExportOptions) -> Iterable[str]:
    """Yield notes about quantised tensors, which keep their dtypes, and about those that a cast should not narrow."""
    kept: dict[str, str] = {}
    floats = []
    for tensor in tensors:
        name, dtype = tensor.source, dtypes[tensor.source]
        # A float that is not written in the dtype that was asked for is the scale of a quantised weight.
        if dtype in FLOATS and tensor.dtype == options.output_dtype(name, dtype):
            floats.append(tensor)
        elif dtype in FLOATS or (is_packed_weight(name, dtype) and options.casts(name)):
            kept[name] = dtype
    if kept:
        count = "1 tensor keeps its dtype" if len(kept) == 1 else f"{len(kept):,} tensors keep their dtypes"
        reason = "as a cast does not unpack quantised weights or change their scales"
        yield f"{count}, {reason}: {abbreviated_list(kept)}"
    yield from _note_on_narrowed(floats, dtypes)


def _note_on_narrowed(floats: Sequence[TensorPlan], dtypes: Mapping[str, str]) -> Iterable[str]:
    """Yield a note about the tensors that the cast narrows and should not.

    These are in a wider dtype than most elements of the source, or writers of their family keep the name in float32.
    """
    # Elements are counted, and not tensors: a model has more norms than weights, but few elements are in norms.
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
    if narrowed:
        name, dtype = next(iter(narrowed.items()))
        keep = f'dtype={{"{name}": "{LONG_NAMES[dtype]}", ...}} (--dtype "{name}={LONG_NAMES[dtype]}")'
        yield (
            "the cast narrows tensors that the source, or writers of such models, keep wide: "
            f"{abbreviated_list(narrowed)}. A pattern before the others keeps them wide: {keep}"
        )
