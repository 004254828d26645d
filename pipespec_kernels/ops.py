"""The operations of speculative decoding. Row selection over logits ``[B, Q, V]``: :func:`argmax`, :func:`sample`, and
:func:`verify` with either; :func:`verify_ratio` for drafts that gave their distribution; :func:`cutoff` says which tokens a
sample may be. Keys and values in storage ``[B, Hkv, S, D]`` with a length per row: :func:`kv_append`, :func:`kv_truncate`,
:func:`kv_gather`, :func:`kv_compact`, and :func:`verify_attention` over them.

Tensors on a GPU go to the kernels of :mod:`pipespec_kernels.triton`, with the host's noise to the last bit; tensors on the
CPU to the native code (one pass over the logits, vectorised, several threads for large work; attention: torch's own);
float64 and other devices to :mod:`pipespec_kernels.reference`, plain torch. Of equal logits the lowest id wins, and a NaN
counts as larger than everything: what ``torch.argmax`` does.
``PIPESPEC_OPS=reference`` (or ``triton``) in the environment sends everything there; ``triton`` on the CPU needs its interpreter.

In row selection arguments with one entry per row may be on the CPU (numpy arrays will do) or where the logits are. What is on the CPU is
checked before anything is written; what is on a GPU is not read by the host, so nothing waits. The checks are written for a
call per draft step: they look at metadata only and cost about two microseconds.

All of them are registered with ``torch.library`` as ``torch.ops.pipespec.<name>``: :mod:`pipespec_kernels.library`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pipespec_kernels import dispatch, reference
from pipespec_kernels.kv import kv_append, kv_compact, kv_gather, kv_truncate, verify_attention
from pipespec_kernels.library import register, traced
from pipespec_kernels.noise import INDEPENDENT, Noise, Streams, check_stream, check_streams

__all__ = [
    "Noise",
    "Streams",
    "argmax",
    "cutoff",
    "kv_append",
    "kv_compact",
    "kv_gather",
    "kv_truncate",
    "sample",
    "verify",
    "verify_attention",
    "verify_ratio",
]

_INT32, _INT64, _FLOAT32, _FLOAT64 = torch.int32, torch.int64, torch.float32, torch.float64
_CPU = torch.device("cpu")
_TOKEN_BYTES = {_INT32: 4, _INT64: 8}

try:
    from pipespec_kernels import _native
except ImportError as error:
    warnings.warn(f"{error} Until then tensors on the CPU go to the slow reference.", RuntimeWarning, stacklevel=2)
    _native = None
# The native code's names of the dtypes; None: not for it.
_CODES = dict.fromkeys((torch.float32, torch.bfloat16, torch.float16, _FLOAT64))
if _native is not None and not dispatch.forced:
    _CODES |= {
        torch.float32: _native.FLOAT32,
        torch.bfloat16: _native.BFLOAT16,
        torch.float16: _native.FLOAT16,
    }


# --- argmax ----------------------------------------------------------------------------------------------------------


def argmax(logits: Tensor, *, threads: int | None = None, out: Tensor | None = None) -> Tensor:
    """Id of the largest logit in every row.

    Args:
        logits: ``[B, Q, V]``, float32, bfloat16 or float16 (float64: the slow reference). Any strides in the first two
            dimensions, including 0; the vocabulary must be contiguous.
        threads: on the CPU, upper bound, the calling thread included; default ``torch.get_num_threads()``.
        out: contiguous int32 tensor ``[B, Q]`` on the device of ``logits`` to write to; must not overlap them.

    Returns:
        int32 ``[B, Q]`` on the device of ``logits``.

    Raises:
        TypeError: not a tensor, or a dtype that is not supported.
        ValueError: a shape, stride or device that does not fit. Nothing has been written then.

    Example::

        >>> argmax(torch.tensor([[[0.0, 2.0, 2.0], [-1.0, float("nan"), 9.0]]]))
        tensor([[1, 1]], dtype=torch.int32)
    """
    if traced(logits):
        return _into(out, torch.ops.pipespec.argmax(logits.detach(), threads))
    return _argmax(logits, threads, out)


def _fake_row_choices(logits: Tensor, *rest: Any) -> Tensor:
    batch, width, _, _ = _logits(logits)
    return logits.new_empty((batch, width), dtype=_INT32)


@register("(Tensor logits, int? threads=None) -> Tensor", _fake_row_choices)
def _argmax(logits: Tensor, threads: int | None = None, out: Tensor | None = None) -> Tensor:
    batch, width, _, native = _logits(logits)
    out = _result(out, (batch, width), "out", logits.device)
    if native is not None:
        _native.argmax(*native, out.data_ptr(), _threads(threads))
        return out
    kernels = dispatch.kernels(logits)
    if kernels is not None:
        return kernels.select(logits, out=out)
    return out.copy_(reference.argmax(logits))


# --- sample ----------------------------------------------------------------------------------------------------------


def sample(logits: Tensor, noise: Noise, *, threads: int | None = None, out: Tensor | None = None) -> Tensor:
    """A token drawn from the softmax of every row: the id of the largest logit once it is scaled and has noise added.

    The choice in column ``q`` of row ``b`` is the id ``v`` with the largest
    ``logits[b, q, v] * noise.inv_temperature[b] + G(noise.seeds[b], noise.positions[b] + q, v)``, computed in float32
    (float64 logits: in float64, with the same float32 noise). It depends on these values alone: neither on the batch
    around them nor on threads, instructions or device. Logits below the cutoff are left out; -inf is never chosen, a
    NaN always (the first of them); where nothing can be chosen, id 0. A row whose inverse temperature lies on a GPU,
    unread, and is not finite and positive, gets -1.

    Args:
        logits: ``[B, Q, V]``, as for :func:`argmax`.
        noise: seeds, positions and temperatures, see :class:`Noise`.
        threads: as for :func:`argmax`.
        out: as for :func:`argmax`.

    Returns:
        int32 ``[B, Q]`` on the device of ``logits``.

    Raises:
        TypeError: not a tensor, or a dtype that is not supported.
        ValueError: a shape, stride, device or number that does not fit. Nothing has been written then.

    Example::

        >>> one = Noise(torch.tensor([7]), torch.tensor([0]), torch.tensor([1.0]))
        >>> sample(torch.tensor([[[0.0, -float("inf"), -float("inf")]]]), one)
        tensor([[0]], dtype=torch.int32)
    """
    flat = _flat(noise)
    if traced(logits):
        return _into(out, torch.ops.pipespec.sample(logits.detach(), *_tensors(flat), threads))
    return _sample(logits, *flat, threads, out)


def _fake_sample(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    inv_temperature: Tensor,
    cutoff: Tensor | None = None,
    stream: int = 0,
    threads: int | None = None,
) -> Tensor:
    batch, width, _, _ = _logits(logits)
    _noise((seeds, positions, inv_temperature, cutoff, stream), batch, width, logits.device)
    return _fake_row_choices(logits)


@register(
    "(Tensor logits, Tensor seeds, Tensor positions, Tensor inv_temperature, Tensor? cutoff=None, int stream=0, "
    "int? threads=None) -> Tensor",
    _fake_sample,
)
def _sample(
    logits: Tensor,
    seeds: Tensor,
    positions: Any,
    inv_temperature: Any,
    cutoff: Tensor | None = None,
    stream: int = 0,
    threads: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    batch, width, _, native = _logits(logits)
    noise = _noise((seeds, positions, inv_temperature, cutoff, stream), batch, width, logits.device)
    out = _result(out, (batch, width), "out", logits.device)
    if native is not None:
        _native.sample(*native, out.data_ptr(), _threads(threads), *_addresses(noise))
        return out
    if width > 0:
        _check_noise(noise, range(batch), width)
    kernels = dispatch.kernels(logits)
    if kernels is not None:
        return kernels.select(logits, noise=_moved(noise, logits.device), out=out, exact=True)
    return out.copy_(reference.sample(logits, Noise(*noise)))


# --- cutoff ----------------------------------------------------------------------------------------------------------


def cutoff(
    logits: Tensor,
    *,
    inv_temperature: float | Tensor | Any = 1.0,
    top_k: int | Tensor | Any = 0,
    top_p: float | Tensor | Any = 1.0,
    min_p: float | Tensor | Any = 0.0,
    n_fed: Tensor | Any | None = None,
    n_hint: Tensor | Any | None = None,
    threads: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Temperature, top-k, top-p and min-p as one number per row: the smallest logit that passes, for ``Noise.cutoff``.

    The filters are those of HuggingFace's warpers, in their order, each applied to what the one before left:

    * top-k keeps the logits that are at least the k-th largest;
    * top-p keeps the smallest set of largest probabilities whose sum reaches ``top_p``, at least the largest;
    * min-p keeps probabilities of at least ``min_p`` times the largest.

    Logits equal to a kept one are all kept. Top-p in HuggingFace drops some of those that tie with the last one, in an
    order that depends on its sort. Probabilities are of ``float32(logits * inv_temperature)``, summed in float64; where
    a sum lies within float32's rounding of ``top_p``, HuggingFace may decide the other way.

    A row with a NaN or without a number above -inf gets -inf, and so does every row if all filters are off.

    Args:
        logits: ``[B, Q, V]``, as for :func:`argmax`.
        inv_temperature: 1 / temperature, finite and positive. This and the next three: one number, or a tensor or numpy
            array ``[B]``, one per row of the batch.
        top_k: integers ``>= 0``; 0 or at least V: off.
        top_p: ``0 .. 1``; 1: off.
        min_p: ``0 .. 1``; 0: off.
        n_fed: as for :func:`verify`, together with ``n_hint``: only the columns that verification may read,
            ``n_fed - 1 - n_hint .. n_fed - 1``, are computed, the others get -inf. None: all columns.
        n_hint: likewise.
        threads: as for :func:`argmax`.
        out: contiguous float32 tensor ``[B, Q]`` on the device of ``logits`` to write to; must not overlap them.

    Returns:
        float32 ``[B, Q]`` on the device of ``logits``. For float64 logits rounded down, so that the smallest kept one stays.
        On a GPU weights are added up in float32: where a sum comes within a few millionths of ``top_p``, the last logit may be
        in or out.

    Raises:
        TypeError: not a tensor, or a dtype that is not supported.
        ValueError: a shape, stride, device or number that does not fit. Nothing has been written then.

    Example::

        >>> cutoff(torch.tensor([[[1.0, 5.0, 3.0, 4.0]]]), top_k=2)
        tensor([[4.]])
    """
    if traced(logits):
        filters = (
            _filter(value, logits.shape[0], dtype, name, logits.device)
            for value, (name, dtype) in zip((inv_temperature, top_k, top_p, min_p), _FILTERS.items(), strict=True)
        )
        counts = _tensors((n_fed, n_hint))
        return _into(out, torch.ops.pipespec.cutoff(logits.detach(), *filters, *counts, threads))
    return _cutoff(logits, inv_temperature, top_k, top_p, min_p, n_fed, n_hint, threads, out)


_FILTERS = {"inv_temperature": _FLOAT32, "top_k": _INT64, "top_p": _FLOAT64, "min_p": _FLOAT64}


def _fake_cutoff(
    logits: Tensor,
    inv_temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    n_fed: Tensor | None = None,
    n_hint: Tensor | None = None,
    threads: int | None = None,
) -> Tensor:
    batch, width, _, _ = _logits(logits)
    for value, (name, dtype) in zip((inv_temperature, top_k, top_p, min_p), _FILTERS.items(), strict=True):
        _filter(value, batch, dtype, name, logits.device)
    _both_counts(n_fed, n_hint, batch, logits.device)
    return logits.new_empty((batch, width), dtype=_FLOAT32)


@register(
    "(Tensor logits, Tensor inv_temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor? n_fed=None, "
    "Tensor? n_hint=None, int? threads=None) -> Tensor",
    _fake_cutoff,
)
def _cutoff(
    logits: Tensor,
    inv_temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
    n_fed: Any = None,
    n_hint: Any = None,
    threads: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    batch, width, vocab, native = _logits(logits)
    device = logits.device
    scales = _filter(inv_temperature, batch, _FLOAT32, "inv_temperature", device)
    ks = _filter(top_k, batch, _INT64, "top_k", device)
    ps = _filter(top_p, batch, _FLOAT64, "top_p", device)
    min_ps = _filter(min_p, batch, _FLOAT64, "min_p", device)
    n_fed, n_hint = _both_counts(n_fed, n_hint, batch, device)
    out = _result(out, (batch, width), "out", device, _FLOAT32)
    if native is not None:
        _native.cutoff(
            *native,
            scales.data_ptr(),
            ks.data_ptr(),
            ps.data_ptr(),
            min_ps.data_ptr(),
            0 if n_fed is None else n_fed.data_ptr(),
            0 if n_hint is None else n_hint.data_ptr(),
            out.data_ptr(),
            _threads(threads),
        )
        return out
    if n_fed is not None:
        _check_counts(n_fed, n_hint, width)
    _check_filters(scales, ks, ps, min_ps)
    kernels = dispatch.kernels(logits)
    if kernels is None:
        return out.copy_(reference.cutoff(logits, scales, ks, ps, min_ps, n_fed, n_hint))
    return kernels.cutoff(
        logits,
        inv_temperature=scales.to(device),
        # A filter that is off everywhere is left out, where the host can see it.
        top_k=0 if _all(ks, 0) else ks.clamp(max=vocab).to(device, _INT32),
        top_p=1.0 if _all(ps, 1) else ps.to(device, _FLOAT32),
        min_p=0.0 if _all(min_ps, 0) else min_ps.to(device, _FLOAT32),
        n_fed=None if n_fed is None else n_fed.to(device),
        n_hint=None if n_hint is None else n_hint.to(device),
        out=out,
    )


# --- verify ----------------------------------------------------------------------------------------------------------


def verify(
    logits: Tensor,
    tokens: Tensor,
    n_fed: Tensor | Any,
    n_hint: Tensor | Any,
    *,
    noise: Noise | None = None,
    threads: int | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Verification: each row's own choices up to the first hint that they contradict.

    Row ``r`` was fed ``tokens[r, :n_fed[r]]``, of which the last ``n_hint[r]`` are hints. With
    ``s = n_fed[r] - 1 - n_hint[r]``, ``selected[r, j]`` is the argmax of ``logits[r, s + j]`` for
    ``j = 0 .. accepted[r]``; the walk goes on while ``selected[r, j] == tokens[r, s + 1 + j]`` and hints are left.
    Logits behind the first mismatch are not read. With ``noise``, ``selected[r, j]`` is what :func:`sample` draws in
    column ``s + j`` instead.

    Args:
        logits: ``[B, Q, V]``, as for :func:`argmax`.
        tokens: ``[B, Q]``, int64 or int32, any strides, on the device of ``logits``.
        n_fed: ``[B]``, int32: tokens fed per row, ``0 <= n_fed <= Q``. A row with 0 idles: all -1, nothing accepted, its
            ``n_hint`` is ignored. Invalid counts and temperatures that lie on a GPU, unread, give
            ``accepted == -1`` in their rows.
        n_hint: ``[B]``, likewise: how many of them are hints, ``0 <= n_hint < n_fed``.
        noise: see :class:`Noise`; None: greedy. An idle row's numbers are ignored.
        threads: as for :func:`argmax`.
        out: contiguous int32 tensors ``[B, Q]`` and ``[B]`` on the device of ``n_fed`` to write to; must overlap no other
            argument. Saves the two allocations, which are a third of the cost of a small call.

    Returns:
        ``(selected[B, Q], accepted[B])``, int32 on the device of ``n_fed``: whoever counts on the host reads there, and with
        counts on a GPU nothing waits. ``selected`` is -1 past ``accepted[r]``.

    Raises:
        TypeError: not a tensor, or a dtype that is not supported.
        ValueError: shapes, strides, devices or counts that do not fit. Nothing has been written then.

    Example::

        >>> logits = torch.nn.functional.one_hot(torch.tensor([[3, 1, 4, 1]]), 6).float()
        >>> fed = torch.tensor([[7, 3, 1, 5]])  # one token of our own, three hints; we would have said 3, 1, 4
        >>> n = torch.tensor([4], dtype=torch.int32)
        >>> verify(logits, fed, n, n - 1)
        (tensor([[ 3,  1,  4, -1]], dtype=torch.int32), tensor([2], dtype=torch.int32))
    """
    flat = _NO_NOISE if noise is None else _flat(noise)
    if traced(logits):
        given = _tensors((tokens, n_fed, n_hint, *flat))
        selected, accepted = torch.ops.pipespec.verify(logits.detach(), *given, threads)
        return (selected, accepted) if out is None else (_into(out[0], selected), _into(out[1], accepted))
    return _verify(logits, tokens, n_fed, n_hint, *flat, threads, out)


_NO_NOISE: tuple[Any, Any, Any, Any, int] = (None, None, None, None, 0)


def _fake_verify(
    logits: Tensor,
    tokens: Tensor,
    n_fed: Tensor,
    n_hint: Tensor,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    inv_temperature: Tensor | None = None,
    cutoff: Tensor | None = None,
    stream: int = 0,
    threads: int | None = None,
) -> tuple[Tensor, Tensor]:
    batch, width, _, _ = _logits(logits)
    device = logits.device
    _tokens(tokens, logits, batch, width)
    n_fed = _counts(n_fed, batch, "n_fed", device)
    _counts(n_hint, batch, "n_hint", device)
    if seeds is not None:
        _noise((seeds, positions, inv_temperature, cutoff, stream), batch, width, device)
    return n_fed.new_empty((batch, width)), n_fed.new_empty((batch,))


@register(
    "(Tensor logits, Tensor tokens, Tensor n_fed, Tensor n_hint, Tensor? seeds=None, Tensor? positions=None, "
    "Tensor? inv_temperature=None, Tensor? cutoff=None, int stream=0, int? threads=None) -> (Tensor, Tensor)",
    _fake_verify,
)
def _verify(
    logits: Tensor,
    tokens: Tensor,
    n_fed: Any,
    n_hint: Any,
    seeds: Tensor | None = None,
    positions: Any = None,
    inv_temperature: Any = None,
    cutoff: Tensor | None = None,
    stream: int = 0,
    threads: int | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    batch, width, _, native = _logits(logits)
    token_bytes = _tokens(tokens, logits, batch, width)
    device = _CPU if native is not None else logits.device
    n_fed = _counts(n_fed, batch, "n_fed", device)
    n_hint = _counts(n_hint, batch, "n_hint", device)
    noise = None if seeds is None else _noise((seeds, positions, inv_temperature, cutoff, stream), batch, width, device)
    selected, accepted = _results(out, n_fed, batch, width)
    if native is None:
        return _verify_elsewhere(logits, tokens, n_fed, n_hint, noise, selected, accepted)
    token_stride = tokens.stride()
    arguments = (
        *native,
        tokens.data_ptr(),
        token_bytes,
        token_stride[0],
        token_stride[1],
        n_fed.data_ptr(),
        n_hint.data_ptr(),
        selected.data_ptr(),
        accepted.data_ptr(),
        _threads(threads),
    )
    if noise is None:
        _native.verify(*arguments)
    else:
        _native.verify_coupled(*arguments, *_addresses(noise))
    return selected, accepted


def _verify_elsewhere(
    logits: Tensor,
    tokens: Tensor,
    n_fed: Tensor,
    n_hint: Tensor,
    noise: _FlatNoise | None,
    selected: Tensor,
    accepted: Tensor,
) -> tuple[Tensor, Tensor]:
    width, device = logits.shape[1], logits.device
    _check_counts(n_fed, n_hint, width)
    if noise is not None:
        _check_noise(noise, _busy(n_fed), width)
    kernels = dispatch.kernels(logits)
    if kernels is None:
        results = reference.verify(logits, tokens, n_fed, n_hint, None if noise is None else Noise(*noise))
    else:
        results = kernels.verify(
            logits,
            tokens,
            n_fed.to(device),
            n_hint.to(device),
            noise=None if noise is None else _moved(noise, device),
            out=(selected, accepted) if selected.device == device else None,
            exact=True,
            check_counts=False,
        )
    return _given(results, selected, accepted)


# --- verify_ratio ----------------------------------------------------------------------------------------------------


def verify_ratio(
    logits: Tensor,
    tokens: Tensor,
    n_fed: Tensor | Any,
    n_hint: Tensor | Any,
    draft_logits: Tensor | None,
    noise: Noise,
    *,
    streams: Streams = INDEPENDENT,
    draft_inv_temperature: Tensor | Any | None = None,
    draft_cutoff: Tensor | None = None,
    threads: int | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Speculative sampling by the ratio of probabilities: hints that survive, and one token drawn behind them.

    As in :func:`verify`, row ``r`` was fed ``tokens[r, :n_fed[r]]``, the last ``n_hint[r]`` of them hints. The hint ``h`` in
    column ``q + 1`` is accepted if ``u q(h) < p(h)``, with ``p`` the softmax of ``logits[r, q] * inv_temperature[r]`` over
    what reaches the cutoff, ``q`` that of ``draft_logits[r, q]``, and ``u`` uniform. ``selected[r, :accepted[r]]`` are the
    accepted hints; ``selected[r, accepted[r]]`` is drawn from ``max(p - q, 0)``, normalised, or, where all were accepted, from
    ``p``. What comes out is distributed as if drawn from ``p`` alone (Leviathan, Kalman, Matias, ICML 2023, algorithm 1; Chen
    et al. 2023, algorithm 2), provided that ``q`` is what the hint was drawn from, to the last bit of its logits, and that
    the draft's draw took a stream of its own.

    A row with a NaN has no distribution: its hint is rejected. Where the draft's row has one, the hint is rejected and the
    token drawn from ``p``. A hint that is no id of the vocabulary is rejected.

    On the CPU decisions are those of float64: sums in float32 with a known error decide where that is enough, and depend on
    neither threads nor instructions. On a GPU sums are in float32, so that a test that is decided in their last bits may fall
    otherwise. Scores beyond about 1e15 leave no room for noise: of equal ones the lowest id is drawn.

    Args:
        logits, tokens, n_fed, n_hint: as for :func:`verify`.
        draft_logits: ``[B, Q, V]``, like ``logits`` but of any of their dtypes (if one is float64: the slow reference);
            column ``q`` belongs to the token in column ``q + 1``, and columns without a hint are not read. None: hints are
            certain (n-grams, greedy drafts), ``q`` is 1.
        noise: seeds, positions, temperatures and cutoffs of the target. Its stream is not used.
        streams: of the three kinds of draws; they must differ.
        draft_inv_temperature: float32 ``[B]``; default: the target's.
        draft_cutoff: float32 ``[B, Q]``; default: none.
        threads: as for :func:`argmax`.
        out: as for :func:`verify`.

    Returns:
        ``(selected[B, Q], accepted[B])``, int32 on the device of ``n_fed``. ``selected`` is -1 past ``accepted[r]``.

    Raises:
        TypeError: not a tensor, or a dtype that is not supported.
        ValueError: shapes, strides, devices, counts or streams that do not fit. Nothing has been written then.

    Example::

        >>> certain = torch.tensor([[[-float("inf"), 0.0], [0.0, -float("inf")]]])  # 1, then 0
        >>> noise = Noise(torch.tensor([7]), torch.tensor([0]), torch.tensor([1.0]))
        >>> two = torch.tensor([2], dtype=torch.int32)
        >>> verify_ratio(certain, torch.tensor([[5, 1]]), two, two - 1, None, noise)
        (tensor([[1, 0]], dtype=torch.int32), tensor([1], dtype=torch.int32))
    """
    check_streams(streams)
    seeds, positions, scale, cutoff, _ = _flat(noise)
    if traced(logits):
        given = _tensors(
            (tokens, n_fed, n_hint, draft_logits, seeds, positions, scale, cutoff, draft_inv_temperature, draft_cutoff)
        )
        selected, accepted = torch.ops.pipespec.verify_ratio(logits.detach(), *given, *streams, threads)
        return (selected, accepted) if out is None else (_into(out[0], selected), _into(out[1], accepted))
    return _verify_ratio(
        logits,
        tokens,
        n_fed,
        n_hint,
        draft_logits,
        seeds,
        positions,
        scale,
        cutoff,
        draft_inv_temperature,
        draft_cutoff,
        *streams,
        threads,
        out,
    )


def _ratio_arguments(
    streams: Streams,
    logits: Tensor,
    tokens: Tensor,
    n_fed: Any,
    n_hint: Any,
    draft_logits: Tensor | None,
    seeds: Tensor,
    positions: Any,
    inv_temperature: Any,
    cutoff: Tensor | None,
    draft_inv_temperature: Any,
    draft_cutoff: Tensor | None,
) -> tuple[Tensor, Tensor, _FlatNoise, Tensor | None, Tensor | None]:
    """Counts, the target's noise, the draft's temperatures and cutoffs: checked."""
    batch, width, _, _ = _logits(logits)
    device = logits.device
    _tokens(tokens, logits, batch, width)
    if draft_logits is not None:
        _logits(draft_logits, "draft_logits")
        if draft_logits.shape != logits.shape or draft_logits.device != device:
            raise ValueError(
                f"draft_logits are {tuple(draft_logits.shape)} on {draft_logits.device}, "
                f"logits {tuple(logits.shape)} on {device}"
            )
    check_streams(streams)
    scale, bars = draft_inv_temperature, draft_cutoff
    return (
        _counts(n_fed, batch, "n_fed", device),
        _counts(n_hint, batch, "n_hint", device),
        _noise((seeds, positions, inv_temperature, cutoff, 0), batch, width, device),
        None if scale is None else _per_row(scale, (batch,), _FLOAT32, "draft_inv_temperature", device=device),
        None if bars is None else _per_row(bars, (batch, width), _FLOAT32, "draft_cutoff", device=device),
    )


def _fake_verify_ratio(*arguments: Any) -> tuple[Tensor, Tensor]:
    n_fed = _ratio_arguments(Streams(*arguments[11:14]), *arguments[:11])[0]
    batch, width, _ = arguments[0].shape
    return n_fed.new_empty((batch, width)), n_fed.new_empty((batch,))


@register(
    "(Tensor logits, Tensor tokens, Tensor n_fed, Tensor n_hint, Tensor? draft_logits, Tensor seeds, Tensor positions, "
    "Tensor inv_temperature, Tensor? cutoff, Tensor? draft_inv_temperature, Tensor? draft_cutoff, int draft_stream, "
    "int accept_stream, int residual_stream, int? threads=None) -> (Tensor, Tensor)",
    _fake_verify_ratio,
)
def _verify_ratio(
    logits: Tensor,
    tokens: Tensor,
    n_fed: Any,
    n_hint: Any,
    draft_logits: Tensor | None,
    seeds: Tensor,
    positions: Any,
    inv_temperature: Any,
    cutoff: Tensor | None,
    draft_inv_temperature: Any,
    draft_cutoff: Tensor | None,
    draft_stream: int,
    accept_stream: int,
    residual_stream: int,
    threads: int | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    streams = Streams(draft_stream, accept_stream, residual_stream)
    n_fed, n_hint, noise, scale, bars = _ratio_arguments(
        streams,
        logits,
        tokens,
        n_fed,
        n_hint,
        draft_logits,
        seeds,
        positions,
        inv_temperature,
        cutoff,
        draft_inv_temperature,
        draft_cutoff,
    )
    batch, width, _, native = _logits(logits)
    device = logits.device
    drafts = _NO_DRAFT if draft_logits is None else _logits(draft_logits, "draft_logits")[3]
    selected, accepted = _results(out, n_fed, batch, width)
    if native is not None and drafts is not None:
        token_stride = tokens.stride()
        _native.verify_ratio(
            *native,
            tokens.data_ptr(),
            _TOKEN_BYTES[tokens.dtype],
            token_stride[0],
            token_stride[1],
            n_fed.data_ptr(),
            n_hint.data_ptr(),
            selected.data_ptr(),
            accepted.data_ptr(),
            _threads(threads),
            *_addresses(noise)[:4],
            accept_stream,
            residual_stream,
            drafts[0],
            drafts[1],
            drafts[5],
            drafts[6],
            (noise[2] if scale is None else scale).data_ptr(),
            0 if bars is None else bars.data_ptr(),
        )
        return selected, accepted
    _check_counts(n_fed, n_hint, width)
    _check_noise(noise, _busy(n_fed), width)
    if scale is not None:
        _check_noise((noise[0], noise[1], scale, None, 0), _busy(n_fed), width, "draft_inv_temperature")
    both = logits if draft_logits is None or draft_logits.dtype is not _FLOAT64 else draft_logits
    kernels = dispatch.kernels(both)
    if kernels is None:
        results = reference.verify_ratio(
            logits,
            tokens,
            n_fed,
            n_hint,
            draft_logits,
            Noise(*noise),
            streams=streams,
            draft_inv_temperature=scale,
            draft_cutoff=bars,
        )
    else:
        results = kernels.verify_ratio(
            logits,
            tokens,
            n_fed.to(device),
            n_hint.to(device),
            draft_logits,
            _moved(noise, device),
            streams=streams,
            draft_inv_temperature=None if scale is None else scale.to(device),
            draft_cutoff=None if bars is None else bars.to(device),
            out=(selected, accepted) if selected.device == device else None,
            exact=True,
            check_counts=False,
        )
    return _given(results, selected, accepted)


_NO_DRAFT = (0,) * 7  # in place of a draft's logits: what _logits() gives for the native code


# --- arguments and results -------------------------------------------------------------------------------------------

_FlatNoise = tuple[Tensor, Tensor, Tensor, Tensor | None, int]


def _logits(logits: Tensor, name: str = "logits") -> tuple[int, int, int, tuple[int, ...] | None]:
    """Sizes of checked logits, and the native code's first arguments; None: they are not for it."""
    if not isinstance(logits, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(logits).__name__}")
    shape = logits.shape
    if len(shape) != 3:
        raise ValueError(f"{name} must be [B, Q, V], got shape {tuple(shape)}")
    batch, width, vocab = shape
    if not 0 < vocab < 2**31:
        raise ValueError(f"the vocabulary must have 1 .. 2**31-1 entries, got shape {tuple(shape)}")
    stride = logits.stride()
    if stride[2] != 1 and vocab > 1:
        raise ValueError(f"{name} must be contiguous along the vocabulary, got strides {stride}")
    code = _CODES.get(logits.dtype, -1)
    if code == -1:
        raise TypeError(f"{name} must be float32, bfloat16, float16 or float64, got {logits.dtype}")
    if code is None or type(logits) is not Tensor or not logits.is_cpu:
        return batch, width, vocab, None
    return batch, width, vocab, (logits.data_ptr(), code, batch, width, vocab, stride[0], stride[1])


def _tokens(tokens: Tensor, logits: Tensor, batch: int, width: int) -> int:
    """Bytes of an id in checked tokens."""
    if not isinstance(tokens, Tensor):
        raise TypeError(f"tokens must be a tensor, got {type(tokens).__name__}")
    token_bytes = _TOKEN_BYTES.get(tokens.dtype)
    if token_bytes is None:
        raise TypeError(f"tokens must be int64 or int32, got {tokens.dtype}")
    if tokens.shape != (batch, width):
        raise ValueError(f"tokens are {tuple(tokens.shape)}, but logits [B, Q, V] are {tuple(logits.shape)}")
    if not (tokens.is_cpu and logits.is_cpu) and tokens.device != logits.device:
        raise ValueError(f"tokens are on {tokens.device}, logits on {logits.device}")
    return token_bytes


def _counts(counts: Any, batch: int, name: str, device: torch.device) -> Tensor:
    return _per_row(counts, (batch,), _INT32, name, "count", device)


def _both_counts(n_fed: Any, n_hint: Any, batch: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    if (n_fed is None) != (n_hint is None):
        raise ValueError("n_fed and n_hint go together")
    if n_fed is None:
        return None, None
    return _counts(n_fed, batch, "n_fed", device), _counts(n_hint, batch, "n_hint", device)


def _per_row(
    values: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    name: str,
    what: str = "value",
    device: torch.device = _CPU,
) -> Tensor:
    if not isinstance(values, Tensor):
        if not hasattr(values, "__array_interface__"):
            kind = str(dtype).removeprefix("torch.")
            raise TypeError(f"{name} must be a tensor or numpy array of {kind}, got {type(values).__name__}")
        values = torch.from_numpy(values)
    if values.dtype is not dtype:
        raise TypeError(f"{name} must be {str(dtype).removeprefix('torch.')}, got {values.dtype}")
    if not values.is_cpu and values.device != device:
        raise ValueError(_misplaced(name, values, device))
    if values.shape != shape:
        raise ValueError(f"{name} must be {list(shape)}, one {what} per row, got shape {tuple(values.shape)}")
    return values if values.is_contiguous() else values.contiguous()


def _misplaced(name: str, values: Tensor, device: torch.device) -> str:
    places = "the CPU" if device.type == "cpu" else f"the CPU or on {device} like the logits"
    return f"{name} must be on {places}, is on {values.device}"


def _filter(values: Any, batch: int, dtype: torch.dtype, name: str, device: torch.device) -> Tensor:
    """A number, or one per row, as a contiguous tensor ``[B]``."""
    if isinstance(values, (int, float)):
        if dtype is _INT64 and not isinstance(values, int):
            raise TypeError(f"{name} must be an integer, got {values!r}")
        return torch.full((batch,), values, dtype=dtype, device=_CPU)
    if not isinstance(values, Tensor):
        if not hasattr(values, "__array_interface__"):
            raise TypeError(f"{name} must be a number, a tensor or a numpy array, got {type(values).__name__}")
        values = torch.as_tensor(values)
    if dtype is _INT64 and values.dtype not in (_INT32, _INT64):
        raise TypeError(f"{name} must be integers, got {values.dtype}")
    if not values.is_cpu and values.device != device:
        raise ValueError(_misplaced(name, values, device))
    if values.dim() == 0:  # a numpy scalar, say
        values = values.expand(batch)
    if values.shape != (batch,):
        raise ValueError(f"{name} must be a number or [{batch}], got shape {tuple(values.shape)}")
    return values.to(dtype).contiguous()


def _flat(noise: Noise) -> tuple[Any, Any, Any, Any, int]:
    if not isinstance(noise, Noise):
        raise TypeError(f"noise must be a Noise, got {type(noise).__name__}")
    return noise.seeds, noise.positions, noise.inv_temperature, noise.cutoff, noise.stream


def _noise(noise: tuple[Any, Any, Any, Any, int], batch: int, width: int, device: torch.device) -> _FlatNoise:
    """The fields of a checked Noise, contiguous: they must outlive the call that gets their addresses."""
    seeds, positions, inv_temperature, cutoff, stream = noise
    check_stream(stream)
    rows = (batch,)
    return (
        _per_row(seeds, rows, _INT64, "noise.seeds", device=device),
        _per_row(positions, rows, _INT64, "noise.positions", device=device),
        _per_row(inv_temperature, rows, _FLOAT32, "noise.inv_temperature", device=device),
        None if cutoff is None else _per_row(cutoff, (batch, width), _FLOAT32, "noise.cutoff", device=device),
        stream,
    )


def _addresses(noise: _FlatNoise) -> tuple[int, int, int, int, int]:
    seeds, positions, inv_temperature, cutoff, stream = noise
    return (
        seeds.data_ptr(),
        positions.data_ptr(),
        inv_temperature.data_ptr(),
        0 if cutoff is None else cutoff.data_ptr(),
        stream,
    )


def _moved(noise: _FlatNoise, device: torch.device) -> Noise:
    seeds, positions, inv_temperature, cutoff, stream = noise
    cutoff = None if cutoff is None else cutoff.to(device)
    return Noise(seeds.to(device), positions.to(device), inv_temperature.to(device), cutoff, stream)


def _tensors(values: Iterable[Any]) -> list[Any]:
    """Numpy arrays as tensors, for a schema."""
    return [torch.from_numpy(v) if hasattr(v, "__array_interface__") else v for v in values]


def _threads(threads: Any) -> int:
    if threads is None:
        return torch.get_num_threads()
    if not isinstance(threads, int):
        raise TypeError(f"threads must be an integer, got {threads!r}")
    return threads  # how many is checked by the native code


# What the native code checks by itself, for the others. Only what lies on the CPU: reading the rest would wait for a device.


def _check_noise(noise: _FlatNoise, rows: Iterable[int], width: int, name: str = "inv_temperature") -> None:
    if noise[2].is_cpu:
        scales = noise[2].tolist()
        for row in rows:
            if not 0 < scales[row] < math.inf:
                raise ValueError(f"row {row}: {name} must be finite and positive, is {scales[row]}")
    if noise[1].is_cpu:
        positions = noise[1].tolist()
        for row in rows:
            if not 0 <= positions[row] <= 2**63 - 1 - width:
                raise ValueError(f"row {row}: positions must not be negative, is {positions[row]}")


def _check_counts(n_fed: Tensor, n_hint: Tensor, width: int) -> None:
    if n_fed.is_cpu and n_hint.is_cpu:
        reference.check_counts(n_fed, n_hint, width)


def _busy(n_fed: Tensor) -> list[int]:
    """The rows whose numbers matter, as far as the host can see."""
    return [row for row, fed in enumerate(n_fed.tolist()) if fed > 0] if n_fed.is_cpu else []


def _check_filters(*filters: Tensor) -> None:
    for (name, _), values, most in zip(_FILTERS.items(), filters, (math.inf, math.inf, 1, 1), strict=True):
        if values.is_cpu:
            for row, value in enumerate(values.tolist()):
                if not 0 <= value <= most or (name == "inv_temperature" and not 0 < value < math.inf):
                    raise ValueError(f"row {row}: {name} {value} is not valid")


def _all(values: Tensor, value: float) -> bool:
    return values.is_cpu and bool((values == value).all())


def _result(
    out: Tensor | None, shape: tuple[int, ...], name: str, device: torch.device, dtype: torch.dtype = _INT32
) -> Tensor:
    """``out`` if it is fit to be written to, or a new tensor."""
    if out is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if not isinstance(out, Tensor) or out.dtype is not dtype:
        kind = str(dtype).removeprefix("torch.")
        raise TypeError(
            f"{name} must be {'an' if dtype is _INT32 else 'a'} {kind} tensor, got {getattr(out, 'dtype', type(out).__name__)}"
        )
    if out.shape != shape or out.device != device or not out.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous on {device} with shape {shape}, "
            f"got shape {tuple(out.shape)}, strides {out.stride()} on {out.device}"
        )
    return out


def _results(out: tuple[Tensor, Tensor] | None, n_fed: Tensor, batch: int, width: int) -> tuple[Tensor, Tensor]:
    """For ``selected`` and ``accepted``, where ``n_fed`` is."""
    if out is None:
        # From a tensor that is int32 there already: half the price of torch.empty with dtype and device.
        return n_fed.new_empty((batch, width)), torch.empty_like(n_fed)
    device = n_fed.device
    return _result(out[0], (batch, width), "out[0]", device), _result(out[1], (batch,), "out[1]", device)


def _given(results: tuple[Tensor, Tensor], selected: Tensor, accepted: Tensor) -> tuple[Tensor, Tensor]:
    """The results in these tensors, if they are not there already."""
    if results[0] is not selected:
        selected.copy_(results[0])
        accepted.copy_(results[1])
    return selected, accepted


def _into(out: Tensor | None, result: Tensor) -> Tensor:
    if out is None:
        return result
    return _result(out, tuple(result.shape), "out", result.device, result.dtype).copy_(result)
