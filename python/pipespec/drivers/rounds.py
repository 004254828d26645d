"""Lockstep in rounds: a fixed sequence of steps of all stages, so that a round can be one captured graph; plain decoding is the round of one step.

In lockstep each stage is asked for as many steps as it takes to fill its window, which only the host can count. A round fixes the numbers; text and
protocol are the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from transformers import PreTrainedModel

from pipespec.drivers.base import Policy, Request
from pipespec.drivers.fixed import FixedDriver
from pipespec.drivers.step import FixedStage, HostPort
from pipespec_kernels.scheduler import Steering
from pipespec_kernels.state import Action

if TYPE_CHECKING:
    from pipespec.drivers.graphs import Graph, Graphs


class Part(NamedTuple):
    """One step of a round: by which stage, and how many columns it has."""

    stage: int
    width: int


def parts(policy: Policy) -> list[Part]:
    """The steps of a round, the target's last.

    A stage that drafts takes as many steps as fill its window if all hints hold: with upstream's ``h`` hints a step makes ``h + 1`` tokens.
    Ahead of each step its upstream fills its own window. What a step feeds beside its hints: one token of its own after a step of its own; two
    after one of the stage downstream, whose last token it adopts; and in the round's first step one for each stage downstream, since all of them may
    have gone one further than their upstream.
    """
    target = len(policy.windows)
    out: list[Part] = []
    begun: set[int] = set()

    def step(stage: int, own: int) -> None:
        hints = policy.max_hints(stage)
        if hints > 0:
            fill(stage - 1)
        if stage not in begun:
            own = 1 + target - stage
            begun.add(stage)
        out.append(Part(stage, own + hints))

    def fill(stage: int) -> None:
        per_step = policy.max_hints(stage) + 1
        for i in range(-(-policy.windows[stage] // per_step)):
            step(stage, 2 if i == 0 else 1)

    step(target, 1)
    return out


class RoundsDriver(FixedDriver):
    """Lockstep, or with one model plain decoding, in rounds: captured as one graph each on a GPU, all stages on the same one.

    On a GPU new windows are for the next call; a round is a graph with windows of its own.
    """

    schedule = "lockstep"

    def _are_on_gpus(self, models: Sequence[PreTrainedModel]) -> bool:
        if len({model.device for model in models}) > 1:
            raise ValueError(
                f"graphs=True runs a round of all models as one graph, so they must be on one device; they are on "
                f"{', '.join(str(model.device) for model in models)}"
            )
        return super()._are_on_gpus(models)

    # ---- on the CPU

    def _run(self, request: Request) -> None:
        if self.on_gpu:
            self._drive(request)
            return
        self._ports: dict[Part, HostPort] = {}
        while self._round() != Action.FINISHED:
            self._committed(request)

    def _round(self) -> Action:
        """One round; what the target's step was."""
        action = Action.IDLE
        for part in parts(self.policy):
            if part.stage in self._dead:
                continue
            stage = self._stages[part.stage]
            port = self._ports.get(part)
            if port is None:
                port = self._ports[part] = HostPort(
                    self.block, *part, stage.room.cache.rows, self._trace_of(part.stage)
                )
            port.set_policy(self.policy.window(part.stage), self.policy.max_hints(part.stage))
            try:
                action = port.plan()
                if action == Action.STEP:
                    port.commit(stage.body(port.tokens, port.kv, port.n_hint, port.n_select))
            except Exception as error:
                if stage is self.target:
                    raise
                self._failed(part.stage, error)
        return action

    # ---- on a GPU

    def _steering(self) -> Steering:
        return replace(
            super()._steering(), wait=0, decode_meanwhile=False
        )  # who rides in the target's step is not awaited

    def _wanted(self) -> list[tuple[FixedStage, Hashable]]:
        return [(self.target, self.policy.windows)]

    def _rooms_key(self, stage: FixedStage) -> Hashable:
        return tuple(s.room.code for s in self._stages)

    def _capture(self) -> None:
        # A draft with other weights, or another cache, has another room: what was captured over the old one is of no use any more.
        there = {room.number for stage in self._stages for room in stage.rooms()}
        for room in self.target.rooms():
            old = [name for name in room.graphs if not all(number in there for number, _ in name[0])]
            for name in old:
                del room.graphs[name]
            if old:
                self._scheduler = None  # it may hold them, too
        super()._capture()

    def _make_graph(self, graphs: Graphs, stage: FixedStage, name: Hashable) -> Graph:
        from pipespec.drivers.graphs import Turn

        ports = {}
        for part in parts(self.policy):
            if part not in ports:
                own = self._stages[part.stage]
                port = graphs.port(own, part.width, own.room.cache.rows, shared_policy=own is self.target)
                port.set_policy(self.policy.window(part.stage), self.policy.max_hints(part.stage))
                ports[part] = port
        return graphs.capture([Turn(self._stages[part.stage], ports[part]) for part in parts(self.policy)])

    def _launched(self, stage: FixedStage) -> list[tuple[int, Graph]]:
        if stage is not self.target:
            return []
        graph = self.target.room.graphs[self._rooms_key(stage), self.policy.windows]
        return [(parts(self.policy)[-1].width, graph)]
