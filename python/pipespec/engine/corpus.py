"""Corpora of the n-gram index as token ids, kept in the user's cache by text and tokenizer."""

from __future__ import annotations

import gzip
import hashlib
import io
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from pipespec.models.tokenizers import load_tokenizer, tokenizer_file
from pipespec.process.files import replace
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
            replace(kept, buffer.getvalue())
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
