"""The steps of stages that run at the same time: drafts beside the target, in other processes or on other machines."""

from __future__ import annotations

import time
from collections.abc import Iterator

from pipespec.config import PATIENCE, WIDTH, SpeculationConfig
from pipespec.engine.stage import Stage
from pipespec_kernels.state import Action


def target_step(target: Stage, config: SpeculationConfig) -> Action:
    """One step of the target. Where it goes by confidence, it may wait for draft tokens, up to a deadline."""
    max_draft_tokens = config.max_draft_tokens(target.index)
    action = target.step(0, max_draft_tokens, may_wait=True)
    if action == Action.WAIT:
        # With some slack. Then verify the available ones.
        deadline = time.perf_counter_ns() + int(PATIENCE * target.wait_ns)
        while action == Action.WAIT:
            left = deadline - time.perf_counter_ns()
            if left <= 0:
                return target.step(0, max_draft_tokens)
            # The next draft token may be one that changes the choice.
            target.port.park(left)
            action = target.step(0, max_draft_tokens, may_wait=True)
    return action


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
