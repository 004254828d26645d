"""Whether the models of a chain have one tokenizer, and the translation for a draft with another one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedModel

from pipespec.engine.chain import DraftSpec, stage_names
from pipespec.models.loading import is_gguf
from pipespec.models.tokenizers import ByteTokenizer, backend_of, load_tokenizer, tokenizer_file
from pipespec.registry import TRANSLATED


def tokenizer_digest(given: Any, model: PreTrainedModel) -> str | None:
    """Digest of the map token -> id of the tokenizer next to the weights; None if there is none. ``ValueError`` for a damaged file."""
    source = _source(given, model)
    if not source:
        return None
    if is_gguf(source):
        from pipespec.models.gguf import GgufFile

        return _digest_of(dict(enumerate(GgufFile.open(source).texts("tokenizer.ggml.tokens"))))
    file = tokenizer_file(source)
    if file is None:
        return None
    try:
        return _digest(file.read_text(encoding="utf-8"))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{file} is damaged ({type(error).__name__}: {error}): get the tokenizer of this model again, or remove the file"
        ) from error


def _source(given: Any, model: PreTrainedModel) -> str | Path:
    return given if isinstance(given, (str, Path)) else getattr(model.config, "_name_or_path", "")


def _digest(text: str) -> str:
    content = json.loads(text)
    vocabulary = content["model"]["vocab"]
    pieces = (
        vocabulary.items() if isinstance(vocabulary, dict) else ((piece, i) for i, (piece, _) in enumerate(vocabulary))
    )
    added = {token["id"]: token["content"] for token in content.get("added_tokens", [])}
    return _digest_of({i: piece for piece, i in pieces} | added)


def _digest_of(texts: dict[int, str]) -> str:
    """Of the tokens by id: a GGUF file does not say which of them were added, and names those that pad the embedding ``[PAD<id>]``."""
    known = sorted((i, text) for i, text in texts.items() if text != f"[PAD{i}]")
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def with_translations(
    specs: Sequence[DraftSpec],
    models: Sequence[PreTrainedModel],
    given: Sequence[Any],
    tokenizer: Any = None,
    draft_tokenizers: Any = None,
    *,
    trust_remote_code: bool = False,
) -> list[DraftSpec]:
    """The specs of draft models, where those with another tokenizer than the target are translated.

    ``models``: the drafts and the target. ``given``: what the user passed for each of them. ``tokenizer`` and ``draft_tokenizers`` are those of ``Pipeline``.

    Raises:
        ValueError: A draft has another tokenizer, whose tokens have no known bytes.
        TypeError: A tokenizer that is none, or not a fast one.
    """
    names, drafts = stage_names(len(models)), len(models) - 1
    if draft_tokenizers is None or not isinstance(draft_tokenizers, (list, tuple)):
        draft_tokenizers = [draft_tokenizers] + [None] * (drafts - 1) if drafts else []
    if len(draft_tokenizers) != drafts:
        raise ValueError(
            f"draft_tokenizers: one per draft model (None: the one next to its weights), {drafts}, not {len(draft_tokenizers)}"
        )
    known = [None if t is None else backend_of(t) for t in (*draft_tokenizers, tokenizer)]

    def tokenizer_of(i: int) -> Tokenizer:
        if (found := known[i]) is None:
            if not (source := _source(given[i], models[i])):
                name, argument = (names[i], "draft_tokenizers=") if i < drafts else ("the target", "tokenizer=")
                raise ValueError(f"{name} was given as a model, which does not name its tokenizer: pass {argument}")
            known[i] = found = backend_of(load_tokenizer(source, trust_remote_code=trust_remote_code))
        return found

    found = list(specs)
    for i in range(drafts):
        if known[i] is None and known[-1] is None:
            files = [tokenizer_digest(given[at], models[at]) for at in (i, -1)]
            is_same = None in files or files[0] == files[1]
        elif known[i] is None and tokenizer_digest(given[i], models[i]) is None:
            is_same = True  # as far as can be found out
        else:
            is_same = _digest(tokenizer_of(i).to_str()) == _digest(tokenizer_of(drafts).to_str())
        if is_same:
            continue
        try:
            target, own = (ByteTokenizer(tokenizer_of(at).to_str()) for at in (drafts, i))
        except (ValueError, TypeError, FileNotFoundError) as error:
            raise ValueError(
                f"{names[i]} has another tokenizer than the target (other tokens, or the same with other ids), and its tokens cannot be translated: "
                f"{error}; use a draft with the target's tokenizer"
            ) from error
        found[i] = TRANSLATED.spec_class()(given=found[i].given, target=target, own=own)
    return found
