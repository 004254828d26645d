"""Kernel cases over logits ``[B, Q, V]``: selection and verification.

On a GPU the kernels themselves are measured, in the fast form of their noise. Rivals are the same in eager torch: a draw is by ``multinomial``, on a GPU by
an exponential race. Others are in ``bench/rivals.py``. Bytes are those of the logits once.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench import rivals as others
from bench.kernel_timing import Benchmark, Call, KernelCase, Shape, logits_bytes, normal
from pipespec_kernels import ops
from pipespec_kernels.noise import Noise


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


def make_select(device: str, shape: Shape, dtype: torch.dtype, copies: int) -> KernelCase:
    """The likeliest token of every column."""
    logits = normal((copies, *shape), dtype, device)
    choose = implementation(device, shape)[1]
    eager: dict[str, Call] = {"eager": lambda i: logits[i].argmax(-1)}
    return KernelCase(logits_bytes(shape, dtype), lambda i: choose(logits[i], None), eager)


def implementation(device: str, shape: Shape) -> tuple[Callable[..., Any], Callable[..., Tensor]]:
    """``verify``, and the choice of every column; on a GPU with the work space that they take."""
    if device != "cuda":
        return ops.verify, lambda x, noise: ops.argmax(x) if noise is None else ops.sample(x, noise)
    from pipespec_kernels import triton

    space = {"workspace": triton.Workspace(*shape[:2], device)}
    return functools.partial(triton.verify, **space), lambda x, noise: triton.select(x, noise=noise, **space)


def eager_verify(choice: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Verification in plain torch, for rows of full width in which all tokens but the first are draft tokens."""
    accepted = (choice[:, :-1] == tokens[:, 1:]).int().cumprod(1).sum(1)
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    return torch.where(columns <= accepted[:, None], choice, -1), accepted


def make_verify(coupled: bool, device: str, shape: Shape, dtype: torch.dtype, copies: int) -> KernelCase:
    """Verification with all draft tokens right, so that every row is read."""
    batch, width, _ = shape
    logits, scale = normal((copies, *shape), dtype, device), torch.ones(batch, device=device)
    seeds = torch.arange(batch, device=device)
    noise = Noise(seeds, seeds * 100, scale) if coupled else None
    tokens = torch.zeros((copies, batch, width), dtype=torch.int64, device=device)
    query_lens = torch.full((batch,), width, dtype=torch.int32, device=device)
    verify, choose = implementation(device, shape)

    def ours(i: int) -> Any:
        return verify(logits[i], tokens[i], query_lens, query_lens - 1, noise=noise)

    for i in range(copies):
        tokens[i, :, 1:] = choose(logits[i], noise)[:, :-1]
    assert ours(0)[1].tolist() == [width - 1] * batch
    eager = eager_argmax if not coupled else race if device == "cuda" else multinomial
    rivals: dict[str, Call] = {"eager": lambda i: eager_verify(eager(logits[i], scale), tokens[i])}
    if device == "cuda":
        rivals |= others.samplers(logits, tokens, coupled)
    return KernelCase(logits_bytes(shape, dtype), ours, rivals)


BENCHMARKS = [
    Benchmark("argmax", make_select),
    Benchmark("verify greedy", functools.partial(make_verify, False)),
    Benchmark("verify coupled", functools.partial(make_verify, True)),
]
