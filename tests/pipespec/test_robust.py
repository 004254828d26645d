"""Actions of users on a pipeline between and during calls, and side effects of models and processors."""

import copy
import gc
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch

from pipespec import Pipeline, attach, detach
from pipespec.api import prepare
from pipespec.engine.cache import RowCache
from pipespec.engine.forward import forward
from tests.conftest import left_pad, noisy, random_llama, random_prompts
from tests.support.forks import ran
from tests.support.processes import ENVIRONMENT
from tests.support.streamers import Held, Recorder
from tests.support.ways import IN_THIS_PROCESS, driver_of, opened
from tests.waiting import SECONDS

PROMPT = random_prompts(1, seed=5, shortest=6)[0][None]


@pytest.fixture
def model():
    return random_llama(3)


@pytest.fixture
def chain(model):
    return Pipeline(model, noisy(model, 0.02), schedule="lockstep")


def greedy(model, ids=PROMPT, new: int = 20, **kwargs) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=new, do_sample=False, **kwargs)


# ---- memory


@pytest.mark.parametrize("how", ["lockstep", "spd"])
def test_nothing_of_a_call_waits_for_the_garbage_collector(model, monkeypatch, how):
    made, real = [], prepare.PreparedCall.__init__

    def watched(self, *args, **kwargs):
        made.append(weakref.ref(self))
        real(self, *args, **kwargs)

    monkeypatch.setattr(prepare.PreparedCall, "__init__", watched)
    with opened(model, noisy(model, 0.02), how) as pipe:
        gc.collect()
        gc.disable()
        try:
            pipe.generate(PROMPT, max_new_tokens=5)
            pipe.generate(PROMPT, max_new_tokens=5, return_dict_in_generate=True, output_logits=True)
            assert [ref() for ref in made] == [None, None]
        finally:
            gc.enable()


@pytest.mark.parametrize("rows", [1, 3])
def test_a_cache_grows_with_the_text(model, chain, monkeypatch, rows):
    """The cache does not grow to the limit, which is often the model's."""
    monkeypatch.setattr("pipespec.engine.chain.INITIAL_CAPACITY", 5)
    ids, mask = left_pad(random_prompts(rows, seed=8, shortest=4))
    got = chain.generate(ids, attention_mask=mask, max_new_tokens=300)
    assert torch.equal(got, greedy(model, ids, 300, attention_mask=mask))
    short = chain.generate(ids, attention_mask=mask, max_new_tokens=400, max_time=0.0)
    assert short.shape[1] == ids.shape[1] + 1
    chain.generate(ids[:, -4:].repeat(5, 1), max_new_tokens=400, max_time=0.0)
    assert driver_of(chain).target._cache.capacity < 100


# ---- drafts that write invalid tokens


@pytest.mark.parametrize("garbage", [-1, 320, 10**6, -(2**31), 2**31 - 1])
@pytest.mark.parametrize(("drafts", "rows"), [(1, 3), (2, 1)])
def test_token_ids_outside_of_the_vocabulary(model, monkeypatch, garbage, drafts, rows):
    """In a draft's sequence they are draft tokens that the target rejects."""
    ids, mask = left_pad(random_prompts(rows, seed=8, shortest=4))
    with Pipeline(
        model, [noisy(model, 0.02 * i) for i in range(drafts, 0, -1)], schedule="lockstep", lookahead=4
    ) as pipe:
        first = driver_of(pipe)._stages[0]
        real = first.prefill

        def prefill(*arguments) -> None:
            real(*arguments)
            select, count = first._select, [0]

            def wrong(*args):
                chosen = select(*args)
                count[0] += 1
                return chosen.masked_fill(chosen >= 0, garbage) if count[0] % 2 else chosen

            first._select = wrong

        monkeypatch.setattr(first, "prefill", prefill)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            got = pipe.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)
        assert torch.equal(got, greedy(model, ids, attention_mask=mask))
        assert pipe.report.stages[0].produced > 0


# ---- models that change


def test_models_that_are_cast_between_calls(model, chain):
    wanted = chain.generate(PROMPT, max_new_tokens=9)
    model.to(torch.bfloat16)
    assert chain.generate(PROMPT, max_new_tokens=9).shape == wanted.shape
    model.to(torch.float32)
    chain.models[0].to(torch.float64)
    chain.generate(PROMPT, max_new_tokens=9)
    chain.models[0].half()
    with pytest.raises(ValueError, match="draft 0 is float16 on the CPU"):
        chain.generate(PROMPT, max_new_tokens=9)


# ---- scores that allow no choice


def nothing(ids, scores):
    return torch.full_like(scores, -torch.inf)


def not_a_number(ids, scores):
    return torch.full_like(scores, torch.nan)


@pytest.mark.parametrize("processor", [nothing, not_a_number])
def test_no_distribution(chain, processor):
    """An error, as in transformers. A forbidden token would go unnoticed."""
    with pytest.raises(ValueError, match=rf"no token can be drawn at position {PROMPT.shape[1]} of row 0"):
        chain.generate(PROMPT, max_new_tokens=5, do_sample=True, logits_processor=[processor])
    assert torch.equal(chain.partial, PROMPT)
    assert chain.generate(PROMPT, max_new_tokens=5, do_sample=True).shape[1] == PROMPT.shape[1] + 5


@pytest.mark.parametrize("how", ["lockstep", "lockstep, captured", "streams"])
@pytest.mark.parametrize("top_k", [0, 50])
def test_a_model_that_has_overflown(model, how, top_k):
    sampled = {"do_sample": True, "top_k": top_k, "seed": 3}
    alone = Pipeline(model, schedule="plain").generate(PROMPT, max_new_tokens=9, **sampled)
    weight = model.lm_head.weight.data.clone()
    with opened(model, noisy(model, 0.02), how) as chain:
        model.lm_head.weight.data[5] = torch.nan
        with pytest.raises(ValueError, match=f"no token can be drawn at position {PROMPT.shape[1]} of row 0"):
            chain.generate(PROMPT, max_new_tokens=5, **sampled)
        assert torch.equal(chain.partial, PROMPT)
        model.lm_head.weight.data.copy_(weight)
        # A draft's odd logits are only bad draft tokens.
        chain.models[0].lm_head.weight.data[5] = torch.nan
        assert torch.equal(chain.generate(PROMPT, max_new_tokens=9, **sampled), alone)


def test_a_damaged_model_is_named_once_in_a_call(model):
    broken = copy.deepcopy(model)
    broken.model.norm.weight.data[0] = torch.nan
    with pytest.warns(UserWarning, match="all logits of the target are NaN") as found:
        text = Pipeline(broken, schedule="plain").generate(PROMPT, max_new_tokens=5, do_sample=False)
    assert len([w for w in found if "NaN" in str(w.message)]) == 1
    assert torch.equal(text, broken.generate(PROMPT, max_new_tokens=5, do_sample=False))


# ---- torch's own switches


def test_a_processor_may_use_gradients(model, chain):
    def steered(ids, scores):
        with torch.enable_grad():
            x = scores.detach().requires_grad_()
            (gradient,) = torch.autograd.grad((x * x).sum(), x)
        return scores + 0.01 * gradient

    assert torch.equal(
        chain.generate(PROMPT, max_new_tokens=9, logits_processor=[steered]),
        greedy(model, new=9, logits_processor=[steered]),
    )


@pytest.mark.parametrize("kwargs", [{}, {"do_sample": True, "seed": 1}, {"no_repeat_ngram_size": 2}], ids=str)
def test_another_default_device(chain, kwargs):
    wanted = chain.generate(PROMPT, max_new_tokens=9, **kwargs)
    with torch.device("meta"):
        got = chain.generate(PROMPT, max_new_tokens=9, **kwargs)
    assert torch.equal(got, wanted)


# ---- close() while a call runs


@pytest.mark.parametrize("how", [*IN_THIS_PROCESS, "workers"])
def test_close_waits_for_the_call(model, how, monkeypatch):
    """close() in another thread: the call has its whole text, and loses no resource before its end."""
    wanted = greedy(model)
    order, streamer = [], Held(1)
    streamer.end = lambda: order.append("ended")
    with opened(model, noisy(model, 0.02), how) as pipe, ThreadPoolExecutor(2) as threads:
        close = driver_of(pipe).close
        monkeypatch.setattr(driver_of(pipe), "close", lambda: (order.append("closed"), close()))
        calling = threads.submit(pipe.generate, PROMPT, max_new_tokens=20, streamer=streamer)
        assert streamer.inside.wait(SECONDS)
        closing = threads.submit(pipe.close)
        wait([closing], 0.1)  # time in which an early close() would show
        streamer.go_on.set()
        assert torch.equal(calling.result(SECONDS), wanted)
        closing.result(SECONDS)
        assert order == ["ended", "closed"]
        assert model.config._attn_implementation == "sdpa"
        assert torch.equal(pipe.generate(PROMPT, max_new_tokens=20), wanted)  # the pipeline works again


@pytest.mark.parametrize("how", [{"schedule": "lockstep"}, {"schedule": "streams"}], ids=str)
def test_close_from_inside_of_a_call(model, how):
    streamer = Held(1, lambda: pipe.close())
    streamer.go_on.set()
    with Pipeline(model, noisy(model, 0.02), **how) as pipe:
        with pytest.raises(RuntimeError, match=r"close\(\) was called inside a call"):
            pipe.generate(PROMPT, max_new_tokens=20, streamer=streamer)
        assert pipe.generate(PROMPT, max_new_tokens=20).shape[1] == PROMPT.shape[1] + 20
    attach(model, noisy(model, 0.02), **how)
    streamer = Held(1, lambda: detach(model))
    streamer.go_on.set()
    with pytest.raises(RuntimeError, match="called inside a call"):
        model.generate(PROMPT, max_new_tokens=20, streamer=streamer)
    detach(model)


# ---- the end of the program


@pytest.mark.parametrize("how", ["lockstep", "streams"])
def test_a_program_may_end_while_a_daemon_thread_generates(tmp_path, how):
    """Also with a call of another thread at the same time, a call within a call, a call in an exit handler, and an exit handler that joins the
    threads."""
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import atexit, threading, torch, warnings
from pipespec import Pipeline, SpeedWarning
from tests.conftest import noisy, random_llama

warnings.simplefilter("ignore", SpeedWarning)  # one pipeline has room for one call only
model = random_llama(3)
pipe, inner = (Pipeline(model, noisy(model, 0.1), schedule={how!r}) for _ in range(2))
ids = torch.tensor([[5, 6, 7, 8]])
begun = threading.Event()
atexit.register(lambda: [thread.join() for thread in threads])
atexit.register(lambda: print(pipe.generate(ids, max_new_tokens=4).shape[1], flush=True))

class Streamer:
    puts = 0
    def put(self, value):
        self.puts += 1
        if self.puts == 4:
            begun.set()
        inner.generate(ids, max_new_tokens=4)
    def end(self):
        pass

def run():
    while True:
        pipe.generate(ids, max_new_tokens=400, streamer=Streamer())

threads = [threading.Thread(target=run, daemon=True) for _ in range(2)]
for thread in threads:
    thread.start()
begun.wait()
"""
    )
    done = ran(script, env=ENVIRONMENT, timeout=SECONDS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "8\n", "")


@pytest.mark.parametrize("when", ["midway", "after its run"])
@pytest.mark.parametrize("how", ["plain", "lockstep", "lockstep, captured", "streams", "spd"])
def test_a_cache_given_to_a_call_that_fails(model, how, when):
    """It is as it was, and no later call continues from it unless it is given."""
    prompts = random_prompts(4, seed=8, shortest=5)

    def gone() -> None:
        raise ConnectionError("gone")

    streamer = Recorder(5, gone) if when == "midway" else Recorder()
    streamer.end = gone  # the reader has gone when the text is complete
    with opened(model, noisy(model, 0.02), how) as pipe:
        first = pipe.generate(prompts[0][None], max_new_tokens=12, return_dict_in_generate=True)
        cache, ids = first.past_key_values, torch.cat([first.sequences[0], prompts[1]])[None]
        for layer in cache.layers:
            layer.values.data.mul_(1.5)  # no longer those of the text
        wanted = greedy(model, ids, 30, past_key_values=copy.deepcopy(cache))
        assert not torch.equal(wanted, greedy(model, ids, 30))
        with pytest.raises(ConnectionError, match="gone"):
            pipe.generate(ids, past_key_values=cache, max_new_tokens=30, streamer=streamer)
        assert cache.get_seq_length() == first.sequences.shape[1] - 1
        assert torch.equal(pipe.generate(ids, max_new_tokens=30), greedy(model, ids, 30))
        two = torch.stack([prompts[2][:5], prompts[3][:5]])
        assert torch.equal(pipe.generate(two, max_new_tokens=9), greedy(model, two, 9))
        assert torch.equal(pipe.generate(ids, past_key_values=cache, max_new_tokens=30), wanted)
        assert torch.equal(pipe.generate(ids, max_new_tokens=30), greedy(model, ids, 30))


def test_storage_whose_growth_is_interrupted(model, monkeypatch):
    """Between the copy and the use of the new storage. The old storage stays."""
    cache = RowCache.for_model(model, 1, 20)
    forward(model, PROMPT, cache, keep=0)

    def interrupts(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RowCache, "_use", interrupts)
        with pytest.raises(KeyboardInterrupt):
            cache.reserve(32)
    assert cache.capacity == 20
    logits = forward(model, PROMPT[:, :2], cache, keep=1)
    with torch.no_grad():
        wanted = model(torch.cat([PROMPT, PROMPT[:, :2]], 1)).logits[:, -1:]
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
