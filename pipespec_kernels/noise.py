"""What coupled selection adds to the logits: :class:`Noise`, the argument of :func:`pipespec_kernels.ops.verify` and
:func:`pipespec_kernels.ops.sample`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["ACCEPT", "DRAFT", "INDEPENDENT", "RESIDUAL", "TARGET", "Noise", "Streams"]

# The streams of random numbers at one position: csrc/protocol/philox.hpp.
TARGET, DRAFT, ACCEPT, RESIDUAL = range(4)


@dataclass(slots=True)
class Noise:
    """Gumbel noise for a batch of logits ``[B, Q, V]``, a function of (seed, position, token id) and of nothing else.

    The choice in column ``q`` of row ``b`` is the id ``v`` with the largest
    ``logits[b, q, v] * inv_temperature[b] + G(seeds[b], positions[b] + q, v)``: a draw from the softmax (Gumbel-max).
    Two models that use the same noise mostly draw the same token: with probabilities p and q, in
    ``sum_i 1 / sum_j max(p_j / p_i, q_j / q_i)`` of all cases (Daliri, Musco, Suresh 2024, arXiv 2408.07978).

    Attributes:
        seeds: int64 ``[B]``; its 64 bits are the key. Several samples of one prompt need several seeds. Like the others
            a tensor on the CPU or where the logits are, or a numpy array.
        positions: int64 ``[B]``, ``>= 0``: the absolute index, in its sequence, of the token that the logits of column 0
            choose.
        inv_temperature: float32 ``[B]``, finite and positive: 1 / temperature.
        cutoff: float32 ``[B, Q]`` or None. Logits below it cannot be chosen (:func:`ops.cutoff` makes one
            of top-k, top-p and min-p); -inf: all can.
        stream: :data:`TARGET` for coupled selection, in drafts and target alike. Draws that must be independent of
            those, such as a draft's under the ratio test, take another.
    """

    seeds: Tensor
    positions: Tensor | Any
    inv_temperature: Tensor | Any
    cutoff: Tensor | None = None
    stream: int = TARGET


class Streams(NamedTuple):
    """Which stream of random numbers each draw of the ratio test takes. They must differ, or what comes out is not the
    target's distribution: a hint is rejected more often where its noise was large, and the same noise would then draw again.

    Attributes:
        draft: of the noise with which the hints were drawn (with this ``Noise.stream``, say).
        accept: of the uniforms in the test.
        residual: of the noise with which the last token of each row is drawn.
    """

    draft: int = DRAFT
    accept: int = ACCEPT
    residual: int = RESIDUAL


INDEPENDENT = Streams()


def check_stream(stream: Any) -> None:
    """TypeError, ValueError: not what ``Noise.stream`` can be."""
    if not isinstance(stream, int) and not hasattr(stream, "__index__"):
        raise TypeError(f"noise.stream must be an integer, got {stream!r}")
    if not 0 <= stream < 2**32:
        raise ValueError(f"noise.stream must be a number of 32 bits, got {stream}")


def check_streams(streams: Any) -> None:
    """TypeError, ValueError: not what the ratio test can take."""
    if not isinstance(streams, tuple) or len(streams) != 3 or not all(hasattr(s, "__index__") for s in streams):
        raise TypeError(f"streams must be Streams of three integers, got {streams!r}")
    if len(set(streams)) != 3 or not all(0 <= stream < 2**32 for stream in streams):
        raise ValueError(f"the streams must be three different numbers of 32 bits, got {streams}")
