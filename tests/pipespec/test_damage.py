"""Shared memory that is overwritten: by drafts, which can write only their own part of it, and by anything else."""

import os
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest
import torch

from pipespec import Pipeline, trust
from pipespec.schedules.base import StageFailure
from pipespec_kernels.state import SharedMemory, StateBlock
from tests.conftest import VOCABULARY, noisy, random_llama, random_prompts
from tests.pipespec.faulty import Stray
from tests.support.processes import await_drafts, await_idle
from tests.support.streamers import Recorder
from tests.support.ways import driver_of
from tests.trials import trials
from tests.waiting import SECONDS, drafts_keep_up

NEW = 40
PROMPTS = random_prompts(3, seed=31, shortest=4)


@pytest.fixture(scope="module")
def models():
    target = random_llama(13)
    texts = [target.generate(p[None], max_new_tokens=NEW, do_sample=False) for p in PROMPTS]
    return target, [noisy(target, 0.03, seed=i) for i in range(2)], texts


def generate(pipe: Pipeline, texts, which: int = 0) -> list[str]:
    """Run one call and check its text. Return the messages of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = pipe.generate(PROMPTS[which][None], max_new_tokens=NEW, do_sample=False)
    assert torch.equal(got, texts[which])
    assert all(warning.category is StageFailure for warning in caught)
    assert str(pipe.report)
    return [str(warning.message) for warning in caught]


def generate_with_all_drafts(pipe: Pipeline, texts) -> None:
    with drafts_keep_up(pipe, [len(PROMPTS[0]) + NEW]):
        assert generate(pipe, texts) == []
    assert all(stage.steps > 0 for stage in pipe.report.stages)


# ---- what a draft can write

WRITER = """
import mmap, os, signal, sys
from pipespec_kernels.state import SharedMemory

memory = SharedMemory(list(map(int, sys.argv[1:])), copied_by_forks=False)
found = []
begin = 0
for fd, size in zip(memory.fds, memory.sizes):
    child = os.fork()
    if child == 0:
        memory.array[begin] = 1
        memory.array[begin + size - 1] = 1
        os._exit(0)
    end = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        mmap.mmap(fd, size)
        maps = True
    except PermissionError:
        maps = False
    try:
        os.ftruncate(fd, 0)
        cuts = True
    except OSError:
        cuts = False
    found.append((end, maps, cuts))
    begin += size
print(found)
"""


@pytest.mark.parametrize("draft", [0, 1])
def test_a_draft_writes_only_its_own_part(draft):
    """Another write kills its process. The right cannot be regained from the descriptors."""
    block = StateBlock.create(3, 2, 1 << 11, SharedMemory.create([1]))
    block.reset([3, 1], [60, 60], [5, 6], [])
    assert len(block.memory.fds) == 5
    writable = block.parts_of([draft])
    with block.memory.lent(writable) as fds:
        writer = subprocess.run(
            [sys.executable, "-c", WRITER, *map(str, fds)],
            pass_fds=fds,
            timeout=SECONDS,
            capture_output=True,
            text=True,
        )
    assert writer.returncode == 0, writer.stderr
    granted, denied = (0, True, False), (-11, False, False)
    assert eval(writer.stdout) == [granted if part in writable else denied for part in range(5)]
    ends = np.cumsum(block.memory.sizes)
    for part, end in enumerate(ends):
        assert (block.memory.array[end - 1] == 1) == (part in writable)
    assert block.is_intact


def test_lent_memory_follows_a_growth():
    block = StateBlock.create(2, 1, 16, SharedMemory.create([1]))
    with block.memory.lent(block.parts_of([0])) as fds:
        other = StateBlock(SharedMemory([os.dup(fd) for fd in fds]))
    block.ensure(5, 1 << 12)
    block.reset([3] * 5, [60] * 5, [5] * 5, [])
    other.refresh()
    assert (other.rows, other.capacity) == (5, 1 << 12)
    assert other.length(1, 4) == 3
    assert other.memory.sizes == block.memory.sizes


def test_a_worker_that_writes_elsewhere_is_a_dead_draft(models):
    target, _, texts = models
    draft = Stray.like(noisy(target, 0.03))
    draft.config.caller = os.getpid()
    with Pipeline(target, draft, schedule="workers") as pipe:
        generate_with_all_drafts(pipe, texts)
        # Else it may die within the step that it takes while the call ends.
        await_idle(pipe)
        draft.strays.fill_(1)
        with drafts_keep_up(pipe, [len(PROMPTS[0]) + NEW]):  # it is dead before the text is complete
            (message,) = generate(pipe, texts)
        assert "draft stage 0 is lost (killed by SIGSEGV)" in message
        draft.strays.fill_(0)
        assert generate(pipe, texts) == []
        await_drafts(pipe)
        generate_with_all_drafts(pipe, texts)


# ---- what a draft may write is any word


class Garbage:
    """Writes random words into parts of a block, half of them plausible ones."""

    def __init__(self, block: StateBlock, parts: set[int], seed: int) -> None:
        assert isinstance(block.memory, SharedMemory)
        self.block, self.parts, self.times = block, sorted(parts), 0
        self._random = np.random.default_rng(seed)

    def write(self, *_: object) -> None:
        begins = np.cumsum([0, *self.block.memory.sizes])
        words = self.block.memory.array.view(np.uint32)
        for part in self.parts:
            begin, end = begins[part] // 4, begins[part + 1] // 4
            # The words that count lie at the beginning: status, lengths, counters. The ring follows.
            at = begin + self._random.integers(0, [min(1024, end - begin)] * 40 + [end - begin] * 40)
            plausible = self._random.integers(0, 2 * (len(PROMPTS[0]) + NEW), len(at))
            wild = self._random.integers(0, 1 << 32, len(at))
            tokens = self._random.integers(0, VOCABULARY, len(at))
            words[at] = np.choose(self._random.integers(0, 3, len(at)), [plausible, wild, tokens])
        self.times += 1


@pytest.mark.parametrize("drafts", [1, 2])
def test_random_words_in_the_parts_of_drafts(models, drafts):
    """Before each forward of the target, and all the time in another thread."""
    target, all_drafts, texts = models
    done = threading.Event()
    with Pipeline(target, all_drafts[:drafts], schedule="workers", lookahead=4) as pipe:
        generate_with_all_drafts(pipe, texts)
        block = driver_of(pipe).block
        writers = [Garbage(block, block.parts_of(range(drafts)), seed) for seed in range(2)]

        def go_on() -> None:
            while not done.wait(1e-4):
                writers[1].write()

        thread = threading.Thread(target=go_on)
        thread.start()
        trust(writers[0].write)
        hook = target.register_forward_pre_hook(writers[0].write)
        try:
            calls = 0
            while writers[0].times < trials(ci=400, nightly=10_000):
                generate(pipe, texts, calls % len(PROMPTS))
                calls += 1
        finally:
            hook.remove()
            done.set()
            thread.join()
        assert writers[1].times > 0
        assert block.is_intact
        generate(pipe, texts)  # drafts may have died in the last call
        await_drafts(pipe)
        generate_with_all_drafts(pipe, texts)


# ---- damage that no draft can do


@pytest.mark.filterwarnings("ignore:draft stage . failed")
@pytest.mark.parametrize("schedule", ["lockstep", "workers"])
def test_damage_of_the_header_ends_the_call(models, schedule):
    target, drafts, _ = models
    with Pipeline(target, drafts, schedule=schedule) as pipe:

        def damage() -> None:
            driver_of(pipe).block.memory.array[8:128] = 255

        with pytest.raises(RuntimeError, match="the state block"):
            pipe.generate(PROMPTS[0][None], max_new_tokens=NEW, do_sample=False, streamer=Recorder(1, damage))
