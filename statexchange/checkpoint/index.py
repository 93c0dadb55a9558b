"""Write and read Hugging Face's index and the statexchange manifest of a published checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from statexchange.errors import CorruptError, NotFoundError, UnsafeError
from statexchange.formats.huggingface import MANIFEST
from statexchange.formats.model_files import INDEX
from statexchange.formats.sealed_files import KEY as SEALED
from statexchange.storage.files import check_size
from statexchange.storage.location import MAX_MANIFEST_BYTES, check_parsed_size, read_json
from statexchange.storage.store import Budget

if TYPE_CHECKING:
    from statexchange.formats.sealed_files import SealedFile
    from statexchange.sharding.plan import FilePlan, Plan, TensorPlan
    from statexchange.sharding.shards import Shard
    from statexchange.storage.store import Store

__all__ = [
    "BoxProvenance",
    "index_name",
    "index_text",
    "listed_files",
    "manifest_text",
    "sealed_manifest_text",
    "single_file_name",
]

_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class BoxProvenance:
    """The provenance of a published box: the rank that supplied it, its digest, and what a cast made infinite in it."""

    rank: int
    digest: str
    num_overflows: int = 0


def single_file_name(plan: Plan) -> str:
    """Return the name that the weights would have as one file; readers look for it first."""
    if not plan.files:
        return ""
    return plan.files[0].name.replace(f"-00001-of-{len(plan.files):05d}", "", 1)


def index_name(plan: Plan) -> str | None:
    """Return the name of a plan's index; None for a single file."""
    return None if len(plan.files) == 1 else f"{single_file_name(plan)}{INDEX}"


def index_text(plan: Plan) -> bytes:
    """Return Hugging Face's index, which maps tensor names to files."""
    weight_map = {tensor.name: file.name for file in plan.files for tensor in file.tensors}
    record = {"metadata": {"total_size": plan.nbytes}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(record, indent=2, ensure_ascii=False) + "\n").encode()


def manifest_text(
    plan: Plan, provenance: Mapping[str, Sequence[BoxProvenance]], names: Sequence[str], source: str
) -> bytes:
    """Return the manifest: the names of all other files, and for each tensor its boxes with their provenance.

    Raises:
        UnsafeError: the manifest would be larger than readers accept.
    """
    tensors = {}
    for file in plan.files:
        for tensor in file.tensors:
            tensors[tensor.name] = _tensor_record(file, tensor, provenance[tensor.name])
    record = {
        "schema": _SCHEMA,
        "plan": plan.digest,
        "source": source,
        "digest": "xxh3-128",
        "files": sorted(names),
        "aliases": dict(plan.aliases),
        "tensors": tensors,
    }
    return _encoded(record)


def sealed_manifest_text(
    tensors: Mapping[str, tuple[str, Shard, str]], sealed: Sequence[SealedFile], aliases: Mapping[str, str]
) -> bytes:
    """Return the manifest of a directory that is sealed as it is.

    It lists no files, because the directory is not statexchange's own: no publisher may replace it.

    Args:
        tensors: by name the file of each tensor, its shard, which is the whole tensor, and its digest.
        sealed: the files of the directory.
        aliases: names of tied tensors that are in no file, with the names under which their values are.

    Raises:
        UnsafeError: the manifest would be larger than readers accept.
    """
    records = {}
    for name, (file, shard, digest) in tensors.items():
        records[name] = {
            "file": file,
            "dtype": shard.dtype,
            "shape": list(shard.global_shape),
            "source": name,
            "boxes": [[*shard.boxes[0].to_json(), digest, 0]],
        }
    record = {
        "schema": _SCHEMA,
        "source": "huggingface",
        "digest": "xxh3-128",
        "files": [],
        "aliases": dict(aliases),
        "tensors": records,
        SEALED: {one.name: one.to_json() for one in sealed},
    }
    return _encoded(record)


def _encoded(record: Mapping[str, Any]) -> bytes:
    """Return a manifest as JSON; raise UnsafeError if readers would refuse it."""
    text = json.dumps(record, separators=(",", ":"), ensure_ascii=False)
    data = text.encode()
    try:
        check_size(len(data), MAX_MANIFEST_BYTES, MANIFEST)
        check_parsed_size(text, MANIFEST, Budget(MANIFEST))
    except CorruptError:
        problem = f"the manifest would have {len(data)} bytes, more than readers accept: publish fewer boxes"
        raise UnsafeError(problem) from None
    return data


def _tensor_record(file: FilePlan, tensor: TensorPlan, provenance: Sequence[BoxProvenance]) -> dict[str, Any]:
    """Return the manifest's record of a tensor; each of its boxes is (offsets, shape, digest, rank)."""
    boxes = []
    for piece, box in zip(tensor.pieces, provenance, strict=True):
        boxes.append([*piece.box.to_json(), box.digest, box.rank])
    return {
        "file": file.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "source": tensor.source,
        "boxes": boxes,
    }


def listed_files(store: Store) -> list[str]:
    """Return the files that a directory's manifest lists, in the order of their removal; [] without a manifest.

    The manifest comes first, so that the directory stops being a checkpoint at the first removal. Indexes follow, then
    the others.

    Raises:
        CorruptError: the manifest is broken.
    """
    path = store.path_of(MANIFEST)
    try:
        raw: Any = read_json(store.open(MANIFEST))
    except NotFoundError:
        return []
    names = raw.get("files") if isinstance(raw, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CorruptError("broken manifest: it lists no files", path=path)
    return [MANIFEST, *sorted(set(names) - {MANIFEST}, key=lambda name: (not name.endswith(INDEX), name))]
