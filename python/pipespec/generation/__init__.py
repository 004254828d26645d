"""Generation: one call of ``generate()``, from what transformers has prepared to what it would have returned."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel
from transformers.generation import EosTokenCriteria, GenerateDecoderOnlyOutput, MaxLengthCriteria

from pipespec.drivers.base import Decoder, GenerationRequest, TextSource
from pipespec.engine.cache import RowCache
from pipespec.engine.grammar import Grammar
from pipespec.engine.sampling import Prompt, SamplingParams, ScoreRecord, row_seeds, with_penalties
from pipespec.engine.stage import PREFILL_CHUNK, RightPadding, StageInputs
from pipespec.errors import Unsupported, UnsupportedInput
from pipespec.generation.arguments import (
    MOST_TOKENS,
    as_ids,
    check_logprobs,
    check_options,
    check_positions,
    effective_config,
    too_many_ends,
)
from pipespec.models.compat import first_position_behind, keep_window, mask_columns_of_call
from pipespec.models.layout import CacheLayout
from pipespec.models.properties import head_size
from pipespec.models.rope import DynamicRope
from pipespec.observe import Report
from pipespec.observe.features import Features, features_of
from pipespec.observe.report import stage_report
from pipespec.process import shutdown
from pipespec_kernels.state import MAX_EOS


class Logprobs(NamedTuple):
    """Log-probabilities of the new tokens, by the target's processed scores: what ``compute_transition_scores(normalize_logits=True)`` of transformers computes
    from ``scores``, and vLLM with ``logprobs_mode="processed_logprobs"``.

    Attributes:
        chosen: Float32 ``[B, new]``, of the generated tokens; 0 behind the end of a row, so that the sum of a row is that of its text.
        top_ids: Int64 ``[B, new, n]``, the likeliest tokens, likeliest first; -1 where processors and filters leave fewer, and behind the end of a row.
        top: Float32 ``[B, new, n]``, theirs; -inf where ``top_ids`` is -1.
    """

    chosen: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor


@dataclass
class PipelineOutput(GenerateDecoderOnlyOutput):
    """What ``return_dict_in_generate=True`` returns: transformers' fields, the call's report as ``speculation``, and what ``logprobs=`` asks for."""

    speculation: Report | None = None
    logprobs: Logprobs | None = None


_texts: weakref.WeakKeyDictionary[Cache, list[np.ndarray]] = weakref.WeakKeyDictionary()
"""Per row, the text whose keys and values a call left in the caller's DynamicCache. Later changes of the cache are not noticed."""


class _Columns:
    """Where the tokens of each row are in the columns of the call's mask.

    Args:
        mask: ``[B, S]``, 0 for padding.
        width: Columns of ``input_ids``, the last ones of the mask.

    Attributes:
        count: Columns of the mask.
        cached: How many of them are before those of ``input_ids``.
        places: Per row, the columns that are no padding.

    Raises:
        UnsupportedInput: A row is all padding.
    """

    def __init__(self, mask: torch.Tensor, width: int) -> None:
        self.count = mask.shape[1]
        self.cached = self.count - width
        self.places = [np.flatnonzero(row) for row in mask.cpu().numpy()]
        for row, places in enumerate(self.places):
            if len(places) == 0:
                raise UnsupportedInput(
                    "attention_mask", f"attention_mask: row {row} is all padding; the prompt is empty"
                )

    def tokens(self, columns: int) -> list[int]:
        """Per row, the number of tokens in the first columns."""
        return [int((places < columns).sum()) for places in self.places]

    def of_text(self, row: int, length: int) -> torch.Tensor:
        """The columns of the first tokens of a row, new ones included: int64 ``[length]``."""
        places = self.places[row][:length]
        new = np.arange(self.count, self.count + length - len(places))
        return torch.from_numpy(np.concatenate([places, new]))


class Generation:
    """One call: its rows, its limits, and the text that is committed so far.

    Args:
        target: The model whose text it is.
        input_ids: int64 ``[B, S]``, as all arguments prepared by transformers.
        logits_processor: Processors of the scores.
        stopping_criteria: Criteria, those for the length and for ``eos_token_id`` included.
        config: The merged configuration.
        streamer: Gets the tokens as they are committed.
        seed: One integer, or one per row.
        penalties: Arguments of :func:`pipespec.engine.sampling.with_penalties`.
        grammar: A matcher, or one per row, see :class:`pipespec.engine.grammar.TokenMatcher`.
        logprobs: How many of the likeliest tokens, beside each generated one, to give log-probabilities of; None: none at all.
        cache: The caller's ``past_key_values``.
        attention_mask: ``[B, S]``, 0 for padding. With a cache it may have columns for cached tokens before these.
        position_ids: As derived from the mask.

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
        *,
        streamer: Any = None,
        seed: Any = None,
        penalties: Mapping[str, Any] | None = None,
        grammar: Any = None,
        logprobs: Any = None,
        cache: Cache | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> None:
        check_options(config, target.generation_config)
        self.config, self._target, self._cache = config, target, cache
        rows, width = input_ids.shape
        mask = attention_mask
        if mask is None:
            mask = input_ids.new_ones((rows, mask_columns_of_call(config, position_ids, width)))
        if position_ids is not None:
            check_positions(position_ids, mask)
        self._columns = columns = _Columns(mask, width)
        ids = input_ids.to("cpu", torch.int32).numpy()
        cached = columns.tokens(columns.cached)
        texts = _cached_texts(cache, cached)
        # Where the text of cached tokens is not known, zeros stand for it, which only drafts see.
        self._is_known = [len(text) for text in texts] == cached
        self.prompts, shown = [], []
        for row, (places, text, n) in enumerate(zip(columns.places, texts, cached, strict=True)):
            unknown = np.zeros(n - len(text), dtype=np.int32)
            self.prompts.append(np.concatenate([text, unknown, ids[row, places[n:] - columns.cached]]))
            shown.append(Prompt(ids[row], len(places), max(0, int(places[0]) - columns.cached)))
        lengths = [len(prompt) for prompt in self.prompts]

        lengths_allowed = []
        self._eos: list[int] = []
        criteria = []
        pads = False  # transformers fills finished rows only where an end-of-text token exists
        for criterion in stopping_criteria:
            if type(criterion) is MaxLengthCriteria:
                lengths_allowed.append(criterion)
            elif type(criterion) is EosTokenCriteria and getattr(criterion, "new_token_length", 1) == 1:
                # Ids beyond 32 bits are those of no token.
                self._eos += [int(token) for token in criterion.eos_token_id.flatten() if 0 <= int(token) < 2**31]
                pads = True
            else:
                criteria.append(criterion)
        if len(self._eos) > MAX_EOS:
            raise too_many_ends(len(self._eos))
        # The caller's own criteria replace transformers'. They run after a token, so one token is always generated.
        self._max_length = min(lengths_allowed, key=lambda criterion: int(criterion.max_length))
        most = max(int(self._max_length.max_length), width + 1)
        if most > width + MOST_TOKENS:
            raise ValueError(f"MaxLengthCriteria: {most} is more than any row can have ({MOST_TOKENS})")
        self.limits = [n + most - width for n in lengths]

        self._draws_seeds = config.do_sample and seed is None
        # Zeros stand for seeds that are drawn later.
        seeds = row_seeds(0 if seed is None else seed, rows) if config.do_sample or seed is not None else None
        self.seeds = seeds if config.do_sample else None  # greedy: a seed is checked, and changes nothing
        logits_processor = with_penalties(logits_processor, width, **(penalties or {}))
        self._sampling_params = SamplingParams.of(logits_processor, seeds=self.seeds, prompts=shown, ends=self._eos)
        self._sampling_params.check_ids(head_size(target))
        self._grammar = Grammar.of(grammar, lengths)
        self._record = None
        logprobs = check_logprobs(logprobs, config, head_size(target))
        outputs = config.return_dict_in_generate and (config.output_scores or config.output_logits)
        if outputs or logprobs is not None:
            self._record = ScoreRecord(
                rows,
                scores=bool(config.output_scores),
                logits=bool(config.output_logits),
                top_logprobs=logprobs,
                warpers=self._sampling_params.warpers,
            )
        self._row_cache = None if cache is None else self._adopted(cache)
        self._right_padding = self._behind_padding(input_ids, mask, position_ids)
        self._mask = mask
        self._check_features()
        self._check_windows()

        pad = getattr(config, "_pad_token_tensor", None)
        self._pad = int(pad) if pad is not None else (self._eos or [0])[0]
        self._text = _Text(input_ids, self.prompts, self.limits, self._eos, self._pad)
        self._criteria = _Criteria(self._text, criteria, pads, self._record) if criteria else None
        self._stream = None if streamer is None else _Stream(self._text, streamer)
        self._began = time.perf_counter()
        self._first: float | None = None
        self._seconds: float | None = None

    def draw_seeds(self) -> None:
        """Draw the seeds of a sampled call that was given none. After all refusals, so that transformers draws in its place what it always draws."""
        if self._draws_seeds:
            self.seeds = row_seeds(None, len(self.prompts))
            self._sampling_params = replace(self._sampling_params, seeds=tuple(self.seeds))

    def follows(self, rope: DynamicRope) -> bool:
        """Whether the call's RoPE can be that of ``generate()``."""
        in_chunks = self.config.prefill_chunk_size is not None
        padded = self._columns.count > max(map(len, self.prompts))
        return rope.is_reproducible(in_chunks=in_chunks, padded=padded)

    def _behind_padding(
        self, input_ids: torch.Tensor, mask: torch.Tensor, position_ids: torch.Tensor | None
    ) -> RightPadding | None:
        """What rows that end with padding continue from; None if no row does."""
        ends = [bool(n) for n in mask[:, -1] == 0]
        if not any(ends):
            return None
        where = ""
        if self._row_cache is not None and any(self._row_cache.lengths):
            where = "behind cached tokens"
        elif DynamicRope.of(self._target) is not None:
            where = "with RoPE that depends on the length of the text"
        if where:
            raise UnsupportedInput(
                "attention_mask", f"attention_mask: row {ends.index(True)} ends with padding {where}; pad on the left"
            )
        positions, new = first_position_behind(mask, position_ids)
        return RightPadding(
            input_ids, mask, positions, [int(at) if end else None for at, end in zip(new, ends, strict=True)]
        )

    @property
    def features(self) -> list[str]:
        """The options of the call that one more forward of the target, over the finished text, serves."""
        config, names = self.config, ("output_hidden_states", "output_attentions")
        return [name for name in names if getattr(config, name, None)] if config.return_dict_in_generate else []

    def _check_windows(self) -> None:
        """Check that windows of the target hold the same tokens as in ``generate()``, which counts columns, padding included."""
        layout = CacheLayout.of(self._target.config)
        if layout.states is not None:
            what = "which the target's recurrent layers take for tokens"
        elif layout.restricts(max(self.limits)):
            what = "which counts in the target's sliding windows"
        else:
            return
        for row, places in enumerate(self._columns.places):
            if int(places[0]) + len(places) != self._columns.count:
                raise UnsupportedInput(
                    "attention_mask",
                    f"attention_mask: row {row} has padding behind its first token, {what}; pad on the left",
                )

    def _check_features(self) -> None:
        """Check that one forward over the finished text can give what :attr:`features` ask for."""
        if not self.features:
            return
        where, rope = "", DynamicRope.of(self._target)
        if self._row_cache is not None and any(self._row_cache.lengths):
            where = "past_key_values that hold tokens"
        elif self._right_padding is not None:
            where = "padding at the end of a row"
        elif rope is not None and max(self.limits) > rope.limit:
            where = f"RoPE that changes beyond {rope.limit} tokens"
        if where:
            raise without_features(self.features[0], where)

    def _adopted(self, cache: Cache) -> RowCache:
        """Convert the caller's cache to a RowCache that holds a part of every prompt."""
        rows, columns = len(self.prompts), self._columns
        if isinstance(cache, RowCache):
            if cache.rows != rows:
                raise ValueError(f"past_key_values holds {cache.rows} rows, input_ids {rows}")
            if not cache.matches(self._target):
                raise ValueError(f"past_key_values does not fit the target, it is another model's: {cache!r}")
            held = list(cache.lengths)
            own = cache
        elif isinstance(cache, DynamicCache):
            if CacheLayout.of(self._target.config).states is not None:
                raise Unsupported(
                    "past_key_values",
                    "past_key_values: a DynamicCache has one recurrent state per row, and a rollback needs those of several columns: pass the "
                    "cache that a call of this pipeline returned (return_dict_in_generate=True), or none",
                )
            n = int(cache.get_seq_length())
            if n and cache.layers[0].keys.shape[0] != rows:
                raise ValueError(f"past_key_values holds {cache.layers[0].keys.shape[0]} rows, input_ids {rows}")
            if n > columns.count:
                _refuse_longer(n, 0, self.prompts[0])
            if columns.cached and n != columns.cached:
                raise ValueError(
                    f"past_key_values holds {n} columns, and attention_mask has {columns.cached} before those of input_ids: they must be "
                    "equal where input_ids are the new tokens only"
                )
            # Its columns are those of the mask. Ours are the tokens of each row.
            held = columns.tokens(n)
            own = RowCache.for_model(self._target, rows, max(n, *self.limits) + 1)
            if n:
                if len(cache.layers) != len(own.layers):
                    raise ValueError(f"past_key_values has {len(cache.layers)} layers, the target {len(own.layers)}")
                if any(layer.keys.shape[2] < n for layer in cache.layers):
                    raise UnsupportedInput(
                        "past_key_values",
                        f"past_key_values holds only the last tokens of {n} in its sliding-window layers, and a rollback needs them all: pass the "
                        "cache that a call of this pipeline returned (return_dict_in_generate=True), or a new DynamicCache()",
                    )
                sources = [columns.of_text(row, h) for row, h in enumerate(held)]

                def ours(states: torch.Tensor) -> torch.Tensor:
                    return _moved(states, sources, [torch.arange(h) for h in held], n)

                try:
                    own.load([(ours(layer.keys), ours(layer.values)) for layer in cache.layers])
                except ValueError as error:
                    raise ValueError(f"past_key_values does not fit the target: {error}") from error
                own.set_lengths(held)
        else:
            raise Unsupported(
                "past_key_values",
                f"past_key_values: {type(cache).__name__} is not supported; pass a DynamicCache, or the cache that a call of this "
                "pipeline returned",
            )
        for row, (n, prompt) in enumerate(zip(held, self.prompts, strict=True)):
            if n > len(prompt):
                _refuse_longer(n, row, prompt)
            if columns.cached and n != (given := columns.tokens(columns.cached)[row]):
                raise ValueError(
                    f"past_key_values holds {n} tokens of row {row}, and attention_mask has {given} before input_ids: they must be equal "
                    "where input_ids are the new tokens only"
                )
            known = own.text[row] if own.text is not None else prompt[:0]
            if not np.array_equal(known, prompt[: len(known)]):
                raise ValueError(f"past_key_values was made with another text than row {row} of input_ids")
        return own

    # ---- while it runs

    def request(self) -> GenerationRequest:
        """Build what a decoder gets. It is not stored: it refers to this object, and only the garbage collector frees such a cycle."""
        columns, chunk = self._columns, self.config.prefill_chunk_size
        held = max(self._row_cache.lengths) if self._row_cache is not None else 0
        ends = range(held + chunk, columns.count + chunk, chunk) if chunk else ()
        inputs = StageInputs(
            self.prompts,
            self.limits,
            self._sampling_params,
            head_size(self._target),
            chunk=chunk or PREFILL_CHUNK,
            reuse=self._cache is not None,
            # Columns that are padding in every row do not count.
            forwards=tuple(longest for end in ends if (longest := max(columns.tokens(end))) > 0),
            right_padding=self._right_padding,
            grammar=self._grammar,
        )
        return GenerationRequest(
            inputs,
            self._eos,
            self._on_commit,
            self._record,
            cache=self._row_cache,
            returns_cache=self._returns_cache(),
            converts_cache=self._cache is not self._row_cache,
        )

    def _returns_cache(self) -> bool:
        return self._cache is not None or bool(self.config.return_dict_in_generate and self.config.use_cache)

    def stream_prompt(self) -> None:
        """Give the prompt to the streamer, as transformers does before it decodes."""
        if self._stream is not None:
            self._stream.put_prompt()

    def _on_commit(self, source: TextSource) -> None:
        """Check the new tokens of a step against the criteria, then stream them."""
        shutdown.check()
        if self._first is None:
            self._first = time.perf_counter() - self._began
        self._text.source = source
        committed = [source.length(source.target, row) for row in range(len(self.prompts))]
        if self._record is not None:
            # Captured steps go on meanwhile: their tokens count as soon as the record has them, too.
            recorded = zip(committed, self.prompts, self._record.counts, strict=True)
            committed = [min(length, len(prompt) + count) for length, prompt, count in recorded]
        if self._criteria is not None:
            self._criteria.check(committed)
        else:
            self._text.lengths = committed
        if self._stream is not None:
            self._stream.put_new(final=False)

    def follow(self) -> None:
        """Take the text as the leader of a tensor-parallel group commits it: it has drawn the seeds, applied the criteria, and has the scores."""
        self._criteria = self.seeds = self._record = None

    def generated(self) -> list[list[int]]:
        """Per row the generated ids."""
        return self._text.generated()

    def finish(self) -> None:
        """Stream the remaining tokens, and stop the clock. After the decoder has run."""
        # transformers' warning of texts beyond the model's length, at the last length from which it would continue.
        reached = min(self._text.input_ids.shape[1] + max(self._text.counts()), int(self._max_length.max_length) - 1)
        self._max_length(self._text.input_ids.new_empty((1, reached)), None)
        if self._stream is not None:
            self._stream.put_new(final=True)
            self._stream.end()
        self._seconds = time.perf_counter() - self._began

    # ---- afterwards

    def sequences(self) -> torch.Tensor:
        """The committed text: int64 ``[B, S + longest]``, the prompt included. Finished rows are filled with the pad token."""
        generated = self._text.generated()
        longest = max(map(len, generated))
        new = torch.full((len(generated), longest), self._pad, dtype=torch.long, device="cpu")
        for row, tokens in enumerate(generated):
            new[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.long, device="cpu")
        input_ids = self._text.input_ids
        return torch.cat([input_ids.long(), new.to(input_ids.device)], dim=1)

    def report(self, decoder: Decoder) -> Report:
        """Build the report of the call that ``decoder`` ran."""
        assert self._seconds is not None
        rows, names, traces = len(self.prompts), decoder.names, decoder.traces()
        translated, calibrations = decoder.translated, decoder.calibrations
        return Report(
            schedule=decoder.ran_as,
            rows=rows,
            tokens=sum(self._text.counts()),
            seconds=self._seconds,
            seconds_to_first_token=self._first if self._first is not None else self._seconds,
            stages=tuple(
                stage_report(name, decoder.block, i, rows, form, translated.get(i), calibrations.get(i))
                for i, (name, form) in enumerate(zip(names, decoder.forms, strict=True))
            ),
            seeds=None if self.seeds is None else tuple(self.seeds),
            decisions=decoder.remarks or None,
            trace=traces or None,
        )

    def output(
        self, report: Report, return_cache: Callable[[Sequence[int]], RowCache | None]
    ) -> torch.Tensor | PipelineOutput:
        """Build the result of ``model.generate()``; ``return_cache``: that of the target's stage, see :class:`pipespec.drivers.base.CacheOwner`."""
        sequences = self.sequences()
        cache = self._returned_cache(return_cache)
        if not self.config.return_dict_in_generate:
            return sequences
        steps = sequences.shape[1] - self._text.input_ids.shape[1]
        scores = logits = logprobs = None
        if self._record is not None:
            scores, logits = self._per_token(self._record.scores, steps), self._per_token(self._record.logits, steps)
            logprobs = self._logprobs(self._record, steps)
        features = Features(None, None)
        if self.features:
            features = features_of(
                self._target,
                sequences,
                self._mask,
                hidden_states="output_hidden_states" in self.features,
                attentions="output_attentions" in self.features,
                cached=self.config.use_cache is not False,
            )
        return PipelineOutput(
            sequences=sequences,
            scores=scores,
            logits=logits,
            hidden_states=features.hidden_states,
            attentions=features.attentions,
            past_key_values=cache,
            speculation=report,
            logprobs=logprobs,
        )

    def _logprobs(self, record: ScoreRecord, steps: int) -> Logprobs | None:
        both, ids = self._per_token(record.logprobs, steps), self._per_token(record.top_ids, steps)
        if both is None or ids is None:
            return None
        stacked, top_ids = torch.stack(both, 1), torch.stack(ids, 1).long()
        counts = torch.tensor(self._text.counts(), device=stacked.device)
        over = (torch.arange(steps, device=stacked.device) >= counts[:, None])[:, :, None]
        return Logprobs(
            stacked[:, :, 0], top_ids.masked_fill(over, -1), stacked[:, :, 1:].masked_fill(over, -torch.inf)
        )

    def _per_token(self, rows: list[list[torch.Tensor]] | None, steps: int) -> tuple[torch.Tensor, ...] | None:
        """Per generated token ``[B, V]``."""
        return None if rows is None else tuple(self._text.column(rows, i) for i in range(steps))

    def _returned_cache(self, return_cache: Callable[[Sequence[int]], RowCache | None]) -> Cache | None:
        """The target's keys and values of all but each row's last token, where the caller gets them."""
        if not self._returns_cache():
            return None
        own = return_cache([n - 1 for n in self._text.lengths])
        if own is not None and not self._is_known:
            own.text = None
        if own is None or self._cache is None or self._cache is own:
            return own
        # The caller's DynamicCache grows in place, as in transformers.
        if own.text is not None:
            _texts[self._cache] = list(own.text)
        sources = [torch.arange(n) for n in own.lengths]
        targets = [self._columns.of_text(row, n) for row, n in enumerate(own.lengths)]
        width = 1 + max(int(to[-1]) for to in targets)
        for i, states in enumerate(own.states()):
            keys, values = (_moved(x, sources, targets, width) for x in states)
            layer = self._cache.layers[i] if i < len(self._cache.layers) else None
            if layer is None or not layer.is_initialized:
                self._cache.update(keys, values, i)
            else:
                layer.keys, layer.values = keys, values
                keep_window(layer)
        return self._cache


class _Text:
    """The committed text, as far as the criteria have checked it: ``lengths[row]`` positions, the prompt included."""

    def __init__(
        self, input_ids: torch.Tensor, prompts: Sequence[np.ndarray], limits: Sequence[int], eos: list[int], pad: int
    ) -> None:
        self.input_ids, self.pad = input_ids, pad
        self.starts = [len(p) for p in prompts]
        self.lengths = list(self.starts)
        self.limits, self._eos = limits, eos
        self.stopped = [False] * len(prompts)  # by a criterion
        self.source: TextSource | None = None

    def tokens(self, row: int, begin: int, end: int) -> list[int]:
        if self.source is None:
            return []
        return self.source.tokens(self.source.target, row, begin, end)

    def counts(self) -> list[int]:
        """New tokens per row."""
        return [n - start for n, start in zip(self.lengths, self.starts, strict=True)]

    def generated(self) -> list[list[int]]:
        """The new tokens per row."""
        return [
            self.tokens(row, start, n) for row, (start, n) in enumerate(zip(self.starts, self.lengths, strict=True))
        ]

    def has_ended(self, row: int) -> bool:
        n = self.lengths[row]
        if self.stopped[row] or n >= self.limits[row]:
            return True
        return n > self.starts[row] and self.tokens(row, n - 1, n)[0] in self._eos

    def stop(self, row: int) -> None:
        """End ``row`` at its present length."""
        assert self.source is not None
        self.stopped[row] = True
        self.source.end_row(row)

    def column(self, rows: list[list[torch.Tensor]], i: int) -> torch.Tensor:
        """The recorded scores of the ``i``-th new token of every row, ``[B, V]``; zeros for rows that have ended."""
        nothing = torch.zeros_like(rows[0][0])
        return torch.stack([row[i] if i < n else nothing for row, n in zip(rows, self.counts(), strict=True)])


class _Criteria:
    """Stopping criteria, called as transformers calls them: one token of each row at a time, ended rows padded.

    A row that is ahead of the slowest row is cut where it should have ended.
    """

    def __init__(self, text: _Text, criteria: Sequence[Any], pads: bool, record: ScoreRecord | None) -> None:
        self._text, self._criteria, self._pads, self._record = text, criteria, pads, record
        rows, self._width = text.input_ids.shape
        most = max(limit - start for limit, start in zip(text.limits, text.starts, strict=True))
        # Input of the criteria: ids [B, S + n], and scores per column.
        self._ids = text.input_ids.new_full((rows, self._width + most), text.pad)
        self._ids[:, : self._width] = text.input_ids
        self._scores: list[torch.Tensor] = []
        self._num_checked = 0
        self._over = torch.zeros(rows, dtype=torch.bool, device="cpu")  # rows that some criterion has ended

    def check(self, committed: list[int]) -> None:
        """Call the criteria for each new column that all open rows have reached."""
        text = self._text
        while True:
            open_ = [row for row in range(len(committed)) if not text.has_ended(row)]
            if not open_ or any(committed[row] == text.lengths[row] for row in open_):
                return
            at = self._width + self._num_checked
            self._num_checked += 1
            for row in open_:
                text.lengths[row] += 1
                self._ids[row, at] = text.tokens(row, text.lengths[row] - 1, text.lengths[row])[0]
            if self._record is not None and self._record.scores is not None:
                self._scores.append(text.column(self._record.scores, self._num_checked - 1))
            over = torch.zeros(len(committed), dtype=torch.bool, device="cpu")
            for criterion in self._criteria:
                verdict = criterion(self._ids[:, : at + 1], tuple(self._scores) if self._scores else None)
                over |= torch.as_tensor(verdict).cpu().bool()
            if not self._pads:  # transformers then continues each row until all rows are over
                self._over |= over
                over = self._over.all().expand_as(over)
            for row in open_:
                if over[row]:
                    text.stop(row)


class _Stream:
    """Passes tokens to a streamer, each one once and in order, as transformers does."""

    def __init__(self, text: _Text, streamer: Any) -> None:
        self._text, self._streamer = text, streamer
        self._streamed = 0  # new tokens per row

    def put_prompt(self) -> None:
        self._streamer.put(self._text.input_ids.cpu())

    def put_new(self, final: bool) -> None:
        text = self._text
        if len(text.starts) == 1:
            new = text.tokens(0, text.starts[0] + self._streamed, text.lengths[0])
            self._streamed += len(new)
            # One by one, as transformers does outside of assisted decoding, unless the streamer takes blocks.
            for block in [new] if getattr(self._streamer, "takes_blocks", False) else [[token] for token in new]:
                if block:
                    self._streamer.put(torch.tensor(block, device="cpu"))
            return
        # As transformers streams a batch: one token of each row at a time, so the slowest row sets the pace.
        counts = text.counts()
        if final:
            whole = max(counts)
        else:
            whole = min((n for row, n in enumerate(counts) if not text.has_ended(row)), default=0)
        while self._streamed < whole:
            i = self._streamed
            self._streamed += 1
            column = [
                text.tokens(row, start + i, start + i + 1)[0] if i < count else text.pad
                for row, (start, count) in enumerate(zip(text.starts, counts, strict=True))
            ]
            self._streamer.put(torch.tensor(column, device="cpu"))

    def end(self) -> None:
        self._streamer.end()


def _moved(
    states: torch.Tensor, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], width: int
) -> torch.Tensor:
    """Copy columns of keys or values to other places.

    Args:
        states: ``[rows, kv_heads, columns, head_dim]``.
        sources: Per row, columns of ``states``.
        targets: Per row, where they lie in the result.
        width: Columns of the result. Those that nothing is moved to are zero.
    """
    moved = states.new_zeros((*states.shape[:2], width, states.shape[3]))
    for row, (of, to) in enumerate(zip(sources, targets, strict=True)):
        moved[row][:, to.to(states.device)] = states[row][:, of.to(states.device)]
    return moved


def _cached_texts(cache: Cache | None, counts: Sequence[int]) -> list[np.ndarray]:
    """Per row int32 ids of the first tokens in a cache, up to ``counts[row]`` of them, without those that are unknown."""
    texts = None
    if isinstance(cache, RowCache):
        texts = cache.text
    elif isinstance(cache, DynamicCache):
        texts = _texts.get(cache)
    if texts is None or len(texts) != len(counts):
        texts = [np.zeros(0, dtype=np.int32)] * len(counts)
    return [text[:n] for text, n in zip(texts, counts, strict=True)]


def for_transformers(
    model: PreTrainedModel,
    inputs: Any = None,
    generation_config: GenerationConfig | None = None,
    *_: Any,
    past_key_values: RowCache,
    input_ids: Any = None,
    inputs_embeds: Any = None,
    attention_mask: Any = None,
    **kwargs: Any,
) -> Cache:
    """The cache for a call of ``generate()`` with these arguments that transformers decodes, which counts columns, padding included.

    Raises:
        NotImplementedError: The cache cannot have the call's columns.
    """
    cache, given = past_key_values, inputs_embeds
    if given is None:
        given = inputs if input_ids is None else input_ids
    if not isinstance(given, torch.Tensor) or given.ndim < 2:
        return cache
    mask = attention_mask
    if mask is None:
        mask = torch.ones(given.shape[:2], dtype=torch.long, device=given.device)
        tokens: dict[str, Any] = {name: kwargs[name] for name in ("pad_token_id", "eos_token_id") if name in kwargs}
        config = effective_config(model, generation_config, tokens)
        pad, ends = config.pad_token_id, as_ids("eos_token_id", config.eos_token_id)
        if inputs_embeds is None and pad is not None and int(pad) not in ends:
            mask = (given != int(pad)).long()
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
        return cache
    lengths, cached = set(cache.lengths), mask.shape[1] - given.shape[1]
    if len(lengths) == 1 and bool((mask[:, : max(lengths)] != 0).all()):
        return cache  # tokens are columns
    try:
        return cache.as_dynamic(mask, cached if cached > 0 else None)
    except (ValueError, NotImplementedError) as error:
        raise UnsupportedInput(
            "past_key_values", f"past_key_values: {error}; transformers would take other columns for its tokens"
        ) from error


def without_features(name: str, where: str) -> UnsupportedInput:
    """The error for a call that asks for hidden states or attentions."""
    return UnsupportedInput(name, f"generate(): {name} is not supported with {where}")


def _refuse_longer(n: int, row: int, prompt: np.ndarray) -> None:
    raise UnsupportedInput(
        "past_key_values",
        f"past_key_values holds {n} tokens of row {row}, input_ids only {len(prompt)}: pass the whole text, the cached part included, or the "
        "new tokens with the attention_mask of the whole text",
    )
