"""``logprobs``: the kernel against the oracle."""

from __future__ import annotations

import pytest
import torch

from pipespec_kernels import ops
from tests.trials import trials

from ..logprobs import case, check_close, oracle


@pytest.mark.parametrize("kind", ["normal", "few values", "minus inf", "zeros", "nans"])
@pytest.mark.parametrize("seed", range(trials(ci=1, nightly=20)))
def test_log_softmax(kind: str, seed: int, device: torch.device) -> None:
    # A vocabulary of two tiles, whose end is not aligned.
    vocab = 2061 if seed == 0 and kind == "normal" else 70
    given = case(seed, kind=kind, vocab=vocab, batch=3, width=3, dtype=(torch.float32, torch.bfloat16)[seed % 2])
    wanted = oracle(given), oracle(given | {"cutoff": None, "inv_temperature": None})
    there = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    check_close(ops.logprobs(**there), wanted[0])
    check_close(ops.logprobs(**there | {"cutoff": None, "inv_temperature": None}), wanted[1])
