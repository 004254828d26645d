"""Acceptance: draft tokens are accepted by rejection sampling instead of by equal draws.

It needs both distributions of each draft token, so the draft keeps the logits that it draws from where the target finds them: :class:`Acceptance` for a
draft in the target's process, :class:`SharedAcceptance` for one in a process of its own. The text has the target's distribution. In lockstep it is a
function of target, draft, lookahead, prompt and seed.

Per row and *round*, one verification by the target, the noise differs: it is keyed by (seed, position + round * 2**40, token id). Block verification needs
that, as its decisions depend on all draft tokens of a block: what is drawn behind a rejected token must not reuse the noise of a token that took part in
the rejection. Tokens themselves are not reused: neither rule draws the token that it has just rejected, so the draft rolls back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from pipespec_kernels import ops, reference
from pipespec_kernels.noise import DRAFT, Noise
from pipespec_kernels.state import SharedMemory

_ROUND = 2**40
"""Positions between the noise of two rounds. No text is as long, and 2**22 rounds fit in the 63 bits of a position."""

_ROUNDS = 2**22


class Acceptance:
    """What a draft and the target share in a call with rejection sampling.

    The draft's sampler calls :meth:`draw`, the target's :meth:`accept`. Both logits are penalised already.

    Args:
        rule: ``"rejection"`` or ``"block"``, see :func:`pipespec_kernels.ops.rejection_sample` and :func:`pipespec_kernels.ops.block_sample`.
        lookahead: most tokens that the draft is ahead of the target.

    Attributes:
        lookahead: as given. A draft that is further ahead would overwrite what the target reads.
    """

    def __init__(self, rule: str, lookahead: int) -> None:
        self._sample = {"rejection": ops.rejection_sample, "block": ops.block_sample}[rule]
        self.lookahead = lookahead
        self._room = lookahead + 1

    def nbytes(self, rows: int, vocabulary: int) -> int:
        """Bytes that the distributions take in a call."""
        return rows * self._room * (8 + 4 + 4 * vocabulary)

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
        self._keep(logits, query_lens, noise)
        return ops.verify(logits, fed, query_lens, num_draft_tokens, noise=self._at_round(noise, DRAFT))

    def _keep(self, logits: torch.Tensor, query_lens: np.ndarray, noise: Noise) -> None:
        """Keep what the tokens behind the last column of each row are drawn from."""
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


class SharedAcceptance(Acceptance):
    """What a draft in a process of its own and the target share: each of the two has one of these, over one memory.

    The memory is a ring of ``lookahead + 1`` columns per row, indexed by position, in float32. A column is written before its token is published. It
    is written again when the target has published a token behind its position: until then the draft is not further ahead, and corrects none of the
    tokens that the target verifies.

    **The text has the target's distribution whatever the timing.** A draft token may be verified in a step only if that was decided before it was
    drawn, because the time until a token is published may depend on the token. So the draft announces each draw before it draws
    (``StagePort.announce``). A step of the target takes exactly the draws that were announced when it decides (``StagePort.decide``), and waits until
    they are published. Which draft tokens it verifies then depends on those before them, and on nothing that comes later; both rules allow that.

    Draws of a draft are *rounds* of their own. So a draft that rolls back draws with noise that took no part in what the target has decided.

    Args:
        rule: as for :class:`Acceptance`.
        lookahead: likewise.
        memory: shared by the two processes. It grows with the calls.

    Attributes:
        announce: called before each draw, when its logits are in the memory. The draft's stage sets it.
    """

    announce: Callable[[], None]

    def __init__(self, rule: str, lookahead: int, memory: SharedMemory) -> None:
        super().__init__(rule, lookahead)
        self._memory = memory

    def begin(self, rows: int, vocabulary: int, device: torch.device) -> None:
        """Begin a call, in both processes. Arguments are those of :meth:`Acceptance.begin`; the memory is the host's."""
        self._rounds = np.zeros(rows, dtype=np.int64)
        entries = rows * self._room
        self._memory.remap([self.nbytes(rows, vocabulary)])
        words = self._memory.array[8 * entries :].view(np.float32)
        shape = rows, self._room
        self._positions = self._memory.array[: 8 * entries].view(np.int64).reshape(shape)
        self._cutoff = torch.from_numpy(words[:entries]).view(shape)
        self._logits = torch.from_numpy(words[entries:]).view(*shape, vocabulary)

    def clear(self) -> None:
        """In the draft's process, behind :meth:`begin`: forget the draft tokens of the call before."""
        self._positions.fill(-1)

    def _keep(self, logits: torch.Tensor, query_lens: np.ndarray, noise: Noise) -> None:
        super()._keep(logits, query_lens, noise)
        self._rounds += query_lens > 0
        self.announce()
