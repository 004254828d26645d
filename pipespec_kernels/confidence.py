"""How sure a model is of the tokens that it selected, as the byte that stages publish with a token (``csrc/protocol/confidence.hpp``).

The byte has the log-odds ln(p / (1 - p)) of the model's probability p in steps of 1/14 around 128, between 1 and 255; 0: not known.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pipespec_kernels import _native, reference
from pipespec_kernels.arguments import check_logits, per_row

PER_LOGIT: float = _native.CONFIDENCE_PER_LOGIT
CENTRE: float = _native.CONFIDENCE_CENTRE
BINS: int = _native.CONFIDENCE_BINS
"""Of a calibration: values ``8 * i`` to ``8 * i + 7`` share bin ``i``."""


def confidence(
    logits: Tensor,
    selected: Tensor,
    query_lens: np.ndarray,
    num_draft_tokens: np.ndarray,
    inv_temperature: Tensor | None = None,
) -> Tensor:
    """The confidence of the tokens that :func:`pipespec_kernels.ops.verify` selected.

    The probability is that of the softmax of all logits at the temperature: without top-k, top-p and min-p, which would make most of them 1.

    Args:
        logits: ``[B, Q, V]``. The call waits for the device.
        selected: int32 ``[B, Q]`` on the CPU, contiguous.
        query_lens: int32 ``[B]``, as for ``verify``.
        num_draft_tokens: int32 ``[B]``, likewise.
        inv_temperature: float32 ``[B]`` on the CPU; None: 1, as for greedy selection.

    Returns:
        uint8 ``[B, Q]`` on the CPU: entry ``[r, j]`` is that of ``selected[r, j]``; 0 where nothing is selected, and where the logits are no distribution.

    Raises:
        TypeError: a dtype that is not supported.
        ValueError: shapes, devices, counts or ids that do not fit.
    """
    rows, width, _, _ = check_logits(logits)
    if (
        selected.dtype is not torch.int32
        or selected.shape != (rows, width)
        or not (selected.is_cpu and selected.is_contiguous())
    ):
        shown = f"{selected.dtype} {tuple(selected.shape)} on {selected.device}"
        raise ValueError(f"selected must be contiguous int32 {(rows, width)} on the CPU, got {shown}")
    for name, values in (("query_lens", query_lens), ("num_draft_tokens", num_draft_tokens)):
        if np.shape(values) != (rows,):
            raise ValueError(f"{name} must be [{rows}], one count per row, got shape {np.shape(values)}")
    if inv_temperature is not None:
        inv_temperature = per_row("inv_temperature", inv_temperature, (rows,), torch.device("cpu"))
    lens = np.ascontiguousarray(query_lens, dtype=np.int32)
    drafts = np.ascontiguousarray(num_draft_tokens, dtype=np.int32)
    reference.check_counts(torch.from_numpy(lens), torch.from_numpy(drafts), width)
    out = torch.zeros((rows, width), dtype=torch.uint8, device="cpu")
    for row in np.flatnonzero(lens).tolist():
        first, count = int(lens[row] - 1 - drafts[row]), int((selected[row] >= 0).sum())
        if count == 0:
            continue
        scores = logits[row, first : first + count].float()
        if inv_temperature is not None:
            scores = scores * float(inv_temperature[row])
        if int(selected[row, :count].max()) >= scores.shape[-1]:
            raise ValueError(f"row {row}: selected holds a token id outside of the vocabulary")
        ids = selected[row, :count].to(device=logits.device, dtype=torch.int64)[:, None]
        # Not from the probability, which float32 cannot tell from 1 where the others have little.
        odds = scores.gather(1, ids)[:, 0] - scores.scatter(1, ids, -torch.inf).logsumexp(-1)
        byte = (CENTRE + PER_LOGIT * odds).round().clamp(1, 255)
        out[row, :count] = torch.where(scores.amax(-1).isfinite(), byte, 0).to("cpu", torch.uint8)
    return out
