from statexchange.comm.communicator import Communicator as Communicator
from statexchange.comm.defaults import from_mpi as from_mpi
from statexchange.comm.defaults import from_process_group as from_process_group
from statexchange.comm.defaults import get_backend as get_backend
from statexchange.comm.defaults import get_local_rank as get_local_rank
from statexchange.comm.work import Work as Work

__all__: list[str]
