"""Ways to run a chain, by name: a schedule, with captured steps or without, and SPD."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pipespec import Pipeline
from pipespec_spd import SpeculativePipeline

IN_THIS_PROCESS = ["plain", "plain, captured", "lockstep", "lockstep, captured", "streams"]


@contextmanager
def opened(target: Any, drafts: Any, how: str, **options: Any) -> Iterator[Any]:
    """A pipeline. ``how``: "spd", or the name of a schedule, with ", captured" after it for captured steps."""
    schedule, *captured = how.split(", ")
    if schedule == "spd":
        yield SpeculativePipeline(target, drafts, stages=2)
        return
    with Pipeline(target, drafts, schedule=schedule, graphs=bool(captured) or None, **options) as pipe:
        yield pipe


def driver_of(pipe: Any) -> Any:
    """What runs the stages of a pipeline. Tests reach it here only."""
    return pipe._driver
