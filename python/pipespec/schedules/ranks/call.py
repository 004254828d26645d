"""A call of the target as text, which the drafts on other ranks read: numbers only, nothing is unpickled."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
from transformers.generation import RepetitionPenaltyLogitsProcessor

from pipespec.engine.inputs import StageInputs
from pipespec.engine.sampling import SamplingParams


def encode_call(inputs: StageInputs, eos: Sequence[int]) -> str:
    """A call as JSON.

    Drafts get temperature, top-k, top-p, min-p and a repetition penalty that is the only processor. Other processors run in the target alone.
    """
    params, penalty = inputs.sampling_params, 1.0
    match params.processors:
        case (RepetitionPenaltyLogitsProcessor(penalty=only),):
            penalty = float(only)
    sampling = {"seeds": params.seeds, "ends": sorted(params.ends)}
    sampling |= {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    prompts = [prompt.tolist() for prompt in inputs.prompts]
    more = {"vocabulary": inputs.vocabulary, "chunk": inputs.chunk, "reuse": inputs.reuse}
    return json.dumps([prompts, list(inputs.limits), more, sampling, penalty, list(eos)])


def decode_call(text: str) -> tuple[StageInputs, list[int]]:
    """The inputs of a draft's stage, and the tokens that end a row, of :func:`encode_call`."""
    prompts, limits, more, sampling, penalty, eos = json.loads(text)
    seeds, ends = sampling.pop("seeds"), frozenset(sampling.pop("ends"))
    params = SamplingParams(
        seeds=None if seeds is None else tuple(seeds),
        ends=ends,
        processors=() if penalty == 1.0 else (RepetitionPenaltyLogitsProcessor(penalty),),
        **sampling,
    )
    return StageInputs([np.array(prompt, dtype=np.int32) for prompt in prompts], limits, params, **more), eos
