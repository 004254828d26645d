"""Helpers for tests that pass on a machine of any speed and load: waits for certain events, and a fixed order of asynchronous stages.

The deadline makes no claim about speed: a wait that exceeds it would never have ended.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipespec import Pipeline

SECONDS = 300.0


def until(condition: Callable[[], object], what: str) -> None:
    """Sleep until ``condition()`` holds. ``what`` describes the condition in the error message."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited {SECONDS:.0f} s in vain until {what}"
        time.sleep(0.001)


# ---- threads


def threads() -> dict[int, str]:
    """The threads of this process by their number, with their names in Python, or else in the kernel."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            found[int(task.name)] = (task / "comm").read_text().strip()
    return found | {thread.native_id: thread.name for thread in threading.enumerate() if thread.native_id in found}


@contextmanager
def no_more_threads() -> Iterator[None]:
    """Every thread that starts within the block ends soon after it. Threads from before may end, too."""
    before = threads()

    def left() -> list[str]:
        gc.collect()
        return [f"{name} ({number})" for number, name in threads().items() if number not in before]

    yield
    deadline = time.monotonic() + SECONDS
    while left() and time.monotonic() < deadline:  # a joined thread may still be listed for a moment
        time.sleep(0.01)
    assert not left(), f"threads that are left: {', '.join(left())}"


# ---- stages


@contextmanager
def drafts_keep_up(pipe: Pipeline, limits: Sequence[int], eos: Sequence[int] = ()) -> Iterator[None]:
    """Under ``workers``, ``ranks`` and ``streams``: each step of the target waits until every live draft has filled its lookahead.

    So every draft takes at least one step per step of the target, and the target has all the draft tokens that the lookahead allows, as in lockstep.
    For one call without stopping criteria. ``limits``: per row the position at which it ends at the latest; ``eos``: the ids that end a row earlier.
    """
    driver = pipe._driver
    assert driver.schedule in ("workers", "ranks", "streams"), f"{driver.schedule} has an order of its own"
    target = driver.block.target

    def ended(stage: int, row: int) -> bool:
        length = driver.block.length(stage, row)
        if length >= limits[row]:
            return True
        with suppress(IndexError):  # rolled back since
            return driver.block.tokens(stage, row, length - 1, length)[0] in eos
        return False

    def rests(stage: int) -> bool:
        if driver.schedule == "streams":
            return stage in driver.failed_drafts or not driver.block.is_alive(stage)
        return stage not in driver.peers or driver.peers[stage].failure() is not None

    def is_far(stage: int, row: int) -> bool:
        if driver.schedule == "ranks" and stage < target - 1:  # only its counters arrive
            return bool(driver.block.counters(stage, row)["steps"])
        length = driver.block.length
        reached = max(length(stage + 1, row), length(target, row)) + driver.config.lookahead[stage]
        # A draft of a stage whose text has ended has nothing to do.
        return length(stage, row) >= min(reached, limits[row]) or ended(stage, row) or ended(stage + 1, row)

    def wait(*_: object) -> None:
        if driver.schedule == "streams" and driver.block.scheduler is None:
            return  # this is the prefill, and the drafts begin after it
        rows = [row for row in range(len(limits)) if not ended(target, row)]
        until(
            lambda: all(rests(stage) or is_far(stage, row) for stage in range(target) for row in rows),
            "the drafts have filled their lookahead",
        )

    from pipespec import trust
    from pipespec.models.layout import CacheLayout

    # The layers of a model with recurrent ones are called one by one.
    hooked = pipe.target if CacheLayout.of(pipe.target.config).states is None else pipe.target.get_input_embeddings()
    trust(wait)
    hook = hooked.register_forward_pre_hook(wait)
    try:
        yield
    finally:
        hook.remove()


def own_lines(output: str) -> list[str]:
    """The lines of a program's output, but for those of torch 2.9, which tells of its connections."""
    return [line for line in output.splitlines() if "[Gloo]" not in line and "peer ranks" not in line]
