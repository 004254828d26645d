"""The worker processes of a pipeline with schedule ``workers``. Tests reach them here only."""

from __future__ import annotations

from typing import Any


def workers_of(pipe: Any) -> dict[int, Any]:
    """By stage. The dictionary is the driver's own."""
    workers: dict[int, Any] = pipe._driver._workers
    return workers


def pids_of(pipe: Any) -> list[int]:
    """Process ids, by stage."""
    return [worker.process.pid for _, worker in sorted(workers_of(pipe).items())]


def kill_worker(pipe: Any, stage: int) -> None:
    """Kill the process of a draft, and wait for its end."""
    process = workers_of(pipe)[stage].process
    process.kill()
    process.wait()
