# SPDX-License-Identifier: Apache-2.0
"""The one place that knows CUDA: timers, graphs, sync debugging, sanitizer, and a CPU stand-in for each.

A measuring program calls these methods and nothing of `torch.cuda`. On a CPU the timers are real; what has no meaning
there does the nearest thing and is listed in `simulated`, for a program to close with.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree

__all__ = ["Cpu", "Device", "Gpu", "Graph", "Times", "device_for"]


class Times(NamedTuple):
    """Microseconds of one call."""

    median: float
    p20: float
    p80: float


def summarise(samples: Sequence[float]) -> Times:
    """Median, 20th and 80th percentile."""
    if len(samples) < 2:
        return Times(*[samples[0]] * 3)
    deciles = statistics.quantiles(samples, n=10, method="inclusive")
    return Times(statistics.median(samples), deciles[1], deciles[7])


class Graph(NamedTuple):
    """A captured call: `replay()` runs it again on the memory it was captured with and rewrites `output`."""

    replay: Callable[[], None]
    output: Any


class Gpu:
    """A CUDA GPU."""

    simulated: dict[str, str]

    def __init__(self, device: torch.device, seconds: float = 0.2) -> None:
        self.torch, self.seconds, self.simulated = device, seconds, {}
        self._flush: Tensor | None = None
        torch.cuda.set_device(device)

    is_gpu = True

    def facts(self) -> dict[str, Any]:
        """Name, driver and clocks, for the record."""
        found = _nvidia_smi(
            "driver_version,clocks.sm,clocks.mem,power.limit", torch.cuda.get_device_properties(self.torch)
        )
        return {"gpu": torch.cuda.get_device_name(self.torch), "cuda": torch.version.cuda, "clocks": found}

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch)

    def cache_bytes(self) -> int:
        """Size of the L2 cache."""
        return int(torch.cuda.get_device_properties(self.torch).L2_cache_size)

    def times(self, call: Callable[[], Any], least: int = 20) -> Times:
        """One call between two events, the L2 cache flushed before each.

        What `triton.testing.do_bench` does, except that the flush takes some 250 us, so that the host is done with
        queueing the call before the GPU comes to it: the figures hold no host time.
        """
        if self._flush is None:
            self._flush = torch.empty(2**30, dtype=torch.int8, device=self.torch)
        call()
        self.synchronize()
        began = time.perf_counter()
        for _ in range(3):
            self._flush.zero_()
            call()
        self.synchronize()
        n = min(500, max(least, int(self.seconds / ((time.perf_counter() - began) / 3))))
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(n)]
        for start, end in events:
            self._flush.zero_()
            start.record()
            call()
            end.record()
        self.synchronize()
        return summarise([start.elapsed_time(end) * 1e3 for start, end in events])

    def graph(self, call: Callable[[], Any]) -> Graph:
        """Warm up on a side stream, capture."""
        side = torch.cuda.Stream(self.torch)
        side.wait_stream(torch.cuda.current_stream(self.torch))
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        torch.cuda.current_stream(self.torch).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = call()
        return Graph(graph.replay, output)

    def graph_times(self, calls: Sequence[Callable[[], Any]], rounds: int | None = None) -> Times:
        """One call inside a graph of some 20, without any host time; several calls take turns."""
        rounds = rounds or max(1, 20 // len(calls))

        def all_calls() -> None:
            for _ in range(rounds):
                for call in calls:
                    call()

        graph = self.graph(all_calls)
        graph.replay()
        self.synchronize()
        began = time.perf_counter()
        graph.replay()
        self.synchronize()
        n = min(200, max(10, int(self.seconds / (time.perf_counter() - began))))
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(n)]
        for start, end in events:
            start.record()
            graph.replay()
            end.record()
        self.synchronize()
        share = 1e3 / (rounds * len(calls))
        return summarise([start.elapsed_time(end) * share for start, end in events])

    @contextlib.contextmanager
    def forbid_syncs(self) -> Iterator[None]:
        """Whatever waits for the GPU raises."""
        self.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def sanitizer(self) -> str | None:
        """compute-sanitizer's path, where it is installed."""
        beside_nvcc = [os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")]
        return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(beside_nvcc))


class Cpu:
    """The CPU: itself when timed, and a stand-in for a GPU in dry runs."""

    def __init__(self, device: torch.device | None = None, seconds: float = 0.3) -> None:
        self.torch, self.seconds = device or torch.device("cpu"), seconds
        self.simulated: dict[str, str] = {}

    is_gpu = False

    def facts(self) -> dict[str, Any]:
        return {"gpu": f"none ({platform.machine()} CPU, {torch.get_num_threads()} threads)", "cuda": "", "clocks": ""}

    def synchronize(self) -> None:
        pass

    def cache_bytes(self) -> int:
        return 2**20

    def times(self, call: Callable[[], Any], least: int = 3) -> Times:
        """By the clock, after one call that does not count; one call altogether where no time is to be spent."""
        if self.seconds:
            call()
        least = least if self.seconds else 1
        samples: list[float] = []
        ends = time.perf_counter() + self.seconds
        while len(samples) < least or (time.perf_counter() < ends and len(samples) < 1000):
            began = time.perf_counter()
            call()
            samples.append((time.perf_counter() - began) * 1e6)
        return summarise(samples)

    def graph(self, call: Callable[[], Any]) -> Graph:
        """A replay calls again and copies the results to where the first ones are."""
        self.simulated["CUDA graphs"] = "the call was repeated; nothing was captured"
        output = call()

        def replay() -> None:
            fresh = _pytree.tree_leaves(call())
            for old, new in zip(_pytree.tree_leaves(output), fresh, strict=True):
                if isinstance(old, Tensor):
                    old.copy_(new)

        return Graph(replay, output)

    def graph_times(self, calls: Sequence[Callable[[], Any]], rounds: int | None = None) -> Times:
        self.simulated["timing inside CUDA graphs"] = "the calls were timed by the clock"

        def all_calls() -> None:
            for call in calls:
                call()

        return Times(*(t / len(calls) for t in self.times(all_calls, least=1)))

    @contextlib.contextmanager
    def forbid_syncs(self) -> Iterator[None]:
        self.simulated['torch.cuda.set_sync_debug_mode("error")'] = "the calls ran; nothing looked for syncs"
        yield

    def sanitizer(self) -> str | None:
        self.simulated["compute-sanitizer"] = "the small cases ran without it"
        return None


Device = Gpu | Cpu


def device_for(device: torch.device, seconds: float | None = None) -> Device:
    """The `Gpu` or `Cpu` for a torch device; `seconds` to spend on one measurement."""
    kind: Any = Gpu if device.type == "cuda" else Cpu
    made: Device = kind(device) if seconds is None else kind(device, seconds)
    return made


def _nvidia_smi(fields: str, gpu: Any) -> str:
    """What nvidia-smi says of a GPU, which it may count differently than torch does."""
    command = ["nvidia-smi", f"--id=GPU-{gpu.uuid}", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({type(error).__name__})"
