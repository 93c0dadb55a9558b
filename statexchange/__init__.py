"""Gather, export, merge and inspect sharded model state, through shared memory and shared storage.

The top level has the functions that write, load and compare state, and those that initialise ranks. `statexchange.comm`
has communicators, `statexchange.train` gradients and parameters, `statexchange.integrations` callbacks for other
frameworks, `statexchange.errors` the errors, `statexchange.testing` ranks for tests.

``import statexchange`` imports neither torch nor numpy: names are loaded on first use.
"""

import sys

try:
    from statexchange.lazy import lazy_names
except KeyboardInterrupt:
    if sys.argv[0] == "-m" or sys.argv[0].endswith("/statexchange"):  # the command line starts
        raise SystemExit(130) from None
    raise

__version__ = "0.2.0.dev0"

_HOMES = {
    "Checkpoints": "statexchange.exchange.checkpoints",
    "DistributedOptimizer": "statexchange.train.optimizer",
    "NFSWorkspace": "statexchange.exchange.nfs_workspace",
    "Publisher": "statexchange.exchange.publisher",
    "StateExchangeError": "statexchange.errors",
    "Subscriber": "statexchange.exchange.subscriber",
    "Workspace": "statexchange.storage.workspace",
    "average_gradients": "statexchange.train.buckets.reducer",
    "comm": "",
    "diff_checkpoints": "statexchange.exchange.diff",
    "errors": "",
    "export_checkpoint": "statexchange.exchange.export",
    "gather_state": "statexchange.exchange.gather",
    "get_communicator": "statexchange.comm.defaults",
    "get_configs_parallel": "statexchange.exchange.gather",
    "get_rank": "statexchange.comm.defaults",
    "get_tensors_parallel": "statexchange.exchange.gather",
    "get_world_size": "statexchange.comm.defaults",
    "init": "statexchange.comm.init",
    "integrations": "",
    "is_initialized": "statexchange.comm.defaults",
    "load_checkpoint": "statexchange.exchange.load",
    "merge_checkpoint": "statexchange.checkpoint.merge",
    "open_checkpoint": "statexchange.formats.registry",
    "register_config": "statexchange.values",
    "save_checkpoint": "statexchange.exchange.save",
    "shutdown": "statexchange.comm.init",
    "synchronize": "statexchange.train.synchronize",
    "testing": "",
    "train": "",
}

__getattr__, __dir__, __all__ = lazy_names(
    __name__, _HOMES, need=dict.fromkeys(("DistributedOptimizer", "average_gradients", "synchronize"), ("torch",))
)
