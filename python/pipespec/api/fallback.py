"""Calls that are left to transformers' own decoding loop, because unknown code takes part in them: see :mod:`pipespec.engine.known`.

The loop runs the model, its cache, the processors and the criteria as without a pipeline. What it chooses is still coupled: the last processor leaves
one token per row, drawn with the noise of the row's key.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from pipespec.api.output import Report, StageReport
from pipespec.api.prepare import CallOptions
from pipespec.engine.sampler import no_distribution_error
from pipespec.engine.sampling import row_seeds, with_penalties
from pipespec.errors import Unsupported
from pipespec.models.compat import mask_columns_of_call
from pipespec.process.threads import raise_program_end
from pipespec_kernels import ops
from pipespec_kernels.noise import Noise

TRANSFORMERS = "transformers"
"""The schedule of such calls, for their report."""


class _NoiseProcessor:
    """The last logits processor: keeps the scores, and in sampled calls leaves the token that the noise chooses.

    Args:
        seeds: per row, the key of its noise; None: greedy.
        skipped: per row, columns that hold no token of its own.

    Attributes:
        ids: those of the last call, ``[B, n]``.
        scores: per generated token ``[B, V]``.
        seconds_to_first: until the first call.
    """

    def __init__(self, seeds: Sequence[int] | None, skipped: torch.Tensor, keeps: bool) -> None:
        self._keys = (
            None if seeds is None else torch.tensor([seed - 2**64 if seed >= 2**63 else seed for seed in seeds])
        )
        self._skipped, self._keeps = skipped.cpu(), keeps
        self.ids: torch.Tensor | None = None
        self.scores: list[torch.Tensor] = []
        self.began = time.perf_counter()
        self.seconds_to_first: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise_program_end()
        self.ids = input_ids
        if self.seconds_to_first is None:
            self.seconds_to_first = time.perf_counter() - self.began
        if self._keeps:
            self.scores.append(scores)
        if self._keys is None:
            return scores
        positions = input_ids.shape[1] - self._skipped
        for row in torch.nonzero(~torch.isfinite(scores.amax(-1))).flatten().tolist():
            raise no_distribution_error(row, int(positions[row]))
        ones = torch.ones(len(scores), dtype=torch.float32, device="cpu")
        noise = Noise(self._keys, positions, ones)
        chosen = ops.sample(scores.float()[:, None].contiguous(), noise).long()
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen.to(scores.device), 0.0)


def decode(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: GenerationConfig,
    *,
    options: CallOptions,
    cause: str,
    **model_kwargs: Any,
) -> tuple[Any, Report]:
    """Run a call whose arguments transformers has prepared in the loop of ``model``.

    Args:
        input_ids: ``[B, S]``, as all arguments that transformers prepares.
        cause: why the call is left to it.
        **model_kwargs: for the forward.

    Returns:
        The result of ``generate()``, and the report.

    Raises:
        NotImplementedError: an argument of pipespec's own that this loop does not have.

    An error of the call has the text so far as ``partial``.
    """
    config, cache, (rows, width) = generation_config, options.cache, input_ids.shape
    if options.grammar is not None or options.logprobs is not None:
        name = "grammar" if options.grammar is not None else "logprobs"
        raise Unsupported(name, f"generate(): {name} is not supported where transformers decodes: {cause}")
    seeds = row_seeds(options.seed, rows) if config.do_sample or options.seed is not None else None
    seeds = seeds if config.do_sample else None
    mask = model_kwargs.get("attention_mask")
    if mask is None or mask.ndim != 2:
        if mask is None:
            # The loop of transformers 5.0 extends any mask that is named.
            model_kwargs.pop("attention_mask", None)
        mask = input_ids.new_ones((rows, mask_columns_of_call(config, model_kwargs.get("position_ids"), width)))
    if cache is not None:
        model_kwargs["past_key_values"] = cache
    processors = with_penalties(logits_processor, width, **options.penalties)
    keeps = bool(config.return_dict_in_generate and config.output_scores)
    # Per row, columns of input_ids that are padding, less the tokens that the mask has before them.
    last = _NoiseProcessor(seeds, width - (mask != 0).sum(1), keeps)
    if options.streamer is not None:
        options.streamer.put(input_ids.cpu())
    began = time.perf_counter()
    try:
        result = type(model)._sample(
            model,
            input_ids,
            logits_processor=LogitsProcessorList([*processors, last]),
            stopping_criteria=stopping_criteria,
            generation_config=config,
            synced_gpus=False,
            streamer=options.streamer,
            **model_kwargs,
        )
    except BaseException as error:
        with suppress(Exception):
            error.partial = last.ids  # type: ignore[attr-defined]
        raise
    sequences = result if isinstance(result, torch.Tensor) else result.sequences
    report = _report(sequences, width, time.perf_counter() - began, last, cause, seeds)
    if keeps:
        # Without the noise of the last processor.
        result.scores = tuple(last.scores)
    return result, report


def _report(
    sequences: torch.Tensor, width: int, seconds: float, last: _NoiseProcessor, cause: str, seeds: Sequence[int] | None
) -> Report:
    rows, columns = sequences.shape
    tokens, form = rows * (columns - width), f"{TRANSFORMERS}: {cause}"
    stage = StageReport("target", tokens, rows * width + tokens - rows, 0, 0, tokens, 0, 0, 0, (tokens,), form)
    first = last.seconds_to_first if last.seconds_to_first is not None else seconds
    keys, decisions = None if seeds is None else tuple(seeds), (f"transformers decodes: {cause}",)
    return Report(TRANSFORMERS, rows, tokens, seconds, first, (stage,), keys, decisions, prompt_tokens=rows * width)
