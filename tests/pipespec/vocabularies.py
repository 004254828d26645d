"""Tokenizers of several kinds, trained or written here, and a bundled model whose tokens have other ids."""

import json
from functools import cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from pipespec.demo import family_path
from pipespec.models.tokenizers import ByteTokenizer, backend_of, load_tokenizer

TEXT = [
    "the quick brown fox jumps over the lazy dog, and then the other one",
    "def mean(values):\n    return sum(values) / len(values)\n",
    "whatever was said, he answered: 'it isn't so'  -- and left",
    "na\u00efve caf\u00e9 fianc\u00e9 \u00fcber \u65e5\u672c\u8a9e",
] * 5


@cache
def bundled() -> Tokenizer:
    """That of the bundled models: byte-level BPE."""
    return backend_of(load_tokenizer(family_path("target")))


@cache
def byte_level() -> Tokenizer:
    """Byte-level BPE with GPT-2's rules, and a begin token."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "<|user|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXT, trainer)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return made


def _like_sentencepiece(made: Tokenizer, special: list[str]) -> Tokenizer:
    """With a token for each byte, and a space before the text."""
    content = json.loads(made.to_str())
    vocabulary = content["model"]["vocab"]
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    if isinstance(vocabulary, dict):
        vocabulary |= {name: len(vocabulary) + i for i, name in enumerate(names)}
        content["model"]["unk_token"] = "<unk>"
    else:
        vocabulary += [[name, -30.0] for name in names]
    content["model"]["byte_fallback"] = True
    made = Tokenizer.from_str(json.dumps(content))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.pre_tokenizer = None
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", special.index("<s>"))])
    return made


@cache
def sentencepiece() -> Tokenizer:
    """BPE like LLaMA 2's. It has ``<|end|>`` and not ``<|user|>``."""
    special = ["<unk>", "<s>", "</s>", "<|end|>"]
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=200, special_tokens=special, show_progress=False))
    return _like_sentencepiece(made, special)


@cache
def unigram() -> Tokenizer:
    """A unigram model, as in T5."""
    special = ["<unk>", "<s>", "</s>"]
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(vocab_size=160, special_tokens=special, unk_token="<unk>", show_progress=False)
    made.train_from_iterator(TEXT, trainer)
    return _like_sentencepiece(made, special)


KINDS = {"bundled": bundled, "byte-level": byte_level, "sentencepiece": sentencepiece, "unigram": unigram}


@cache
def as_bytes(kind: str) -> ByteTokenizer:
    return ByteTokenizer(KINDS[kind]().to_str())
