"""``Pipeline.generate`` keeps the contract of ``target.generate(do_sample=False)``: arguments in, LongTensor out."""

import copy
import json
import math
from dataclasses import replace

import pytest
import torch
from transformers import GenerationConfig

from pipespec import Pipeline
from tests.conftest import always_right, always_wrong, left_pad, noisy, random_prompts
from tests.support.texts import one_prompt, own_text, same_text
from tests.support.ways import driver_of, opened

LIMIT = 512  # of the random models (max_position_embeddings)


@pytest.fixture(scope="module")
def chain(model):
    """Three stages in one process: a first draft that is always right, and a second one that is often right."""
    return Pipeline(model, [noisy(model, 0.02), always_right(model)], lookahead=[3, 4], schedule="lockstep")


def new_tokens(model, prompt: torch.Tensor, count: int) -> list[int]:
    """The model's text without an end."""
    return own_text(model, prompt, max_new_tokens=count, eos_token_id=None)[0, prompt.shape[1] :].tolist()


def first_uses(text: list[int]) -> list[int]:
    """Places at which a token occurs for the first time: where the text ends if that token ends it."""
    return [i for i, token in enumerate(text) if token not in text[:i]]


# ---- the end of a text


def test_eos_at_every_place_of_the_lookahead(chain, model):
    """The end is the first token, inside an accepted block, its last draft token, the bonus token, at the limit, or one past it."""
    prompt = one_prompt(5, 6, 24)
    text = new_tokens(model, prompt, 24)
    places = first_uses(text)
    assert places[:6] == [0, 1, 2, 3, 4, 5]
    # An end that the text never reaches, several ends, and their order.
    for ends in ([t for t in range(320) if t not in text][:8], [text[7], text[4], text[7]], torch.tensor(text[:2])):
        same_text(chain, prompt, max_new_tokens=24, eos_token_id=ends)
    for place in places:
        out = same_text(chain, prompt, max_new_tokens=24, eos_token_id=text[place], pad_token_id=0)
        assert out.shape[1] == prompt.shape[1] + place + 1
        assert out[0, -1] == text[place]


def test_an_end_in_the_prompt_ends_nothing(chain, model):
    prompt = one_prompt(8, 8, 24)
    text = new_tokens(model, prompt, 12)
    for end in (int(prompt[0, -1]), int(prompt[0, 2])):
        if end not in text:
            assert same_text(chain, prompt, max_new_tokens=12, eos_token_id=end).shape[1] == prompt.shape[1] + 12
    doubled = torch.cat([prompt, torch.tensor([[text[0]]])], dim=1)  # the prompt ends with an end token
    same_text(chain, doubled, max_new_tokens=12, eos_token_id=text[0], pad_token_id=0)


@pytest.mark.parametrize("pad", [None, 0, 5])
@pytest.mark.parametrize("eos", ["int", "list"])
def test_what_finished_rows_are_filled_with(model, pad, eos):
    target = copy.deepcopy(model)
    target.generation_config.pad_token_id = pad
    pipeline = Pipeline(target, always_right(target), schedule="lockstep")
    ids = torch.stack(random_prompts(4, seed=10, shortest=6, longest=6))
    texts = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)
    end = int(texts[0, 6 + 2])
    ends = end if eos == "int" else [end, 319]
    same_text(pipeline, ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, eos_token_id=ends)


# ---- how long


@pytest.mark.parametrize("draft", [always_right, always_wrong])
@pytest.mark.parametrize("how", ["lockstep", "lockstep, captured", "streams"])
def test_max_new_tokens(model, draft, how):
    with opened(model, draft(model), how, lookahead=5) as pipe:
        for new in (1, 2, 3, 4, 5, 6, 7, 16, 17, 64, 65):
            ids, mask = left_pad(random_prompts(2, seed=new))
            assert same_text(pipe, ids, attention_mask=mask, max_new_tokens=new).shape[1] == ids.shape[1] + new


def test_the_default_length(chain):
    prompt = one_prompt(13, 4)
    assert same_text(chain, prompt).shape[1] == 24
    long = torch.randint(2, 320, (1, LIMIT - 7), generator=torch.Generator().manual_seed(1))
    assert same_text(chain, long).shape[1] <= LIMIT


def test_keywords_override_the_configuration(model):
    target = copy.deepcopy(model)
    prompt = one_prompt(14, 5)
    text = new_tokens(target, prompt, 12)
    target.generation_config.max_new_tokens = 9
    target.generation_config.eos_token_id = text[first_uses(text)[5]]
    pipeline = Pipeline(target, noisy(target, 0.02), schedule="lockstep")
    before = target.generation_config.to_dict()
    assert same_text(pipeline, prompt).shape[1] == 5 + 6
    assert same_text(pipeline, prompt, max_new_tokens=3).shape[1] == 5 + 3
    assert same_text(pipeline, prompt, eos_token_id=text[2]).shape[1] == 5 + 3
    given = GenerationConfig(max_new_tokens=4, do_sample=False)
    kept = given.to_dict()
    assert same_text(pipeline, prompt, given).shape[1] == 5 + 4
    assert same_text(pipeline, prompt, generation_config=given, max_new_tokens=2).shape[1] == 5 + 2
    same_text(pipeline, prompt, GenerationConfig(max_length=8, do_sample=False, eos_token_id=text[1]))
    same_text(pipeline, prompt, GenerationConfig(max_new_tokens=4, temperature=0.3, top_k=3, do_sample=False))
    assert target.generation_config.to_dict() == before
    assert given.to_dict() == kept


def test_the_shortest_and_the_longest_prompt(chain):
    assert same_text(chain, torch.tensor([[9]]), max_new_tokens=8).shape[1] == 9
    same_text(chain, *[left_pad([torch.tensor([9]), torch.arange(2, 13)])[0]], max_new_tokens=8)
    long = torch.randint(2, 320, (1, LIMIT), generator=torch.Generator().manual_seed(2))
    for length, new in ((LIMIT - 1, 1), (LIMIT - 4, 4), (LIMIT, 1)):
        same_text(chain, long[:, :length], max_new_tokens=new)


# ---- how it is called


def test_without_a_prompt_the_text_begins_with_bos(chain):
    assert chain.target.generation_config.bos_token_id == 1
    out = same_text(chain, max_new_tokens=8)
    assert out.shape == (1, 9)
    assert out[0, 0] == 1
    assert same_text(chain, max_new_tokens=8, bos_token_id=7)[0, 0] == 7


def test_positional_keyword_and_integer_types(chain):
    prompt = one_prompt(15, 5, 24)
    wanted, mask = same_text(chain, prompt, max_new_tokens=6), torch.ones_like(prompt)
    for given in (
        {"inputs": prompt},
        {"input_ids": prompt},
        {"inputs": prompt.int()},
        {"inputs": prompt.tolist()},
        *({"input_ids": prompt, "attention_mask": m} for m in (mask, mask.bool(), mask.float(), mask.tolist())),
    ):
        out = chain.generate(**given, max_new_tokens=6)
        assert out.dtype == torch.long
        assert torch.equal(out, wanted)
    with torch.no_grad():
        assert torch.equal(chain.generate(prompt, max_new_tokens=6), wanted)
    strided = torch.stack([prompt[0], prompt[0]]).t().contiguous().t()  # not contiguous
    assert torch.equal(chain.generate(strided, max_new_tokens=6), wanted.expand(2, -1))


def test_the_input_is_not_touched_and_the_result_is_the_callers(chain):
    ids, mask = left_pad(random_prompts(3, seed=16))
    kept = ids.clone(), mask.clone()
    out = chain.generate(ids, attention_mask=mask, max_new_tokens=5)
    again = out.clone()
    out.zero_()
    assert torch.equal(ids, kept[0])
    assert torch.equal(mask, kept[1])
    assert torch.equal(chain.generate(ids, attention_mask=mask, max_new_tokens=5), again)


@pytest.mark.parametrize("lookahead", [*range(1, 21), 40, 200])
def test_lookahead(model, lookahead):
    pipeline = Pipeline(model, [noisy(model, 0.05), noisy(model, 0.01)], lookahead=lookahead, schedule="lockstep")
    ids, mask = left_pad(random_prompts(2, seed=lookahead))
    same_text(pipeline, ids, attention_mask=mask, max_new_tokens=20)
    for upstream in pipeline.report.stages[:-1]:
        assert upstream.produced > 0


# ---- the report


def test_the_gain_that_the_controller_sees(model):
    pipeline = Pipeline(noisy(model, 0.0), [noisy(model, 0.02)], schedule="lockstep")
    assert repr(pipeline) == "<Pipeline of LlamaForCausalLM, drafts LlamaForCausalLM: lockstep>"
    pipeline.generate(random_prompts(1, seed=3)[0][None], max_new_tokens=40, do_sample=False)
    report = pipeline.report
    step = driver_of(pipeline).controller.target.seconds(1)
    per_step = 39 / (report.stages[-1].steps - 1)
    assert report.gain == pytest.approx(min(39 / report.decoding_seconds * step, per_step))
    assert replace(report, plain_step_seconds=1e9).gain == per_step
    assert f"about {report.gain:.2f} times plain decoding" in str(report)
    assert report._repr_html_() == f"<pre>{report}</pre>"
    assert 0 < report.packing_seconds < report.seconds_to_first_token
    pipeline.generate(random_prompts(1, seed=3)[0][None], max_new_tokens=4, do_sample=False)
    assert pipeline.report.packing_seconds == 0
    assert report.to_dict()["gain"] == report.gain


def test_a_call_within_a_call_keeps_what_packing_took(model):
    inner, outer = Pipeline(model, schedule="plain"), Pipeline(noisy(model, 0.0), schedule="plain")
    ids = torch.tensor([[5, 6]])
    inner.generate(ids, max_new_tokens=2)

    def processor(_, scores):
        inner.generate(ids, max_new_tokens=2)
        return scores

    outer.generate(ids, max_new_tokens=2, logits_processor=[processor])
    assert inner.report.packing_seconds == 0
    assert 0 < outer.report.packing_seconds < outer.report.seconds_to_first_token


def test_the_report_adds_up(model):
    ids, mask = left_pad(random_prompts(5, seed=70))
    end = int(model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)[1, ids.shape[1] + 6])
    for drafts in ([], [noisy(model, 0.03)], [always_wrong(model), noisy(model, 0.02), always_right(model)]):
        pipeline = Pipeline(model, drafts, schedule="lockstep")
        out = pipeline.generate(ids, attention_mask=mask, max_new_tokens=20, eos_token_id=end, pad_token_id=0)
        report = pipeline.report
        new = out[:, ids.shape[1] :].tolist()
        tokens = sum(row.index(end) + 1 if end in row else len(row) for row in new)
        assert report.tokens == tokens < 5 * 20
        assert (report.schedule, report.rows) == (pipeline.schedule, 5)
        assert 0 < report.seconds_to_first_token <= report.seconds
        assert report.tokens_per_second == pytest.approx(tokens / report.seconds)
        assert report.decoding_tokens_per_second == pytest.approx((tokens - 5) / report.decoding_seconds)
        assert report.prompt_tokens == int(mask.sum())
        assert math.isnan(report.gain)  # of several rows
        assert [s.name for s in report.stages] == [f"draft {i}" for i in range(len(drafts))] + ["target"]
        target = report.stages[-1]
        assert target.produced == tokens
        assert (target.adopted, target.rollbacks, target.wasted) == (0, 0, 0)
        for place, stage in enumerate(report.stages):
            assert stage.accepted <= stage.drafted
            assert sum(stage.histogram) == stage.steps
            assert sum(j * n for j, n in enumerate(stage.histogram)) == stage.accepted
            # One token of its own per step, unless an accepted draft token was the end.
            assert stage.accepted <= stage.produced <= stage.accepted + stage.steps
            assert stage.fed >= stage.drafted + stage.steps
            if place == 0:
                assert stage.drafted == 0
        record = json.loads(json.dumps(report.to_dict(), allow_nan=False))
        assert record["gain"] is record["stages"][0]["acceptance_rate"] is None  # not known
        assert set(report.to_dict()) >= {"schedule", "tokens", "stages", "tokens_per_second"}
        assert "target" in str(report)
    perfect = Pipeline(model, always_right(model), lookahead=4, schedule="lockstep")
    perfect.generate(ids, attention_mask=mask, max_new_tokens=20)
    assert perfect.report.stages[-1].acceptance_rate == 1
    assert perfect.report.stages[-1].steps == 5 * 4  # 20 tokens at 4 + 1 per step
