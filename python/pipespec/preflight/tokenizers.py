"""Whether the models of a chain have one tokenizer, and the translation for a first draft with another one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedModel
from transformers.utils import cached_file

from pipespec.engine.inputs import stage_names
from pipespec.engine.translation import Translation
from pipespec.models.tokenizers import ByteTokenizer, backend_of, load_backend


def tokenizer_digest(given: Any, model: PreTrainedModel) -> str | None:
    """Digest of the map token -> id of the tokenizer beside the weights; None if there is none. ``ValueError`` for a damaged file."""
    source = _source(given, model)
    if not source:
        return None
    # The file of a folder, or of a hub name in the local cache. A check downloads nothing.
    try:
        file = cached_file(str(source), "tokenizer.json", local_files_only=True)
    except OSError:
        return None
    if file is None:
        return None
    try:
        return _digest(json.loads(Path(file).read_text(encoding="utf-8")))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{file} is damaged ({type(error).__name__}: {error}): get the tokenizer of this model again, or remove the file"
        ) from error


def _source(given: Any, model: PreTrainedModel) -> str | Path:
    return given if isinstance(given, (str, Path)) else getattr(model.config, "_name_or_path", "")


def _digest(content: dict[str, Any]) -> str:
    vocabulary = content["model"]["vocab"]
    pairs = sorted(vocabulary.items()) if isinstance(vocabulary, dict) else vocabulary
    added = sorted((t["id"], t["content"]) for t in content.get("added_tokens", []))
    return hashlib.sha256(json.dumps([pairs, added]).encode()).hexdigest()


def translation_for(
    models: Sequence[PreTrainedModel],
    given: Sequence[Any],
    tokenizer: Any = None,
    draft_tokenizers: Any = None,
    *,
    has_ngram: bool = False,
    trust_remote_code: bool = False,
) -> Translation | None:
    """The translation between the first draft and the target, if their tokenizers differ.

    Args:
        models: Drafts first, target last.
        given: What the user passed for each: a path, or the model itself.
        tokenizer: The target's; None: the one beside its weights.
        draft_tokenizers: One per draft model, or for one draft the tokenizer itself; None, also for single drafts: the one beside the weights.
        has_ngram: Whether an n-gram index is before the first model.
        trust_remote_code: For tokenizers that are loaded.

    Returns:
        None: each draft has the target's tokenizer, or nothing tells that it has not.

    Raises:
        ValueError: Another draft than the first one has another tokenizer, or a tokenizer whose tokens have no known bytes.
        TypeError: A tokenizer that is none, or not a fast one.
    """
    names = stage_names(len(models))
    if draft_tokenizers is None or not isinstance(draft_tokenizers, (list, tuple)):
        draft_tokenizers = [draft_tokenizers] + [None] * (len(models) - 2) if len(models) > 1 else []
    if len(draft_tokenizers) != len(models) - 1:
        raise ValueError(
            f"draft_tokenizers: one per draft model (None: the one beside its weights), {len(models) - 1}, not {len(draft_tokenizers)}"
        )
    target, found = models[-1], None
    mine: Tokenizer | None
    known = None if tokenizer is None else backend_of(tokenizer)
    digest = tokenizer_digest(given[-1], target) if len(models) > 1 else None
    for i, (model, own) in enumerate(zip(models[:-1], draft_tokenizers, strict=True)):
        if own is not None and known is None:
            known = _load(names[-1], "tokenizer=", given[-1], target, trust_remote_code)
        if own is not None or known is not None:
            if own is None and tokenizer_digest(given[i], model) is None:
                continue
            mine = _load(names[i], "", given[i], model, trust_remote_code) if own is None else backend_of(own)
            if known is None or _digest(json.loads(mine.to_str())) == _digest(json.loads(known.to_str())):
                continue
        else:
            file = tokenizer_digest(given[i], model)
            if digest is None or file is None or file == digest:
                continue
            mine = None
        differs = f"{names[i]} has another tokenizer than the target (other tokens, or the same with other ids)"
        if i > 0 or has_ngram:
            before = "an n-gram index" if i == 0 else names[i - 1]
            raise ValueError(
                f"{differs}: such a draft can only be the first of the drafts, as it cannot verify the draft tokens of {before}; put it "
                "first, or leave it out"
            )
        try:
            mine = mine or _load(names[i], "draft_tokenizers=", given[i], model, trust_remote_code)
            known = known or _load(names[-1], "tokenizer=", given[-1], target, trust_remote_code)
            found = Translation(ByteTokenizer(known.to_str()), ByteTokenizer(mine.to_str()))
        except (ValueError, TypeError, FileNotFoundError) as error:
            raise ValueError(
                f"{differs}, and its tokens cannot be translated: {error}; use a draft with the target's tokenizer"
            ) from error
    return found


def _the(name: str) -> str:
    return "the target" if name == "target" else name


def _load(name: str, argument: str, given: Any, model: PreTrainedModel, trust_remote_code: bool) -> Tokenizer:
    source = _source(given, model)
    if not source:
        raise ValueError(f"{_the(name)} was given as a model, which does not tell its tokenizer: pass {argument}")
    return load_backend(source, trust_remote_code=trust_remote_code)
