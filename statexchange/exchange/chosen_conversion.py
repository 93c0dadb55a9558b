"""The conversion of a call on live state: the one that its options name, or transformers' own for a model of its."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from statexchange.comm.communicator import Communicator, from_root
from statexchange.conversions.numbers import KnownConfig
from statexchange.conversions.plan import ConversionPlan, plan_conversion
from statexchange.conversions.rules import ConversionRules
from statexchange.exchange.pretrained import model_config
from statexchange.exchange.rank_metadata import all_tensors
from statexchange.exchange.saved_names import SavedNames, saved_names
from statexchange.formats.converted import config_of, read_conversion
from statexchange.formats.model_files import CONFIG
from statexchange.sharding.options import ExportOptions, Selection
from statexchange.state.describe import Description


@dataclass(frozen=True, slots=True)
class ChosenConversion:
    """The conversion of a call: its rules, the numbers that the caller gave, and the configs that this rank knows."""

    rules: ConversionRules
    numbers: Mapping[str, int]
    configs: Sequence[KnownConfig]

    @classmethod
    def of(cls, options: Selection, state: object, config_file: bytes | None = None) -> ChosenConversion | None:
        """Return the conversion that the options of a call name; None if they name none.

        `config_file` is the content of a config.json that the caller gave, which comes before other configs.
        """
        rules, numbers = read_conversion(options)
        if rules is None:
            return None
        configs: list[KnownConfig] = []
        if config_file is not None:
            configs += config_of(CONFIG, config_file)
        config = model_config(state)
        if config is not None:
            configs.append(KnownConfig("the model's config", config))
        return cls(rules, numbers, configs)

    def texts(self) -> dict[str, str]:
        """Return the options that must be equal on all ranks, as text by name."""
        return {"convert": self.rules.name, "convert_with": repr(sorted(self.numbers.items()))}

    def plan(self, comm: Communicator, described: Description, options: ExportOptions) -> ConversionPlan:
        """Return the conversion of the tensors of all ranks that `include` and `exclude` select. Collective."""
        keys: set[str] = set()
        for rule in self.rules.numbers.values():
            keys.update(rule.config)
        configs = []
        for config in self.configs:
            # What the rules use alone: a config has many other values, which may differ.
            configs.append(KnownConfig(config.where, {key: config.values.get(key) for key in keys}))
        # Numbers decide names and shapes, so that all ranks need the same: a config file may differ between hosts.
        shared = from_root(comm, configs, list[KnownConfig], "the model's config")
        tensors = all_tensors(comm, described)
        with comm.phase("converting its state"):
            options.check_include(tensors)
            selected = {name: info for name, info in tensors.items() if options.wants(name)}
            return plan_conversion(self.rules, selected, self.numbers, shared)

    def left_options(self, options: ExportOptions) -> ExportOptions:
        """Return the options that apply to the converted tensors: the patterns match names before the conversion."""
        return replace(options, include=(), exclude=(), layout=None)


Conversion: TypeAlias = ChosenConversion | SavedNames


def chosen_conversion(options: Selection, state: object, config: bytes | None) -> Conversion | None:
    """Return the conversion that the options of a call name, or else that of `save_pretrained`. Not collective.

    `config` is a config.json that the caller gave.
    """
    return ChosenConversion.of(options, state, config) or saved_names(state)
