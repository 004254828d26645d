"""How sure a model is of the tokens that it selected, as the byte that stages publish with a token (``csrc/protocol/confidence.hpp``).

The byte has the log-odds ln(p / (1 - p)) of the model's probability p in steps of 1/14 around 128, between 1 and 255; 0: not known.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pipespec_kernels import _native
from pipespec_kernels.arguments import check_logits, per_row

PER_LOGIT: float = _native.CONFIDENCE_PER_LOGIT
CENTRE: float = _native.CONFIDENCE_CENTRE
BINS: int = _native.CONFIDENCE_BINS
"""Of a calibration: values ``8 * i`` to ``8 * i + 7`` share bin ``i``."""

_DTYPES = {torch.float32: _native.FLOAT32, torch.bfloat16: _native.BFLOAT16, torch.float16: _native.FLOAT16}


def confidence_of(probability: np.ndarray) -> np.ndarray:
    """The bytes of probabilities, uint8 of the same shape. NaN, and what is no probability, gives 0."""
    p = np.asarray(probability, dtype=np.float64)
    is_known = (p >= 0) & (p <= 1)
    safe = np.where(is_known, np.clip(p, 1e-12, 1 - 1e-12), 0.5)
    byte = np.clip(np.rint(CENTRE + PER_LOGIT * np.log(safe / (1 - safe))), 1, 255)
    return np.where(is_known, byte, 0).astype(np.uint8)


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
        logits: ``[B, Q, V]``, float32, bfloat16 or float16. On the CPU the native core reads each row that selected a token once more; elsewhere torch
            does, and the call waits for the device.
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
    rows, width, vocabulary, _ = check_logits(logits)
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
    out = torch.zeros((rows, width), dtype=torch.uint8, device="cpu")
    if logits.device.type == "cpu" and logits.dtype in _DTYPES and (logits.stride(2) == 1 or vocabulary == 1):
        data, strides = logits.data_ptr(), (logits.stride(0), logits.stride(1))
        scale = 0 if inv_temperature is None else inv_temperature.data_ptr()
        counts = lens.ctypes.data, drafts.ctypes.data, selected.data_ptr()
        _native.confidence(
            data, _DTYPES[logits.dtype], rows, width, vocabulary, *strides, scale, *counts, out.data_ptr()
        )
        return out
    for row in np.flatnonzero(lens).tolist():
        first, count = int(lens[row] - 1 - drafts[row]), int((selected[row] >= 0).sum())
        if count == 0:
            continue
        scores = logits[row, first : first + count].double()
        if inv_temperature is not None:
            scores = scores * float(inv_temperature[row])
        ids = selected[row, :count].to(device=logits.device, dtype=torch.int64)[:, None]
        p = scores.softmax(-1).gather(1, ids)[:, 0].cpu().numpy()
        out[row, :count] = torch.from_numpy(confidence_of(p))
    return out
