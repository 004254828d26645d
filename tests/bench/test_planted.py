"""Planted models agree as often as requested, over texts that do not repeat."""

import math

import pytest
import torch

from bench import planted
from bench.planted import Cycle, PlantedChain, nested, plant, random_prompts

NAMES = ("tiny-small", "tiny-medium", "tiny-target")
TEXTS, TOKENS = 16, 96


@pytest.fixture(scope="module")
def chain() -> PlantedChain:
    return plant(NAMES, 0.7, seed=3, texts=TEXTS, new_tokens=TOKENS)


def sampling_error(rate: float, positions: int) -> float:
    """Four standard deviations of a rate that is calibrated on this number of positions and measured on as many others."""
    return 4 * math.sqrt(2 * rate * (1 - rate) / positions)


def test_agreement_is_what_was_asked_for(chain: PlantedChain) -> None:
    assert chain.requested == (0.7, 0.85)
    assert chain.measured.positions == TEXTS * TOKENS
    small, medium = (row[-1] for row in chain.measured.agreement[:-1])  # with the target
    for requested, found in zip(chain.requested, (small, medium), strict=True):
        assert abs(found - requested) <= sampling_error(requested, TEXTS * TOKENS)
    assert small < medium
    assert 0 < chain.measured.wander < 0.03
    assert chain.measured.flips == 0  # float32
    assert chain.measured.margin > 2
    # Agreement along the target's text, which is the acceptance rate of speculative decoding.
    prompts = random_prompts(512, TEXTS, 32, 77)
    text = planted.write(chain.models[-1], prompts, TOKENS)
    choice = chain.models[0](text[:, :-1], logits_to_keep=TOKENS).logits.argmax(-1)
    assert abs(float((choice == text[:, 32:]).double().mean()) - 0.7) <= sampling_error(0.7, TEXTS * TOKENS)


def test_texts_do_not_repeat(chain: PlantedChain) -> None:
    half = 512 // 2
    for row in planted.write(chain.models[-1], random_prompts(512, 4, 32, 5), half - 1)[:, 32:]:
        assert len(set((chain.cycle.place[row] % half).tolist())) == half - 1


def test_disagreement_depends_on_the_context(chain: PlantedChain) -> None:
    """After the same last token of different texts, the draft chooses either follower, for many tokens."""
    last = torch.arange(64)
    contexts = [random_prompts(512, len(last), 32, seed) for seed in range(8)]
    for ids in contexts:
        ids[:, -1] = last
    follower = chain.cycle.next(last)
    taken = torch.stack([chain.models[0](ids).logits[:, -1].argmax(-1) for ids in contexts])
    either = (taken == follower) | (taken == chain.cycle.mate(follower))
    assert either.double().mean() > 0.9  # by chance: 2 in 512
    share = (taken == follower).double().mean(0)
    assert ((share > 0) & (share < 1)).double().mean() > 0.4


def test_every_parameter_takes_part(chain: PlantedChain) -> None:
    for model in chain.models:
        model.requires_grad_(True)
        try:
            model(random_prompts(512, 2, 16, 1)).logits.square().mean().backward()
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None, name
                gradient = parameter.grad.reshape(len(parameter), -1).norm(dim=-1)
                if "embed_tokens" in name:  # of the tokens that were fed
                    gradient = gradient[random_prompts(512, 2, 16, 1).unique()]
                assert bool((gradient > 0).all()), name
                if parameter.dim() == 2:
                    assert float((parameter == 0).double().mean()) < 1e-3, name
        finally:
            model.zero_grad()
            model.requires_grad_(False)


def test_a_seed_gives_the_same_models_again() -> None:
    options = {"texts": 2, "new_tokens": 16}
    a, b, c = (plant(("tiny-small", "tiny-target"), 0.8, seed=seed, **options) for seed in (1, 1, 2))
    assert a.record() == b.record()
    for model, same, other in zip(a.models, b.models, c.models, strict=True):
        for x, y, z in zip(model.parameters(), same.parameters(), other.parameters(), strict=True):
            assert torch.equal(x, y)
            assert not torch.equal(x, z)


def test_without_calibration_all_agree() -> None:
    found = plant(("tiny-small", "tiny-target"), texts=0)
    assert found.measured is None
    assert found.record()["measured"] is None
    prompts = random_prompts(512, 2, 8, 3)
    texts = [planted.write(model, prompts, 24) for model in found.models]
    assert torch.equal(*texts)
    assert torch.equal(texts[0][:, 8:], found.cycle.next(texts[0][:, 7:-1]))


def test_a_cycle() -> None:
    cycle = Cycle.draw(10, 0)
    token, seen = torch.tensor([4]), []
    for _ in range(10):
        seen.append(int(token))
        assert cycle.mate(cycle.mate(token)) == token
        assert cycle.sign(cycle.mate(token)) == -cycle.sign(token)
        token = cycle.next(token)
    assert token == 4
    assert sorted(seen) == list(range(10))
    with pytest.raises(ValueError, match="even"):
        Cycle.draw(11, 0)


def test_bytes_of_a_step(chain: PlantedChain) -> None:
    model = chain.models[-1]
    layers = sum(p.numel() for p in model.model.layers.parameters())
    assert planted.bytes_per_step(model) == 4 * (layers + 160 + 512 * 160)
    shape = planted.SHAPES["8B"]
    with torch.device("meta"):
        real = planted.LlamaForCausalLM(planted._config(shape))
    assert real.num_parameters() == 8030261248  # as published


def test_rates() -> None:
    assert nested(0.6, 2) == (0.6, 0.8)
    assert nested((0.7, 0.9), 2) == (0.7, 0.9)
    for rates, drafts, message in (((0.7,), 2, "one per draft"), (0.3, 1, "between"), ((0.9, 0.7), 2, "must not fall")):
        with pytest.raises(ValueError, match=message):
            nested(rates, drafts)
    with pytest.raises(ValueError, match="lower wander"):
        plant(("tiny-small", "tiny-target"), 1.0)
    with pytest.raises(ValueError, match="no shape '2B'"):
        plant(("2B", "8B"))
