"""Ranks: the same text as in one process, each rank with its own layers. No rank hangs, whatever happens to the others.

A harness that has imported everything forks the processes. One test starts them with torchrun itself.
"""

import os
import random
import signal
import socket
import subprocess
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from pipespec.api.base import BasePipeline
from pipespec.checks.devices import rank_device
from pipespec.demo import load_family
from pipespec.process import ranks as transport
from pipespec.process.ranks import RankError, Ranks
from pipespec_spd import SpeculativePipeline
from pipespec_spd import ranks as module
from pipespec_spd.draft_module import DraftModule, DraftModuleConfig
from pipespec_spd.link import Link
from pipespec_spd.ranks import RanksPipeline, ranks_of
from tests.conftest import random_llama
from tests.spd.drafters import Blind
from tests.spd.ranks_harness import LAYERS, calls, made
from tests.support.processes import ENVIRONMENT, program
from tests.support.ways import driver_of
from tests.trials import trials
from tests.waiting import SECONDS, own_lines, until


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    random_llama(3, layers=LAYERS).save_pretrained(folder)
    return folder


CASES = [
    *(
        f"{case}:float32"
        for case in ("3:2:model", "2:2:ngram", "3:3:reader", "1:1:reader", "3:2:{module}", "2:2:{module}")
    ),
    "3:2:ngram:bfloat16",
]
PHASES = ["connect:kill:1", "load:interrupt:1", "prefill:raise:1", "cycle9:interrupt:1", "end:kill:1", "second:kill:0"]
PHASES += ["load:kill:0", "prefill:kill:2", "cycle9:raise:2", "end:raise:0"][: trials(ci=0, nightly=4)]
draw, KILLS = random.Random(3), trials(ci=2, nightly=50)
PHASES += [
    f"cycle{draw.randrange(4, 28)}:{'stop' if left % 5 == 1 else 'kill'}-soon:{draw.randrange(3)}"
    for left in range(KILLS, 0, -1)
]
MISSING = "model.layers.2.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def incomplete(folder, tmp_path_factory):
    """A model that lacks a weight of the second stage."""
    path = tmp_path_factory.mktemp("incomplete")
    weights = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in weights.items() if k != MISSING}, path / "model.safetensors")
    (path / "config.json").write_text((folder / "config.json").read_text())
    return path


@pytest.fixture(scope="module")
def drafting(folder, tmp_path_factory):
    """An untrained draft module for two stages: the target's own weights, and noise in the rest."""
    path = tmp_path_factory.mktemp("module")
    target = LlamaForCausalLM.from_pretrained(folder)
    torch.manual_seed(1)
    DraftModule.of_target(target, DraftModuleConfig.for_target(target, ((0, 2), (2, 3)))).save(path)
    return path


@pytest.fixture(scope="module")
def cases(drafting):
    return [case.format(module=drafting) for case in CASES]


@pytest.fixture(scope="module")
def found(folder, incomplete, cases):
    """The harness's output by command, line by line. Three commands run at once, because the ranks of many of them wait for time limits."""
    commands = {
        "texts": [folder, *cases],
        "phases": [folder, *PHASES],
        "fail": [incomplete],
        **{name: [folder] for name in ("late", "slow", "twice", "differ", "behind", "interrupted")},
    }
    timeout = 1200 + 130 * KILLS
    with ThreadPoolExecutor(3) as threads:
        lines = threads.map(
            lambda c: program("tests.spd.ranks_harness", *c, timeout=timeout), [(n, *w) for n, w in commands.items()]
        )
        return dict(zip(commands, lines, strict=True))


def test_the_text_of_one_process(folder, cases, found):
    """n + 1 ranks, n ranks, one rank; several calls on the same ranks; streams that come from all of them."""
    for case, ((status, texts), *_) in zip(cases, found["texts"], strict=True):
        assert status == 0, texts
        _, stages, kind, dtype = case.split(":")
        pipeline = SpeculativePipeline(folder, made(kind), stages=int(stages), dtype=dtype)
        for (ids, options), (text, cycles, accepted, sums, busy, form, chunks) in zip(  # noqa: B007
            calls(), texts, strict=True
        ):
            wanted = pipeline.generate(ids, **options)
            assert text == (wanted if isinstance(wanted, torch.Tensor) else wanted.sequences).tolist(), case
            assert (cycles, accepted) == (pipeline.report.cycles, pipeline.report.accepted)
            assert busy == int(stages)
            assert form == pipeline.report.stages[0].forward == "native"
            if kind == "reader":
                seen = sorted(pipeline.drafter.sums.items())
                assert [key for key, _ in sums] == [list(key) for key, _ in seen]
                assert [value for _, value in sums] == pytest.approx([value for _, value in seen], abs=1e-5)
            else:
                assert sums == []
            if os.sep in kind:
                assert pipeline.report.drafter == "ModuleDrafter"
                assert pipeline.report.checked > 0 or cycles == 0
        # The two chunks of the third call's prompts were under way together, whatever the drafter reads.
        assert chunks == (2 if int(stages) > 1 else 0), case
        if kind == "model":
            assert accepted > 0 or cycles == 0


def test_torchrun():
    """The command line under torchrun: rank 0 prints the text that one process prints. Two ranks, because the imports of each take seconds; at night three."""
    ranks = trials(ci=2, nightly=3)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "pipespec", "generate", "--system", "spd", "--draft", "ngram", "--stages", "4,8"]
    command += ["--prompt", "def mean(values):", "--max-new-tokens", "20", "--report"]
    command += ["--temperature", "0.7", "--seed", "3"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=3 * SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    family = load_family()
    pipeline = SpeculativePipeline(family.target, "ngram", stages=[4, 8], dtype=torch.float32)
    ids = family.encode("def mean(values):")
    options = {"do_sample": True, "temperature": 0.7, "top_k": 0, "seed": 3}
    wanted = pipeline.generate(ids, max_new_tokens=20, **options)
    text = family.tokenizer.decode(wanted[0, ids.shape[1] :], skip_special_tokens=True)
    assert own_lines(done.stdout) == text.splitlines()
    assert f"{pipeline.report.accepted} of {pipeline.report.checked} drafts accepted" in done.stderr


def test_a_rank_that_cannot_load(found, incomplete):
    """All ranks report which one failed, and why."""
    (ranks,) = found["fail"]
    assert len(ranks) == 3
    for status, words in ranks:
        assert status == 1
        assert f"rank 2 failed: ValueError: {incomplete}: its safetensors lack {MISSING}" in words


def test_a_rank_that_hangs(found):
    """Its process sends heartbeats and no messages: all three ranks end, that one included."""
    (ranks,) = found["late"]
    assert [status for status, _ in ranks] == [1, 1, 1]
    assert any("rank 2" in words and "took too long, more than " in words for _, words in ranks)
    assert any("raise timeout_s, on the command line --timeout" in words for _, words in ranks)
    assert all(words for _, words in ranks)


def test_a_rank_that_ends_at_any_place(found):
    """A rank is killed, stopped, interrupted or fails while the ranks connect or load, in the prompt, in a cycle, at the end of a call, in the next
    call. The others end by themselves with a status other than 0, and report why."""
    for case, ranks in zip(PHASES, found["phases"], strict=True):
        _, how, victim = case.split(":")
        for rank, (status, words) in enumerate(ranks):
            if rank == int(victim):
                assert status == {"kill": -signal.SIGKILL, "stop": -signal.SIGSTOP}.get(how.partition("-")[0], 1), case
            else:
                assert status == 1, (case, ranks)
                assert "rank" in words, (case, ranks)
        others = " ".join(words for rank, (_, words) in enumerate(ranks) if rank != int(victim))
        if how == "raise":
            assert "made to fail" in others, case
        if how == "interrupt":
            assert "KeyboardInterrupt" in others, case


def test_a_long_prompt_on_slow_stages(folder, found):
    """``timeout_s`` limits a chunk in a stage, not the whole prompt."""
    ((first, *others),) = found["slow"]
    ids = torch.tensor([list(range(2, 22))])
    wanted = SpeculativePipeline(folder, stages=2).generate(ids, max_new_tokens=4, do_sample=False)
    assert first == [0, wanted[0].tolist()]
    assert others == [[0, None], [0, None]]


def test_one_pipeline_after_another(folder, found):
    """In the same processes, a later pipeline does not use keys or addresses of an earlier one."""
    wanted = SpeculativePipeline(folder, stages=2).generate(torch.tensor([[5, 6]]), max_new_tokens=5, do_sample=False)
    assert found["twice"] == [[[0, [wanted[0].tolist()] * 2], [0, []], [0, []]]]


def test_ranks_that_were_started_differently(found):
    """All ranks report the difference."""
    (ranks,) = found["differ"]
    for status, words in ranks:
        assert status == 1
        assert "all ranks need the same stages: rank 0 has [1, 2], rank 2 has [2, 1]" in words


def test_a_rank_that_comes_late_or_never(found):
    late, never = found["behind"]
    assert [status for status, _ in late] == [0, 0, 0]
    assert len(late[0][1]) == 7
    (first, words), (second, others), _ = never
    assert first == second == 1
    assert "not all ranks have come within 1 s" in words
    # "waiting until all ranks start took too long", or rank 0 had ended before it was there
    assert "all ranks" in others


def test_interrupted_at_every_message(folder, found):
    """Ctrl-C, or a signal with a handler, while rank 0 sends or receives ends the call, and so does a lack of memory. The next call has its whole text."""
    ((first, *others),) = found["interrupted"]
    status, (text, messages, stopped) = first
    wanted = SpeculativePipeline(folder, stages=2).generate(
        torch.tensor([[5, 6, 7, 8, 9]]), max_new_tokens=3, do_sample=False
    )
    assert (status, text) == (0, wanted[0].tolist())
    assert stopped == messages + 1 > 20
    assert others == [[0, None], [0, None]]


def test_an_address_that_cannot_be_used(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        values = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}  # fmt: skip
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(RankError, match=rf"MASTER_PORT={values['MASTER_PORT']} cannot be used: .*in use"):
            Ranks.join({}, 60.0)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    with pytest.raises(RankError, match=r"MASTER_ADDR=no-such-host\.invalid or "):
        Ranks.join({}, 1.0)


def test_a_rank_that_was_stopped_blames_no_other(monkeypatch):
    """A process that was stopped (Ctrl-Z), or whose machine was suspended, sees a jump of its clock. The other ranks are not late."""
    ranks = Ranks(dist.HashStore(), 0, 2, 1e6)
    ranks.stop()
    stopped, now = 3600.0, time.monotonic()
    ranks.deadline = ranks.now() + 60.0, "waiting for rank 1 took too long"
    monkeypatch.setattr(transport.time, "monotonic", lambda: now + stopped)
    assert ranks.late() is not None
    ranks.suspended_s += stopped
    assert ranks.late() is None
    ranks.suspended_s -= 30
    assert "store does not answer" in ranks.late()
    ranks.suspended_s -= 120
    assert "waiting for rank 1 took too long" in ranks.late()


def test_signs_of_life_go_on_while_a_link_closes():
    """Outstanding sends may take a timeout each. Without signs of life the other ranks would take this one for lost."""
    store, waited = dist.HashStore(), []
    link = Link(store, 0, 1)
    link.watch(waited.append)

    class Send:
        def wait(self, timeout):
            assert timeout.total_seconds() == link.timeout_s
            link.cause = "rank 1 failed"  # watched, it would end this process
            before = store.get("beat/0")
            until(lambda: store.get("beat/0") != before, "there is a sign of life")
            waited.append(timeout)

    link._sends += [(Send(), torch.empty(0))] * 8
    link.close()
    assert len(waited) == 8
    assert isinstance(waited[-1], timedelta)


@pytest.mark.parametrize("leave", [lambda ranks: ranks.failed("made to fail"), Ranks.leave])
def test_a_store_that_hangs_holds_no_rank_that_ends(monkeypatch, leave):
    """The process that holds the store was stopped. What this rank writes at its end would wait for it forever."""
    monkeypatch.setattr(transport, "SILENCE_S", 0.05)
    monkeypatch.setattr(transport, "GRACE_S", 0.05)
    ranks, ended = Ranks(dist.HashStore(), 0, 1), []
    ranks.watch(ended.append)

    def hangs(*arguments):
        until(lambda: ended, "the process would end")
        raise ArithmeticError

    ranks._store = types.SimpleNamespace(set=hangs, compare_set=hangs, check=lambda names: True)
    leave(ranks)
    ranks.stop()
    (words,) = ended
    assert words.startswith("pipespec: rank 0 ends: ")


class Broken:
    """A link whose connections have broken."""

    broken, world = False, 3

    def __init__(self):
        self.sent, self.closed = [], 0

    def send(self, tensor, to, tag):
        self.sent.append(to)
        raise RankError("rank 1: sending to rank 1: the connection broke, it has ended")

    def close(self):
        self.closed += 1


def test_what_a_lost_rank_leaves_open():
    """Drafter and group are closed, although no rank can be told, and the drafter fails."""

    class Driver:
        closed = 0

        def close(self):
            self.closed += 1
            raise ArithmeticError("made to fail")

    pipe = object.__new__(RanksPipeline)
    BasePipeline.__init__(pipe, [])
    pipe._link, pipe._driver, pipe.has_target = Broken(), Driver(), True
    with pytest.raises(ArithmeticError):
        pipe.close()
    assert pipe._link.sent == [1, 2]
    assert (driver_of(pipe).closed, pipe._link.closed) == (1, 1)


# ---- refused before anything is loaded or connected


@pytest.fixture
def no_work(monkeypatch):
    def started(*args, **kwargs):
        raise AssertionError("it went on")

    for name in ("Link", "load_stage", "load_ends", "resolve_drafter"):
        monkeypatch.setattr(module, name, started)


class TooDeep(Blind):
    features = (LAYERS + 1,)


REFUSED = [
    (4, {"stages": 2}, ValueError, "2 stages need 3 ranks, or 2 with the first stage on the rank of the drafter; there are 4"),
    (2, {"stages": 3}, ValueError, "3 stages need 4 ranks, .* there are 2"),
    (5, {"stages": 4}, ValueError, "3 layers can be cut into 1 to 3 stages, not 4"),
    (3, {"stages": 2, "drafter": TooDeep(320)}, ValueError, "no residual stream 4"),
    (3, {"stages": [1, 2], "drafter": "module"}, ValueError, "was trained for the stages"),
    (3, {"stages": 2, "drafter": "module", "target": "other"}, ValueError, "another target"),
    (3, {"stages": 2, "target": random_llama(1)}, TypeError, "must be a path"),
    (3, {"stages": 2, "device": "meta"}, ValueError, "stages run on cpu or cuda, not on meta"),
    (3, {"stages": 2, "device": "cuda"}, ValueError, "torch sees no GPU here"),
    (None, {"stages": 2}, ValueError, "start this with torchrun"),
]  # fmt: skip
"""Ranks, arguments, and the error."""


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("world", "options", "error", "match"), REFUSED)
def test_what_does_not_fit(folder, drafting, tmp_path, no_work, monkeypatch, rank, world, options, error, match):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for name, value in {"RANK": rank, "WORLD_SIZE": world}.items() if world else ():
        monkeypatch.setenv(name, str(value))
    random_llama(4, layers=LAYERS).save_pretrained(tmp_path)
    paths = {"module": drafting, "other": tmp_path}
    options = {name: paths.get(value, value) if isinstance(value, str) else value for name, value in options.items()}
    with pytest.raises(error, match=match):
        RanksPipeline(**{"target": folder} | options)


def test_devices(monkeypatch):
    """The rank's own GPU, or the named one. An error names a GPU that does not exist."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("RANK", "1")
    assert [rank_device(device) for device in ("cpu", "cuda", "cuda:0")] == ["cpu", "cuda:1", "cuda:0"]
    with pytest.raises(ValueError, match="device='0' is not a device"):
        rank_device("0")
    monkeypatch.setenv("LOCAL_RANK", "2")
    for device in ("cuda", "cuda:2"):
        with pytest.raises(ValueError, match="device='cuda:2': torch sees 2 GPUs"):
            rank_device(device)


def test_ranks_of_stages():
    assert ranks_of(3, 4) == [1, 2, 3]
    assert ranks_of(3, 3) == [0, 1, 2]
