"""Tensors of ranks, and command lines as processes, for tests of the command line."""

import subprocess
from collections.abc import Sequence
from random import Random

from commands import command_environment
from warm_python import warm_python
from workspaces import filled

from statexchange.sharding.shards import Box, Shard
from statexchange.storage.tensorfile import ShardData


def shell(*arguments: object, **more: str) -> tuple[int, str, str]:
    """Run the command line as a process, a fork of a warm Python; return exit code, stdout and stderr."""
    command = [warm_python("commands"), "-m", "statexchange", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=command_environment(**more), timeout=60)
    return done.returncode, done.stdout, done.stderr


def held(
    name: str, dtype: str, shape: Sequence[int], offsets: Sequence[int], size: Sequence[int], fill: int
) -> ShardData:
    """Return what a rank holds of a tensor: one box, whose random bytes have the seed `fill`."""
    shard = Shard(name, dtype, tuple(shape), (Box(tuple(offsets), tuple(size)),))
    return filled(shard, Random(fill).randbytes(shard.nbytes))


def rank_tensors(rank: int) -> list[ShardData]:
    return [
        held("rows.weight", "F32", (8, 6), (2 * rank, 0), (2, 6), rank),
        held("columns.weight", "BF16", (4, 8), (0, 2 * rank), (4, 2), 10 + rank),
        held("norm.weight", "F32", (6,), (0,), (6,), 99),
    ]
