"""The noise of coupled sampling: :class:`Noise`, the argument of :func:`pipespec_kernels.ops.verify` and
:func:`pipespec_kernels.ops.sample`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["ACCEPT", "ALL_VALID", "DRAFT", "INDEPENDENT", "RESIDUAL", "TARGET", "Noise", "Streams"]

# The streams of random numbers at one position: csrc/protocol/philox.hpp.
TARGET, DRAFT, ACCEPT, RESIDUAL = range(4)

ALL_VALID = 2**63 - 1
"""In ``invalid_positions`` of :func:`pipespec_kernels.ops.verify`: every token of the row came from a distribution."""


@dataclass(slots=True)
class Noise:
    """Gumbel noise for a batch of logits ``[B, Q, V]``, a function of (seed, position, token id) only.

    The choice in column ``q`` of row ``b`` is the id ``v`` with the largest
    ``logits[b, q, v] * inv_temperature[b] + G(seeds[b], positions[b] + q, v)``: a draw from the softmax (Gumbel-max).
    Two models that use the same noise mostly draw the same token: with probabilities p and q, in
    ``sum_i 1 / sum_j max(p_j / p_i, q_j / q_i)`` of all cases (Daliri, Musco, Suresh 2024, arXiv 2408.07978).

    Attributes:
        seeds: int64 ``[B]``; its 64 bits are the key. Several samples of one prompt need several seeds. Like the other fields, it is a tensor on the
            CPU or on the device of the logits, or a numpy array.
        positions: int64 ``[B]``, ``>= 0``: the absolute index, in its sequence, of the token that the logits of column 0
            choose. A tensor may be int32.
        inv_temperature: float32 ``[B]``, finite and positive: 1 / temperature.
        cutoff: float32 ``[B, Q]`` or None. Logits below it cannot be chosen (:func:`ops.cutoff` makes one
            of top-k, top-p and min-p); -inf: all can.
        stream: :data:`TARGET` for coupled sampling, in drafts and target alike. Independent draws, such as those of a draft under rejection sampling,
            take another stream.
        offset: is added to the positions: 1 where they are those of the first fed tokens, as the lengths of storage are.
    """

    seeds: Tensor
    positions: Tensor | Any
    inv_temperature: Tensor | Any
    cutoff: Tensor | None = None
    stream: int = TARGET
    offset: int = 0


class Streams(NamedTuple):
    """Streams of random numbers of rejection sampling. They must differ: with shared noise the result does not have the target's
    distribution.

    Attributes:
        draft: of the noise that drew the draft tokens (their ``Noise.stream``).
        accept: of the uniforms in the acceptance test.
        residual: of the noise that draws the last token of each row.
    """

    draft: int = DRAFT
    accept: int = ACCEPT
    residual: int = RESIDUAL


INDEPENDENT = Streams()


def _is_integer(value: Any) -> bool:
    is_other = hasattr(value, "__index__") and not isinstance(value, type) and not getattr(value, "ndim", 0)
    return isinstance(value, int) or is_other


def check_stream(stream: Any) -> None:
    """Check ``Noise.stream``. Raises ``TypeError`` or ``ValueError``."""
    if not _is_integer(stream):
        raise TypeError(f"noise.stream must be an integer, got {stream!r}")
    if not 0 <= stream < 2**32:
        raise ValueError(f"noise.stream must be a number of 32 bits, got {stream}")


def check_streams(streams: Any) -> None:
    """Check the streams of rejection sampling. Raises ``TypeError`` or ``ValueError``."""
    if not isinstance(streams, tuple) or len(streams) != 3 or not all(map(_is_integer, streams)):
        raise TypeError(f"streams must be Streams of three integers, got {streams!r}")
    if len(set(streams)) != 3 or not all(0 <= stream < 2**32 for stream in streams):
        raise ValueError(f"the streams must be three different numbers of 32 bits, got {streams}")


def check_invalid_positions(found: Any, logits: Tensor, noise: Noise | None) -> None:
    """Check ``invalid_positions`` of :func:`pipespec_kernels.ops.verify` against the logits ``[B, Q, V]``. Raises ``TypeError`` or ``ValueError``."""
    if noise is None:
        raise ValueError("invalid_positions goes with noise: greedy choices are not drawn")
    if not isinstance(found, Tensor) or found.dtype is not torch.int64:
        raise TypeError(
            f"invalid_positions must be an int64 tensor, got {getattr(found, 'dtype', type(found).__name__)}"
        )
    if found.shape != logits.shape[:1] or not found.is_contiguous():
        raise ValueError(f"invalid_positions must be contiguous [{logits.shape[0]}], got shape {tuple(found.shape)}")
    if found.device != logits.device and not found.is_pinned():
        raise ValueError(
            f"invalid_positions must be on {logits.device} like the logits, or pinned, is on {found.device}"
        )
