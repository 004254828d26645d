"""``SpeculativePipeline.generate`` keeps the contract of ``target.generate()`` for any partition and any drafter."""

import copy
import random
import warnings
from contextlib import nullcontext

import pytest
import torch
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

from pipespec import Pipeline
from pipespec.schedules.base import SpeedWarning, StageFailure
from pipespec_spd import Drafter, SpeculativePipeline
from pipespec_spd import partition as runtime
from pipespec_spd.draft_module import DraftModule, DraftModuleConfig
from pipespec_spd.drafting import NgramDrafter
from pipespec_spd.model_drafter import ModelDrafter
from tests.conftest import DEVICE, VOCABULARY, left_pad, noisy, random_llama, random_prompts
from tests.spd.drafters import Blind, Failing, Known
from tests.support.ways import driver_of
from tests.trials import trials

LAYERS = 5
PARTITIONS = [1, 2, 3, 4, LAYERS, [3, 1, 1]]
NEW = 14
EOS = [17, 101, 230]
PROMPT = random_prompts(1, seed=5, shortest=6)[0][None]


@pytest.fixture(scope="module")
def model():
    return random_llama(3, layers=LAYERS)


@pytest.fixture(scope="module")
def good(model):
    return noisy(model, 0.02)


def greedy(model, ids=PROMPT, new=NEW, **kwargs) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=new, do_sample=False, **kwargs)


def adds_up(report, drafted_throughout: bool = True) -> None:
    """Check the invariants of a report."""
    assert set(report.phases) == {"prefill", "draft", "stages", "verify", "other"}
    assert sum(report.phases.values()) == pytest.approx(report.seconds)
    assert all(seconds >= 0 for seconds in report.phases.values())
    assert sum(report.stage_seconds) <= report.phases["stages"] + 1e-9
    assert 0 < report.parallel_seconds <= report.seconds
    assert report.accepted <= report.checked <= report.verified
    n = len(report.partition)
    assert report.checked - report.accepted == report.flushes
    assert report.tokens <= report.verified
    # K = (N - rows) + (n - 1) (number of times that pipes filled); no filling follows a flush that ends a row.
    filling = report.cycles - (report.verified - report.rows)
    assert filling >= 0
    assert filling <= (n - 1) * (report.rows + report.flushes) or not drafted_throughout
    assert report.rounds <= report.cycles <= report.rounds * report.rows
    if report.cycles:
        assert report.equivalent_accepted_length == pytest.approx(n * report.verified / report.cycles)


# ---- the text


def drafters(model):
    known, half = Known(VOCABULARY), Known(VOCABULARY, a=0.6)
    return {
        "oracle": known,
        "half": half,
        "blind": Blind(VOCABULARY),
        "ngram": NgramDrafter(),
        "model": ModelDrafter(noisy(model, 0.02)),
    }


@pytest.fixture(scope="module")
def texts(model):
    """100 prompts of 1 to 20 tokens, in batches of 3 and 13, some with ends, and the target's texts."""
    prompts = random_prompts(100, seed=11, longest=20)
    assert {len(p) for p in prompts} >= {1, 2, 3}
    out, begin = [], 0
    while begin < len(prompts):
        size = 13 if len(out) % 2 else 3
        batch = prompts[begin : begin + size]
        ids, mask = left_pad(batch)
        options = {"attention_mask": mask, "eos_token_id": EOS if len(out) % 3 else None, "pad_token_id": 0}
        out.append((batch, ids, options, greedy(model, ids, **options)))
        begin += size
    return out


@pytest.mark.parametrize("stages", PARTITIONS, ids=str)
def test_greedy_text(model, texts, stages):
    """Each batch runs with one drafter, in rotation, so that over all partitions each drafter meets each kind of batch."""
    kinds = list(drafters(model).items())
    pipelines = [(name, SpeculativePipeline(model, d, stages=stages)) for name, d in kinds]
    used, checked, accepted, ended = set(), 0, 0, 0
    for i, (batch, ids, options, wanted) in enumerate(texts):
        name, pipeline = pipelines[(i + sum(pipeline_counts(stages))) % len(pipelines)]
        if isinstance(pipeline.drafter, Known):
            pipeline.drafter.learn(batch, wanted)
        got = greedy(pipeline, ids, **options)
        assert torch.equal(got, wanted), f"{name}, {stages}, batch {i}: wanted {wanted.tolist()}, got {got.tolist()}"
        adds_up(pipeline.report)
        if name == "oracle":
            assert pipeline.report.accepted == pipeline.report.checked
        used.add(name)
        checked, accepted = checked + pipeline.report.checked, accepted + pipeline.report.accepted
        ended += pipeline.report.tokens < NEW * len(batch)
    assert used == {name for name, _ in kinds}
    assert ended
    if stages != 1:
        assert 0 < accepted < checked


def pipeline_counts(stages) -> list[int]:
    return stages if isinstance(stages, list) else [stages]


SETTINGS = {
    "plain": {},
    "warm": {"temperature": 0.7, "top_k": 40, "top_p": 0.9},
    "penalty": {"repetition_penalty": 1.3, "min_p": 0.02},
    "stepwise": {"no_repeat_ngram_size": 2, "temperature": 1.3},
}


# ---- the rest of the contract


@pytest.mark.parametrize("drafter", ["ngram", "observer"])
@pytest.mark.parametrize("begin", ["ours", "dynamic"])
def test_caches_go_on(model, drafter, begin):
    """A conversation: each call continues the cache of the one before. transformers does so where the drafter reads streams of all positions."""
    stages = [1, 3, 1]
    pipeline = SpeculativePipeline(model, "ngram" if drafter == "ngram" else Observer(stages), stages=stages)
    cache = None if begin == "ours" else DynamicCache()
    one = greedy(pipeline, return_dict_in_generate=True, past_key_values=cache)
    assert one.past_key_values.get_seq_length() == one.sequences.shape[1] - 1
    assert cache is None or one.past_key_values is cache
    ids = torch.cat([one.sequences, PROMPT], 1)
    fed = []
    real = driver_of(pipeline)._run
    driver_of(pipeline)._run = lambda columns, *rest, **kw: fed.append(columns.shape[1]) or real(columns, *rest, **kw)
    with nullcontext() if drafter == "ngram" else pytest.warns(SpeedWarning, match="lacks what this drafter reads"):
        two = greedy(pipeline, ids, return_dict_in_generate=True, past_key_values=one.past_key_values)
    assert torch.equal(two.sequences, greedy(model, ids))
    held = one.sequences.shape[1] - 1
    assert sum(fed) == (ids.shape[1] - held if drafter == "ngram" else 0)
    # The returned cache holds the model's own keys and values.
    plain = greedy(model, ids, return_dict_in_generate=True).past_key_values
    for mine, theirs in zip(two.past_key_values.layers, plain.layers, strict=True):
        n = theirs.keys.shape[2]
        torch.testing.assert_close(mine.keys[:, :, :n], theirs.keys)
        torch.testing.assert_close(mine.values[:, :, :n], theirs.values)


def test_custom_generate(model, good):
    pipeline = SpeculativePipeline(model, good, stages=3)
    assert torch.equal(greedy(model, custom_generate=pipeline), greedy(model))
    assert pipeline.report.cycles > 0


def test_caches_grow_with_the_text(model, good, monkeypatch):
    monkeypatch.setattr(runtime, "_INITIAL_CAPACITY", 2)
    pipeline = SpeculativePipeline(model, good, stages=2)
    ids, mask = left_pad(random_prompts(3, seed=8, shortest=4))
    got = greedy(pipeline, ids, 90, attention_mask=mask)
    assert torch.equal(got, greedy(model, ids, 90, attention_mask=mask))
    greedy(pipeline, ids[:, -4:].repeat(2, 1), 300, max_time=0.0)
    assert driver_of(pipeline).stages[0].cache.capacity < 20


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_prefill_in_chunks(model, chunk):
    ids, mask = left_pad(random_prompts(3, seed=9, longest=20))
    observer = Observer(3)
    pipeline = SpeculativePipeline(model, observer, stages=3)
    got = greedy(pipeline, ids, attention_mask=mask, prefill_chunk_size=chunk)
    assert torch.equal(got, greedy(model, ids, attention_mask=mask))
    observer.check(model, got, mask)


# ---- calls of a drafter


class Observer(Drafter):
    """Keeps every stream that it observes. Three of four drafts are right, so that some flushes occur."""

    def __init__(self, stages: int | list[int]) -> None:
        self.partition, self.features = runtime.cut(LAYERS, stages), tuple(range(LAYERS + 1))
        self.oracle = ModelDrafter(random_llama(3, layers=LAYERS))

    def start(self, prompts, capacity, select):
        self.streams = [{k: {} for k in self.features} for _ in prompts]
        self.lengths = [len(p) for p in prompts]
        self.calls = self.flushes = 0
        self.oracle.start(prompts, capacity, select)

    def observe(self, index, rows, positions, values):
        assert values.shape == (len(rows), 64)
        for row, position, value in zip(rows, positions, values, strict=True):
            have = self.streams[row][index]
            assert position == len(have), "each position once, in order"
            have[position] = value.clone()

    def draft(self, requests):
        for row, tokens, fill in requests:
            t = len(tokens) - 1
            for k in self.features:
                # A token in flight at p has passed t - p stages, all older ones have passed every stage.
                owner = self.partition.owner(k)
                through = [p for p in range(t + 1) if p <= t - fill or t - p > owner]
                assert sorted(self.streams[row][k]) == through
        self.calls += 1
        out = self.oracle.draft(requests)
        return [(token + 1) % VOCABULARY if self.calls % 4 == 0 else token for token in out]

    def truncate(self, row, length):
        self.flushes += 1
        for streams in self.streams[row].values():
            for position in [p for p in streams if p >= length]:
                del streams[position]
        self.oracle.truncate(row, length)

    def check(self, model, out, mask) -> None:
        assert self.flushes > 0
        for row, streams in enumerate(self.streams):
            text = out[row, int((mask[row] == 0).sum()) :]
            hidden = model(text[None], output_hidden_states=True).hidden_states
            for k in self.features[:-1]:  # transformers' last hidden state comes after the final norm
                for position, value in streams[k].items():
                    torch.testing.assert_close(value, hidden[k][0, position], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stages", [2, 4, LAYERS, [3, 1, 1]], ids=str)
def test_what_a_drafter_sees(model, stages):
    """In every cycle the drafter has exactly the streams that existed before it, each with the value of a full forward."""
    ids, mask = left_pad(random_prompts(3, seed=9, longest=6))
    observer = Observer(stages)
    pipeline = SpeculativePipeline(model, observer, stages=stages)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = greedy(pipeline, ids, attention_mask=mask)
    assert torch.equal(got, greedy(model, ids, attention_mask=mask))
    observer.check(model, got, mask)


def test_caches_hold_what_the_machine_says(model, good):
    """After every cycle, flushes included, the cache of each stage at the machine's lengths agrees with the text."""
    pipeline = SpeculativePipeline(model, noisy(model, 0.05), stages=3)
    driver, flushes = driver_of(pipeline), 0
    real = driver.machine.commit

    def commit(drafts, chosen):
        nonlocal flushes
        before = [list(driver.machine.held(s)) for s in range(3)]
        ran = [{e.row for e in work} for work in driver.machine.entries()]
        for s, stage in enumerate(driver.stages):
            if ran[s]:
                assert list(stage.cache.lengths) == [n + 1 for n in before[s]]
        out = real(drafts, chosen)
        for row, length in out:
            flushes += 1
            assert [driver.machine.held(s)[row] for s in range(3)] == [length] * 3
        return out

    driver.machine.commit = commit
    greedy(pipeline, torch.cat([PROMPT, PROMPT.flip(1)]))
    assert flushes > 3


# ---- a drafter that fails


@pytest.mark.parametrize("method", ["start", "observe", "draft", "truncate", "finish"])
@pytest.mark.parametrize("at", [1, 4])
def test_a_drafter_that_raises(model, method, at):
    failing = Failing(method, 1 if method in ("start", "finish") else at)
    pipeline = SpeculativePipeline(model, failing, stages=3)
    with pytest.warns(StageFailure, match=r"the drafter failed \(ArithmeticError: made to fail\)") as caught:
        got = greedy(pipeline)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert torch.equal(got, greedy(model))
    adds_up(pipeline.report, drafted_throughout=method == "finish")
    with warnings.catch_warnings():  # the next call tries it again
        warnings.simplefilter("error")
        assert torch.equal(greedy(pipeline), greedy(model))


@pytest.mark.parametrize("wrong", [[], [1, 2], [VOCABULARY], [-1], ["x"], 5])
def test_a_drafter_that_returns_nonsense(model, wrong):
    pipeline = SpeculativePipeline(model, Failing("draft", 3, wrong), stages=3)
    with pytest.warns(StageFailure, match="the drafter failed"):
        got = greedy(pipeline)
    assert torch.equal(got, greedy(model))


@pytest.mark.parametrize("setting", ["greedy", *SETTINGS])
def test_logits_of_a_drafter_s_own(model, setting):
    """``select`` uses the target's sampling and noise, so the same logits give the same token."""
    ids, mask = left_pad(random_prompts(3, seed=4, longest=8))
    sampling = {} if setting == "greedy" else {"do_sample": True, "seed": 3, **SETTINGS[setting]}
    pipeline = SpeculativePipeline(model, ModelDrafter(model), stages=3)
    got = pipeline.generate(ids, attention_mask=mask, max_new_tokens=NEW, **sampling)
    assert torch.equal(got, Pipeline(model).generate(ids, attention_mask=mask, max_new_tokens=NEW, **sampling))
    assert pipeline.report.accepted == pipeline.report.checked == 3 * (NEW - 1)


@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
def test_a_stage_that_fails_and_an_interrupted_call(model, good, error):
    """The call ends with the error, and the next one has its whole text."""
    pipeline = SpeculativePipeline(model, good, stages=[2, 2, 1])
    stage = driver_of(pipeline).stages[1]
    real, seen = stage.step, []

    def fails(*arguments):
        seen.append(0)
        if len(seen) == 6:
            raise error("made to fail")
        return real(*arguments)

    stage.step = fails
    with pytest.raises(error, match="made to fail"):
        greedy(pipeline)
    assert torch.equal(greedy(pipeline), greedy(model))


def test_a_fork_has_a_cache_of_its_own(good):
    for drafter in (ModelDrafter(good), Blind(VOCABULARY)):
        assert type(drafter.for_fork()) is type(drafter)
        assert (drafter.for_fork() is drafter) == isinstance(drafter, Blind)


def test_a_draft_model_reads_a_long_prompt_in_parts(model, good, monkeypatch):
    """The rows have different lengths."""
    monkeypatch.setattr("pipespec_spd.model_drafter.CHUNK", 4)
    ids, mask = left_pad(random_prompts(3, seed=9, longest=20))
    pipeline = SpeculativePipeline(model, good, stages=3)
    assert torch.equal(greedy(pipeline, ids, attention_mask=mask), greedy(model, ids, attention_mask=mask))
    assert pipeline.report.accepted > 0


# ---- the law


def test_the_report(model, good):
    pipeline = SpeculativePipeline(model, good, stages=[2, 3])
    greedy(pipeline)
    report = pipeline.report
    assert report.partition == (2, 3)
    assert report.predicted_accepted_length == pytest.approx(2 / (2 - report.acceptance_rate))
    assert report.drafter == "ModelDrafter"
    assert report.mean_acceptance_length == report.to_dict()["equivalent_accepted_length"]
    assert report.draft_acceptance_rate == report.acceptance_rate
    assert "stages of 2, 3 layers, drafts by ModelDrafter" in str(report)
    assert report.to_dict()["phases"] == report.phases


# ---- the native form


@pytest.mark.parametrize("stages", [1, 3, [3, 1, 1]], ids=str)
@pytest.mark.parametrize(
    "sampling", [{"do_sample": False}, {"do_sample": True, "temperature": 1.5, "seed": 5}], ids=str
)
def test_texts_in_bfloat16_are_those_of_plain_decoding(model, stages, sampling):
    """To the last bit, also where two logits are nearly equal: hidden states between stages are float32, as within the native form."""
    half, new = copy.deepcopy(model).to(torch.bfloat16), trials(40, 120)
    ids, mask = left_pad(random_prompts(3, seed=21, longest=9))
    wanted = Pipeline(half).generate(ids, attention_mask=mask, max_new_tokens=new, **sampling)
    for drafter in ("ngram", noisy(half, 0.01)):
        pipeline = SpeculativePipeline(half, drafter, stages=stages)
        assert torch.equal(pipeline.generate(ids, attention_mask=mask, max_new_tokens=new, **sampling), wanted)
        assert pipeline.report.stages[0].forward == (
            "native" if DEVICE == "cpu" else f"transformers: it is on {model.device}"
        )


def test_without_the_native_form(model):
    wanted = greedy(model)
    pipeline = SpeculativePipeline(model, stages=2, native=False)
    assert torch.equal(greedy(pipeline), wanted)
    assert pipeline.report.stages[0].forward == "transformers: native=False"
    hooked = copy.deepcopy(model)
    hooked.model.layers[4].mlp.register_forward_hook(lambda module, args, output: output * 2)
    pipeline = SpeculativePipeline(hooked, stages=2)
    assert torch.equal(greedy(pipeline), greedy(hooked))
    assert (
        pipeline.report.stages[0].forward
        == "transformers: drafts cannot speed this model up: model.layers.4.mlp has hooks"
    )


# ---- n-grams


def replaced_layer(model):
    model.model.layers[1] = copy.deepcopy(model.model.layers[0])
    model.model.layers[1].self_attn.layer_idx = 1


def resized_vocabulary(model):
    model.resize_token_embeddings(model.config.vocab_size - 100, mean_resizing=False)


def replaced_norm(model):
    model.model.norm = copy.deepcopy(model.model.norm)
    with torch.no_grad():
        model.model.norm.weight[::3] *= -2.0


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("change", [replaced_layer, resized_vocabulary, replaced_norm])
def test_modules_that_were_replaced(change, native):
    """The text is that of the modules of now."""
    model = random_llama(7, layers=3)
    pipeline = SpeculativePipeline(model, "ngram", stages=2, native=native)
    prompt = PROMPT % 200  # all tokens that stay
    before = pipeline.generate(prompt, max_new_tokens=NEW, do_sample=False)
    change(model)
    got = pipeline.generate(prompt, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(got, greedy(model, prompt))
    assert not torch.equal(got, before)


def test_a_model_that_was_cut_short():
    model = random_llama(7, layers=3)
    pipeline = SpeculativePipeline(model, "ngram", stages=2)
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:2], 2
    with pytest.raises(ValueError, match="have 3 layers together, the model has 2"):
        pipeline.generate(PROMPT, max_new_tokens=NEW)


def test_ngrams_against_a_plain_search():
    draw = random.Random(1)
    drafter, text = NgramDrafter(), [1]
    drafter.start([[2, 3, 2, 1], text], 100, None)
    for _ in range(300):
        if draw.random() < 0.2 and len(text) > 3:
            text = text[: draw.randint(1, len(text))]
            drafter.truncate(1, len(text))
        text = [*text, draw.randrange(4)]
        wanted = text[-1]
        for n in range(min(3, len(text)), 0, -1):
            ends = [i for i in range(n - 1, len(text) - 1) if text[i - n + 1 : i + 1] == text[-n:]]
            if ends:
                wanted = text[ends[-1] + 1]
                break
        assert drafter.draft([(1, text, 1)]) == [wanted]  # a guess where there is no earlier occurrence


# ---- bad input


class TooDeep(Blind):
    features = (LAYERS + 1,)


@pytest.mark.parametrize(
    ("drafter", "stages", "error", "match"),
    [
        (5, 2, TypeError, "drafter must be 'ngram'"),
        ([random_llama(1)], 2, TypeError, "drafter must be 'ngram', a model"),
        (TooDeep(320), 2, ValueError, "no residual stream 6"),
        (random_llama(1, vocabulary=300), 2, ValueError, "vocabulary of 300"),
        ("/nowhere/at/all", 2, FileNotFoundError, "there is no folder"),
    ],
)
def test_what_does_not_fit(model, drafter, stages, error, match):
    with pytest.raises(error, match=match):
        SpeculativePipeline(model, drafter, stages=stages)


def test_refused_arguments(model, good):
    pipeline = SpeculativePipeline(model, good, stages=2)
    with pytest.raises(NotImplementedError, match="num_beams"):
        greedy(pipeline, num_beams=2)
    with pytest.raises(ValueError, match=r"not used by the model: \['lookahead'\]"):
        greedy(pipeline, lookahead=2)


def test_models_from_paths(model, good, tmp_path):
    model.save_pretrained(tmp_path / "target")
    good.save_pretrained(tmp_path / "draft")
    pipeline = SpeculativePipeline(tmp_path / "target", str(tmp_path / "draft"), stages=3, dtype=torch.float32)
    assert sum(pipeline.partition.counts) == LAYERS
    assert torch.equal(greedy(pipeline), greedy(model))


def test_refused_before_weights_are_loaded(model, tmp_path, monkeypatch):
    model.save_pretrained(tmp_path)

    def loaded(*args, **kwargs):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("pipespec_spd.pipeline.load_model", loaded)
    for stages in (6, [2, 2]):
        with pytest.raises(ValueError, match="5"):
            SpeculativePipeline(tmp_path, stages=stages)
    GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50)).save_pretrained(tmp_path / "other")
    with pytest.raises(TypeError, match="gpt2"):
        SpeculativePipeline(tmp_path / "other", stages=2)


def test_a_draft_module_from_its_folder(model, tmp_path):
    """A module of another target is refused before weights are loaded. Its own target's module drafts."""
    pipeline = SpeculativePipeline(model, "ngram", stages=2)
    config = DraftModuleConfig.for_target(model, pipeline.partition.ranges)
    DraftModule.of_target(model, config).save(tmp_path / "module")
    model.save_pretrained(tmp_path / "target")
    for target in (model, tmp_path / "target"):
        place = {} if target is model else {"device": DEVICE}
        pipeline = SpeculativePipeline(target, tmp_path / "module", stages=2, **place)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(greedy(pipeline), greedy(model))
        assert pipeline.report.checked > 0
        with pytest.raises(ValueError, match="was trained for the stages"):
            SpeculativePipeline(target, tmp_path / "module", stages=[2, 3])
    with pytest.raises(ValueError, match="another target"):
        SpeculativePipeline(random_llama(4, layers=LAYERS), tmp_path / "module", stages=2)


@pytest.mark.parametrize("setting", ["greedy", *SETTINGS])
def test_a_draft_vocabulary_that_is_a_part(model, tmp_path, setting):
    """Half of the tokens can never be drafted. The text still contains them, greedy and sampled."""
    ranges = SpeculativePipeline(model, "ngram", stages=3).partition.ranges
    config = DraftModuleConfig.for_target(model, ranges, vocabulary=range(0, VOCABULARY, 2))
    DraftModule.of_target(model, config).save(tmp_path / "module")
    pipeline = SpeculativePipeline(model, tmp_path / "module", stages=3)
    ids, mask = left_pad(random_prompts(4, seed=31, longest=7))
    sampling = {"do_sample": False} if setting == "greedy" else {"do_sample": True, "seed": 8, **SETTINGS[setting]}
    options = {"attention_mask": mask, "max_new_tokens": 2 * NEW, **sampling}
    with warnings.catch_warnings():
        warnings.simplefilter("error", StageFailure)
        got = pipeline.generate(ids, **options)
    assert torch.equal(got, Pipeline(model).generate(ids, **options))
    assert (got[:, ids.shape[1] :] % 2 == 1).any()
    assert pipeline.report.checked > 0
