"""Convert what a merge selects to the names and values of another model family."""

from __future__ import annotations

from statexchange.conversions.numbers import Numbers
from statexchange.errors import InvalidArgumentError
from statexchange.formats.converted import (
    Converted,
    config_files_beside,
    config_of,
    configs_beside,
    convert_source,
    read_conversion,
)
from statexchange.formats.model_files import CONFIG
from statexchange.formats.sections import section_of
from statexchange.formats.source import Section, Source
from statexchange.sharding.options import ExportOptions

__all__ = ["converted_selection"]


def converted_selection(
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
