"""GraphedNgramStage: the stage of an n-gram index whose steps are captured, so that its draft tokens are found where the models run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipespec.config import WIDTH
from pipespec.engine.chain import StageInputs, static_capacity
from pipespec.engine.ngram import NgramDraft
from pipespec.engine.sampling import ScoreRecord
from pipespec.schedules.graphs.buffers import TextBuffers, versions
from pipespec.schedules.graphs.stage import MAX_BUFFERS, StaticStage
from pipespec_kernels import _native, ops
from pipespec_kernels.scheduler import Rectangle
from pipespec_kernels.state import Action, StateBlock


class GraphedNgramStage(StaticStage):
    """An n-gram index over the texts of the rows, which lie on the device. A step looks for what followed the newest tokens
    (:func:`pipespec_kernels.ops.prompt_lookup`) and publishes all of it at once. Where nothing did, it passes on the draft tokens of the stage upstream.

    Where a match has :attr:`NgramDraft.max_match` tokens, the draft tokens are those after it, and the index of other steps looks up each token on its own.

    Args:
        spec: Of the draft.
        block: The state block of the chain.
        index: Place in the chain.
        trace: Buffer for the times of the steps that the host plans; None: no trace.
        device: Where the models run.
        count: Maximum number of draft tokens of a step.
    """

    translated = None
    form = NgramDraft.form

    def __init__(
        self,
        spec: NgramDraft,
        block: StateBlock,
        index: int,
        trace: _native.TraceBuffer | None = None,
        *,
        device: torch.device,
        count: int,
    ) -> None:
        self.spec, self.block, self.index = spec, block, index
        self._trace, self._device, self._count = trace, device, count
        # The answers hold a match for nearly every text, mostly a rare one: in place of a model's draft tokens those would lose.
        ids = spec.ids if spec.has_own_corpus else None
        self._corpus = None if ids is None else torch.from_numpy(ids).to(device)
        self._buffers: dict[int, TextBuffers] = {}  # by rows, the last used one last
        self._current: TextBuffers | None = None
        self._port: _native.StagePort | None = None

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def buffers(self) -> TextBuffers:
        assert self._current is not None
        return self._current

    def all_buffers(self) -> Sequence[TextBuffers]:
        return list(self._buffers.values())

    def prepare(self, inputs: StageInputs) -> TextBuffers:
        rows, capacity = len(inputs.prompts), static_capacity(inputs.most)
        found = self._buffers.pop(rows, None)
        if found is None or found.capacity < capacity:
            history = torch.zeros((rows, capacity), dtype=torch.int32, device=self._device)
            workspace = torch.zeros(2 * rows, dtype=torch.int64, device=self._device)
            found = TextBuffers(history, workspace, next(versions), {}, {})
        self._buffers[rows] = self._current = found
        while len(self._buffers) > MAX_BUFFERS:
            del self._buffers[next(iter(self._buffers))]
        return found

    def prefill(self, inputs: StageInputs, record: ScoreRecord | None = None) -> None:
        prompts = inputs.prompts
        text = np.zeros((len(prompts), max(map(len, prompts))), dtype=np.int32)
        for row, prompt in enumerate(prompts):
            text[row, : len(prompt)] = prompt
        self.buffers.history[:, : text.shape[1]].copy_(torch.from_numpy(text))
        self._port = self.block.port(self.index, WIDTH)
        self._port.trace(self._trace)

    def bound(self, lookahead: int) -> int:
        """See :meth:`StaticStage.bound`. The draft tokens that it passes on have no token behind them."""
        return lookahead + (self.index > 0)

    def step(self, lookahead: int, max_draft_tokens: int) -> Action:
        port = self._port
        assert port is not None
        action = Action(port.plan(self.bound(lookahead), max_draft_tokens, 0))
        if action != Action.STEP:
            return action
        selected = self.body_on_host(port)
        if not port.query_lens[: self.buffers.rows].any():
            return Action.IDLE  # no row proposes anything
        port.commit(selected.data_ptr(), selected.stride(0))
        return Action.STEP

    def body(
        self, tokens: Tensor, kv: Tensor, query_lens: Tensor, num_draft_tokens: Tensor, n_select: Tensor
    ) -> Tensor:
        """See :meth:`StaticStage.body`. Its draft tokens become those of the step, so that commit takes all of them."""
        spec, own = self.spec, self.buffers
        return ops.prompt_lookup(
            tokens,
            query_lens,
            num_draft_tokens,
            n_select,
            own.history,
            kv,
            count=self._count,
            min_match=spec.min_match,
            max_match=spec.max_match,
            corpus=self._corpus,
            workspace=own.workspace,
        )

    def body_on_host(self, planned: Rectangle | _native.StagePort) -> Tensor:
        given = self.planned_on_host(planned)
        there = [tensor.to(self._device) for tensor in given]
        selected = self.body(*there)
        for own, new in zip(given, there, strict=True):
            own.copy_(new)
        return selected.cpu()

    # ---- what it has none of

    def sync_lengths(self) -> None:
        """Nothing: it has no cache."""

    def keep_prefixes(self, budget: int | None) -> None:
        """Nothing: it takes over the prompts in no time."""

    def read_from(self, target: Any) -> None:
        """Nothing: it reads the text in the block."""

    def end_call(self) -> None:
        """Nothing: only its buffers remain."""

    def release(self) -> None:
        self._buffers.clear()
        self._current = self._port = None
