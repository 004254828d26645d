"""The text that a call has to give, by transformers' own ``generate()`` alone, sampled calls included.

Coupled sampling draws the token whose processed score plus noise is largest. So greedy decoding over the processors of the call, then its filters, then
the noise gives the same text, and shares nothing with the engine but the definition of the noise.
"""

from typing import Any

import torch
from transformers import LogitsProcessor, PreTrainedModel
from transformers.generation import GenerationMixin

from pipespec.engine.sampling import OutputPenaltyLogitsProcessor, row_seeds
from pipespec_kernels import reference
from pipespec_kernels.noise import TARGET
from tests.support.grammars import Masks


class Noise(LogitsProcessor):
    """The noise of a seed, and the scores before it, one entry per token."""

    def __init__(self, seed: int, mask: torch.Tensor) -> None:
        self.keys, self.padding = row_seeds(seed, len(mask)), (mask == 0).sum(1).tolist()
        self.scores: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.scores.append(scores)
        ids, length = torch.arange(scores.shape[1]), input_ids.shape[1]
        rows = zip(self.keys, self.padding, strict=True)
        drawn = [reference.philox_draw(key, length - padding, TARGET, ids) for key, padding in rows]
        return scores + reference.gumbel(torch.stack(drawn))


def processors_of(target: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, **options: Any) -> list[Any]:
    """The processors that transformers makes of the arguments of a sampled call, those given among them, in its order."""
    found: list[Any] = []

    def capture(model: Any, input_ids: torch.Tensor, logits_processor: Any = None, **_: Any) -> torch.Tensor:
        found.extend(logits_processor)
        return input_ids

    GenerationMixin.generate(target, ids, attention_mask=mask, custom_generate=capture, **options)
    return found


OF_THE_LOOP = (
    "max_new_tokens", "eos_token_id", "pad_token_id", "streamer", "stopping_criteria", "stop_strings", "tokenizer", "prefill_chunk_size",
    "return_dict_in_generate", "output_scores", "output_logits",
)  # fmt: skip
"""Arguments that make no processor."""


def transformers_text(target: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, **options: Any) -> Any:
    """What transformers' ``generate()`` returns for the arguments of a call: ``[B, S]``, or its output object.

    The arguments that transformers does not know (penalties by presence and frequency, ``logit_bias``, ``grammar``, ``seed``) become processors, which
    are its own or written in the tests.
    """
    given = dict(options)
    processors = list(given.pop("logits_processor", []))
    presence, frequency = given.pop("presence_penalty", 0.0), given.pop("frequency_penalty", 0.0)
    if presence or frequency:
        processors.append(OutputPenaltyLogitsProcessor(ids.shape[1], presence, frequency))
    if bias := given.pop("logit_bias", None):
        given["sequence_bias"] = given.get("sequence_bias", {}) | {(i,): b for i, b in bias.items()}
    if grammar := given.pop("grammar", None):
        processors.append(Masks(grammar))
    given.pop("logprobs", None)
    given["logits_processor"] = processors
    if given.get("do_sample"):
        count = given.pop("num_return_sequences", 1)
        ids, mask = ids.repeat_interleave(count, 0), mask.repeat_interleave(count, 0)
        noise = Noise(given.pop("seed"), mask)
        shown = {name: given[name] for name in given.keys() - {"streamer", "stopping_criteria", "stop_strings"}}
        processors = [*processors_of(target, ids, mask, **shown), noise]
        given = {name: given[name] for name in OF_THE_LOOP if name in given} | {"logits_processor": processors}
    out = GenerationMixin.generate(target, ids, attention_mask=mask, **given | {"do_sample": False})
    if options.get("do_sample") and options.get("output_scores"):
        out.scores = tuple(noise.scores)
    return out
