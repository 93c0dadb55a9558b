"""Convert what a merge selects to the names and values of another model family, and compare it with its config."""

from __future__ import annotations

from collections.abc import Mapping

from statexchange.conversions.config_facts import check_configs
from statexchange.conversions.rules import ConversionRules
from statexchange.formats.converted import (
    Converted,
    config_files_beside,
    config_of,
    configs_beside,
    convert_source,
    model_tensors,
)
from statexchange.formats.model_files import CONFIG
from statexchange.formats.sections import section_of
from statexchange.formats.source import Section, Source
from statexchange.sharding.options import ExportOptions

__all__ = ["converted_selection"]


def converted_selection(
    source: Source,
    options: ExportOptions,
    conversion: ConversionRules,
    numbers: Mapping[str, int],
    config: bytes | None,
    *,
    is_copied: bool,
) -> tuple[Converted, tuple[str, ...]]:
    """Convert the selected tensors under their names without wrappers' parts; return notes about names, too.

    Args:
        source: the source of the merge.
        options: which of its tensors are selected.
        conversion: the conversion.
        numbers: the numbers for it that the caller gives.
        config: the config.json that the caller gives.
        is_copied: whether without one the source's own is copied.
    """
    names = source.tensor_names
    options.check_include(names)
    wanted = frozenset(filter(options.wants, names))
    selected = section_of(source, Section("model", "", wanted)).unwrapped()
    given_configs = [] if config is None else config_of(f"{CONFIG} of files_from", config)
    converted = convert_source(selected, conversion, numbers, [*given_configs, *configs_beside(source)])
    config_files = [*given_configs, *config_files_beside(source)]
    # A config describes the model of transformers, which an inverse conversion has as its input.
    model = selected if conversion.is_inverse else converted.source
    written = config_files[0] if config_files and (given_configs or is_copied) else None
    check_configs(
        conversion.facts,
        conversion.model_type,
        model_tensors(model, is_whole=len(wanted) == len(names)),
        config_files,
        written,
        numbers,
    )
    # The source's own notes come with the others of the report.
    notes = [*selected.notes[len(source.notes) :], *options.notes_on_exclude({*names, *source.unsupported})]
    notes += options.notes_on_rename(converted.source.tensor_names)
    return converted, tuple(notes)
