# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
#
# Functions that dump_teacher.sbatch, train_student.sbatch and rank.sh share: building the command line, starting one
# rank per GPU, handing a signal on, and deciding whether to queue again. Sourced; defines functions and runs nothing.

note() {
    printf '> %s\n' "$*" >&2
}

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

require_number() {
    local name
    for name in "$@"; do
        [[ ${!name} =~ ^[1-9][0-9]*$ ]] || die "$name is '${!name}': give a whole number of at least 1."
    done
}

# ----------------------------------------------------------------------------------------------
#  The command line, collected in the array `flags`
# ----------------------------------------------------------------------------------------------

flags=()

# add_words TEXT: append the words of TEXT. A word cannot contain a space.
add_words() {
    local -a words
    read -r -d '' -a words <<<"$1" || true
    flags+=("${words[@]}")
}

# add_run_flags CHECKPOINTS: what a dump and its students have in common. The first group decides which sample comes
# when, so a cache is of use only to a run that gives the same; both scripts take it from variables of the same names.
add_run_flags() {
    add_words "$DATA_ARGS"
    flags+=(
        --seed "$SEED"
        --seq-length "$SEQ_LENGTH"
        --train-iters "$TRAIN_ITERS"
        --global-batch-size "$GLOBAL_BATCH_SIZE"
    )
    add_words "$MODEL_ARGS"
    add_words "$PARALLEL_ARGS"
    flags+=(
        --micro-batch-size "$MICRO_BATCH_SIZE"
        --load "$1"
        --save "$1"
        --save-interval "$SAVE_INTERVAL"
        # On SIGTERM all ranks save when the iteration ends, wait for what is being written, and exit with 0.
        --exit-signal-handler
        # Ranks wait for the slowest writer before they exit, and at the start for the index of the data.
        --distributed-timeout-minutes "$DISTRIBUTED_TIMEOUT_MINUTES"
        --log-interval 10
    )
}

# add_msc_flags PATH...: --enable-msc if any of the paths is an object store's.
add_msc_flags() {
    local path
    for path in "$@"; do
        if [[ $path == msc://* ]]; then
            # Every process reads the profiles from the file that this variable names.
            export MSC_CONFIG="${MSC_CONFIG:?the profiles of msc:// paths, a file that every node can read}"
            flags+=(--enable-msc)
            return
        fi
    done
}

# student_line FILE INDEX: print the line of student INDEX, counted from 0; empty lines and comments do not count.
student_line() {
    local line index=0
    while IFS= read -r line || [[ -n $line ]]; do
        [[ ! $line =~ ^[[:space:]]*(#|$) ]] || continue
        if ((index == $2)); then
            printf '%s\n' "$line"
            return
        fi
        index=$((index + 1))
    done <"$1"
    die "$1 has $index students, numbered from 0; there is no student $2."
}

# ----------------------------------------------------------------------------------------------
#  Signals
# ----------------------------------------------------------------------------------------------

last_signal=

# run_forwarding SIGNAL COMMAND...: run COMMAND and return its exit status; send it SIGNAL when USR1 or TERM arrives
# here. The last one that arrived is left in last_signal.
run_forwarding() {
    local signal=$1 child='' arrived='' status
    shift
    trap 'forward USR1' USR1
    trap 'forward TERM' TERM
    # Bash runs a trap only after the foreground command has ended, but interrupts `wait` for it.
    "$@" &
    child=$!
    [[ -z $arrived ]] || kill -s "$signal" "$child" || true
    while true; do
        arrived=
        status=0
        wait "$child" || status=$?
        [[ -n $arrived ]] || break
    done
    trap - USR1 TERM
    return "$status"
}

# forward NAME: the trap of run_forwarding, whose variables it uses.
forward() {
    arrived=$1
    last_signal=$1
    [[ -z $child ]] || kill -s "$signal" "$child" || true
}

# ----------------------------------------------------------------------------------------------
#  Ending and queueing again
# ----------------------------------------------------------------------------------------------

# confirmed_iteration CHECKPOINTS: print the last iteration whose checkpoint, and for a dump whose shards, are complete
# on storage; 0 if there is none. Fails if that cannot be found out.
confirmed_iteration() {
    local tracker=$1/latest_checkpointed_iteration.txt content=0
    if [[ $1 == msc://* ]]; then
        content=$("$PYTHON" - "$tracker" <<'PYTHON'
import sys

import multistorageclient as msc

try:
    with msc.open(sys.argv[1], "r") as stream:
        print(stream.read())
except FileNotFoundError:
    print(0)
PYTHON
        ) || return
    elif [[ -e $tracker ]]; then
        content=$(<"$tracker") || return
    fi
    [[ $content =~ ^[[:space:]]*([0-9]+)[[:space:]]*$ ]] || return
    printf '%d\n' "$((10#${BASH_REMATCH[1]}))"
}

# next_step BEFORE AFTER TARGET SIGNAL: print what follows a job step that began at iteration BEFORE and left AFTER
# confirmed, with SIGNAL the last one that arrived:
#   finished  nothing is left to do
#   requeue   it got further, whether it was told to leave or crashed
#   stop      it got nowhere, and would not the next time; or someone ended the job, who shall have the last word
next_step() {
    if (($2 >= $3)); then
        echo finished
    elif [[ $4 == TERM ]] || (($2 <= $1)); then
        echo stop
    else
        echo requeue
    fi
}

requeue() {
    # In an array the plain job id of one task may be that of the whole array, which would restart all students.
    local job=$SLURM_JOB_ID
    if [[ -n ${SLURM_ARRAY_JOB_ID:-} ]]; then
        job=${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}
    fi
    scontrol requeue "$job" || die "job $job could not be queued again; submit it once more to go on."
}

# ----------------------------------------------------------------------------------------------
#  Running
# ----------------------------------------------------------------------------------------------

# set_environment: what every rank finds in its environment.
set_environment() {
    local hosts
    # Kernels must be started in the order in which they are issued, or communication of TP and CP does not overlap.
    export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    export PYTHONUNBUFFERED=1
    # The rendezvous: rank 0 is on the first node. Job ids differ, so jobs that share a node have different ports.
    MASTER_ADDR=localhost
    if [[ -n ${SLURM_JOB_NODELIST:-} ]]; then
        hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
        MASTER_ADDR=${hosts%%$'\n'*}
    fi
    export MASTER_ADDR
    export MASTER_PORT=$((20000 + ${SLURM_JOB_ID:-0} % 20000))
    # srun does not inherit this from sbatch.
    if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then
        export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
    fi
}

# print_step WORD...: print a command that can be pasted into a shell, one option a line.
print_step() {
    local name word
    for name in CUDA_DEVICE_MAX_CONNECTIONS OMP_NUM_THREADS PYTHONUNBUFFERED MASTER_ADDR MASTER_PORT MSC_CONFIG; do
        [[ -z ${!name:-} ]] || printf '%s=%q \\\n' "$name" "${!name}"
    done
    for word in "$@"; do
        [[ $word != -* && $word != bash ]] || printf '\\\n    '
        if [[ $word =~ ^[A-Za-z0-9@%+=:,./_-]+$ ]]; then
            printf '%s ' "$word"
        else
            printf '%q ' "$word"
        fi
    done
    printf '\n'
}

# train CHECKPOINTS: run the entry script with `flags` as a job step, and queue the job again if it is not done then.
# The last call of a script.
train() {
    local checkpoints=$1 before after status=0
    local -a step=(
        srun
        --nodes="${SLURM_JOB_NUM_NODES:-1}"
        --ntasks-per-node="${SLURM_NTASKS_PER_NODE:-8}"
        # Neighbouring ranks share a node, as tensor parallelism wants it.
        --distribution=block
        # One rank that fails ends the others, which would wait for it.
        --kill-on-bad-exit=1
    )
    local -a srun_words
    read -r -d '' -a srun_words <<<"$SRUN_ARGS" || true
    step+=("${srun_words[@]}" bash "$REPO/examples/offline_distillation/slurm/rank.sh")
    step+=("$PYTHON" "$ENTRY" "${flags[@]}")

    set_environment
    if [[ ${DRY_RUN:-0} != 0 ]]; then
        print_step "${step[@]}"
        return
    fi
    [[ -n ${SLURM_JOB_ID:-} ]] || die "this is no SLURM job: submit the script with sbatch, or set DRY_RUN=1."
    before=$(confirmed_iteration "$checkpoints") || die "cannot read how far $checkpoints has come."
    if ((before >= TRAIN_ITERS)); then
        note "$checkpoints has all $TRAIN_ITERS iterations: nothing to do."
        return
    fi
    note "job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}, rank 0 at $MASTER_ADDR:$MASTER_PORT"
    note "iterations $before to $TRAIN_ITERS"
    # USR1, because srun hands that on to its tasks, while on TERM it kills them.
    run_forwarding USR1 "${step[@]}" || status=$?
    # From here on the decision is made; a signal must not end the script before it is carried out.
    trap '' USR1 TERM

    after=$(confirmed_iteration "$checkpoints") || die "cannot read how far $checkpoints has come."
    note "the job step ended with status $status at iteration $after of $TRAIN_ITERS"
    case $(next_step "$before" "$after" "$TRAIN_ITERS" "$last_signal") in
        finished)
            ;;
        requeue)
            requeue
            ;;
        stop)
            if [[ $last_signal == TERM ]]; then
                note "the job was ended from outside: it is not queued again. Submit it once more to go on."
            else
                note "no checkpoint was confirmed since the start, so another try would not get further."
            fi
            return $((status > 0 ? status : 1))
            ;;
    esac
}
