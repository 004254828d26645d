"""The target's hidden states of texts are kept, and each text is read once."""

import pytest
import torch

from pipespec.models.quantizing import quantized
from pipespec_train import teacher
from pipespec_train.heads import HeadStudent, head_for
from pipespec_train.settings import TrainingSettings
from pipespec_train.teacher import KeptStates, teacher_forward
from pipespec_train.trainer import TrainingBatch, train
from tests.conftest import DEVICE, VOCABULARY
from tests.pipespec import heads

ANCHORS = [1, 2]


@pytest.fixture(scope="module")
def target():
    return heads.make_target()


def texts() -> torch.Tensor:
    """Two texts, of which the second one is shorter. A token in the middle is 0, as the padding is."""
    ids = torch.randint(1, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))
    ids[0, 4] = ids[1, 3] = 0
    ids[1, 8:] = 0
    return ids.to(DEVICE)


def test_kept_states_are_those_of_the_target(target, tmp_path, monkeypatch) -> None:
    kept, ids = KeptStates(target, ANCHORS, tmp_path), texts()
    want = teacher_forward(target, ids, ANCHORS)
    choices = target.lm_head(want.last).argmax(-1)
    first = kept(ids)
    monkeypatch.setattr(teacher, "teacher_forward", lambda *_: pytest.fail("a text is read again"))
    for found in (first, kept(ids)):
        for row, length in enumerate((12, 8)):
            torch.testing.assert_close(found.anchors[row, :length], want.anchors[row, :length])
            torch.testing.assert_close(found.last[row, :length], want.last[row, :length])
            assert torch.equal(found.choices[row, :length], choices[row, :length])
        assert not found.last[1, 8:].any()
    assert torch.equal(kept(ids[1:, :8]).last[0], first.last[1, :8])


def test_other_anchors_and_texts_are_other_files(target, tmp_path) -> None:
    kept, others = (KeptStates(target, anchors, tmp_path) for anchors in (ANCHORS, [0, 2]))
    assert len({each.file(text) for each in (kept, others) for text in ([1, 2], [1, 2, 3])}) == 4


def test_training_with_kept_states_is_the_same(target, tmp_path) -> None:
    def batch(number: int) -> TrainingBatch:
        ids = torch.randint(1, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(number % 2))
        return TrainingBatch(ids, torch.ones_like(ids, dtype=torch.bool))

    heads_trained = []
    for states in (None, tmp_path / "states"):
        student = HeadStudent(head_for(target), target, steps=2)
        folder = tmp_path / str(states is None)
        train(target, student, batch, TrainingSettings(steps=4), folder, states=states)
        heads_trained.append(student.module.fc.weight.detach())
    torch.testing.assert_close(*heads_trained, atol=1e-4, rtol=1e-3)


@pytest.mark.skipif(DEVICE != "cpu", reason="blocks on a GPU are tiles")
def test_a_draft_learns_from_another_form_of_the_target(target, tmp_path) -> None:
    """The streams of a model in blocks are those of its own modules, and what a draft learns from."""
    reader, ids = quantized(target, "q4_0"), texts()
    found = teacher_forward(reader, ids, ANCHORS)
    streams = reader(ids, output_hidden_states=True).hidden_states
    for row, length in enumerate((12, 8)):
        pairs = zip([*found.anchors.unbind(2), found.last], [*(streams[k] for k in ANCHORS), streams[-1]], strict=True)
        assert max(distance(states[row, :length], want[row, :length]) for states, want in pairs) < 0.08
    read = list[torch.Tensor]()

    class Noting(HeadStudent):
        def loss(self, batch, settings, step):
            read.append(batch.last)
            return super().loss(batch, settings, step)

    def batch(number: int) -> TrainingBatch:
        return TrainingBatch(ids, torch.ones_like(ids, dtype=torch.bool))

    for states in (None, tmp_path / "states"):
        student = Noting(head_for(target), target, steps=1)
        train(
            target,
            student,
            batch,
            TrainingSettings(steps=1, amp=True),
            tmp_path / str(states is None),
            states=states,
            reader=reader,
        )
    own = teacher_forward(target, ids, ANCHORS).last[1, :8]
    for last in read:
        assert distance(last[1, :8], found.last[1, :8]) < 0.01
        assert distance(last[1, :8], own) > 0.1


def distance(found: torch.Tensor, want: torch.Tensor) -> float:
    return float((found.float() - want).detach().norm() / want.detach().float().norm())
