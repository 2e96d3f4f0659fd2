#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# One task of the job step, which is one rank: names the rank for PyTorch and lets it save before the job ends.
#
# Why no torchrun: on SIGTERM its agent sends SIGTERM to the ranks and SIGKILL 30 seconds later, too soon for a
# checkpoint of a large model, and of SIGUSR1 it dies without telling them. What else it offers, SLURM does: the
# rendezvous is the environment below, and a lost node requeues the job.
#
# Why this script stands between: the ranks must get SIGTERM, which Megatron's --exit-signal-handler waits for, and
# their children (such as the checkpoint worker) must not, because they would die of it before they have written. SLURM
# signals the tasks alone or all their descendants, as the cluster is set up (SignalChildrenProcesses). So the warning
# travels as SIGUSR1, which everything below ignores, and becomes SIGTERM for the one process that is meant.
set -uo pipefail
# shellcheck source=SCRIPTDIR/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

export RANK=${SLURM_PROCID:?rank.sh is started by srun}
export LOCAL_RANK=${SLURM_LOCALID:?rank.sh is started by srun}
export WORLD_SIZE=${SLURM_NTASKS:?rank.sh is started by srun}

ignoring_usr1() {
    # Ignored signals stay ignored in all descendants; a handler would be lost when a child starts another program.
    trap '' USR1
    exec "$@"
}

run_forwarding TERM ignoring_usr1 "$@"
