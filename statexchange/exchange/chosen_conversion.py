"""The conversion of a call on live state: the one that its options name, or transformers' own for a model of its."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from statexchange.comm.communicator import Communicator
from statexchange.comm.typed import from_root
from statexchange.conversions.numbers import KnownConfig
from statexchange.conversions.plan import ConversionPlan, plan_conversion
from statexchange.conversions.rules import ConversionRules
from statexchange.exchange.rank_metadata import all_tensors
from statexchange.exchange.saved_names import SavedNames, note_on_container, saved_names
from statexchange.formats.converted import config_of, read_conversion
from statexchange.formats.model_files import CONFIG
from statexchange.sharding.options import ExportOptions, Selection
from statexchange.state.describe import Description
from statexchange.state.pretrained import model_config

__all__ = ["ChosenConversion", "chosen_conversion"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChosenConversion:
    """The conversion of a call: its rules, the numbers that the caller gave, and the configs that this rank knows."""

    rules: ConversionRules
    numbers: Mapping[str, int]
    configs: Sequence[KnownConfig]

    @classmethod
    def of(cls, options: Selection, state: object) -> ChosenConversion | None:
        """Return the conversion that the options of a call name; None if they name none."""
        rules, numbers = read_conversion(options)
        if rules is None:
            return None
        config = model_config(state)
        configs = [] if config is None else [KnownConfig("the model's config", config)]
        return cls(rules, numbers, configs)

    def with_config(self, content: bytes | None) -> ChosenConversion:
        """Return the conversion with the config.json of `files_from`, if there is one, before other configs."""
        return self if content is None else replace(self, configs=[*config_of(CONFIG, content), *self.configs])

    def texts(self) -> dict[str, str]:
        """Return the options that must be equal on all ranks, as text by name."""
        return {"convert": self.rules.name, "convert_with": repr(sorted(self.numbers.items()))}

    def plan(self, comm: Communicator, described: Description, options: ExportOptions) -> ConversionPlan:
        """Return the conversion of the tensors of all ranks that `include` and `exclude` select. Collective."""
        shared = self.shared(comm)
        tensors = all_tensors(comm, described)
        with comm.phase("converting its state"):
            options.check_include(tensors)
            selected = {name: info for name, info in tensors.items() if options.wants(name)}
            return plan_conversion(shared.rules, selected, shared.numbers, shared.configs)

    def shared(self, comm: Communicator) -> ChosenConversion:
        """Return the conversion with the numbers of root's configs that its rules use. Collective."""
        keys = {key for rule in self.rules.numbers.values() for key in rule.config}
        configs = []
        for config in self.configs:
            configs.append(KnownConfig(config.where, {key: config.values.get(key) for key in keys}))
        # Numbers decide names and shapes, so that all ranks need the same: a config file may differ between hosts.
        return replace(self, configs=from_root(comm, configs, list[KnownConfig], "the model's config"))

    def left_options(self, options: ExportOptions) -> ExportOptions:
        """Return the options that apply to the converted tensors: the patterns match names before the conversion."""
        return replace(options, include=(), exclude=(), layout=None)


def chosen_conversion(
    options: Selection, state: object, config: bytes | None, *, is_root: bool
) -> ChosenConversion | SavedNames | None:
    """Return the conversion that the options of a call name, or else that of `save_pretrained`. Not collective.

    `config` is a config.json that the caller gave. Root warns of a model whose conversion is not used.
    """
    conversion = ChosenConversion.of(options, state) if options.converts else None
    if conversion is not None:
        return conversion.with_config(config)
    names = saved_names(state)
    note = note_on_container(state) if is_root and names is None else ""
    if note:
        _log.warning("%s", note)
    return names
