"""Stage: one model, its cache, and the step that every stage of a pipeline runs: plan, forward, select, commit."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from pipespec.cache import RowCache
from pipespec.forward import forward
from pipespec_kernels import ops
from pipespec_kernels.state import Action, StateBlock

WIDTH = 64
"""Most tokens that one row feeds in one step. A stage further behind than that catches up in several."""

PREFILL_CHUNK = 512
"""Tokens per row and forward in the prefill: bounds its activations and its mask."""


class Stage:
    """A model at place ``index`` of the chain.

    There is one kind of step, for drafts and target alike: it feeds the tokens whose keys and values are missing, then
    whatever drafts upstream has, keeps the longest agreeing prefix and one token of its own.
    """

    def __init__(self, model: PreTrainedModel, block: StateBlock, index: int) -> None:
        self.model = model
        self.block = block
        self.index = index
        self._cache: RowCache | None = None

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[np.ndarray], limits: Sequence[int]) -> None:
        """Start the rows of a generation: cache the keys and values of each prompt but its last token.

        ``prompts``: per row int32 token ids ``[P_r]`` without padding; ``limits``: per row the length it may grow to.
        """
        rows, capacity = len(prompts), max(limits) + WIDTH
        if self._cache is None or not self._cache.fits(rows, capacity):
            self._cache = None  # before the new one is allocated
            self._cache = RowCache.for_model(self.model, rows, capacity)
        cache = self._cache
        cache.reset()
        lengths = np.array([len(p) - 1 for p in prompts])
        longest = int(lengths.max())
        tokens = np.zeros((rows, max(longest, 1)), dtype=np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt) - 1] = prompt[:-1]
        fed = torch.from_numpy(tokens).to(self.model.device)
        for begin in range(0, longest, PREFILL_CHUNK):
            forward(self.model, fed[:, begin : min(begin + PREFILL_CHUNK, longest)], cache, keep=0)
        cache.truncate(lengths)

        self.port = self.block.port(self.index, WIDTH)
        self._tokens = torch.from_numpy(self.port.tokens)
        self._kv, self._n_fed, self._n_hint, self._n_select = (
            self.port.kv[:rows],
            self.port.n_fed[:rows],
            self.port.n_hint[:rows],
            self.port.n_select[:rows],
        )
        self._rows = rows
        self._step_ns = 0.0

    @torch.inference_mode()
    def step(self, window: int, max_hints: int, min_hints: int = 0) -> Action:
        """One step of all rows. See ``Policy`` in ``csrc/protocol/plan.hpp`` for the arguments, ``Action`` for the result.

        Anything but ``Action.STEP`` means that nothing was fed.
        """
        began = time.perf_counter_ns()
        port = self.port
        action = port.plan(window, max_hints, min_hints)
        if action != Action.STEP:
            return action
        cache = self._cache
        assert cache is not None
        cache.truncate(self._kv)
        columns = port.columns
        fed = self._tokens[: self._rows, :columns].to(self.model.device)
        selecting = self._n_select > 0
        if selecting.any():
            # Logits of the columns before the first that is needed are not computed.
            first = int((self._n_select - self._n_hint)[selecting].min()) - 1
            logits = forward(self.model, fed, cache, keep=columns - first)
            selected, _ = ops.verify(
                logits,
                fed[:, first:],
                np.maximum(self._n_select - first, 0),
                self._n_hint * selecting,
            )
            port.commit(selected.data_ptr(), columns - first)
        else:
            forward(self.model, fed, cache, keep=0)
            port.commit(0, 0)  # rows that only catch up select nothing
        took = time.perf_counter_ns() - began
        self._step_ns = took if self._step_ns == 0 else 0.9 * self._step_ns + 0.1 * took
        port.set_step_ns(min(int(self._step_ns), 2**32 - 1))
        return action
