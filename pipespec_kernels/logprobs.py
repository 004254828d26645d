"""Log-probabilities of selected tokens, and of the likeliest ones, from the logits that verification has read.

:func:`logprobs` runs after :func:`pipespec_kernels.ops.verify` or :func:`pipespec_kernels.ops.rejection_sample`, for the columns that
selected a token. :mod:`pipespec_kernels.ops` exports it, too. On the CPU torch computes it.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor

from pipespec_kernels import arguments, dispatch, reference
from pipespec_kernels.arguments import CPU, INT32

__all__ = ["logprobs"]


def logprobs(
    logits: Tensor,
    selected: Tensor,
    query_lens: Tensor | Any,
    num_draft_tokens: Tensor | Any,
    *,
    inv_temperature: Tensor | Any | None = None,
    cutoff: Tensor | None = None,
    top_n: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the selected tokens, and the ``top_n`` likeliest tokens with theirs.

    The distribution of column ``q`` of row ``r`` is the softmax of ``logits[r, q] * inv_temperature[r]`` over the logits that are at least
    ``cutoff[r, q]``: what :func:`pipespec_kernels.ops.sample` draws from. With ``s = query_lens[r] - 1 - num_draft_tokens[r]``, entry ``j`` of a result belongs to
    ``selected[r, j]`` and column ``s + j``. Columns that selected nothing are not read.

    Args:
        logits: ``[B, Q, V]``, as for :func:`pipespec_kernels.ops.verify`.
        selected: int32 ``[B, Q]``, as verification returns it: -1 where nothing is selected (what is no id of the vocabulary counts as -1); on the CPU or on the device of ``logits``.
        query_lens: as for :func:`pipespec_kernels.ops.verify`.
        num_draft_tokens: likewise.
        inv_temperature: float32 ``[B]``, 1 / temperature; None: 1.
        cutoff: float32 ``[B, Q]``, see :func:`pipespec_kernels.ops.cutoff`; None: none.
        top_n: how many of the likeliest tokens, ``0 .. V``.

    Returns:
        ``(chosen, top_ids, top)`` on the device of ``logits``. ``chosen``: float32 ``[B, Q]``, natural logarithms; -inf for a token below the cutoff, and where
        nothing is selected. ``top_ids``: int32 ``[B, Q, top_n]``, likeliest first, of equal logits the lowest id first; -1 after the last token that
        reaches the cutoff. ``top``: float32 ``[B, Q, top_n]``, their log-probabilities, -inf where the id is -1. Logits that are no distribution (a NaN, a score of
        +inf, all -inf) give NaN, and ids of -1.

    Raises:
        TypeError: not a tensor, or a dtype that is not supported.
        ValueError: shapes, strides, devices or numbers that do not fit.

    Example::

        >>> n = torch.tensor([1], dtype=torch.int32)
        >>> chosen, ids, top = logprobs(torch.tensor([[[0.0, 0.0, -9e9]]]), torch.tensor([[1]], dtype=torch.int32), n, n - 1, top_n=2)
        >>> chosen.exp(), ids
        (tensor([[0.5000]]), tensor([[[0, 1]]], dtype=torch.int32))
    """
    logits = logits.detach() if isinstance(logits, Tensor) else logits
    query_lens, num_draft_tokens, scale, bars = _checked(
        logits, selected, query_lens, num_draft_tokens, inv_temperature, cutoff, top_n
    )
    arguments.check_count_values(query_lens, num_draft_tokens, logits.shape[1])
    if scale is not None:
        arguments.check_inv_temperature(scale, arguments.busy_rows(query_lens))
    device, kernels = logits.device, dispatch.kernels(logits)
    if kernels is None:
        counts = query_lens.to(CPU), num_draft_tokens.to(CPU)
        return reference.logprobs(logits, selected, *counts, scale, bars, top_n)
    found: tuple[Tensor, Tensor, Tensor] = kernels.logprobs(
        logits,
        selected.to(device),
        query_lens.to(device),
        num_draft_tokens.to(device),
        None if scale is None else scale.to(device),
        None if bars is None else bars.to(device),
        top_n,
    )
    return found


def _checked(
    logits: Tensor,
    selected: Tensor,
    query_lens: Any,
    num_draft_tokens: Any,
    inv_temperature: Any,
    cutoff: Any,
    top_n: int,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    batch, width, vocab, _ = arguments.check_logits(logits)
    device = logits.device
    if not isinstance(selected, Tensor) or selected.dtype is not INT32:
        raise TypeError(
            f"selected must be a tensor of int32, got {getattr(selected, 'dtype', type(selected).__name__)}"
        )
    if selected.shape != (batch, width):
        raise ValueError(f"selected is {tuple(selected.shape)}, but logits [B, Q, V] are {tuple(logits.shape)}")
    if not selected.is_cpu and selected.device != device:
        raise ValueError(f"selected is on {selected.device}, logits on {device}")
    if not 0 <= operator.index(top_n) <= vocab:
        raise ValueError(f"top_n must be 0 .. {vocab}, the size of the vocabulary, is {top_n}")
    scale, bars = inv_temperature, cutoff
    return (
        arguments.per_row("query_lens", query_lens, (batch,), device),
        arguments.per_row("num_draft_tokens", num_draft_tokens, (batch,), device),
        None if scale is None else arguments.per_row("inv_temperature", scale, (batch,), device),
        None if bars is None else arguments.per_row("cutoff", bars, (batch, width), device),
    )
