# SPDX-License-Identifier: Apache-2.0
"""What benchmarks/gpu_check.py runs, one step a process: `steps.py` lists them."""
