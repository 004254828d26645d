"""follower: the target's forwards in the ranks of a tensor-parallel group that do not lead. See :mod:`pipespec.engine.group`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from pipespec.config import SpeculationConfig
from pipespec.engine.stage import Stage
from pipespec.schedules.base import Driver, GenerationRequest


@dataclass(frozen=True)
class _Received:
    """The text that the leader has generated, see :class:`pipespec.schedules.base.TextSource`."""

    starts: Sequence[int]
    rows: Sequence[np.ndarray]
    target: int = 0

    def length(self, stage: int, row: int) -> int:
        return self.starts[row] + len(self.rows[row])

    def tokens(self, stage: int, row: int, begin: int, end: int) -> list[int]:
        start = self.starts[row]
        found: list[int] = self.rows[row][begin - start : end - start].tolist()
        return found

    def end_row(self, row: int) -> None:
        """Nothing to do: the text is complete."""

    def counters(self, stage: int, row: int) -> dict[str, Any]:
        return {}


class FollowerDriver(Driver):
    """Runs the forwards of the target that the leader announces. The text is the leader's."""

    schedule = "follower"

    def __init__(self, models: Sequence[PreTrainedModel], config: SpeculationConfig) -> None:
        super().__init__(models, config)
        self.ran_as = self.schedule
        self._stage = Stage(self.models[-1], self.block, self.block.target, native=config.native)

    @property
    def target(self) -> Stage:
        return self._stage

    def _generate(self, request: GenerationRequest) -> None:
        self._prepare(request)
        rows = self._stage.follow(request.inputs)
        request.committed(_Received([len(prompt) for prompt in request.inputs.prompts], rows))
