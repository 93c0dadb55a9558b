from statexchange import comm as comm
from statexchange import errors as errors
from statexchange import integrations as integrations
from statexchange import testing as testing
from statexchange import train as train
from statexchange.checkpoint.merge import merge_checkpoint as merge_checkpoint
from statexchange.comm.defaults import get_communicator as get_communicator
from statexchange.comm.defaults import get_rank as get_rank
from statexchange.comm.defaults import get_world_size as get_world_size
from statexchange.comm.defaults import is_initialized as is_initialized
from statexchange.comm.init import init as init
from statexchange.comm.init import shutdown as shutdown
from statexchange.errors import StateExchangeError as StateExchangeError
from statexchange.exchange.checkpoints import Checkpoints as Checkpoints
from statexchange.exchange.diff import diff_checkpoints as diff_checkpoints
from statexchange.exchange.export import export_checkpoint as export_checkpoint
from statexchange.exchange.gather import gather_state as gather_state
from statexchange.exchange.gather import get_configs_parallel as get_configs_parallel
from statexchange.exchange.gather import get_tensors_parallel as get_tensors_parallel
from statexchange.exchange.load import load_checkpoint as load_checkpoint
from statexchange.exchange.nfs_workspace import NFSWorkspace as NFSWorkspace
from statexchange.exchange.publisher import Publisher as Publisher
from statexchange.exchange.save import save_checkpoint as save_checkpoint
from statexchange.exchange.subscriber import Subscriber as Subscriber
from statexchange.formats.registry import open_checkpoint as open_checkpoint
from statexchange.storage.workspace import Workspace as Workspace
from statexchange.train.buckets.reducer import average_gradients as average_gradients
from statexchange.train.optimizer import DistributedOptimizer as DistributedOptimizer
from statexchange.train.synchronize import synchronize as synchronize
from statexchange.values import register_config as register_config

__version__: str
__all__: list[str]
