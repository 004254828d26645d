"""Training: the loss, the figures, the loop and its errors."""

import copy
import itertools
import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from pipespec_spd import SpeculativePipeline
from pipespec_spd.draft_module import WEIGHTS_FILE, DraftModule, DraftModuleConfig
from pipespec_spd.partition import Partition
from pipespec_train import students
from pipespec_train import trainer as training
from pipespec_train.acceptance import Acceptance, acceptance_along, replay
from pipespec_train.settings import TrainingSettings
from pipespec_train.students import loss_of
from pipespec_train.teacher import teacher_forward
from pipespec_train.trainer import TrainingBatch
from tests.conftest import VOCABULARY, random_llama
from tests.spd.replay import Machine
from tests.support.forks import ran
from tests.waiting import SECONDS


def fresh(target: LlamaForCausalLM, n: int = 3, **how) -> DraftModule:
    stages = Partition.uniform(target.config.num_hidden_layers, n).ranges
    return DraftModule.of_target(target, DraftModuleConfig.for_target(target, stages, **how))


@pytest.fixture(scope="module")
def six() -> LlamaForCausalLM:
    return random_llama(2, layers=6)


# ---- teacher, loss


def test_features_are_the_residual_streams(six: LlamaForCausalLM) -> None:
    ids = torch.randint(2, VOCABULARY, (2, 9))
    teacher_forward(six, ids, (0, 2, 6))
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in six.model.layers)
    with torch.no_grad():
        expected = six(ids, output_hidden_states=True)
        teacher_output = teacher_forward(six, ids, (0, 2, 5))
        for column, index in enumerate((0, 2, 5)):
            assert torch.equal(teacher_output.anchors[:, :, column], expected.hidden_states[index])
        assert torch.allclose(six.lm_head(teacher_output.last), expected.logits)
        # transformers' last hidden state comes after the final norm, and the residual stream at L before it.
        raw = teacher_forward(six, ids, (6,)).anchors[:, :, 0]
        assert torch.allclose(six.model.norm(raw), expected.hidden_states[6])


def test_loss_is_the_mean_divergence_of_valid_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 2, 5, 7, generator=generator)
    valid = torch.tensor([[True, False, True, True, False], [False] * 5])
    for temperature, weight in ((1.0, 0.0), (2.0, 0.0), (1.0, 0.5)):
        total = 0.0
        for row, at in valid.nonzero().tolist():
            p = np.exp(teacher[row, at].double().numpy() / temperature)
            q = np.exp(student[row, at].double().numpy() / temperature)
            p, q = p / p.sum(), q / q.sum()
            total += float((p * np.log(p / q)).sum()) * temperature**2 - weight * float(np.log(q[p.argmax()]))
        assert loss_of(student[valid], teacher[valid], temperature, weight).item() == pytest.approx(total / 3, rel=1e-5)
    assert loss_of(student[valid & False], teacher[valid & False]).item() == 0.0
    assert loss_of(teacher[valid], teacher[valid]).item() == pytest.approx(0.0, abs=1e-6)


# ---- acceptance


def decoded(right: np.ndarray, first: int) -> Acceptance:
    """The same counts from the machine, cycle by cycle, until the text's last token is verified."""
    n, length = right.shape
    machine, drafted = Machine(n, first), {first: True}
    verified, accepted, cycles, committed = 0, 0, 0, first
    while committed < length:
        newest, fill = max(machine.depth), len(machine.depth)
        # A draft after a wrong one, or past the text, may be anything, because it is never verified.
        drafted[newest + 1] = bool(newest < length and right[fill - 1, newest])
        oldest = min(machine.depth)
        cycles += 1
        good = drafted.get(oldest + 1, False)
        machine.cycle(good)
        if fill == n:
            verified, accepted, committed = verified + 1, accepted + good, oldest + 1
            drafted[oldest + 1] = True
    return Acceptance(verified, accepted, cycles, committed - first)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_counts_are_those_of_decoding(n: int) -> None:
    draw = np.random.default_rng(n)
    for length in (1, 2, n, 40):
        for often in (0.0, 0.4, 0.8, 1.0):
            right = draw.random((n, length)) < often
            for first in (0, length // 2):
                assert replay(right, first) == decoded(right, first)


@pytest.mark.parametrize("n", [2, 4])
def test_acceptance_along_a_text_is_that_of_decoding_it(n: int, tmp_path: Path) -> None:
    """One forward over the finished text gives the counts of a real speculative run, with its wrong drafts, flushes and fills."""
    target = random_llama(n, layers=4)
    prompt = torch.tensor([[5, 9, 33, 7]])
    ids = target.generate(prompt, max_new_tokens=41, do_sample=False)
    # Training is just long enough that some drafts are right.
    trained = TrainingBatch(ids, torch.ones_like(ids, dtype=torch.bool))
    module = fresh(target, n)
    training.train(target, module, lambda number: trained, TrainingSettings(steps=20, rate=3e-3), tmp_path)
    pipe = SpeculativePipeline(target, tmp_path, stages=n)
    assert torch.equal(pipe.generate(prompt, max_new_tokens=41, do_sample=False), ids)
    along, report = acceptance_along(target, module, ids, [4], [ids.shape[1]]), pipe.report
    assert along == Acceptance(report.checked, report.accepted, report.cycles, 40)
    assert 0 < along.accepted < along.verified


# ---- the loop


def lines(number: int, rows: int = 4, length: int = 24) -> TrainingBatch:
    """Short cycles of tokens: easy to learn."""
    generator = torch.Generator().manual_seed(number)
    start = torch.randint(2, 40, (rows, 1), generator=generator)
    ids = 2 + (start + 3 * torch.arange(length)) % 50
    return TrainingBatch(ids, torch.ones(rows, length, dtype=torch.bool))


QUICK = TrainingSettings(steps=24, rate=2e-3, validate_every=12, save_every=12, seed=3)


def test_training_lowers_the_loss_and_leaves_the_target_alone(six: LlamaForCausalLM, tmp_path: Path) -> None:
    before = {name: p.clone() for name, p in six.state_dict().items()}
    for optimizer in ("adamw", "muon"):
        module, folder = fresh(six), tmp_path / optimizer
        norm = module.norm.weight.clone()
        held = [lines(1000)]
        settings = replace(QUICK, optimizer=optimizer)
        record = training.train(six, module, lines, settings, folder, held_out=held)
        first, last = record["history"][0], record["history"][-1]
        assert (record["steps"], len(record["history"])) == (24, 3)
        assert last["held_out_loss"] < 0.95 * first["held_out_loss"]
        assert last["agreement"] > first["agreement"]
        assert {"agreement_1", "agreement_2"} <= set(last)
        assert torch.equal(module.norm.weight, norm)
        loaded = DraftModule.load(folder, target=six)
        assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), module.parameters(), strict=True))
        assert json.loads((folder / training.RECORD).read_text())["history"] == record["history"]
    assert all(torch.equal(before[name], p) for name, p in six.state_dict().items())


def test_small_updates_of_a_bf16_target_s_module_are_kept(six: LlamaForCausalLM, tmp_path: Path) -> None:
    """Weights are float32 whatever the target's dtype, so a step that bf16 would round away has an effect. A bf16 module is refused."""
    target = copy.deepcopy(six).to(torch.bfloat16)
    module = fresh(target)
    before = module.head.weight.detach().clone()
    training.train(target, module, lines, replace(QUICK, steps=1, rate=1e-6), tmp_path)
    moved = module.head.weight != before
    assert moved.float().mean() > 0.5
    assert (module.head.weight[moved].bfloat16() == before[moved].bfloat16()).float().mean() > 0.9
    with pytest.raises(ValueError, match=r"bfloat16 cannot be trained"):
        training.train(target, module.to(torch.bfloat16), lines, QUICK, tmp_path)


def killed_by_the_system(whole: str, cut: str) -> None:
    """A process that trains to the end, then again until the kernel ends it during step 15, after the checkpoint of step 12."""

    def batch(number: int) -> TrainingBatch:
        if number == 30:
            os.kill(os.getpid(), signal.SIGKILL)
        return lines(number)

    train_with_dropout(whole, lines)
    train_with_dropout(cut, batch)


def train_with_dropout(folder: str, batch: Any, **how: Any) -> None:
    torch.set_num_threads(1)
    torch.rand(5)  # the generator of a process is anywhere
    target = random_llama(2, layers=6)
    training.train(target, fresh_with_dropout(target), batch, PUBLISHED, Path(folder), held_out=[lines(1000)], **how)


PUBLISHED = replace(QUICK, rate_schedule="linear", warmup=3, accumulate=2)


def fresh_with_dropout(target: LlamaForCausalLM) -> DraftModule:
    """Its forward draws from torch's generator."""
    module = fresh(target, layers=2)  # the last block, of which training needs one depth only, has none
    for layer in module.layers:
        layer.self_attn.attention_dropout = 0.1
    return module


def test_a_killed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Both runs have processes of their own: the state in which other tests leave this one has no part in them."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    code = "import sys; from tests.train.test_training import *; {}"

    ended = ran("-c", code.format("killed_by_the_system(*sys.argv[1:])"), whole, cut, timeout=SECONDS)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    saved = torch.load(cut / training.CHECKPOINT, weights_only=True)
    assert (saved["step"], saved["position"]) == (12, 24)
    ended = ran("-c", code.format("train_with_dropout(sys.argv[1], lines, resume=True)"), cut, timeout=SECONDS)
    assert ended.returncode == 0, ended.stderr
    assert (cut / WEIGHTS_FILE).read_bytes() == (whole / WEIGHTS_FILE).read_bytes()
    record, expected = (json.loads((folder / training.RECORD).read_text()) for folder in (cut, whole))
    assert record["tokens"] == expected["tokens"] == 24 * 2 * lines(0).ids.numel()
    for a, b in zip(record["history"], expected["history"], strict=True):
        assert a | {"seconds": 0} == b | {"seconds": 0}


def test_a_checkpoint_is_written_when_its_time_has_come(six: LlamaForCausalLM, tmp_path: Path) -> None:
    """The time between checkpoints is a setting. Without a number of steps it is the only one."""

    def steps_of_checkpoints(folder: Path, **how: Any) -> list[int | None]:
        """The step of the checkpoint that exists when each of four steps begins."""
        found: list[int | None] = []

        def batch(number: int) -> TrainingBatch:
            file = folder / training.CHECKPOINT
            found.append(torch.load(file, weights_only=True)["step"] if file.is_file() else None)
            return lines(number)

        training.train(six, fresh(six), batch, replace(QUICK, steps=4, **how), folder)
        return found

    never, always = 1e9, 1e-9
    assert steps_of_checkpoints(tmp_path / "a", save_every=None, save_minutes=always) == [None, 1, 2, 3]
    assert steps_of_checkpoints(tmp_path / "b", save_every=None, save_minutes=never) == [None] * 4
    assert steps_of_checkpoints(tmp_path / "c", save_every=2, save_minutes=never) == [None, None, 2, 2]
    with pytest.raises(ValueError, match="save_minutes must be above 0"):
        replace(QUICK, save_minutes=0.0)


def test_what_cannot_be_resumed(six: LlamaForCausalLM, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing to resume"):
        training.train(six, fresh(six), lines, QUICK, tmp_path, resume=True)
    training.train(six, fresh(six), lines, replace(QUICK, steps=1), tmp_path)
    with pytest.raises(ValueError, match="belongs to another module"):
        training.train(six, fresh(six, 2), lines, QUICK, tmp_path, resume=True)
    with pytest.raises(ValueError, match="belongs to other data"):
        training.train(six, fresh(six), lines, QUICK, tmp_path, resume=True, data="another digest")
    with pytest.raises(ValueError, match="another optimizer, or with a head"):
        training.train(six, fresh(six), lines, replace(QUICK, freeze_head=True), tmp_path, resume=True)


def test_a_line_tells_the_time_that_remains(
    six: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training, "SAY_EVERY_S", 0.0)
    training.train(six, fresh(six), lines, replace(QUICK, steps=2, validate_every=2), tmp_path)
    first, last = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"pipespec: step 1, [\d,]+ tokens, \d+ s, about \d+ s left: loss [\d.]+", first)
    assert "step 2, " in last
    assert "left" not in last


def test_a_token_budget_ends_the_run(six: LlamaForCausalLM, tmp_path: Path) -> None:
    """The step that reaches the budget is the last one. Padding does not count."""
    per_step = lines(0).ids.numel()

    def padded(number: int) -> TrainingBatch:
        return lines(number)._replace(tokens=per_step - 6)

    budget = replace(QUICK, steps=None, tokens=3 * (per_step - 6) + 1)
    record = training.train(six, fresh(six), padded, budget, tmp_path)
    assert (record["steps"], record["tokens"]) == (4, 4 * (per_step - 6))


def test_a_frozen_head_keeps_the_target_s_weights(six: LlamaForCausalLM, tmp_path: Path) -> None:
    for optimizer in ("adamw", "muon"):
        module = fresh(six)
        settings = replace(QUICK, steps=2, freeze_head=True, optimizer=optimizer)
        record = training.train(six, module, lines, settings, tmp_path / optimizer)
        assert torch.equal(module.head.weight, six.lm_head.weight)
        assert not torch.equal(module.projections[0].weight, fresh(six).projections[0].weight)
        assert record["parameters"] == sum(p.numel() for p in module.parameters() if p.requires_grad)


def test_learning_rates() -> None:
    """As published: linear from the peak, which the warm-up reaches, to 0. The other form is half a cosine."""
    assert TrainingSettings(steps=1000, warmup=100, rate_schedule="linear").warmup_share == 0.1
    rates = [training.learning_rate(step / 1000, 0.1, "linear") for step in range(1001)]
    assert rates[50] == pytest.approx(0.5)
    assert rates[100] == 1.0
    assert rates[550] == pytest.approx(0.5)
    assert rates[1000] == 0.0
    assert all(a > b for a, b in itertools.pairwise(rates[100:]))
    cosine = [training.learning_rate(step / 1000, 0.0005) for step in range(1001)]
    assert cosine[0] == 0.05
    assert max(cosine) <= 1.0
    assert cosine[-1] == pytest.approx(0.01)


def test_nothing_to_learn_is_an_error(six: LlamaForCausalLM, tmp_path: Path) -> None:
    with torch.no_grad():
        said = set(six(lines(0).ids).logits.argmax(-1).flatten().tolist())
    never = [t for t in range(VOCABULARY) if t not in said][:5]

    def same(number: int) -> TrainingBatch:
        return lines(0)

    many = replace(QUICK, steps=60)
    with pytest.raises(ValueError, match="nothing to learn in 50 steps"):
        training.train(six, fresh(six, vocabulary=never), same, many, tmp_path)
    silent = TrainingBatch(lines(0).ids, torch.zeros(4, 24, dtype=torch.bool))
    with pytest.raises(ValueError, match="nothing to learn in 50 steps"):
        training.train(six, fresh(six), lambda number: silent, many, tmp_path)
    with pytest.raises(ValueError, match="nothing to validate on"):
        training.train(six, fresh(six), lines, QUICK, tmp_path, held_out=[silent])


def test_only_wanted_tokens_are_learnt(six: LlamaForCausalLM, tmp_path: Path) -> None:
    """Unwanted tokens have no influence: other tokens after the last wanted one give the same result."""

    def half(number: int, tail: int) -> TrainingBatch:
        ids = lines(number).ids.clone()
        ids[:, 12:] = tail
        wanted = torch.zeros_like(ids, dtype=torch.bool)
        wanted[:, 4:11] = True
        return TrainingBatch(ids, wanted)

    modules = [fresh(six), fresh(six)]
    for module, tail in zip(modules, (5, 99), strict=True):
        training.train(six, module, lambda number, tail=tail: half(number, tail), replace(QUICK, steps=3), tmp_path)
    for a, b in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_heads_compute_only_what_is_learnt(six: LlamaForCausalLM, tmp_path: Path) -> None:
    """With a large vocabulary, logits of the other positions would be the larger part of a step and of its memory."""
    module, ids = fresh(six), lines(0).ids
    anchors = teacher_forward(six, ids, module.config.anchors).anchors
    wanted = torch.zeros(ids.shape, dtype=torch.bool)
    wanted[0, 2:5] = wanted[-1, 4] = True
    with torch.no_grad():
        for fill in (1, 2, 3):
            found = students.simulate(module, anchors, fill, wanted)
            assert torch.allclose(found, students.simulate(module, anchors, fill)[wanted], atol=1e-5)
    rows: list[int] = []
    handles = [
        head.register_forward_hook(lambda _, inputs, __: rows.append(inputs[0][..., 0].numel()))
        for head in (six.lm_head, module.head)
    ]
    training.train(six, module, lambda _: TrainingBatch(ids, wanted), replace(QUICK, steps=2), tmp_path)
    for handle in handles:
        handle.remove()
    assert rows == [4] * 4


def test_a_loss_that_is_not_finite(six: LlamaForCausalLM, tmp_path: Path) -> None:
    module = fresh(six)
    with torch.no_grad():
        module.head.weight[3] = torch.nan
    with pytest.raises(RuntimeError, match="the loss is nan at step 0"):
        training.train(six, module, lines, QUICK, tmp_path)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"minutes": 1.0}, "exactly one of steps, tokens and minutes"),
        ({"steps": None}, "exactly one of steps, tokens and minutes"),
        ({"steps": 0}, "at least one step"),
        ({"steps": None, "tokens": 0}, "at least one step, one token"),
        ({"rate_schedule": "constant"}, "no rate schedule 'constant': cosine or linear"),
        ({"warmup": 24}, "fewer steps than the run has"),
        ({"steps": None, "tokens": 9, "warmup": 2}, "takes a share"),
        ({"clip": 0.0}, "clip must be above 0"),
        ({"decay": -0.1}, "decay must be at least 0"),
        ({"rate": 0.0}, "rate must be above 0"),
        ({"full": 1.5}, "full is a share"),
        ({"accumulate": 0}, "accumulate must be at least 1"),
        ({"optimizer": "sgd"}, "no optimizer 'sgd'"),
    ],
)
def test_wrong_settings(wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(QUICK, **wrong)
