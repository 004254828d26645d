"""The Triton kernels and the protocol's, compiled ahead of time, keep to their budgets; no GPU is needed."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.trials import PROFILE

ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


def gate(*options: str) -> subprocess.CompletedProcess[str]:
    # In a process of its own, because it needs the compiler even if TRITON_INTERPRET is set here.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bench.compile_gate", *options]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600)


@needs_triton
def test_budgets_are_kept_and_would_fail(tmp_path: Path) -> None:
    ran = gate("--json", str(tmp_path / "gate.json"), *(["--quick"] if PROFILE == "ci" else []))
    print(ran.stdout)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    record = json.loads((tmp_path / "gate.json").read_text())
    reports = record["reports"]
    selection = ("verify, greedy", "verify, coupled, cutoff", "rejection_sample, test", "rejection_sample, choose")
    selection += ("cutoff, scan", "penalize", "logprobs, cutoff", "prompt_lookup", "prompt_lookup, corpus")
    storage = ("attention, D=128, M=32", "attention, D=128, M=16, invariant", "attention, combine, D=128", "kv_append")
    layers = ("add_rms_norm, H=4096", "silu_mul, silu", "rope_append, D=128")
    layers += ("linear_small, O", "linear_small, gate_up", "qkv_append, D=128")
    layers += ("linear_small, O, q4_k", "linear_small, O, q6_k", "linear_small, O, q8_0")
    layers += ("experts_small, q4_k", "experts_small, sums")
    layers += ("decode_rows, all", "decode_rows, of tokens")
    for kernel in selection + storage + layers:
        assert {r["arch"] for r in reports if r["name"] == kernel} >= {80, 90, 100}
    # Every kernel is compiled as a dependent launch, too.
    dependent = {r["name"].removesuffix(", PDL") for r in reports if r["name"].endswith(", PDL") and r["arch"] == 90}
    assert dependent >= {*selection, *storage, *layers, "cutoff, search"}
    # Weights come before the wait, and nothing else does.
    early = {r["name"]: r["before_wait"] for r in reports if r["before_wait"] is not None}
    assert {name for name, loads in early.items() if loads} == {
        f"{name}, PDL" for name in dependent if name.startswith(("linear_small", "qkv_append"))
    }
    # What the rule of tickets is about is there.
    shared = {r["name"] for r in reports if r["tickets"]}
    assert "prompt_lookup" in shared
    assert shared >= {"verify, greedy", "verify, coupled, cutoff", "rejection_sample, test", "rejection_sample, choose"}
    assert any(name.startswith("attention") for name in shared)
    for r in reports:
        assert r["spilled"] <= record["spilled"][str(r["arch"])]
        assert 0 < r["registers"] <= 255
        assert r["shared"] <= {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}.get(r["arch"], 99 << 10)
        if r["loop_per_logit"] is None:
            assert not r["name"].startswith(("verify", "select", "rejection_sample", "cutoff, scan"))
            continue
        # The counting sees whole loops: one load of 16 bytes or several, and not more instructions than there are.
        assert 4 < r["loop_per_logit"] <= r["all_per_logit"] < r["instructions"]

    # Where a block of threads has less shared memory, the kernels with most of it are compiled; the others have as much as elsewhere, or less.
    small = [r for r in reports if r["arch"] not in (80, 90, 100)]
    assert {r["name"].split(",")[0] for r in small} == {
        "verify",
        "rejection_sample",
        "attention",
        "qkv_append",
        "linear_small",
    }
    # What a product reads: with quantised weights hardly more than their blocks have.
    read = {r["name"]: r["bytes_per_weight"] for r in reports if r["dtype"] != "fp32"}
    assert read["linear_small, O"] == 2
    assert [read[f"linear_small, O, {name}"] for name in ("q8_0", "q6_k", "q4_k")] == [1.0625, 0.84375, 0.59375]
    assert {r["arch"] for r in small} >= {89}
    for r in reports:
        # A measurement leaves out other tiles for which there is no room.
        if r["arch"] == 80 and r["shared"] > 81 << 10 and "stages" not in r["name"]:
            assert any((s["name"], s["dtype"]) == (r["name"], r["dtype"]) for s in small), r["name"]

    # A budget that no kernel meets is reported.
    ran = gate("--arch", "90", "--kernel", "verify, coupled, small", "silu_mul, silu", "--tighten", "0.5")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "instructions per logit, budget 17" in ran.stdout
    assert "instructions, budget 182.5" in ran.stdout


TICKET = """
    st.global.b32 [ %rd1 + 0 ], { %r1 };
    bar.sync 0;
    mov.u64 %rd2, 0x0;
    @%p1 atom.global.gpu.acq_rel.add.u64 %rd2, [ %rd3 + 0 ], %rd4;
    @%p1 st.shared.b64 [ %r2 + 0 ], %rd2;
    bar.sync 0;
    ld.shared.b64 %rd5, [global_smem];
    ld.global.b32 %r3, [ %rd6 + 0 ];
"""


@needs_triton
@pytest.mark.parametrize(
    ("part", "planted", "fault"),
    [
        ("", "", None),
        ("bar.sync 0;\n    mov", "mov", "no barrier before a ticket"),
        ("bar.sync 0;\n    ld", "ld", "no barrier after a ticket"),
        ("    mov", "    st.global.b32 [ %rd7 + 0 ], { %r1 };\n    mov", "no barrier before a ticket"),
        ("    mov", "$L__BB0_1:\n    mov", "no barrier before a ticket"),
        ("    @%p1 st", "    @%p2 bra $L__BB0_2;\n    @%p1 st", "no barrier after a ticket"),
        ("    bar.sync 0;\n    ld", "    @%p1 bar.sync 0;\n    ld", "a barrier is under a predicate"),
    ],
)
def test_a_ticket_lies_between_barriers(part: str, planted: str, fault: str | None) -> None:
    from bench.compile_gate import ordering_faults

    found = ordering_faults(TICKET.replace(part, planted) if part else TICKET)
    assert found == [] if fault is None else fault in found


DEPENDENT = """
    ld.param.b64 %rd1, [kernel_param_0];
    griddepcontrol.wait; // dummy %r1
griddepcontrol.launch_dependents; // dummy %r2
    @%p1 ld.global.b32 { %r3 }, [ %rd1 + 0 ];
    @%p2 bra $L__BB0_2;
    st.global.b32 [ %rd1 + 0 ], { %r3 };
"""
WEIGHTS = """ld.param.b64 %rd5, [kernel_param_2];
    mul.wide.s32 %rd6, %r7, 2;
    add.s64 %rd7, %rd6, %rd5;
    mov.u64 %rd8, 0x0;
    createpolicy.fractional.L2::evict_first.b64 %rd8, 1.0;
    @%p1 ld.global.L1::evict_first.L2::cache_hint.v4.b32 { %r3, %r4, %r5, %r6 }, [ %rd7 + 0 ], %rd8;
    """
OF_OTHERS = "a load before the wait of what is not a weight"
WAIT, LET_IN = "griddepcontrol.wait; // dummy %r1\n", "griddepcontrol.launch_dependents; // dummy %r2\n"


@needs_triton
@pytest.mark.parametrize(
    ("part", "planted", "fault"),
    [
        ("", "", None),
        (WAIT, "// \n", "no wait for the launch ahead"),
        (WAIT, f"@%p1 {WAIT}", "no wait for the launch ahead"),
        (WAIT, f"@%p3 bra $L__BB0_1;\n    {WAIT}", "a branch before the wait"),
        (WAIT, f"@!%p3 ret;\n    {WAIT}", "a branch before the wait"),
        (WAIT, f"@%p1 ld.global.b32 {{ %r3 }}, [ %rd1 + 0 ];\n    {WAIT}", OF_OTHERS),
        (WAIT, f"ld.global.v4.b32 {{ %r3, %r4, %r5, %r6 }}, [ %rd9 + 0 ];\n    {WAIT}", OF_OTHERS),
        (WAIT, WEIGHTS + WAIT, None),
        (WAIT, WEIGHTS.replace("add.s64 %rd7, %rd6, %rd5;", "add.s64 %rd7, %rd6, %rd1;") + WAIT, OF_OTHERS),
        (WAIT, WEIGHTS.replace("global", "global.nc") + "@%p1 ld.b32 %r8, [%rd1];\n" + WAIT, OF_OTHERS),
        (WAIT, f"atom.global.gpu.acq_rel.add.u32 %r3, [ %rd1 + 0 ], 1;\n    {WAIT}", "an access before the wait"),
        (WAIT, f"cp.async.cg.shared.global [ %r4 + 0 ], [ %rd1 + 0 ], 0x10;\n    {WAIT}", "an access before the wait"),
        (WAIT + LET_IN, LET_IN + WAIT, "the next launch is never let in"),
        (WAIT, f"mov.b32 %r9, 0; ld.global.b32 {{ %r3 }}, [ %rd1 + 0 ];\n    {WAIT}", OF_OTHERS),
        ("launch_dependents", "", "the next launch is never let in"),
    ],
)
def test_a_dependent_launch_waits_first(part: str, planted: str, fault: str | None) -> None:
    from bench.compile_gate import dependency_faults

    ptx = DEPENDENT.replace(part, planted) if part else DEPENDENT
    parameters = ["x", "eps", "weight"]
    found = dependency_faults(ptx, True, parameters)
    assert found == [] if fault is None else fault in found
    assert dependency_faults(ptx, False, parameters) == ["a launch that is not dependent waits"]


def accesses(ptx: str) -> dict[str, Counter[str]]:
    """Per kernel (with its scope, where it has one) the accesses that other threads see, as in ``ld.acquire.sys``. Plain ones are not counted."""
    found = {}
    for name, body in re.findall(r"\.entry (\S+?)\((.*?)(?=\.entry|\Z)", ptx, re.DOTALL):
        kernel = re.search(r"\d([A-Z]\w*?Kernel)(?:ILN\w*?ScopeE(\d))?", name)
        assert kernel, name
        count: Counter[str] = Counter()
        for statement in re.findall(r"^\s*(?:@%p\d+ )?((?:ld|st|fence|membar|atom|red)\.\S+)", body, re.MULTILINE):
            order = re.search(r"relaxed|acquire|release|acq_rel|sc\b|volatile|membar", statement)
            scope = re.search(r"\.(sys|gpu|cta)\b", statement)
            if order:
                count[".".join((statement.split(".")[0], order[0], scope[1] if scope else "sys"))] += 1
        found[kernel[1] + {None: "", "0": ", system", "1": ", device"}[kernel[2]]] = count
    return found


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_protocols_kernels_seldom_wait_for_memory(tmp_path: Path) -> None:
    """Each acquire, release and fence waits for memory. Within one device none waits for the host. Tokens are relaxed."""
    ptx = tmp_path / "protocol.ptx"
    options = ["-std=c++20", "-O3", "-arch=sm_90", "-I", "csrc", "-ptx", "-o", str(ptx)]
    subprocess.run(["nvcc", *options, "csrc/cuda/protocol_kernels.cu"], cwd=ROOT, check=True, timeout=3600)
    found = accesses(ptx.read_text())
    print(found)
    # Counts in the code. A step runs only some of them: a rollback and an adoption have their own.
    budgets = {
        "PlanKernel, device": {"ld.acquire.gpu": 3, "st.release.gpu": 4, "fence.acq_rel.gpu": 3},
        "PlanKernel, system": {"ld.acquire.sys": 3, "st.release.sys": 4, "fence.acq_rel.sys": 3},
        "CommitKernel, device": {"st.release.gpu": 1},
        "CommitKernel, system": {"st.release.sys": 1},
        "CloseStepKernel": {"st.release.sys": 3, "fence.acq_rel.sys": 1},
        "ClockKernel": {},
    }
    assert set(found) == set(budgets)
    for kernel, budget in budgets.items():
        waits = {access: n for access, n in found[kernel].items() if ".relaxed." not in access}
        assert set(waits) <= set(budget), kernel
        assert all(n <= budget[access] for access, n in waits.items()), (kernel, waits)
    # The counts are not empty; the caller's word and its flag are the host's.
    assert found["PlanKernel, system"]["ld.acquire.sys"] > 0
    assert found["CommitKernel, system"]["st.release.sys"] > 0
    assert found["PlanKernel, device"]["ld.relaxed.sys"] <= 3
    assert found["CommitKernel, device"]["ld.relaxed.sys"] <= 1
    assert found["PlanKernel, device"]["st.relaxed.sys"] == found["CommitKernel, device"]["st.relaxed.sys"] == 0
    # The host shadow lies behind the bus: it is written, never read.
    assert found["CloseStepKernel"]["ld.relaxed.sys"] == found["CloseStepKernel"]["ld.acquire.sys"] == 0
