"""Places of the captured path that no interpreter and no emulator sees: the real allocator, pinned memory, captures beside replays. Each takes less than a minute.

Those with a device run on a CPU, too, uncaptured.
"""

import copy
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteriaList

from pipespec import Pipeline
from pipespec.schedules.base import SpeedWarning
from tests.conftest import noisy, random_llama
from tests.pipespec.test_streams import DEVICES, GPU
from tests.support.ways import driver_of

ROOT = Path(__file__).parents[2]
GREEDY = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
SAMPLED = GREEDY | {"do_sample": True, "temperature": 0.9, "top_k": 0, "top_p": 0.95, "seed": 5}


def prompt(model: LlamaForCausalLM, tokens: int, seed: int = 0) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(seed)
    return torch.randint(2, model.config.vocab_size, (1, tokens), generator=numbers).to(model.device)


def wide(layers: int) -> LlamaForCausalLM:
    """A random model with layers of an 8B."""
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=32000, max_position_embeddings=2048,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()


@contextmanager
def copies() -> Iterator[None]:
    """Another thread copies memory of the GPU."""
    source, side, ended = (
        torch.empty(2, 1 << 28, dtype=torch.uint8, device="cuda"),
        torch.cuda.Stream(),
        threading.Event(),
    )

    def run() -> None:
        with torch.cuda.stream(side):
            while not ended.is_set():
                source[0].copy_(source[1])
                side.synchronize()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("device", DEVICES)
def test_graphs_of_prompts_and_of_steps_share_a_pool(device: str) -> None:
    """Prompts of several widths in turn: each text is that of a pipeline of its own."""
    target = random_llama(3).to(device)
    draft = noisy(target, 0.05)
    prompts = [prompt(target, tokens) for tokens in (60, 200, 450)]
    wanted = []
    for ids in prompts:
        with Pipeline(target, [draft], graphs=True, lookahead=3, prefix_cache=0) as pipe:
            wanted.append(pipe.generate(ids, **GREEDY).tolist())
    with Pipeline(target, [draft], graphs=True, lookahead=3, prefix_cache=0) as pipe:
        for _ in range(2 if device == "cpu" else 16):
            assert [pipe.generate(ids, **GREEDY).tolist() for ids in prompts] == wanted


@pytest.mark.parametrize("device", DEVICES)
def test_two_pipelines_in_two_threads_capture_beside_replays(device: str) -> None:
    """New kinds of sampling and prompts mean captures, while the other pipeline replays its graphs."""
    calls = [GREEDY, SAMPLED, SAMPLED | {"top_k": 5}, GREEDY | {"repetition_penalty": 1.2}]
    targets = [random_llama(seed).to(device) for seed in (3, 4)]
    errors: list[BaseException] = []

    def run(target: LlamaForCausalLM, wanted: list | None = None) -> list:
        with Pipeline(target, [noisy(target, 0.05)], graphs=True, lookahead=3, prefix_cache=0) as pipe:
            found = [pipe.generate(prompt(target, n), **call).tolist() for n in (20, 90) for call in calls]
        assert wanted in (None, found)
        return found

    wanted = [run(target) for target in targets]

    def repeated(i: int) -> None:
        try:
            for _ in range(1 if device == "cpu" else 4):
                run(targets[i], wanted[i])
        except BaseException as error:
            errors.append(error)

    with warnings.catch_warnings():
        warnings.simplefilter("error", SpeedWarning)
        threads = [threading.Thread(target=repeated, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []


@pytest.mark.gpu
@GPU[1]
def test_expandable_segments() -> None:
    """torch's allocator grows its segments under the graphs."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/pipespec/test_first_minute.py",
        "-m",
        "gpu",
    ]
    variables = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    ran = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout[-4000:]


@pytest.mark.gpu
@GPU[1]
@pytest.mark.parametrize("call", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_stages_that_meet_in_pinned_memory(call: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """As stages on several GPUs do."""
    from pipespec.schedules.graphs import capture

    made = capture.CaptureContext.__init__

    def pinned(context: capture.CaptureContext, *given: object) -> None:
        made(context, *given)
        context._block = context._pinned

    target = random_llama(3).cuda()
    with Pipeline(target, schedule="plain", graphs=True) as pipe:
        wanted = pipe.generate(prompt(target, 20), **call)
    monkeypatch.setattr(capture.CaptureContext, "__init__", pinned)
    with Pipeline(target, [noisy(target, 0.05)], schedule="streams", lookahead=4) as pipe:
        for _ in range(5):
            assert torch.equal(pipe.generate(prompt(target, 20), **call), wanted)


@pytest.mark.gpu
@GPU[1]
def test_workspaces_of_products_of_real_widths() -> None:
    """The library's products of wide steps split their sums, and their workspaces stay the graphs' own: all other memory is NaN."""
    target = wide(2)
    with Pipeline(target, schedule="plain", graphs=True, prefix_cache=0) as pipe:
        wanted = [pipe.generate(prompt(target, tokens), **GREEDY) for tokens in (20, 300, 1000)]
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0] - (2 << 30)
        junk = [torch.full((1 << 28,), float("nan"), device="cuda") for _ in range(min(64, free >> 30))]
        for _ in range(10):
            for text, tokens in zip(wanted, (20, 300, 1000), strict=True):
                assert torch.equal(pipe.generate(prompt(target, tokens), **GREEDY), text)
        assert all(bool(memory.isnan().all()) for memory in junk)


@pytest.mark.gpu
@GPU[1]
def test_dependent_launches_beside_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that begin before the one ahead has ended give the logits of those that wait, bit for bit."""
    from pipespec_kernels.triton import launch

    target = wide(2)
    draft, call = noisy(target, 0.002), {"output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 256}
    found = []
    for wish in ("0", "1"):
        monkeypatch.setattr(launch, "_PDL", wish)
        launch.dependent.cache_clear()
        with Pipeline(target, [draft], graphs=True, lookahead=4, prefix_cache=0) as pipe, copies():
            texts = [pipe.generate(prompt(target, 20, seed), **GREEDY | call) for seed in range(8)]
            assert pipe.report.stages[-1].accepted > 0
        found.append([(text.sequences, *text.logits) for text in texts])
    launch.dependent.cache_clear()
    for one, other in zip(*found, strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.gpu
@GPU[1]
@pytest.mark.parametrize("drafts", [0, 1])
def test_a_text_that_ends_does_not_wait_for_the_step_ahead(drafts: int) -> None:
    """The host waits for the lane as a call begins, and not as it ends: one time less than in a call that is stopped, which no step outlives."""
    target = wide(16)
    with Pipeline(
        target, [copy.deepcopy(target)] * drafts, graphs=True, lookahead=4 if drafts else None, prefix_cache=0
    ) as pipe:
        ids, first, call = prompt(target, 20), 6, SAMPLED | {"max_new_tokens": 256}
        new = pipe.generate(ids, **call)[0, ids.shape[1] :].tolist()
        assert new.index(new[first - 1]) == first - 1
        counters = driver_of(pipe).scheduled.scheduler._launcher.native.counters

        def waits(generate: Callable[[], object]) -> list[int]:
            found = []
            for _ in range(5):
                driver_of(pipe)._settle()
                before = counters()["host_syncs"]
                generate()
                found.append(counters()["host_syncs"] - before)
            return found

        def criterion(text: torch.Tensor, _: object) -> object:
            return text.shape[1] > ids.shape[1] + 1 and 1 / 0  # the first token comes before the lane's first step

        def stopped() -> None:
            with pytest.raises(ZeroDivisionError):
                pipe.generate(ids, **call, stopping_criteria=StoppingCriteriaList([criterion]))

        def ended() -> None:
            text = pipe.generate(ids, **call | {"eos_token_id": new[first - 1]})
            assert text.shape[1] == ids.shape[1] + first

        # Now and then the step ahead has ended before the host sees the last token.
        assert min(waits(ended)) < max(waits(stopped))
