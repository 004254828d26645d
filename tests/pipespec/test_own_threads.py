"""A step on a CPU leaves torch's threads alone: they would poll on the cores that the next forward needs (see ``engine/sampler.py``)."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from pipespec import Pipeline
from pipespec_train.heads import head_for
from tests.conftest import DEVICE, random_llama
from tests.trials import trials

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="of steps on a CPU")

GRAIN = 32_768
"""Elements from which on an operation of torch wakes its threads."""

SMALL = ["alias", "as_strided", "detach", "embedding", "empty", "expand", "flatten", "index", "lift", "resolve"]
SMALL += ["narrow", "select", "slice", "split", "squeeze", "to", "unbind", "unsqueeze", "view"]
"""They make views, or take few elements of a large tensor."""


def large_operations(pipe: Pipeline, new_tokens: int, options: dict[str, Any]) -> Counter[str]:
    """The operations of one call over tensors that torch's threads would share, by name."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        pipe.generate(torch.arange(4, 24)[None], max_new_tokens=new_tokens, **options)
    return Counter(
        event.name
        for event in found.events()
        if event.name.startswith("aten::")
        and not event.name.removeprefix("aten::").startswith(tuple(SMALL))
        and any(math.prod(shape) >= GRAIN for shape in event.input_shapes if shape)
    )


CALLS = {
    "greedy": {},
    "penalty": {"repetition_penalty": 1.1},
    "sampled": {"do_sample": True, "seed": 1, "temperature": 0.8, "top_k": 20, "top_p": 0.9},
}
DRAFTS = [None, "ngram", "model", "head", "head, fewer tokens"]
TYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(
    ("draft", "dtype"), [(d, TYPES[(i + k) % 2]) for i, d in enumerate(DRAFTS) for k in range(trials(1, 2))], ids=str
)
def test_no_step_wakes_them(draft, dtype, tmp_path) -> None:
    sizes = {"layers": 3, "hidden": 16, "vocabulary": 40_000, "dtype": dtype}
    target = random_llama(0, **sizes)
    drafts: list[Any] = []
    if draft == "model":
        drafts = [random_llama(1, **sizes)]
    elif draft == "ngram":
        drafts = ["ngram"]
    elif draft is not None:
        head_for(target, None if draft == "head" else range(0, 39_000, 2)).save(tmp_path, target)
        drafts = [tmp_path]
    kwargs = {"schedule": "lockstep", "lookahead": 8} if drafts else {"schedule": "plain"}
    with Pipeline(target, drafts, **kwargs) as pipe:
        for name, options in CALLS.items():
            pipe.generate(torch.arange(4, 24)[None], max_new_tokens=7, **options)  # packs the weights
            few, many = (large_operations(pipe, count, options) for count in (3, 7))
            assert not many - few, name
