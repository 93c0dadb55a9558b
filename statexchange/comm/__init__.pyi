from statexchange.comm.communicator import Communicator as Communicator
from statexchange.comm.work import Work as Work
from statexchange.comm.world import from_mpi as from_mpi
from statexchange.comm.world import from_process_group as from_process_group
from statexchange.comm.world import get_backend as get_backend
from statexchange.comm.world import get_local_rank as get_local_rank

__all__: list[str]
