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
    timeout 240 srun --kill-on-bad-exit=1 "${options[@]}" "$python" "$program" "$LAB_WORKDIR/$name" "$@"
    echo "PASS $name"
}

check two_hosts -N 2 -n 4 -- 2 auto
check one_host -N 1 -n 4 -- 1 auto
check cyclic -N 2 -n 4 --distribution=cyclic -- 2 auto
check gloo -N 2 -n 4 -- 2 gloo
MASTER_ADDR=node001 MASTER_PORT=29555 check with_master_addr -N 2 -n 4 -- 2 auto

# Killed ranks leave the newest save in the memory of both hosts.
restarts=$(dirname "$program")/restarts.py
if timeout 240 srun --kill-on-bad-exit=1 -N 2 -n 4 "$python" "$restarts" "$LAB_WORKDIR/kept" save; then exit 1; fi
timeout 240 srun --kill-on-bad-exit=1 -N 2 -n 2 "$python" "$restarts" "$LAB_WORKDIR/kept" load
echo "PASS restart_from_memory"

# A job that is preempted and requeued goes on where it was stopped.
wait_for() { # wait_for TEXT: until the job has printed it on both ranks
    for _ in $(seq 480); do
        [ "$(grep -c "$1" "$printed")" -lt 2 ] || return 0
        sleep 0.5
    done
    cat "$printed" >&2
    return 1
}
printed=$LAB_WORKDIR/preempted.txt && touch "$printed"
example=$(dirname "$program")/../examples/preempted.py
command="exec srun $python $example $LAB_WORKDIR/saves 600"
job=$(sbatch --parsable --requeue --open-mode=append -N 2 -n 2 -o "$printed" --wrap "$command")
wait_for "begins at step 0"
sleep 1
scontrol requeue "$job"
wait_for "ends at step"
step=$(sed -n 's/^ends at step //p' "$printed" | head -1)
[ "$step" -gt 0 ] && [ "$step" -lt 600 ]
for _ in $(seq 240); do # Slurm would wait two minutes before it starts the job again
    scontrol update "JobId=$job" StartTime=now 2>/dev/null && break
    sleep 0.5
done
wait_for "begins at step $step"
wait_for "ends at step 600"
echo "PASS requeue"
