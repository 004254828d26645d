"""Draft heads against the reference implementation: the package ``speculators``, where it is installed. ``pip install speculators datasets openai``"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from pipespec.engine.head import DraftHead
from tests.conftest import VOCABULARY
from tests.pipespec import heads

pytest.importorskip("speculators", reason="the package speculators is not installed")

STEPS, SLOTS = 4, 12
ERROR = 1e-6
"""Relative to the largest logit. All is float64 but the rotary angles, which both compute in float32, at positions that differ by one."""


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    model = heads.make_target()
    model.save_pretrained(folder := tmp_path_factory.mktemp("target"))
    model.config._name_or_path = str(folder)
    return model


def theirs(folder: Path, weights: dict[str, torch.Tensor], features: torch.Tensor, tokens: torch.Tensor) -> Any:
    """Logits ``[STEPS, S, drafted]`` and draft tokens of the reference: step ``t`` of slot ``p`` has read the features up to ``p``."""
    from speculators import SpeculatorModel, SpeculatorModelConfig

    config = SpeculatorModelConfig.from_pretrained(str(folder))
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(str(folder), config=config).double().eval()
    for name, value in weights.items():
        if name.startswith("midlayer."):
            own = model.get_parameter(name.replace("midlayer.", "layers.0."))
            assert torch.equal(own, value.double()), name
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, given, out: logits.append(out[0]))
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        drafted = model(
            hidden_states=features[None],
            input_ids=tokens[None, 1:],
            document_ids=torch.zeros(1, len(features), dtype=torch.long),
            ttt_steps=STEPS,
        )
    return torch.stack(logits), torch.cat(drafted)


def ours(head: DraftHead, features: torch.Tensor, tokens: torch.Tensor, width: int) -> torch.Tensor:
    """The same by our head: slots are read ``width`` at a time, the steps of each one are drafted from its cache and rolled back."""
    cache, found = DynamicCache(config=head.block), torch.zeros(STEPS, SLOTS, heads.DRAFTED, dtype=torch.float64)

    def run(state: torch.Tensor, first: int) -> torch.Tensor:
        q = state.shape[1]
        mask = torch.zeros(1, 1, q, first + q, dtype=torch.float64)
        mask.masked_fill_(torch.ones(q, first + q, dtype=torch.bool).triu(first + 1), -torch.inf)
        positions = torch.arange(first, first + q)[None]
        embeds = head.embed(tokens[None, first + 1 : first + 1 + q])
        return head(embeds, state, positions, [mask], cache)

    with torch.no_grad():
        for begin in range(0, SLOTS, width):
            chunk = features[None, begin : begin + width]
            out = run(head.fuse(chunk), begin)
            end = begin + chunk.shape[1]
            found[0, begin:end] = head.logits(out)[0]
            state = out[:, -1:]
            for step in range(1, min(STEPS, SLOTS - end + 1)):
                state = run(state, end - 1 + step)
                found[step, end - 1] = head.logits(state)[0, 0]
            cache.crop(end - cache.get_seq_length())
    return found


@pytest.mark.parametrize("flag", [None, *heads.FLAGS])
@pytest.mark.parametrize("layer", [{}, {"kv_heads": 1}, {"qwen3": True}], ids=["llama", "one key head", "qwen3"])
@pytest.mark.parametrize("form", ["original", "speculators"])
def test_logits_and_draft_tokens_are_those_of_the_reference(target, tmp_path, form, layer, flag) -> None:
    flags = {} if flag is None else {flag: True}
    weights = heads.make_weights(own_embedding=True, **layer, **flags)
    folder = heads.write_speculators(tmp_path / "theirs", weights, verifier=target.config._name_or_path, **flags)
    noise = torch.Generator().manual_seed(5)
    features = torch.randn(SLOTS, 3 * heads.HIDDEN, generator=noise, dtype=torch.float64)
    tokens = torch.randint(VOCABULARY, (SLOTS + 1,), generator=noise)
    expected, drafted = theirs(folder, weights, features, tokens)
    if form == "original":
        folder = heads.write_original(tmp_path / "ours", weights, **flags)
    head = DraftHead.load(folder, target, torch.float64)
    for width in (1, 3, 5):
        got = ours(head, features, tokens, width)
        compared = 0
        for step in range(STEPS):
            ends = range(SLOTS) if step == 0 else range(width - 1, SLOTS - step, width)
            for slot in ends:
                difference = (got[step, slot] - expected[step, slot]).abs().max() / expected.abs().max()
                assert difference <= ERROR, (width, step, slot, difference)
                assert int(got[step, slot].argmax()) == int(drafted[step, slot])
                compared += 1
        assert compared > SLOTS
