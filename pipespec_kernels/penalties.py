"""Penalties, biases and bitmasks on logits, by position: each column sees the tokens before it, draft tokens included.

:func:`penalize` changes logits in place before :func:`pipespec_kernels.ops.cutoff` and :func:`pipespec_kernels.ops.verify` read them. Its cost grows with the tokens
that a row has seen, not with the vocabulary; only a bitmask is read as a whole. :mod:`pipespec_kernels.ops` exports these names, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipespec_kernels import arguments, dispatch, reference
from pipespec_kernels.arguments import CPU, FLOAT32, INT32

__all__ = ["Penalties", "penalize"]


@dataclass(slots=True)
class Penalties:
    """Numbers of :func:`penalize`. Each row has its own; None stands for numbers that change nothing.

    Attributes:
        repetition: float32 ``[B]``, finite and positive. The logit of a token that the row has seen is multiplied by it where it is negative,
            and divided by it elsewhere (Keskar et al., "CTRL" (2019), section 4.1). 1: off.
        presence: float32 ``[B]``, finite. It is subtracted from the logit of each generated token (OpenAI's and vLLM's ``presence_penalty``).
        frequency: float32 ``[B]``, finite. As ``presence``, once per occurrence (``frequency_penalty``).
        prompt_lengths: int32 ``[B]``: entries of the history from here on are generated. None: all are.
        bias_ids: int32 ``[B, N]``, different ids in each row. Ids outside of the vocabulary are ignored.
        bias: float32 ``[B, N]``: is added to the logits of ``bias_ids``, before the penalties.
    """

    repetition: Tensor | None = None
    presence: Tensor | None = None
    frequency: Tensor | None = None
    prompt_lengths: Tensor | None = None
    bias_ids: Tensor | None = None
    bias: Tensor | None = None


_FIELDS = {
    "repetition": (FLOAT32, 1.0),
    "presence": (FLOAT32, 0.0),
    "frequency": (FLOAT32, 0.0),
    "prompt_lengths": (INT32, 0),
}
_Flat = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def penalize(
    logits: Tensor,
    tokens: Tensor,
    history: Tensor,
    lengths: Tensor,
    penalties: Penalties | None = None,
    *,
    query_lens: Tensor | Any | None = None,
    num_draft_tokens: Tensor | Any | None = None,
    bitmask: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    """Apply penalties, biases and a bitmask to logits, in place, each column with its own prefix.

    Column ``q`` of row ``b`` has seen ``history[b, :lengths[b]]`` and ``tokens[b, :q + 1]``. In this order: the bias is added, the repetition penalty
    applied, then the frequency and the presence penalty subtracted; logits whose bit in ``bitmask`` is 0 become -inf. The results have the bits of
    transformers' ``SequenceBiasLogitsProcessor`` for single tokens and ``RepetitionPenaltyLogitsProcessor`` on the CPU, and of vLLM's formulas.

    All tokens are appended: ``history[b, lengths[b] + q] = tokens[b, q]``, padding columns included, as far as the history has room. The lengths do not
    change. So a rollback is a smaller length in the next call.

    Args:
        logits: float32 ``[B, Q, V]``. Any strides in the first two dimensions, but no two elements in one place; the vocabulary must be contiguous.
        tokens: ``[B, Q]``, int64 or int32, any strides, on the device of ``logits``: the tokens fed.
        history: int32 ``[B, S]``, contiguous, on the same device. Ids outside of the vocabulary count for nothing.
        lengths: int32 ``[B]``, contiguous, on the same device, ``0 <= lengths <= S``.
        penalties: on the same device. None: only a bitmask.
        query_lens: as for :func:`pipespec_kernels.ops.verify`, together with ``num_draft_tokens``: only the columns that verification may read are changed.
            None: all columns.
        num_draft_tokens: likewise.
        bitmask: int32 ``[B, Q, ceil(V / 32)]``, contiguous, on the same device, in the layout of xgrammar: bit ``v % 32`` of word ``v // 32`` is 1 where id
            ``v`` may follow. None: all may.
        workspace: on a GPU, int32 of at least ``B * Q * V`` entries, contiguous, all zero, as it is again afterwards: saves an allocation and a launch.
            Calls that may run at the same time need different ones. Ignored elsewhere.

    Raises:
        TypeError: not a tensor, or a dtype that is not supported.
        ValueError: shapes, strides, devices, or numbers on the CPU that do not fit. Nothing has been written then.

    Example::

        >>> logits = torch.tensor([[[1.0, 2.0, -4.0]]])
        >>> history = torch.tensor([[2, 0]], dtype=torch.int32)
        >>> seen = torch.tensor([1], dtype=torch.int32)
        >>> penalize(logits, torch.tensor([[1]]), history, seen, Penalties(repetition=torch.tensor([2.0])))
        >>> logits, history
        (tensor([[[ 1.,  1., -8.]]]), tensor([[2, 1]], dtype=torch.int32))
    """
    batch, width, vocab, native = arguments.check_logits(logits)
    flat = _flat(Penalties() if penalties is None else penalties, logits)
    query_lens, num_draft_tokens = _check_all(
        logits, tokens, history, lengths, flat, query_lens, num_draft_tokens, bitmask
    )
    bias_ids, bias = flat[4:]
    if query_lens is not None and num_draft_tokens is not None:
        arguments.check_count_values(query_lens, num_draft_tokens, width)
    if logits.is_cpu:
        _check_values(history.shape[1], lengths, *flat[:3])
    if native is not None:
        arguments.native.penalize(
            *(native[0], *native[2:]),
            tokens.data_ptr(),
            arguments.TOKEN_BYTES[tokens.dtype],
            *tokens.stride(),
            history.data_ptr(),
            history.shape[1],
            lengths.data_ptr(),
            *(value.data_ptr() for value in flat[:4] if value is not None),
            arguments.address(bias_ids),
            arguments.address(bias),
            0 if bias_ids is None else bias_ids.shape[1],
            arguments.address(query_lens),
            arguments.address(num_draft_tokens),
            arguments.address(bitmask),
        )
        return
    kernels = dispatch.kernels(logits)
    if kernels is None:
        if query_lens is not None and num_draft_tokens is not None:
            query_lens, num_draft_tokens = query_lens.to(CPU), num_draft_tokens.to(CPU)
        reference.penalize(logits, tokens, history, lengths, *flat, query_lens, num_draft_tokens, bitmask)
        return
    needed = batch * width * vocab
    if workspace is None:
        workspace = torch.zeros(needed, dtype=INT32, device=logits.device)
    else:
        arguments.check_contiguous(workspace, "workspace", INT32, (None,), logits.device)
        if len(workspace) < needed:
            raise ValueError(f"workspace has {len(workspace)} entries, B * Q * V is {needed}")
    kernels.penalize(
        logits,
        tokens,
        history,
        lengths,
        flat,
        None if query_lens is None else query_lens.to(logits.device),
        None if num_draft_tokens is None else num_draft_tokens.to(logits.device),
        bitmask,
        workspace,
    )


def _flat(penalties: Penalties, logits: Tensor) -> _Flat:
    """The fields, with tensors in place of those that are None."""
    if not isinstance(penalties, Penalties):
        raise TypeError(f"penalties must be Penalties, got {type(penalties).__name__}")

    def given(name: str) -> Tensor:
        dtype, neutral = _FIELDS[name]
        value: Tensor | None = getattr(penalties, name)
        return torch.full(logits.shape[:1], neutral, dtype=dtype, device=logits.device) if value is None else value

    repetition, presence, frequency, prompt_lengths = map(given, _FIELDS)
    return repetition, presence, frequency, prompt_lengths, penalties.bias_ids, penalties.bias


def _check_all(
    logits: Tensor,
    tokens: Tensor,
    history: Tensor,
    lengths: Tensor,
    flat: _Flat,
    query_lens: Any,
    num_draft_tokens: Any,
    bitmask: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    batch, width, vocab, _ = arguments.check_logits(logits)
    if logits.dtype is not FLOAT32:
        raise TypeError(f"penalized logits must be float32, got {logits.dtype}: use logits.float()")
    device = logits.device
    arguments.check_tokens(tokens, logits, batch, width)
    arguments.check_contiguous(history, "history", INT32, (batch, None), device)
    arguments.check_contiguous(lengths, "lengths", INT32, (batch,), device)
    *per_row, bias_ids, bias = flat
    for (name, (dtype, _)), value in zip(_FIELDS.items(), per_row, strict=True):
        arguments.check_contiguous(value, f"penalties.{name}", dtype, (batch,), device)
    if (bias_ids is None) != (bias is None):
        raise ValueError("penalties.bias and penalties.bias_ids go together")
    if bias_ids is not None:
        arguments.check_contiguous(bias_ids, "penalties.bias_ids", INT32, (batch, None), device)
        arguments.check_contiguous(bias, "penalties.bias", FLOAT32, tuple(bias_ids.shape), device)
    if bitmask is not None:
        arguments.check_contiguous(bitmask, "bitmask", INT32, (batch, width, -(-vocab // 32)), device)
    return arguments.both_counts(query_lens, num_draft_tokens, batch, device)


def _check_values(capacity: int, lengths: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor) -> None:
    for row, (n, r, p, f) in enumerate(
        zip(lengths.tolist(), repetition.tolist(), presence.tolist(), frequency.tolist(), strict=True)
    ):
        if not 0 <= n <= capacity:
            raise ValueError(f"row {row}: lengths must be 0 .. {capacity}, is {n}")
        if not 0 < r < math.inf:
            raise ValueError(f"row {row}: the repetition penalty must be finite and positive, is {r}")
        if not (math.isfinite(p) and math.isfinite(f)):
            raise ValueError(f"row {row}: presence and frequency penalty must be finite, are {p} and {f}")
