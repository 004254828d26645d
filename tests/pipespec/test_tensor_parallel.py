"""Tensor-parallel targets: one text in all ranks of a group, that of the whole model.

The groups are processes of :mod:`tests.pipespec.group_harness`. With accelerate, transformers shards a model itself, under torchrun.
"""

import pytest
import torch

from pipespec import Pipeline
from tests.conftest import random_prompts
from tests.pipespec.group_harness import calls, whole_model
from tests.pipespec.tiny_models import make
from tests.support.processes import program
from tests.trials import trials

SIZES = trials(ci=(2,), nightly=(2, 4))


@pytest.fixture(scope="module")
def found():
    """By size of the group, what each rank saw."""
    lines = program("tests.pipespec.group_harness", *SIZES)
    return {size: [seen for _, seen in ranks] for size, ranks in zip(SIZES, lines, strict=True)}


def texts_of(model):
    pipe = Pipeline(model, schedule="plain", native=False)
    return [pipe.generate(ids, attention_mask=mask, **options).tolist() for ids, mask, options in calls()]


@pytest.fixture(scope="module")
def texts():
    """Those of the whole model."""
    return texts_of(whole_model())


def continuation(new):
    ids = random_prompts(1, seed=3, shortest=6, longest=6)[0][None]
    return whole_model().generate(ids, max_new_tokens=new, do_sample=False).tolist()


def test_every_rank_returns_the_text_of_the_whole_model(found, texts):
    """plain, lockstep and workers; greedy and sampled; batches; a prefill in chunks."""
    for size, ranks in found.items():
        for rank, seen in enumerate(ranks):
            assert seen["texts"] == texts * (len(seen["texts"]) // len(texts)), (size, rank)
            assert len(seen["texts"]) == len(texts) * (3 if size == SIZES[0] else 1)
            assert seen["form"] == f"transformers: its weights are sharded over {size} processes (tensor parallel)"
            assert seen["schedule"] == ("follower" if rank else "workers" if size == SIZES[0] else "lockstep")
        assert ranks[0]["accepted"] > 0


def test_each_rank_has_its_part_of_the_cache(found):
    for size, ranks in found.items():
        for seen in ranks:
            assert seen["shard"] == [1, 4 // size, 14, 16]
            assert seen["goes on"] == continuation(18)


def test_rank_0_applies_the_criteria_and_the_others_stream_its_text(found):
    wanted = continuation(6)
    for ranks in found.values():
        for seen in ranks:
            assert seen["stopped"] == wanted
            assert seen["streamed"] == [[wanted[0][:6]], wanted[0][6:], 1]


def test_rank_0_has_the_scores(found):
    for ranks in found.values():
        for rank, seen in enumerate(ranks):
            assert seen["scored"] == ([False, False] if rank else [4, 3])


def test_errors_reach_every_rank(found):
    """A failure in rank 0, in another rank, other inputs; the next call works."""
    for size, ranks in found.items():
        assert ranks[0]["failed"] == "OSError: the reader has gone"
        for rank, seen in enumerate(ranks):
            if rank:
                assert (
                    seen["failed"]
                    == "RuntimeError: generate() failed in rank 0, which leads: OSError: the reader has gone"
                )
            assert seen["differ"].startswith(
                "ValueError: generate() was called with other inputs in rank 1 than in rank 0"
            )
            own = rank == size - 1
            assert seen["no memory"].startswith(
                "DoesNotFit: the stages need"
                if own
                else f"RuntimeError: generate() failed in rank {size - 1} of the target"
            )
            assert "row 0 ends with padding; pad on the left" in seen["right padding"]
            assert seen["ranks"].startswith(
                "ValueError: the target is sharded over processes (tp_plan), and schedule='ranks'"
            )
            assert seen["again"] == continuation(9)


FAMILIES = ("mistral, window", "gemma3, mixed, two RoPE bases", "deepseek_v2, latents")


def test_models_that_transformers_has_sharded(texts, tmp_path):
    """Of several families, whose keys and values have windows, or latents of other sizes."""
    pytest.importorskip("accelerate")
    families = {name: make(name, vocab_size=whole_model().config.vocab_size) for name in FAMILIES}
    models = {"llama": whole_model(), **families}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    (ranks,) = program("tests.pipespec.group_harness", *(tmp_path / name for name in models))
    wanted = [texts, *(texts_of(families[name]) for name in FAMILIES)]
    for _, got in ranks:
        for name, seen, text in zip(models, got, wanted, strict=True):
            assert seen == [text, "transformers: its weights are sharded over 2 processes (tensor parallel)"], name


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_target_over_two_gpus(tmp_path):
    """The exchanges of the model over NCCL, the announcements over gloo: both ranks return one text."""
    pytest.importorskip("accelerate")
    whole_model().save_pretrained(tmp_path)
    (((_, first), (_, second)),) = program("tests.pipespec.group_harness", tmp_path)
    assert first == second
