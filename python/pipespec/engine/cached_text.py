"""CachedText: a model, its cache, and the text whose keys and values the cache holds. A call begins with what earlier ones have read (ResumableText)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from pipespec.config import WIDTH
from pipespec.engine.cache import RowCache
from pipespec.engine.cache_storage import Features
from pipespec.engine.chain import StageInputs
from pipespec.engine.form import Form
from pipespec.engine.forward import described, form_of, forward, forward_row, recheck, wide_columns
from pipespec.engine.known import NATIVE, token_of
from pipespec.engine.native import NativeForm
from pipespec.engine.prefixes import NOT_KEPT, KeptText, Origin, PrefixStore, Source, WeightWatch, numeric_settings
from pipespec.engine.runtime import runtime_of
from pipespec.engine.sampling import common_length
from pipespec.models.properties import embedding_size, input_device, tensor_parallel_size
from pipespec.process.progress import note_reading

if TYPE_CHECKING:
    from pipespec.engine.group import ForwardGroup


PROMPT_TAIL = 64
"""Tokens of a prompt that a draft reads if it begins late. The rest hardly helps it, and would delay the text."""


def forward_group(model: PreTrainedModel) -> ForwardGroup | None:
    """The processes that share a model's tensors; None for one that is whole in this process. All pipelines on a model share it."""
    if tensor_parallel_size(model) == 1:
        return None
    runtime = runtime_of(model)
    if runtime.group is None:
        from pipespec.engine.group import ForwardGroup

        runtime.group = ForwardGroup(model)
    found: ForwardGroup = runtime.group
    return found


class ResumableText:
    """A model, its cache, and the text that the cache holds, from call to call.

    After a call both are kept, see :class:`pipespec.engine.prefixes.PrefixStore`. The next call takes over or copies the longest prefix that each of its rows
    has in common with a kept text, and reads the rest.

    **The text is the same with and without a kept prefix.** Where the bits of keys and values do not depend on how many columns a forward has (the native
    form), a prefix ends anywhere, within tokens that a call has generated, too. Elsewhere prompts are read in chunks that begin at multiples of
    ``StageInputs.chunk``, and a prefix ends at the last such boundary up to which a prompt was read: steps are narrower, so what they have written is
    read again. Where rows of a batch are read together, a prefix is that of the same rows in a batch of as many. Drafts whose bits no text depends on
    keep whatever agrees.

    Args:
        model: in eval mode.
        native: whether the model may run in the native form.
    """

    def __init__(self, model: PreTrainedModel, *, native: bool = True) -> None:
        self.model = model
        self._native = native
        self._cache: RowCache | None = None
        # int32 [rows, positions]: the tokens whose keys and values the cache holds, _held[row] of them.
        self._text = np.zeros((0, 0), dtype=np.int32)
        self._held: list[int] = []
        # Per row, the position of the first of these tokens: a draft that begins late skips the beginning of a long prompt.
        self._skipped: list[int] = []
        self._store = PrefixStore()
        # Of the present call's keys and values; None: they are not to be kept.
        self._made: Origin | None = None
        self._given: KeptText | None = None
        self._watch = WeightWatch()
        self._begun: NativeForm | None = None  # of the present call's forwards
        self._group = forward_group(model)
        self._read_to: list[int] = []  # per row, where the part of the prompt ends that is read before the first step
        self._chunk = 0
        self.reads_wide = True
        """Whether the model's own modules read long parts of a prompt, see :func:`pipespec.engine.forward.wide_columns`."""
        self.needs_same_bits = True
        """Whether a text depends on the bits of this model, so that a kept prefix must have those of a fresh one."""
        self.reused = 0
        """Tokens of the present call's prompts that were not read, as their keys and values were there."""
        self.published: tuple[Sequence[int], torch.dtype] | None = None
        """The hidden states that the forwards keep for a draft, and in which dtype, see :class:`pipespec.engine.cache_storage.Features`; None: none."""

    @property
    def cache(self) -> RowCache | None:
        """Of the present or last call."""
        return self._cache

    def adopt(self, cache: RowCache, text: Sequence[np.ndarray]) -> None:
        """Own a copy of the caller's keys and values. The next prefill continues from what it holds; :meth:`forget` ends that.

        Args:
            cache: of this model's shape.
            text: per row, int32 ids of the tokens that it holds.
        """
        self._shelve()
        self._skipped = [0] * len(text)
        self._set_text(text, max(map(len, text), default=0))
        self._held = [len(tokens) for tokens in text]
        self._cache = cache
        self._given = KeptText(cache, self._text, list(self._held), list(self._skipped), list(self._held), NOT_KEPT)

    def forget(self) -> None:
        """Let no later call continue from what the cache holds: keys and values of the caller need not be those of their text."""
        self._made, self._given = NOT_KEPT, None

    @property
    def begun(self) -> NativeForm | None:
        """The native form of the present call's forwards; None before the first, and where they run in another one."""
        return self._begun

    def end_call(self) -> None:
        """Let go of the native form, which another call may have replaced. The next call does so, too."""
        self._begun = None

    def release(self) -> None:
        """Free the cache, and forget the kept texts. The next prefill allocates a new one."""
        self._cache = self._given = self._made = None
        self._store.clear()
        self._watch = WeightWatch()

    def keep_prefixes(self, budget: int | None) -> None:
        """``budget``: of :class:`pipespec.engine.prefixes.PrefixStore`. A process of a tensor-parallel group keeps none: all would have to keep the same."""
        self._store.budget = budget if self._group is None else 0

    def tokens_kept(self, prompt: np.ndarray) -> int:
        """About how many tokens of ``prompt`` (int32 ``[P]``) the next call need not read. Another thread may run a call meanwhile."""
        texts = [(row, n) for kept in self._store.texts for row, n in zip(kept.text, kept.held, strict=True)]
        texts += zip(self._text, self._held, strict=False)
        return max((common_length(row[:n], prompt[:-1]) for row, n in texts), default=0)

    # ---- the beginning of a call

    def _resume(self, inputs: StageInputs) -> tuple[RowCache, list[int]]:
        """The cache of a call, with what kept texts, or the caller's cache, hold of its prompts. Returns it, and the position up to which it holds each row."""
        prompts = inputs.prompts
        self.end_call()
        given, self._given = self._given, None
        made: Origin | None = NOT_KEPT
        if given is None:
            self._shelve()
            made, sources = self._find(inputs)
            taken = self._store.take_over(sources)
        else:
            sources = self._of_given(given, prompts)
            taken = given if sources[0] is not None else None
        self._made = None  # until cache and text are those of this call
        held = [0 if source is None else source.used for source in sources]
        self._skipped = [0 if source is None else source.kept.skipped[source.row] for source in sources]
        slots = self._in_cache(held)
        self._cache = cache = self._begin_cache(inputs, sources, taken, slots)
        cache.take_rows([source and (source.kept.cache, source.row) for source in sources], slots)
        self._set_text(prompts, inputs.most)
        self._held, self._read_to = [len(p) - 1 for p in prompts], [len(p) - 1 for p in prompts]
        self._made, self.reused = made, sum(held)
        return cache, held

    def _of_given(self, given: KeptText, prompts: Sequence[np.ndarray]) -> list[Source | None]:
        """What the caller's cache holds of the prompts."""
        cache = given.cache
        if cache.rows != len(prompts) or not self._matches(cache):
            return [None] * len(prompts)
        # For a cache that is empty, the first forward does so.
        recheck(self.model, native=self._native)
        same = [
            common_length(given.text[r, :n], p[:-1]) for r, (n, p) in enumerate(zip(given.held, prompts, strict=True))
        ]
        return [
            Source(given, r, n, there) for r, (n, there) in enumerate(zip(same, cache.restorable(same), strict=True))
        ]

    def _begin_cache(
        self, inputs: StageInputs, sources: Sequence[Source | None], taken: KeptText | None, held: Sequence[int]
    ) -> RowCache:
        """The cache for a call, with room for its prompts: that of ``taken``, or another one, into which ``held[r]`` tokens of ``sources`` are to be copied."""
        rows = len(inputs.prompts)
        if taken is not None:
            cache = taken.cache
            self._lay_features(cache, held)
            need = max(map(len, inputs.prompts)) + WIDTH
            if need > cache.capacity:
                cache.reserve(max(need, min(2 * cache.capacity, inputs.most)))
            return cache
        self._cache = None
        spare = self._store.make_room(rows, inputs.capacity, sources)
        if spare is None or not (spare.fits(rows, inputs.capacity) and self._matches(spare)):
            # The old one is freed before the new one is allocated.
            spare = None
            spare = self._new_cache(rows, inputs.capacity)
        spare.reset()
        spare.features = None
        self._lay_features(spare, [0] * rows)
        return spare

    def _new_cache(self, rows: int, capacity: int) -> RowCache:
        return RowCache.for_model(self.model, rows, capacity)

    def _matches(self, cache: RowCache) -> bool:
        """Whether the model could run over a cache now. It may have been moved or cast."""
        return cache.matches(self.model)

    def _lay_features(self, cache: RowCache, held: Sequence[int]) -> None:
        """Let the forwards keep what a draft reads. ``held``: per row, tokens that the cache has already."""
        if self.published is None:
            cache.features = None
        elif isinstance(cache.features, Features) and cache.features.layers == tuple(self.published[0]):
            cache.features.begin = [min(pair) for pair in zip(cache.features.begin, held, strict=True)]
        else:
            cache.features = Features(self.published[0], held, self.published[1])

    def _set_text(self, text: Sequence[np.ndarray], columns: int) -> None:
        self._text = np.zeros((len(text), columns), dtype=np.int32)
        for row, tokens in enumerate(text):
            self._text[row, : len(tokens)] = tokens

    def _read_by(self, cache: RowCache) -> list[int]:
        """Per row, the position up to which a cache holds the text."""
        return [n + skipped for n, skipped in zip(cache.lengths, self._skipped, strict=True)]

    def _in_cache(self, positions: Sequence[int]) -> list[int]:
        """The indices of positions of the text in the cache."""
        return [n - skipped for n, skipped in zip(positions, self._skipped, strict=True)]

    # ---- kept texts

    def _shelve(self) -> None:
        """Keep the text of the last call. After a call that was interrupted at any place, what the cache holds of it."""
        cache, self._cache = self._cache, None
        made, self._made = self._made, None
        if cache is None:
            return
        held = [min(pair) for pair in zip(self._held, self._read_by(cache), strict=True)] if made is not None else []
        kept = self._to_keep(cache, held) if made is not NOT_KEPT and self._store.takes(held) else None
        if kept is None or made is None:
            self._store.spare = cache
            return
        whole = [min(n, end) // made.grid * made.grid for n, end in zip(self._read_to, held, strict=True)]
        self._store.add(KeptText(kept, self._text[:, : max(held)].copy(), held, list(self._skipped), whole, made))

    def _to_keep(self, cache: RowCache, held: Sequence[int]) -> RowCache | None:
        """The cache that is to hold a kept text: that of its call. None: there is no room for one."""
        return cache

    def _find(self, inputs: StageInputs) -> tuple[Origin | None, list[Source | None]]:
        """What the keys and values of a call depend on (None: not known yet), and per row, the kept text with the longest prefix that it may begin with."""
        store, prompts, none = self._store, inputs.prompts, [None] * len(inputs.prompts)
        if not store.texts:
            return None, list(none)
        if not self._matches(store.texts[-1].cache):
            # The model was moved or cast since.
            store.clear()
            return None, list(none)
        recheck(self.model, native=self._native)
        made = self._origin(self._like(), len(prompts))
        store.retain(lambda kept: kept.origin[:3] == made[:3])
        among = [kept for kept in store.texts if kept.origin == made]
        if made.is_shared and len(prompts) > 1:
            return made, store.find_batch(prompts, among)
        return made, [store.find(prompt, among) for prompt in prompts]

    def _like(self) -> RowCache:
        """A cache of the kind over which forwards run."""
        return self._store.texts[-1].cache

    def _form_of(self, cache: RowCache) -> Form:
        """The form of the forwards over a cache: one native form within a call."""
        form = form_of(self.model, cache, native=self._native, begun=self._begun)
        if isinstance(form, NativeForm):
            self._begun = form
        return form

    def _origin(self, cache: RowCache, rows: int) -> Origin:
        """What the keys and values of a call of so many rows depend on now."""
        form, model = self._form_of(cache), token_of(self.model)
        is_native = isinstance(form, NativeForm)
        is_watched = not is_native and self._store.budget != 0
        same = (
            model,
            type(form) if form.token is None else form.token,
            self._watch.version(self.model, model) if is_watched else None,
        )
        is_wide = is_native and self._group is None and self.reads_wide
        is_wide = is_wide and wide_columns(self.model, cache, self._chunk, lambda: form) is not None
        if not self.needs_same_bits or (form.repeats_bits and not is_wide):
            return Origin(*same)
        device = cache.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        numerics = (self._chunk, torch.get_num_threads(), autocast, 0 if is_native else rows, numeric_settings())
        return Origin(*same, numerics, self._chunk, is_shared=not is_native)


class CachedText(ResumableText):
    """A model, its cache, and the text that it has read.

    Args:
        model: in eval mode.
        native: whether the model may run in the native form.
    """

    reads_last = True
    """Whether a native forward that reads prompts also reads their last tokens, where they begin and end alike. The first step then verifies no
    draft tokens. So not with rejection sampling, whose text would depend on the other rows of the batch."""

    def __init__(self, model: PreTrainedModel, *, native: bool = True) -> None:
        super().__init__(model, native=native)
        self._clamp: int | None = None
        self._prompt_logits: torch.Tensor | None = None

    @torch.inference_mode()
    def complete(self, texts: Sequence[np.ndarray], lengths: Sequence[int]) -> RowCache:
        """Make the cache of the last call hold exactly ``texts``, and return it. It stays the stage's.

        Args:
            texts: per row, int32 ids, which go on from the call's text. What the cache lacks is fed.
            lengths: per row, the tokens of it that the call has fed. Columns of the cache after those may be of other tokens.
        """
        cache, ends = self._cache, [len(text) for text in texts]
        assert cache is not None
        # What the leader of a group has fed here is in the caches of its followers, too.
        is_fed = self._group is not None and not self._group.is_leader
        begin = ends if is_fed else [min(all_) for all_ in zip(lengths, ends, cache.lengths, strict=True)]
        # An interrupted call keeps what both texts have.
        self._held = [min(pair) for pair in zip(self._held, begin, strict=True)]
        self._set_text(texts, max(self._text.shape[1], *ends))
        self._roll_back(cache, begin)
        if begin != ends:
            self._fill(cache, begin, ends)
        self._held = ends
        return cache

    @property
    def form(self) -> str:
        """How the model's forward runs, see :func:`pipespec.engine.forward.described`."""
        if self._cache is None:
            return ""
        now = described(self.model, self._cache, native=self._native)
        return now or (NATIVE if self._begun is not None else "")

    @property
    def has_prompt_logits(self) -> bool:
        """Whether the forward that has read the prompt also gives the logits of the next step, which then feeds nothing and verifies no draft tokens."""
        return self._prompt_logits is not None

    @torch.inference_mode()
    def follow(self, inputs: StageInputs) -> list[np.ndarray]:
        """Run the forwards that the leader of the target's group announces, until it ends the call, which has the same ``inputs``.

        Returns:
            Per row, int32 ids of the text that the leader has generated, without the prompt.

        Raises:
            RuntimeError: the leader's call has failed.
        """
        cache, _ = self._open(inputs)
        assert self._group is not None
        while (announced := self._group.receive()).tokens is not None:
            tokens, lengths = announced.tokens, announced.lengths
            cache.truncate(lengths)
            self._grow(cache, max(lengths) + tokens.shape[1])
            self._forward(tokens.to(self._device), cache, announced.keep)
        for row, (prompt, new) in enumerate(zip(inputs.prompts, announced.text, strict=True)):
            self._text[row, len(prompt) : len(prompt) + len(new)] = new
        return list(announced.text)

    # ---- the prompt

    def _open(self, inputs: StageInputs) -> tuple[RowCache, list[int]]:
        """Prepare cache and text of a call. Returns the cache, and how many tokens of each row it holds."""
        self._device, self._chunk, self._prompt_logits = input_device(self.model), inputs.chunk, None
        self._fit_vocabulary(inputs.vocabulary)
        return self._resume(inputs)

    def _fit_vocabulary(self, target_vocabulary: int) -> None:
        # A draft whose vocabulary is padded less than the target's cannot embed each of its tokens.
        own = embedding_size(self.model)
        self._clamp = own - 1 if own < target_vocabulary else None
        self._ids = max(own, target_vocabulary)

    def _fill(self, cache: RowCache, begin: list[int], end: list[int], *, selects: bool = False) -> None:
        """Cache the tokens ``begin[r] .. end[r] - 1`` of each row.

        With ``selects``, forwards by the library also read the last token of a prompt, and native ones and captured ones do where all prompts begin and end alike.
        The first step takes their logits, and reads no weights.
        """
        if self._made is None:
            self._made = self._origin(cache, cache.rows)
        if not cache.is_static:
            # A cache that is full with the longest row has no columns for the others. A static one has them in any case.
            missing = max(e - b for b, e in zip(begin, end, strict=True))
            self._grow(cache, max(self._in_cache(end)) + min(WIDTH, missing))
        first, total = sum(begin), sum(end) - sum(begin)
        note = functools.partial(note_reading, is_target=selects)
        note(0, total)
        logits: dict[int, torch.Tensor] = {}
        if self.reads_wide and self._group is None:
            begin = self._fill_by_library(cache, begin, end, logits if selects else None, note)
            end = [max(pair) for pair in zip(begin, end, strict=True)]
        # Whether a forward of several columns gives the logits after each prompt: a native one with the bits of a forward of its last token.
        reads_last = (
            selects
            and not logits
            and self.reads_last
            and self._group is None
            and len(set(begin)) == len(set(end)) == 1
            and begin[0] < end[0]
            and not cache.is_recurrent
            and self._gives_last_logits(cache)
        )
        end = [e + reads_last for e in end]
        # The states of a complete row do not survive further columns.
        level = len(set(self._in_cache(begin))) == 1 and not cache.is_recurrent
        chunks = prompt_chunks(
            self._text, begin, end, level, lambda: min(self._chunk, cache.capacity - max(cache.lengths))
        )
        for columns, at, real in chunks:
            until = [b + n for b, n in zip(at, real, strict=True)]
            cache.aim(self._in_cache(until))
            keep = int(reads_last and until == end)
            kept = self._forward(torch.from_numpy(columns).to(self._device), cache, keep)
            if keep:
                self._prompt_logits = kept
            if not level:
                # Padding columns of complete rows must not use up the capacity.
                cache.truncate(self._in_cache(until))
            note(min(sum(until) - first, total), total)
            for row, n in enumerate(until):
                if cache.is_recurrent and real[row] == self._chunk and n % self._chunk == 0:
                    cache.mark(row)
        cache.truncate(self._in_cache(end))
        if not logits:
            return
        # The last token of the other prompts, each for itself: a forward of all rows would compute the keys and values of the complete ones again.
        for row, last in enumerate(end):
            if row not in logits:
                with cache.row_alone(row, 1) as alone:
                    token = self._tokens_of(row, last, last + 1)
                    logits[row] = forward(self.model, token, alone, keep=1, form=self._form_of(alone))
        self._prompt_logits = torch.cat([logits[row] for row in range(len(end))])

    def _gives_last_logits(self, cache: RowCache) -> bool:
        """Whether a forward over prompts may also read their last tokens, and give the logits of the first step."""
        return isinstance(self._form_of(cache), NativeForm)

    def _fill_by_library(
        self,
        cache: RowCache,
        begin: list[int],
        end: list[int],
        logits: dict[int, torch.Tensor] | None,
        note: Callable[[int, int], None],
    ) -> list[int]:
        """Cache the tokens that belong to wide forwards, row by row, and add the logits after whole prompts. Returns where the rest begins."""
        first, total = sum(begin), sum(end) - sum(begin)
        last, begin = [e + (logits is not None) for e in end], list(begin)
        most = max(e - b for b, e in zip(begin, last, strict=True))
        wide = wide_columns(self.model, cache, most, lambda: self._form_of(cache))
        for row, to in enumerate(last):
            while wide is not None and (q := min(self._chunk, to - begin[row])) >= wide:
                tokens = self._tokens_of(row, begin[row], begin[row] + q)
                begin[row] += q
                keep = int(logits is not None and begin[row] == to)
                cast(NativeForm, self._form_of(cache)).note_tokens(tokens)
                kept = forward_row(self.model, tokens, cache, row, keep)
                if logits is not None and keep:
                    logits[row] = kept
                note(min(sum(begin) - first, total), total)
        return begin

    def _tokens_of(self, row: int, begin: int, end: int) -> torch.Tensor:
        tokens = torch.from_numpy(self._text[row, begin:end])[None].to(self._device)
        return tokens if self._clamp is None else tokens.clamp(max=self._clamp)

    # ---- forwards

    def _forward(self, fed: torch.Tensor, cache: RowCache, keep: int) -> torch.Tensor:
        if self._clamp is not None:
            fed = fed.clamp(max=self._clamp)
        if self._group is not None and self._group.is_leader:
            self._group.announce(fed, cache.lengths, keep)
        try:
            return forward(self.model, fed, cache, keep=keep, form=self._form_of(cache))
        except BaseException:
            # Lengths grow when a forward is complete, so what an interrupted one has written does not count.
            self._held = [min(pair) for pair in zip(self._held, self._read_by(cache), strict=True)]
            raise

    def _roll_back(self, cache: RowCache, lengths: Sequence[int]) -> None:
        """Truncate to ``lengths``. Tokens after the last recurrent states that are left are fed again."""
        there = cache.restorable(lengths)
        cache.truncate(there)
        if there != list(lengths):
            cache.reserve_states()
            self._fill(cache, there, list(lengths))

    def _grow(self, cache: RowCache, need: int) -> None:
        """Room for ``need`` positions per row. A cache that becomes full doubles."""
        if need > cache.capacity:
            cache.reserve(max(need, min(2 * cache.capacity, self._text.shape[1])))


def prompt_chunks(
    text: np.ndarray, begin: Sequence[int], end: Sequence[int], level: bool, widest: Callable[[], int]
) -> Iterator[tuple[np.ndarray, list[int], list[int]]]:
    """The tokens ``begin[r] .. end[r] - 1`` of each row of ``text [rows, positions]``, in chunks of up to ``widest()`` columns.

    With ``level``, complete rows continue with padding columns, so that rows which begin together stay together and need no mask.

    Yields:
        int32 columns ``[rows, q]``, per row the position of the first one, and how many of them are tokens of the row.
    """
    begin = list(begin)
    while (missing := max(e - b for b, e in zip(begin, end, strict=True))) > 0:
        q = min(widest(), missing)
        real = [max(0, min(q, e - b)) for b, e in zip(begin, end, strict=True)]
        columns = np.zeros((len(end), q), dtype=np.int32)
        for row, (b, n) in enumerate(zip(begin, real, strict=True)):
            columns[row, :n] = text[row, b : b + n]
        yield columns, begin, real
        begin = [b + (q if level else n) for b, n in zip(begin, real, strict=True)]
