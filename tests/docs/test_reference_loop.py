"""The reference loop of docs/reference_loop.py gives the text of generate()."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import pipespec
from pipespec.demo import FAMILY, family_path, prompts

SOURCE = Path(__file__).resolve().parents[2] / "docs" / "reference_loop.py"
NEW_TOKENS = 32


@pytest.fixture(scope="module")
def loop() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference_loop", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def family() -> dict[str, LlamaForCausalLM]:
    return {name: AutoModelForCausalLM.from_pretrained(family_path(name), dtype=torch.float32) for name in FAMILY}


@pytest.fixture(scope="module")
def texts() -> list[torch.Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(family_path("target"))
    return [tokenizer(prompt, return_tensors="pt").input_ids for prompt in prompts(2)]


@pytest.mark.parametrize("drafts", [(), ("small",), ("small", "medium")])
@pytest.mark.parametrize("lookahead", [1, 4])
def test_greedy_text_is_that_of_generate(loop, family, texts, drafts: tuple[str, ...], lookahead: int) -> None:
    target = family["target"]
    chain = [*(family[name] for name in drafts), target]
    steps = 0

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1

    pipespec.trust(count)
    for ids in texts:
        steps, hook = 0, target.register_forward_hook(count)
        new = loop.generate(chain, ids[0].tolist(), NEW_TOKENS, lookahead)
        hook.remove()
        expected = target.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
        assert new == expected[0, ids.shape[1] :].tolist()
        if drafts:
            assert steps < 0.75 * len(new)  # fewer forwards than tokens, so verification has accepted draft tokens
        with pipespec.Pipeline(target, [family[name] for name in drafts], schedule="lockstep") as pipe:
            assert new == pipe.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0, ids.shape[1] :].tolist()


def test_sampled_text_does_not_depend_on_the_drafts(loop, family, texts) -> None:
    prompt = texts[0][0].tolist()

    def sampled(*names: str, seed: int, lookahead: int = 4) -> list[int]:
        models = [family[name] for name in names]
        return loop.generate(models, prompt, NEW_TOKENS, lookahead, choose=loop.coupled(seed, temperature=0.8))

    alone = sampled("target", seed=1)
    assert sampled("small", "target", seed=1) == alone
    assert sampled("small", "medium", "target", seed=1, lookahead=7) == alone
    assert sampled("target", seed=2) != alone


def test_text_ends_at_the_end_of_text_token(loop, family, texts) -> None:
    ids = texts[0]
    chain = [family["small"], family["target"]]
    text = loop.generate(chain, ids[0].tolist(), NEW_TOKENS)
    end = text[NEW_TOKENS // 2]
    assert loop.generate(chain, ids[0].tolist(), NEW_TOKENS, 7, eos_token_id=end) == text[: text.index(end) + 1]


def test_the_loop_stays_short() -> None:
    lines = [line.strip() for line in SOURCE.read_text().splitlines()]
    assert sum(bool(line) and not line.startswith('"""') for line in lines) <= 60
