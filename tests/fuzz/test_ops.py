"""Calls of the operations with arguments that do not fit: each works, or says in a message of its own what was wrong.

One number determines a call.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

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
        "logits": _logits(), "tokens": _tokens(), "draft_logits": torch.randn(B, Q - 1, V), "noise": _noise(), "threads": 1, "out": None,
        "streams": ops.Streams(), "draft_inv_temperature": None, "draft_cutoff": None, **_counts(),
    },
    "penalize": lambda: {
        "logits": _logits(), "tokens": _tokens(), "history": torch.zeros(B, 16, dtype=torch.int32), "lengths": _lengths(),
        "penalties": ops.Penalties(torch.full((B,), 1.2), torch.zeros(B), torch.zeros(B), _lengths(2)), "bitmask": None, "workspace": None,
        **_counts(),
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
        "q": torch.randn(B, HEADS, Q, SIZE), **_new(), "cos": torch.ones(B, Q, SIZE), "sin": torch.ones(B, Q, SIZE), **_storage(),
        "lengths": _lengths(), "n_new": _lengths(2), "positions": None, "q_norm": None, "k_norm": None, "eps": 1e-6, "one_plus_weight": False,
        "out": None, "check_counts": True,
    },
}  # fmt: skip
"""Per operation, arguments that fit."""

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
