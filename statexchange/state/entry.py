"""One entry of a source: what it has at one path, whatever its format.

An entry has a text, by which it is paired with the live state, and as many of its last keys as the source knows::

    source                                       text                keys
    save_checkpoint({"m": net, "n": {1: 2}})     n.1                 ("n", 1)
    torch.save({"m": net.state_dict()})          m.0.weight          ("m", "0.weight")
    dcp.save({"l": [{"a": 1}]})                  l.0.a               ("l", ListItem(0), "a")
    a safetensors file                           m.0.weight          ()
"""

from __future__ import annotations

from typing import Any, NamedTuple

from statexchange.sharding.paths import Key

__all__ = ["Entry"]


class Entry(NamedTuple):
    """An entry of a source at one path.

    Attributes:
        text: the path as text, by the names of the state.
        keys: the last keys of the path, as many as the source knows.
        leaf: a SavedTensor, an OpaqueValue, or a plain value without a mapping that has entries.
        name: what the source itself calls it.
        is_alias: whether it is another name of a tensor that the source has under its own.
    """

    text: str
    keys: tuple[Key, ...]
    leaf: Any
    name: str
    is_alias: bool = False

    def keys_below(self, path: str) -> tuple[Key, ...] | None:
        """Return the keys that lead from the container at `path` here; None if the source does not know them all."""
        rest = len(self.text) - len(path) - 1 if path else len(self.text)
        count, length = 0, -1
        while length < rest and count < len(self.keys):
            count += 1
            length += len(str(self.keys[-count])) + 1
        if length != rest:
            return None
        return self.keys[len(self.keys) - count :]
