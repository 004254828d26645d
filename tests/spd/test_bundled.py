"""The draft module in the package belongs to the bundled target, and its drafts are accepted."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from pipespec import demo
from pipespec_spd import SpeculativePipeline
from pipespec_spd.draft_module import DraftModule
from pipespec_spd.partition import Partition
from pipespec_train.acceptance import Acceptance, acceptance_along
from tests.trials import trials

# Measured figures are in family/module/README.md. The bound only separates a trained module from broken files, on few prompts.
FLOOR = 0.6


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(demo.family_path("target"), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def module() -> DraftModule:
    return DraftModule.load(
        demo.draft_module_path(),
        target=demo.family_path("target"),
        stages=Partition.uniform(12, demo.MODULE_STAGES).ranges,
    )


@pytest.fixture(scope="module")
def texts(target: LlamaForCausalLM) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Prompts, each with the target's own continuation, both ``[1, L]``."""
    tokenizer = AutoTokenizer.from_pretrained(demo.family_path("target"))
    prompts = [tokenizer(p, return_tensors="pt")["input_ids"] for p in demo.prompts(trials(ci=2, nightly=4))]
    options = {"max_new_tokens": 40, "do_sample": False}
    return [(ids, target.generate(ids, attention_mask=torch.ones_like(ids), **options)) for ids in prompts]


def test_the_bundled_module_in_the_pipeline(target: LlamaForCausalLM, module: DraftModule, texts) -> None:
    pipe = SpeculativePipeline(
        demo.family_path("target"), demo.draft_module_path(), stages=demo.MODULE_STAGES, dtype="float32"
    )
    counts = Acceptance(0, 0, 0, 0)
    for ids, text in texts:
        assert torch.equal(pipe.generate(ids, max_new_tokens=40, do_sample=False), text)
        along = acceptance_along(target, module, text, [ids.shape[1]], [text.shape[1]])
        assert abs(pipe.report.accepted - along.accepted) <= 1  # a near-tie may fall either way
        counts += along
    assert counts.rate > FLOOR, f"{counts.accepted} of {counts.verified} drafts"
    assert pipe.report.drafter == "ModuleDrafter"
    # All parts run in the native form: a failed probe would halve the speed, and no test of texts would show it.
    assert pipe.report.stages[0].forward == "native"
    assert {type(part._call).__name__ for part in (pipe.drafter._blocks, pipe.drafter._head)} == {"NativeForm"}
