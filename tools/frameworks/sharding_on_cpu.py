"""Let accelerate shard with FSDP on a CPU, where it otherwise turns to plain data parallelism and shards nothing."""

from accelerate import DistributedType
from accelerate.state import AcceleratorState, PartialState


def allow_sharding() -> None:
    """Make each AcceleratorState that is given an FSDP plugin keep it."""
    make = AcceleratorState.__init__

    def make_and_keep(self, *args, fsdp_plugin=None, **options):
        make(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = PartialState().distributed_type = DistributedType.FSDP

    AcceleratorState.__init__ = make_and_keep
