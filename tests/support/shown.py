"""Sources with configs of ranks."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from statexchange.sharding.shards import Box, Shard
from statexchange.storage.tensorfile import ShardData


def held(name: str, data: Any, dtype: str, shape: Sequence[int], box: Box) -> ShardData:
    shard = Shard(name, dtype, tuple(shape), (box,))
    return ShardData(shard, (np.ascontiguousarray(data),))
