"""Show zarr's directories and Orbax's, whose names, shapes and dtypes lie in JSON files.

Orbax keeps a tree's names in ``_METADATA`` and its arrays in OCDBT files (a database of tensorstore, which is not
parsed here) or, without OCDBT, in a directory of zarr for each array.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from statexchange.errors import CorruptError, IncompleteError, NotFoundError, excerpt
from statexchange.formats.foreign.contents import MAX_TEXT_BYTES, Contents, described_tensor, dtype_of_numpy
from statexchange.formats.source import UnreadableTensor
from statexchange.storage.budget import Budget
from statexchange.storage.json_text import read_json
from statexchange.storage.store import Store

__all__ = ["read"]

_UNFINISHED = ".orbax-checkpoint-tmp"
_MAX_DIRECTORIES = 4096  # that are searched for arrays: each costs a listing
_MAX_JSON_BYTES = 64 << 20


def read(store: Store) -> Contents:
    """Return the arrays of a directory of either kind; raise CorruptError for broken metadata."""
    is_orbax = any(name in store.listing for name in ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt"))
    return _read_orbax(store) if is_orbax else _read_zarr(store)


# zarr


def _read_zarr(store: Store) -> Contents:
    """Return the arrays of a directory; raise CorruptError for broken metadata.

    Consolidated metadata is taken where there is any; otherwise the directories below are searched.
    """
    consolidated = _consolidated(store)
    if consolidated is not None:
        return Contents(tuple(consolidated))
    tensors = []
    notes: tuple[str, ...] = ()
    waiting = [("", store)]  # groups
    looked_at = 0
    while waiting:
        name, directory = waiting.pop()
        looked_at += 1
        if looked_at > _MAX_DIRECTORIES:
            notes = (f"only the first {_MAX_DIRECTORIES:,} directories were looked at",)
            break
        tensor = _array_at(directory, name)
        if tensor is not None:
            tensors.append(tensor)
            continue
        names = [child for child in directory.directories if len(name) + len(child) < MAX_TEXT_BYTES]
        directory.budget.add_entries(len(names))
        for child in reversed(names):
            waiting.append((f"{name}.{child}" if name else child, directory.below(child)))
    return Contents(tuple(tensors), notes=notes)


def _array_at(directory: Store, name: str) -> UnreadableTensor | None:
    """Return the array of a directory; None for a group or anything else."""
    if "zarr.json" in directory.listing:
        path = directory.path_of("zarr.json")
        node = _object(_json(directory, "zarr.json"), path)
        return _array_of_node(node, name or "array", path) if node.get("node_type") == "array" else None
    if ".zarray" in directory.listing:
        path = directory.path_of(".zarray")
        return _array_of_node(_object(_json(directory, ".zarray"), path), name or "array", path)
    return None


def _array_of_node(node: Mapping[str, Any], name: str, path: str) -> UnreadableTensor:
    """Return the array that the metadata of zarr version 2 or 3 describes."""
    dtype = node.get("data_type", node.get("dtype"))
    if isinstance(dtype, dict):
        dtype = dtype.get("name")
    shown = dtype_of_numpy(dtype) if isinstance(dtype, str) and len(dtype) <= 64 else excerpt(dtype, 64)
    return described_tensor(name, shown, node.get("shape"), path)


def _consolidated(store: Store) -> list[UnreadableTensor] | None:
    """Return the arrays that a group's consolidated metadata lists; None without any."""
    nodes: Any = None
    name = ".zmetadata" if ".zmetadata" in store.listing else "zarr.json"
    path = store.path_of(name)
    if name in store.listing:
        root = _object(_json(store, name), path)
        nodes = root.get("metadata") if name == ".zmetadata" else root.get("consolidated_metadata")
        if name == "zarr.json" and nodes is not None:
            nodes = _object(nodes, path).get("metadata")
    if nodes is None:
        return None
    tensors = []
    for key, node in _object(nodes, path).items():
        store.budget.add_entries()
        parent, _, file = key.rpartition("/")
        is_array = file == ".zarray"
        if name == "zarr.json":
            parent = key
            is_array = isinstance(node, dict) and node.get("node_type") == "array"
        if is_array:
            tensors.append(_array_of_node(_object(node, path), parent.replace("/", ".") or "array", path))
    return tensors


# Orbax


def _read_orbax(store: Store) -> Contents:
    """Return the arrays of a checkpoint, or of one item; raise CorruptError for broken metadata."""
    # The opened directory may be the checkpoint or one of its items.
    if any(_UNFINISHED in name for name in store.path.rstrip("/").split("/")[-2:]):
        raise IncompleteError("Orbax did not finish this checkpoint", path=store.path)
    tensors: list[UnreadableTensor] = []
    others: dict[str, str] = {}
    notes: list[str] = []
    for item, directory in _items(store):
        if "_METADATA" not in directory.listing:
            notes.append(f"the names in {directory.path} are not known: it has no _METADATA")
            continue
        for leaf in _leaves(directory):
            name = f"{item}.{leaf.name}" if item else leaf.name
            if leaf.is_array:
                tensors.append(_orbax_array(directory, leaf, name))
            else:
                others[name] = leaf.kind
    if any(tensor.dtype in (None, "?") for tensor in tensors):
        notes.append("dtypes, and shapes of sharded arrays, lie in OCDBT files, which are not parsed")
    return Contents(tuple(tensors), others, tuple(notes))


def _items(store: Store) -> Iterator[tuple[str, Store]]:
    """Yield name and directory of each item that has a tree: "" for the directory itself."""
    if "_METADATA" in store.listing or "manifest.ocdbt" in store.listing:
        yield "", store
        return
    for name in store.directories[:_MAX_DIRECTORIES]:
        directory = store.below(name)
        if "_METADATA" in directory.listing or "manifest.ocdbt" in directory.listing:
            yield name, directory


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A leaf of a tree: its dotted name, what it is, and its shape if that is certain."""

    name: str
    kind: str
    shape: Any

    @property
    def is_array(self) -> bool:
        return self.kind in ("jax.Array", "np.ndarray")


def _leaves(store: Store) -> Iterator[_Leaf]:
    """Yield each leaf of an item's tree."""
    path = store.path_of("_METADATA")
    root = _object(_json(store, "_METADATA"), path)
    shardings: Mapping[str, Any] = {}
    if "_sharding" in store.listing:
        shardings = _object(_json(store, "_sharding"), store.path_of("_sharding"))
    for entry in _object(root.get("tree_metadata"), path).values():
        store.budget.add_entries()
        record = _object(entry, path)
        name = _joined_keys(record.get("key_metadata"), path, store.budget)
        value = _object(record.get("value_metadata"), path)
        kind = value.get("value_type")
        # `write_shape` is the shape of a shard: that of the array only if one device held all of it.
        sharding = shardings.get(base64.b64encode(name.encode("utf-8", "surrogatepass")).decode())
        is_whole = kind == "np.ndarray" or (isinstance(sharding, str) and "SingleDeviceSharding" in sharding)
        yield _Leaf(name, kind[:60] if isinstance(kind, str) else "?", value.get("write_shape") if is_whole else None)


def _joined_keys(keys: Any, path: str, budget: Budget) -> str:
    """Return the dotted name of a leaf of the tree."""
    if not isinstance(keys, list):
        raise CorruptError("broken _METADATA: a leaf without a list of keys", path=path)
    budget.add_entries(len(keys))
    texts = []
    for key in keys:
        text = _object(key, path).get("key")
        texts.append(text if isinstance(text, str) else excerpt(text, 80))
    return ".".join(texts) or "array"


def _orbax_array(store: Store, leaf: _Leaf, name: str) -> UnreadableTensor:
    """Return an array, by its directory of zarr if it is not in OCDBT files."""
    if store.listing.get(leaf.name) == "directory":
        array = _array_at(store.below(leaf.name), name)
        if array is not None:
            return array
    path = store.path_of("_METADATA")
    if leaf.shape is None:
        return UnreadableTensor(name, None, None, path)
    return described_tensor(name, "?", leaf.shape, path)


# JSON


def _json(store: Store, name: str) -> object:
    try:
        return read_json(store.open(name), _MAX_JSON_BYTES)
    except NotFoundError:
        raise IncompleteError("a file of this directory is missing", path=store.path_of(name)) from None


def _object(value: object, path: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise CorruptError(f"broken metadata: expected an object, found {excerpt(value, 60)}", path=path)
    return value
