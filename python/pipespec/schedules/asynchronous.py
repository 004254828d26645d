"""The steps of drafts that run beside the target, in other processes or on other machines."""

from __future__ import annotations

from collections.abc import Iterator

from pipespec.config import WIDTH
from pipespec.engine.stage import Stage
from pipespec_kernels.state import Action


def drafting(stage: Stage, generation: int, longest_sleep_ns: int) -> Iterator[None]:
    """Let a draft take steps until its generation ends. Yields after each step and each sleep."""
    port = stage.port
    while port.generation == generation:
        lookahead = port.lookahead  # the caller may change it at any time
        if lookahead == 0:
            port.pause(longest_sleep_ns)
        elif stage.step(lookahead, min(port.upstream_lookahead, WIDTH // 2)) != Action.STEP:
            yield  # the plan may have published a rollback or an adoption
            port.park(longest_sleep_ns)
        yield
