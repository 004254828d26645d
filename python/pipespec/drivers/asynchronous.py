"""The steps of stages that run at the same time: drafts beside the target, in other processes or on other machines."""

from __future__ import annotations

import time
from collections.abc import Iterator

from pipespec.config import PATIENCE, WIDTH, SpeculationConfig
from pipespec.engine.stage import Stage
from pipespec_kernels.state import Action, StateBlock


def target_step(target: Stage, config: SpeculationConfig, block: StateBlock) -> Action:
    """One step of the target. It waits for draft tokens as ``config`` says, up to a deadline."""
    upstream = target.index - 1
    max_draft_tokens = config.max_draft_tokens(target.index)
    action = target.step(0, max_draft_tokens, config.min_draft_tokens, may_wait=True)
    if action == Action.WAIT and config.decode_meanwhile and not target.wait_ns:
        return target.step(0, 0)
    if action == Action.WAIT:
        # Wait for the time that the missing draft tokens should take, with some slack. Then verify the available ones. The draft writes its
        # own time, which may be wrong; no wait is longer than the target needs for the tokens itself.
        each = min(PATIENCE * block.step_ns(upstream), block.step_ns(block.target))
        patience = max(int(config.min_draft_tokens * each), int(PATIENCE * target.wait_ns))
        deadline = time.perf_counter_ns() + patience
        while action == Action.WAIT:
            left = deadline - time.perf_counter_ns()
            if left <= 0:
                action = target.step(0, max_draft_tokens)
                break
            # The next draft token may be one that changes the choice.
            target.port.park(left, 0 if target.wait_ns else min(config.min_draft_tokens, max_draft_tokens))
            action = target.step(0, max_draft_tokens, config.min_draft_tokens, may_wait=True)
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
