"""Where the parts of ``bench.gpu_check`` measure: a GPU, or for a dry run the CPU with the same interface.

On the CPU a captured graph is the Python function itself, streams do not exist, and the clock is the host's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bench import gpu
from pipespec import Pipeline
from pipespec.bench.timing import copy_bytes_per_second, repeated, seconds
from pipespec.drivers.graphed.driver import GraphedDriver
from pipespec.models.compat import own_workspaces

Body = Callable[[], object]


class Cuda:
    """The current GPU."""

    name = "cuda"
    dtype = torch.bfloat16

    def copy_gb_per_s(self) -> float:
        return copy_bytes_per_second() / 1e9

    def stream(self, priority: int = 0) -> torch.cuda.Stream:
        """A stream; a lower priority goes first. torch assigns the streams of a priority round-robin."""
        return torch.cuda.Stream(priority=priority)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Launches go to ``stream``."""
        with torch.cuda.stream(stream):
            yield

    def capture(self, body: Body, stream: Any = None) -> Body:
        """Capture ``body`` as a graph on ``stream``, whose priority its kernels get. Returns the launch on the current stream."""
        stream = stream or torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                body()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # The warm-up has left a work space outside of the graph's pool, which the next capture of a pipeline frees.
        with own_workspaces(), torch.cuda.graph(graph, stream=stream):
            body()
        launch: Body = graph.replay
        launch()
        torch.cuda.synchronize()
        return launch

    def elapsed_us(self, run: Body, repeats: int) -> float:
        """Median microseconds on the current stream, after two runs that do not count."""
        return 1e6 * statistics.median(repeated(run, repeats, "cuda", warm_up=2))

    def time_call(self, call: Callable[[int], object], copies: int, repeats: int) -> float:
        """See :func:`bench.gpu.time_call`."""
        return gpu.time_call(call, copies, repeats)[0]

    def copies_for(self, nbytes: int) -> int:
        return gpu.copies_for(nbytes)

    def synchronize(self) -> None:
        torch.cuda.synchronize()


class Host:
    """The CPU, for dry runs."""

    name = "cpu"
    dtype = torch.float32

    def copy_gb_per_s(self) -> float:
        return copy_bytes_per_second("cpu", 1 << 24, 3) / 1e9

    def stream(self, priority: int = 0) -> None:
        return None

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        yield

    def capture(self, body: Body, stream: Any = None) -> Body:
        body()
        return body

    def elapsed_us(self, run: Body, repeats: int) -> float:
        return 1e6 * statistics.median(repeated(run, repeats))

    def time_call(self, call: Callable[[int], object], copies: int, repeats: int) -> float:
        def run() -> None:
            for i in range(copies):
                call(i)

        return self.elapsed_us(run, repeats) / copies

    def copies_for(self, nbytes: int) -> int:
        return 2

    def synchronize(self) -> None:
        pass


def device_for(dry: bool) -> Cuda | Host:
    """The GPU, or the CPU for a dry run."""
    return Host() if dry else Cuda()


def check_captured(pipe: Pipeline, schedule: str) -> None:
    """Raise unless the last call of ``pipe`` ran as captured steps of ``schedule``: other steps have other figures, and contain no graph to check.

    Raises:
        RuntimeError: Says what ran instead, and why.
    """
    report = pipe.report
    assert report is not None
    if report.schedule != schedule or report.decisions or not isinstance(pipe._driver, GraphedDriver):
        why = "; ".join(report.decisions or ("no step can be captured",))
        raise RuntimeError(f"the call ran as {report.schedule!r}, not as captured steps of {schedule!r}: {why}")


def host_us(run: Body, repeats: int, device: Cuda | Host) -> float:
    """Median microseconds that the host spends in ``run``, with the device idle before each."""
    times = []
    for _ in range(repeats):
        device.synchronize()
        times.append(seconds(run))
    device.synchronize()
    return 1e6 * statistics.median(times)
