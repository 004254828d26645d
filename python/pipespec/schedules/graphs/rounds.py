"""Rounds: lockstep as a fixed sequence of steps, so that a round can be one captured graph. Plain decoding is the round of one step.

In lockstep a draft takes as many steps as fill its lookahead, which only the host can count. A round fixes these numbers. Text and protocol are the
same.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import nullcontext

from transformers import PreTrainedModel

from pipespec.config import SpeculationConfig
from pipespec.process.signals import draft_errors
from pipespec.schedules.base import GenerationRequest
from pipespec.schedules.graphs.buffers import GraphKey, StageStep
from pipespec.schedules.graphs.driver import GraphedDriver
from pipespec_kernels.state import Action


def round_steps(config: SpeculationConfig) -> list[StageStep]:
    """Return the steps of a round, the target's last.

    A draft takes as many steps as fill its lookahead if all draft tokens are accepted: with ``h`` draft tokens a step makes ``h + 1`` tokens. Before
    each of its steps, the stage upstream fills its own lookahead.

    In addition to draft tokens a step feeds:

    * one token after a step of the same stage;
    * two after a step of the stage downstream, whose last token it adopts;
    * in the stage's first step of the round, one for each stage downstream and one of its own, since each of them may be one token ahead of its
      upstream. A draft that reads the target's hidden states has one for each token that the round may have committed.
    """
    target = len(config.lookahead)
    reads_target = {i for i, draft in enumerate(config.drafts) if draft.reads_target}
    steps: list[StageStep] = []
    begun: set[int] = set()

    def step(stage: int, own: int) -> None:
        draft_tokens = config.max_draft_tokens(stage)
        if draft_tokens > 0:
            fill(stage - 1)
        if stage not in begun:
            own = 1 + (config.max_draft_tokens(target) if stage in reads_target else target - stage)
            begun.add(stage)
        steps.append(StageStep(stage, own + draft_tokens))

    def fill(stage: int) -> None:
        per_step = config.max_draft_tokens(stage) + 1
        for i in range(-(-config.max_draft_tokens(stage + 1) // per_step)):
            step(stage, 2 if i == 0 else 1)

    step(target, 1)
    return steps


class RoundsDriver(GraphedDriver):
    """Runs lockstep, or with one model plain decoding, in rounds. On a GPU a round is one graph, or where the host takes part, each step is one.

    All stages are on one device, else the constructor raises ``ValueError``.
    """

    schedule = "lockstep"

    def __init__(self, models: Sequence[PreTrainedModel], config: SpeculationConfig) -> None:
        if len({model.device for model in models}) > 1:
            places = ", ".join(str(model.device) for model in models)
            what = "graphs=True runs a round of all models as one graph, so they must be on one device"
            raise ValueError(f"{what}; they are on {places}")
        super().__init__(models, config)

    def graph_keys(self) -> list[GraphKey]:
        return [self._graph_key(round_steps(self.config), self.config.lookahead)]

    def _run_on_host(self, request: GenerationRequest) -> None:
        config, steps = self.config, round_steps(self.config)
        ports = {step: self.block.port(step.stage, step.width) for step in steps}
        for step, port in ports.items():
            port.trace(self._trace_of(step.stage))
        action = Action.IDLE
        while action != Action.FINISHED:
            for step in steps:
                i, port = step.stage, ports[step]
                if i in self.failed_drafts:
                    continue
                is_target = i == self.block.target
                with nullcontext() if is_target else draft_errors(functools.partial(self.draft_failed, i)):
                    action = port.plan(config.lookahead_of(i), config.max_draft_tokens(i), 0)
                    if action == Action.STEP:
                        selected = self._stages[i].body_on_host(port)
                        port.commit(selected.data_ptr(), selected.stride(0))
            if action != Action.FINISHED:
                self._committed(request)
