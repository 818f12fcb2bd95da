# SPDX-License-Identifier: Apache-2.0
"""`pytest benchmarks/ --benchmark-only`: collects medians, and holds their ratios against the stored ones."""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ratios

MEDIANS: dict[str, dict[str, float]] = defaultdict(dict)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ratios")
    group.addoption(
        "--ratios", type=Path, default=ratios.STORED, help="file with the stored ratios (default %(default)s)"
    )
    group.addoption(
        "--store-ratios", action="store_true", help="write the ratios of this run there instead of comparing"
    )


@pytest.fixture
def timed(benchmark: Any, request: pytest.FixtureRequest) -> Callable[[str, str, Callable[[], Any]], None]:
    """timed(group, name, call): time the call; the entry named "torch" of a group is what the others are divided by."""

    def run(group: str, name: str, call: Callable[[], Any]) -> None:
        benchmark.group, benchmark.name = group, name
        benchmark(call)
        if benchmark.stats is not None:  # None with --benchmark-disable
            MEDIANS[group][name] = benchmark.stats.stats.median

    return run


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    found = ratios.relative(MEDIANS)
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not found or exitstatus != 0 or reporter is None:
        return
    file = session.config.getoption("--ratios")
    if session.config.getoption("--store-ratios"):
        import torch

        from leap_kernels.bench.session import commit

        setting = {
            "commit": commit(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "threads": str(torch.get_num_threads()),
        }
        ratios.write(file, found, setting)
        reporter.write_line(f"ratios written to {file}")
    elif not file.exists():
        reporter.write_line(f"no stored ratios in {file}: nothing to compare with. --store-ratios writes them.")
    else:
        worse = ratios.compare(found, ratios.read(file))
        for line in worse:
            reporter.write_line(f"SLOWER: {line}", red=True)
        if worse:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
