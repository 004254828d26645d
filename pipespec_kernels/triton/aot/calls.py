"""The calls whose kernels are compiled ahead of time: those that a process serving a model makes, with tensors on the meta device.

The arguments are those that :mod:`pipespec_kernels.ops` passes on: dtypes, strides and which of the optional ones are there. Triton derives from them
which variants there are.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipespec_kernels import triton as kernels
from pipespec_kernels.noise import Noise
from pipespec_kernels.triton import Workspace

BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64)
WIDTHS = tuple(range(1, 18))
PREFILLS = (32, 64, 128)
"""Columns in which a prompt is fed. More need no other kernel: a tile has no more than 128 pairs of a column and a head."""
CAPACITIES = (16, 4096)
"""Positions of the storage: short ones are read by one block of threads, whose kernel is another."""
FILTERS = (("top_k",), ("top_p",), ("top_k", "top_p"), ("min_p",))
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_FILTER_DTYPES = {"top_k": torch.int64, "top_p": torch.float64, "min_p": torch.float64}


@dataclass(frozen=True)
class Model:
    """What the kernels depend on of a model.

    Attributes:
        name: for messages.
        hidden, intermediate, heads, kv_heads, dim, vocab: sizes; ``dim``: of a head.
        activation: one of those of :func:`pipespec_kernels.ops.silu_mul`.
        norms: whether queries and keys are normalised.
        windowed: whether some layers see the last positions only.
    """

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    dim: int
    vocab: int = 128256
    activation: str = "silu"
    norms: bool = False
    windowed: bool = False


DEFAULT = (Model("Llama-3.2-1B", 2048, 8192, 32, 8, 64), Model("Llama-3.1-8B", 4096, 14336, 32, 8, 128))


def read_config(path: Path) -> Model:
    """The model of a ``config.json``, or of the folder that has one.

    Raises:
        ValueError: it cannot be read, or is not of a family that is compiled ahead of time.
    """
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text())
        family = config["model_type"]
        if family not in _FAMILIES:
            raise ValueError(f"model_type is {family!r}; models of these types are compiled: {', '.join(_FAMILIES)}")
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        slides = config.get("use_sliding_window", family == "mistral")
        return Model(
            str(path),
            hidden,
            config["intermediate_size"],
            heads,
            config.get("num_key_value_heads") or heads,
            config.get("head_dim") or hidden // heads,
            config["vocab_size"],
            {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}[config.get("hidden_act", "silu")],
            norms=family == "qwen3",
            windowed=bool(slides and config.get("sliding_window")),
        )
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not the config.json of a model: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Workload:
    """What a process serves.

    Attributes:
        models: of the chain, drafts and target.
        dtype: of their weights and logits.
        batches, widths: rows, and columns of a step.
    """

    models: tuple[Model, ...] = DEFAULT
    dtype: torch.dtype = torch.bfloat16
    batches: tuple[int, ...] = BATCHES
    widths: tuple[int, ...] = WIDTHS


def serve(workload: Workload) -> None:
    """Make all calls of a workload once. A chain that penalises has float32 logits, so they are among the calls."""
    dtype = workload.dtype
    with torch.device("meta"), torch.no_grad():
        for batch, width in itertools.product(workload.batches, workload.widths):
            for vocab in sorted({model.vocab for model in workload.models}):
                for dtype_of_logits in {dtype, torch.float32}:
                    _select(batch, width, vocab, dtype_of_logits)
                _penalize(batch, width, vocab)
            for model in workload.models:
                _mix(model, batch * width, dtype)
        for batch, width in itertools.product(workload.batches, (*workload.widths, *PREFILLS)):
            for model, capacity in itertools.product(workload.models, CAPACITIES):
                if capacity >= width:
                    _attend(model, batch, width, capacity, dtype)


def _rows(batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Lengths, ``query_lens`` and ``num_draft_tokens``: rows of one buffer, so that they are not aligned."""
    _, lengths, query_lens, num_draft_tokens = torch.empty((4, batch), dtype=torch.int32).unbind()
    return lengths, query_lens, num_draft_tokens


def _filters(batch: int) -> Iterator[dict[str, Any]]:
    for names in FILTERS:
        yield {name: torch.empty(batch, dtype=_FILTER_DTYPES[name]) for name in names}


def _select(batch: int, width: int, vocab: int, dtype: torch.dtype) -> None:
    logits = torch.empty((batch, width, vocab), dtype=dtype)
    tokens = torch.empty((batch, width), dtype=torch.int32)
    lengths, query_lens, num_draft_tokens = _rows(batch)
    counts = query_lens, num_draft_tokens
    scale, bars = torch.empty(batch), torch.empty((batch, width))
    seeds, undrawn = torch.empty((2, batch), dtype=torch.int64).unbind()
    out = torch.empty((batch, width), dtype=torch.int32), torch.empty(batch, dtype=torch.int32)
    options: dict[str, Any] = {"workspace": Workspace(batch, width, "meta"), "exact": True, "check_counts": False}
    kernels.select(logits, out=out[0])
    kernels.verify(logits, tokens, *counts, out=out, **options)
    for filters in _filters(batch):
        kernels.cutoff(
            logits, inv_temperature=scale, query_lens=query_lens, num_draft_tokens=num_draft_tokens, out=bars, **filters
        )
    for cutoff in (None, bars):
        # A captured step adds nothing to its int32 lengths. Otherwise positions come from the host.
        for positions, offset in ((lengths, 1), (lengths.long(), 0)):
            noise = Noise(seeds, positions, scale, cutoff, offset=offset)
            for noted in (None, undrawn):  # of a draft, of the target
                kernels.verify(logits, tokens, *counts, noise=noise, undrawn=noted, out=out, **options)
        kernels.logprobs(logits, out[0], *counts, scale, cutoff, 1)
    kernels.logprobs(logits, out[0], *counts, None, None, 1)


def _penalize(batch: int, width: int, vocab: int) -> None:
    _, query_lens, num_draft_tokens = _rows(batch)
    numbers = torch.empty((3, batch)).unbind()
    history = torch.empty((batch, 4096), dtype=torch.int32)
    workspace = torch.empty(batch * width * vocab, dtype=torch.int32)
    prompts = torch.empty(batch, dtype=torch.int32)
    kernels.penalize(
        torch.empty((batch, width, vocab)),
        torch.empty((batch, width), dtype=torch.int32),
        history,
        torch.empty(batch, dtype=torch.int32),
        (*numbers, prompts, None, None),
        query_lens,
        num_draft_tokens,
        None,
        workspace,
    )


def _attend(model: Model, batch: int, width: int, capacity: int, dtype: torch.dtype) -> None:
    heads, kv, dim = model.heads, model.kv_heads, model.dim
    packed = torch.empty((batch, width, heads + 2 * kv, dim), dtype=dtype).transpose(1, 2)
    queries, keys, values = packed.split((heads, kv, kv), 1)
    k_cache, v_cache = torch.empty((2, batch, kv, capacity, dim), dtype=dtype).unbind()
    cos, sin = torch.empty((2, capacity, dim), dtype=dtype).unbind()
    lengths = torch.empty(batch, dtype=torch.int32)
    norm = torch.empty(dim, dtype=dtype) if model.norms else None
    turned = kernels.rope_append(queries, keys, values, cos, sin, k_cache, v_cache, lengths, q_norm=norm, k_norm=norm)
    kernels.kv_append(keys, values, k_cache, v_cache, lengths)
    out = torch.empty((batch, width, heads, dim), dtype=dtype).transpose(1, 2)
    workspace = torch.empty(2 * batch * kv, dtype=torch.int32)
    for window in (None, 16) if model.windowed else (None,):
        for invariant in (False, True):
            options: dict[str, Any] = {"invariant": invariant, "window": window, "out": out, "workspace": workspace}
            kernels.verify_attention(turned, k_cache, v_cache, lengths, **options)


def _mix(model: Model, rows: int, dtype: torch.dtype) -> None:
    x, residual, out, total = torch.empty((4, rows, model.hidden), dtype=dtype).unbind()
    weight = torch.empty(model.hidden, dtype=dtype)
    kernels.add_rms_norm(x, None, weight, 1e-5, False, None, out, None)
    kernels.add_rms_norm(x, residual, weight, 1e-5, False, None, out, total)
    gate_up = torch.empty((rows, 2 * model.intermediate), dtype=dtype)
    kernels.silu_mul(gate_up, model.activation, torch.empty((rows, model.intermediate), dtype=dtype))
