"""Texts of small real models, see ``tools.real_models``: the same with every draft. ``make test-real`` runs these tests."""

import functools
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from pipespec import Pipeline

pytestmark = pytest.mark.real

NAMES = ("smol", "q05", "q15")
NEW = 24
QUESTION = (
    "Write a Python function longest_word(text) that returns the longest word of text. Then write a function "
    "shortest_word(text) that returns the shortest word of text."
)
"""The second function repeats much of the first, so that an n-gram index proposes tokens."""
SAMPLING = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 1.0, "seed": 17},
}


@functools.cache
def tokenizer_of(folder: Path, name: str):
    return AutoTokenizer.from_pretrained(folder / f"{name}-hf")


def load(folder: Path, name: str, dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder / f"{name}-hf", dtype=dtype).eval()


def prompt(folder: Path, name: str) -> torch.Tensor:
    conversation = [{"role": "user", "content": QUESTION}]
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    return tokenizer_of(folder, name).apply_chat_template(conversation, **options)["input_ids"]


def texts(pipe: Pipeline, ids: torch.Tensor) -> dict[str, list[int]]:
    """By the kind of sampling, the new tokens."""
    found = {}
    for kind, options in SAMPLING.items():
        found[kind] = pipe.generate(ids, max_new_tokens=NEW, **options)[0, ids.shape[1] :].tolist()
    return found


def check_drafts(target: PreTrainedModel, ids: torch.Tensor, chains: list[list], **options) -> dict[str, list[int]]:
    """Compare the texts of all chains with those of the target alone, which are returned."""
    with Pipeline(target, schedule="plain", **options) as pipe:
        wanted = texts(pipe, ids)
    assert wanted["greedy"] != wanted["sampled"]
    for drafts in chains:
        with Pipeline(target, drafts, schedule="lockstep", **options) as pipe:
            assert texts(pipe, ids) == wanted, drafts
    return wanted


def test_smol_in_float32_writes_the_text_of_generate_with_prompt_lookup(real_family):
    target, ids = load(real_family, "smol", torch.float32), prompt(real_family, "smol")
    wanted = check_drafts(target, ids, [["ngram"]])
    whole = target.generate(ids, max_new_tokens=NEW, do_sample=False)
    assert whole[0, ids.shape[1] :].tolist() == wanted["greedy"]


@pytest.mark.parametrize(("name", "draft"), [("smol", None), ("q05", None), ("q15", "q05")])
def test_texts_in_bfloat16_do_not_depend_on_drafts(real_family, name, draft):
    chains: list[list] = [["ngram"]]
    if draft is not None:
        model = load(real_family, draft, torch.bfloat16)
        chains.append([model])
    target = load(real_family, name, torch.bfloat16)
    check_drafts(target, prompt(real_family, name), chains, exact=True)


@pytest.mark.parametrize("name", NAMES)
def test_tokenizers_and_chat_templates_are_complete(real_family, name):
    tokenizer = tokenizer_of(real_family, name)
    text = "def f(x):\n    return {x: 'naïve — 東京 🙂'}\n"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    assert text.strip() in chat
    assert chat.endswith("<|im_start|>assistant\n")
    assert tokenizer.eos_token == "<|im_end|>"


def test_both_qwens_have_one_tokenizer(real_family):
    small, large = (tokenizer_of(real_family, name) for name in ("q05", "q15"))
    assert small.get_vocab() == large.get_vocab()
    assert small.backend_tokenizer.to_str() == large.backend_tokenizer.to_str()
    assert small(QUESTION).input_ids == large(QUESTION).input_ids
