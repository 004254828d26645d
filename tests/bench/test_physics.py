"""The assumptions of the check's GPU parts, as far as a machine without a GPU can test them."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
import torch

from bench import bench_generate, corruption, gpu_check, physics, warm_kernels
from bench.devices import check_captured
from bench.figures import Figures
from pipespec import Pipeline
from pipespec.drivers.base import GenerationRequest
from pipespec.drivers.graphed.driver import GraphedDriver
from tests.conftest import random_llama

ROOT = Path(__file__).parents[2]


def test_the_small_kernel_waits_for_the_one_before() -> None:
    """With programmatic dependent launch the kernel waits for its predecessor's stores. Without it, the kernel has no wait instruction."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from bench.physics_kernels import add_one

    signature = {"x": "*fp32", "PDL": "constexpr", "BLOCK": "constexpr"}
    for pdl in (False, True):
        source = ASTSource(add_one, signature, {"PDL": pdl, "BLOCK": 128})
        options = {"launch_pdl": pdl, "num_warps": 4}
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert compiled.metadata.launch_pdl is pdl
        ptx = compiled.asm["ptx"]
        assert ("griddepcontrol.wait" in ptx) is pdl
        if pdl:
            assert ptx.index("griddepcontrol.wait") < ptx.index("ld.global")


def test_figures_survive_a_failed_section(tmp_path: Path) -> None:
    figures = Figures(tmp_path / "f.json", seconds=100)

    def good(figures: Figures) -> None:
        figures.add("a.b", 2.0)

    def bad(figures: Figures) -> None:
        raise RuntimeError("out of luck\nand more")

    figures.section("bad", bad)
    figures.section("good", good)
    figures.seconds = 0.0
    figures.section("late", good)
    assert figures.finish() == 1
    assert figures.record["figures"] == {"a.b": 2.0}
    assert figures.record["errors"] == {"bad": "RuntimeError: out of luck"}
    assert figures.record["left_out"] == {"late": "the time was over"}
    assert '"a.b": 2.0' in (tmp_path / "f.json").read_text()


def test_a_corrupted_replay_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of one layer differs: -0 instead of 0 is enough."""
    state = [torch.tensor([[1, 2]]), torch.zeros(1, 1, 2, 4), torch.ones(1, 1, 2, 4)]
    check = corruption.Corruption.__new__(corruption.Corruption)
    check.expected, check.replays = [part.clone() for part in state], 0
    monkeypatch.setattr(check, "_state", lambda: state, raising=False)
    figures = Figures(None)
    check._compare(figures, "alone", 3)
    assert figures.record["figures"]["corruption.alone"] == 0
    state[1][0, 0, 1, 3] = -0.0
    with pytest.raises(AssertionError, match="2 of 2 runs differ from the run alone, the first one from layer 0 on"):
        check._compare(figures, "alone", 2)
    assert figures.record["figures"]["corruption.alone"] == 2


@pytest.mark.parametrize("measure", ["alone", "beside", "turnaround"])
def test_steps_that_were_not_captured_are_no_result(monkeypatch: pytest.MonkeyPatch, measure: str) -> None:
    """A call that falls back gives the right text, so only the check of the schedule can find it."""
    ready = GraphedDriver._make_ready

    def fails(driver: GraphedDriver, request: GenerationRequest) -> str:
        ready(driver, request)
        return "out of memory"

    monkeypatch.setattr(GraphedDriver, "_make_ready", fails)
    monkeypatch.setattr(GraphedDriver, "_slower", lambda *_: None)

    def beside(_: Figures) -> None:
        with corruption.Corruption(dry=True)._others():
            pass

    section = {
        "alone": corruption.Corruption(dry=True).alone,
        "beside": beside,
        "turnaround": physics.Physics(dry=True).turnaround,
    }[measure]
    with pytest.raises(RuntimeError, match=r"not as captured steps of .*out of memory"), torch.no_grad():
        section(Figures(None))


def test_a_pipeline_without_graphs_is_no_result() -> None:
    """Where a model cannot be captured at all, another driver runs in lockstep without a remark."""
    ids = torch.arange(3, 9)[None]
    with Pipeline(random_llama(1), random_llama(2), schedule="lockstep", lookahead=4) as pipe:
        pipe.generate(ids, max_new_tokens=4, do_sample=False)
        with pytest.raises(RuntimeError, match="no step can be captured"):
            check_captured(pipe, "lockstep")


def test_memory_that_a_graph_overwrites_is_found() -> None:
    check = corruption.Corruption.__new__(corruption.Corruption)
    check.dry, figures = True, Figures(None)
    check._clear()
    check._check_junk(figures)
    assert figures.record["figures"]["corruption.overwritten"] == 0
    check._clear()
    check.junk[0][77] = 0
    with pytest.raises(AssertionError, match="1 of 1 pieces"):
        check._check_junk(figures)
    assert check.junk == []


def test_what_is_compiled_ahead_is_what_is_measured() -> None:
    """The jobs are the benchmarks of the check, and pipelines with the schedules of its rows."""
    jobs = list(warm_kernels.jobs(dry=False))
    compiled = {job[2] for job in jobs if job[0] == "kernel"}
    assert set(gpu_check.KERNELS) - {"kv_append"} <= compiled
    assert {job[1] for job in jobs if job[0] == "pipeline"} == {"lockstep", "streams", "plain"}
    assert {c.key for c in bench_generate.rows_of(gpu_check.ROWS, ["1B"])} == {
        "plain",
        "assisted-1B",
        "ours-plain-graphs",
        "lockstep-graphs-1B",
        "streams-1B",
    }


AVAILABLE = {"torch", "triton", "transformers", "numpy", "pytest", "hypothesis", "psutil", "safetensors", "tokenizers"}
"""Packages that a machine needs for the check. The documentation names them."""

AVAILABLE.add("huggingface_hub")  # comes with transformers


def test_the_check_imports_nothing_else() -> None:
    """Checks imports at module level. Imports in functions are optional, or belong to other programs."""
    own = {"bench", "tests", "pipespec", "pipespec_kernels"}
    paths = next(part for part in gpu_check.PARTS if part.name == "tests").command
    folders = [path for path in paths if path.startswith("tests/")]
    assert folders
    files = [
        file for folder in ("bench", "python", "pipespec_kernels", *folders) for file in (ROOT / folder).rglob("*.py")
    ]
    files += [ROOT / "tests" / name for name in ("conftest.py", "trials.py", "waiting.py")]
    assert len(files) > 100
    for file in files:
        if file.name in ("run.py", "run_spd.py") and file.parent.name == "demo":
            continue  # the demo, which no part runs
        if file.name == "openvino_server.py":
            continue  # runs in an environment of its own
        for node in ast.parse(file.read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for name in names:
                root = name.split(".")[0]
                assert root in own | AVAILABLE or root in sys.stdlib_module_names, f"{file} imports {name}"
