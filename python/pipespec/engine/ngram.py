"""Prompt lookup as a draft: an index of n-grams of the text, and of a corpus, instead of a model.

Token ids of a corpus are kept in the user's cache by text and tokenizer.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from pipespec.config import WIDTH
from pipespec.engine.chain import DraftSpec, InlineStage
from pipespec.models.properties import embedding_size
from pipespec.models.tokenizers import load_tokenizer, tokenizer_file
from pipespec.process import files
from pipespec_kernels import _native
from pipespec_kernels.env import cache_folder

ANSWERS = Path(__file__).parents[1] / "data" / "answers.txt.gz"
"""The corpus that is there by default: answers of Qwen2.5-0.5B-Instruct to common kinds of questions, about 70,000 tokens. It has the phrases that answers of
language models share, whichever model wrote them."""


def ids_of_answers(source: str | Path, vocabulary: int) -> np.ndarray | None:
    """Ids of :data:`ANSWERS`, int32 ``[N]``; None: no tokenizer with at most so many tokens is where the model was loaded from.

    Args:
        source: folder, hub name or GGUF file.
        vocabulary: rows of the model's embedding.
    """
    # A tokenizer that cannot be read is reported where the user asks for it (tokenizers raises the base class). Without the corpus nothing is wrong.
    with suppress(Exception):
        file = tokenizer_file(source)
        ids = None if file is None else corpus_ids(ANSWERS, file)
        if ids is not None and int(ids.max()) < vocabulary:
            return ids
    return None


def corpus_ids(text: Path, source: str | Path) -> np.ndarray:
    """Token ids of a text, int32 ``[N]``.

    The first call for a text and a tokenizer keeps them in the user's cache.

    Args:
        text: a UTF-8 file, gzipped where its name ends in ``.gz``.
        source: of the tokenizer: a folder, a hub name, a ``tokenizer.json`` or a GGUF file.

    Raises:
        FileNotFoundError: there is no such text, or no tokenizer.
        ValueError: the text is not UTF-8, or the file is damaged.
    """
    written, file = _read(text), tokenizer_file(source)
    kept = None if file is None else cache_folder() / f"corpus-{_digest(written, file)}.npy"
    if kept is not None:
        # What is there and no array of ids is written again, whatever numpy says of it.
        with suppress(Exception):
            ids: np.ndarray = np.load(kept, allow_pickle=False)
            if ids.dtype == np.int32 and ids.ndim == 1 and len(ids) and int(ids.min()) >= 0:
                return ids
    ids = np.array(_encoded(written, text, source), dtype=np.int32)
    if kept is not None:
        # Where nothing can be kept, each process encodes the text.
        with suppress(OSError):
            kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            buffer = io.BytesIO()
            np.save(buffer, ids, allow_pickle=False)
            files.replace(kept, buffer.getvalue())
            kept.chmod(0o600)  # a corpus may be private
    return ids


def _read(file: Path) -> str:
    try:
        data = file.read_bytes()
        return (gzip.decompress(data) if file.suffix == ".gz" else data).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the corpus {file} is not UTF-8 text") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"the corpus {file} is not a whole gzip file: {error}") from error
    except ValueError as error:  # a NUL in the name
        raise ValueError(f"the corpus {str(file)!r} is no path: {error}") from error


def _digest(text: str, tokenizer: Path) -> str:
    """Of a text and of the file that holds a tokenizer, whose contents may be gigabytes."""
    status = tokenizer.stat()
    about = f"{tokenizer.resolve()} {status.st_size} {status.st_mtime_ns} "
    return hashlib.sha256(about.encode() + text.encode()).hexdigest()[:32]


def _encoded(text: str, file: Path, source: str | Path) -> list[int]:
    if Path(source).name == "tokenizer.json":
        return list(Tokenizer.from_file(str(source)).encode(text, add_special_tokens=False).ids)
    try:
        tokenizer = load_tokenizer(source)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"the corpus {file} cannot be encoded, as there is no tokenizer in the target's folder ({error}): give its token ids instead, "
            "NgramDraft(corpus=tokenizer(text).input_ids)"
        ) from error
    return list(tokenizer(text, add_special_tokens=False).input_ids)


NGRAM = "ngram"
"""In place of a draft: :class:`NgramDraft` with its defaults. Also the name of the stage."""

_MAX_MATCH: int = _native.MAX_MATCH
_UNSORTED = 512
"""Generated tokens from which on, or from a 64th of the corpus, the corpus is sorted again before a call: 10 ms for 70,000 tokens, 50 ms for 330,000."""


class NgramStage(InlineStage):
    """The stage of an n-gram index, with the ids of its corpus, see :meth:`NgramDraft.for_target`.

    Under the controller it is the last draft, and offers the target its own tokens (:meth:`fill`) or those of the stage upstream (:meth:`relay`).
    What a call has generated belongs to the corpus of later calls (as in SuffixDecoding, Oliaro et al. 2024).
    """

    _running: _native.NgramStage | None = None

    def __init__(self, spec: NgramDraft, *place: Any, **options: Any) -> None:
        super().__init__(spec, *place, **options)
        self._empty = _native.NgramIndex(spec.min_match, spec.max_match)
        self._spec = spec
        self._given = np.empty(0, np.int32) if spec.ids is None else spec.ids
        self._history = np.empty(0, np.int32)
        self._unsorted = 0
        self._corpus = self._sorted()

    def _sorted(self) -> _native.NgramCorpus | None:
        self._unsorted = 0
        ids = np.concatenate([self._given, self._history])
        return _native.NgramCorpus(ids, self._spec.max_match) if len(ids) else None

    def prefill(self, prompts: Sequence[np.ndarray]) -> None:
        self._remember()
        if self._unsorted >= max(_UNSORTED, (len(self._given) + len(self._history)) // 64):
            self._corpus = self._sorted()
        self._running = self.block.ngram_stage(self.index, WIDTH, self._empty, self._corpus)
        self._running.trace(self.trace)
        self._prompts = [len(prompt) for prompt in prompts]
        for row, prompt in enumerate(prompts):
            self._running.prefill(row, prompt[:-1])

    def fill(self, count: int) -> None:
        assert self._running is not None
        self._running.fill(count)

    def foresee(self, count: int) -> list[tuple[int, int]]:
        """Per row, how many tokens :meth:`fill` would draft now, and how many tokens of the text the match has. The row follows the target before, and may publish that."""
        assert self._running is not None
        return [self._running.foresee(row, count) for row in range(len(self._prompts))]

    def relay(self, count: int) -> None:
        assert self._running is not None
        self._running.relay(count)

    def release(self) -> None:
        super().release()
        self._remember()

    def _remember(self) -> None:
        """Add the texts of the last call to the history."""
        if self._running is not None and self._spec.history:
            texts = [self._running.text(row, begin) for row, begin in enumerate(self._prompts)]
            self._history = np.concatenate([self._history, *texts])[-self._spec.history :]
            self._unsorted += sum(map(len, texts))
        self._running = None


@dataclass(frozen=True, eq=False, kw_only=True)
class NgramDraft(DraftSpec):
    """Prompt lookup: a draft without a model, in place of one of ``drafts``. The string ``"ngram"`` stands for the defaults.

    It drafts the tokens that followed the latest earlier occurrence of the newest tokens, in the prompt or the generated text. The
    longest occurrence counts (prompt lookup decoding, Saxena 2023). Where what follows in a corpus is more certain, by the length and the number of the
    occurrences, it drafts that (as retrieval does, He et al. 2023, REST). Where there is neither, it drafts nothing, and the next stage decodes as without it.

    Args:
        min_match: Minimum number of tokens that must occur earlier in the text.
        max_match: Maximum number of tokens that are compared, up to 32.
        corpus: A text whose phrases are likely: the path of a UTF-8 text (gzipped: ``.gz``), which is encoded by the target's tokenizer, or token ids
            ``[N]``. All rows share it. By default a text of answers comes with the package, and takes part where a tokenizer lies beside the
            target's weights. None: no corpus.
        history: Maximum number of tokens of earlier answers of the same pipeline that belong to the corpus; the latest ones count. 0, or a pipeline with
            ``prefix_cache=0``: none. Captured rounds have none.

    Raises:
        ValueError: A number is out of range, or ``corpus`` is empty or not one sequence.
        TypeError: A value has the wrong type.
    """

    name = NGRAM
    label = "an n-gram draft"
    form = "n-gram index"
    stage_class = NgramStage
    inline = True
    runs_at_once = True
    lookahead = 8  # its draft tokens take no time, but a long verification of wrong ones does
    source = NGRAM

    min_match: int = 2
    max_match: int = 8
    corpus: Path | str | Sequence[int] | np.ndarray | None = ANSWERS
    history: int = 1 << 18
    ids: np.ndarray | None = field(default=None, repr=False)
    """Of the corpus, as :meth:`for_target` encodes it; None: there is none."""

    def __post_init__(self) -> None:
        for name in ("min_match", "max_match"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be a number of tokens, not {value!r}")
        if not 1 <= self.min_match <= self.max_match <= _MAX_MATCH:
            raise ValueError(
                f"an n-gram draft needs 1 <= min_match <= max_match <= {_MAX_MATCH}, not {self.min_match} and {self.max_match}"
            )
        if not isinstance(self.history, int) or isinstance(self.history, bool) or self.history < 0:
            raise ValueError(f"history must be a number of tokens, 0 or more, not {self.history!r}")
        if self.corpus is None or isinstance(self.corpus, (str, Path)):
            return
        ids = np.asarray(self.corpus)
        if ids.dtype.kind not in "iu" or ids.ndim != 1 or len(ids) == 0:
            raise ValueError("corpus must be a path, or a sequence of token ids")
        object.__setattr__(self, "corpus", ids)
        if self.ids is None:
            object.__setattr__(self, "ids", ids.astype(np.int32))

    @property
    def has_own_corpus(self) -> bool:
        """Whether the user has given one, and it is not that of answers."""
        is_answers = isinstance(self.corpus, (str, Path)) and Path(self.corpus) == ANSWERS
        return self.corpus is not None and not is_answers

    def without_history(self) -> NgramDraft:
        return replace(self, history=0)

    def for_target(self, given: Any, target: PreTrainedModel) -> NgramDraft:
        """Return this draft with the ids of its corpus.

        Args:
            given: What the user passed for the target, a path or the model itself. Its tokenizer lies there.
            target: The model.

        Raises:
            FileNotFoundError: There is no such corpus, or no tokenizer in the target's folder.
            ValueError: The corpus is empty, is not UTF-8, or has ids outside of the vocabulary.
        """
        if self.corpus is None:
            return self
        source = given if isinstance(given, (str, Path)) else target.config._name_or_path
        vocabulary = embedding_size(target)
        if not self.has_own_corpus:
            return replace(self, ids=ids_of_answers(source, vocabulary) if source else None)
        ids = self.corpus
        if isinstance(ids, (str, Path)):
            ids = corpus_ids(Path(ids), source)
        if len(ids) == 0:
            raise ValueError("the corpus of the n-gram draft is empty")
        low, high = int(np.min(ids)), int(np.max(ids))
        if low < 0 or high >= vocabulary:
            raise ValueError(
                f"the corpus of the n-gram draft has token ids from {low} to {high}; the target's vocabulary has {vocabulary} tokens: "
                "encode the text with the target's tokenizer"
            )
        return replace(self, ids=np.ascontiguousarray(ids, dtype=np.int32))
