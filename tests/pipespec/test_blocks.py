"""Block drafters: the published formats, what a block drafts, and that the text stays the target's."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipespec import Pipeline
from pipespec.engine.block import BlockConfig, BlockDrafter, BlockStage, kind_of_block
from pipespec.engine.chain import as_draft
from pipespec.engine.controller import Controller
from pipespec.engine.head import is_head
from pipespec.models.properties import step_bytes
from tests.conftest import DEVICE, VOCABULARY, always_right, left_pad, noisy, random_prompts
from tests.pipespec import blocks, heads
from tests.support.ways import driver_of

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")  # a draft has failed

SAMPLED = {"do_sample": True, "seed": 5, "temperature": 0.9, "top_k": 30}

Writer = Callable[..., Path]


def of_speculators(kind: str) -> Writer:
    return lambda folder, weights, **more: blocks.write_speculators(folder, weights, kind, **more)


MARKOV = {"markov_rank": blocks.RANK, "enable_confidence_head": True, "confidence_head_with_markov": True}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7, "use_sliding_window": True}

SHAPES: dict[str, tuple[Writer, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # The format, the weights and the configuration of a checkpoint, and the arguments of its reference.
    "z-lab": (blocks.write_z_lab, {}, {}, {"size": 5, "from_anchor": False}),
    "z-lab, windows": (
        blocks.write_z_lab,
        {},
        SLIDING,
        {"size": 5, "from_anchor": False, "windows": (7, None), "causal": (True, False)},
    ),
    "z-lab, windows that see the whole block": (
        blocks.write_z_lab,
        {},
        SLIDING | {"is_causal": False},
        {"size": 5, "from_anchor": False, "windows": (7, None)},
    ),
    "z-lab, scales": (
        blocks.write_z_lab,
        {},
        {"dflash_config": {"input_embedding_scale": 1.5, "output_multiplier": 0.5, "final_logit_softcapping": 3.0}},
        {"size": 5, "from_anchor": False, "scale": (1.5, 0.5), "softcap": 3.0},
    ),
    "z-lab, dspark": (
        blocks.write_z_lab,
        {"markov": "vanilla"},
        {"architectures": ["DSparkDraftModel"], "dflash_config": {"projector_type": "dspark"}, **MARKOV},
        {"size": 5, "from_anchor": True, "markov": "vanilla"},
    ),
    "speculators, dflash": (of_speculators("dflash"), {}, {}, {"size": 4, "from_anchor": False}),
    "speculators, dflash, reduced vocabulary": (
        of_speculators("dflash"),
        {"drafted": heads.DRAFTED},
        {},
        {"size": 4, "from_anchor": False},
    ),
    "speculators, dspark": (
        of_speculators("dspark"),
        {"markov": "vanilla", "drafted": heads.DRAFTED},
        MARKOV,
        {"size": 4, "from_anchor": True, "markov": "vanilla"},
    ),
    "speculators, dspark, recurrent, without the anchor": (
        of_speculators("dspark"),
        {"markov": "rnn"},
        MARKOV | {"markov_head_type": "rnn", "sample_from_anchor": False, "proposed": 4},
        {"size": 4, "from_anchor": False, "markov": "rnn"},
    ),
    "speculators, dspark, as many tokens as masks": (
        of_speculators("dspark"),
        {"markov": "vanilla"},
        MARKOV | {"proposed": 3},
        {"size": 4, "from_anchor": False, "markov": "vanilla"},
    ),
    "deepspec, dflash": (blocks.write_deepspec, {"own_ends": True}, {}, {"size": 4, "from_anchor": True}),
    "deepspec, gated": (
        blocks.write_deepspec,
        {"markov": "gated"},
        MARKOV | {"markov_head_type": "gated"},
        {"size": 4, "from_anchor": True, "markov": "gated"},
    ),
    "deepspec, recurrent": (
        blocks.write_deepspec,
        {"markov": "rnn"},
        MARKOV | {"markov_head_type": "rnn"},
        {"size": 4, "from_anchor": True, "markov": "rnn"},
    ),
}


@pytest.fixture(scope="module")
def target():
    return heads.make_target()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return blocks.write_z_lab(tmp_path_factory.mktemp("block"), blocks.make_weights())


# ---- files


def test_both_spellings_of_hidden_states_are_the_same_ones(target, tmp_path) -> None:
    """z-lab and DeepSpec name layers and mean their outputs, ``speculators`` names hidden states."""
    weights = blocks.make_weights()
    written = [
        blocks.write_z_lab(tmp_path / "layers", weights),
        blocks.write_deepspec(tmp_path / "flat", weights),
        blocks.write_speculators(tmp_path / "states", weights, "dflash"),
    ]
    assert [BlockConfig.load(each).features for each in written] == [(2, 4, 5)] * 3
    first, *others = (BlockDrafter.load(each, target).state_dict() for each in written)
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)
    embedded = blocks.write_deepspec(tmp_path / "embedding", weights, target_layer_ids=[-1, 3, 4])
    assert BlockConfig.load(embedded).features == (0, 4, 5)


def test_what_a_folder_holds(folder, tmp_path) -> None:
    assert kind_of_block(folder) == "dflash"
    assert not is_head(folder)
    dspark = blocks.write_speculators(tmp_path / "s", blocks.make_weights(markov="vanilla"), "dspark", **MARKOV)
    assert kind_of_block(dspark) == "dspark"
    assert as_draft(dspark).drafts_at_once
    heads.write_speculators(tmp_path / "head", heads.make_weights())
    assert kind_of_block(tmp_path / "head") is None
    assert not as_draft(tmp_path / "head").drafts_at_once
    assert kind_of_block("ngram") is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, "reads hidden states of size 64, the target's have 32"),
        ({"dflash_config": {"target_layer_ids": [1, 3, 7]}}, r"\[2, 4, 8\].*the target's 8 layers"),
        ({"dflash_config": {"mask_token_id": VOCABULARY}}, "the mask token 320 of 320"),
        ({"dflash_config": {"projector_type": "domino"}}, "projector_type is 'domino'"),
        ({"architectures": ["DFlash2DraftModel"]}, "of DFlash2"),
        ({"markov_rank": 4, "markov_head_type": "other"}, "markov_head_type is 'other'"),
        ({"layer_types": ["linear_attention"] * 2}, "layers of the types 'linear_attention'"),
        ({"layer_types": ["sliding_attention"] * 2}, "no sliding_window"),
        ({"head_dim": 0}, "describes no block drafter that can be read"),
        ({"rope_parameters": {"rope_type": "dynamo"}}, "describes no block drafter that can be read"),
        ({"model_type": "gemma"}, "its layers are those of 'gemma'"),
        (
            {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3},
            "its weights are not those of its config.json",
        ),
    ],
)
def test_what_does_not_fit_is_refused(changes, message, target, tmp_path) -> None:
    blocks.write_z_lab(tmp_path, blocks.make_weights(), **changes)
    with pytest.raises(ValueError, match=message):
        Pipeline(target, tmp_path)


def test_a_reduced_vocabulary_needs_its_own_head(target, tmp_path) -> None:
    weights = blocks.make_weights(drafted=heads.DRAFTED)
    del weights["lm_head.weight"]
    blocks.write_speculators(tmp_path, weights, "dflash")
    with pytest.raises(ValueError, match="has no lm_head of its own"):
        Pipeline(target, tmp_path)


# ---- what a block drafts


def check_against_reference(found, target, weights, begin=0, **told) -> None:
    """Compare drafts with :class:`blocks.Reference` over the hidden states of transformers' own forward, from the token at ``begin`` on."""
    ends = (m.weight.detach().cpu() for m in (target.get_input_embeddings(), target.get_output_embeddings()))
    reference = blocks.Reference(weights, *ends, **told)
    ids = torch.arange(VOCABULARY) if "d2t" not in weights else torch.arange(heads.DRAFTED) + weights["d2t"]
    others = torch.ones(VOCABULARY, dtype=torch.bool)
    others[ids] = False
    read: dict[tuple[int, ...], torch.Tensor] = {}
    for known, text, logits in found:
        begun = tuple(text[: known - 1])
        if begun not in read:
            with torch.no_grad():
                states = target(torch.tensor([begun], device=DEVICE), output_hidden_states=True).hidden_states
            read[begun] = torch.cat([states[k][0, begin:] for k in (2, 4, 5)], -1).cpu()
        features = read[begun]
        assert torch.isneginf(logits[others]).all()
        torch.testing.assert_close(logits[ids].double(), reference.logits(features, text[begin:]), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_drafts_are_the_reference_s(shape, native, target, tmp_path, monkeypatch) -> None:
    write, drawn, config, told = shape
    weights = blocks.make_weights(**drawn)
    path, drafted = write(tmp_path, weights, **config), heads.Drafted(monkeypatch, BlockStage)
    ids, mask = left_pad(random_prompts(2, seed=3, shortest=4, longest=9))
    with Pipeline(target, path, lookahead=6, graphs=False, native=native) as pipe:
        # Sampled, so that some are accepted: later rounds follow rollbacks of different depths.
        text = pipe.generate(ids, attention_mask=mask, max_new_tokens=9, **SAMPLED)
        form = "block drafter, native products" if native and DEVICE == "cpu" else "block drafter"
        assert pipe.report.stages[0].forward == form
    with Pipeline(target, schedule="plain") as plain:
        assert torch.equal(text, plain.generate(ids, attention_mask=mask, max_new_tokens=9, **SAMPLED))
    # A block drafts no more than its columns, though six tokens are asked for.
    assert {len(text) - known for known, text, _ in drafted.found} == set(
        range(told["size"] - (not told["from_anchor"]))
    )
    check_against_reference(drafted.found, target, weights, **told)


def test_one_forward_per_round(folder, target, monkeypatch) -> None:
    ran, forward = [], BlockDrafter.forward
    monkeypatch.setattr(BlockDrafter, "forward", lambda *args: ran.append(1) or forward(*args))
    with Pipeline(target, folder, lookahead=4, graphs=False) as pipe:
        pipe.generate(torch.tensor([[5, 6, 7, 8]]), max_new_tokens=16, do_sample=False)
        verifying = pipe.report.stages[-1]
        assert pipe.report.stages[0].steps > len(ran)
        assert len(ran) <= verifying.steps


def test_rows_whose_blocks_are_used_up_unevenly(folder, target, monkeypatch) -> None:
    """A row begins a new block while another one takes a later column of its own."""
    ids, mask = left_pad(random_prompts(3, seed=2, shortest=3, longest=20))
    call: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 40, "pad_token_id": 0, "do_sample": False}
    with Pipeline(target, schedule="plain") as plain:
        expected = plain.generate(ids, **call)
    texts = {tuple(row[gaps:][:3].tolist()): row[gaps:] for row, gaps in zip(expected, (mask == 0).sum(1), strict=True)}
    logits_of = BlockStage._logits_of

    def foreseen(stage: BlockStage, count: int) -> torch.Tensor:
        """Logits by which two of three columns draft the right token."""
        logits = logits_of(stage, count)
        for row, (n, _) in enumerate(stage._blocks):
            text = texts[tuple(stage._text[row, :3].tolist())]
            for column in range(min(count, len(text) - n)):
                if (7 * n + column + row) % 3:
                    logits[row, column, text[n + column]] += 1000
        return logits

    monkeypatch.setattr(BlockStage, "_logits_of", foreseen)
    with Pipeline(target, [folder, "ngram"], lookahead=2, graphs=False) as pipe:
        assert torch.equal(pipe.generate(ids, **call), expected)
        assert pipe.report.stages[-1].accepted > 0


def test_drafts_after_a_reused_prompt_and_a_given_cache(target, folder, monkeypatch) -> None:
    check = functools.partial(check_against_reference, size=5, from_anchor=False)
    with Pipeline(target, folder, lookahead=2, graphs=False) as pipe:
        heads.check_after_earlier_text(pipe, heads.Drafted(monkeypatch, BlockStage), check, blocks.make_weights())


# ---- the text


@pytest.mark.parametrize(
    "drafts",
    [
        lambda block, target: [block],
        lambda block, target: [block, "ngram"],
        lambda block, target: [block, noisy(target, 0.3, seed=2)],
        lambda block, target: [block, "ngram", always_right(target)],
    ],
    ids=["alone", "index", "model", "index and model"],
)
@pytest.mark.parametrize(("kind", "lookahead"), [("dflash", 3), ("dspark", 3), ("dflash", None)])
def test_a_block_before_other_drafts(kind, drafts, lookahead, target, tmp_path) -> None:
    """They verify its tokens, or pass them on, and go on where its block ends."""
    markov = "rnn" if kind == "dspark" else ""
    more = MARKOV | {"markov_head_type": "rnn"} if markov else {}
    block = blocks.write_speculators(tmp_path, blocks.make_weights(markov=markov), kind, size=3, **more)
    ids, mask = left_pad(random_prompts(2, seed=3, shortest=4, longest=9))
    call: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 40, "pad_token_id": 0, **SAMPLED}
    with (
        Pipeline(target, drafts(block, target), lookahead=lookahead, graphs=False) as pipe,
        Pipeline(target, schedule="plain") as plain,
    ):
        assert torch.equal(pipe.generate(ids, **call), plain.generate(ids, **call))
        if lookahead:
            assert all(stage.drafted > 0 for stage in pipe.report.stages[1:])


@pytest.mark.skipif(DEVICE != "cpu", reason="blocks of quantised weights are for the CPU")
@pytest.mark.parametrize("weights", ["q8_0", {"draft 0": "q4_0"}, {"target": "q8_0"}], ids=["both", "draft", "target"])
def test_matrices_in_blocks(weights, folder) -> None:
    target, prompt = heads.make_target(seed=2), torch.tensor([[5, 6, 7, 8]])
    of_target = weights if isinstance(weights, str) else weights.get("target")
    with Pipeline(target, folder, lookahead=2, weights=weights) as pipe, Pipeline(target, weights=of_target) as plain:
        drafted, alone = (p.generate(prompt, max_new_tokens=12, do_sample=False) for p in (pipe, plain))
        assert torch.equal(drafted, alone)
        assert pipe.report.stages[-1].drafted > 0


def test_captured_steps_are_refused(target, folder) -> None:
    with pytest.raises(ValueError, match="a block drafter"):
        Pipeline(target, folder, graphs=True)


# ---- what it costs


def test_a_block_is_priced_once_per_round(target, folder) -> None:
    with Pipeline(target, folder, graphs=False) as pipe:
        control = driver_of(pipe).controller
        assert control._at_once
        drafter = driver_of(pipe).models[0]
        own = sum(p.numel() for p in drafter.parameters()) + target.lm_head.weight.numel()
        assert drafter.step_bytes >= 4 * own
        assert control._relative_cost == drafter.step_bytes / step_bytes(target)
        pipe.generate(torch.tensor([[5, 6, 7, 8]]), max_new_tokens=40, do_sample=False)
    made = [Controller(0.5, at_once=at_once) for at_once in (False, True)]
    for control in made:
        control._plain_rate = 1.0
        for _ in range(40):
            control.rates["model"].note(4, 4)
        control._review_model([1.0 + 0.01 * k for k in range(17)], 0, 100, 1)
    chain, block = (control._model for control in made)
    assert block.tokens > chain.tokens or made[1]._model_rate > made[0]._model_rate


def test_the_configuration_tells_how_many_tokens(folder) -> None:
    config = BlockConfig.load(folder)
    assert config.drafted == 4
    assert replace(config, from_anchor=True).drafted == 5
