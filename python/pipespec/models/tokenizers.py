"""Tokenizers as bytes: what each token adds to a text, and the tokens of a piece of text.

Two tokenizers have no ids in common. They share the bytes of the text.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


def backend_of(tokenizer: Any) -> Tokenizer:
    """The ``tokenizers.Tokenizer`` of a user's tokenizer.

    Raises:
        TypeError: It has none.
    """
    backend = tokenizer if isinstance(tokenizer, Tokenizer) else getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise TypeError(
            f"a {type(tokenizer).__name__} cannot be translated: use a fast tokenizer of transformers (AutoTokenizer) or a tokenizers.Tokenizer"
        )
    return backend


def load_tokenizer(source: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer beside a model's weights, as ``AutoTokenizer`` makes it, or the one in a GGUF file.

    Raises:
        FileNotFoundError: There is none that can be loaded.
        ValueError: Its files are damaged.
    """
    from transformers import AutoTokenizer

    from pipespec.models.loading import is_gguf, model_path

    source = model_path(source)
    if is_gguf(source):
        from pipespec.models.gguf_tokenizer import gguf_tokenizer

        return gguf_tokenizer(source)
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(f"{source} holds no tokenizer that can be loaded: {error}") from error
    except Exception as error:  # tokenizers raises the base class for damaged files
        raise ValueError(
            f"{source}: its tokenizer.json is damaged ({type(error).__name__}: {error}): get the tokenizer of this model again"
        ) from error


def tokenizer_file(source: str | Path) -> Path | None:
    """The file on this machine that holds the tokens of a folder, of a hub name, or of a GGUF file; None: there is none, or no single one. Nothing is downloaded."""
    from transformers.utils import cached_file

    from pipespec.models.loading import is_gguf

    if is_gguf(source) or Path(source).name == "tokenizer.json":
        return Path(source)
    try:
        found = cached_file(str(source), "tokenizer.json", local_files_only=True)
    except OSError:
        return None
    return None if found is None else Path(found)


_FIM_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),  # DeepSeek-Coder
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # CodeLlama
)


_FIM_ENDS = (
    *("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<|repo_name|>", "<|file_sep|>", "<file_sep>", "<|file_separator|>"),
    "\u2581<EOT>",
)


class FimTokens(NamedTuple):
    """Ids of the tokens for fill-in-the-middle: those before the text before the gap, before the text after it, and before what fills it; ``ends`` end that."""

    before: int
    after: int
    middle: int
    ends: tuple[int, ...]


def fim_tokens(tokenizer: Any) -> FimTokens | None:
    """The tokens that a GGUF file names, or those with the names of a published tokenizer; None: there are none."""
    vocabulary = tokenizer.get_vocab()
    for names in (tokenizer.init_kwargs.get("fim_tokens") or (), *_FIM_TOKENS):
        if names and all(name in vocabulary for name in names):
            ends = tuple(vocabulary[name] for name in _FIM_ENDS if name in vocabulary)
            before, after, middle = (vocabulary[name] for name in names)
            return FimTokens(before, after, middle, ends)
    return None


class ByteTokenizer:
    """A tokenizer as bytes. Byte-level vocabularies, and those in the manner of sentencepiece, with and without byte tokens.

    Args:
        description: The tokenizer as JSON, as ``tokenizers.Tokenizer.to_str()`` gives it.

    Attributes:
        pieces: By id, the bytes that the token adds to a text; empty for special tokens and for ids without a token.
        special: Ids that stand for no text: special tokens, and the unknown token.
        special_ids: By text, the ids of the special tokens.
        prefix: Special ids that the tokenizer puts before a text.
        prepends: Whether the first token of a text begins with a space that is not part of the text.

    Raises:
        ValueError: The tokenizer's decoder is of another kind.
    """

    def __init__(self, description: str) -> None:
        self._description = description
        content = json.loads(description)
        model = content["model"]
        vocabulary = model["vocab"]
        if not isinstance(vocabulary, dict):
            vocabulary = {piece: i for i, (piece, _) in enumerate(vocabulary)}
        added = content.get("added_tokens") or []
        size = 1 + max([*vocabulary.values(), *(token["id"] for token in added)], default=-1)
        to_bytes = _decoder(content)
        self.pieces = [b""] * size
        for piece, i in vocabulary.items():
            self.pieces[i] = to_bytes(piece)
        self.special_ids = {token["content"]: token["id"] for token in added if token["special"]}
        self._special_texts = {i: text for text, i in self.special_ids.items()}
        special = set(self.special_ids.values())
        unknown = model.get("unk_token")
        if unknown is not None:
            special.add(vocabulary.get(unknown, -1))
        special.add(-1 if model.get("unk_id") is None else model["unk_id"])
        special.discard(-1)
        for i in special:
            # Not a text that is unknown.
            if model.get("unk_id") == i or vocabulary.get(unknown) == i:
                self._special_texts.pop(i, None)
        for token in added:
            self.pieces[token["id"]] = token["content"].encode()
        for i in special:
            self.pieces[i] = b""
        self.special = frozenset(special)
        marked = Tokenizer.from_str(description).encode("a")
        begin = next((i for i, mark in enumerate(marked.special_tokens_mask) if not mark), 0)
        self.prefix: list[int] = marked.ids[:begin]
        self.prepends = False
        content |= {"truncation": None, "padding": None, "post_processor": None}
        for part in ("normalizer", "pre_tokenizer"):
            content[part] = self._without_prefix(content.get(part))
        self._tokenizer = Tokenizer.from_str(json.dumps(content))
        # The text of a special token is text here.
        self._tokenizer.encode_special_tokens = True

    def __reduce__(self) -> Any:
        return ByteTokenizer, (self._description,)

    def _without_prefix(self, part: dict[str, Any] | None) -> dict[str, Any] | None:
        """A normalizer or pre-tokenizer that leaves the beginning of a text as it is, so that it fits the pieces of a text, too."""
        if part is None:
            return None
        kind = part["type"]
        if kind == "Sequence":
            name = "normalizers" if "normalizers" in part else "pretokenizers"
            inner = [found for p in part[name] if (found := self._without_prefix(p)) is not None]
            return part | {name: inner}
        if kind == "Prepend":
            self.prepends = True
            return None
        if kind == "Strip":
            return None
        if kind == "Metaspace":
            scheme = part.get("prepend_scheme") or ("always" if part.get("add_prefix_space", True) else "never")
            self.prepends |= scheme != "never"
            return part | {"prepend_scheme": "never", "add_prefix_space": False}
        if kind == "ByteLevel":
            self.prepends |= bool(part.get("add_prefix_space"))
            return part | {"add_prefix_space": False}
        return part

    def encode(self, text: bytes, *, first: bool = False) -> list[int]:
        """The ids of a piece of text, without special tokens.

        Args:
            text: UTF-8. Bytes that are not UTF-8 become U+FFFD.
            first: Whether the text begins here.
        """
        if not text:
            return []
        decoded = text.decode(errors="replace")
        ids: list[int] = self._tokenizer.encode(
            f" {decoded}" if first and self.prepends else decoded, add_special_tokens=False
        ).ids
        if not self._special_texts.keys().isdisjoint(ids):
            # A unigram vocabulary has its special tokens among the others.
            ids = [part for i in ids for part in self._spelled(i)]
        return ids

    def _spelled(self, token: int) -> list[int]:
        """The ids of a special token's text, character by character; of another token its own id."""
        if token not in self._special_texts:
            return [token]
        return [
            i
            for character in self._special_texts[token]
            for i in self._tokenizer.encode(character, add_special_tokens=False).ids
        ]

    def text(self, ids: Sequence[int], *, first: bool = False) -> bytes:
        """The bytes of tokens. ``first``: the text begins here."""
        joined = b"".join(self.pieces[i] for i in ids if i < len(self.pieces))
        return joined[1:] if first and self.prepends and joined.startswith(b" ") else joined

    @cached_property
    def of_text(self) -> dict[bytes, int]:
        """Ids by the text of the token; of equal texts the first."""
        return {piece: i for i, piece in reversed([*enumerate(self.pieces)]) if piece}

    @cached_property
    def _sorted(self) -> tuple[list[bytes], np.ndarray]:
        ordered = sorted((piece, i) for i, piece in enumerate(self.pieces) if piece)
        return [piece for piece, _ in ordered], np.array([i for _, i in ordered], dtype=np.int64)

    def beginning_with(self, start: bytes) -> np.ndarray:
        """Ids whose text begins with ``start``, int64 ``[N]``."""
        pieces, ids = self._sorted
        end = start + b"\xff" * max(map(len, pieces), default=0)
        return ids[bisect_left(pieces, start) : bisect_right(pieces, end)]

    def consistent_with(self, text: bytes) -> np.ndarray:
        """Ids whose text begins with ``text``, or that ``text`` begins with; int64 ``[N]``."""
        shorter = [self.of_text[text[:n]] for n in range(1, len(text)) if text[:n] in self.of_text]
        return np.concatenate([self.beginning_with(text), np.array(shorter, dtype=np.int64)])


def _decoder(content: dict[str, Any]) -> Any:
    """The function from a piece of the vocabulary to its bytes."""
    decoder = content.get("decoder") or {"type": "none"}
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds:
        alphabet = _byte_level_alphabet()
        return lambda piece: bytes(alphabet[c] for c in piece) if all(c in alphabet for c in piece) else piece.encode()
    space = next((part["replacement"] for part in parts if part["type"] == "Metaspace"), None)
    for part in parts:
        if part["type"] == "Replace" and part["content"] == " ":
            space = part["pattern"].get("String", space)
    if space is None:
        raise ValueError(
            f"its decoder ({', '.join(sorted(kinds))}) is neither byte-level nor like sentencepiece's, so that the bytes of its tokens are not known"
        )

    def to_bytes(piece: str) -> bytes:
        byte = _BYTE.fullmatch(piece) if "ByteFallback" in kinds else None
        return bytes([int(byte[1], 16)]) if byte else piece.replace(space, " ").encode()

    return to_bytes


def _byte_level_alphabet() -> dict[str, int]:
    """The bytes by the characters that stand for them in byte-level vocabularies (GPT-2, Radford et al. 2019)."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in visible]
    return {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(hidden)}
