#!/usr/bin/env bash
# The checks, on the login host: ranks.sh PYTHON PROGRAM. Each line starts one job; the first that fails ends all.
set -euo pipefail
python=$1 program=$2
export OMP_NUM_THREADS=1 STATEXCHANGE_TIMEOUT_S=60

check() { # check NAME SRUN-ARGUMENTS... -- PROGRAM-ARGUMENTS...: run the program's checks in a job
    local name=$1 options=()
    shift
    while [ "$1" != -- ]; do options+=("$1") && shift; done
    shift
    timeout 120 srun --kill-on-bad-exit=1 "${options[@]}" "$python" "$program" "$LAB_WORKDIR/$name" "$@"
    echo "PASS $name"
}

check two_hosts -N 2 -n 4 -- 2 auto
check one_host -N 1 -n 4 -- 1 auto
check cyclic -N 2 -n 4 --distribution=cyclic -- 2 auto
check gloo -N 2 -n 4 -- 2 gloo
MASTER_ADDR=node001 MASTER_PORT=29555 check with_master_addr -N 2 -n 4 -- 2 auto
