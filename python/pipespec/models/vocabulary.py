"""Token ids from texts, and the tokens that a trimmed draft may propose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from pipespec.models.properties import end_tokens, head_size
from pipespec.models.tokenizers import load_tokenizer


def encode_file(file: Path, source: Any, what: str, instead: str) -> list[int]:
    """Token ids of a text, without special tokens.

    Args:
        file: UTF-8 text.
        source: a folder or hub name with the tokenizer.
        what: what the text is, for errors.
        instead: what to give where there is no tokenizer.

    Raises:
        FileNotFoundError: there is no such file, or no tokenizer.
        ValueError: the file is not UTF-8, or the tokenizer is damaged.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the {what} {file} is not UTF-8 text") from error
    except ValueError as error:  # a NUL in the name
        raise ValueError(f"the {what} {str(file)!r} is no path: {error}") from error
    try:
        tokenizer = load_tokenizer(source)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"the {what} {file} cannot be encoded, as there is no tokenizer beside the target ({error}): {instead}"
        ) from error
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def common_tokens(ids: Any, count: int | None = None) -> list[int]:
    """The commonest token ids of a text.

    Args:
        ids: the text's token ids, a sequence or tensor of any shape.
        count: how many; None: all that occur. Of equally frequent ones the lower ids.

    Returns:
        Ascending ids. Fewer than ``count`` where the text has fewer.

    Raises:
        ValueError: ``count`` is below 1.
    """
    if count is not None and count < 1:
        raise ValueError(f"count must be at least 1, not {count}")
    flat = torch.as_tensor(ids).flatten().tolist()
    order = sorted(Counter(flat).items(), key=lambda item: (-item[1], item[0]))
    return sorted(token for token, _ in order[:count])


def draft_vocabulary(given: Any, source: Any, target: PreTrainedModel) -> list[int]:
    """The tokens that a trimmed draft may propose, with the target's end tokens among them.

    Args:
        given: a number N: the N lowest ids, which a BPE tokenizer gives to its commonest tokens; the path of a UTF-8 text: all tokens in it;
            ``(N, path)``: the N commonest of it, filled up with the lowest ids; or token ids.
        source: what the user passed for the target, a path or the model itself. Its tokenizer lies there.
        target: the model.

    Returns:
        Ascending ids.

    Raises:
        TypeError: another type.
        ValueError: no ids, or ids or a number beyond the vocabulary.
        FileNotFoundError: there is no such text, or no tokenizer beside the target.
    """
    size, file = _split(given)
    total = head_size(target)
    if size is not None and not 1 <= size < total:
        raise ValueError(
            f"draft_vocabulary={size}: the target's vocabulary has {total} tokens, so give a number from 1 to {total - 1}"
        )
    ends = set(end_tokens(target))
    if file is None and size is None:
        found = set(_integers(given))
    elif file is None:
        return _filled(ends, size, total)
    else:
        where = target.config._name_or_path if source is target else source
        text = encode_file(
            file, where, "text of draft_vocabulary", "give token ids instead, see pipespec.common_tokens"
        )
        room = None if size is None else max(1, size - len(ends))
        found = set(common_tokens(np.asarray(text, dtype=np.int64), room))
    if not found:
        raise ValueError("draft_vocabulary holds no token")
    if not 0 <= min(found) <= max(found) < total:
        raise ValueError(
            f"draft_vocabulary has token ids from {min(found)} to {max(found)}, the target's vocabulary has {total} tokens"
        )
    return _filled(found | ends, size, total)


def _split(given: Any) -> tuple[int | None, Path | None]:
    if isinstance(given, int) and not isinstance(given, bool):
        return given, None
    if isinstance(given, (str, Path)):
        return None, Path(given)
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], (str, Path)):
        size, file = given
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"draft_vocabulary=(number, text): the number is {size!r}")
        return size, Path(file)
    return None, None


def _integers(given: Any) -> list[int]:
    if isinstance(given, (torch.Tensor, np.ndarray)):
        given = given.tolist()
    if not isinstance(given, Iterable) or isinstance(given, (bytes, bool)):
        raise TypeError(
            f"draft_vocabulary must be a number of tokens, a text, both in a tuple, or token ids, not {given!r}"
        )
    found = list(given)
    if not all(isinstance(i, (int, np.integer)) and not isinstance(i, bool) for i in found):
        raise TypeError("draft_vocabulary: token ids must be integers")
    return [int(i) for i in found]


def _filled(ids: set[int], size: int | None, total: int) -> list[int]:
    """``ids``, and the lowest others until there are ``size``."""
    others = (i for i in range(total) if i not in ids)
    missing = 0 if size is None else size - len(ids)
    return sorted([*ids, *(next(others) for _ in range(max(0, missing)))])
