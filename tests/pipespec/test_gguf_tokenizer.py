"""Tokenizers of GGUF files: how a text is split, which tokens are special, and which of them end a turn."""

import os
from pathlib import Path

import pytest

from pipespec import load_tokenizer
from pipespec.models.gguf import GgufFile
from pipespec.models.gguf_tokenizer import SPLITS, end_ids
from pipespec.models.tokenizers import fim_tokens

gguf = pytest.importorskip("gguf")

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6


def alphabet() -> list[str]:
    """The characters that stand for bytes in byte-level vocabularies, by byte."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = iter(range(256, 512))
    return [chr(byte if byte in visible else next(hidden)) for byte in range(256)]


def write(path: Path, vocabulary: list[tuple[str, int]], *, model: str = "gpt2", arch: str = "llama", **more) -> Path:
    """A file with a tokenizer and nothing else. ``more``: keys below ``tokenizer.ggml``; None leaves one out."""
    writer = gguf.GGUFWriter(path, arch)
    keys = {"model": model, "tokens": [text for text, _ in vocabulary], "token_type": [kind for _, kind in vocabulary]}
    keys |= (
        {"pre": "gpt-2", "merges": ["a b"]}
        if model == "gpt2"
        else {"scores": [-float(i) for i in range(len(vocabulary))]}
    )
    for key, value in (keys | more).items():
        name = f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif value is not None:
            writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


BYTES = [*((character, NORMAL) for character in alphabet()), ("ab", NORMAL)]
"""257 tokens, of which one is merged."""
SPM = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), *((f"<0x{byte:02X}>", BYTE) for byte in range(256))]
SPM += [(piece, NORMAL) for piece in ("▁", "H", "i", "Hi", "▁Hi", "▁▁", "[", "]", "\n")]

ODD = "I'LL say 12345 a1\r\n\n  x 我是3天 CamelCase !?\n"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt-2", ["I", "'", "LL", " say", " 12345", " a", "1", "\r\n\n ", " x", " 我是", "3", "天", " CamelCase", " !?", "\n"]),
        ("llama-bpe", ["I", "'LL", " say", " ", "123", "45", " a", "1", "\r\n\n", " ", " x", " 我是", "3", "天", " CamelCase", " !?\n"]),
        ("qwen2", ["I", "'LL", " say", " ", *"12345", " a", "1", "\r\n\n", " ", " x", " 我是", "3", "天", " CamelCase", " !?\n"]),
        ("starcoder", ["I", "'", "LL", " say", " ", *"12345", " a", "1", "\r\n\n ", " x", " 我是", "3", "天", " CamelCase", " !?", "\n"]),
        ("deepseek-llm", ["I", "'", "LL", " say", " ", "12345", " a", "1", "\r", "\n", "\n", " ", " x", " ", "我是", "3", "天", " CamelCase", " !?", "\n"]),
        ("deepseek-v3", ["I", "'LL", " say", " ", "123", "45", " a", "1", "\r\n\n", " ", " x", " ", "我是", "3", "天", " CamelCase", " !?\n"]),
        ("tekken", ["I", "'LL", " say", " ", *"12345", " a", "1", "\r\n\n", " ", " x", " 我是", "3", "天", " Camel", "Case", " !?\n"]),
        ("kimi-k2", ["I'LL", " say", " ", "123", "45", " a", "1", "\r\n\n", " ", " x", " ", "我是", "3", "天", " Camel", "Case", " !?\n"]),
        ("gpt-4o", ["I'LL", " say", " ", "123", "45", " a", "1", "\r\n\n", " ", " x", " 我是", "3", "天", " Camel", "Case", " !?\n"]),
        ("qwen35", ["I", "'LL", " say", " ", *"12345", " a", "1", "\r\n\n", " ", " x", " 我是", "3", "天", " CamelCase", " !?\n"]),
        ("falcon", ["I", "'", "LL", " say", " ", "123", "45", " a", "1", "\r\n\n ", " x", " 我是", "3", "天", " CamelCase", " ", "!?", "\n"]),
        ("bloom", ["I'LL", " say", " 12345", " a1", "\r\n\n ", " x", " 我是3天", " CamelCase", " !?\n"]),
    ],
)  # fmt: skip
def test_texts_are_split_as_by_the_published_tokenizers(tmp_path, name, words):
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", BYTES, pre=name))
    found = [text for text, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(ODD)]
    assert [bytes(alphabet().index(c) for c in word).decode() for word in found] == words
    assert tokenizer.decode(tokenizer(ODD, add_special_tokens=False).input_ids) == ODD


def test_letters_of_kimi_k2_are_not_those_of_chinese(tmp_path):
    """Its expression takes Chinese characters as words of their own, also within other letters, and marks with the letters before them."""
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", BYTES, pre="kimi-k2"))
    text = "ABc中文abc文xe\u0301x\u3005 ひらK仮名don't"
    found = [text for text, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    words = [bytes(alphabet().index(c) for c in word).decode() for word in found]
    assert words == ["ABc", "中文", "abc", "文", "xe\u0301x", "\u3005", " ひら", "K", "仮名", "don't"]


@pytest.mark.parametrize("name", SPLITS)
def test_every_split_keeps_the_text(tmp_path, name):
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", BYTES, pre=name))
    text = ODD + "½ ² ٣٤ \u3000 🙂 e\u0301 <sentinel:3> 1,234,567.89 \t\x00"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def test_an_unknown_split_is_refused_and_none_is_a_warning(tmp_path):
    with pytest.raises(ValueError, match=r"m\.gguf has a tokenizer that splits a text as 'mystery'.*--tokenizer"):
        load_tokenizer(write(tmp_path / "m.gguf", BYTES, pre="mystery"))
    with pytest.warns(UserWarning, match=r"m\.gguf does not say how its tokenizer splits"):
        tokenizer = load_tokenizer(write(tmp_path / "m.gguf", BYTES, pre=None))
    assert tokenizer.decode(tokenizer(ODD).input_ids) == ODD
    with pytest.raises(ValueError, match="of the kind 'rwkv'"):
        load_tokenizer(write(tmp_path / "m.gguf", BYTES, model="rwkv"))


def test_words_that_are_tokens_are_those_tokens_where_merges_are_ignored(tmp_path):
    tokens = [*BYTES, ("abc", NORMAL)]  # no merge makes abc
    for name, pieces in (("gpt-2", ["ab", "c"]), ("llama-bpe", ["abc"])):
        tokenizer = load_tokenizer(write(tmp_path / "m.gguf", tokens, pre=name))
        assert tokenizer.convert_ids_to_tokens(tokenizer("abc", add_special_tokens=False).input_ids) == pieces


@pytest.mark.parametrize(
    ("keys", "adds"),
    [
        ({"pre": "llama-bpe"}, True),
        ({"pre": "llama-bpe", "add_bos_token": False}, False),
        ({"pre": "qwen2"}, False),
        ({"pre": "qwen2", "add_bos_token": True}, True),
    ],
)
def test_a_text_begins_with_bos_where_the_file_or_its_kind_says_so(tmp_path, keys, adds):
    tokens = [*BYTES, ("<bos>", CONTROL)]
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", tokens, bos_token_id=257, eos_token_id=257, **keys))
    assert tokenizer("a").input_ids == [*([257] if adds else []), ord("a")]  # the alphabet is in the order of bytes


# ---- special tokens


def test_special_tokens_are_known_by_their_type(tmp_path):
    """Also where their characters stand for no bytes, as DeepSeek's. A text like a special token that is not there is text."""
    tokens = [*BYTES, ("<\uff5cUser\uff5c>", CONTROL), ("<\uff5cend\u2581of\u2581sentence\uff5c>", CONTROL), ("<think>", USER)]  # fmt: skip
    path = write(tmp_path / "m.gguf", tokens, pre="deepseek-v3", bos_token_id=258, eos_token_id=258)
    tokenizer = load_tokenizer(path)
    ids = tokenizer(
        "<\uff5cUser\uff5c>a<think><|endoftext|><\uff5cend\u2581of\u2581sentence\uff5c>", add_special_tokens=False
    ).input_ids
    assert [i for i in ids if i >= 257] == [257, 259, 258]
    assert max(tokenizer.get_vocab().values()) == 259
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<think><|endoftext|>"
    assert end_ids(GgufFile.open(path)) == [258]


def test_special_tokens_of_characters_that_stand_for_bytes_are_text(tmp_path):
    """DeepSeek's vocabularies have the characters of bytes that UTF-8 never has as tokens of their own."""
    tokens = [*((text, USER if text in "\u00c0\u00f5" else kind) for text, kind in BYTES)]
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", tokens, pre="deepseek-coder"))
    text = "a\u00c0\u00f5\u00e9b"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert len(ids) == 6  # the others are bytes
    assert tokenizer.decode(ids) == text


def test_ids_beyond_the_vocabulary_are_no_special_tokens(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", BYTES, bos_token_id=999, eos_token_id=70))
    assert (tokenizer.bos_token, tokenizer.eos_token) == (None, alphabet()[70])


@pytest.mark.parametrize(
    ("texts", "keys", "ends"),
    [
        (["<eos>", "<end_of_turn>"], {"eos_token_id": 257}, [257, 258]),  # Gemma 3
        (["<|endoftext|>", "<|end|>"], {"eos_token_id": 257}, [257, 258]),  # Phi-3
        (["</s>", "<|im_end|>"], {"eos_token_id": 257}, [257, 258]),  # ChatML on LLaMA 2
        (["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"], {"eos_token_id": 257}, [257, 258, 259]),
        (["<|return|>", "<|call|>", "<|end|>"], {"eos_token_id": 257}, [257, 258]),  # gpt-oss: <|end|> ends a message
        (["x", "y"], {"eos_token_id": 257, "eot_token_id": 258}, [257, 258]),
        (["x", "[/INST]"], {"eos_token_id": 257}, [257]),
    ],
)
def test_turns_end_by_the_metadata_and_by_the_texts_of_special_tokens(tmp_path, texts, keys, ends):
    path = write(tmp_path / "m.gguf", [*BYTES, *((text, CONTROL) for text in texts)], **keys)
    assert end_ids(GgufFile.open(path)) == ends


def test_an_end_of_a_turn_is_special_whatever_its_type(tmp_path):
    """But for ``</s>``, which is text in vocabularies that were trained on text with it."""
    tokens = [*BYTES, ("<|im_end|>", NORMAL), ("</s>", NORMAL), ("<|e|>", CONTROL)]
    path = write(tmp_path / "m.gguf", tokens, eos_token_id=259)
    assert end_ids(GgufFile.open(path)) == [257, 259]
    assert load_tokenizer(path)("<|im_end|>", add_special_tokens=False).input_ids == [257]


def test_types_that_a_file_does_not_name_are_told_by_the_texts(tmp_path):
    tokens = [*SPM, ("<|im_end|>", CONTROL)]
    path = write(tmp_path / "m.gguf", tokens, model="llama", token_type=None)
    with pytest.warns(UserWarning, match="does not say which of its tokens are special"):
        tokenizer = load_tokenizer(path)
    known = load_tokenizer(write(tmp_path / "known.gguf", tokens, model="llama"))
    for text in ("<s>[Hi]\n", "Hi<|im_end|>\u00e9</s>"):
        assert tokenizer(text).input_ids == known(text).input_ids


def test_tokens_for_fill_in_the_middle(tmp_path):
    """Those that the metadata name, or else those with published names."""
    size = len(BYTES)
    named = [*BYTES, *((text, CONTROL) for text in ("<a>", "<b>", "<c>", "<fim_pad>"))]
    metadata = {"fim_pre_token_id": size + 2, "fim_suf_token_id": size, "fim_mid_token_id": size + 1}
    assert fim_tokens(load_tokenizer(write(tmp_path / "a.gguf", named, **metadata))) == (
        size + 2,
        size,
        size + 1,
        (size + 3,),
    )
    known = [*BYTES, *((f"<|fim_{part}|>", CONTROL) for part in ("prefix", "middle", "suffix"))]
    assert fim_tokens(load_tokenizer(write(tmp_path / "b.gguf", known))) == (size, size + 2, size + 1, ())
    assert fim_tokens(load_tokenizer(write(tmp_path / "c.gguf", known[:-1]))) is None


def test_gemma_4_begins_a_text_with_bos_whatever_its_file_says(tmp_path):
    keys = {"merges": ["H i"], "scores": None, "add_bos_token": False, "bos_token_id": 1}
    assert load_tokenizer(write(tmp_path / "m.gguf", SPM, model="gemma4", **keys))("Hi").input_ids[0] == 1


# ---- SentencePiece


def pieces(tokenizer, text: str, special: bool = False) -> list[str]:
    return tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=special).input_ids)


def test_sentencepiece_puts_a_space_before_each_part_of_a_text(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", SPM, model="llama"))
    assert pieces(tokenizer, "Hi") == ["▁Hi"]
    assert pieces(tokenizer, " Hi") == ["▁", "▁Hi"]
    assert pieces(tokenizer, "<s>[Hi]") == ["<s>", "▁", "[", "Hi", "]"]
    assert pieces(tokenizer, "Hi", special=True) == ["<s>", "▁Hi"]
    assert pieces(tokenizer, "é") == ["▁", "<0xC3>", "<0xA9>"]
    for text in ("Hi é\n  Hi", " Hi"):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def test_sentencepiece_without_a_prefix(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", SPM, model="llama", add_space_prefix=False))
    assert pieces(tokenizer, "Hi Hi") == ["Hi", "▁Hi"]
    assert tokenizer.decode(tokenizer(" Hi", add_special_tokens=False).input_ids) == " Hi"


def test_special_tokens_of_phi_3_take_the_white_space_after_them(tmp_path):
    tokens = [*SPM, ("<|user|>", CONTROL), ("<|end|>", CONTROL)]
    for arch, found in (
        ("phi3", ["<|user|>", "▁Hi", "<|end|>"]),
        ("llama", ["<|user|>", "▁", "\n", "Hi", "<|end|>", "▁", "\n"]),
    ):
        tokenizer = load_tokenizer(write(tmp_path / "m.gguf", tokens, model="llama", arch=arch))
        assert pieces(tokenizer, "<|user|>\nHi<|end|>\n") == found


# ---- damage


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tokens": "text", "token_type": None}, "its tokenizer.ggml.tokens is not a list of texts"),
        ({"tokens": [1] * 257}, "its tokenizer.ggml.tokens is not a list of texts"),
        ({"tokens": None}, "has no tokenizer"),
        ({"merges": ["ab"]}, "the merge 'ab' is no pair"),
        ({"merges": ["a é"]}, "its tokenizer is damaged"),
        ({"merges": None}, "has a tokenizer without merges"),
        ({"token_type": [1]}, "tokenizer.ggml.token_type has 1 entries, and the vocabulary 257"),
        ({"eos_token_id": "2"}, "its tokenizer.ggml.eos_token_id is '2', not an integer"),
        ({"pre": 3}, "its tokenizer.ggml.pre is 3, not text"),
        ({"add_bos_token": 1}, "its tokenizer.ggml.add_bos_token is 1, not a truth value"),
    ],
)
def test_damage_is_named(tmp_path, keys, message):
    with pytest.raises(ValueError, match=message) as caught:
        load_tokenizer(write(tmp_path / "m.gguf", BYTES, **keys))
    assert str(tmp_path / "m.gguf") in str(caught.value)


# ---- real vocabularies


@pytest.mark.real
def test_tokens_of_real_vocabularies_are_the_published_ones():
    """``PIPESPEC_VOCABULARIES`` names the folder ``models`` of llama.cpp's source, whose vectors were made with the published tokenizers."""
    folder = os.environ.get("PIPESPEC_VOCABULARIES")
    if not folder:
        pytest.skip("PIPESPEC_VOCABULARIES is not set")
    checked = 0
    for texts in sorted(Path(folder).glob("ggml-vocab-*.gguf.inp")):
        file = texts.with_suffix("")
        if GgufFile.open(file).text("tokenizer.ggml.model") not in ("gpt2", "llama", "gemma4"):
            continue
        tokenizer = load_tokenizer(file)
        inputs = texts.read_bytes().decode().split("\n__ggml_vocab_test__\n")
        expected = [[int(i) for i in line.split()] for line in file.with_suffix(".gguf.out").read_text().split("\n")]
        for text, ids in zip(inputs, expected, strict=False):
            assert tokenizer(text, add_special_tokens=False).input_ids == ids, (file.name, text)
            checked += 1
    assert checked > 500
