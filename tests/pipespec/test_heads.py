"""Draft heads: both formats of files, what a head drafts, and that the text stays the target's."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

from pipespec import Pipeline
from pipespec.config import WIDTH, SpeculationConfig
from pipespec.engine.cache_storage import Features
from pipespec.engine.head import DraftHead, HeadConfig, HeadDraft, is_head
from pipespec.engine.native import Checksums
from pipespec.models.families import NotReadable
from pipespec.models.properties import step_bytes
from pipespec.models.quantized import has_blocks
from pipespec.schedules.graphs.head import GraphedHead
from pipespec.schedules.graphs.rounds import round_steps
from tests.conftest import DEVICE, VOCABULARY, always_right, left_pad, noisy, random_prompts
from tests.pipespec import heads
from tests.support.ways import driver_of

ON_CPU = pytest.mark.skipif(
    DEVICE != "cpu", reason="blocks, native forwards, and bfloat16 sums that do not depend on the width are for the CPU"
)

SAMPLED = {"do_sample": True, "seed": 5, "temperature": 0.9, "top_k": 30}

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one key head": {"kv_heads": 1},
    "wide heads, own embedding": {"heads": 2, "head_dim": 24, "own_embedding": True},
    "qwen3": {"qwen3": True},
    "norms before": {"norm_before_residual": True, "norm_before_fc": True},
    "norms after": {"fc_norm": True, "norm_output": True},
}


@pytest.fixture(scope="module")
def target():
    return heads.make_target()


def write(folder, form: str, shape: dict[str, Any]):
    """A head's folder and weights."""
    weights = heads.make_weights(**shape)
    more = {name: True for name in heads.FLAGS if shape.get(name)}
    dim = shape.get("head_dim", 8)
    if form == "original":
        return heads.write_original(folder, weights, **more, head_dim=dim), weights
    layer = heads.layer_config(weights, head_dim=dim)
    ids = [2, 4, 5]
    more |= {"transformer_layer_config": layer, "eagle_aux_hidden_state_layer_ids": ids}
    return heads.write_speculators(folder, weights, **more), weights


def reference_options(shape: dict[str, Any]) -> dict[str, Any]:
    """The arguments of :class:`heads.Reference`."""
    return {name: True for name in heads.FLAGS if shape.get(name)} | {"head_dim": shape.get("head_dim", 8)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("head"), "speculators", {})[0]


# ---- files


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_both_formats_give_one_head(shape, target, tmp_path) -> None:
    made = []
    for form in ("original", "speculators"):
        path, _ = write(tmp_path / form, form, shape)
        assert is_head(path)
        made.append(DraftHead.load(path, target))
    first, second = (head.state_dict() | {"ids": head.ids} for head in made)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert made[0].config.layers_of(heads.LAYERS) == made[1].config.layers_of(heads.LAYERS)


def test_a_saved_head_is_the_same_head(target, folder, tmp_path) -> None:
    head = DraftHead.load(folder, target)
    head.save(tmp_path, target)
    again = DraftHead.load(tmp_path, target)
    assert torch.equal(head.ids, again.ids)
    assert again.embed_tokens is not None  # as the package speculators stores it
    kept = again.state_dict()
    assert all(torch.equal(value, kept[name]) for name, value in head.state_dict().items())
    assert HeadConfig.load(tmp_path).features == (2, 4, 5)


def test_a_head_takes_no_more_bytes_than_its_steps_need(folder, target, tmp_path) -> None:
    """Of a saved head the embedding is stored, too; training stores float32."""
    DraftHead.load(folder, target).save(tmp_path, target)
    in_16_bits = heads.make_target().bfloat16()
    for model, expected in ((target, torch.float32), (in_16_bits, torch.bfloat16)):
        head = DraftHead.load(tmp_path, model)
        assert {p.dtype for p in head.parameters()} == {expected}
        assert {p.dtype for p in DraftHead.load(tmp_path, model, "float32").parameters()} == {torch.float32}
        read = [p for name, p in head.named_parameters() if not name.startswith("embed_tokens")]
        size = sum(p.numel() for p in read) * expected.itemsize
        assert size <= head.step_bytes <= size + 8 * heads.DRAFTED + 64  # and the buffers
        with Pipeline(model, tmp_path, graphs=False) as pipe:
            assert driver_of(pipe).controller._relative_cost == head.step_bytes / step_bytes(model)
    head.half().save(tmp_path / "half", target)
    assert DraftHead.load(tmp_path / "half", target).dtype == torch.float16


def test_a_model_is_no_head(tmp_path) -> None:
    heads.make_target().save_pretrained(tmp_path)
    assert not is_head(tmp_path)
    assert not is_head(str(tmp_path / "nothing"))
    assert not is_head("ngram")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, "reads hidden states of size 64, the target's have 32"),
        ({"vocab_size": 99}, "a vocabulary of 99 tokens, the target has 320"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 8]}}, r"\[2, 4, 8\].*the target's 8 layers"),
        ({"model_type": "gemma"}, "its layers are those of 'gemma'"),
        ({"intermediate_size": 40}, r"size mismatch for layers\.0\.mlp"),
        ({"norm_before_fc": True}, r"Missing key.*input_norm\.weight"),
        ({"draft_vocab_size": 60}, r"size mismatch for lm_head\.weight"),
        ({"speculators_model_type": "hydra"}, "a draft of the kind 'hydra'"),
        ({"num_hidden_layers": "one"}, "describes no EAGLE-3 head"),
    ],
)  # fmt: skip
def test_heads_that_do_not_fit_are_refused(changes, message, target, tmp_path) -> None:
    path = heads.write_original(tmp_path, heads.make_weights(), **changes)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        Pipeline(target, path)


def test_another_target_is_refused_before_its_weights_are_read(tmp_path, folder) -> None:
    small = tmp_path / "target"
    heads.make_target(num_hidden_layers=5).save_pretrained(small)
    (small / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="the target's 5 layers give those from 0 to 4"):
        Pipeline(small, folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("d2t") is None or w.pop("t2d"), "drafts 200 of 320 tokens and has no d2t"),
        (lambda w: w["d2t"].add_(200), "d2t does not give 200 different tokens of 320"),
        (lambda w: w["t2d"].logical_not_(), "d2t and t2d name different tokens"),
        (lambda w: w.pop("fc.weight"), r"Missing key.*fc\.weight"),
        (lambda w: w.update(more=torch.zeros(1)), r"Unexpected key.*more"),
    ],
)  # fmt: skip
def test_damaged_weights_are_refused(change, message, target, tmp_path) -> None:
    weights = heads.make_weights()
    change(weights)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        Pipeline(target, heads.write_original(tmp_path, weights))


def test_pickled_weights_are_refused(target, tmp_path) -> None:
    path = heads.write_original(tmp_path, heads.make_weights())
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="which can run code when loaded"):
        Pipeline(target, path)


# ---- what a head drafts


class DraftedByColumns(heads.Drafted):
    """The same of captured steps, which run uncaptured here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found = found = []
        score = GraphedHead._score_columns

        def recording(
            stage: GraphedHead, tokens: torch.Tensor, kv: torch.Tensor, n_select: torch.Tensor
        ) -> torch.Tensor:
            wide = score(stage, tokens, kv, n_select)
            for row, n in enumerate(n_select.tolist()):
                if n:
                    text = stage.own.tokens[row, : int(kv[row]) + n].tolist()
                    found.append((stage.block.length(stage.block.target, row), text, wide[row, n - 1].cpu().clone()))
            return wide

        monkeypatch.setattr(GraphedHead, "_score_columns", recording)


def check_against_reference(found, target, weights, begin=0, **more) -> None:
    """Compare drafts with :class:`heads.Reference` over the hidden states of transformers' own forward, from the token at ``begin`` on."""
    reference = heads.Reference(weights, target.get_input_embeddings().weight.detach().cpu(), **more)
    ids = torch.arange(heads.DRAFTED) + weights["d2t"]
    others = torch.ones(VOCABULARY, dtype=torch.bool)
    others[ids] = False
    for known, text, logits in found:
        with torch.no_grad():
            states = target(torch.tensor([text[: known - 1]], device=DEVICE), output_hidden_states=True).hidden_states
        features = torch.cat([states[k][0, begin:] for k in (2, 4, 5)], -1).cpu()
        assert torch.isneginf(logits[others]).all()
        torch.testing.assert_close(logits[ids].double(), reference.chain(features, text[begin:]), atol=2e-4, rtol=2e-4)


NATIVE_HEADS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "residual from the norm": {"shape": SHAPES["norms before"]},
    "8 bits": {"weights": "q8_0"},
    "4 bits": {"weights": "q4_0"},
}


@ON_CPU
@pytest.mark.parametrize("given", NATIVE_HEADS.values(), ids=NATIVE_HEADS)
def test_native_drafts_are_those_of_torch(given, tmp_path, monkeypatch) -> None:
    """A batch of different lengths, long and short, whose rounds end in rollbacks of different depths."""
    path, _ = write(tmp_path, "original", given.get("shape", {}))
    dtype, weights = getattr(torch, given.get("dtype", "float32")), given.get("weights")
    target = heads.make_target().to(dtype)
    ids, mask = left_pad(random_prompts(4, seed=6, shortest=2, longest=40))
    options = {"lookahead": 3, "dtype": given.get("dtype", "float32")} | (
        {"weights": {"draft 0": weights}} if weights else {}
    )
    found = []
    for has_native_head in (True, False):
        drafted = heads.Drafted(monkeypatch)
        with Pipeline(target, path, **options) as pipe, monkeypatch.context() as patch:
            if not has_native_head:
                patch.setattr(DraftHead, "parts", refused)
            pipe.generate(ids, attention_mask=mask, max_new_tokens=24, **SAMPLED)
            assert (pipe.report.stages[0].forward == "native") == has_native_head
            assert pipe.report.stages[-1].accepted > 0
        found.append(drafted.found)
        monkeypatch.undo()
    rounds = [[(known, text) for known, text, _ in drafts] for drafts in found]
    if dtype == torch.float32 and weights is None:
        assert rounds[0] == rounds[1]
    others = {(known, tuple(text)): logits for known, text, logits in found[1]}
    pairs = [(logits, others[known, tuple(text)]) for known, text, logits in found[0] if (known, tuple(text)) in others]
    assert len(pairs) > len(found[0]) // 2
    inside = ~torch.isneginf(pairs[0][0])
    errors = torch.stack([(a - b)[inside].abs().max() / b[inside].abs().max() for a, b in pairs])
    # Inputs of blocks are rounded to 8 bits: a difference in the last bit may become one of a whole step.
    assert float(errors.median()) < (0.02 if dtype == torch.bfloat16 else 1e-5 if weights is None else 0.02), errors
    assert float(errors.max()) < (0.1 if dtype == torch.bfloat16 or weights else 1e-5), errors


def refused(head: DraftHead) -> None:
    raise NotReadable("for a test")


@pytest.mark.parametrize(
    ("form", "options"),
    [("original", {"graphs": False}), ("speculators", {"graphs": False, "native": False}), pytest.param("original", {"graphs": True}, marks=ON_CPU)],
    ids=["native", "torch", "captured"],
)  # fmt: skip
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_drafts_are_the_reference_s(shape, form, options, target, tmp_path, monkeypatch) -> None:
    path, weights = write(tmp_path, form, shape)
    drafted = (DraftedByColumns if options["graphs"] else heads.Drafted)(monkeypatch)
    ids, mask = left_pad(random_prompts(2, seed=3, shortest=4, longest=9))
    with Pipeline(target, path, lookahead=3, **options) as pipe:
        # Sampled, so that some are accepted: later rounds follow rollbacks of different depths.
        pipe.generate(ids, attention_mask=mask, max_new_tokens=12, **SAMPLED)
        if DEVICE == "cpu":
            torch_only = "draft head: its next slot reads the output after the last norm"
            own = torch_only if shape.get("norm_output") else "native"
            forms = ["fused" if options["graphs"] else own if form == "original" else "draft head"]
            assert [stage.forward for stage in pipe.report.stages[:-1]] == forms
    assert len({len(text) - known for known, text, _ in drafted.found}) == 3
    check_against_reference(drafted.found, target, weights, **reference_options(shape))


def test_the_steps_of_a_captured_round() -> None:
    """The first one has a column for each token that a round may commit, and a round drafts no more than the target verifies."""
    config = SpeculationConfig(drafts=(HeadDraft("folder"),), lookahead=(3,), graphs=True)
    assert round_steps(config) == [(0, 4), (0, 1), (0, 1), (1, 4)]
    drafted = WIDTH // 2
    long = replace(config, lookahead=(WIDTH,))
    assert round_steps(long) == [(0, 1 + drafted), *[(0, 1)] * (drafted - 1), (1, 1 + drafted)]


@pytest.mark.parametrize(
    "options",
    [{"graphs": False}, {"graphs": False, "native": False}, pytest.param({"graphs": True}, marks=ON_CPU)],
    ids=["native", "torch", "captured"],
)
def test_drafts_after_a_reused_prompt_and_a_given_cache(options, target, folder, monkeypatch) -> None:
    drafted = (DraftedByColumns if options["graphs"] else heads.Drafted)(monkeypatch)
    with Pipeline(target, folder, lookahead=2, **options) as pipe:
        heads.check_after_earlier_text(pipe, drafted, check_against_reference, heads.make_weights())


# ---- the text


@ON_CPU
def test_a_long_prompt_of_a_bfloat16_target(folder) -> None:
    """The library reads such prompts where the processor has its instructions, so that the first step feeds nothing."""
    target = heads.make_target().bfloat16()
    prompts = random_prompts(2, seed=4, shortest=150, longest=300)
    ids, mask = left_pad(prompts)
    with Pipeline(target, folder, lookahead=2) as pipe, Pipeline(target, schedule="plain") as plain:
        how = {"attention_mask": mask, "max_new_tokens": 16, "do_sample": False}
        assert torch.equal(pipe.generate(ids, **how), plain.generate(ids, **how))
        assert pipe.report.stages[-1].drafted > 0


@ON_CPU
@pytest.mark.parametrize(
    ("drafts", "of_draft"), [({}, "q4_k"), ({"drafts": "q5_0"}, "q5_0"), ({"draft 0": None}, None)]
)
def test_a_target_in_blocks(drafts, of_draft, folder) -> None:
    """A head is in blocks too, if ``weights=`` does not say that it stays as it is."""
    target, prompt = heads.make_target(seed=2), torch.tensor([[5, 6, 7, 8]])
    with (
        Pipeline(target, folder, lookahead=2, weights={"target": "q8_0"} | drafts) as pipe,
        Pipeline(target, weights="q8_0") as plain,
    ):
        drafted, alone = (p.generate(prompt, max_new_tokens=12, do_sample=False) for p in (pipe, plain))
        assert torch.equal(drafted, alone)
        assert has_blocks(driver_of(pipe).models[0]) == (of_draft is not None)
        assert (f"draft 0: {of_draft} weights" in pipe.report.decisions) == (of_draft is not None)


def test_a_head_that_fails_costs_its_drafts_only(target, folder, monkeypatch) -> None:
    def failing(*args: Any) -> None:
        raise RuntimeError("broken")

    prompt = torch.tensor([[5, 6, 7, 8]])
    with Pipeline(target, folder, lookahead=2) as pipe:
        monkeypatch.setattr(DraftHead, "embed", failing)
        with pytest.warns(RuntimeWarning, match="draft stage 0 failed .*broken"):
            found = pipe.generate(prompt, max_new_tokens=8, do_sample=False)
    assert torch.equal(found, target.generate(prompt, max_new_tokens=8, do_sample=False))


def test_a_forward_without_hidden_states_keeps_nothing() -> None:
    """The draft that reads fails then, and not the target."""
    features = Features([0, 2], [0], torch.float32)
    features.record([0], {0: torch.ones(1, 3, 4)})
    with pytest.raises(RuntimeError, match=r"gives no hidden states of the layers \[0, 2\]"):
        features.read(0, 0, 3)
    features.record([0], {0: torch.ones(1, 3, 4), 1: torch.zeros(1, 3, 4), 2: torch.full((1, 3, 4), 2.0)})
    assert features.read(0, 1, 3).tolist() == [[1.0] * 4 + [2.0] * 4] * 2


@ON_CPU
@pytest.mark.parametrize("drafts", [[], ["head"]])
def test_each_native_forward_pays_for_the_checks_of_weights(drafts, folder, monkeypatch) -> None:
    """A forward in parts, which keeps features, is watched like one in one call."""
    target, spent = heads.make_target(), []
    monkeypatch.setattr(Checksums, "spend", lambda self, seconds: spent.append(seconds))
    with Pipeline(target, [folder for _ in drafts], lookahead=2 if drafts else None) as pipe:
        pipe.generate(torch.tensor([[5, 6, 7, 8]]), max_new_tokens=8, do_sample=False)
    assert len(spent) >= pipe.report.stages[-1].steps > 0


# ---- where it does not run


def test_rejection_sampling_excludes_a_head(target, folder) -> None:
    with pytest.raises(ValueError, match=r"rejection sampling .* does not go with a draft head"):
        Pipeline(target, folder, acceptance="rejection")


@ON_CPU
@pytest.mark.parametrize("lookahead", [None, 3])
@pytest.mark.parametrize(
    "drafts",
    [
        lambda head, target: [head, "ngram"],
        lambda head, target: [head, noisy(target, 0.3, seed=2)],
        lambda head, target: [head, noisy(target, 0.3, seed=2), "ngram"],
        lambda head, target: [head, "ngram", always_right(target)],
    ],
    ids=["index", "model", "model and index", "index and model"],
)
def test_a_head_before_other_drafts(drafts, lookahead, folder, target) -> None:
    """They verify its tokens, or pass them on. The model rolls it back where the target has not yet been."""
    ids, mask = left_pad(random_prompts(2, seed=3, shortest=4, longest=9))
    call: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 40, "pad_token_id": 0, **SAMPLED}
    with (
        Pipeline(target, drafts(folder, target), lookahead=lookahead) as pipe,
        Pipeline(target, schedule="plain") as plain,
    ):
        assert torch.equal(pipe.generate(ids, **call), plain.generate(ids, **call))
        if lookahead:
            assert all(stage.drafted > 0 for stage in pipe.report.stages[1:])


@ON_CPU
def test_a_head_with_larger_buffers_than_its_target(folder, target, monkeypatch) -> None:
    """The target's buffers are released when larger ones do not fit, and the next call makes small ones."""
    prompts = torch.stack([torch.arange(4, 24), torch.arange(30, 50)])
    call: dict[str, Any] = {"attention_mask": torch.ones_like(prompts), "pad_token_id": 0, **SAMPLED}
    with Pipeline(target, folder, lookahead=3, graphs=True) as pipe, Pipeline(target, schedule="plain") as plain:
        pipe.generate(prompts, max_new_tokens=80, **call)

        def full(*arguments: Any) -> None:
            raise torch.OutOfMemoryError("planted: out of memory")

        stage = driver_of(pipe).target
        with monkeypatch.context() as planted:
            planted.setattr(stage, "_make_cache", full)
            with pytest.raises(torch.OutOfMemoryError):
                pipe.generate(prompts, max_new_tokens=200, **call)
        expected = plain.generate(prompts, max_new_tokens=20, **call)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # a draft has failed
            assert torch.equal(pipe.generate(prompts, max_new_tokens=20, **call), expected)
        drafting, verifying = (each.buffers.cache.capacity for each in driver_of(pipe).stages)
        assert drafting > verifying
