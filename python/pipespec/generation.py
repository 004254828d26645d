"""Generation: one call of ``generate()``, from what transformers has prepared to what it would have returned."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel
from transformers.generation import EosTokenCriteria, GenerateDecoderOnlyOutput, MaxLengthCriteria

from pipespec import ending
from pipespec.angles import LengthAngles
from pipespec.arguments import check_options, refusal
from pipespec.cache import RowCache
from pipespec.compat import head_size
from pipespec.drivers import Request, Runner
from pipespec.observe import Report
from pipespec.observe.report import stage_report
from pipespec.sampling import Record, Selection, row_seeds
from pipespec.stage import PREFILL_CHUNK, Start, stage_names
from pipespec_kernels.state import MAX_EOS


@dataclass
class PipelineOutput(GenerateDecoderOnlyOutput):
    """What ``return_dict_in_generate=True`` returns: transformers' fields, and the call's report as ``speculation``."""

    speculation: Report | None = None


class Generation:
    """One call, prepared by transformers: rows, limits, processors, criteria.

    Raises ``ValueError`` or ``NotImplementedError``, naming the argument, for what cannot be honoured.
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
        cache: Cache | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> None:
        check_options(config)
        self.input_ids, self.config, self._streamer, self._cache = input_ids, config, streamer, cache
        rows, width = input_ids.shape
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        lengths = [int(n) for n in mask.sum(dim=1)]
        _check_layout(mask, lengths, position_ids)
        ids = input_ids.to("cpu", torch.int32).numpy()
        self.prompts = [ids[row, width - n :].copy() for row, n in enumerate(lengths)]
        self._padding = [ids[row, : width - n].astype(np.int64) for row, n in enumerate(lengths)]

        most = config.max_length
        eos: list[int] = []
        self._criteria = []
        self._pads = False  # transformers fills finished rows only where an end-of-text token exists
        for criterion in stopping_criteria:
            if type(criterion) is MaxLengthCriteria:
                most = min(most, criterion.max_length)
            elif type(criterion) is EosTokenCriteria and getattr(criterion, "new_token_length", 1) == 1:
                eos += [int(token) for token in criterion.eos_token_id.flatten() if int(token) >= 0]
                self._pads = True
            else:
                self._criteria.append(criterion)
        if len(eos) > MAX_EOS:
            raise ValueError(f"eos_token_id: at most {MAX_EOS} ids, got {len(eos)}")
        pad = getattr(config, "_pad_token_tensor", None)
        self._pad = int(pad) if pad is not None else (eos or [0])[0]
        new = most - width
        self.limits = [n + new for n in lengths]

        self.seeds = row_seeds(seed, rows) if config.do_sample or seed is not None else None
        if not config.do_sample:
            self.seeds = None  # greedy: a seed is looked at, and changes nothing
        wants = config.return_dict_in_generate
        self._record = None
        if wants and (config.output_scores or config.output_logits):
            self._record = Record(
                [[] for _ in range(rows)] if config.output_scores else None,
                [[] for _ in range(rows)] if config.output_logits else None,
            )
        self._own_cache = self._adopted(target) if cache is not None else None
        # Columns that are padding in every row do not count.
        longest, chunk = max(lengths), config.prefill_chunk_size
        held = max(self._own_cache.lengths) if self._own_cache is not None else 0
        ends = (min(end, width) + longest - width for end in range(held + chunk, width + chunk, chunk)) if chunk else ()
        start = Start(
            self.prompts,
            self.limits,
            Selection.of(logits_processor, seeds=self.seeds, padding=self._padding, ends=eos),
            head_size(target),
            chunk=chunk or PREFILL_CHUNK,
            reuse=cache is not None,
            forwards=tuple(end for end in ends if end > 0),
        )
        self.request = Request(start, eos, self._on_commit, self._record)
        self._target = target
        self._after_step: Callable[[], None] | None = None
        self._began = time.perf_counter()
        self._first: float | None = None
        self._lengths = [len(p) for p in self.prompts]  # committed and looked at
        self._done = [False] * rows
        # What the criteria are shown: ids [B, S + n], scores per column; and how many new columns they have seen.
        self._seen: torch.Tensor | None = None
        self._shown: list[torch.Tensor] = []
        self._judged = 0
        self._over = torch.zeros(rows, dtype=torch.bool, device="cpu")  # rows that some criterion has called over
        self._streamed = 0  # new tokens per row handed to the streamer

    def follows(self, angles: LengthAngles) -> bool:
        """Whether the call's rotary angles can be those of ``generate()``."""
        in_chunks, padded = self.config.prefill_chunk_size is not None, min(map(len, self._padding)) > 0
        return angles.are_followed(in_chunks=in_chunks, padded=padded)

    # ---- a cache from outside

    @property
    def adopted(self) -> RowCache | None:
        """What the target will go on with, where the caller gave a cache."""
        return self._own_cache

    def copies(self, always: bool) -> bool:
        """Whether the caller gets a copy of the target's keys and values, beside the cache itself. ``always``: of whoever does not give its own away."""
        if not self._returns_cache():
            return False
        own = self._own_cache
        return self._cache is not own or (always and (own is None or own.capacity < max(self.limits)))

    def _returns_cache(self) -> bool:
        return self._own_cache is not None or bool(self.config.return_dict_in_generate and self.config.use_cache)

    def _adopted(self, target: PreTrainedModel) -> RowCache:
        """The caller's cache as a RowCache that holds a part of every prompt."""
        cache = self._cache
        rows = len(self.prompts)
        if isinstance(cache, RowCache):
            if cache.rows != rows:
                raise ValueError(f"past_key_values holds {cache.rows} rows, input_ids {rows}")
            if not cache.suits(target):
                raise ValueError(f"past_key_values does not fit the target, it is another model's: {cache!r}")
            held = list(cache.lengths)
            own = cache
        elif isinstance(cache, DynamicCache):
            n = int(cache.get_seq_length())
            if rows > 1:
                raise NotImplementedError(
                    f"past_key_values: a DynamicCache has one length for all rows, and here each of the {rows} has its own; pass the "
                    "cache that a call of this pipeline returned, or one row"
                )
            if len(self._padding[0]):
                raise NotImplementedError(
                    "past_key_values: a DynamicCache behind padding; pass input_ids without padding"
                )
            if n and cache.layers[0].keys.shape[0] != rows:
                raise ValueError(f"past_key_values holds {cache.layers[0].keys.shape[0]} rows, input_ids {rows}")
            own = RowCache.for_model(target, rows, max(n, *self.limits) + 1)
            if n:
                if len(cache.layers) != len(own.layers):
                    raise ValueError(f"past_key_values has {len(cache.layers)} layers, the target {len(own.layers)}")
                try:
                    own.load([(layer.keys, layer.values) for layer in cache.layers])
                except ValueError as error:
                    raise ValueError(f"past_key_values does not fit the target: {error}") from error
            held = [n] * rows
        else:
            raise NotImplementedError(
                f"past_key_values: {type(cache).__name__} is not supported; pass a DynamicCache, or the cache that a call of this "
                "pipeline returned"
            )
        for row, (n, prompt) in enumerate(zip(held, self.prompts, strict=True)):
            if n > len(prompt):
                raise ValueError(
                    f"past_key_values holds {n} tokens of row {row}, input_ids only {len(prompt)}: pass the whole text, the cached part "
                    "included"
                )
            known = own.text[row] if own.text is not None else prompt[:0]
            if not np.array_equal(known, prompt[: len(known)]):
                raise ValueError(f"past_key_values was made with another text than row {row} of input_ids")
        return own

    # ---- while it runs

    def run(self, driver: Runner, after_step: Callable[[], None] | None = None) -> None:
        """Generate. What was committed until then can be had from :meth:`sequences` even if this raises. ``after_step``: called after
        each step of the target's; it may steer the driver."""
        self._after_step = after_step
        self._block, self._index = driver.block, driver.block.target
        given = None
        if self._own_cache is not None:
            given = list(self._own_cache.lengths)
            driver.target.adopt(self._own_cache, [p[:n] for p, n in zip(self.prompts, given, strict=True)])
        self._driver = driver
        try:
            driver.run(self.request)
        except BaseException:
            if self._own_cache is not None and given is not None:
                driver.target.release(given)  # the caller gets back what was given
            raise
        if self._streamer is not None:
            self._stream(final=True)
            self._streamer.end()

    def _on_commit(self) -> None:
        """After each step of the target's: new tokens are looked at one by one, then handed on."""
        ending.check()
        if self._first is None:
            self._first = time.perf_counter() - self._began
        raw = [self._block.length(self._index, row) for row in range(len(self.prompts))]
        if self._criteria:
            self._judge(raw)
        else:
            self._lengths = raw
        if self._streamer is not None:
            self._stream(final=False)
        if self._after_step is not None:
            self._after_step()

    def _judge(self, raw: list[int]) -> None:
        """Ask the criteria about each new column that all open rows have reached.

        As transformers does: about the batch as a whole, one token of each row at a time, ended rows padded. A row that runs ahead of the
        slowest one is cut where it should have ended.
        """
        rows, width = range(len(self.prompts)), self.input_ids.shape[1]
        if self._seen is None:
            most = max(limit - len(p) for limit, p in zip(self.limits, self.prompts, strict=True))
            self._seen = self.input_ids.new_full((len(self.prompts), width + most), self._pad)
            self._seen[:, :width] = self.input_ids
        while True:
            open_ = [row for row in rows if not self._ended(row)]
            if not open_ or any(raw[row] == self._lengths[row] for row in open_):
                return
            at = width + self._judged
            self._judged += 1
            for row in open_:
                self._lengths[row] += 1
                self._seen[row, at] = self._tokens(row, self._lengths[row] - 1, self._lengths[row])[0]
            if self._record is not None and self._record.scores is not None:
                self._shown.append(self._column(self._record.scores, self._judged - 1))
            over = torch.zeros(len(self.prompts), dtype=torch.bool, device="cpu")
            for criterion in self._criteria:
                verdict = criterion(self._seen[:, : at + 1], tuple(self._shown) if self._shown else None)
                over |= torch.as_tensor(verdict).cpu().bool()
            if not self._pads:  # transformers then lets a row run on until all are over
                self._over |= over
                over = self._over.all().expand_as(over)
            for row in open_:
                if over[row]:
                    self._done[row] = True
                    self._block.end_row(row)

    def _tokens(self, row: int, begin: int, end: int) -> list[int]:
        return self._block.tokens(self._index, row, begin, end)

    def generated(self) -> list[list[int]]:
        """Per row its new tokens, as far as they were looked at."""
        return [
            self._tokens(row, len(p), n) for row, (p, n) in enumerate(zip(self.prompts, self._lengths, strict=True))
        ]

    def _stream(self, final: bool) -> None:
        start = len(self.prompts[0])
        if len(self.prompts) == 1:
            new = self._tokens(0, start + self._streamed, self._lengths[0])
            self._streamed += len(new)
            # One by one, as transformers does outside of assisted decoding, unless the streamer wants to see the blocks.
            for block in [new] if getattr(self._streamer, "takes_blocks", False) else [[token] for token in new]:
                if block:
                    self._streamer.put(torch.tensor(block, device="cpu"))
            return
        # As transformers streams a batch: one token of each row at a time, so the slowest row sets the pace.
        counts = [n - len(p) for n, p in zip(self._lengths, self.prompts, strict=True)]
        if final:
            whole = max(counts)
        else:
            whole = min((n for row, n in enumerate(counts) if not self._ended(row)), default=0)
        while self._streamed < whole:
            at = self._streamed
            self._streamed += 1
            column = [
                self._tokens(row, len(p) + at, len(p) + at + 1)[0] if at < count else self._pad
                for row, (p, count) in enumerate(zip(self.prompts, counts, strict=True))
            ]
            self._streamer.put(torch.tensor(column, device="cpu"))

    def _ended(self, row: int) -> bool:
        n = self._lengths[row]
        if self._done[row] or n >= self.limits[row]:
            return True
        return n > len(self.prompts[row]) and self._tokens(row, n - 1, n)[0] in self.request.eos

    def close(self) -> None:
        """Let go of request and driver, which refer back to here: nothing of a call waits for the garbage collector."""
        for name in ("request", "_driver", "_block"):
            self.__dict__.pop(name, None)

    # ---- afterwards

    def sequences(self) -> torch.Tensor:
        """LongTensor ``[B, S + longest]``, what was committed; finished rows filled with the pad token."""
        generated = self.generated()
        longest = max(map(len, generated))
        new = torch.full((len(generated), longest), self._pad, dtype=torch.long, device="cpu")
        for row, tokens in enumerate(generated):
            new[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.long, device="cpu")
        return torch.cat([self.input_ids.long(), new.to(self.input_ids.device)], dim=1)

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return time.perf_counter() - self._began

    def report(
        self,
        schedule: str,
        names: Sequence[str] | None = None,
        decisions: Sequence[str] | None = None,
        seconds: float = 0.0,
        traces: Mapping[str, np.ndarray] | None = None,
    ) -> Report:
        """What the call did; ``names``: of its stages; ``traces``: :meth:`Driver.traces` of the driver that ran it."""
        seconds = seconds or self.seconds
        rows = len(self.prompts)
        names = names or stage_names(self._index + 1)
        return Report(
            schedule=schedule,
            rows=rows,
            tokens=sum(n - len(p) for n, p in zip(self._lengths, self.prompts, strict=True)),
            seconds=seconds,
            seconds_to_first_token=self._first if self._first is not None else seconds,
            stages=tuple(stage_report(name, self._block, i, rows) for i, name in enumerate(names)),
            seeds=None if self.seeds is None else tuple(self.seeds),
            decisions=None if decisions is None else tuple(decisions),
            trace=dict(zip(names, traces.values(), strict=True)) if traces else None,
        )

    def output(self, report: Report) -> torch.Tensor | PipelineOutput:
        """What ``model.generate()`` would return."""
        sequences = self.sequences()
        cache = self._returned_cache()
        if not self.config.return_dict_in_generate:
            return sequences
        steps = sequences.shape[1] - self.input_ids.shape[1]
        scores = logits = None
        if self._record is not None:
            scores, logits = self._columns(self._record.scores, steps), self._columns(self._record.logits, steps)
        return PipelineOutput(
            sequences=sequences, scores=scores, logits=logits, past_key_values=cache, speculation=report
        )

    def _columns(self, rows: list[list[torch.Tensor]] | None, steps: int) -> tuple[torch.Tensor, ...] | None:
        """Per generated token ``[B, V]``; zeros in rows that have ended."""
        if rows is None:
            return None
        return tuple(self._column(rows, i) for i in range(steps))

    def _column(self, rows: list[list[torch.Tensor]], i: int) -> torch.Tensor:
        """Of the ``i``-th new token of every row, ``[B, V]``; zeros where the row has ended."""
        nothing = torch.zeros_like(rows[0][0])
        counts = [n - len(p) for n, p in zip(self._lengths, self.prompts, strict=True)]
        return torch.stack([row[i] if i < count else nothing for row, count in zip(rows, counts, strict=True)])

    def _returned_cache(self) -> Cache | None:
        """The target's keys and values of all but each row's last token, where the caller asked for them or gave some."""
        if not self._returns_cache():
            return None
        own = self._driver.target.release([n - 1 for n in self._lengths])
        if own is None or self._cache is None or self._cache is own:
            return own
        # The caller's DynamicCache grows in place, as transformers has it.
        for i, (keys, values) in enumerate(own.states()):
            layer = self._cache.layers[i] if i < len(self._cache.layers) else None
            if layer is None or not layer.is_initialized:
                self._cache.update(keys.clone(), values.clone(), i)
            else:
                layer.keys, layer.values = keys.clone(), values.clone()
        return self._cache


def _check_layout(mask: torch.Tensor, lengths: list[int], position_ids: torch.Tensor | None) -> None:
    """Padding on the left only, and positions that count the real tokens: what transformers derives from the mask."""
    width = mask.shape[1]
    for row, n in enumerate(lengths):
        if n == 0 or not bool(mask[row, width - n :].all()):
            raise ValueError(f"attention_mask: row {row} is empty or not padded on the left only; pad on the left")
        if position_ids is None:
            continue
        own = position_ids[row % position_ids.shape[0], position_ids.shape[1] - n :]
        if own.tolist() != list(range(n)):
            raise refusal("position_ids", own.tolist())
