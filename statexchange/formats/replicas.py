"""Check that the copies in a source are equal: of a box in several files, and of tensors that are listed as tied."""

from __future__ import annotations

from statexchange.errors import ReplicaError
from statexchange.formats.model_files import are_of_ranks
from statexchange.formats.source import ShardFile, Source, SourceTensor
from statexchange.sharding.plan import TensorPlan, replica_error
from statexchange.sharding.rules import layout_advice

TAKE_LOWEST = 'merge_checkpoint(replicas="root") takes the lowest rank\'s (--replicas root)'  # advice


def advice_on_copies(source: Source, tensor: TensorPlan) -> str:
    """Return what to write for a merge of a tensor of which several files have copies that differ."""
    advice = 'to take the lowest rank\'s, replicas="root" (--replicas root)'
    rules = layout_advice(tensor.source, [tensor.shape])
    # A layout would concatenate what are copies or versions of one model in files of no rank.
    are_parts = source.has_ranks or are_of_ranks([shard_file.name for shard_file in source.files])
    if rules and len(tensor.pieces) == 1 and are_parts:  # of more pieces the files have the sharding
        return f"if each holds a part, give a layout (--layout FILE.json): {rules}; {advice}"
    return advice


def check_tensor_copies(source: Source, tensor: TensorPlan, advice: str) -> None:
    """Raise ReplicaError, which ends with `advice`, unless all copies of each box of a planned tensor are equal.

    Copies that are reduced may differ.
    """
    for piece in tensor.pieces:
        if tensor.reduce is not None or not piece.replicas:
            continue
        first = source.files[piece.holder]
        expected = first.tensors[tensor.source].digest_of(piece.box_index)
        for holder, index in piece.replicas:
            other = source.files[holder]
            if other.tensors[tensor.source].digest_of(index) != expected:
                labels = source.label_of(first), source.label_of(other)
                raise replica_error(tensor.source, piece.box, *labels, advice, path=other.path)


def check_tied(shard_file: ShardFile, alias: str, name: str) -> None:
    """Raise ReplicaError if two tensors that a file lists as tied differ."""
    tied, tensor = shard_file.tensors.get(alias), shard_file.tensors.get(name)
    if tied is None or tensor is None or tied.byte_ranges == tensor.byte_ranges:  # the same bytes under two names
        return
    if _digests(tied) != _digests(tensor):
        raise ReplicaError(
            f"this tensor is listed as tied to {name!r}, but its values differ",
            name=alias,
            rank=shard_file.rank,
            path=shard_file.path,
        )


def _digests(tensor: SourceTensor) -> list[str]:
    return [tensor.digest_of(index) for index in range(len(tensor.byte_ranges))]
