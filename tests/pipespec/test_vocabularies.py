"""Models of one tokenizer whose embeddings are padded to different sizes, as in several LLaMA families."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from pipespec import Pipeline
from tests.conftest import left_pad, noisy, random_llama, random_prompts
from tests.support.texts import own_text, same_text
from tests.trials import trials
from tests.waiting import drafts_keep_up

REAL = 200  # tokens of the tokenizer. The random target also generates ids of the padding.
NEW = 20


def padded(model, vocabulary: int, bias: float = 0.0) -> LlamaForCausalLM:
    """The same model with an embedding of another size. ``bias`` makes it prefer the rows that were added."""
    other = random_llama(7, vocabulary=vocabulary)
    weights = model.state_dict()
    n = min(vocabulary, model.config.vocab_size)
    with torch.no_grad():
        for name, tensor in other.state_dict().items():
            tensor[:n].copy_(weights[name][:n]) if "embed" in name or "head" in name else tensor.copy_(weights[name])
        if vocabulary > n:
            other.lm_head.weight[n:] = model.lm_head.weight[: vocabulary - n] * bias
    return other


@pytest.fixture(scope="module")
def save(tmp_path_factory):
    def saved(name: str, model) -> str:
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        vocabulary = {f"a{i}": i for i in range(REAL)}
        content = {"model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "a0"}, "added_tokens": []}
        (folder / "tokenizer.json").write_text(json.dumps(content))
        return str(folder)

    return saved


@pytest.fixture(scope="module")
def paths(model, save):
    """The target, a draft padded less, and one padded more that prefers ids beyond the target's vocabulary."""
    less, more = padded(noisy(model, 0.02), 240), padded(noisy(model, 0.02), 384, bias=3.0)
    return {"target": save("target", model), "less": save("less", less), "more": save("more", more)}


@pytest.fixture(scope="module")
def prompts():
    """Prompts and a text with ids beyond the smaller draft's vocabulary."""
    ids, mask = left_pad(random_prompts(4, seed=2, shortest=6))
    assert int(ids.max()) >= 240
    return ids, mask


DRAFTS = [["less"], ["more"], ["less", "more"], ["more", "less"]]


def check(pipe, prompts, **kwargs):
    ids, mask = prompts
    new = same_text(pipe, ids, attention_mask=mask, max_new_tokens=NEW, **kwargs)[:, ids.shape[1] :]
    assert int(new.max()) >= 240
    assert (new < 240).any()


@pytest.mark.parametrize("drafts", DRAFTS, ids="-".join)
def test_the_text_is_the_targets(model, paths, prompts, drafts):
    pipe = Pipeline(paths["target"], [paths[d] for d in drafts], lookahead=4, schedule="lockstep")
    assert len({m.config.vocab_size for m in pipe.models}) == len(drafts) + 1
    check(pipe, prompts)
    # The drafts are accepted, rarely if they cannot embed a quarter of the text.
    assert pipe.report.stages[-1].acceptance_rate > (0.5 if drafts[-1] == "more" else 0)
    for kwargs in (
        {"repetition_penalty": 1.5},  # fused, in the drafts too
        {"suppress_tokens": [310, 5], "no_repeat_ngram_size": 2},  # names a token that the smaller draft does not have
        {"return_dict_in_generate": False, "bad_words_ids": [[319], [300, 250]]},
    ):
        check(pipe, prompts, **kwargs)


def test_in_processes_of_their_own(model, paths, prompts):
    with Pipeline(paths["target"], [paths["less"], paths["more"]], schedule="workers") as pipe:
        for kwargs in ({}, {"repetition_penalty": 1.5}, {"suppress_tokens": [310, 5]}):
            check(pipe, prompts, **kwargs)
        ids, mask = (of_all[:1] for of_all in prompts)
        with drafts_keep_up(pipe, [int(mask.sum()) + NEW]):  # such a small target may finish before a draft has begun
            got = pipe.generate(ids, attention_mask=mask, max_new_tokens=NEW)
        assert torch.equal(got, own_text(model, ids, attention_mask=mask, max_new_tokens=NEW))
        assert pipe.report.stages[-1].drafted > 0
        assert pipe.report.stages[0].produced > 0


def test_a_target_that_is_padded_less_than_its_draft_never_says_the_drafts_padding(model, paths, prompts):
    """The draft prefers ids that the target does not have. Its draft tokens are still accepted."""
    ids, mask = prompts
    draft = AutoModelForCausalLM.from_pretrained(paths["more"])
    with torch.no_grad():
        assert (draft(ids, attention_mask=mask).logits[:, -1].argmax(-1) >= 320).any()
    pipe, unpadded = (
        Pipeline(paths["target"], paths["more"], schedule="lockstep", lookahead=4),
        Pipeline(model, noisy(model, 0.02), schedule="lockstep", lookahead=4),
    )
    check(pipe, prompts)
    check(unpadded, prompts)
    assert pipe.report.stages[-1].histogram == unpadded.report.stages[-1].histogram


# ---- heads with another number of rows than the embedding


@pytest.mark.parametrize("rows", [150, 384])
@pytest.mark.parametrize("schedule", ["plain", "lockstep", *trials(ci=[], nightly=["workers"])])
def test_a_head_with_other_rows_than_the_embedding(model, rows, schedule):
    """Of the target, and of a draft. The target chooses no token that its embedding lacks: a processor forbids them."""
    target, draft = padded(model, 320), padded(noisy(model, 0.02), 320)
    for each in (target, draft):
        each.lm_head = padded(each, rows, bias=1.5).lm_head.eval()
    ids, mask = left_pad([p % 150 for p in random_prompts(2, seed=4, shortest=6)])
    given = {"attention_mask": mask, "max_new_tokens": NEW, "pad_token_id": 0}
    if rows > 320:
        given["suppress_tokens"] = list(range(320, rows))
    with Pipeline(target, draft, schedule=schedule, lookahead=None if schedule == "plain" else 4) as pipe:
        out = same_text(pipe, ids, **given, return_dict_in_generate=True, output_scores=True)
        assert pipe.report.schedule == schedule
        assert int(out[:, ids.shape[1] :].max()) < min(rows, 320)
    with Pipeline(model, draft, schedule=schedule, lookahead=None if schedule == "plain" else 4) as pipe:
        same_text(pipe, ids, **given)
