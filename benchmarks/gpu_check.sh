#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Check and time everything on one GPU, in at most ten minutes, from the source tree: benchmarks/gpu_check.py has the
# options. Without a GPU: benchmarks/gpu_check.sh --dry-run
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
exec "${PYTHON:-python3}" -u "$here/gpu_check.py" "$@"
