"""The first minute on a GPU: the CUDA module finds the device, and the captured schedules give the text of ``generate()`` in the fused form.

``bench.gpu_check`` runs this file before everything else. On a CPU the schedules run uncaptured.
"""

import warnings
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from pipespec import Pipeline
from pipespec.demo import family_path
from pipespec.models.loading import load_model
from pipespec.schedules.base import SpeedWarning

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
PROMPT = torch.arange(5, 29)[None]
OPTIONS: dict[str, Any] = {"max_new_tokens": 32, "do_sample": False, "pad_token_id": 0}
SCHEDULES: dict[str, dict[str, Any]] = {
    "plain": {"schedule": "plain", "graphs": True},
    "rounds": {"schedule": "lockstep", "graphs": True, "lookahead": 4},
    "streams": {"schedule": "streams", "lookahead": 4},
}


@pytest.mark.gpu
@GPU[1]
def test_the_cuda_module_sees_the_device() -> None:
    from pipespec_kernels import _cuda

    print("runtime", _cuda.runtime_version(), "driver", _cuda.driver_version())
    assert _cuda.devices()


@pytest.fixture(scope="module")
def models() -> tuple[PreTrainedModel, PreTrainedModel, torch.Tensor]:
    """A draft, a target, and its text on the CPU."""
    small, target = (load_model(family_path(name), dtype="float32") for name in ("small", "target"))
    return small, target, target.generate(PROMPT, **OPTIONS)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_captured_schedule_gives_the_text_in_the_fused_form(
    models: tuple[PreTrainedModel, PreTrainedModel, torch.Tensor], name: str, device: str
) -> None:
    small, target, expected = models
    drafts = [] if name == "plain" else [small.to(device)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpeedWarning)
        with Pipeline(target.to(device), drafts, **SCHEDULES[name]) as pipe:
            text = pipe.generate(PROMPT.to(device), **OPTIONS).cpu()
    assert torch.equal(text, expected)
    assert pipe.report is not None
    assert pipe.report.schedule == SCHEDULES[name]["schedule"]
    assert {stage.forward for stage in pipe.report.stages} == {"fused"}
