"""The sampled text computed independently: a plain float64 forward, transformers' formulas, the reference's noise.

It shares only the definition of the noise with the engine, so it finds errors in positions, keys, penalties or cutoffs. It allows for rounding: if
two tokens are so close that float32 may prefer either, both are right, and the place is counted.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from transformers import LlamaForCausalLM

from pipespec_kernels import reference
from pipespec_kernels.noise import TARGET

NEAR_TIE = 1e-5
"""Two noised scores, or a score and a cutoff, this close may change places with the shape of the matrix product that made them."""


@dataclass(frozen=True)
class Sampling:
    """The parameters that the engine fuses, under ``generate()``'s names."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float | None = None
    repetition_penalty: float = 1.0


def choices(
    logits: torch.Tensor, prefix: torch.Tensor, key: int, sampling: Sampling, tolerance: float = NEAR_TIE
) -> list[int]:
    """The tokens that may follow ``prefix [n]``, by the target's ``logits [V]``: one, or at a near-tie more, the best first."""
    x = logits.double()
    if sampling.repetition_penalty != 1.0:
        said = prefix.unique()
        x = x.clone()
        x[said] = torch.where(x[said] < 0, x[said] * sampling.repetition_penalty, x[said] / sampling.repetition_penalty)
    y = x / sampling.temperature
    kept, sure, possible = (torch.ones_like(y, dtype=torch.bool) for _ in range(3))

    def cut(values: torch.Tensor, threshold: float, margin: float) -> None:
        nonlocal kept, sure, possible
        kept = kept & (values >= threshold)
        sure = sure & (values >= threshold + margin)
        possible = possible & (values >= threshold - margin)

    if 0 < sampling.top_k < len(y):
        best = y.topk(sampling.top_k + 1).values
        last, next_ = float(best[-2]), float(best[-1])
        if last - next_ > tolerance:
            cut(y, (last + next_) / 2, 0.0)
        else:
            cut(y, last, tolerance)
    if sampling.top_p < 1.0:
        p = y.masked_fill(~kept, -math.inf).softmax(0)
        order = p.argsort(descending=True)
        before = torch.empty_like(p)
        before[order] = p[order].cumsum(0) - p[order]
        # The mass of the first of equals decides: all of them are kept, or none.
        for i in range(1, len(order)):
            if p[order[i]] == p[order[i - 1]]:
                before[order[i]] = before[order[i - 1]]
        cut(-before, -sampling.top_p, tolerance)
        best = int(order[0])
        kept[best] = sure[best] = possible[best] = True
    if sampling.min_p is not None:
        cut(y, float(y.max()) + math.log(sampling.min_p), tolerance)

    noise = reference.gumbel(reference.philox_draw(key, len(prefix), TARGET, torch.arange(len(y)))).double()
    z = y + noise
    best_sure = z.masked_fill(~sure, -math.inf).max()
    found = torch.nonzero(possible & (z >= best_sure - tolerance)).flatten()
    return found[z[found].argsort(descending=True)].tolist()


class Oracle:
    """The texts of ``target``. It copies the weights, so that the engine cannot change them."""

    def __init__(self, target: LlamaForCausalLM) -> None:
        self.model = copy.deepcopy(target).double()

    @torch.inference_mode()
    def text(self, prompt: torch.Tensor, new: int, key: int, sampling: Sampling) -> list[int]:
        """The new tokens, by a full forward for each."""
        ids = prompt
        for _ in range(new):
            token = choices(self.model(ids[None]).logits[0, -1], ids, key, sampling)[0]
            ids = torch.cat([ids, torch.tensor([token])])
        return ids[len(prompt) :].tolist()

    @torch.inference_mode()
    def check(self, prompt: torch.Tensor, new: list[int], key: int, sampling: Sampling, tolerance: float) -> int:
        """Fail unless every token of ``new`` follows from the tokens before it. Returns the number of near-ties."""
        if not new:
            return 0
        ids = torch.cat([prompt, torch.tensor(new)])
        logits = self.model(ids[None, :-1]).logits[0]
        ties = 0
        for i, token in enumerate(new):
            at = len(prompt) + i
            right = choices(logits[at - 1], ids[:at], key, sampling, tolerance)
            assert token in right, f"new token {i} is {token}, the oracle says {right} ({sampling})"
            ties += len(right) > 1
        return ties

    def may_differ(self, prompt: torch.Tensor, a: list[int], b: list[int], key: int, sampling: Sampling) -> bool:
        """Whether the first difference of two texts is a near-tie."""
        at = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
        ids = torch.cat([prompt, torch.tensor(a[:at], dtype=torch.long)])
        with torch.inference_mode():
            right = choices(self.model(ids[None]).logits[0, -1], ids, key, sampling)
        return a[at] in right and b[at] in right
