# SPDX-License-Identifier: Apache-2.0
"""Checking and timing the ops: what `leap-kernels check`, `leap-kernels bench` and benchmarks/ share.

| file | holds |
| --- | --- |
| `cases/` | one file an op: inputs, truth in float64, bytes and operations, fair baselines; the table of all of them |
| `judge.py` | is a result right? The budget of docs/benchmarks.md |
| `calls.py` | the ways to call an op: public, registered, body |
| `device.py` | timers, graphs, sync debugging and sanitizer of a GPU, and what stands in for them on a CPU |
| `session.py` | one run: measured ceilings, rows for the CSV |
| `timing.py` | one op beside its baselines; its host overhead; the command `bench` |
"""
