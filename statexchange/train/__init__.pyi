from statexchange.train import algorithms as algorithms
from statexchange.train.buckets.reducer import BucketReducer as BucketReducer
from statexchange.train.data import DistributedDataContainer as DistributedDataContainer
from statexchange.train.ddp_hook import as_comm_hook as as_comm_hook
from statexchange.train.module import DistributedModule as DistributedModule
from statexchange.train.module import data_parallel as data_parallel
from statexchange.train.reducers import CoalescingReducer as CoalescingReducer
from statexchange.train.reducers import InlineReducer as InlineReducer
from statexchange.train.reducers import Reducer as Reducer
from statexchange.train.synchronize import allreduce_parameters as allreduce_parameters
from statexchange.train.synchronize import broadcast_parameters as broadcast_parameters

__all__: list[str]
