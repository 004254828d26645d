"""What a captured step reads and writes at fixed addresses, and the key of a captured graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipespec.engine.cache import RowCache
from pipespec.engine.sampling import SamplingParams, check_drawn
from pipespec_kernels import dispatch, ops
from pipespec_kernels.noise import ALL_DRAWN, Noise


class SamplingKind(NamedTuple):
    """The part of the sampling parameters that decides which kernels run. Their numbers lie in memory and may change between launches.

    Attributes:
        sampled: False: greedy.
        top_k: Whether a top-k filter runs; likewise ``top_p`` and ``min_p``.
    """

    sampled: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False

    @classmethod
    def of(cls, sampling_params: SamplingParams) -> SamplingKind:
        if sampling_params.seeds is None:
            return cls()
        return cls(True, sampling_params.top_k > 0, sampling_params.top_p < 1.0, sampling_params.min_p > 0.0)


class StaticSampler:
    """Chooses the tokens of one stage on its device: :class:`pipespec.engine.sampling.Sampler` with its numbers at fixed addresses.

    Args:
        rows: Rows of the batch.
        device: The stage's device.
        is_target: Whether logits without a distribution are an error. A draft without one only drafts badly.

    Attributes:
        kind: The kind of sampling of the present call.
    """

    def __init__(self, rows: int, device: torch.device, is_target: bool) -> None:
        self.kind, self._is_target = SamplingKind(), is_target
        # By width, since graphs keep the addresses.
        self._workspaces: dict[int, Any] = {}
        self._seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        self._inverse_temperature = torch.ones(rows, dtype=torch.float32, device=device)
        self._top_k = torch.zeros(rows, dtype=torch.int64, device=device)
        self._top_p = torch.ones(rows, dtype=torch.float64, device=device)
        self._min_p = torch.zeros(rows, dtype=torch.float64, device=device)
        # Per row the first position without a distribution, where the host reads it. Kernels write it over the bus, in this case only.
        undrawn = torch.full((rows,), ALL_DRAWN, dtype=torch.int64, device="cpu")
        self._undrawn = undrawn if device.type == "cpu" else undrawn.pin_memory()

    def set(self, sampling_params: SamplingParams) -> None:
        """Use these parameters from the next step on. The numbers overwrite the old ones in place."""
        self.kind = SamplingKind.of(sampling_params)
        if sampling_params.seeds is None:
            return
        self._seeds.copy_(torch.from_numpy(np.array(sampling_params.seeds, dtype=np.uint64).view(np.int64)))
        self._inverse_temperature.fill_(1 / sampling_params.temperature)
        self._top_k.fill_(sampling_params.top_k)
        self._top_p.fill_(sampling_params.top_p)
        self._min_p.fill_(sampling_params.min_p)
        self._undrawn.fill_(ALL_DRAWN)

    def __call__(
        self, logits: Tensor, tokens: Tensor, kv: Tensor, n_select: Tensor, num_draft_tokens: Tensor
    ) -> Tensor:
        """Choose tokens for all columns of a step, see :func:`pipespec_kernels.ops.verify`.

        Args:
            logits: ``[rows, width, vocabulary]``.
            tokens: The tokens fed, int32 ``[rows, width]``.
            kv: Position of each row's first token, int32 ``[rows]``.
            n_select: Columns of each row that need a choice, int32 ``[rows]``.
            num_draft_tokens: How many of them hold draft tokens, int32 ``[rows]``.

        Returns:
            ``selected``, int32 ``[rows, width]``.
        """
        kind, noise, undrawn = self.kind, None, None
        if kind.sampled:
            cutoff = None
            if kind.top_k or kind.top_p or kind.min_p:
                # Which filters run is fixed in a graph, so a filter that is off is left out here.
                cutoff = ops.cutoff(
                    logits,
                    inv_temperature=self._inverse_temperature,
                    top_k=self._top_k if kind.top_k else 0,
                    top_p=self._top_p if kind.top_p else 1.0,
                    min_p=self._min_p if kind.min_p else 0.0,
                    query_lens=n_select,
                    num_draft_tokens=num_draft_tokens,
                )
            # Column 0 chooses the token behind the first one that is fed.
            noise = Noise(self._seeds, kv, self._inverse_temperature, cutoff, offset=1)
            undrawn = self._undrawn if self._is_target else None
        workspace = self._workspace(logits)
        return ops.verify(
            logits, tokens, n_select, num_draft_tokens, noise=noise, workspace=workspace, undrawn=undrawn
        )[0]

    def _workspace(self, logits: Tensor) -> Any:
        """The work space of verification on a GPU, which each launch leaves zero; None on a CPU."""
        rows, width, _ = logits.shape
        if width not in self._workspaces:
            kernels = dispatch.kernels(logits)
            self._workspaces[width] = None if kernels is None else kernels.Workspace(rows, width, logits.device)
        return self._workspaces[width]

    def check_drawn(self) -> None:
        """Check the steps that have ended.

        Raises:
            ValueError: A token was drawn from logits that are no distribution.
        """
        if self.kind.sampled:
            check_drawn(self._undrawn)


class StaticBuffers(NamedTuple):
    """What a stage keeps at fixed addresses for one number of rows.

    Attributes:
        cache: Keys and values.
        sampler: Its numbers lie at fixed addresses, too.
        version: Differs between any two allocations, and from one set of weights to the next.
        weights: Hash of the addresses of the model's weights.
        graphs: The :class:`CapturedGraph` of each key that the stage is launched with. They end with the buffers.
    """

    cache: RowCache
    sampler: StaticSampler
    version: int
    weights: int
    graphs: dict[GraphKey, Any]


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
