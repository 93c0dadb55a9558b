"""Gather, export, merge and inspect sharded model state, through shared memory and shared storage.

Public names are loaded on first use: ``import statexchange`` imports neither torch nor numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_ROOMS = {
    "statexchange.comm.communicator": ("Communicator",),
    "statexchange.comm.adopt": ("from_mpi", "from_process_group"),
    "statexchange.comm.defaults": (
        "get_backend",
        "get_communicator",
        "get_local_rank",
        "get_rank",
        "get_world_size",
        "is_initialized",
    ),
    "statexchange.comm.init": ("init", "shutdown"),
    "statexchange.errors": (
        "CorruptError",
        "ForkedError",
        "IncompleteError",
        "InvalidArgumentError",
        "MismatchError",
        "MissingExtraError",
        "NotFoundError",
        "NotInitializedError",
        "NumericOverflowError",
        "OutcomeUnknownError",
        "OverlapError",
        "PeerError",
        "ReplacedError",
        "ReplicaError",
        "StallError",
        "StateExchangeError",
        "StorageError",
        "TargetExistsError",
        "UnsafeError",
        "UnsupportedError",
    ),
    "statexchange.exchange.background": ("export_checkpoint_async",),
    "statexchange.exchange.export": ("ExportReport", "export_checkpoint"),
    "statexchange.exchange.gather": (
        "GatheredState",
        "gather_state",
        "get_configs_parallel",
        "get_tensors_parallel",
    ),
    "statexchange.exchange.load": ("LoadReport", "load_checkpoint"),
    "statexchange.exchange.nfs_workspace": ("NFSWorkspace",),
    "statexchange.exchange.save": ("save_checkpoint",),
    "statexchange.checkpoint.merge": ("MergeReport", "merge_checkpoint"),
    "statexchange.formats.registry": ("open_checkpoint",),
    "statexchange.storage.workspace": ("Workspace",),
    "statexchange.train.buckets": ("BucketReducer",),
    "statexchange.train.data": ("DistributedDataContainer",),
    "statexchange.train.module": ("DistributedModule", "data_parallel"),
    "statexchange.train.optimizer": ("DistributedOptimizer", "as_comm_hook", "average_gradients"),
    "statexchange.train.reducers": ("CoalescingReducer", "InlineReducer", "Reducer"),
    "statexchange.train.synchronize": ("allreduce_parameters", "broadcast_parameters", "synchronize"),
    "statexchange.values": ("register_config",),
}
_HOME = {name: room for room, names in _ROOMS.items() for name in names}

_MODULES = {"algorithms": "statexchange.train.algorithms", "testing": "statexchange.testing"}

__all__ = sorted([*_HOME, *_MODULES])  # noqa: PLE0605 (a list of str, put together above)


def __getattr__(name: str) -> Any:
    if name not in _HOME and name not in _MODULES:
        raise AttributeError(f"module 'statexchange' has no attribute {name!r}")
    from statexchange.errors import needing_torch

    with needing_torch(name):
        value = import_module(_MODULES[name]) if name in _MODULES else getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
