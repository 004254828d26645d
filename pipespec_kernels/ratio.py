"""``verify_ratio`` on the CPU: torch's vectorised softmax, row by row, for the columns that are reached; noise from the native
code for the one that is drawn from. What it selects is what :func:`pipespec_kernels.reference.verify_ratio` selects, which
computes all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from pipespec_kernels import _native
from pipespec_kernels.noise import Noise, Streams
from pipespec_kernels.reference import philox_draw

_FIRST = torch.zeros(1, dtype=torch.int64)


def verify_ratio(
    logits: Tensor,
    tokens: Tensor,
    n_fed: Tensor,
    n_hint: Tensor,
    draft_logits: Tensor | None,
    noise: Noise,
    *,
    streams: Streams,
    draft_inv_temperature: Tensor | None,
    draft_cutoff: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See :func:`pipespec_kernels.ops.verify_ratio`, which has checked the arguments; all on the CPU."""
    batch, width, vocab = logits.shape
    selected = torch.full((batch, width), -1, dtype=torch.int32)
    accepted = torch.zeros(batch, dtype=torch.int32)
    draft_scale = noise.inv_temperature if draft_inv_temperature is None else draft_inv_temperature
    gumbel = torch.empty(vocab)
    for row, (fed, hints) in enumerate(zip(n_fed.tolist(), n_hint.tolist(), strict=True)):
        seed = int(noise.seeds[row])
        for j in range(hints + 1 if fed > 0 else 0):
            column = fed - 1 - hints + j
            position = int(noise.positions[row]) + column
            scores = _scores(logits, row, column, noise.inv_temperature, noise.cutoff)
            if j < hints:
                p = torch.softmax(scores, -1)
                hint = int(tokens[row, column + 1])
                real = 0 <= hint < vocab
                if draft_logits is None:
                    q = torch.zeros_like(p)
                    if real:
                        q[hint] = 1.0
                else:
                    q = torch.softmax(_scores(draft_logits, row, column, draft_scale, draft_cutoff), -1)
                u = (int(philox_draw(seed, position, streams.accept, _FIRST)) + 0.5) * 2.0**-32
                if real and u * float(q[hint]) < float(p[hint]):
                    selected[row, j] = hint
                    accepted[row] += 1
                    continue
                residual = (p - q).clamp_(min=0)
                if float(residual.sum()) > 0:
                    scores = residual.log_()
            _native.gumbel(seed % 2**64, position, streams.residual, 0, vocab, gumbel.data_ptr())
            selected[row, j] = int(torch.argmax(scores.add_(gumbel)))
            break
    return selected, accepted


def _scores(x: Tensor, row: int, column: int, scale: Tensor, cutoff: Tensor | None) -> Tensor:
    """Float64, as in the reference."""
    x = x[row, column].detach()
    y = x.double() * float(scale[row])
    return y if cutoff is None else y.masked_fill_(x.float() < cutoff[row, column], -torch.inf)
