"""Tokenizers out of GGUF files, built from the metadata.

A file names its tokenizer by two words: ``tokenizer.ggml.model`` says how pieces are merged, ``tokenizer.ggml.pre`` how a text is split before that.
:data:`SPLITS` has the rules of the published tokenizers by the second. What each token is (text, control, byte) stands in ``token_type``.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pipespec.errors import user_stacklevel
from pipespec.models.gguf import GgufFile

_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")


class TokenType(IntEnum):
    """Values of ``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Split:
    """How a byte-level tokenizer divides a text into words before it merges bytes.

    Attributes:
        patterns: Regular expressions. Each divides the parts that the ones before it left; a match is a part of its own.
        ignore_merges: Whether a word that is a token is that token, whatever the merges give.
        adds_bos: Whether a text begins with the BOS token if the file does not say (``add_bos_token``).
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False


# Parts of the published expressions.
_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_SYMBOL_WORD = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_POSITIONAL_DIGITS = r"\d{1,3}(?=(?:\d{3})*\b)"


def _words(
    digits: str,
    *,
    english: str = f"{_ENGLISH}|",
    letters: str = r"\p{L}",
    ends: str = r"[\r\n]*",
    spaces: str = _SPACES,
) -> str:
    """The expression of LLaMA 3, with its variants: contractions, letters after at most one symbol, digits, symbols, spaces."""
    symbols = r"[^\s\p{L}\p{N}]" if letters == r"\p{L}" else r"[^\s\p{L}\p{M}\p{N}]"
    return rf"{english}[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}| ?{symbols}+{ends}|{spaces}"


def _cased(digits: str, contraction: str = "", ends: str = r"[\r\n/]*", but: str = "") -> str:
    """The expression of Tekken and GPT-4o: an upper-case letter begins a word. ``but``: letters that are in none."""
    but = f"&&[^{but}]" if but else ""
    upper, lower = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]", rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    first = r"[^\r\n\p{L}\p{N}]?"
    return rf"{first}{upper}*{lower}+{contraction}|{first}{upper}+{lower}*{contraction}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{ends}|{_SPACES}"


_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    _CJK,
    rf"{_SYMBOL_WORD}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_LLAMA3 = Split((_words(r"\p{N}{1,3}"),))
_QWEN2 = Split((_words(_DIGIT),))
_GPT = Split((_GPT2,))
_DIGITS = Split((_DIGIT, _GPT2))
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_GPT_4O = Split((_cased(r"\p{N}{1,3}", rf"{_ENGLISH}?"),))
_KIMI_K2 = Split((r"\p{Han}+|" + _cased(r"\p{N}{1,3}", rf"{_ENGLISH}?", ends=r"[\r\n]*", but=r"\p{Han}"),))
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f"
    "\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd"
    "\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59"
    "\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149"
    "\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    "\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb"
    "\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)

DEFAULT = Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))
"""That of files without ``pre``, which are older than the key (May 2024), as llama.cpp splits them."""


def _named(split: Split, names: str) -> dict[str, Split]:
    return dict.fromkeys(names.split(), split)


SPLITS: dict[str, Split] = {
    **_named(replace(_LLAMA3, ignore_merges=True, adds_bos=True), "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"),
    **_named(_LLAMA3, "dbrx smaug-bpe chatglm-bpe"),
    **_named(replace(_LLAMA3, ignore_merges=True), "glm4 glm5"),
    **_named(Split((r"\p{N}{1,3}", _words(r"\p{N}+")), ignore_merges=True), "minicpm5"),
    **_named(Split((_words(r"\p{N}{1,3}", spaces="|".join([r"\s*[\r\n]+", *(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4)), r"\s{1,2}(?!\S)", r"\s{1}"])),)), "jais-2"),
    **_named(_QWEN2, "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 megrez hunyuan solar-open grok-2"),
    **_named(Split((_words(_DIGIT, letters=r"[\p{L}\p{M}]"),)), "qwen35"),
    **_named(Split((_words(_DIGIT, english=""),)), "ufakzeka"),
    **_named(Split((r"[^\n]+|[\n]+", _words(_DIGIT))), "laguna"),
    **_named(Split((rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)), "seed-coder"),
    **_named(Split((rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",)), "exaone-moe"),
    **_named(_GPT, "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum modern-bert mpt olmo jais trillion granite-docling exaone4 jina-v1-en jina-v2-code roberta-bpe"),
    **_named(_DIGITS, "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2"),
    **_named(Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")), "falcon"),
    **_named(Split((_BLOOM,)), "poro-chat bloom gpt3-finnish"),
    **_named(Split((_BLOOM, _DIGIT)), "viking"),
    **_named(Split((r"[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+", r"\s+$", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}+")), "deepseek-llm"),
    **_named(Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", _DIGIT)), "deepseek-coder"),
    **_named(Split(_DEEPSEEK3), "deepseek-v3 hunyuan-dense joyai-llm hy_v4"),
    **_named(Split((_POSITIONAL_DIGITS, "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+", _DEEPSEEK3[2])), "afmoe"),
    **_named(Split((_cased(_DIGIT),), ignore_merges=True, adds_bos=True), "tekken"),
    **_named(_GPT_4O, "gpt-4o llama4 kanana2 talkie minimax-m2"),
    **_named(replace(_GPT_4O, ignore_merges=True), "granite-embed-multi-97m"),
    **_named(_KIMI_K2, "kimi-k2"),
    **_named(Split((_POSITIONAL_DIGITS, *_GPT_4O.patterns)), "tiny_aya cohere2moe"),
    **_named(Split(("[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _cased(_DIGIT, rf"{_ENGLISH}?")), ignore_merges=True), "youtu"),
    **_named(Split((_BAILING,)), "bailingmoe bailingmoe2 llada-moe"),
    **_named(Split((r"\p{N}+", r"(?=(\d{3})+(?!\d))")), "superbpe"),
    **_named(Split((r"<sentinel:[0-9]+>", r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )", _DIGIT, r"[\p{P}!-/:-@\[-`{-~]", _GPT2), adds_bos=True), "chameleon"),
}  # fmt: skip
"""By ``tokenizer.ggml.pre``: the splits of the published byte-level tokenizers (their ``tokenizer.json``)."""

_FULLWIDTH_BAR, _SPACE = "\uff5c", "\u2581"
"""DeepSeek's bar around special tokens, and SentencePiece's space."""

END_TEXTS = frozenset(
    f"""
    <|eot_id|> <|eom_id|> <|im_end|> <|end|> <|return|> <|call|> <|calls|> <|flush|> <end_of_turn> <turn|> <|tool_response> <|endoftext|>
    <|end_of_text|> <{_FULLWIDTH_BAR}end{_SPACE}of{_SPACE}sentence{_FULLWIDTH_BAR}> <end_of_utterance> <EOT> _<EOT> [EOT] [EOS] <eos> </s> [e~[
    """.split()
)
"""Texts of tokens that end a turn or a text in the published chat templates."""


def gguf_tokenizer(path: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a file, with its special tokens and its chat template.

    Raises:
        FileNotFoundError: There is no file.
        ValueError: The file has no tokenizer, or one of a kind that is not known: the message names it.
    """
    file = GgufFile.open(path)
    tokens = file.texts("tokenizer.ggml.tokens")
    if not tokens:
        raise ValueError(f"{path} has no tokenizer (tokenizer.ggml.tokens): {_OTHERWISE}")
    kind = file.text("tokenizer.ggml.model")
    builder = _BUILDERS.get(kind or "")
    if builder is None:
        raise ValueError(
            f"{path} has a tokenizer of the kind {kind!r}; {', '.join(map(repr, _BUILDERS))} are supported: {_OTHERWISE}"
        )
    types = _types(file, len(tokens))
    try:
        backend, adds_bos = builder(file, tokens, types)
        backend.add_tokens(_added(file, tokens, types))
    except ValueError:
        raise
    except (
        BaseException
    ) as error:  # tokenizers raises the base class, and pyo3's PanicException is not even an Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit, MemoryError)):
            raise
        raise ValueError(f"{path}: its tokenizer is damaged ({type(error).__name__}: {error})") from error
    special = {name: token_id(file, key) for name, key in _SPECIAL.items()}
    fim = [token_id(file, f"fim_{part}") for part in ("pre", "suf", "mid")]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=file.text("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        # Files of Gemma 4 were written with a wrong value.
        add_bos_token=kind == "gemma4" or file.flag("tokenizer.ggml.add_bos_token", adds_bos),
        add_eos_token=file.flag("tokenizer.ggml.add_eos_token", False),
        fim_tokens=None if None in fim else [tokens[i] for i in fim if i is not None],
        **{name: tokens[i] for name, i in special.items() if i is not None},
    )


_OTHERWISE = "name another tokenizer, of the model's folder or hub repository (tokenizer=, --tokenizer)"
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def token_id(file: GgufFile, name: str) -> int | None:
    """The id of a special token (``"bos"``, ``"eos"``, ``"eot"``, ...) that lies in the vocabulary; None: the file names none."""
    found, size = file.integer(f"tokenizer.ggml.{name}_token_id"), len(file.texts("tokenizer.ggml.tokens"))
    if found is not None and 0 <= found < (size or found + 1):
        return found
    own = {"unknown": 0, "bos": 1, "eos": 2} if file.text("tokenizer.ggml.model") == "llama" else {}  # SentencePiece's
    return own.get(name)


def end_ids(file: GgufFile) -> list[int]:
    """The ids that end a turn or a text, ascending: those that the metadata name, and special tokens with one of :data:`END_TEXTS`."""
    tokens = file.texts("tokenizer.ggml.tokens")
    types = _types(file, len(tokens))
    by_text = {
        text: i
        for i, text in enumerate(tokens)
        if text in END_TEXTS and types[i] in (TokenType.CONTROL, TokenType.USER_DEFINED)
    }
    if "<|call|>" in by_text or "<|calls|>" in by_text:
        by_text.pop("<|end|>", None)  # gpt-oss, Solar: it ends a message within a turn
    if "<|tool_response>" in by_text:
        by_text.pop("</s>", None)  # Gemma 4: text
    named = {found for name in ("eos", "eot", "eom") if (found := token_id(file, name)) is not None}
    return sorted(named.union(by_text.values()))


def _types(file: GgufFile, size: int) -> Sequence[int]:
    found = list(file.integers("tokenizer.ggml.token_type"))
    if found and len(found) != size:
        raise ValueError(
            f"{file.path} is damaged: tokenizer.ggml.token_type has {len(found)} entries, and the vocabulary {size}"
        )
    tokens = file.texts("tokenizer.ggml.tokens")
    if not found and size:
        warnings.warn(
            f"{file.path} does not say which of its tokens are special (tokenizer.ggml.token_type): they are told by their texts",
            stacklevel=user_stacklevel(),
        )
        named = {token_id(file, name) for name in ("bos", "eos", "eot", "eom", "padding")}
        found = [TokenType.CONTROL if i in named else TokenType.NORMAL for i in range(size)]
        found = [TokenType.BYTE if _BYTE.fullmatch(text) else kind for text, kind in zip(tokens, found, strict=True)]
        if (unknown := token_id(file, "unknown")) is not None and found[unknown] == TokenType.NORMAL:
            found[unknown] = TokenType.UNKNOWN
    for i, text in enumerate(tokens):
        # </s> is text in vocabularies that were trained on text with it.
        if found[i] == TokenType.NORMAL and text in END_TEXTS and text != "</s>":
            found[i] = TokenType.CONTROL
    return found


def _added(file: GgufFile, tokens: Sequence[str], types: Sequence[int]) -> list[AddedToken]:
    """The tokens that are found in a text before it is split, by id."""
    strips = file.architecture == "phi3" and file.text("tokenizer.ggml.model") == "llama"
    added = []
    for text, kind in zip(tokens, types, strict=True):
        if kind not in (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED) or not text:
            continue
        # Phi-3's special tokens take the white space that follows them.
        rstrip = strips and text not in ("<unk>", "<s>", "<|endoftext|>")
        added.append(AddedToken(text, special=kind != TokenType.USER_DEFINED, normalized=False, rstrip=rstrip))
    return added


# ---- the kinds


def _byte_level(file: GgufFile, tokens: Sequence[str], types: Sequence[int]) -> tuple[Tokenizer, bool]:
    """``"gpt2"``: bytes are merged within words (Radford et al. 2019)."""
    name = file.text("tokenizer.ggml.pre")
    if name in (None, "", "default"):
        split = DEFAULT
        warnings.warn(
            f"{file.path} does not say how its tokenizer splits a text (tokenizer.ggml.pre): it is split as llama.cpp does, and the model may "
            f"read other tokens than it was trained on. Convert the model again, or {_OTHERWISE}",
            stacklevel=user_stacklevel(),
        )
    elif name in SPLITS:
        split = SPLITS[name]
    else:
        raise ValueError(
            f"{file.path} has a tokenizer that splits a text as {name!r}, which is not known: {_OTHERWISE}"
        )
    made = Tokenizer(models.BPE(_vocabulary(tokens), _merges(file), ignore_merges=split.ignore_merges))
    parts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [*parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.Sequence([*_as_bytes(tokens, types), decoders.ByteLevel()])
    return made, split.adds_bos


def _as_bytes(tokens: Sequence[str], types: Sequence[int]) -> list[decoders.Decoder]:
    """What lets :class:`decoders.ByteLevel` read special tokens whose characters stand for bytes elsewhere as text, as DeepSeek's ``\u00c0``."""
    alphabet, to_bytes = set(pre_tokenizers.ByteLevel.alphabet()), pre_tokenizers.ByteLevel(False, use_regex=False)
    found: list[decoders.Decoder] = []
    for text, kind in zip(tokens, types, strict=True):
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED) and not text.isascii() and alphabet.issuperset(text):
            ((written, _),) = to_bytes.pre_tokenize_str(text)
            found.append(decoders.Replace(Regex(rf"\A{re.escape(text)}\z"), written))
    return found


def _sentencepiece(file: GgufFile, tokens: Sequence[str], types: Sequence[int]) -> tuple[Tokenizer, bool]:
    """``"llama"``: pieces are merged by their scores (Kudo, Richardson 2018)."""
    scores = file.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise ValueError(
            f"{file.path} is damaged: tokenizer.ggml.scores has {len(scores)} entries, and the vocabulary {len(tokens)}"
        )
    merges = _merges(file, optional=True) or _merges_by_score(tokens, types, scores)
    return _with_spaces(file, tokens, types, merges, prefix=file.flag("tokenizer.ggml.add_space_prefix", True)), True


def _gemma4(file: GgufFile, tokens: Sequence[str], types: Sequence[int]) -> tuple[Tokenizer, bool]:
    """``"gemma4"``: SentencePiece's spaces and bytes, with merges, within lines."""
    made = _with_spaces(file, tokens, types, _merges(file), prefix=False)
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|[\n]+"), "isolated")
    return made, True


_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _gemma4}


def _with_spaces(
    file: GgufFile, tokens: Sequence[str], types: Sequence[int], merges: list[tuple[str, str]], *, prefix: bool
) -> Tokenizer:
    unknown = token_id(file, "unknown")
    model = models.BPE(
        _vocabulary(tokens),
        merges,
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=TokenType.BYTE in types,
    )
    made = Tokenizer(model)
    replaced = normalizers.Replace(" ", _SPACE)
    made.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replaced]) if prefix else replaced
    undone = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*undone, decoders.Strip(" ", 1, 0)] if prefix else undone)
    return made


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    """Ids by text; of equal texts the first, as the others cannot be made."""
    return {text: i for i, text in reversed([*enumerate(tokens)])}


def _merges(file: GgufFile, *, optional: bool = False) -> list[tuple[str, str]]:
    """The pairs that are merged, in their order. One part of a pair may hold spaces, but not at its beginning."""
    found = file.texts("tokenizer.ggml.merges")
    if not found and not optional:
        raise ValueError(f"{file.path} has a tokenizer without merges (tokenizer.ggml.merges): {_OTHERWISE}")
    pairs = []
    for merge in found:
        at = merge.find(" ", 1)
        if at < 0:
            raise ValueError(f"{file.path} is damaged: the merge {merge!r} is no pair")
        pairs.append((merge[:at], merge[at + 1 :]))
    return pairs


def _merges_by_score(tokens: Sequence[str], types: Iterable[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, those of the highest score first."""
    usable = {
        text: score
        for text, kind, score in zip(tokens, types, scores, strict=True)
        if kind in (TokenType.NORMAL, TokenType.USER_DEFINED)
    }
    found = [
        (-score, text[:at], text[at:])
        for text, score in usable.items()
        for at in range(1, len(text))
        if text[:at] in usable and text[at:] in usable
    ]
    return [(left, right) for _, left, right in sorted(found, key=lambda pair: pair[0])]
