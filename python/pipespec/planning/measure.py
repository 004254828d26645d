"""What runs models to be measured: step times, texts of a target, and the agreement of drafts with them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from pipespec.config import SpeculationConfig
from pipespec.drivers.base import GenerationRequest
from pipespec.drivers.factory import make_driver
from pipespec.engine.cache import RowCache
from pipespec.engine.forward import forward
from pipespec.engine.inputs import PREFILL_CHUNK, StageInputs
from pipespec.engine.sampling import SamplingParams
from pipespec.models.properties import embedding_size, end_tokens, head_size
from pipespec.planning.steps import StepTimes
from pipespec.process.threads import threads_set
from pipespec.registry import PLAIN
from pipespec_kernels import ops

WIDTHS = (1, 2, 4, 8)
_CONTEXT = 64
_WARM, _LEAST, _MOST = 2, 3, 15

Text = tuple[np.ndarray, int]
"""Token ids of a text, int32 ``[positions]``, and the position from which on the target has written it."""


@torch.inference_mode()
def step_times(
    model: PreTrainedModel,
    name: str,
    widths: Sequence[int] = WIDTHS,
    *,
    threads: int | None = None,
    budget_s: float = 2.0,
    device: int = 0,
) -> StepTimes:
    """Measure the steps of one model: a forward over a short text, and the choice of a token per column.

    Args:
        model: Any stage of a chain.
        name: Of the model.
        widths: Tokens of the steps.
        threads: CPU threads. None: as set.
        budget_s: Each width has its part of it, and at least three steps.
        device: See :class:`pipespec.planning.steps.StepTimes`.
    """
    threads = threads or torch.get_num_threads()
    random = torch.Generator().manual_seed(1)
    fed = torch.randint(embedding_size(model), (1, _CONTEXT + max(widths)), generator=random, dtype=torch.int32)
    fed = fed.to(model.device)

    def seconds(begin: int, end: int) -> float:
        began = time.perf_counter()
        ops.argmax(forward(model, fed[:, begin:end], cache, keep=min(end - begin, max(widths)))).cpu()
        took = time.perf_counter() - began
        cache.truncate([_CONTEXT])
        return took

    with threads_set(threads):
        prompts = []
        for _ in range(2):
            cache = RowCache.for_model(model, 1, fed.shape[1])
            prompts.append(seconds(0, _CONTEXT))
        found = []
        for width in widths:
            for _ in range(_WARM):
                seconds(_CONTEXT, _CONTEXT + width)
            took: list[float] = []
            while len(took) < _LEAST or (len(took) < _MOST and sum(took) < budget_s / len(widths)):
                took.append(seconds(_CONTEXT, _CONTEXT + width))
            found.append(statistics.median(took))
    return StepTimes(name, threads, tuple(widths), tuple(found), min(prompts) / _CONTEXT, device)


def written_by(target: PreTrainedModel, prompts: Sequence[Any], tokens: int) -> list[Text]:
    """Texts that the target writes, greedily, up to its end token.

    Args:
        target: The model.
        prompts: Token ids, each a sequence or a tensor.
        tokens: New tokens per prompt.

    Raises:
        ValueError: The target writes nothing.
    """
    driver, found = make_driver([target], SpeculationConfig(schedule=PLAIN.name)), []
    try:
        for prompt in prompts:
            ids = np.asarray(torch.as_tensor(prompt).flatten().cpu(), dtype=np.int32)
            inputs = StageInputs([ids], [len(ids) + tokens], SamplingParams(), head_size(target))
            driver.run(GenerationRequest(inputs, list(end_tokens(target))))
            new = driver.block.tokens(driver.block.target, 0, len(ids), driver.block.length(driver.block.target, 0))
            if len(new):
                found.append((np.concatenate([ids, np.array(new, dtype=np.int32)]), len(ids)))
    finally:
        driver.close()
    if not found:
        raise ValueError("no agreement can be measured: the target ends these prompts at once")
    return found


@torch.inference_mode()
def agreement(draft: PreTrainedModel, texts: Sequence[Text]) -> np.ndarray:
    """Where a draft chooses the target's token, given the target's text before it: bool, the positions of all texts one after the other."""
    found, own = [], embedding_size(draft)
    for text, first in texts:
        cache = RowCache.for_model(draft, 1, len(text))
        ids = torch.from_numpy(np.minimum(text, own - 1).astype(np.int32))[None].to(draft.device)
        for at in range(0, first - 1, PREFILL_CHUNK):
            forward(draft, ids[:, at : min(at + PREFILL_CHUNK, first - 1)], cache, keep=0)
        for at in range(first - 1, len(text) - 1, 64):
            end = min(at + 64, len(text) - 1)
            chosen = ops.argmax(forward(draft, ids[:, at:end], cache, keep=end - at))[0].cpu().numpy()
            found.append(chosen == text[at + 1 : end + 1])
    return np.concatenate(found)
