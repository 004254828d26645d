"""Calls of the operations with arguments that do not fit: each works, or says in a message of its own what was wrong, and has written nothing."""

import copy
import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

from pipespec_kernels import ops
from tests.trials import trials

B, Q, V = 2, 3, 8
HEADS, KV_HEADS, SLOTS, SIZE = 4, 2, 16, 8


def _logits() -> torch.Tensor:
    return torch.randn(B, Q, V)


def _tokens() -> torch.Tensor:
    return torch.randint(0, V, (B, Q))


def _counts() -> dict[str, torch.Tensor]:
    return {
        "query_lens": torch.full((B,), Q, dtype=torch.int32),
        "num_draft_tokens": torch.full((B,), Q - 1, dtype=torch.int32),
    }


def _noise() -> ops.Noise:
    return ops.Noise(torch.arange(B), torch.arange(B), torch.ones(B))


def _storage() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(B, KV_HEADS, SLOTS, SIZE) for name in ("k_cache", "v_cache")}


def _new() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(B, KV_HEADS, Q, SIZE) for name in ("keys", "values")}


def _lengths(value: int = 4) -> torch.Tensor:
    return torch.full((B,), value, dtype=torch.int32)


CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "argmax": lambda: {"logits": _logits(), "threads": 1, "out": torch.empty(B, Q, dtype=torch.int32)},
    "sample": lambda: {"logits": _logits(), "noise": _noise(), "threads": 1, "out": None},
    "cutoff": lambda: {
        "logits": _logits(), "inv_temperature": 1.0, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "threads": 1, "out": None, **_counts(),
    },
    "verify": lambda: {
        "logits": _logits(), "tokens": _tokens(), "noise": _noise(), "threads": 1, "out": None, "workspace": None, "invalid_positions": None, **_counts(),
    },
    "rejection_sample": lambda: {
        "logits": _logits(), "tokens": _tokens(), "draft_logits": torch.randn(B, Q, V), "noise": _noise(), "threads": 1, "out": None,
        "streams": ops.Streams(), "draft_inv_temperature": None, "draft_cutoff": None, **_counts(),
    },
    "penalize": lambda: {
        "logits": _logits(), "tokens": _tokens(), "history": torch.zeros(B, 16, dtype=torch.int32), "lengths": _lengths(),
        "penalties": ops.Penalties(torch.full((B,), 1.2), torch.zeros(B), torch.zeros(B), _lengths(2)), "bitmask": None, "workspace": None,
        **_counts(),
    },
    "prompt_lookup": lambda: {
        "tokens": _tokens().int(), "n_select": _lengths(1), "history": torch.zeros(B, 16, dtype=torch.int32), "lengths": _lengths(), "count": 2,
        "min_match": 1, "max_match": 3, "corpus": torch.zeros(5, dtype=torch.int32), "out": None, "workspace": None, **_counts(),
    },
    "kv_append": lambda: {**_new(), **_storage(), "lengths": _lengths(), "n_new": _lengths(2), "check_counts": True},
    "verify_attention": lambda: {
        "q": torch.randn(B, HEADS, Q, SIZE), **_storage(), "lengths": _lengths(), "query_lens": _lengths(2), "scale": 1.0, "invariant": False,
        "out": None, "check_counts": True, "workspace": None, "window": None, "softcap": None,
    },
    "add_rms_norm": lambda: {
        "x": torch.randn(B, SIZE), "residual": torch.randn(B, SIZE), "weight": torch.ones(SIZE), "eps": 1e-6, "one_plus_weight": False,
        "bias": None, "out": None, "residual_out": None,
    },
    "silu_mul": lambda: {"gate_up": torch.randn(B, 2 * SIZE), "activation": "silu", "out": None},
    "rope_append": lambda: {
        "q": torch.randn(B, HEADS, Q, SIZE), **_new(), "cos": torch.ones(20, SIZE), "sin": torch.ones(20, SIZE), **_storage(),
        "lengths": _lengths(), "n_new": _lengths(2), "positions": None, "q_norm": None, "k_norm": None, "eps": 1e-6, "one_plus_weight": False,
        "out": None, "check_counts": True,
    },
    "linear_small": lambda: {
        "x": torch.randn(B, SIZE), "weight": torch.randn(6, SIZE), "bias": torch.ones(6), "norm": torch.ones(SIZE), "eps": 1e-6, "one_plus_weight": False,
        "activation": None, "residual": torch.ones(B, 6), "query_lens": _lengths(1), "out": None,
    },
    "experts_small": lambda: {
        "x": torch.randn(B, SIZE), "weight": torch.randn(6, SIZE), "chosen": torch.tensor([[2, 0], [1, 2]])[:B], "bias": torch.ones(6), "experts": 3,
        "shares": torch.ones(B, 2),
    },
    "qkv_append": lambda: {
        "x": torch.randn(B, Q, SIZE), "weight": torch.randn((HEADS + 2 * KV_HEADS) * SIZE, SIZE), "bias": None, "cos": torch.ones(20, SIZE),
        "sin": torch.ones(20, SIZE), **_storage(), "lengths": _lengths(), "query_lens": _lengths(2), "norm": None, "eps": 1e-6, "one_plus_weight": False, "out": None, "check_counts": True,
    },
}  # fmt: skip
"""Per operation, arguments that fit."""

OUTS: dict[str, Callable[[], dict[str, Any]]] = {
    **dict.fromkeys(("argmax", "sample", "prompt_lookup"), lambda: {"out": torch.full((B, Q), -7, dtype=torch.int32)}),
    "cutoff": lambda: {"out": torch.full((B, Q), -7.0)},
    **dict.fromkeys(
        ("verify", "rejection_sample"),
        lambda: {"out": (torch.full((B, Q), -7, dtype=torch.int32), torch.full((B,), -7, dtype=torch.int32))},
    ),
    **dict.fromkeys(
        ("verify_attention", "rope_append", "qkv_append"), lambda: {"out": torch.full((B, HEADS, Q, SIZE), -7.0)}
    ),
    "add_rms_norm": lambda: {"out": torch.full((B, SIZE), -7.0), "residual_out": torch.full((B, SIZE), -7.0)},
    "silu_mul": lambda: {"out": torch.full((B, SIZE), -7.0)},
    "linear_small": lambda: {"out": torch.full((B, 6), -7.0)},
}
META, STORAGE, TABLE = torch.device("meta"), torch.zeros(B, KV_HEADS, SLOTS, SIZE), torch.ones(20, SIZE)
NEW, ONE_PLACE = torch.ones(B, KV_HEADS, Q, SIZE), torch.zeros(1, KV_HEADS, SLOTS, SIZE).expand(STORAGE.shape)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


OF_LOGITS = [
    (TypeError, "must be a tensor", {"logits": np.zeros((1, 1, 2), np.float32)}),
    (ValueError, r"\[B, Q, V\]", {"logits": torch.zeros(2, 3)}),
    (ValueError, "vocabulary", {"logits": torch.zeros(B, Q, 0)}),
    (TypeError, "int64", {"logits": torch.zeros(B, Q, V, dtype=torch.int64)}),
    (ValueError, "contiguous along the vocabulary", {"logits": torch.zeros(B, V, Q).transpose(1, 2)}),
]
OF_NOISE = [
    (TypeError, "noise must be a Noise", {"noise": {"seeds": 1}}),
    (TypeError, "noise.seeds must be a tensor or numpy array of int64", {"noise.seeds": 1}),
    (ValueError, "row 1: positions must not be negative, is -4", {"noise.positions": torch.tensor([3, -4])}),
    (ValueError, "row 1: inv_temperature", {"noise.inv_temperature": torch.tensor([1.0, math.inf])}),
    (ValueError, "row 0: inv_temperature", {"noise.inv_temperature": torch.tensor([math.nan, 1.0])}),
    (ValueError, r"noise.cutoff must be \[2, 3\]", {"noise.cutoff": torch.zeros(2, 4)}),
    (ValueError, "noise.stream must be a number of 32 bits", {"noise.stream": -1}),
    (TypeError, "noise.stream must be an integer", {"noise.stream": None}),
]
OF_COUNTS = [
    (TypeError, "query_lens must be int32", {"query_lens": torch.tensor([3, 2])}),
    (ValueError, "on the CPU", {"num_draft_tokens": int32(1, 0).to(META)}),
    (ValueError, "row 0.*query_lens=4", {"query_lens": int32(4, 3)}),
    (ValueError, "row 1.*num_draft_tokens(=| must be smaller)", {"num_draft_tokens": int32(2, 3)}),
]
OF_TOKENS = [
    (TypeError, "tokens must be int64", {"tokens": torch.zeros(B, Q)}),
    (ValueError, "tokens are on meta", {"tokens": torch.zeros(B, Q, dtype=torch.int64, device=META)}),
    (TypeError | ValueError, r"out\[1\] must be", {"out": (torch.zeros(B, Q).int(), torch.zeros(3).int())}),
    (TypeError | ValueError, r"out\[0\] must be", {"out": (torch.zeros(Q, B).int().t(), torch.zeros(B).int())}),
]
OF_STORAGE = [
    (TypeError, "k_cache must be a tensor, got list", {"k_cache": [1]}),
    (ValueError, "v_cache must have shape", {"v_cache": STORAGE[:, :1]}),
    (ValueError, "contiguous in its last", {"k_cache": torch.zeros(B, KV_HEADS, SIZE, SLOTS).transpose(2, 3)}),
    (TypeError, "lengths must be int32 or int64", {"lengths": torch.ones(B)}),
    (ValueError, r"row 1: lengths is \d+, and [23] more", {"lengths": int32(4, 15)}),
    (ValueError, "row 1: lengths is -1", {"lengths": int32(4, -1)}),
    (ValueError, "row 1: lengths is", {"lengths": torch.tensor([4, 2**62])}),
]
OF_APPEND = [
    (ValueError, "must not be expanded", {"v_cache": ONE_PLACE}),
    (ValueError, "n_new must be on cpu", {"n_new": int32(2, 2).to(META)}),
    (ValueError, "row 1: need 0 <= n_new <= 3, is 4", {"n_new": int32(3, 4)}),
    (ValueError, "row 0: lengths is 14, and 3 more", {"lengths": int32(14, 4), "n_new": None}),
]
REFUSED: dict[str, list[tuple[Any, str, dict[str, Any]]]] = {
    "argmax": [*OF_LOGITS, (ValueError, "threads", {"threads": 0}), (TypeError, r"threads must be an integer, got 1\.5", {"threads": 1.5})],
    "sample": [*OF_LOGITS[:2], *OF_NOISE],
    "verify": [*OF_LOGITS[3:], *OF_NOISE, *OF_COUNTS, *OF_TOKENS],
    "rejection_sample": [
        *OF_COUNTS,
        *OF_TOKENS,
        (ValueError, "draft_logits are", {"draft_logits": torch.zeros(B, Q - 1, V)}),
        (ValueError, "draft_logits must be contiguous", {"draft_logits": torch.zeros(B, V, Q).transpose(1, 2)}),
        (TypeError, "draft_logits must be float32", {"draft_logits": torch.zeros(B, Q, V).long()}),
        (ValueError, "streams must be three different", {"streams": ops.Streams(1, 2, 1)}),
        (TypeError, "streams must be Streams of three integers", {"streams": (1.5, 2, 3)}),
        (ValueError, "row 1: draft_inv_temperature must be", {"draft_inv_temperature": torch.tensor([1.0, math.nan])}),
        (ValueError, "draft_cutoff must be", {"draft_cutoff": torch.zeros(1, Q)}),
    ],
    "cutoff": [
        (ValueError, "row 0", {"top_k": -1}),
        (TypeError, "integer", {"top_k": 1.5}),
        (ValueError, "row 1", {"top_p": torch.tensor([0.5, 1.5])}),
        (ValueError, r"top_p must be a number or \[2\]", {"top_p": torch.tensor([0.5])}),
        (ValueError, "row 0", {"min_p": -0.1}),
        (ValueError, "row 0", {"inv_temperature": math.inf}),
        (ValueError, "together", {"num_draft_tokens": None}),
        (TypeError, "out must be a float32", {"out": torch.zeros(B, Q, dtype=torch.int32)}),
    ],
    "logprobs": [
        (TypeError, "selected must be a tensor of int32, got torch.float32", {"selected": torch.zeros(B, Q)}),
        (ValueError, r"selected is \(2, 2\), but logits", {"selected": torch.zeros(B, 2, dtype=torch.int32)}),
        (ValueError, "top_n must be 0 .. 8", {"top_n": 9}),
        (ValueError, "top_n must be 0 .. 8", {"top_n": -1}),
        (ValueError, "row 0: need .*query_lens=9", {"query_lens": int32(9, 3)}),
        (ValueError, r"inv_temperature must be \[2\]", {"inv_temperature": torch.ones(1)}),
        (TypeError, "cutoff must be float32", {"cutoff": torch.ones(B, Q, dtype=torch.float64)}),
    ],
    "penalize": [
        (TypeError, "must be float32", {"logits": torch.zeros(B, Q, V, dtype=torch.bfloat16)}),
        (TypeError, "history must be a tensor of torch.int32", {"history": torch.zeros(B, 9, dtype=torch.int64)}),
        (ValueError, r"row 0: lengths must be 0 .. 16, is 17", {"lengths": int32(17, 4)}),
        (ValueError, r"bitmask must be contiguous \[2, 3, 1\]", {"bitmask": torch.zeros(B, Q, 2, dtype=torch.int32)}),
        (ValueError, "go together", {"num_draft_tokens": None}),
        (ValueError, "finite and positive, is 0", {"penalties": ops.Penalties(repetition=torch.zeros(B))}),
        (ValueError, "bias and penalties.bias_ids go together", {"penalties": ops.Penalties(bias=torch.zeros(B, 1))}),
    ],
    "prompt_lookup": [
        (TypeError, r"tokens must be a tensor \[B, Q\], got list", {"tokens": [1]}),
        (TypeError, "history must be a tensor of torch.int32", {"history": torch.zeros(B, 9, dtype=torch.int64)}),
        (ValueError, "history has no room", {"history": torch.zeros(B, 0, dtype=torch.int32)}),
        (ValueError, r"row 0: lengths must be 0 .. 13, so that 3 tokens fit, is 14", {"lengths": int32(14, 4)}),
        (ValueError, "row 1: need .*query_lens=9", {"query_lens": int32(3, 9)}),
        (ValueError, r"n_select must be contiguous \[2\] on cpu like the tokens", {"n_select": int32(1)}),
        (ValueError, "corpus is empty", {"corpus": torch.zeros(0, dtype=torch.int32)}),
        (ValueError, "count must be at least 1, is 0", {"count": 0}),
        (TypeError, "count must be a number of tokens, got float", {"count": 2.0}),
        (ValueError, "need 1 <= min_match <= max_match <= 32, got 4 and 3", {"min_match": 4}),
        (ValueError, "need 1 <= min_match <= max_match <= 32, got 1 and 33", {"max_match": 33}),
    ],
    "kv_append": [*OF_STORAGE, *OF_APPEND],
    "verify_attention": [
        *OF_STORAGE,
        (ValueError, "row 0: need 0 <= query_lens <= 3, is 5", {"query_lens": int32(5, 1)}),
        (ValueError, "row 1: need 0 <= query_lens <= 3, is -1", {"query_lens": int32(3, -1)}),
        (ValueError, "3 query heads cannot share 2", {"q": torch.ones(B, 3, Q, SIZE)}),
        (ValueError, "scale must be finite", {"scale": math.nan}),
        (ValueError, "window must be at least 1, is 0", {"window": 0}),
        *((ValueError, r"softcap must be 1e-30 \.\. 1e30", {"softcap": cap}) for cap in (0.0, -1.0, 1e-50, 1e39, math.inf, math.nan)),
        (ValueError, "out must have shape", {"out": torch.zeros(1, HEADS, Q, SIZE)}),
        (ValueError, "out is written to", {"out": torch.zeros(1, HEADS, Q, SIZE).expand(B, HEADS, Q, SIZE)}),
        (TypeError, "workspace must be a tensor", {"workspace": 8}),
    ],
    "add_rms_norm": [
        (TypeError, "x must be a tensor, got list", {"x": [1.0]}),
        (ValueError, "x must be contiguous in its last", {"x": torch.ones(SIZE, B).t()}),
        (ValueError, "x must have one distance", {"x": torch.ones(5, 4, SIZE).transpose(0, 1), "residual": None}),
        (ValueError, "residual must have shape", {"residual": torch.ones(1, SIZE)}),
        (ValueError, "residual must be on cpu like x", {"residual": torch.ones(B, SIZE, device=META)}),
        (ValueError, "eps must be finite and not negative, is -1", {"eps": -1}),
        (ValueError, "out must have shape", {"out": torch.ones(1, SIZE)}),
        (ValueError, "out is written to", {"out": torch.zeros(1, SIZE).expand(B, SIZE)}),
        (ValueError, "residual_out is for a sum", {"residual": None}),
    ],
    "silu_mul": [
        (ValueError, "gate_up must have an even number", {"gate_up": torch.ones(B, 15)}),
        (ValueError, "activation must be one of silu, gelu_tanh, gelu, is 'relu'", {"activation": "relu"}),
        (TypeError, "out must be float32", {"out": torch.ones(B, SIZE).double()}),
    ],
    "rope_append": [
        *OF_STORAGE,
        *OF_APPEND,
        (TypeError, "q must be a tensor", {"q": 3}),
        (ValueError, r"an even R of at most 8, got shape \(9, 10\)", dict.fromkeys(("cos", "sin"), torch.ones(9, 10))),
        (TypeError, "positions must be int32 or int64", {"positions": torch.ones(B, Q)}),
        (ValueError, "go together", {"q_norm": torch.ones(SIZE)}),
        (ValueError, "eps must be finite", {"eps": math.inf}),
        (ValueError, "row 0: position 4 is not in cos and sin, which have 4", dict.fromkeys(("cos", "sin"), TABLE[:4])),
        (ValueError, "row 0: position -1 is not in", {"positions": torch.tensor([[0, -1, 2], [0, 0, 0]])}),
    ],
    "linear_small": [
        (TypeError, "x must be a tensor, got list", {"x": [1.0]}),
        (ValueError, r"x must have at most 16 rows \[M, K\], got shape \(17, 8\)", {"x": torch.ones(17, SIZE)}),
        (ValueError, r"at most 16 rows \[M, K\], got shape \(1, 2, 8\)", {"x": torch.ones(1, B, SIZE)}),
        (ValueError, r"weight must be \[N, 8\] with N > 0, got shape \(6, 7\)", {"weight": torch.ones(6, SIZE - 1)}),
        (ValueError, r"weight must be \[N, 8\] with N > 0, got shape \(0, 8\)", {"weight": torch.ones(0, SIZE)}),
        (TypeError, "weight must be float32, got torch.float64", {"weight": torch.ones(6, SIZE).double()}),
        (ValueError, r"bias must have shape \(6,\), got \(5,\)", {"bias": torch.ones(5)}),
        (ValueError, "norm must be contiguous", {"norm": torch.ones(2 * SIZE)[::2]}),
        (ValueError, "eps must be finite and not negative", {"eps": math.nan}),
        (TypeError, "one_plus_weight must be True or False", {"one_plus_weight": 1.0}),
        (ValueError, "activation must be one of silu, gelu_tanh, gelu or None, is 'relu'", {"activation": "relu"}),
        (ValueError, "activation and residual do not go together", {"activation": "silu"}),
        (
            ValueError,
            "an even number of rows, in tiles of whole bands of 8, got 5",
            {"activation": "gelu", "residual": None, "bias": None, "weight": torch.ones(5, SIZE)},
        ),
        (ValueError, "residual must have shape", {"residual": torch.ones(B, 7)}),
        (TypeError, "query_lens must be int32 or int64, got torch.float32", {"query_lens": torch.ones(B)}),
        (ValueError, "query_lens must have at most 16 rows, has 17", {"query_lens": torch.ones(17).int()}),
        (ValueError, "out is written to", {"out": torch.zeros(1, 6).expand(B, 6)}),
    ],
    "experts_small": [
        (ValueError, r"x must have at most 16 rows \[M, K\] or \[M, E, K\], got shape \(17, 8\)", {"x": torch.ones(17, SIZE)}),
        (ValueError, "x must have at most 16 rows", {"x": torch.ones(SIZE)}),
        (ValueError, r"weight must be \[N, 8\] with N > 0", {"weight": torch.ones(6, SIZE - 1)}),
        (TypeError, "chosen must be int32 or int64, got torch.float32", {"chosen": torch.ones(B, 2)}),
        (ValueError, r"chosen must have shape \(2, 3\), got \(2, 2\)", {"x": torch.ones(B, 3, SIZE)}),
        (ValueError, "chosen must be 0 .. 2", {"chosen": torch.tensor([[0, 3], [0, 1]])}),
        (ValueError, "chosen must be 0 .. 2", {"chosen": torch.tensor([[0, -1], [0, 1]])}),
        (ValueError, "experts must be a number that divides the 6 rows of weight, is 4", {"experts": 4}),
        (ValueError, "experts must be a number", {"experts": 0}),
        (ValueError, r"bias must have shape \(6,\), got \(5,\)", {"bias": torch.ones(5)}),
        (ValueError, "shares must have shape", {"shares": torch.ones(B, 3)}),
        (TypeError, "shares must be float32", {"shares": torch.ones(B, 2).half()}),
    ],
    "qkv_append": [
        *OF_STORAGE,
        (ValueError, r"x must be \[2, Q, K\] for 2 rows of storage, got shape \(6, 8\)", {"x": torch.ones(B * Q, SIZE)}),
        (ValueError, "at most 16 rows", {"x": torch.ones(B, 9, SIZE)}),
        (ValueError, "row 0: need 0 <= query_lens <= 3, is 4", {"query_lens": int32(4, 1)}),
        (ValueError, "weight must have rows for 2 heads of keys", {"weight": torch.ones(4 * SIZE, SIZE)}),
        (ValueError, "weight must have rows for 2 heads of keys", {"weight": torch.ones(8 * SIZE - 1, SIZE)}),
        (TypeError, "k_cache must be float32 or float8_e4m3fn, got torch.float16", dict.fromkeys(("k_cache", "v_cache"), STORAGE.half())),
        (ValueError, r"an even R of at most 8, got shape \(9, 10\)", dict.fromkeys(("cos", "sin"), torch.ones(9, 10))),
        (ValueError, "row 1: lengths is 15, and 2 more tokens must lie within the capacity 16", {"lengths": int32(3, 15)}),
        (ValueError, "row 0: position 4 is not in cos and sin, which have 4", dict.fromkeys(("cos", "sin"), TABLE[:4])),
        (ValueError, "out must have shape", {"out": torch.zeros(1, HEADS, Q, SIZE)}),
    ],
}  # fmt: skip
"""What each operation refuses: the error, its message, and the arguments in place of those that fit."""


def fitting(name: str) -> dict[str, Any]:
    """Arguments that fit, with tensors for the results."""
    if name == "logprobs":
        return {
            "logits": _logits(),
            "selected": _tokens().int(),
            "inv_temperature": None,
            "cutoff": None,
            "top_n": 2,
            **_counts(),
        }
    return CALLS[name]() | OUTS.get(name, dict)()


@pytest.mark.parametrize(
    ("name", "error", "message", "change"),
    [(name, *row) for name, rows in REFUSED.items() for row in rows],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_named_and_writes_nothing(name: str, error: Any, message: str, change: dict) -> None:
    given = fitting(name)
    getattr(ops, name)(**copy.deepcopy(given))
    of_noise = {key.removeprefix("noise."): x for key, x in change.items() if key.startswith("noise.")}
    given |= {"noise": replace(given["noise"], **of_noise)} if of_noise else change
    forms = [given]
    if "noise" in given and "logits" not in change:
        forms.append(given | {"logits": given["logits"].double()})  # checked elsewhere than in the native code
    if "check_counts" in given:
        forms.append(given | {"check_counts": False})  # on the CPU checked all the same
    for form in forms:
        before = copy.deepcopy({key: x for key, x in form.items() if key not in change})
        with pytest.raises(error.__args__ if hasattr(error, "__args__") else error, match=message):
            getattr(ops, name)(**form)
        for key, wanted in before.items():
            for got, expected in zip(tree_leaves(form[key]), tree_leaves(wanted), strict=True):
                assert not isinstance(got, torch.Tensor) or torch.equal(got, expected), key


GRADIENTS = ("kv_append", "verify_attention", "rope_append", "add_rms_norm", "silu_mul", "linear_small", "experts_small", "qkv_append")  # fmt: skip


@pytest.mark.parametrize("name", GRADIENTS)
def test_there_is_no_backward_pass(name: str) -> None:
    floats = ["k_cache", "v_cache", "q", "keys", "x", "weight", "gate_up", "out"]
    floats = floats[:-1] if name == "verify_attention" else floats
    for key in [key for key in floats if isinstance(fitting(name).get(key), torch.Tensor)]:
        given = fitting(name)
        given[key] = given[key].clone().requires_grad_()
        with pytest.raises(RuntimeError, match=f"{name} has no backward pass"):
            getattr(ops, name)(**given)
        with torch.no_grad():
            getattr(ops, name)(**given)


def test_choices_of_tensors_that_want_gradients() -> None:
    """They are computed, and nothing is recorded."""
    for name in ("argmax", "sample", "verify", "rejection_sample", "cutoff", "logprobs"):
        given = fitting(name)
        expected = getattr(ops, name)(**given)
        given |= {key: x.requires_grad_() for key, x in given.items() if key in ("logits", "draft_logits")}
        for got, wanted in zip(tree_leaves(getattr(ops, name)(**given)), tree_leaves(expected), strict=True):
            assert torch.equal(got, wanted)
            assert not got.requires_grad


# ---- calls at random; one number determines a call

_PLAIN = (
    None, "two", b"x", object(), [1, 2], (), {}, {1}, True, 0, -1, 3, 2**31, 2**63, 2**70, -(2**70), 0.5, float("nan"), float("inf"), 1j,
    np.float32(2), np.int64(-3), np.array("x"), np.zeros((2,), dtype=">i4"), np.zeros((2,), dtype=object), np.zeros((2, 0)), np.arange(2)[::-1],
    torch.float32, len, int,
)  # fmt: skip
"""Values in place of an argument."""
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool,
    torch.complex64, torch.float8_e4m3fn, torch.uint16,
)  # fmt: skip


def other(value: Any, generator: random.Random) -> Any:
    """Something else in place of an argument."""
    if isinstance(value, (ops.Noise, ops.Penalties)) and generator.random() < 0.8:
        name = generator.choice(list(value.__dataclass_fields__))
        return replace(value, **{name: other(getattr(value, name), generator)})
    if not isinstance(value, torch.Tensor) or generator.random() < 0.25:
        return torch.ones(2) if generator.random() < 0.1 else generator.choice(_PLAIN)
    changes: list[Callable[[], Any]] = [
        lambda: value.to(generator.choice(_DTYPES)),
        lambda: value[None],
        lambda: value[..., 0],
        lambda: value[:1],
        lambda: value[:0],
        lambda: value[..., :-1],
        lambda: value.repeat(2, *[1] * (value.dim() - 1)),
        lambda: value.transpose(0, -1),
        lambda: value.to("meta"),
        lambda: value.to_sparse(),
        lambda: value.flip(0)[..., ::2],
        lambda: value.expand(2, *value.shape),
        lambda: torch.empty(0),
        lambda: torch.tensor(1.0),
        lambda: value.clone().fill_(generator.choice((-1, 100, 127))),
        lambda: value.float().requires_grad_(),
        lambda: value.to(torch.complex64).conj(),
        lambda: torch.nn.Parameter(value, requires_grad=False),
        lambda: value.numpy(),
        lambda: value.tolist(),
    ]
    return generator.choice(changes)()


_THEIRS = re.compile(
    r"pipespec::|aten::|Expected a|expected scalar|Could not run|Declaration:|object has no attribute|not supported between|unsupported operand"
    r"|object is not|argument of type|indices must be|can't convert|cannot be interpreted|must be Tensor|size of tensor|Dimension|unhashable"
    r"|unexpected keyword|positional argument|incompatible function|isn't implemented|not implemented for|cannot unpack|too many values"
    r"|should be|ambiguous|can't be cast|must be real number|Overflow|only integer|given numpy|not a sequence"
)
"""Phrases of torch, numpy, pybind11 and Python."""


def answer(seed: int) -> str | None:
    """What the call with this number raises that is not a message of these packages; None: it works, or names what was wrong."""
    generator = random.Random(seed)
    torch.manual_seed(seed)
    name = generator.choice(list(CALLS))
    arguments = CALLS[name]()
    if generator.random() < 0.15:  # a call that goes through torch's dispatcher
        arguments = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    changed = generator.sample(list(arguments), min(len(arguments), generator.choice((1, 1, 2, 3))))
    for argument in changed:
        try:
            arguments[argument] = other(arguments[argument], generator)
        except (ValueError, TypeError, RuntimeError, NotImplementedError, IndexError):
            return None  # there is no such tensor
    try:
        getattr(ops, name)(**arguments)
    except (TypeError, ValueError) as error:
        if _THEIRS.search(str(error)) or not str(error):
            return f"{name}({', '.join(changed)}): {type(error).__name__}: {error}"
    except Exception as error:
        if "has no backward pass" in str(error):
            return None
        return f"{name}({', '.join(changed)}): {type(error).__name__}: {error}"
    return None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(4))
def test_calls_that_do_not_fit(part: int) -> None:
    count = trials(ci=500, nightly=100_000)
    answers = {seed: answer(seed) for seed in range(part * count, (part + 1) * count)}
    assert not {seed: said for seed, said in answers.items() if said is not None}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", [160, 942, 1315, 1460, 17796, 51449, 58293, 71987, 101689, 392926])
def test_calls_that_once_did_not_say_it(seed: int) -> None:
    assert answer(seed) is None
