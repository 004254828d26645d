"""Which device each stage gets. GPUs are invented facts."""

import copy

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, MambaConfig, MambaForCausalLM

from pipespec import Pipeline, attach
from pipespec.api import pipeline
from pipespec.checks.calls import device_facts
from pipespec.checks.devices import arrange, requested
from pipespec.cli.main import main
from pipespec.errors import DoesNotFit
from tests.conftest import noisy, random_llama
from tests.pipespec.checkpoints import PROMPT, folder_of, gpus, llama, save, some_gpus


def test_the_automatic_choice(tmp_path, monkeypatch):
    """The target goes where most memory is free, then the drafts, the last one first, where most is left."""
    draft = folder_of(llama("1B"), tmp_path / "draft", dtype="bfloat16")
    target = folder_of(llama("8B"), tmp_path / "target", dtype="bfloat16")
    for free, models, chosen in (
        ((40, 79), [draft, target], ["cuda:1", "cuda:1"]),
        ((70, 79), [draft, target], ["cuda:0", "cuda:1"]),
        ((70, 68, 79), [draft, draft, target], ["cuda:1", "cuda:0", "cuda:2"]),
        ((), [draft, target], ["cpu", "cpu"]),
        ((40, 79), [draft, random_llama(1)], ["cuda:1", None]),
    ):
        some_gpus(monkeypatch, *free)
        assert arrange(models, device="auto") == chosen
    some_gpus(monkeypatch, 40, 79)
    assert arrange([draft, target], device=["cpu", "auto"]) == ["cpu", "cuda:1"]


def test_what_device_may_be(monkeypatch):
    gpus(monkeypatch, current=1)
    assert requested(None, 2) == [None, None]
    assert requested("cuda", 2) == ["cuda:1", "cuda:1"]
    assert requested(torch.device("cuda:0"), 1) == ["cuda:0"]
    assert requested(["cuda:1", None], 2) == ["cuda:1", None]
    assert requested(("cpu", "cuda"), 2) == ["cpu", "cuda:1"]
    assert requested({"draft 1": "cpu", "target": "cuda:0"}, 3) == [None, "cpu", "cuda:0"]
    assert requested("auto", 3) == ["auto"] * 3
    assert requested({"target": "auto"}, 2) == [None, "auto"]


def test_what_device_may_not_be(model, monkeypatch, tmp_path):
    monkeypatch.setattr(pipeline, "load_model", None)  # nothing is loaded
    folder = save(model, tmp_path / "model")
    for device, match in {
        "cuda": "torch sees no GPU here",
        "mps": "stages run on cpu or cuda, not on mps",
        "xpu:0": "not on xpu",
        "meta": "not on meta",
        "gpu": "device='gpu' is not a device; use 'cpu', 'cuda'",
        "cpu,cpu": "is not a device",
    }.items():
        for given in (device, [None, device], {"draft 0": device}):
            with pytest.raises(ValueError, match=match):
                Pipeline(folder, folder, device=given, schedule="lockstep")
    gpus(monkeypatch)
    with pytest.raises(ValueError, match="torch sees 2 GPUs, cuda:0 to cuda:1"):
        Pipeline(folder, device="cuda:2")
    with pytest.raises(ValueError, match=r"one per stage \(2: draft 0, target\), not 3"):
        Pipeline(folder, folder, device=["cpu"] * 3, schedule="lockstep")
    with pytest.raises(ValueError, match="there is no stage 'draft 1'; the stages are draft 0, target"):
        Pipeline(folder, folder, device={"draft 1": "cpu"}, schedule="lockstep")
    with pytest.raises(TypeError, match="device must be"):
        Pipeline(folder, device=1.5)


def test_a_loaded_model_stays_on_its_device(model, monkeypatch, tmp_path):
    gpus(monkeypatch)
    folder = save(model, tmp_path / "model")
    with pytest.raises(
        ValueError, match=r"target was given as a model on cpu, which contradicts device='cuda:0'.*model\.to"
    ):
        Pipeline(model, device="cuda")
    with pytest.raises(ValueError, match="draft 0 was given as a model on cpu"):
        attach(copy.deepcopy(model), noisy(model, 0.1), device=["cuda:1", None], schedule="lockstep")
    for device in ("cpu", None, ["cpu", None], {"draft 0": "cpu"}):
        pipe = Pipeline(model, folder, device=device, schedule="lockstep")
        assert [str(m.device) for m in pipe.models] == ["cpu", "cpu"]
    # The devices as given, in their order.
    loads = []
    monkeypatch.setattr(pipeline, "load_model", lambda m, device, **kwargs: loads.append(device))
    some_gpus(monkeypatch, 1, 1)
    for device, expected in (
        ({"draft 1": "cuda:1", "target": "cuda:0"}, ["cpu", "cuda:1", "cuda:0"]),
        (["cuda:1", "cpu", "cuda:0"], ["cuda:1", "cpu", "cuda:0"]),
        ("auto", ["cuda:0", "cuda:1", "cuda:0"]),
    ):
        loads.clear()
        with pytest.raises(ValueError, match="same object"):  # what was loaded here is None
            Pipeline(folder, [folder, folder], device=device, schedule="lockstep")
        assert loads == expected


def test_models_that_are_no_decoders_are_refused_as_such(model, tmp_path):
    """By its architecture, not by the size that its configuration lacks."""
    with torch.random.fork_rng():
        gpt = GPT2LMHeadModel(GPT2Config(vocab_size=320, n_embd=32, n_layer=1, n_head=2))
        mamba = MambaForCausalLM(MambaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=1))
    for i, other in enumerate((gpt, mamba)):
        folder = save(other, tmp_path / str(i))
        for device in (None, "auto"):
            with pytest.raises(TypeError, match=f"draft 0 is a {type(other).__name__}"):
                Pipeline(model, folder, device=device, schedule="lockstep")


def test_the_command_line_takes_one_device_or_one_per_stage(tmp_path, model, capsys):
    folder = str(save(model, tmp_path / "model"))
    command = ["generate", "--prompt", "x", "--target", folder, "--draft", folder, "--device"]
    for given, message in (
        (["cpu", "cpu", "cpu"], "one per stage (2: draft 0, target), not 3"),
        (["cuda"], "torch sees no GPU here"),
    ):
        assert main([*command, *given]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*command, "cpu", "mps"])
    assert "'mps' is not a device; use cpu, cuda" in capsys.readouterr().err


def test_the_cpu_has_memory():
    (cpu,) = device_facts(["cpu"])
    assert cpu.name == "cpu"
    assert cpu.total >= cpu.free > 0
    assert [f.name for f in device_facts()] == ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]


# ---- on GPUs


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_loaded_to_gpus(model, tmp_path, device):
    folder, draft = save(model, tmp_path / "target"), save(noisy(model, 0.02), tmp_path / "draft")
    pipe = Pipeline(folder, draft, device=device, schedule="lockstep")
    assert [m.device.type for m in pipe.models] == ["cuda", "cuda"]
    wanted = pipe.target.generate(PROMPT.to(pipe.target.device), max_new_tokens=20, do_sample=False)
    assert torch.equal(pipe.generate(PROMPT.to(pipe.target.device), max_new_tokens=20), wanted)
    with pytest.raises(DoesNotFit, match="lower max_new_tokens or the batch"):
        pipe.generate(PROMPT.to(pipe.target.device).repeat(512, 1), max_new_tokens=2**22)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("schedule", ["lockstep", "workers"])
def test_stages_on_two_gpus_and_the_cpu(model, tmp_path, schedule):
    folders = [save(noisy(model, 0.02, seed=i), tmp_path / str(i)) for i in range(3)]
    with Pipeline(folders[2], folders[:2], device=["cpu", "cuda:1", "cuda:0"], schedule=schedule) as pipe:
        assert [str(m.device) for m in pipe.models] == ["cpu", "cuda:1", "cuda:0"]
        prompt = PROMPT.to("cuda:0")
        wanted = pipe.target.generate(prompt, max_new_tokens=20, do_sample=False)
        assert torch.equal(pipe.generate(prompt, max_new_tokens=20), wanted)
