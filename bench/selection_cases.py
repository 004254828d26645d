"""Kernel cases over logits ``[B, Q, V]``: selection, verification, rejection sampling, thresholds and log-probabilities.

On a GPU the kernels themselves are measured, in the fast form of their noise. Rivals are the same in eager torch: a draw is by ``multinomial``, on a GPU by
an exponential race. Bytes are those of the logits once, unless a case says otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.kernel_timing import Benchmark, KernelCase, Shape, logits_bytes, normal, rivals
from pipespec_kernels import ops
from pipespec_kernels.noise import DRAFT, Noise


def race(logits: Tensor, scale: Tensor) -> Tensor:
    """A draw in every column as samplers on a GPU do it, without a wait for the device."""
    p = torch.softmax(logits.float() * scale[:, None, None], -1)
    return (p / torch.empty_like(p).exponential_()).argmax(-1)


def multinomial(logits: Tensor, scale: Tensor) -> Tensor:
    """A draw in every column as samplers in torch do it on the CPU."""
    p = torch.softmax(logits.float() * scale[:, None, None], -1)
    return torch.multinomial(p.flatten(0, 1), 1).view(logits.shape[:2])


def eager_argmax(logits: Tensor, scale: Tensor) -> Tensor:
    return logits.argmax(-1)


def _choice(device: str, sampled: bool) -> Callable[[Tensor, Tensor], Tensor]:
    return eager_argmax if not sampled else race if device == "cuda" else multinomial


def _noise(batch: int, device: str, **stream: int) -> Noise:
    seeds = torch.arange(batch, device=device)
    return Noise(seeds, seeds * 100, torch.ones(batch, device=device), **stream)


def _full_rows(batch: int, width: int, device: str) -> tuple[Tensor, Tensor]:
    """Query lengths and numbers of draft tokens where all tokens but the first are draft tokens."""
    query_lens = torch.full((batch,), width, dtype=torch.int32, device=device)
    return query_lens, query_lens - 1


def _implementation(device: str, batch: int, width: int) -> tuple[Any, dict[str, Any], Callable[..., Tensor]]:
    """What has ``verify`` and ``rejection_sample``, the work space that they take on a GPU, and the choice of every column."""
    if device == "cuda":
        from pipespec_kernels import triton

        space = {"workspace": triton.Workspace(batch, width, device)}
        return triton, space, lambda x, noise: triton.select(x, noise=noise, **space)
    return ops, {}, lambda x, noise: ops.argmax(x) if noise is None else ops.sample(x, noise)


def make_select(sampled: bool, device: str, quick: bool, shape: Shape, dtype: torch.dtype, copies: int) -> KernelCase:
    """A choice in every column, greedy or coupled."""
    batch, width, _ = shape
    logits, noise = normal((copies, *shape), dtype, device), _noise(batch, device)
    choose, drawn = _implementation(device, batch, width)[2], noise if sampled else None
    calls = rivals(device, quick, _choice(device, sampled), lambda i: (logits[i], noise.inv_temperature))
    return KernelCase(logits_bytes(shape, dtype), lambda i: choose(logits[i], drawn), calls)


@functools.cache
def eager_verify(choose: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Verification in plain torch, for rows of full width in which all tokens but the first are draft tokens."""

    def verify(logits: Tensor, tokens: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        choice = choose(logits, scale)
        accepted = (choice[:, :-1] == tokens[:, 1:]).int().cumprod(1).sum(1)
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        return torch.where(columns <= accepted[:, None], choice, -1), accepted

    return verify


def make_verify(coupled: bool, device: str, quick: bool, shape: Shape, dtype: torch.dtype, copies: int) -> KernelCase:
    """Verification with all draft tokens right, so that every row is read."""
    batch, width, _ = shape
    logits, scale = normal((copies, *shape), dtype, device), torch.ones(batch, device=device)
    noise = _noise(batch, device) if coupled else None
    tokens = torch.zeros((copies, batch, width), dtype=torch.int64, device=device)
    lengths = _full_rows(batch, width, device)
    run, space, choose = _implementation(device, batch, width)

    def ours(i: int) -> Any:
        return run.verify(logits[i], tokens[i], *lengths, noise=noise, **space)

    for i in range(copies):
        tokens[i, :, 1:] = choose(logits[i], noise)[:, :-1]
    assert ours(0)[1].tolist() == [width - 1] * batch
    eager = eager_verify(_choice(device, coupled))
    calls = rivals(device, quick, eager, lambda i: (logits[i], tokens[i], scale))
    return KernelCase(logits_bytes(shape, dtype), ours, calls)


def eager_rejection(logits: Tensor, draft: Tensor, tokens: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    """Rejection sampling in plain torch, for rows of full width in which all tokens but the first are draft tokens."""
    p = torch.softmax(logits.float() * scale[:, None, None], -1)
    q = torch.softmax(draft.float() * scale[:, None, None], -1)
    p_draft_token, q_draft_token = (x[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0] for x in (p, q))
    accepted = (torch.rand_like(p_draft_token) * q_draft_token < p_draft_token).int().cumprod(1).sum(1)
    here = accepted[:, None, None].expand(-1, 1, p.shape[-1])
    residual = (p.gather(1, here) - q.gather(1, here)).clamp(min=0)[:, 0]
    # Without q: behind the last draft token, and where the residual is empty.
    whole = (accepted == tokens.shape[1] - 1)[:, None] | (residual.sum(-1, keepdim=True) <= 0)
    residual = torch.where(whole, p.gather(1, here)[:, 0], residual)
    drawn = (residual / torch.empty_like(residual).exponential_()).argmax(-1)
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    selected = torch.where(columns < accepted[:, None], tokens.roll(-1, 1), -1)
    return selected.scatter(1, accepted[:, None], drawn[:, None]), accepted


def flashinfer_chain() -> Callable[..., object] | None:
    """FlashInfer's kernel with the two softmaxes that it needs before it; None where it is not installed."""
    try:
        from flashinfer.sampling import chain_speculative_sampling
    except ImportError:
        return None

    def chain(logits: Tensor, draft: Tensor, tokens: Tensor, scale: Tensor) -> object:
        p = torch.softmax(logits.float() * scale[:, None, None], -1)
        q = torch.softmax(draft[:, :-1].float() * scale[:, None, None], -1)
        return chain_speculative_sampling(q, tokens[:, 1:].int(), p)

    return chain


def make_rejection(device: str, quick: bool, shape: Shape, dtype: torch.dtype, copies: int) -> KernelCase:
    """Rejection sampling with a drawn draft token in every column but the first.

    FlashInfer's ``chain_speculative_sampling`` is a rival where it is installed. Bytes: both models' rows of all draft tokens once, and the pair of
    rows that is drawn from, once more.
    """
    batch, width, vocab = shape
    logits = normal((copies, *shape), dtype, device)
    draft = normal((copies, *shape), dtype, device).add_(logits)
    noise = _noise(batch, device)
    # Draft tokens as the draft draws them, so that they are accepted as often as in a run.
    drawing = _noise(batch, device, stream=DRAFT)
    tokens = torch.zeros((copies, batch, width), dtype=torch.int64, device=device)
    for i in range(copies):
        tokens[i, :, 1:] = ops.sample(draft[i], drawing)[:, :-1]
    lengths = _full_rows(batch, width, device)
    run, space, _ = _implementation(device, batch, width)

    def ours(i: int) -> object:
        return run.rejection_sample(logits[i], tokens[i], *lengths, draft[i], noise, **space)

    def arguments(i: int) -> tuple[Tensor, ...]:
        return logits[i], draft[i], tokens[i], noise.inv_temperature

    calls = rivals(device, quick, eager_rejection, arguments)
    chain = flashinfer_chain() if device == "cuda" else None
    if chain is not None:
        calls["flashinfer"] = lambda i: chain(*arguments(i))
    nbytes = batch * (2 * (width - 1) + 2) * vocab * dtype.itemsize
    return KernelCase(nbytes, ours, calls if width > 1 else {})


TOP_K, TOP_P, TOP_N = 50, 0.9, 5


def eager_cutoff(logits: Tensor, scale: Tensor) -> Tensor:
    """The smallest kept logit of each row, by sorting."""
    x = logits.float().sort(-1, descending=True).values
    weights = torch.where(x >= x[..., TOP_K - 1 : TOP_K], torch.softmax(x * scale[:, None, None], -1), 0.0)
    sums = weights.cumsum(-1)
    last = (sums < TOP_P * sums[..., -1:]).sum(-1, keepdim=True).clamp(max=x.shape[-1] - 1)
    return x.gather(-1, last)[..., 0]


def make_cutoff(device: str, quick: bool, shape: Shape, dtype: torch.dtype, copies: int) -> KernelCase:
    """The threshold of top-k and top-p together. What the search reads again comes from a cache and does not count."""
    logits = normal((copies, *shape), dtype, device).mul_(3)
    scale, out = torch.ones(shape[0], device=device), torch.empty(shape[:2], device=device)
    cutoff, k, p = ops.cutoff, TOP_K, TOP_P
    if device == "cuda":
        from pipespec_kernels.triton import cutoff

        k, p = torch.full_like(scale, TOP_K, dtype=torch.int32), torch.full_like(scale, TOP_P)
    return KernelCase(
        logits_bytes(shape, dtype),
        lambda i: cutoff(logits[i], inv_temperature=scale, top_k=k, top_p=p, out=out),
        rivals(device, quick, eager_cutoff, lambda i: (logits[i], scale)),
    )


def eager_logprobs(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    every = logits.float().log_softmax(-1)
    top, top_ids = every.topk(TOP_N, -1)
    return every.gather(-1, ids[..., None])[..., 0], top_ids, top


def make_logprobs(device: str, quick: bool, shape: Shape, dtype: torch.dtype, copies: int) -> KernelCase:
    """Log-probabilities of one token per column and of the likeliest ones."""
    batch, width, vocab = shape
    logits = normal((copies, *shape), dtype, device).mul_(3)
    ids = torch.randint(vocab, (batch, width), device=device)
    selected, lengths = ids.int(), _full_rows(batch, width, device)
    return KernelCase(
        logits_bytes(shape, dtype),
        lambda i: ops.logprobs(logits[i], selected, *lengths, top_n=TOP_N),
        rivals(device, quick, eager_logprobs, lambda i: (logits[i], ids)),
    )


BENCHMARKS = [
    Benchmark("argmax", functools.partial(make_select, False)),
    Benchmark("sample", functools.partial(make_select, True)),
    Benchmark("verify greedy", functools.partial(make_verify, False)),
    Benchmark("verify coupled", functools.partial(make_verify, True)),
    Benchmark("rejection_sample", make_rejection, input_bytes=lambda shape, dtype: 2 * logits_bytes(shape, dtype)),
    Benchmark("cutoff", make_cutoff),
    Benchmark("logprobs", make_logprobs),
]
