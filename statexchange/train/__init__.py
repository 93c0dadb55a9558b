"""Gradients and parameters: reducers, data-parallel modules and optimizers, and the algorithms that average."""

from __future__ import annotations

from statexchange.lazy import lazy_names

_HOMES = {
    "BucketReducer": "statexchange.train.buckets.reducer",
    "CoalescingReducer": "statexchange.train.reducers",
    "DistributedDataContainer": "statexchange.train.data",
    "DistributedModule": "statexchange.train.module",
    "InlineReducer": "statexchange.train.reducers",
    "Reducer": "statexchange.train.reducers",
    "algorithms": "",
    "allreduce_parameters": "statexchange.train.synchronize",
    "as_comm_hook": "statexchange.train.ddp_hook",
    "broadcast_parameters": "statexchange.train.synchronize",
    "data_parallel": "statexchange.train.module",
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _HOMES, need=dict.fromkeys(_HOMES, ("torch",)))
