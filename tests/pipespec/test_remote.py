"""schedule="ranks": the text of the target over gloo, whatever happens to the other ranks."""

import json
import os
import random
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pipespec import NgramDraft, Pipeline, StageFailure
from pipespec.config import SpeculationConfig
from pipespec.engine.stage import ModelDraft
from pipespec.process import ranks as transport
from pipespec.process.ranks import RankError, Ranks, difference
from pipespec.schedules.asynchronous import membership
from pipespec.schedules.asynchronous.remote import SILENT_S, stages_of
from pipespec_kernels import __version__
from pipespec_kernels.state import StateBlock
from tests.conftest import left_pad, noisy, random_prompts
from tests.support.chains import in_process, plain
from tests.support.processes import program
from tests.support.streamers import Recorder
from tests.trials import PROFILE
from tests.waiting import SECONDS, until

NEW = 24


CALLS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "seed": 5, "temperature": 0.8, "top_k": 40, "top_p": 0.95},
    "penalty": {"do_sample": True, "seed": 7, "repetition_penalty": 1.3},
    "ends": {"do_sample": False, "eos_token_id": list(range(2, 300, 9)), "pad_token_id": 0},
}


def test_an_ngram_draft_runs_beside_the_first_model(target, monkeypatch):
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7]])
    drafts = [NgramDraft(), ModelDraft()]
    config = SpeculationConfig.of(drafts, schedule="ranks")
    assert config.lookahead == (8, 8)
    with in_process(monkeypatch, [noisy(target, 0.02), target], drafts=drafts) as (pipe, _):
        out = pipe.generate(ids, max_new_tokens=NEW, do_sample=False)
        assert torch.equal(out, plain(target, ids, max_new_tokens=NEW, do_sample=False))
        assert [stage.name for stage in pipe.report.stages] == ["ngram", "draft 0", "target"]
    assert [*stages_of(1, config)] == [0, 1]
    assert [*stages_of(0, config)] == [2]
    assert [*stages_of(0, SpeculationConfig.of([NgramDraft()], schedule="ranks"))] == [0, 1]


def test_a_rank_0_that_is_connected_and_silent_is_given_up(target, monkeypatch):
    """A fork of it keeps the connection of one that was killed."""
    with in_process(monkeypatch, [noisy(target, 0.02), target]) as (_, chain):
        monkeypatch.setattr(Ranks, "silence", lambda self, rank: SILENT_S + 1)
        chain.threads[1].join(SECONDS)
        (error,) = chain.errors
        assert str(error) == "rank 1: rank 0, the target, has given no sign of life for 300 s"


def test_a_closed_chain_says_what_to_do(target, monkeypatch):
    ids = random_prompts(1, seed=2, longest=9)[0][None]
    options = {"max_new_tokens": NEW, "do_sample": False}
    with in_process(monkeypatch, [noisy(target, 0.02), target]) as (pipe, chain):
        assert torch.equal(pipe.generate(ids, **options), plain(target, ids, **options))
        pipe.close()
        with pytest.raises(RuntimeError, match="start all ranks again"):
            pipe.generate(ids, **options)
    assert not chain.errors


def test_a_draft_that_is_lost_costs_no_token(target, monkeypatch, no_thread_is_left):
    """In the middle of a call. The target goes on without it, and so does its neighbour."""
    ids = random_prompts(1, seed=2, longest=9)[0][None]
    options = {"max_new_tokens": 40, "do_sample": False}
    with in_process(monkeypatch, [noisy(target, 0.1), noisy(target, 0.02), target]) as (pipe, chain):

        def cut():
            chain.cut(2)
            until(lambda: chain.driver.peers[1].failure() is not None, "the loss is noticed")

        with pytest.warns(StageFailure, match=r"draft stage 1 \(rank 2\) is lost \(its connection broke") as caught:
            out = pipe.generate(ids, streamer=Recorder(5, cut), **options)
        assert len(caught) == 1
        assert torch.equal(out, plain(target, ids, **options))
        (lost,) = pipe.report.decisions
        assert "was lost" in lost
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # the user has been told
            assert torch.equal(pipe.generate(ids, **options), out)
    (error,) = chain.errors
    assert "rank 0, the target, is gone (its connection broke" in str(error)


def test_a_silent_draft_is_lost_until_its_next_message(target, monkeypatch):
    ids = random_prompts(1, seed=2, longest=9)[0][None]
    options = {"max_new_tokens": NEW, "do_sample": False}
    with in_process(monkeypatch, [noisy(target, 0.02), target]) as (pipe, _):
        monkeypatch.setattr(transport, "SILENCE_S", -1.0)
        with pytest.warns(
            StageFailure, match=r"is lost \(it has given no sign of life for -?\d+ s\); calls go on without it"
        ):
            out = pipe.generate(ids, **options)
        assert torch.equal(out, plain(target, ids, **options))
        monkeypatch.setattr(transport, "SILENCE_S", 1e9)
        pipe.generate(ids, **options)
        assert "is back" in pipe.report.decisions[0]


# ---- messages


class Copies:
    """A block whose draft publishes, and one that gets its messages."""

    def __init__(self, rows=3, room=40):
        self.blocks = [StateBlock.create(2, rows, 64) for _ in range(2)]
        for block in self.blocks:
            block.reset([4] * rows, [60] * rows, [1] * rows, [])
        self.rows, self.room = rows, room
        self.outboxes = [self.blocks[0].outbox([s], tokens=True, counters=s == 0, controls=s == 1) for s in (0, 1)]
        self.inboxes = [self.blocks[1].inbox([s], controls=s == 1) for s in (0, 1)]
        self.words = np.zeros(self.room, dtype=np.int32)

    def send(self):
        """Messages until nothing is new."""
        for outbox, inbox in zip(self.outboxes, self.inboxes, strict=True):
            while count := outbox.fill(self.words.ctypes.data, self.room):
                assert count <= self.room
                assert inbox.apply(self.words.ctypes.data, count)

    def state(self, i):
        block = self.blocks[i]
        return [
            [block.tokens(s, row, 3, block.length(s, row)) for s in (0, 1) for row in range(self.rows)],
            [block.counters(0, row) for row in range(self.rows)],
        ]


@pytest.mark.parametrize("room", [40, 4096])
def test_a_replica_follows_any_history(room):
    """Random steps of draft and target, random moments of sending: afterwards both blocks have the same sequences and counters."""
    numbers = random.Random(room)
    for _ in range(40 if PROFILE == "nightly" else 8):
        copies = Copies(room=room)
        ports = [copies.blocks[0].port(stage, 8) for stage in (0, 1)]
        for _ in range(80):
            stage = numbers.randrange(2)
            port = ports[stage]
            if port.plan(6, 6 if stage else 0, 0).name == "STEP":
                selected = np.array(
                    [[numbers.randrange(2, 4) for _ in range(8)] for _ in range(copies.rows)], dtype=np.int32
                )
                port.commit(selected.ctypes.data, 8)
            if numbers.random() < 0.3:
                copies.send()
            if numbers.random() < 0.02:
                copies.blocks[0].end_row(numbers.randrange(copies.rows))
        copies.send()
        assert copies.state(0) == copies.state(1)


def test_a_damaged_message_harms_nothing_but_drafts():
    """Records with damaged words never reach outside of the sender's stages, and the replica can be planned with."""
    numbers = random.Random(3)
    for _ in range(200 if PROFILE == "nightly" else 40):
        copies = Copies()
        port = copies.blocks[0].port(0, 8)
        for _ in range(numbers.randrange(1, 5)):
            port.plan(30, 0, 0)
            port.commit(np.full((3, 8), 7, dtype=np.int32).ctypes.data, 8)
        before = copies.blocks[1].memory.array.copy()
        count = copies.outboxes[0].fill(copies.words.ctypes.data, copies.room)
        for _ in range(numbers.randrange(1, 3)):
            copies.words[numbers.randrange(count)] = numbers.choice([-1, 0, 1, 3, 100, 2**31 - 1])
        copies.inboxes[0].apply(copies.words.ctypes.data, numbers.randrange(count + 1))
        assert [copies.blocks[1].length(1, row) for row in range(3)] == [4, 4, 4]
        part = copies.blocks[1].memory.array
        assert (part[:384] == before[:384]).all()  # the caller's header
        target = copies.blocks[1].port(1, 8)
        target.plan(0, 6, 0)
        assert 0 <= int(target.num_draft_tokens.max()) <= 6


# ---- how a chain starts


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"lookahead": [3, 3]},
            "all ranks need the same lookahead: rank 0 has [8, 8], rank 1 has [3, 3]; start all with the same",
        ),
        (
            {"config.json of the draft 1": "x"},
            "all ranks need the same config.json of the draft 1: rank 0 has b, rank 1 has x; start all with the same",
        ),
    ],
)
def test_other_settings_are_refused_by_name(change, message):
    config = SpeculationConfig.of([ModelDraft(), ModelDraft()], schedule="ranks")
    names = ("draft 0", "draft 1", "target")
    terms = json.loads(json.dumps(membership.terms_of(["/a", "/b", "/c"], config)))
    terms |= {f"config.json of the {name}": digest for name, digest in zip(names, "abc", strict=True)}
    # A model that a machine does not have is not compared.
    assert difference([terms, terms | {"config.json of the draft 0": None}, terms]) is None
    assert difference([terms, terms | change]) == message


def test_another_version_is_refused_by_name(monkeypatch):
    here = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "RANK": "0", "WORLD_SIZE": "2"}
    monkeypatch.setattr(os, "environ", os.environ | here)
    monkeypatch.setitem(transport._stores, tuple(here.values()), (dist.HashStore(), 0, 2))
    left = []
    monkeypatch.setattr(Ranks, "__init__", lambda self, *arguments: None)
    monkeypatch.setattr(Ranks, "exchange", lambda self, key, mine, what: [mine, mine.replace(__version__, "0.0.9")])
    monkeypatch.setattr(Ranks, "leave", lambda self: left.append(self))
    with pytest.raises(RankError, match=r"the same version of pipespec: rank 0 has .*, rank 1 has 0\.0\.9; start all"):
        Ranks.join({})
    assert left


def test_a_chain_needs_its_ranks(monkeypatch, target):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="torchrun"):
        Pipeline("/nowhere/target", ["/nowhere/draft"], schedule="ranks")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="a chain of 2 models needs as many ranks, and there are 3"):
        Pipeline("/nowhere/target", ["/nowhere/draft"], schedule="ranks")
    sharded = noisy(target, 0.02)
    sharded._tp_size = 2
    with pytest.raises(ValueError, match="a draft is sharded over processes"):
        Pipeline("/nowhere/target", [sharded], schedule="ranks")
    with Pipeline(target, schedule="plain") as pipe, pytest.raises(RuntimeError, match="call generate"):
        pipe.serve()
    assert membership.device_of_stage({"target": "cpu"}, ["draft 0", "target"], 1) == "cpu"
    assert membership.device_of_stage({"target": "cpu"}, ["draft 0", "target"], 0) is None
    with pytest.raises(ValueError, match="no stage 'draft 7'"):
        membership.device_of_stage({"draft 7": "cpu"}, ["draft 0", "target"], 0)


def test_processes(target, tmp_path):
    """Three processes: several calls, a draft or the target killed in the middle of one, models that do not fit, and wrong methods."""
    paths = []
    for i, model in enumerate([noisy(target, 0.1, 1), noisy(target, 0.02), target]):
        paths.append(tmp_path / str(i))
        model.save_pretrained(paths[-1])
    texts, killed, target_dies, refused, wrong = program("tests.pipespec.ranks_program", *paths)
    ids, mask = left_pad(random_prompts(3, seed=4, longest=9))
    wanted = [plain(target, ids, attention_mask=mask, max_new_tokens=NEW, **o).tolist() for o in CALLS.values()]
    assert texts == [[0, wanted], [0, None], [0, None]]
    (first, said), second, (third, _) = killed
    assert (first, second, third) == (0, [0, None], -9)
    one = torch.tensor([[5, 6, 7]])
    assert said["texts"] == [plain(target, one, max_new_tokens=60, do_sample=False).tolist()] * 2
    (warning,) = said["warnings"]
    assert "draft stage 1 (rank 2) is lost (its connection broke" in warning
    assert [status for status, _ in target_dies] == [-9, 1, 1]
    assert all("RankError: " in error and "rank 0" in error for _, error in target_dies[1:])
    assert all("vocabulary of 100 tokens" in error for _, error in refused), refused
    assert "call serve() there, and generate() on rank 0" in wrong[1][1]
    assert "call generate() here" in wrong[0][1]
