"""Give the source of a load the names and values that the state has in memory, where those differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from statexchange.conversions.plan import unknown_names
from statexchange.errors import StateExchangeError
from statexchange.exchange.chosen_conversion import ChosenConversion
from statexchange.exchange.load_report import LoadRequest
from statexchange.exchange.pretrained import adapter_names, is_adapter_model
from statexchange.exchange.saved_names import saved_names
from statexchange.formats.converted import configs_beside, convert_source, converted_by, tensors_of
from statexchange.formats.sections import section_of
from statexchange.formats.source import Section, Source
from statexchange.state.load_plan import NameFilter
from statexchange.state.units import module_items
from statexchange.tensors import is_tensor


class ConvertedSource(NamedTuple):
    """A source as it is loaded.

    Attributes:
        source: the source, converted if it had to be.
        names: what makes its names those of the state.
        aliases: other names of tensors, which the conversion has lost.
        without_rule: names of the source for which a conversion has no rule.
        adapter: the names in memory of the active adapter's tensors, if only these are loaded into a PEFT model.
    """

    source: Source
    names: NameFilter
    aliases: Mapping[str, str] = {}
    without_rule: tuple[str, ...] = ()
    adapter: frozenset[str] | None = None


def converted_for_load(request: LoadRequest, source: Source, names: NameFilter) -> ConvertedSource:
    """Convert a source by a chosen conversion, or to the names that a model of transformers or PEFT has in memory.

    Not collective; reads no tensor. A source that has these names already stays as it is.
    """
    if request.conversion is not None:
        return _by_rules(request, request.conversion, source, names)
    if request.options.layout is not None:  # shapes in memory are those of parts, which no conversion knows
        return ConvertedSource(source, names)
    if is_adapter_model(request.state):
        return _to_adapter(request, source, names)
    return _to_names_in_memory(request, source, names)


def _by_rules(request: LoadRequest, conversion: ChosenConversion, source: Source, names: NameFilter) -> ConvertedSource:
    """Convert a source by the rules of `convert`; with `strict` a name without a rule is an error."""
    configs = [*conversion.configs, *configs_beside(source)]
    stored = frozenset(source.tensor_names)
    unknown: tuple[str, ...] = ()
    if not request.options.strict:
        unknown = tuple(unknown_names(conversion.rules, sorted(stored)))
        if len(unknown) < len(stored):
            source = section_of(source, Section("model", "", stored - set(unknown)))
    try:
        converted = convert_source(source, conversion.rules, conversion.numbers, configs).source
    except StateExchangeError as error:
        raise error.located(path=source.path) from None
    # Saved trees and other values have the names before the conversion: they are not loaded.
    converted = replace(converted, configs={}, texts={}, others={})
    adapter = None
    if is_adapter_model(request.state):
        adapter = frozenset(adapter_names(request.state).values())
    return ConvertedSource(converted, names, without_rule=unknown, adapter=adapter)


def _to_names_in_memory(request: LoadRequest, source: Source, names: NameFilter) -> ConvertedSource:
    """Rename and join the tensors of a source as transformers has them in memory."""
    conversion = saved_names(request.state)
    if conversion is None:
        return ConvertedSource(source, names)
    shapes = {}
    for name, value in module_items(request.state).items():
        if is_tensor(value):
            shapes[name] = tuple(value.shape)
    # transformers knows the names after `rename`.
    renamed = source.renamed(names.name)
    plan = conversion.plan_to_load(shapes, tensors_of(renamed), request.options)
    if plan is None:
        return ConvertedSource(source, names)
    # A saved tree has the names before the conversion.
    converted = replace(converted_by(renamed, plan).source, configs={})
    return _renamed_source(source, converted, names)


def _to_adapter(request: LoadRequest, source: Source, names: NameFilter) -> ConvertedSource:
    """Rename the tensors of an adapter alone as a PEFT model has them in memory; any other source stays as it is."""
    stored = {names.name(name) for name in tensors_of(source)}
    if not stored or stored <= module_items(request.state).keys():  # as a save has them
        return ConvertedSource(source, names)
    in_memory = adapter_names(request.state)
    if not stored <= in_memory.keys():
        return ConvertedSource(source, names)

    def new_name(name: str) -> str:
        return in_memory.get(names.name(name), names.name(name))

    converted = replace(source.renamed(new_name), configs={})
    return _renamed_source(source, converted, names)._replace(adapter=frozenset(in_memory.values()))


def _renamed_source(source: Source, converted: Source, names: NameFilter) -> ConvertedSource:
    """Return a converted source whose names `rename` has changed already, with the aliases of the original."""
    aliases: dict[str, str] = {}
    for file in source.files:  # of tensors that stay as they are
        aliases |= {names.name(alias): names.name(name) for alias, name in file.aliases.items()}
    return ConvertedSource(converted, names.without_renames(), aliases)
