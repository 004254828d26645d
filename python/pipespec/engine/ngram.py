"""Prompt lookup as the first draft of a chain: an index of n-grams instead of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from transformers import PreTrainedModel

from pipespec.config import WIDTH
from pipespec.models.properties import embedding_size
from pipespec.models.tokenizers import load_tokenizer
from pipespec_kernels import _native
from pipespec_kernels.state import StateBlock

NGRAM = "ngram"
"""In place of a draft: :class:`NgramDraft` with its defaults. Also the name of the stage."""

_MOST_MATCH: int = _native.MOST_MATCH


@dataclass(frozen=True, eq=False, kw_only=True)
class NgramDraft:
    """Prompt lookup: a draft without a model, in place of the first of ``drafts``. The string ``"ngram"`` stands for the defaults.

    It drafts the tokens that followed the latest earlier occurrence of the newest tokens, in the prompt or the generated text. The
    longest occurrence counts. Where there is none, it drafts nothing, and the next stage decodes as without it. This is prompt lookup decoding
    (Saxena 2023).

    Args:
        min_match: Minimum number of tokens that must occur earlier.
        max_match: Maximum number of tokens that are compared, up to 32.
        corpus: More text to look in: the path of a UTF-8 text, which is encoded by the target's tokenizer, or token ids ``[N]``. All rows share it.
            Of equally long occurrences, those in the row's own text come first.

    Raises:
        ValueError: A number is out of range, or ``corpus`` is empty or not one sequence.
        TypeError: A value has the wrong type.
    """

    min_match: int = 2
    max_match: int = 8
    corpus: Path | str | Sequence[int] | np.ndarray | None = None

    def __post_init__(self) -> None:
        for name in ("min_match", "max_match"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be a number of tokens, not {value!r}")
        if not 1 <= self.min_match <= self.max_match <= _MOST_MATCH:
            raise ValueError(
                f"an n-gram draft needs 1 <= min_match <= max_match <= {_MOST_MATCH}, not {self.min_match} and {self.max_match}"
            )
        if self.corpus is None or isinstance(self.corpus, (str, Path)):
            return
        ids = np.asarray(self.corpus)
        if ids.dtype.kind not in "iu" or ids.ndim != 1 or len(ids) == 0:
            raise ValueError("corpus must be a path, or a sequence of token ids")
        object.__setattr__(self, "corpus", ids)

    def for_target(self, given: Any, target: PreTrainedModel) -> NgramDraft:
        """Return this draft with the ids of its corpus.

        Args:
            given: What the user passed for the target, a path or the model itself. Its tokenizer lies there.
            target: The model.

        Raises:
            FileNotFoundError: There is no such corpus, or no tokenizer beside the target.
            ValueError: The corpus is empty, is not UTF-8, or has ids outside of the vocabulary.
        """
        if self.corpus is None:
            return self
        ids = self.corpus
        if isinstance(ids, (str, Path)):
            source = given if given is not target else target.config._name_or_path
            ids = np.array(_encoded(Path(ids), source))
        if len(ids) == 0:
            raise ValueError("the corpus of the n-gram draft is empty")
        vocabulary = embedding_size(target)
        low, high = int(np.min(ids)), int(np.max(ids))
        if low < 0 or high >= vocabulary:
            raise ValueError(
                f"the corpus of the n-gram draft has token ids from {low} to {high}; the target's vocabulary has {vocabulary} tokens: "
                "encode the text with the target's tokenizer"
            )
        return replace(self, corpus=np.ascontiguousarray(ids, dtype=np.int32))

    def index(self, tokens: np.ndarray | None = None) -> _native.NgramIndex:
        """Return a new index over ``tokens``, int32 ``[N]``."""
        index = _native.NgramIndex(self.min_match, self.max_match)
        if tokens is not None:
            index.write(0, tokens)
        return index


def first_of(drafts: Sequence[Any]) -> tuple[NgramDraft | None, list[Any]]:
    """Split the drafts that a user gave into the n-gram draft, if the first is one, and the models.

    Raises:
        ValueError: An n-gram draft in another place.
    """
    given = [NgramDraft() if isinstance(draft, str) and draft == NGRAM else draft for draft in drafts]
    first = given[0] if given and isinstance(given[0], NgramDraft) else None
    models = given[1:] if first is not None else given
    if any(isinstance(model, NgramDraft) for model in models):
        raise ValueError(
            f"an n-gram draft can only be the first of the drafts (a folder of this name: './{NGRAM}'): it costs nothing, so that every "
            "other draft comes behind it"
        )
    return first, models


def _encoded(file: Path, source: Any) -> list[int]:
    """Token ids of a corpus, UTF-8 text, by the tokenizer in a folder or of a hub name."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the corpus {file} is not UTF-8 text") from error
    except ValueError as error:  # a NUL in the name
        raise ValueError(f"the corpus {str(file)!r} is no path: {error}") from error
    try:
        tokenizer = load_tokenizer(source)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"the corpus {file} cannot be encoded, as there is no tokenizer beside the target ({error}): give its token ids instead, "
            "NgramDraft(corpus=tokenizer(text).input_ids)"
        ) from error
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


class NgramStage:
    """The stage of an n-gram index: the first of a chain, or the last draft.

    It has no process of its own. As the first stage, the stage downstream calls :meth:`fill` before each of its steps. As the last draft, it offers
    the target its own tokens (:meth:`fill`) or those of the stage upstream (:meth:`relay`), as the controller chooses.

    Args:
        draft: With the ids of its corpus, see :meth:`NgramDraft.for_target`.
        block: The state block of the chain.
        trace: Buffer for the times of its steps; None: no trace.
        index: Place in the chain.
    """

    form: ClassVar[str] = "n-gram index"
    """In place of how a model's forward runs, for reports."""

    def __init__(
        self,
        draft: NgramDraft,
        block: StateBlock,
        trace: _native.TraceBuffer | None = None,
        *,
        index: int = 0,
    ) -> None:
        self._block, self._trace, self._index = block, trace, index
        self._empty = draft.index()
        self._corpus = None if draft.corpus is None else draft.index(np.asarray(draft.corpus))
        self._native: _native.NgramStage | None = None

    def prefill(self, prompts: Sequence[np.ndarray]) -> None:
        """Start a call: index each prompt, int32 ``[P_r]``, but its last token, which the first step takes from the block."""
        self._native = self._block.ngram_stage(self._index, WIDTH, self._empty, self._corpus)
        self._native.trace(self._trace)
        self._rows = len(prompts)
        for row, prompt in enumerate(prompts):
            self._native.prefill(row, prompt[:-1])

    def fill(self, lookahead: int) -> None:
        """Draft until each row is ``lookahead`` tokens ahead of the next stage, or has no match."""
        assert self._native is not None
        self._native.fill(lookahead)

    def foresee(self, lookahead: int) -> list[tuple[int, int]]:
        """Per row, how many tokens :meth:`fill` would draft now, and how many tokens of the text the match has. The row follows the target before, and may publish that."""
        assert self._native is not None
        return [self._native.foresee(row, lookahead) for row in range(self._rows)]

    def relay(self, lookahead: int) -> None:
        """Publish the tokens of the stage upstream, at most ``lookahead`` per row."""
        assert self._native is not None
        self._native.relay(lookahead)

    def release(self) -> None:
        """Free the index of the last call."""
        self._native = None
