"""SPD on GPUs: stages in one process, and ranks."""

import subprocess
import sys

import pytest
import torch

from pipespec import Pipeline
from pipespec.demo import load_family
from pipespec_spd import SpeculativePipeline
from tests.conftest import left_pad, noisy, random_llama, random_prompts
from tests.support.processes import ENVIRONMENT

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def test_stages_on_a_gpu():
    model = random_llama(3, layers=4).to("cuda:0")
    pipe = SpeculativePipeline(model, noisy(model, 0.02), stages=2)
    ids, mask = (x.to("cuda:0") for x in left_pad(random_prompts(3, seed=4, longest=9)))
    for options in ({"do_sample": False}, {"do_sample": True, "seed": 5}):
        options |= {"attention_mask": mask, "max_new_tokens": 16}
        assert torch.equal(pipe.generate(ids, **options), Pipeline(model).generate(ids, **options))
        assert pipe.report.accepted > 0
        assert pipe.report.stages[0].forward == "fused"


SPD, CHAIN = ("--system", "spd", "--draft", "ngram", "--stages"), ("--schedule", "ranks")
RANKS = [(SPD, 1, "cuda"), pytest.param(SPD, 2, "cuda", marks=TWO), (SPD, 2, "cuda:0"), (CHAIN, 2, "cuda:0")]


@pytest.mark.parametrize(("how", "ranks", "device"), RANKS)
def test_ranks_on_gpus(how, ranks, device):
    """On a GPU each, or together on one: of SPD, and of a chain."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "pipespec", "generate", *how, *[str(ranks)] * (how is SPD)]
    command += ["--device", device, "--prompt", "def mean(values):", "--max-new-tokens", "20"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    family = load_family()
    ids = family.encode("def mean(values):").to("cuda:0")
    wanted = SpeculativePipeline(family.target.to("cuda:0"), "ngram", stages=1).generate(
        ids, max_new_tokens=20, do_sample=False
    )
    assert done.stdout.rstrip("\n") == family.tokenizer.decode(wanted[0, ids.shape[1] :], skip_special_tokens=True)
