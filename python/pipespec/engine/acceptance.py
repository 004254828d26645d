"""Draft tokens accepted by rejection sampling instead of by equal draws.

It needs both distributions of each draft token, so the draft stores the logits that it draws from, and the target reads them. The text has the target's
distribution. It is a function of target, draft, lookahead, prompt and seed. The rule never draws the token that it has just rejected, so the draft rolls
back.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from pipespec.engine.sampling import Step
from pipespec_kernels import ops, reference
from pipespec_kernels.noise import DRAFT, Noise


class RejectionAcceptance:
    """What a draft and the target share in a call with rejection sampling, see :func:`pipespec_kernels.ops.rejection_sample`.

    The draft's sampler calls :meth:`draw`, the target's :meth:`accept`. Both logits are penalised already.

    Args:
        lookahead: maximum number of tokens that the draft is ahead of the target.

    Attributes:
        lookahead: as given. A draft that is further ahead would overwrite what the target reads.
    """

    def __init__(self, lookahead: int) -> None:
        self.lookahead = lookahead
        self._room = lookahead + 1

    def begin(self, rows: int, vocabulary: int, device: torch.device) -> None:
        """Begin a call: forget the draft tokens of the one before.

        Args:
            rows: of the batch.
            vocabulary: tokens of the target's vocabulary.
            device: of the target's inputs. A split target may have its logits elsewhere.
        """
        # By position modulo the room: what the token at the position was drawn from.
        self._positions = np.full((rows, self._room), -1, dtype=np.int64)
        self._logits = torch.full((rows, self._room, vocabulary), -torch.inf, dtype=torch.float32, device=device)
        self._cutoff = torch.full((rows, self._room), -torch.inf, dtype=torch.float32, device=device)

    def draw(self, logits: torch.Tensor, step: Step, noise: Noise) -> torch.Tensor:
        """Draw a draft token per row, and keep what it was drawn from. Returns ``selected`` of :func:`pipespec_kernels.ops.verify`."""
        query_lens = step.query_lens.numpy()
        chosen = np.flatnonzero(query_lens)
        positions = np.asarray(noise.positions)[chosen] + query_lens[chosen] - 1
        rows, columns, at = map(torch.from_numpy, (chosen, query_lens[chosen] - 1, positions % self._room))
        own, device = min(logits.shape[2], self._logits.shape[2]), self._logits.device
        here = rows.to(device), at.to(device)
        there = rows.to(logits.device), columns.to(logits.device)
        kept = self._logits.new_full((len(chosen), self._logits.shape[2]), -torch.inf)
        kept[:, :own] = logits[there][:, :own]
        self._logits[here] = kept
        cutoff = None if noise.cutoff is None else noise.cutoff[there].to(device)
        self._cutoff[here] = self._cutoff.new_full((len(chosen),), -torch.inf) if cutoff is None else cutoff
        self._positions[chosen, positions % self._room] = positions
        noise = replace(noise, stream=DRAFT)
        return ops.verify(logits, step.tokens, query_lens, step.num_draft_tokens.numpy(), noise=noise)[0]

    def accept(self, logits: torch.Tensor, step: Step, noise: Noise, invalid_positions: torch.Tensor) -> torch.Tensor:
        """Accept draft tokens, and draw one more. Returns ``selected`` of :func:`pipespec_kernels.ops.verify`."""
        query_lens, num_draft_tokens = step.query_lens.numpy(), step.num_draft_tokens.numpy()
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
        selected, _ = ops.rejection_sample(
            logits,
            step.tokens,
            counts,
            draft_tokens,
            self._logits[which, index].to(logits.device),
            noise,
            draft_cutoff=self._cutoff[which, index].to(logits.device),
        )
        counted = map(torch.from_numpy, (counts, draft_tokens, np.asarray(noise.positions)))
        reference.note_invalid_positions(invalid_positions, logits, selected, *counted)
        return selected


def drop_rejected(
    selected: torch.Tensor,
    tokens: np.ndarray,
    n_select: np.ndarray,
    query_lens: np.ndarray,
    num_draft_tokens: np.ndarray,
) -> None:
    """Take a rejected draft token out of the step if the stage's own token in its place is the same: commit would accept it, and go on.

    Rejection sampling rejects the token of a draft without a distribution (NaN), and may then draw it from the target's.

    Args:
        selected: int32 ``[rows, columns]``, the tokens of the step.
        tokens: int32 ``[rows, columns]``, those that were fed.
        n_select: per row, columns that select; is changed, as are the counts that follow.
        query_lens: per row, tokens that were fed.
        num_draft_tokens: per row, draft tokens among them.
    """
    for row in np.flatnonzero(num_draft_tokens * (n_select > 0)):
        draft_tokens = int(num_draft_tokens[row])
        kept = int((selected[row] >= 0).sum()) - 1
        if kept < draft_tokens and int(selected[row, kept]) == int(
            tokens[row, int(query_lens[row]) - draft_tokens + kept]
        ):
            for counts in (n_select, query_lens, num_draft_tokens):
                counts[row] -= draft_tokens - kept
