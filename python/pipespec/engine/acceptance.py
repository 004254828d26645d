"""Acceptance: draft tokens are accepted by rejection sampling instead of by equal draws.

It needs both distributions of each draft token, so the draft keeps the logits that it draws from, in the target's process. The text has the target's
distribution. It is a function of target, draft, lookahead, prompt and seed.

Per row and *round*, one verification by the target, the noise differs: it is keyed by (seed, position + round * 2**40, token id). Block verification needs
that, as its decisions depend on all draft tokens of a block: what is drawn behind a rejected token must not reuse the noise of a token that took part in
the rejection. Tokens themselves are not reused: neither rule draws the token that it has just rejected, so the draft rolls back.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from pipespec_kernels import ops, reference
from pipespec_kernels.noise import DRAFT, Noise

_ROUND = 2**40
"""Positions between the noise of two rounds. No text is as long, and 2**22 rounds fit in the 63 bits of a position."""

_ROUNDS = 2**22


class Acceptance:
    """What a draft and the target share in a call with rejection sampling.

    The draft's sampler calls :meth:`draw`, the target's :meth:`accept`. Both logits are penalised already.

    Args:
        rule: ``"rejection"`` or ``"block"``, see :func:`pipespec_kernels.ops.rejection_sample` and :func:`pipespec_kernels.ops.block_sample`.
        lookahead: most tokens that the draft is ahead of the target.
    """

    def __init__(self, rule: str, lookahead: int) -> None:
        self._sample = {"rejection": ops.rejection_sample, "block": ops.block_sample}[rule]
        self._room = lookahead + 1

    def begin(self, rows: int, vocabulary: int, device: torch.device) -> None:
        """Begin a call: forget the draft tokens of the one before.

        Args:
            rows: of the batch.
            vocabulary: tokens of the target's vocabulary.
            device: of the target's inputs. A split target may have its logits elsewhere.
        """
        self._rounds = np.zeros(rows, dtype=np.int64)
        # By position modulo the room: what the token at the position was drawn from.
        self._positions = np.full((rows, self._room), -1, dtype=np.int64)
        self._logits = torch.full((rows, self._room, vocabulary), -torch.inf, dtype=torch.float32, device=device)
        self._cutoff = torch.full((rows, self._room), -torch.inf, dtype=torch.float32, device=device)

    def _at_round(self, noise: Noise, stream: int) -> Noise:
        return replace(noise, positions=np.asarray(noise.positions) + self._rounds % _ROUNDS * _ROUND, stream=stream)

    def draw(
        self,
        logits: torch.Tensor,
        fed: torch.Tensor,
        query_lens: np.ndarray,
        num_draft_tokens: np.ndarray,
        noise: Noise,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw a draft token per row, and keep what it was drawn from. Arguments and result are those of :func:`pipespec_kernels.ops.verify`."""
        for row in np.flatnonzero(query_lens):
            column = int(query_lens[row]) - 1
            position = int(noise.positions[row]) + column
            at = position % self._room
            own = min(logits.shape[2], self._logits.shape[2])
            self._positions[row, at] = position
            self._logits[row, at, :own] = logits[row, column, :own]
            if noise.cutoff is not None:
                self._cutoff[row, at] = noise.cutoff[row, column]
        return ops.verify(logits, fed, query_lens, num_draft_tokens, noise=self._at_round(noise, DRAFT))

    def accept(
        self,
        logits: torch.Tensor,
        fed: torch.Tensor,
        query_lens: np.ndarray,
        num_draft_tokens: np.ndarray,
        noise: Noise,
        undrawn: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Accept draft tokens, and draw one more. Arguments and result are those of :func:`pipespec_kernels.ops.verify`."""
        width = logits.shape[1]
        at = np.asarray(noise.positions)[:, None] + np.arange(width)
        entry = at % self._room
        rows = np.arange(len(at))[:, None]
        column = np.arange(width)
        first = (query_lens - 1 - num_draft_tokens)[:, None]
        drafted = (column >= first) & (column < query_lens[:, None] - 1)
        known = self._positions[rows, entry] == at
        # Without its distribution a draft token cannot be tested: the target then draws by itself.
        unknown = (drafted & ~known).any(1) & (query_lens > 0)
        counts = np.where(unknown, query_lens - num_draft_tokens, query_lens).astype(np.int32)
        draft_tokens = np.where(unknown, 0, num_draft_tokens).astype(np.int32)
        index = torch.from_numpy(entry).to(self._logits.device)
        which = torch.from_numpy(rows).to(self._logits.device)
        selected, accepted = self._sample(
            logits,
            fed,
            counts,
            draft_tokens,
            self._logits[which, index].to(logits.device),
            self._at_round(noise, noise.stream),
            draft_cutoff=self._cutoff[which, index].to(logits.device),
        )
        if undrawn is not None:
            reference.note_undrawn(
                undrawn,
                logits,
                selected,
                torch.from_numpy(counts),
                torch.from_numpy(draft_tokens),
                torch.from_numpy(np.asarray(noise.positions)),
            )
        self._rounds += query_lens > 0
        return selected, accepted
