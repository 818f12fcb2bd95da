# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled for GPUs that are not here. A process of its own: an interpreted kernel cannot be compiled."""

from __future__ import annotations

import os

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    raise pytest.UsageError("tests/aot compiles kernels: run it without TRITON_INTERPRET=1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-figures", action="store_true", help="write docs/kernels.md instead of comparing with it")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    from aot import figures

    if session.config.getoption("--write-figures") and exitstatus == 0:
        figures.write()
