"""What a captured step reads and writes at fixed addresses, and the key of a captured graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pipespec.engine.cache import RowCache
from pipespec.engine.sampler import Sampler, SamplingKind


class StaticBuffers(NamedTuple):
    """What a stage keeps at fixed addresses for one number of rows.

    Attributes:
        cache: Keys and values.
        sampler: Its numbers lie at fixed addresses, too.
        version: Differs between any two allocations, and from one set of weights to the next.
        weights: Hash of the addresses of the model's weights.
        graphs: The :class:`CapturedGraph` of each key that the stage is launched with. They end with the buffers.
        prompt_graphs: The :class:`CapturedPrompt` of each number of columns.
    """

    cache: RowCache
    sampler: Sampler
    version: int
    weights: int
    graphs: dict[GraphKey, Any]
    prompt_graphs: dict[int, Any]


class StageStep(NamedTuple):
    """One step within a graph or a round.

    Attributes:
        stage: Index of the stage.
        width: Columns of the step.
    """

    stage: int
    width: int


class GraphKey(NamedTuple):
    """What a captured graph depends on: calls with equal keys launch the same graph.

    Attributes:
        steps: The steps in the graph, in order. The stage of the last one is launched.
        lookahead: The chain's lookahead where the graph contains it; empty where the launcher writes it before each launch.
        versions: :attr:`StaticBuffers.version` of each stage that takes a step.
        kinds: The kind of sampling of each of these stages.
    """

    steps: tuple[StageStep, ...]
    lookahead: tuple[int, ...]
    versions: tuple[int, ...]
    kinds: tuple[SamplingKind, ...]

    @classmethod
    def of(
        cls, steps: Sequence[StageStep], buffers: Sequence[StaticBuffers], lookahead: tuple[int, ...] = ()
    ) -> GraphKey:
        """Build the key of a graph from its steps and the static buffers of all stages of the chain."""
        used = [buffers[stage] for stage in sorted({step.stage for step in steps})]
        return cls(tuple(steps), lookahead, tuple(b.version for b in used), tuple(b.sampler.kind for b in used))

    @property
    def launched(self) -> StageStep:
        """The step whose stage and width the scheduler launches the graph for."""
        return self.steps[-1]
