"""Preparation: a call of ``generate()``, as transformers has prepared it, becomes the request that a decoder runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from transformers import Cache, GenerationConfig, PreTrainedModel
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from pipespec.api.arguments import MOST_TOKENS, check_logprobs, check_options, check_positions, too_many_ends
from pipespec.api.caches import Columns, adopt, cached_texts
from pipespec.api.text import CommittedText, Criteria, Progress, Stream
from pipespec.engine.cache import RowCache
from pipespec.engine.callers import check_of_model
from pipespec.engine.inputs import StageInputs, prefill_chunk
from pipespec.engine.processors import check_row_wise
from pipespec.engine.sampler import ScoreRecord
from pipespec.engine.sampling import Prompt, SamplingParams, row_seeds, with_penalties
from pipespec.errors import UnsupportedInput
from pipespec.models.compat import mask_columns_of_call
from pipespec.models.devices import input_device
from pipespec.models.layout import CacheLayout
from pipespec.models.properties import head_size
from pipespec.schedules.base import GenerationRequest
from pipespec_kernels.state import MAX_EOS


@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """What a call has beside the arguments that transformers prepares, see :meth:`pipespec.Pipeline.generate`.

    Attributes:
        cache: The caller's ``past_key_values``.
        penalties: Arguments of :func:`pipespec.engine.sampling.with_penalties`.
        prompt_streamed: Whether the streamer has the prompt already.
    """

    streamer: Any = None
    cache: Cache | None = None
    seed: Any = None
    penalties: Mapping[str, Any] = field(default_factory=dict)
    grammar: Any = None
    logprobs: int | None = None
    prompt_streamed: bool = False


class PreparedCall:
    """One call: its rows, its limits, what its scores pass through, and the progress of its text.

    Args:
        input_ids: int64 ``[B, S]``, as all arguments prepared by transformers.
        stopping_criteria: Those for the length and for ``eos_token_id`` included.
        config: The merged configuration.
        attention_mask: ``[B, S]``, 0 for padding. With a cache it may have columns for cached tokens before these.
        position_ids: As derived from the mask.

    Attributes:
        prompts: Per row, int32 ids.
        limits: Per row, the length that it may reach.
        seeds: Per row, those of a sampled call; None for a greedy one.
        columns: Where the tokens of each row are in the call's mask.
        row_cache: The caller's cache, as the target's stage takes it; None: there is none.
        is_text_known: Whether the text of cached tokens is known.
        record: Scores and logits, where the call asks for them.
        progress: The text that is committed so far.
        generator: The state of torch's generator before the seeds were drawn; None: they were not.

    Raises:
        ValueError: A value cannot work; the message names the argument.
        NotImplementedError: An option of transformers is not supported.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: Sequence[Any],
        stopping_criteria: Sequence[Any],
        config: GenerationConfig,
        options: CallOptions,
        *,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> None:
        check_options(config, target.generation_config)
        self.generator: torch.Tensor | None = None
        self.target, self.config, self.options = target, config, options
        rows, width = input_ids.shape
        mask = attention_mask
        if mask is None:
            mask = input_ids.new_ones((rows, mask_columns_of_call(config, position_ids, width)))
        if position_ids is not None:
            check_positions(position_ids, mask)
        self.columns = Columns(mask, width)
        shown = self._read_prompts(input_ids.to("cpu", torch.int32).numpy())
        eos, criteria = self._read_criteria(stopping_criteria, width)
        self._read_sampling(logits_processor, width, shown, eos)
        self.row_cache: RowCache | None = None
        if options.cache is not None:
            if not config.use_cache:
                raise UnsupportedInput("use_cache", "use_cache=False with past_key_values: pass one of them only")
            self.row_cache = adopt(target, options.cache, self.columns, self.prompts, self.limits)
        self._check_windows()
        pad = getattr(config, "_pad_token_tensor", None)
        pad = int(pad) if pad is not None else (eos or [0])[0]
        text = CommittedText(input_ids, self.prompts, self.limits, eos, pad)
        # transformers fills finished rows only where an end-of-text token exists.
        pads = any(_is_eos(criterion) for criterion in stopping_criteria)
        check_model = check_of_model(target, [*logits_processor, *criteria, options.streamer])
        self.progress = Progress(
            text,
            Criteria(text, criteria, pads, self.record, check_model) if criteria else None,
            None if options.streamer is None else Stream(text, options.streamer, check_model),
            self.record,
            self._max_length,
            check_model,
        )

    def _read_prompts(self, ids: np.ndarray) -> list[Prompt]:
        """Set the text of each row, the cached part included. Returns the prompts as processors see them."""
        columns = self.columns
        cached = columns.tokens(columns.cached)
        texts = cached_texts(self.options.cache, cached)
        # Where the text of cached tokens is not known, zeros stand for it, which only drafts see.
        self.is_text_known = [len(text) for text in texts] == cached
        self.prompts, shown = [], []
        for row, (places, text, n) in enumerate(zip(columns.places, texts, cached, strict=True)):
            unknown = np.zeros(n - len(text), dtype=np.int32)
            self.prompts.append(np.concatenate([text, unknown, ids[row, places[n:] - columns.cached]]))
            shown.append(Prompt(ids[row], len(places), max(0, int(places[0]) - columns.cached)))
        return shown

    def _read_criteria(self, stopping_criteria: Sequence[Any], width: int) -> tuple[list[int], list[Any]]:
        """Set the limits. Returns the token ids that end a row, and the criteria that are to be called."""
        lengths = [criterion for criterion in stopping_criteria if type(criterion) is MaxLengthCriteria]
        # Ids beyond 32 bits are those of no token.
        eos = [
            int(token)
            for criterion in stopping_criteria
            if _is_eos(criterion)
            for token in criterion.eos_token_id.flatten()
            if 0 <= int(token) < 2**31
        ]
        if len(eos) > MAX_EOS:
            raise too_many_ends(len(eos))
        # The caller's own criteria replace transformers'. They run after a token, so one token is always generated.
        self._max_length = min(lengths, key=lambda criterion: int(criterion.max_length))
        limit = max(int(self._max_length.max_length), width + 1)
        if limit > width + MOST_TOKENS:
            raise ValueError(f"MaxLengthCriteria: {limit} is more than any row can have ({MOST_TOKENS})")
        self.limits = [len(prompt) + limit - width for prompt in self.prompts]
        self._eos = eos
        return eos, [c for c in stopping_criteria if type(c) is not MaxLengthCriteria and not _is_eos(c)]

    def _read_sampling(self, logits_processor: Any, width: int, shown: Sequence[Prompt], eos: Sequence[int]) -> None:
        """Set what the scores pass through: processors, seeds, grammar and record."""
        config, options, rows, vocabulary = self.config, self.options, len(shown), head_size(self.target)
        self._draws_seeds = config.do_sample and options.seed is None
        # Zeros stand for seeds that are drawn later.
        seeds = None
        if config.do_sample or options.seed is not None:
            seeds = row_seeds(0 if options.seed is None else options.seed, rows)
        self.seeds = seeds if config.do_sample else None  # greedy: a seed is checked, and changes nothing
        check_row_wise(logits_processor, rows)
        processors = with_penalties(logits_processor, width, **options.penalties)
        self._sampling_params = SamplingParams.of(processors, seeds=self.seeds, prompts=shown, ends=eos)
        self._sampling_params.check_ids(vocabulary)
        self._grammar = None
        if options.grammar is not None:
            from pipespec.engine.grammar import Grammar

            self._grammar = Grammar.of(options.grammar, [len(prompt) for prompt in self.prompts])
        self.record: ScoreRecord | None = None
        logprobs = check_logprobs(options.logprobs, config, vocabulary)
        outputs = config.return_dict_in_generate and (config.output_scores or config.output_logits)
        if outputs or logprobs is not None:
            self.record = ScoreRecord(
                rows,
                scores=bool(config.output_scores),
                logits=bool(config.output_logits),
                top_logprobs=logprobs,
                warpers=self._sampling_params.warpers,
            )

    def draw_seeds(self) -> None:
        """Draw the seeds of a sampled call that was given none. It runs after all checks: after a refusal transformers finds torch's generator as it was."""
        if self._draws_seeds:
            self.generator = torch.get_rng_state()
            self.seeds = row_seeds(None, len(self.prompts))
            self._sampling_params = replace(self._sampling_params, seeds=tuple(self.seeds))

    # ---- what cannot be generated

    def _check_windows(self) -> None:
        """Check that windows of the target hold the same tokens as in ``generate()``, which counts columns, padding included."""
        layout = CacheLayout.of(self.target.config)
        if layout.states is not None:
            what = "which the target's recurrent layers take for tokens"
        elif layout.restricts(max(self.limits)):
            what = "which counts in the target's sliding windows"
        else:
            return
        for row, places in enumerate(self.columns.places):
            if int(places[0]) + len(places) != self.columns.count:
                raise UnsupportedInput(
                    "attention_mask",
                    f"attention_mask: row {row} has padding behind its first token, {what}; pad on the left",
                )

    # ---- what the decoder gets

    @property
    def returns_cache(self) -> bool:
        """Whether the caller gets the target's keys and values."""
        return self.options.cache is not None or bool(self.config.return_dict_in_generate and self.config.use_cache)

    def request(self, on_commit: Callable[..., None] | None = None) -> GenerationRequest:
        """Build what a decoder gets, with what it calls after each step of the target."""
        inputs = StageInputs(
            self.prompts,
            self.limits,
            self._sampling_params,
            head_size(self.target),
            chunk=self.config.prefill_chunk_size or prefill_chunk(len(self.prompts), str(input_device(self.target))),
            reuse=self.options.cache is not None,
            grammar=self._grammar,
        )
        return GenerationRequest(
            inputs,
            self._eos,
            on_commit,
            self.record,
            cache=self.row_cache,
            returns_cache=self.returns_cache,
            converts_cache=self.options.cache is not self.row_cache,
        )

    def follow(self) -> None:
        """Take the text as the leader of a tensor-parallel group commits it: it has drawn the seeds, applied the criteria, and has the scores."""
        self.seeds = self.record = None
        self.progress.follow()


def _is_eos(criterion: Any) -> bool:
    return type(criterion) is EosTokenCriteria and getattr(criterion, "new_token_length", 1) == 1
