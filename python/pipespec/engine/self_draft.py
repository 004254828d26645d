"""A draft out of the target's first layers, in the target's own cache: what the two stages share in ``schedule="lockstep"``.

The draft reads the keys and values of the text so far, which the target has written, so it needs no prefill and does not feed again what the
target has verified. Those of its draft tokens it writes behind them, in the same layers. A step of the target feeds all tokens whose keys and values
are not its own, so it overwrites what the draft wrote, and nothing that the draft writes reaches the text.

In the native form both run the target's packed weights, and the hidden states behind the shared layers are kept: a verification continues from
them, as in LayerSkip (Elhoushi et al. 2024, section 3.4). The native sums of a column do not depend on the other columns, so its bits are those of a
verification that runs all layers.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from pipespec.config import WIDTH
from pipespec.engine.cache import RowCache
from pipespec.engine.first_layers import FirstLayers
from pipespec.engine.forward import native_form_of, recheck
from pipespec.engine.inputs import StageInputs
from pipespec.engine.native import NativeForm
from pipespec.engine.sampling import ScoreRecord
from pipespec.engine.sections import ModelSection, open_sections
from pipespec.engine.stage import Stage
from pipespec.models.derived import first_layers_of, have_same_tensors
from pipespec.models.devices import input_device, why_not_whole
from pipespec.models.layout import CacheLayout
from pipespec.models.parts import ModelParts
from pipespec.models.rope import rope_changes_at
from pipespec_kernels.state import Action


def shared_layers(draft: PreTrainedModel, target: PreTrainedModel) -> int | None:
    """The number of the target's first layers whose keys and values a draft can share; None: it needs a cache of its own.

    Recurrent layers have states in place of keys and values, and with dynamic RoPE the keys of a draft would have other angles.
    """
    if rope_changes_at(target) is not None or why_not_whole(target) is not None:
        return None
    if CacheLayout.of(target.config).states is not None:
        return None
    return first_layers_of(draft, target)


class SharedLayers:
    """What a draft and its target share in a call.

    Args:
        count: number of layers.

    Attributes:
        target: the target's stage, once it is made.
        form: the target's native form, which both run; None: each runs its own forward, and no hidden states are kept.
        is_verified: whether the target has taken a step since the draft's last one.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        # No cycle, which would keep the target's cache after the pipeline.
        self._target: weakref.ref[SharingTarget] | None = None
        self.form: NativeForm | None = None
        self.is_verified = True
        # Per row, tokens that the draft has fed since the target's step, their number, the position of the first, and the hidden states
        # behind the shared layers: int32 [rows, WIDTH], float32 [rows, WIDTH, H].
        self._tokens = np.zeros((0, WIDTH), dtype=np.int32)
        self._fed: list[int] = []
        self._begin: list[int] = []
        self._states = torch.zeros((0, WIDTH, 0), dtype=torch.float32)

    @property
    def target(self) -> SharingTarget:
        target = None if self._target is None else self._target()
        assert target is not None
        return target

    @target.setter
    def target(self, stage: SharingTarget) -> None:
        self._target = weakref.ref(stage)

    def end(self) -> None:
        """End a call: hold neither packed weights nor hidden states."""
        self.form = None
        self._states = torch.zeros((0, WIDTH, 0), dtype=torch.float32)

    def begin(self, rows: int, form: NativeForm | None) -> None:
        """Begin a call, after the target's prefill."""
        self.form = form
        self._fed, self._begin = [0] * rows, [0] * rows
        if form is not None and self._states.shape != (shape := (rows, WIDTH, form.parts.config.hidden_size)):
            self._tokens = np.zeros(shape[:2], dtype=np.int32)
            # Rows that feed nothing take part in a forward, with any finite values.
            self._states = torch.zeros(shape, dtype=torch.float32, device="cpu")

    def overwrite(self, lengths: Sequence[int]) -> None:
        """Drop what lies behind these lengths of the rows, because the draft's next forward writes there."""
        for row, length in enumerate(lengths):
            at = length - self._begin[row]
            if not 0 < at <= self._fed[row]:
                self._begin[row], at = length, 0
            self._fed[row] = at

    def keep(self, tokens: torch.Tensor, query_lens: np.ndarray, states: torch.Tensor) -> None:
        """Keep what the draft's forward has computed, behind what is kept.

        Args:
            tokens: ``[rows, q]``, those fed.
            query_lens: ``[rows]``, how many of them belong to each row.
            states: float32 ``[rows, q, H]``, behind the shared layers.
        """
        for row, n in enumerate(query_lens.tolist()):
            at = self._fed[row]
            n = min(n, WIDTH - at)
            if n > 0:
                self._tokens[row, at : at + n] = tokens[row, :n]
                self._states[row, at : at + n] = states[row, :n]
                self._fed[row] = at + n

    def kept(self, tokens: torch.Tensor, query_lens: np.ndarray, lengths: Sequence[int]) -> torch.Tensor | None:
        """Hidden states of the first columns of the target's forward.

        Args:
            tokens: ``[rows, q]``, those that the target feeds.
            query_lens: ``[rows]``, how many of them belong to each row.
            lengths: per row, the position of the first.

        Returns:
            float32 ``[rows, n, H]`` for the columns whose tokens the draft has fed in all rows that feed; None where there are none.
        """
        known = WIDTH
        for row, n in enumerate(query_lens.tolist()):
            if n == 0:
                continue
            fed = min(n, self._fed[row]) if self._begin[row] == lengths[row] else 0
            differ = np.flatnonzero(self._tokens[row, :fed] != tokens[row, :fed].numpy())
            known = min(known, int(differ[0]) if len(differ) else fed)
            if known == 0:
                return None
        return self._states[:, :known]

    def drop(self) -> None:
        """Keep nothing: the target's forward writes over the draft's keys and values."""
        self._fed = [0] * len(self._fed)
        self.is_verified = True


class SharingTarget(Stage):
    """The target of a draft that shares its first layers. Arguments are those of :class:`Stage`, and ``shared``."""

    def __init__(self, *args: Any, shared: SharedLayers, **options: Any) -> None:
        super().__init__(*args, **options)
        self._shared = shared
        shared.target = self

    def prefill(self, inputs: StageInputs, record: ScoreRecord | None = None) -> None:
        # A call that was interrupted leaves some.
        self._shared.drop()
        super().prefill(inputs, record)

    def _call(self, fed: torch.Tensor, cache: RowCache, keep: int) -> torch.Tensor:
        form, states = self._shared.form, None
        try:
            if form is not None and any(self._shared._fed):
                states = self._shared.kept(fed, self._query_lens, cache.lengths)
            if form is None or states is None:
                return super()._call(fed, cache, keep)
            return form.resume(fed, cache, keep, self._shared.count, states)
        finally:
            self._shared.drop()

    def lend(self, config: Any) -> tuple[FirstLayers, np.ndarray]:
        """The first layers of the cache and the text, for a draft with this configuration."""
        assert self._cache is not None
        return FirstLayers(self._cache, config), self._text

    def native_form(self) -> NativeForm | None:
        """The native form in which this call runs; None: it has another one."""
        assert self._cache is not None
        return native_form_of(self.model, self._cache, native=self._native)

    def give_up(self, lengths: Sequence[int]) -> None:
        """Hold no more than these lengths of the rows, because the draft writes behind them."""
        assert self._cache is not None
        self._held = [min(pair) for pair in zip(self._held, lengths, strict=True)]
        self._cache.truncate([min(pair) for pair in zip(self._cache.lengths, lengths, strict=True)])


class SharingDraft(Stage):
    """A draft in the target's cache, without a prefill. Arguments are those of :class:`Stage`, and ``shared``.

    It holds a view of the cache from :meth:`prefill`, which comes after the target's, to :meth:`end`.
    """

    def __init__(self, *args: Any, shared: SharedLayers, **options: Any) -> None:
        super().__init__(*args, **options)
        self._shared = shared
        self._form = ""
        self._head: ModelSection | None = None

    def end(self) -> None:
        """End a call: refer to the target's cache no longer."""
        if self._cache is not None:
            self._form = super().form if self._shared.form is None else self._shared.target.form
            self._cache, self._text = None, np.zeros((0, 0), dtype=np.int32)
            self._shared.end()

    @property
    def form(self) -> str:
        return self._form

    @property
    def shares(self) -> str:
        """What the draft shares with the target in this call, for a report; empty where it could not begin."""
        if self._cache is None:
            return ""
        return "keys and values" if self._shared.form is None else "packed weights, keys, values and hidden states"

    def _open(self, inputs: StageInputs) -> tuple[RowCache, list[int]]:
        self._device = input_device(self.model)
        self._fit_vocabulary(inputs.vocabulary)
        target = self._shared.target
        # Each stage reads the text below the tokens that it feeds. The target has written it.
        cache, self._text = target.lend(self.model.config)
        self._cache = cache
        self._held = [len(prompt) - 1 for prompt in inputs.prompts]
        self._skipped = [0] * len(self._held)
        cache.set_lengths(self._held)
        form = target.native_form()
        self._shared.begin(len(inputs.prompts), form)
        if form is None:
            recheck(self.model, native=self._native)
        else:
            self._open_head()
        return cache, list(self._held)

    def _open_head(self) -> None:
        own, theirs = ModelParts.of(self.model), ModelParts.of(self._shared.target.model)
        if have_same_tensors(own.norm, theirs.norm) and have_same_tensors(own.head, theirs.head):
            self._head = None
            return
        if self._head is None:
            self._head = ModelSection(ModelParts(own.config, norm=own.norm, head=own.head))
        open_sections([self._head])

    def step(
        self, lookahead: int, max_draft_tokens: int, min_draft_tokens: int = 0, *, may_wait: bool = False
    ) -> Action:
        if self._shared.is_verified:
            self._shared.is_verified = False
            self.port.continue_target()
        return super().step(lookahead, max_draft_tokens, min_draft_tokens, may_wait=may_wait)

    def _roll_back(self, cache: RowCache, lengths: Sequence[int]) -> None:
        # The text is written next, and an interruption may come before the draft's keys and values.
        self._shared.target.give_up(lengths)
        # Behind a step of the target, it is more than the draft has written.
        cache.set_lengths(lengths)

    def _call(self, fed: torch.Tensor, cache: RowCache, keep: int) -> torch.Tensor:
        shared = self._shared
        shared.target.give_up(cache.lengths)
        if shared.form is None:
            return super()._call(fed, cache, keep)
        assert isinstance(cache, FirstLayers)
        shared.overwrite(cache.lengths)
        hidden = shared.form.run_first(fed, cache)
        shared.keep(fed, self._query_lens, hidden)
        hidden = hidden[:, fed.shape[1] - keep :]
        return shared.form.logits(hidden, keep) if self._head is None else self._head.logits(hidden)
