"""Select what a merge takes from a source: tensors under the names that are left to rename, and small files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from statexchange.checkpoint.extra_files import CallerFiles, read_caller_files, source_files
from statexchange.errors import InvalidArgumentError
from statexchange.formats import rank_files
from statexchange.formats.config_check import unties_heads, without_heads
from statexchange.formats.model_files import ADAPTER_CONFIG, CONFIG
from statexchange.formats.registry import open_source, open_with, read_opened
from statexchange.formats.sections import MODEL_OF_PARTS, no_section, section_of, select_section
from statexchange.formats.source import Section, Source
from statexchange.sharding.options import ADAPTER_PATTERN, CallOptions, ExportOptions, Rename, renamed
from statexchange.sharding.paths import is_adapter, note_on_wrappers, wrapper_rules
from statexchange.sharding.rules import Layout
from statexchange.storage.location import OpenedPath, read_option_file

if TYPE_CHECKING:
    from statexchange.formats.converted import Converted

# First parts of names in a whole model. A name with one of these after "model." shows that "model." is a wrapper:
# "model.lm_head.weight" has a wrapper, and "model.layers.0.mlp.weight" of transformers has none.
_TOPS = ("model.", "lm_head.", "transformer.", "module.")


@dataclass(frozen=True, slots=True)
class Selection:
    """The part of an opened source that is merged.

    Attributes:
        source: the tensors, converted if a conversion was asked for.
        options: the options that are left to apply to these.
        reductions: "max" or "min" by name of the tensors whose copies are reduced.
        caller_files: the files of the option `files_from`.
        files: the small files of the source that are copied.
        compared_files: those with which the tensors are only compared.
        converted: the conversion's result.
        notes: notes about names.
        file_notes: notes about files that are not copied.
    """

    source: Source
    options: ExportOptions
    reductions: Mapping[str, str]
    caller_files: CallerFiles
    files: Mapping[str, bytes]
    compared_files: Mapping[str, bytes]
    converted: Converted | None
    notes: tuple[str, ...]
    file_notes: tuple[str, ...]


def read_layout(layout: Mapping[str, Any] | str | os.PathLike[str] | None) -> Mapping[str, Any] | Layout | None:
    """Return the layout as it was given, or parsed from the file if it is a path."""
    if not isinstance(layout, str | os.PathLike):
        return layout
    return Layout.parse(read_option_file(layout, "a layout"))


def open_selected(
    path: str | os.PathLike[str], call: CallOptions, options: ExportOptions
) -> tuple[Source, Mapping[str, str]]:
    """Return a section of the source, sharded by the layout if there is one, and the reductions by tensor name."""
    section = call.section
    has_patterns = bool(options.layout is not None or options.include or options.exclude or options.rename)
    # Patterns are written for the names that `info` shows, with their sections' prefixes. A conversion's patterns match
    # a model's names, so there the section is chosen as without patterns.
    if section is None and has_patterns and options.convert is None:
        section = MODEL_OF_PARTS
    if options.layout is None:
        wants = options.wants if options.include or options.exclude else None
        source = open_source(path, section=section, wants=wants)
    else:
        source = open_with(path, _read_plain, strict=True, section=section)
    try:
        # A framework's directory of which no part is a model's: without this, its optimizer would be merged as one.
        names = [section.name for section in source.sections]
        if section == MODEL_OF_PARTS and names and "model" not in names:
            raise no_section(source, "model")
        if options.layout is None:
            return source, {}
        return rank_files.apply_layout(source, options.new_layout())
    except BaseException:
        source.close()
        raise


def _read_plain(opened: OpenedPath, *, section: str | None) -> Source:
    """Read each file of a directory of plain safetensors files as one rank's; read anything else by its own format."""
    if rank_files.matches(opened):
        return select_section(rank_files.read(opened), section)
    return read_opened(opened, section=section)


def select(opened: Source, reductions: Mapping[str, str], options: ExportOptions) -> Selection:
    """Select the tensors, convert them if that was asked for, and find the files that belong to them."""
    files: dict[str, bytes] = {}
    file_notes: tuple[str, ...] = ()
    if options.files_from not in ((), []):  # an empty sequence: copy none
        files, file_notes = source_files(opened)
    caller_files = read_caller_files(options.files_from)
    source, converted = opened, None
    if options.converts:
        converted, notes = _converted_selection(opened, options, caller_files.config(), is_copied=CONFIG in files)
        source, reductions = converted.source, converted.renamed_keys(reductions)
        left_options = replace(options, include=(), exclude=())  # they have been applied
    else:
        left_options, notes = _unwrapping_options(opened, options)
    config = caller_files.config(files)
    if config is not None and unties_heads(config):
        # Without the aliases of heads that config.json does not tie, so that they are written.
        untied = [replace(shard_file, aliases=without_heads(shard_file.aliases)) for shard_file in source.files]
        source = replace(source, files=tuple(untied))
    compared_files: dict[str, bytes] = {}
    names = map(left_options.renamed, filter(left_options.wants, source.tensor_names))
    if is_adapter(list(names), has_config=ADAPTER_CONFIG in files):
        left_options = replace(left_options, filename_pattern=options.filename_pattern or ADAPTER_PATTERN)
    elif ADAPTER_CONFIG in files:
        # Beside a whole model it would make transformers look for an adapter's weights: not copied, only compared.
        compared_files = {ADAPTER_CONFIG: files.pop(ADAPTER_CONFIG)}
    return Selection(
        source, left_options, reductions, caller_files, files, compared_files, converted, notes, file_notes
    )


def _converted_selection(
    source: Source,
    options: ExportOptions,
    config: bytes | None,
    *,
    is_copied: bool,
) -> tuple[Converted, tuple[str, ...]]:
    """Convert the selected tensors under their names without wrappers' parts; return notes about names, too.

    Args:
        source: the source of the merge.
        options: which of its tensors are selected, the conversion, and the numbers for it that the caller gives.
        config: the config.json that the caller gives.
        is_copied: whether without one the source's own is copied.

    Raises:
        InvalidArgumentError: there is no such conversion, or a number differs from that in the config.json that is
            written beside the tensors.
    """
    # Late: most merges convert nothing.
    from statexchange.conversions.numbers import Numbers
    from statexchange.formats.converted import (
        config_files_beside,
        config_of,
        configs_beside,
        convert_source,
        read_conversion,
    )

    conversion, numbers = read_conversion(options)
    assert conversion is not None
    names = source.tensor_names
    options.check_include(names)
    # Rules are for the model's own names: what is not selected need not have one, and wrappers' parts are no names.
    wanted = frozenset(filter(options.wants, names))
    selected = section_of(source, Section("model", "", wanted)).unwrapped()
    written = []
    if config is not None:
        written = config_of(f"{CONFIG} of files_from", config)
    configs = [*written, *configs_beside(source)]
    if is_copied and not written:
        written = config_files_beside(source)
    # A caller's number is right where configs differ, but the model is loaded with the one that is written.
    in_written = Numbers(conversion.numbers, configs=written)
    for name, number in numbers.items():
        for value, where in in_written.in_configs(name):
            if value != number:
                text = f"convert: {name} is {value} in {where} and {number} by convert_with (--convert-with)"
                raise InvalidArgumentError(f"{text}: give the config of this model (files_from)")
    converted = convert_source(selected, conversion, numbers, configs)
    # The source's own notes come with the others of the report.
    notes = [*selected.notes[len(source.notes) :], *options.notes_on_exclude({*names, *source.unsupported})]
    notes += options.notes_on_rename(converted.source.tensor_names)
    return converted, tuple(notes)


def _unwrapping_options(source: Source, options: ExportOptions) -> tuple[ExportOptions, tuple[str, ...]]:
    """Return options that remove the prefixes of wrappers from all selected names, and notes about that."""
    all_names = source.tensor_names
    names = set(filter(options.wants, all_names))
    rules = wrapper_rules(names)
    notes = options.notes_on_exclude({*all_names, *source.unsupported})
    notes += options.notes_on_rename({renamed(name, rules) for name in names})
    if rules:
        return replace(options, rename=_unwrapping(rules, options.rename)), (note_on_wrappers(names, rules), *notes)
    # Only said, not done: some models have names of their own that begin with "model.", and renamed tensors would not
    # load.
    if names and not options.rename and all(name.startswith("model.") for name in names):
        is_whole_model = any(name.removeprefix("model.").startswith(_TOPS) for name in names)
        if is_whole_model or source.kind == "dcp":  # DCP checkpoints are often saved as {"model": ...}
            # Without the section, the pattern would match names with the section's prefix.
            section = "" if source.selected is None else f"--section {source.selected} "
            reason = "which may be a wrapper around the model's own names"
            advice = f'the options of a merge ({section}--rename "^model\\.=")'
            notes.insert(0, f"all names begin with 'model.', {reason}; to remove it: {advice}")
    return options, tuple(notes)


def _unwrapping(rules: Sequence[tuple[str, str]], rename: Rename) -> Rename:
    """Return a `rename` that removes the parts of wrappers first.

    With the rule (``^module\\.``, "") and a caller's ("fc", "linear"), "module.fc.weight" becomes "linear.weight".
    """
    if not callable(rename):
        return (*rules, *rename)
    inner: Callable[[str], str] = rename
    return lambda name: inner(renamed(name, rules))
