"""Write docs/reference/conversions.md, the built-in conversions; tests/unit/test_conversions.py compares it with them.

python tools/conversions_reference.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from statexchange.conversions import rules
from statexchange.conversions.choice import BUILTIN, read_builtin

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "conversions.md"
HEAD = """# Conversions

A conversion writes the names and values of another model family: `statexchange merge SOURCE PATH --convert NAME`, and
`convert=NAME` of `merge_checkpoint`, `export_checkpoint` and `load_checkpoint`. It works box by box on shards of any
layout, in the memory that a merge without it takes. `inverse:NAME` is the other direction. `FILE.json` in the place
of a name is a conversion of your own.

Numbers, such as the number of heads, come from `--convert-with NAME=NUMBER` (`convert_with={"NAME": NUMBER}`), from a
config.json (`--files-from`, beside the source, or of a model of transformers that is exported or loaded), or from the
arguments that a checkpoint of Megatron has; some follow from the shapes of tensors. One that is missing is named with
how to give it. `--include` and `--exclude` are for the names before a conversion, `--rename` and `--dtype` for those
after. A name without a rule is an error, unless it is excluded. Operations move elements and never compute.

`tools/conversions_reference.py` has written this page.
"""
OWN = """
## Your own

`own.json`, whose parts are explained below:

<!-- block: own.json -->
```json
{
  "about": "a model with fused projections",
  "numbers": {"n_heads": {"about": "attention heads", "config": ["num_attention_heads"]}},
  "rules": [
    {"from": "embed.weight", "to": "model.embed_tokens.weight"},
    {"from": "blocks.{layer}.qkv.weight",
     "to": ["model.layers.{layer}.self_attn.q_proj.weight",
            "model.layers.{layer}.self_attn.k_proj.weight",
            "model.layers.{layer}.self_attn.v_proj.weight"],
     "values": [{"split": {"dim": 0, "sizes": [1, 1, 1], "groups": "n_heads"}},
                {"permute": {"of": [0, 1], "dim": 0, "shape": ["n_heads", "half", 2], "order": [0, 2, 1]}}]},
    {"from": "blocks.{layer}.rope.freqs", "to": []}
  ]
}
```

"""


def cell(value: object) -> str:
    """Return names or a JSON value for a cell of a table."""
    if isinstance(value, str):
        return f"`{value}`"
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ", ".join(f"`{item}`" for item in value) or "nothing: it is dropped"
    return f"`{json.dumps(value)}`"


def values(rule: Mapping[str, Any]) -> str:
    """Return what a rule does besides renaming."""
    texts = [cell(operation) for operation in rule.get("values", [])]
    texts += [f"{key} {cell(rule[key])}" for key in ("unstack", "stack", "tied_to") if key in rule]
    return ", ".join(texts)


def section(name: str, conversion: Mapping[str, Any]) -> str:
    """Return one conversion."""
    lines = [
        f"\n## {name}\n",
        f"{conversion['about']}.\n",
        "| number | what it is | where it comes from |",
        "|---|---|---|",
    ]
    for key, number in conversion["numbers"].items():
        origins = [f"{cell(number['config'])} of a config"] if "config" in number else []
        origins += [cell(number["value"])] if "value" in number else []
        origins += [f"must be {number['must_be']}"] if "must_be" in number else []
        lines.append(f"| `{key}` | {number.get('about', '')} | {'; '.join(origins)} |")
    lines += ["", "| from | to | values |", "|---|---|---|"]
    for rule in conversion["rules"]:
        lines.append(f"| {cell(rule['from'])} | {cell(rule['to'])} | {values(rule)} |")
    return "\n".join(lines) + "\n"


def explanation() -> str:
    """Return what the docstring of `rules` says of their parts, with its definitions as a list."""
    text = str(rules.__doc__)
    text = text[text.index("The first rule that") :].replace("``", "`")
    return re.sub(r"^(`.*)\n((?:    .+\n)+)", lambda found: f"* {found[1]}:\n{found[2]}", text, flags=re.MULTILINE)


def page() -> str:
    """Return the whole page."""
    built_in = "".join(section(name, read_builtin(name)) for name in BUILTIN)
    return HEAD + built_in + OWN + explanation()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
