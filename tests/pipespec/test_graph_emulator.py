"""The captured path in an emulator of CUDA graphs (:mod:`tests.support.graph_emulator`): the same texts, and no fault. Planted faults are caught."""

import copy
import re
import sys
import threading
import warnings
from collections import Counter
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

import pipespec_kernels
from pipespec import NgramDraft, Pipeline, attach, trust
from pipespec.checks.calls import cache_bytes
from pipespec.engine.cache import RowCache
from pipespec.schedules.graphs import buffers, stage
from pipespec.schedules.graphs import capture as capturing
from pipespec.schedules.graphs import driver as driving
from pipespec.schedules.graphs.driver import GraphedDriver
from pipespec.schedules.graphs.head import GraphedHead
from pipespec.schedules.graphs.ngram import GraphedNgramStage
from pipespec.schedules.graphs.stage import GraphedStage
from tests.conftest import VOCABULARY, left_pad, noisy, random_llama, random_prompts
from tests.pipespec import checkpoints, heads
from tests.pipespec.fake_gpu import Graph
from tests.pipespec.test_native import make
from tests.support.graph_emulator import Emulator
from tests.support.ways import driver_of
from tests.trials import PROFILE, trials

pytest.importorskip("pipespec_kernels._cuda")


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    emulator = Emulator()
    emulator.folder = tmp_path
    emulator.install(monkeypatch)
    return emulator


HOW = {
    "plain": {"schedule": "plain", "graphs": True},
    "rounds": {"schedule": "lockstep", "graphs": True, "lookahead": 3},
    "lengths": {"schedule": "lockstep", "graphs": True},
    "streams": {"schedule": "streams", "lookahead": 3},
    "head": {"schedule": "lockstep", "graphs": True, "lookahead": 3},
    "index": {"schedule": "lockstep", "graphs": True},
    "index, draft": {"schedule": "lockstep", "graphs": True, "lookahead": 3},
    "draft, index": {"schedule": "lockstep", "graphs": True},
    "head, index": {"schedule": "lockstep", "graphs": True, "lookahead": 3},
}
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 1.0}
CALLS = {
    "greedy": {},
    "sampled": SAMPLED,
    "warm": SAMPLED | {"temperature": 1.4},
    "filtered": SAMPLED | {"top_k": 5, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.4},
    "logits": {"output_logits": True},
    "two": SAMPLED | {"rows": 2},
    "long": {"max_new_tokens": 40},
    "prompt": {"shortest": 600, "longest": 700},
    "prompts": SAMPLED | {"rows": 2, "shortest": 70, "longest": 120},
}


class Session:
    """A pipeline on the emulator, and the texts that it must give.

    Args:
        gpu: The emulator.
        model: The target.
        how: Of :data:`HOW`. A head has a target of its own.
    """

    def __init__(self, gpu: Emulator, model, how: str) -> None:
        drafts = [] if how in ("plain", "index") else [noisy(model, 0.05)]
        if "head" in how:
            model, drafts = with_head(gpu, heads.make_weights())
        if "index" in how:
            drafts.insert(how.startswith(("draft", "head")), NgramDraft(min_match=1))
        self.gpu, self.target, self.how = gpu, model, how
        self.pipe = Pipeline(model, drafts, **HOW[how])

    def call(self, name: str):
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "rows": 1} | CALLS[name]
        rows, sizes = options.pop("rows"), {n: options.pop(n) for n in ("shortest", "longest") if n in options}
        ids, mask = left_pad(random_prompts(rows, **{"seed": 5, "shortest": 6} | sizes))
        options |= {"seed": list(range(3, 3 + rows))} if options["do_sample"] else {}
        options |= {"return_dict_in_generate": True, "attention_mask": mask}
        text = self.pipe.generate(ids, **options).sequences
        assert self.pipe.report.schedule == HOW[self.how]["schedule"]
        # In this thread alone, and without graphs.
        twin = copy.deepcopy(self.target)
        twin.set_attn_implementation("sdpa")
        with Pipeline(twin, schedule="plain") as alone:
            wanted = alone.generate(ids, **options).sequences
        assert torch.equal(text, wanted), f"{name}: another text"


def with_head(gpu: Emulator, weights: dict[str, torch.Tensor]):
    """A small target, and the folder of a head that also reads its embedding."""
    folder = heads.write_speculators(gpu.folder, weights, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    return heads.make_target(num_hidden_layers=3), [folder]


def clean(gpu: Emulator, *, prompts: bool = True) -> None:
    assert gpu.faults == []
    assert gpu.replays > 0
    assert (gpu.prompts > 0) == prompts


REPLAYED = [(name, how) for name in ("llama", "gemma", "qwen2") for how in HOW if "head" not in how or name == "llama"]
"""A head has one target. What a family changes lies in its layers, which all ways run alike: at night it runs in each of them."""


@pytest.mark.parametrize(
    ("name", "how"),
    REPLAYED if PROFILE == "nightly" else [*(pair for pair in REPLAYED if pair[0] == "llama"), ("gemma", "rounds")],
)
def test_texts_of_replays(gpu, name, how):
    """Kinds of sampling, penalties, records, batches, a cache that grows, and graphs that are launched again."""
    model = random_llama(7) if name == "llama" else make(name, vocab_size=VOCABULARY)
    with gpu.watching(), warnings.catch_warnings(action="error"):
        session = Session(gpu, model, how)
        for call in (*CALLS, "greedy", "warm"):
            session.call(call)
        session.pipe.close()
    clean(gpu)


@pytest.fixture
def captures(monkeypatch):
    """What has been captured, by the stages of its parts. Pipelines are made ready for texts of 150 tokens."""
    monkeypatch.setattr(driving, "READY", 150)
    monkeypatch.setattr(stage, "GRAPH_WIDTHS", (16, 64, 96))
    seen, own = [], capturing.CaptureResources.capture

    def capture(self, parts, *rest, **options):
        seen.append([part[0].index for part in parts])
        return own(self, parts, *rest, **options)

    monkeypatch.setattr(capturing.CaptureResources, "capture", capture)
    return seen


@pytest.mark.parametrize("how", ["plain", "rounds", "streams"])
def test_a_first_call_captures_nothing(gpu, captures, how):
    """Neither steps nor prompts. More rows, and ways to choose tokens, are captured when they come."""
    with gpu.watching(), warnings.catch_warnings(action="error"):
        session = Session(gpu, random_llama(7), how)
        made = len(captures)
        # Of the target four: of all widths with the last column, and whole ones without.
        assert made == {"plain": 1 + 4, "rounds": 1 + 4 + 3, "streams": made}[how]
        for call in ("greedy", "long"):
            session.call(call)
        ids = torch.randint(3, VOCABULARY, (1, 130), generator=torch.Generator().manual_seed(1))
        session.pipe.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
        assert len(captures) == made
        assert gpu.prompts > 0
        session.call("two")
        assert len(captures) > made
    clean(gpu)


def test_without_memory_for_longer_texts_the_smallest_steps_are_captured(gpu, captures, monkeypatch):
    def full(self):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(GraphedStage, "capture_prompts", full)
    with gpu.watching(), warnings.catch_warnings(action="error"):
        session = Session(gpu, random_llama(7), "rounds")
        assert all(not stage.all_buffers() for stage in driver_of(session.pipe).stages)
        session.call("greedy")
    clean(gpu)


@pytest.mark.parametrize("how", ["plain", "rounds", "streams"])
def test_keys_and_values_in_8_bits(gpu, how):
    """The text is that of captured plain decoding with them, also where a text goes on from a prefix of an earlier one, and of several rows."""
    model = random_llama(7)
    options = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}

    def texts(pipe):
        first = pipe.generate(random_prompts(1, seed=5, shortest=6)[0][None], max_new_tokens=12, **options).sequences
        ids = torch.cat([first, random_prompts(1, seed=6, shortest=6)[0][None]], 1)
        second = pipe.generate(ids, max_new_tokens=12, **options).sequences
        ids, mask = left_pad(random_prompts(2, seed=7, shortest=70, longest=90))
        return first, second, pipe.generate(ids, attention_mask=mask, max_new_tokens=12, **options).sequences

    with gpu.watching(), warnings.catch_warnings(action="error"):
        drafts = [] if how == "plain" else [noisy(model, 0.05)]
        with Pipeline(model, drafts, kv_dtype="float8_e4m3fn", **HOW[how]) as pipe:
            found = texts(pipe)
            for stage in driver_of(pipe).stages:
                cache = stage.buffers.cache
                assert cache.dtype == torch.float8_e4m3fn
                # As the memory of a call is checked.
                counted = cache_bytes(stage.model, cache.rows, cache.capacity, driver_of(pipe).static_caches)
                assert counted == cache.nbytes_on()
                assert stage.form == "fused"
            assert pipe.config.kv_dtype == "float8_e4m3fn"
        with Pipeline(copy.deepcopy(model), kv_dtype="float8_e4m3fn", prefix_cache=0, **HOW["plain"]) as alone:
            assert all(map(torch.equal, found, texts(alone)))
    clean(gpu)


def test_keys_in_8_bits_without_captured_steps():
    model = random_llama(7)
    with pytest.raises(ValueError, match=r"kv_dtype='float8_e4m3fn' is for captured steps on a GPU: leave it out"):
        Pipeline(model, kv_dtype="float8_e4m3fn")
    with pytest.raises(ValueError, match=r"kv_dtype='int8' is not one of 'float8_e4m3fn'"):
        Pipeline(model, kv_dtype="int8")
    with pytest.raises(ValueError, match=r"attach\(\): with kv_dtype='float8_e4m3fn' the text differs"):
        attach(model, kv_dtype="float8_e4m3fn")


def test_the_answers_stay_out_of_captured_rounds(gpu, monkeypatch):
    """They would take the place of a model's draft tokens with rare matches. A corpus of the user's does take part."""
    model, answers = random_llama(7), np.arange(50, dtype=np.int32)
    model.config._name_or_path = "somewhere"
    monkeypatch.setattr("pipespec.engine.ngram.ids_of_answers", lambda *_: answers)
    for draft, wanted in ((NgramDraft(), None), (NgramDraft(corpus=answers), answers.tolist())):
        with gpu.watching(), Pipeline(model, draft, **HOW["rounds"]) as pipe:
            index = driver_of(pipe).stages[0]
            assert index.spec.ids is not None
            assert (index._corpus if index._corpus is None else index._corpus.tolist()) == wanted


def test_keys_in_8_bits_have_a_text_of_their_own(gpu):
    """No call is left to transformers' own loop."""
    model, ids = random_llama(7), random_prompts(1, seed=5, shortest=6)[0][None]
    with gpu.watching(), Pipeline(model, kv_dtype="float8_e4m3fn", **HOW["plain"]) as pipe:
        pipe.generate(ids, max_new_tokens=4, do_sample=False)
        with model.model.layers[0].mlp.register_forward_hook(lambda *given: given[-1] * 2):
            with pytest.raises(ValueError, match=r"kv_dtype='float8_e4m3fn': .* own loop has other bits"):
                pipe.generate(ids, max_new_tokens=4, do_sample=False)


NODES = {"qkv_append": 1, "verify_attention": 1, "linear_small": 3}
"""Of ``pipespec_kernels.ops``, in each layer of a step: one launch each."""


@pytest.mark.parametrize(("how", "rows"), [("plain", 1), ("rounds", 2)])
def test_a_layer_is_five_nodes(gpu, how, rows):
    """In every captured step, of one column or of several: and no operation of torch, but those that allocate memory."""
    with gpu.watching():
        session = Session(gpu, random_llama(7), how)
        session.call("greedy" if rows == 1 else "two")
        graphs = [graph for stage in driver_of(session.pipe).stages for graph in stage.buffers.graphs.values()]
    steps = [pair for graph in graphs for pair in zip(graph.steps, graph._graph.forwards, strict=True)]
    assert steps
    for step, recording in steps:
        names = [getattr(node.function, "__name__", "") for node in recording.nodes]
        names = [name for name in names if not name.startswith(("empty", "new_empty"))]
        first, head = names.index("qkv_append"), len(names) - 1 - names[::-1].index("linear_small")
        layers = step.stage.model.config.num_hidden_layers
        assert Counter(names[first:head]) == {name: n * layers for name, n in NODES.items()}
    clean(gpu)


@pytest.mark.parametrize("place", ["alone", "before a draft", "behind a draft", "behind a draft, without a match"])
def test_what_an_index_finds_in_replays(gpu, place):
    """In a corpus that is the text itself, alone and where the model next to it is always wrong or always right."""
    model = random_llama(7)
    ids = random_prompts(1, seed=5, shortest=6)[0][None]
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    text = type(model).generate(model, ids, **options)
    index = NgramDraft(corpus=text[0].tolist(), min_match=3, max_match=16)
    drafts = {
        "alone": [index],
        "before a draft": [index, noisy(model, 0.0)],
        "behind a draft": [random_llama(8), index],
        "behind a draft, without a match": [noisy(model, 0.0), NgramDraft(min_match=32, max_match=32)],
    }
    with gpu.watching(), warnings.catch_warnings(action="error"):
        pipe = Pipeline(model, drafts[place], schedule="lockstep", graphs=True, lookahead=4)
        assert torch.equal(pipe.generate(ids, **options), text)
        target = pipe.report.stages[-1]
        assert target.accepted > 20
        assert target.acceptance_rate > 0.9
        pipe.close()
    clean(gpu)


class Noted(BaseStreamer):
    """Writes down each token. The prompt comes first."""

    def __init__(self, log):
        self.log, self.has_prompt = log, False

    def put(self, value):
        if self.has_prompt:
            self.log += ["token"] * value.numel()
        self.has_prompt = True

    def end(self):
        pass


@pytest.mark.parametrize("how", HOW)
def test_the_first_token_comes_from_the_prompts_graph(gpu, how, monkeypatch):
    """Before the drafts read the prompt, and without a step. A text of one token takes no more."""
    log, prefill = [], GraphedStage.prefill

    def noted(stage, *arguments):
        log.append(stage.name)
        prefill(stage, *arguments)

    monkeypatch.setattr(GraphedStage, "prefill", noted)
    look = GraphedNgramStage.prefill
    monkeypatch.setattr(
        GraphedNgramStage, "prefill", lambda stage, *given: (log.append(stage.name), look(stage, *given))
    )
    ids = random_prompts(1, seed=5, shortest=80, longest=90)[0][None]
    options = {"do_sample": False, "pad_token_id": 0}
    with gpu.watching():
        session = Session(gpu, random_llama(7), how)
        text = session.pipe.generate(ids, max_new_tokens=9, streamer=Noted(log), **options)
        steps = session.pipe.report.stages[-1].steps
        assert log[:2] == ["target", "token"]
        assert log.count("token") == 9
        drafts = [name for name in log if name not in ("token", "target")]
        assert len(drafts) == len(session.pipe.report.stages) - 1
        # Of each round the target takes one step, and one more is that of the prompt.
        assert steps <= 9
        log.clear()
        before = gpu.replays
        alone = session.pipe.generate(ids.flip(1), max_new_tokens=1, streamer=Noted(log), **options)
    assert log == ["target", "token"]
    assert gpu.replays == before + 1
    model = session.target
    assert torch.equal(text, type(model).generate(model, ids, max_new_tokens=9, **options))
    assert torch.equal(alone, type(model).generate(model, ids.flip(1), max_new_tokens=1, **options))
    clean(gpu)


@pytest.mark.parametrize("how", ["plain", "rounds"])
def test_the_text_behind_a_cache_that_is_given(gpu, how):
    first, more = (random_prompts(1, seed=5, shortest=n, longest=n + 20)[0][None] for n in (70, 100))
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    with gpu.watching():
        session = Session(gpu, random_llama(7), how)
        given = session.pipe.generate(first, **options)
        longer, before = torch.cat([given.sequences, more], 1), gpu.prompts
        text = session.pipe.generate(longer, past_key_values=given.past_key_values, **options).sequences
        assert gpu.prompts > before
    assert torch.equal(text, type(session.target).generate(session.target, longer, **options).sequences)
    clean(gpu)


@pytest.mark.parametrize("kind", ["fused", "by modules"])
def test_texts_of_opaque_modules(gpu, kind, monkeypatch):
    """A switched adapter is captured again, in either form: its flag is part of the graph."""
    model = checkpoints.replaced(random_llama(7), checkpoints.Adapted, ("q_proj", "v_proj", "up_proj"))
    with gpu.watching(), warnings.catch_warnings(action="error"):
        if kind == "by modules":
            monkeypatch.setitem(HOW, "plain", HOW["plain"] | {"native": False})
        session = Session(gpu, model, "plain")
        session.call("greedy")
        form = session.pipe.report.stages[-1].forward
        assert form == ("fused" if kind == "fused" else "transformers: native=False")
        for is_on in (False, True):
            for module in model.modules():
                if isinstance(module, checkpoints.Adapted):
                    module.is_on = is_on
            session.call("greedy")
    clean(gpu, prompts=False)  # padding could change what an opaque module makes of the tokens next to it


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("refused", ["draft", "the CUDA module"])
def test_texts_where_the_host_takes_part(gpu, how, refused, monkeypatch):
    if refused == "the CUDA module":
        monkeypatch.setitem(sys.modules, "pipespec_kernels._cuda", None)
        monkeypatch.delattr(pipespec_kernels, "_cuda", raising=False)
    elif how == "plain":
        pytest.skip("it has no draft")

    def fails(stage):
        if refused == "draft" and gpu.capturing and not stage.is_target:
            raise RuntimeError("it waits for the device")

    gpu.fails = fails
    with gpu.watching():
        with pytest.warns(Warning, match=refused):
            session = Session(gpu, random_llama(7), how)
        with warnings.catch_warnings(action="error"):
            for call in ("greedy", "sampled", "two", "penalties", "filtered", "logits", "long")[
                : trials(ci=4, nightly=7)
            ]:
                session.call(call)
            session.call("greedy")
    clean(gpu)


class OutsideOfTorch(checkpoints.Packed):
    """One whose kernel is not part of a capture, as one on a stream of its own."""

    def forward(self, x):
        out = super().forward(x)
        out.numpy()[...] = out.numpy() * 2  # what torch does not see
        return out


class Counting(checkpoints.Packed):
    """One whose bits change from call to call."""

    calls = 0

    def forward(self, x):
        Counting.calls += 1
        return super().forward(x) * (1 + Counting.calls * 1e-3)


class Waiting(checkpoints.Packed):
    """One that reads its outliers on the host."""

    def forward(self, x):
        return super().forward(x) * (1.0 if x.abs().max().item() < 1e9 else 2.0)


trust(OutsideOfTorch, Counting, Waiting)


@pytest.mark.parametrize(
    ("kind", "cause"),
    [(OutsideOfTorch, "other bits"), (Counting, "other bits"), (Waiting, "not permitted when stream is capturing")],
)
def test_products_that_a_replay_does_not_give_are_not_captured(gpu, kind, cause):
    """The target runs without a graph, next to the captured draft. The warning names the module."""
    target = checkpoints.replaced(random_llama(7), kind, ("up_proj",))
    with gpu.watching():
        named = rf"target cannot be captured .* model\.layers\.\d\.mlp\.up_proj \({kind.__name__}\): .*{cause}"
        with pytest.warns(Warning, match=named):
            pipe = Pipeline(target, random_llama(8), schedule="lockstep", graphs=True, lookahead=3, native=False)
        assert set(driver_of(pipe).refused) == {1}
        ids = random_prompts(1, seed=5, shortest=6)[0][None]
        text = pipe.generate(ids, max_new_tokens=8, do_sample=False)
        if kind is OutsideOfTorch:
            assert torch.equal(text, type(target).generate(target, ids, max_new_tokens=8, do_sample=False))
    clean(gpu, prompts=False)


@pytest.mark.parametrize("fault", [None, "lengths of the capture", "features of the capture"])
def test_replays_draft_as_a_head_without_graphs(gpu, fault, monkeypatch):
    """Where the host plans, so that a round verifies its own draft tokens. What a graph freezes costs draft tokens, and not the text."""
    monkeypatch.setitem(sys.modules, "pipespec_kernels._cuda", None)
    monkeypatch.delattr(pipespec_kernels, "_cuda", raising=False)
    score, weights = GraphedHead._score_columns, heads.make_weights()

    def planted(head, tokens, kv, n_select):
        if fault == "lengths of the capture" and gpu.capturing:
            kv = torch.from_numpy(kv.numpy().copy())
        if fault == "features of the capture" and gpu.capturing:
            features = head._features()
            monkeypatch.setattr(features, "_stored", torch.from_numpy(features.stored.numpy().copy()))
        return score(head, tokens, kv, n_select)

    monkeypatch.setattr(GraphedHead, "_score_columns", planted)
    few = {"temperature": 4.0, "top_k": 0, "logit_bias": heads.only(4, weights), "do_sample": True, "seed": 3}
    ids, mask = left_pad(random_prompts(2, seed=5, shortest=4))
    found = []
    for _ in range(2):
        with gpu.watching(), pytest.warns(Warning, match="the CUDA module"):
            pipe = Pipeline(*with_head(gpu, weights), **HOW["head"])
        with gpu.watching():
            text = pipe.generate(ids, attention_mask=mask, pad_token_id=0, max_new_tokens=14, **few)
        stages = pipe.report.stages
        found.append((text.tolist(), stages[-1].steps, stages[-1].accepted))
        # The second time nothing is captured.
        monkeypatch.setattr(capturing, "capture_bodies", lambda *arguments: None)
    assert found[0][0] == found[1][0]
    assert found[1][2] > 10
    assert (found[0] == found[1]) == (fault is None)
    if fault is None:
        clean(gpu)


def test_two_pipelines_in_two_threads(gpu):
    errors: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            with gpu.watching():
                session = Session(gpu, random_llama(seed), "rounds")
                for call in ("greedy", "sampled", "greedy"):
                    session.call(call)
        except BaseException as error:
            errors.append(error)

    with warnings.catch_warnings(action="error"):
        threads = [threading.Thread(target=run, args=(seed,)) for seed in (7, 8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    clean(gpu)


FAULTS = {}


def fault(found: str, how: str = "rounds"):
    """Register a planted fault: a function of the monkeypatch and the emulator that yields once before the session, and then its calls.

    ``found``: A pattern of what catches it.
    """

    def add(function):
        FAULTS[function.__name__] = found, how, function
        return function

    return add


def followed(monkeypatch, instead) -> None:
    """Follow other lengths than those that plan has written: ``instead(cache, kv)``."""
    follow = RowCache.follow
    monkeypatch.setattr(RowCache, "follow", lambda cache, kv, *new: follow(cache, instead(cache, kv), *new))


@fault("a workspace that has been freed")
def workspaces_of_the_warm_up(patch, gpu):
    patch.setattr(capturing, "own_workspaces", nullcontext)
    yield "greedy"
    gpu.clear_workspaces()
    yield "greedy"


@fault("another text")
def lengths_of_the_capture(patch, gpu):
    followed(patch, lambda cache, kv: torch.from_numpy(kv.numpy().copy()) if gpu.capturing else kv)
    yield "greedy"


@fault("not permitted when stream is capturing")
def lengths_that_the_host_reads(patch, gpu):
    followed(patch, lambda cache, kv: kv.clamp(max=max(cache.capacity, kv.max().item())))
    yield "greedy"


@fault("lengths is|another text|that another graph writes", "streams")
def lengths_of_another_graph(patch, gpu):
    first = {}
    followed(patch, lambda cache, kv: first.setdefault(cache, kv.clone()) if gpu.capturing else kv)
    yield "greedy"


@fault("lengths is|another text")
def uninitialised_memory(patch, gpu):
    followed(patch, lambda cache, kv: kv + torch.empty_like(kv).clamp(0, 1) if gpu.capturing else kv)
    yield "greedy"


@fault("memory that has been freed", "head")
def hidden_states_at_a_new_address(patch, gpu):
    session = yield "greedy"
    features = driver_of(session.pipe).target.buffers.cache.features
    features._stored = features._stored.clone()  # a monkeypatch would keep the old one
    yield "greedy"


@fault("another text|memory that has been freed")
def graphs_of_old_weights(patch, gpu):
    patch.setattr(stage, "hash", lambda what: 0, raising=False)
    session = yield "greedy"
    norm = session.target.model.norm
    norm.weight = torch.nn.Parameter(norm.weight * -1)
    yield "greedy"


@fault("another text|memory that has been freed", "streams")
def graphs_of_a_cache_that_has_grown(patch, gpu):
    kept = {}
    make_buffers = buffers.StaticBuffers
    patch.setattr(
        stage,
        "StaticBuffers",
        lambda cache, sampler, version, weights, graphs, prompts: make_buffers(cache, sampler, 0, 0, kept, prompts),
    )
    patch.setattr(stage, "hash", lambda what: 0, raising=False)
    yield "greedy"
    yield "long"


@fault("another text", "plain")
def a_prompt_at_the_length_of_the_capture(patch, gpu):
    read = capturing.CapturedPrompt.__call__
    patch.setattr(
        capturing.CapturedPrompt, "__call__", lambda graph, tokens, held: read(graph, tokens, [0] * len(held))
    )
    yield "prompt"


@fault("another text|memory that has been freed", "plain")
def prompt_graphs_of_old_weights(patch, gpu):
    replace = buffers.StaticBuffers._replace
    patch.setattr(
        buffers.StaticBuffers, "_replace", lambda own, **new: replace(own, **new | {"prompt_graphs": own.prompt_graphs})
    )
    session = yield "prompt"
    layer = session.target.model.layers[0].input_layernorm
    layer.weight = torch.nn.Parameter(layer.weight * 1.5)
    yield "prompt"


@fault("is not ordered after")
def no_wait_for_the_prefill(patch, gpu):
    patch.setattr(driving, "wait_for_prefill", lambda models: None)
    yield "greedy"


@fault("not permitted when stream is capturing")
def a_wait_for_the_whole_device(patch, gpu):
    run_scheduled = GraphedDriver._run_scheduled

    def run(driver, request):
        torch.cuda.synchronize()
        run_scheduled(driver, request)

    patch.setattr(GraphedDriver, "_run_scheduled", run)
    yield "greedy"
    gpu.captures[0] = Graph(gpu)  # another thread's
    yield "greedy"


@fault("recording to mempool_id", "plain")
def the_pool_of_a_failed_capture(patch, gpu):
    patch.setattr(capturing.CaptureResources, "leave_pool", lambda resources: None)
    yield "greedy"

    def fails(stage):
        if gpu.capturing:
            gpu.invalidate()
            raise RuntimeError("a capture that fails")

    gpu.fails = fails
    yield "sampled, without graphs"
    gpu.fails = lambda stage: None
    yield "sampled"


def play(gpu: Emulator, how: str, calls, patch) -> None:
    """Run the calls of a planted fault. Whatever it raises has caught the fault."""
    calls = calls(patch, gpu)
    name = next(calls)
    session = Session(gpu, random_llama(7), how)
    while True:
        if name == "sampled, without graphs":
            with pytest.warns(Warning, match="a capture that fails"):
                session.call("sampled")
        else:
            session.call(name)
        try:
            name = calls.send(session)
        except StopIteration:
            return


def planted_is_caught(gpu: Emulator, how: str, calls, patch) -> str:
    with gpu.watching(), warnings.catch_warnings(action="error"):
        try:
            play(gpu, how, calls, patch)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "; ".join(gpu.faults)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(gpu, monkeypatch, name):
    expected, how, calls = FAULTS[name]
    found = planted_is_caught(gpu, how, calls, monkeypatch)
    assert re.search(expected, found), found or "not caught"


@pytest.mark.parametrize("rows", [1, 2])
def test_a_cache_of_the_caller_after_a_captured_call(gpu, rows):
    """A step that the call before has left says nothing about it, whatever the number of rows was."""
    model = random_llama(3)
    twin, options = copy.deepcopy(model), {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    options |= {"return_dict_in_generate": True}
    ids, other = (torch.stack(random_prompts(n, seed=5, shortest=9, longest=9)) for n in (rows, 3 - rows))
    with Pipeline(model, [noisy(model, 0.05)], **HOW["rounds"]) as pipe, Pipeline(twin, schedule="plain") as alone:
        before = alone.generate(ids, past_key_values=DynamicCache(config=twin.config), **options)
        given = copy.deepcopy(before.past_key_values)
        wanted = alone.generate(before.sequences, past_key_values=before.past_key_values, **options).sequences
        pipe.generate(other, **options | {"max_new_tokens": 30})
        assert torch.equal(pipe.generate(before.sequences, past_key_values=given, **options).sequences, wanted)
    clean(gpu)
