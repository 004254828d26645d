"""Coupled sampling: one seed gives one text per row, whatever the batch; which seeds there are. Texts: ``tests/same_text``."""

import numpy as np
import pytest
import torch

from pipespec import Pipeline
from tests.conftest import left_pad, noisy, random_prompts


@pytest.fixture(scope="module")
def chain(model):
    return Pipeline(model, [noisy(model, 0.1), noisy(model, 0.03)], lookahead=[3, 4], schedule="lockstep")


PROMPTS = random_prompts(4, seed=40, shortest=3, longest=9)


def sample(pipeline: Pipeline, ids, new: int = 10, **kwargs) -> list[list[int]]:
    """The new tokens per row."""
    out = pipeline.generate(ids, pad_token_id=0, max_new_tokens=new, do_sample=True, top_k=0, **kwargs)
    return out[:, ids.shape[1] :].tolist()


def check_reproducible(pipeline: Pipeline) -> None:
    """A seed gives one text, another seed another text, and a row depends on its seed and not on the rest of the batch."""
    ids, mask = left_pad(PROMPTS)
    texts = sample(pipeline, ids, attention_mask=mask, seed=11)
    seeds = pipeline.report.seeds
    assert len(set(seeds)) == 4
    assert sample(pipeline, ids, attention_mask=mask, seed=11) == texts
    for other in (12, 10, 11 + 2**40):
        assert all(a != b for a, b in zip(sample(pipeline, ids, attention_mask=mask, seed=other), texts, strict=True))
    for row, prompt in enumerate(PROMPTS):
        assert sample(pipeline, prompt[None], seed=[seeds[row]]) == [texts[row]]
        assert sample(pipeline, prompt[None], seed=seeds[row]) == [texts[row]]
    for order in ([3, 1, 0, 2], [2, 0], [1, 1, 3]):
        ids, mask = left_pad([PROMPTS[i] for i in order])
        got = sample(pipeline, ids, attention_mask=mask, seed=[seeds[i] for i in order])
        assert got == [texts[i] for i in order]


def test_seeds(chain, model):
    check_reproducible(chain)
    check_reproducible(Pipeline(model))


def test_torch_s_seed_governs_where_none_is_given(chain, model):
    alone, prompt = Pipeline(model), PROMPTS[0][None]
    torch.manual_seed(3)
    first = [sample(chain, prompt), sample(chain, prompt)]
    seeds = chain.report.seeds
    assert first[0] != first[1]
    torch.manual_seed(3)
    assert [sample(alone, prompt), sample(alone, prompt)] == first
    assert alone.report.seeds == seeds
    torch.manual_seed(4)
    assert sample(chain, prompt) != first[0]
    # With a given seed, or greedily, torch's generator does not advance.
    torch.manual_seed(3)
    sample(chain, prompt, seed=1)
    chain.generate(prompt, do_sample=False, max_new_tokens=3)
    assert chain.report.seeds is None
    assert sample(chain, prompt) == first[0]


def test_rows_and_returned_sequences_have_noise_of_their_own(chain):
    prompt = PROMPTS[1][None]
    same = sample(chain, prompt.expand(4, -1), seed=9)
    assert len({str(text) for text in same}) == 4
    assert sample(chain, prompt, seed=9, num_return_sequences=4) == same
    ids, mask = left_pad(PROMPTS[:2])
    pairs = sample(chain, ids, attention_mask=mask, seed=9, num_return_sequences=2)
    keys = chain.report.seeds
    assert len(set(keys)) == 4
    for row, key in enumerate(keys):
        assert sample(chain, PROMPTS[row // 2][None], seed=key) == [pairs[row]]
    assert sample(chain, ids, attention_mask=mask, num_return_sequences=2, seed=list(keys)) == pairs


def test_neighbouring_seeds_share_no_stream(chain):
    ids = PROMPTS[2][None].expand(6, -1)
    keys = []
    texts = set()
    for seed in range(-3, 4):
        texts |= {str(text) for text in sample(chain, ids, seed=seed)}
        keys += chain.report.seeds
    assert len(set(keys)) == len(keys) == 42
    assert len(texts) == 42


def test_any_integer_of_64_bits_is_a_seed(chain):
    prompt = PROMPTS[0][None]
    for seed in (0, -1, -(2**63), 2**63, 2**64 - 1, np.int32(-7), np.uint64(2**64 - 1)):
        text = sample(chain, prompt, seed=seed)
        assert chain.report.seeds == (int(seed) % 2**64,)
        assert sample(chain, prompt, seed=[seed]) == text
        assert sample(chain, prompt, seed=int(seed) % 2**64) == text
    both = prompt.expand(2, -1)
    wanted = sample(chain, both, seed=[5, 6])
    for seeds in ((5, 6), torch.tensor([5, 6]), [np.int64(5), 6]):
        assert sample(chain, both, seed=seeds) == wanted


@pytest.mark.parametrize(
    ("seed", "error", "words"),
    [
        ("7", TypeError, "seed must be an integer"),
        (1.0, TypeError, "seed must be an integer"),
        (True, TypeError, "seed must be an integer"),
        ([1, 2.5], TypeError, "seed must be an integer"),
        ([1, None], TypeError, "seed must be an integer"),
        (torch.tensor([0.5, 1.5]), TypeError, "seed must be an integer"),
        (torch.Generator(), TypeError, "seed must be an integer"),
        ([1, 2, 3], ValueError, "3 seeds for 2 rows"),
        ([], ValueError, "0 seeds for 2 rows"),
        ([5], ValueError, "1 seeds for 2 rows"),
    ],
)
def test_invalid_seeds(chain, seed, error, words):
    ids = PROMPTS[0][None].expand(2, -1)
    with pytest.raises(error, match=words):
        sample(chain, ids, seed=seed)
    assert sample(chain, ids, seed=1) == sample(chain, ids, seed=1)
