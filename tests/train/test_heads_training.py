"""Training of draft heads: the forward steps of a batch are those of decoding, and training teaches."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pipespec import Pipeline
from pipespec.cli.main import main
from pipespec.demo import family_path
from pipespec.engine.head import DraftHead, is_head
from pipespec_train import start, trainer
from pipespec_train.heads import HeadStudent, head_for
from pipespec_train.settings import TrainingSettings
from pipespec_train.start import StudentBatch
from pipespec_train.teacher import teacher_forward
from pipespec_train.trainer import TrainingBatch
from tests.conftest import DEVICE, VOCABULARY
from tests.pipespec import heads


@pytest.fixture(scope="module")
def target():
    return heads.make_target()


def batch(number: int) -> TrainingBatch:
    """Texts that count: easy to learn."""
    begin = torch.from_numpy(np.random.default_rng(number).integers(2, 30, (4, 1)))
    ids = begin + torch.arange(24)
    return TrainingBatch(ids, torch.ones_like(ids, dtype=torch.bool))


def batch_of(target, student, ids, valid) -> StudentBatch:
    ids, valid = ids.to(DEVICE), valid.to(DEVICE)
    teacher_output = teacher_forward(target, ids, student.anchors)
    logits = target.lm_head(teacher_output.last)[valid][:, student.columns]
    return StudentBatch(ids, teacher_output.anchors, valid, logits, teacher_output.last)


def test_the_steps_of_a_lesson_are_those_of_decoding(target, tmp_path) -> None:
    weights = heads.make_weights()
    head = DraftHead.load(heads.write_original(tmp_path, weights), target)
    student = HeadStudent(head, target, steps=3)
    ids = torch.randint(VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(3))
    valid = torch.rand(ids.shape, generator=torch.Generator().manual_seed(4)) < 0.7
    with torch.no_grad():
        batch = batch_of(target, student, ids, valid)
        steps = list(student.simulate(batch))
    reference = heads.Reference(weights, target.get_input_embeddings().weight.detach().cpu())
    row_of = torch.full(ids.shape, -1)
    row_of[valid] = torch.arange(int(valid.sum()))
    for step, (logits, teacher_logits) in enumerate(steps):
        found = iter(zip(logits, teacher_logits, strict=True))
        for row in range(2):
            for slot in range(11 - step):
                if row_of[row, slot + 1 + step] < 0:
                    continue
                got, want = next(found)
                features = batch.anchors[row, : slot + 1].flatten(-2).cpu()
                expected = reference.chain(features, ids[row, : slot + 2 + step].tolist())
                torch.testing.assert_close(got.double().cpu(), expected, atol=2e-4, rtol=2e-4)
                # The target's logits after the same token.
                assert torch.equal(want, batch.teacher_logits[row_of[row, slot + 1 + step]])
        assert next(found, None) is None


def test_a_new_head_has_the_parts_of_the_target(target) -> None:
    head = head_for(target, [3, 5, 8])
    assert torch.equal(head.lm_head.weight, target.lm_head.weight[[3, 5, 8]])
    assert torch.equal(head.norm.weight, target.model.norm.weight)
    assert torch.equal(head.layers[0].mlp.up_proj.weight, target.model.layers[-1].mlp.up_proj.weight)
    with pytest.raises(ValueError, match=r"the new draft head reads the hidden states \[2, 9\]"):
        head_for(target, features=[2, 9])
    with pytest.raises(ValueError, match="at least one forward step"):
        HeadStudent(head, target, 0)


def test_a_head_starts_from_what_the_target_says(target) -> None:
    student = HeadStudent(head_for(target), target, steps=2, is_new=True)
    batches = [batch_of(target, student, b.ids, b.wanted) for b in map(batch, range(20))]
    settings = TrainingSettings(steps=1)
    before = student.figures(batches, settings)
    student.start(batches)
    after = student.figures(batches, settings)
    assert after["held_out_loss"] < 0.7 * before["held_out_loss"]


def test_attention_starts_as_a_product_with_the_own_slot(target, monkeypatch) -> None:
    """The few rotary frequencies of this small model tell slots apart only where attention is sharp."""
    monkeypatch.setattr(start, "_SHARPNESS", 500.0)
    head, generator = head_for(target), torch.Generator().manual_seed(0)
    inputs = torch.randn(500, 2 * heads.HIDDEN, generator=generator)
    inputs[:, 0] = 1.0  # something that all slots have
    wanted = torch.randn(2 * heads.HIDDEN, 4, generator=generator) @ torch.randn(4, heads.HIDDEN, generator=generator)
    inputs, wanted = inputs.to(DEVICE), wanted.to(DEVICE)
    with torch.no_grad():
        start._attend_to_itself(head, inputs, wanted)
        given = inputs[None, :12]
        rope = head.rotary_emb(given, position_ids=torch.arange(12, device=DEVICE)[None])
        future = torch.full((12, 12), -torch.inf, device=DEVICE).triu(1)[None, None]
        found, _ = head.layers[0].self_attn(hidden_states=given, attention_mask=future, position_embeddings=rope)
    assert (found - given @ wanted).norm() < 0.1 * (given @ wanted).norm()


def test_projections_start_as_the_linear_map_between_anchors() -> None:
    """Each anchor here is one linear map of the one before, so every type can give the deepest one."""
    size, anchors = 8, 3
    projections = torch.nn.ModuleList(torch.nn.Linear(size * (i + 1), size, bias=False) for i in range(anchors))
    config = SimpleNamespace(hidden=size, anchors=tuple(range(anchors)))
    module: Any = SimpleNamespace(config=config, projections=projections, head=projections[0])
    generator = torch.Generator().manual_seed(1)
    streams = [torch.randn(4, 50, size, generator=generator)]
    for _ in range(anchors - 1):
        streams.append(streams[-1] @ torch.randn(size, size, generator=generator) / 3)
    given, valid = torch.stack(streams, 2), torch.rand(4, 50, generator=generator) < 0.8
    nothing = torch.empty(0)
    assert start.fit_projections(module, [StudentBatch(nothing, given, valid, nothing, nothing)]) == valid.sum()
    for kind, projection in enumerate(projections):
        found = projection(given[..., : kind + 1, :].flatten(-2))
        assert (found - given[..., -1, :]).norm() < 0.1 * given[..., -1, :].norm(), kind


def test_nothing_to_start_from(target) -> None:
    student = HeadStudent(head_for(target), target, is_new=True)
    given = batch(0)
    with pytest.raises(ValueError, match="nothing to start from"):
        student.start([batch_of(target, student, given.ids, torch.zeros_like(given.wanted))])


def test_training_teaches_and_the_head_is_used(target, tmp_path) -> None:
    settings = TrainingSettings(steps=60, rate=3e-3, validate_every=30)
    held = [batch(1000)]
    student = HeadStudent(head_for(target), target, steps=2, is_new=True)
    before = student.figures([batch_of(target, student, held[0].ids, held[0].wanted)], settings)
    record = trainer.train(target, student, batch, settings, tmp_path, held_out=held)
    after = record["history"][-1]
    assert after["held_out_loss"] < 0.7 * before["held_out_loss"]
    assert after["agreement"] > before["agreement"]
    assert {"agreement", "agreement_2"} <= after.keys()
    assert is_head(tmp_path)
    prompt = batch(7).ids[:1].to(DEVICE)
    with Pipeline(target, tmp_path, lookahead=2) as pipe:
        found = pipe.generate(prompt, max_new_tokens=12, do_sample=False)
        assert torch.equal(found, target.generate(prompt, max_new_tokens=12, do_sample=False))


def test_speculators_loads_what_was_trained(target, tmp_path) -> None:
    pytest.importorskip("speculators", reason="the package speculators is not installed")
    from speculators import SpeculatorModel

    home = tmp_path / "target"
    target.save_pretrained(home)
    target.config._name_or_path = str(home)
    head = head_for(target, range(50, 150))
    head.save(tmp_path / "head", target)
    loaded = SpeculatorModel.from_pretrained(str(tmp_path / "head"))
    theirs, ours = loaded.state_dict(), head.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert torch.equal(torch.arange(100) + theirs["d2t"], torch.arange(50, 150))
    assert torch.equal(theirs["embed_tokens.weight"], target.get_input_embeddings().weight)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The number of tokens that a draft proposes is chosen before each round. " * 60)
    words = ["train-draft", "--target", str(family_path("target")), "--data", str(text)]
    words += ["--length", "32", "--batch", "2", "--validation", "0.2", "--out"]
    head = [*words, str(tmp_path / "head"), "--vocabulary", "20", "--forward-steps", "2", "--steps"]
    assert main([*head, "2"]) == 0, capsys.readouterr().err
    assert is_head(tmp_path / "head")
    assert json.loads((tmp_path / "head" / "config.json").read_text())["draft_vocab_size"] == 20
    assert main([*head, "3"]) == 2
    assert "continue with --resume" in capsys.readouterr().err
    assert main([*head, "3", "--resume"]) == 0
    for more, message in (
        (["--stages", "2"], "--stages is for --kind spd"),
        (["--kind", "spd", "--stages", "2", "--forward-steps", "2"], "--forward-steps is for --kind eagle3"),
        (["--forward-steps", "0"], "--forward-steps must be at least 1"),
        (["--states-of", str(family_path("small"))], "is another model than --target"),
    ):
        assert main([*words, str(tmp_path / "x"), "--steps", "1", *more]) == 2
        assert message in capsys.readouterr().err
