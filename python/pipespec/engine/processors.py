"""Which logits processors can run row by row: those that compute a row's scores from its ids and scores alone."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from transformers.generation import logits_process as hf

from pipespec.engine.originals import is_trusted
from pipespec.engine.sampling import STATELESS
from pipespec.errors import NotKnown

_ROW_WISE = STATELESS | {hf.SynthIDTextWatermarkLogitsProcessor, hf.WatermarkLogitsProcessor}
"""Exact classes. Of those with something per row, :class:`pipespec.engine.sampler.Sampler` cuts out the row."""


def check_row_wise(processors: Sequence[Any], rows: int) -> None:
    """Check that the processors of a call can run row by row, with ``[1, n]`` ids and ``[1, V]`` scores.

    Args:
        processors: those that transformers has prepared.
        rows: of the batch. One row is the whole batch, so that any processor gets what transformers would give it.

    Raises:
        NotKnown: one of them may depend on the other rows, or takes more than ids and scores.
    """
    for processor in processors:
        kind = type(processor)
        if kind in _ROW_WISE or is_trusted(kind) or is_trusted(processor):
            continue
        name = getattr(processor, "__name__", kind.__name__)
        if len(inspect.signature(processor.__call__).parameters) > 2:
            raise NotKnown(
                "logits_processor", f"generate(): the logits processor {name} takes more than ids and scores"
            )
        if rows > 1 and kind.__module__ != "xgrammar.contrib.hf":
            raise NotKnown(
                "logits_processor",
                f"generate(): the logits processor {name} may depend on the whole batch of {rows} rows",
            )
