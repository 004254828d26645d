"""The operations of speculative decoding.

Row selection over logits ``[B, Q, V]``: :func:`argmax`, :func:`sample`, and :func:`verify` with either; :func:`rejection_sample` for drafts
with a distribution; :func:`cutoff` for top-k, top-p and min-p; :func:`penalize` for penalties, biases and bitmasks;
:func:`logprobs` of what was selected. Keys and values in storage ``[B, Hkv, S, D]`` with a length per row:
:func:`kv_append`, and :func:`verify_attention` over them. The rest of a
decoder layer but its matrix products: :func:`add_rms_norm`, :func:`silu_mul`, and :func:`rope_append` in place of RoPE and :func:`kv_append`.
Matrix products of a step's few rows together with these: :func:`linear_small` and :func:`qkv_append`; with experts: :func:`experts_small`; and rows of quantised weights: :func:`decode_rows`.
The step of an n-gram index: :func:`prompt_lookup`.

Tensors on a GPU go to the kernels of :mod:`pipespec_kernels.triton`, whose noise equals the host's bit for bit. Tensors on the
CPU go to the native code (one pass over the logits, vectorised, several threads for large work), moves of keys and values included. Torch runs
attention, activations and RoPE there. Float64 and other devices go to :mod:`pipespec_kernels.reference`, plain torch. As in ``torch.argmax``, the lowest id of equal logits
wins, and a NaN counts as larger than everything. ``PIPESPEC_OPS=reference`` (or ``triton``) in the environment sends every call to
that implementation; ``triton`` on the CPU needs Triton's interpreter.

In row selection, arguments with one entry per row are tensors on the device of the logits, tensors on the CPU, or numpy arrays. Values on
the CPU are checked before anything is written. The host does not read values on a GPU, so no call waits for the device. The checks run
once per draft step and take about two microseconds.

A model's forward may be compiled by torch with :func:`kv_append` and :func:`verify_attention` in it (:mod:`pipespec_kernels.library`). The other
operations are plain functions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipespec_kernels import arguments, dispatch, reference
from pipespec_kernels.arguments import CPU, FLOAT32, FLOAT64, FlatNoise
from pipespec_kernels.kv import kv_append, verify_attention
from pipespec_kernels.layers import add_rms_norm, rope_append, silu_mul
from pipespec_kernels.logprobs import logprobs
from pipespec_kernels.lookup import prompt_lookup
from pipespec_kernels.noise import INDEPENDENT, Noise, Streams, check_invalid_positions, check_streams
from pipespec_kernels.penalties import Penalties, penalize
from pipespec_kernels.products import decode_rows, experts_small, linear_small, qkv_append

__all__ = [
    "Noise",
    "Penalties",
    "Streams",
    "add_rms_norm",
    "argmax",
    "cutoff",
    "decode_rows",
    "experts_small",
    "kv_append",
    "linear_small",
    "logprobs",
    "penalize",
    "prompt_lookup",
    "qkv_append",
    "rejection_sample",
    "rope_append",
    "sample",
    "silu_mul",
    "verify",
    "verify_attention",
]

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
    batch, width, _, native = arguments.check_logits(logits)
    out = arguments.result(out, (batch, width), "out", logits.device)
    if native is not None:
        arguments.native.argmax(*native, out.data_ptr(), arguments.num_threads(threads))
        return out
    kernels = dispatch.kernels(logits)
    if kernels is not None:
        kernels.select(logits, out=out)
        return out
    return out.copy_(reference.argmax(logits))


# --- sample ----------------------------------------------------------------------------------------------------------


def sample(logits: Tensor, noise: Noise, *, threads: int | None = None, out: Tensor | None = None) -> Tensor:
    """Draw a token from the softmax of every row: the id of the largest scaled logit plus noise (Gumbel-max).

    The choice in column ``q`` of row ``b`` is the id ``v`` with the largest
    ``logits[b, q, v] * noise.inv_temperature[b] + G(noise.seeds[b], noise.positions[b] + q, v)``, computed in float32
    (float64 logits: in float64, with the same float32 noise). It depends only on these values, and not on the rest of the batch, threads,
    instructions or device. Logits below the cutoff are left out. -inf is never chosen, and the first NaN always is. A row without a logit above -inf
    gives id 0. A row whose inverse temperature is on a GPU and is not finite and positive gives -1.

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
    batch, width, _, native = arguments.check_logits(logits)
    flat = arguments.check_noise(arguments.fields(noise), batch, width, logits.device)
    out = arguments.result(out, (batch, width), "out", logits.device)
    if native is not None:
        arguments.native.sample(*native, out.data_ptr(), arguments.num_threads(threads), *arguments.addresses(flat))
        return out
    if width > 0:
        arguments.check_noise_values(flat, range(batch), width)
    kernels = dispatch.kernels(logits)
    if kernels is not None:
        kernels.select(logits, noise=arguments.moved(flat, logits.device), out=out, exact=True)
        return out
    return out.copy_(reference.sample(logits, Noise(*flat)))


# --- cutoff ----------------------------------------------------------------------------------------------------------


def cutoff(
    logits: Tensor,
    *,
    inv_temperature: float | Tensor | Any = 1.0,
    top_k: int | Tensor | Any = 0,
    top_p: float | Tensor | Any = 1.0,
    min_p: float | Tensor | Any = 0.0,
    query_lens: Tensor | Any | None = None,
    num_draft_tokens: Tensor | Any | None = None,
    threads: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Temperature, top-k, top-p and min-p as one number per row: the smallest logit that passes, for ``Noise.cutoff``.

    The filters are those of HuggingFace's warpers, in their order, each applied to the logits that the one before kept:

    * top-k keeps the logits that are at least the k-th largest;
    * top-p keeps the smallest set of largest probabilities whose sum reaches ``top_p``, at least the largest;
    * min-p keeps probabilities of at least ``min_p`` times the largest.

    Logits equal to a kept one are all kept. Top-p in HuggingFace drops some of those that tie with the last one, in an
    order that depends on its sort. Probabilities are of ``float32(logits * inv_temperature)``, summed in float64; where a sum lies within float32's
    rounding of ``top_p``, HuggingFace's result may differ.

    A row with a NaN or without a number above -inf gets -inf, and so does every row if all filters are off.

    Args:
        logits: ``[B, Q, V]``, as for :func:`argmax`.
        inv_temperature: 1 / temperature, finite and positive. This and the next three: one number, or a tensor or numpy
            array ``[B]``, one per row of the batch.
        top_k: integers ``>= 0``; 0 or at least V: off.
        top_p: ``0 .. 1``; 1: off.
        min_p: ``0 .. 1``; 0: off.
        query_lens: as for :func:`verify`, together with ``num_draft_tokens``: only the columns that verification may read,
            ``query_lens - 1 - num_draft_tokens .. query_lens - 1``, are computed, the others get -inf. None: all columns.
        num_draft_tokens: likewise.
        threads: as for :func:`argmax`.
        out: contiguous float32 tensor ``[B, Q]`` on the device of ``logits`` to write to; must not overlap them.

    Returns:
        float32 ``[B, Q]`` on the device of ``logits``. For float64 logits it is rounded down, so that the smallest kept logit passes. On a GPU
        weights are added up in float32: if a sum is within a few millionths of ``top_p``, the last logit may or may not pass.

    Raises:
        TypeError: not a tensor, or a dtype that is not supported.
        ValueError: a shape, stride, device or number that does not fit. Nothing has been written then.

    Example::

        >>> cutoff(torch.tensor([[[1.0, 5.0, 3.0, 4.0]]]), top_k=2)
        tensor([[4.]])
    """
    batch, width, _, native = arguments.check_logits(logits)
    device = logits.device
    filters = scales, ks, ps, min_ps = arguments.filters((inv_temperature, top_k, top_p, min_p), batch, device)
    query_lens, num_draft_tokens = arguments.both_counts(query_lens, num_draft_tokens, batch, device)
    out = arguments.result(out, (batch, width), "out", device, FLOAT32)
    if native is not None:
        arguments.native.cutoff(
            *native,
            *(values.data_ptr() for values in filters),
            arguments.address(query_lens),
            arguments.address(num_draft_tokens),
            out.data_ptr(),
            arguments.num_threads(threads),
        )
        return out
    if query_lens is not None and num_draft_tokens is not None:
        arguments.check_count_values(query_lens, num_draft_tokens, width)
    arguments.check_filter_values(filters)
    kernels = dispatch.kernels(logits)
    if kernels is None:
        return out.copy_(reference.cutoff(logits.detach(), scales, ks, ps, min_ps, query_lens, num_draft_tokens))
    kernels.cutoff(
        logits,
        inv_temperature=scales.to(device),
        # A filter on the CPU that is off in all rows is left out.
        top_k=0 if arguments.is_everywhere(ks, 0) else ks.to(device),
        top_p=1.0 if arguments.is_everywhere(ps, 1) else ps.to(device),
        min_p=0.0 if arguments.is_everywhere(min_ps, 0) else min_ps.to(device),
        query_lens=None if query_lens is None else query_lens.to(device),
        num_draft_tokens=None if num_draft_tokens is None else num_draft_tokens.to(device),
        out=out,
    )
    return out


# --- verify ----------------------------------------------------------------------------------------------------------


def verify(
    logits: Tensor,
    tokens: Tensor,
    query_lens: Tensor | Any,
    num_draft_tokens: Tensor | Any,
    *,
    noise: Noise | None = None,
    threads: int | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    workspace: Any | None = None,
    invalid_positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Verification: each row's own choices up to the first draft token that they contradict.

    Row ``r`` was fed ``tokens[r, :query_lens[r]]``, of which the last ``num_draft_tokens[r]`` are draft tokens. With
    ``s = query_lens[r] - 1 - num_draft_tokens[r]``, ``selected[r, j]`` is the argmax of ``logits[r, s + j]`` for
    ``j = 0 .. accepted[r]``; the walk continues while ``selected[r, j] == tokens[r, s + 1 + j]`` and draft tokens are left.
    Logits after the first mismatch change nothing; the CPU does not read them, and a GPU not all of them. With ``noise``, ``selected[r, j]`` is what :func:`sample` draws in
    column ``s + j`` instead.

    Args:
        logits: ``[B, Q, V]``, as for :func:`argmax`.
        tokens: ``[B, Q]``, int64 or int32, any strides, on the device of ``logits``.
        query_lens: ``[B]``, int32: tokens fed per row, ``0 <= query_lens <= Q``. A row with 0 idles: its ``selected`` is -1, its
            ``accepted`` is 0, and its ``num_draft_tokens`` is ignored. Rows with invalid counts or temperatures on a GPU give
            ``accepted == -1``.
        num_draft_tokens: ``[B]``, likewise: how many of the fed tokens are draft tokens, ``0 <= num_draft_tokens < query_lens``.
        noise: see :class:`Noise`; None: greedy. An idle row's numbers are ignored.
        threads: as for :func:`argmax`.
        out: contiguous int32 tensors ``[B, Q]`` and ``[B]`` on the device of ``query_lens`` to write to; must overlap no other
            argument. Saves the two allocations, which are a third of the cost of a small call.
        workspace: on a GPU, a :class:`pipespec_kernels.triton.Workspace` of at least ``B`` and ``Q``: saves the launch that clears one.
            Calls that may run at the same time need different ones. Ignored elsewhere.
        invalid_positions: contiguous int64 ``[B]``, on the device of ``logits`` or pinned, with ``noise`` only. A row whose tokens are not all drawn from a
            distribution (a chosen logit is NaN or infinite, so that the row of logits has a NaN, has +inf or is all -inf) lowers its entry to the
            position of the first of them; begin with :data:`pipespec_kernels.noise.ALL_VALID`. On a GPU the same launch writes it.

    Returns:
        ``(selected[B, Q], accepted[B])``, int32 on the device of ``query_lens``. With ``query_lens`` on the CPU the call copies
        them there; with ``query_lens`` on a GPU it does not wait for the device. ``selected`` is -1 past ``accepted[r]``.

    Raises:
        TypeError: not a tensor, or a dtype that is not supported.
        ValueError: shapes, strides, devices or counts that do not fit. Nothing has been written then.

    Example::

        >>> logits = torch.nn.functional.one_hot(torch.tensor([[3, 1, 4, 1]]), 6).float()
        >>> fed = torch.tensor([[7, 3, 1, 5]])  # one token of the model's own, three draft tokens; the model chooses 3, 1, 4
        >>> n = torch.tensor([4], dtype=torch.int32)
        >>> verify(logits, fed, n, n - 1)
        (tensor([[ 3,  1,  4, -1]], dtype=torch.int32), tensor([2], dtype=torch.int32))
    """
    flat, offset = _NO_NOISE, 0
    if noise is not None:
        flat, offset = arguments.fields_for_kernel(noise)
    if invalid_positions is not None:
        check_invalid_positions(invalid_positions, logits, noise)
    batch, width, _, native = arguments.check_logits(logits)
    device = CPU if native is not None else logits.device
    query_lens, num_draft_tokens, drawn = _verify_arguments(logits, tokens, query_lens, num_draft_tokens, flat, device)
    selected, accepted = arguments.results(out, query_lens, batch, width)
    if native is not None:
        call = _native_arguments(native, tokens, (query_lens, num_draft_tokens), (selected, accepted), threads)
        if drawn is None:
            arguments.native.verify(*call)
        else:
            arguments.native.verify_coupled(*call, *arguments.addresses(drawn))
            if invalid_positions is not None:
                reference.note_invalid_positions(
                    invalid_positions, logits, selected, query_lens, num_draft_tokens, drawn[1]
                )
        return selected, accepted
    arguments.check_count_values(query_lens, num_draft_tokens, width)
    if drawn is not None:
        arguments.check_noise_values(drawn, arguments.busy_rows(query_lens), width)
    kernels = dispatch.kernels(logits)
    if kernels is None:
        given = None if drawn is None else Noise(*drawn, offset)
        found = reference.verify(logits, tokens, query_lens, num_draft_tokens, given)
        if invalid_positions is not None and drawn is not None:
            counts = query_lens.to(CPU), num_draft_tokens.to(CPU)
            reference.note_invalid_positions(invalid_positions, logits, found[0], *counts, drawn[1].to(CPU) + offset)
    else:
        found = kernels.verify(
            logits,
            tokens,
            query_lens.to(device),
            num_draft_tokens.to(device),
            noise=None if drawn is None else arguments.moved(drawn, device, offset),
            out=(selected, accepted) if selected.device == device else None,
            workspace=workspace,
            invalid_positions=invalid_positions,
            exact=True,
        )
    return arguments.write_to(found, selected, accepted)


_NO_NOISE: tuple[Any, Any, Any, Any, int] = (None, None, None, None, 0)


def _verify_arguments(
    logits: Tensor, tokens: Tensor, query_lens: Any, num_draft_tokens: Any, noise: tuple[Any, ...], device: torch.device
) -> tuple[Tensor, Tensor, FlatNoise | None]:
    """Check the counts, and the fields of the noise if there is one. ``device``: where the counts may be, other than the CPU."""
    batch, width, _, _ = arguments.check_logits(logits)
    arguments.check_tokens(tokens, logits, batch, width)
    return (
        arguments.per_row("query_lens", query_lens, (batch,), device),
        arguments.per_row("num_draft_tokens", num_draft_tokens, (batch,), device),
        None if noise[0] is None else arguments.check_noise(noise, batch, width, device),
    )


def _native_arguments(
    native: tuple[int, ...], tokens: Tensor, counts: tuple[Tensor, Tensor], out: tuple[Tensor, Tensor], threads: Any
) -> tuple[int, ...]:
    """The first arguments of both verifications of the native code."""
    fed = tokens.data_ptr(), arguments.TOKEN_BYTES[tokens.dtype], *tokens.stride()
    (query_lens, num_draft_tokens), (selected, accepted) = counts, out
    addresses = query_lens.data_ptr(), num_draft_tokens.data_ptr(), selected.data_ptr(), accepted.data_ptr()
    return (*native, *fed, *addresses, arguments.num_threads(threads))


# --- rejection_sample ----------------------------------------------------------------------------------------------------


def rejection_sample(
    logits: Tensor,
    tokens: Tensor,
    query_lens: Tensor | Any,
    num_draft_tokens: Tensor | Any,
    draft_logits: Tensor | None,
    noise: Noise,
    *,
    streams: Streams = INDEPENDENT,
    draft_inv_temperature: Tensor | Any | None = None,
    draft_cutoff: Tensor | None = None,
    threads: int | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Rejection sampling: the accepted draft tokens of each row, and one token drawn after them.

    As in :func:`verify`, row ``r`` was fed ``tokens[r, :query_lens[r]]``, the last ``num_draft_tokens[r]`` of them draft tokens. The draft token ``h`` in
    column ``q + 1`` is accepted if ``u q(h) < p(h)``, with ``p`` the softmax of ``logits[r, q] * inv_temperature[r]`` over
    what reaches the cutoff, ``q`` that of ``draft_logits[r, q]``, and ``u`` uniform. ``selected[r, :accepted[r]]`` are the
    accepted draft tokens; ``selected[r, accepted[r]]`` is drawn from ``max(p - q, 0)``, normalised, or, where all were accepted, from
    ``p``. The result is distributed as a draw from ``p`` alone (Leviathan, Kalman, Matias, ICML 2023, algorithm 1; Chen
    et al. 2023, algorithm 2). This requires that the draft token was drawn from exactly ``q``, to the last bit of its logits, with a
    noise stream of its own.

    If a row of ``logits`` has a NaN, its draft token is rejected. If a row of ``draft_logits`` has a NaN, its draft token is rejected and
    the token is drawn from ``p``. A draft token outside of the vocabulary is rejected.

    On the CPU all sums are float64, in an order that is independent of threads and instructions. On a GPU the sums are float32, so a decision within their rounding may differ. Noise vanishes in scores above about
    1e15, so the lowest id of equal scores is drawn.

    Args:
        logits: as for :func:`verify`.
        tokens: likewise.
        query_lens: likewise.
        num_draft_tokens: likewise.
        draft_logits: ``[B, Q, V]``, like ``logits`` but of any of their dtypes (if one is float64: the slow reference);
            column ``q`` belongs to the token in column ``q + 1``, and columns without a draft token are not read. None: ``q`` of each
            draft token is 1 (n-grams, greedy drafts).
        noise: seeds, positions, temperatures and cutoffs of the target. Its stream is not used.
        streams: noise streams of the draft's draws, of the acceptance tests and of the residual draws; they must differ.
        draft_inv_temperature: float32 ``[B]``; default: the target's.
        draft_cutoff: float32 ``[B, Q]``; default: none.
        threads: as for :func:`argmax`.
        out: as for :func:`verify`.

    Returns:
        ``(selected[B, Q], accepted[B])``, int32 on the device of ``query_lens``. ``selected`` is -1 past ``accepted[r]``.

    Raises:
        TypeError: not a tensor, or a dtype that is not supported.
        ValueError: shapes, strides, devices, counts or streams that do not fit. Nothing has been written then.

    Example::

        >>> certain = torch.tensor([[[-float("inf"), 0.0], [0.0, -float("inf")]]])  # 1, then 0
        >>> noise = Noise(torch.tensor([7]), torch.tensor([0]), torch.tensor([1.0]))
        >>> two = torch.tensor([2], dtype=torch.int32)
        >>> rejection_sample(certain, torch.tensor([[5, 1]]), two, two - 1, None, noise)
        (tensor([[1, 0]], dtype=torch.int32), tensor([1], dtype=torch.int32))
    """
    check_streams(streams)
    streams = Streams(*streams)
    flat = *arguments.fields(noise)[:4], 0
    batch, width, _, native = arguments.check_logits(logits)
    device = logits.device
    query_lens, num_draft_tokens, drawn = _verify_arguments(logits, tokens, query_lens, num_draft_tokens, flat, device)
    if drawn is None:
        raise TypeError("noise.seeds must be a tensor, got NoneType")
    scale, bars = _draft_arguments(logits, draft_logits, draft_inv_temperature, draft_cutoff)
    drafts = _NO_DRAFT if draft_logits is None else arguments.check_logits(draft_logits, "draft_logits")[3]
    selected, accepted = arguments.results(out, query_lens, batch, width)
    if native is not None and drafts is not None:
        arguments.native.rejection_sample(
            *_native_arguments(native, tokens, (query_lens, num_draft_tokens), (selected, accepted), threads),
            *arguments.addresses(drawn)[:4],
            streams.accept,
            streams.residual,
            drafts[0],
            drafts[1],
            drafts[5],
            drafts[6],
            (drawn[2] if scale is None else scale).data_ptr(),
            arguments.address(bars),
        )
        return selected, accepted
    arguments.check_count_values(query_lens, num_draft_tokens, width)
    arguments.check_noise_values(drawn, arguments.busy_rows(query_lens), width)
    if scale is not None:
        arguments.check_noise_values(
            (drawn[0], drawn[1], scale, None, 0), arguments.busy_rows(query_lens), width, "draft_inv_temperature"
        )
    both = logits if draft_logits is None or draft_logits.dtype is not FLOAT64 else draft_logits
    kernels = dispatch.kernels(both)
    if kernels is None:
        found = reference.rejection_sample(
            logits,
            tokens,
            query_lens,
            num_draft_tokens,
            draft_logits,
            Noise(*drawn),
            streams=streams,
            draft_inv_temperature=scale,
            draft_cutoff=bars,
        )
    else:
        found = kernels.rejection_sample(
            logits,
            tokens,
            query_lens.to(device),
            num_draft_tokens.to(device),
            draft_logits,
            arguments.moved(drawn, device),
            streams=streams,
            draft_inv_temperature=None if scale is None else scale.to(device),
            draft_cutoff=None if bars is None else bars.to(device),
            out=(selected, accepted) if selected.device == device else None,
            exact=True,
        )
    return arguments.write_to(found, selected, accepted)


def _draft_arguments(
    logits: Tensor, draft_logits: Tensor | None, draft_inv_temperature: Any, draft_cutoff: Any
) -> tuple[Tensor | None, Tensor | None]:
    """Check the draft's temperatures, cutoffs and logits."""
    batch, width, _ = logits.shape
    device = logits.device
    if draft_logits is not None:
        arguments.check_logits(draft_logits, "draft_logits")
        if draft_logits.shape != logits.shape or draft_logits.device != device:
            raise ValueError(
                f"draft_logits are {tuple(draft_logits.shape)} on {draft_logits.device}, "
                f"logits {tuple(logits.shape)} on {device}"
            )
    scale, bars = draft_inv_temperature, draft_cutoff
    return (
        None if scale is None else arguments.per_row("draft_inv_temperature", scale, (batch,), device),
        None if bars is None else arguments.per_row("draft_cutoff", bars, (batch, width), device),
    )


_NO_DRAFT = (0,) * 7  # stands for missing draft logits, in the form of arguments.check_logits()
