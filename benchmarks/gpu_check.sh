#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks and times the loss on one GPU, in under five minutes: bash benchmarks/gpu_check.sh [options of gpu_check.py]
#
# Needs torch with CUDA and Triton; megatron-core is only compared with. PYTHON=... uses another interpreter. Writes
# gpu_check.json into the directory $OUT if that is set. Exit status: 0 all checks passed, 1 one failed, 2 no GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec timeout 300 "${PYTHON:-python3}" -m benchmarks.gpu_check "$@"
