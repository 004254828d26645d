"""The launcher of captured graphs: a chain of toy models on one GPU and on two, with the block in device and in pinned memory.

Litmus tests check that GPUs keep the order of stores on which the protocol rests.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from pipespec_kernels import _native
from pipespec_kernels.scheduler import Scheduler

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ROWS, CAPACITY, WIDTHS = 2, 512, (1, 2, 4, 8)
STARTS, LIMITS, LAST = [1, 3], [400, 300], [5, 8]


def follows(token):
    """The target's token after ``token``, an integer or a tensor."""
    return (token * 103 + 57) % 977


def plain(row: int, limit: int) -> list[int]:
    text = [LAST[row]]
    while STARTS[row] - 1 + len(text) < limit:
        text.append(follows(text[-1]))
    return text[1:]


class Chain:
    """Stages on ``devices``, the target last. Drafts are wrong after every token that ``wrong`` divides. Keeps alive what the graphs use."""

    def __init__(self, devices: list[int], *, pinned: bool, wrong: int = 7) -> None:
        self.cuda = pytest.importorskip("pipespec_kernels._cuda")
        self.stages = len(devices)
        size = _native.Block.bytes(self.stages, ROWS, CAPACITY)
        self.shadow = torch.zeros(size, dtype=torch.uint8).pin_memory()
        self.host = _native.Block.create(self.shadow.data_ptr(), self.stages, ROWS, CAPACITY)
        self.reset()
        self.block = self.shadow if pinned else self.shadow.to(f"cuda:{devices[0]}")
        self.kept: list = []
        self.entries = [self._stage(i, device, wrong) for i, device in enumerate(devices)]

    def reset(self, limits: list[int] = LIMITS) -> None:
        self.host.reset(STARTS, limits, LAST, [5000])

    def _stage(self, stage: int, device: int, wrong: int):
        where = f"cuda:{device}"
        policies = torch.zeros((self.cuda.STEPS_IN_FLIGHT, 4), dtype=torch.int32).pin_memory()
        scratch = torch.zeros(self.cuda.STEP_SCRATCH_BYTES, dtype=torch.uint8, device=where)
        log = torch.zeros(self.cuda.STEP_LOG_BYTES, dtype=torch.uint8).pin_memory()
        graphs = [self._capture(stage, where, wrong, width, policies, scratch, log) for width in WIDTHS]
        entry = self.cuda.StageGraphs()
        entry.device, entry.widths = device, list(WIDTHS)
        entry.graphs = [graph.raw_cuda_graph_exec() for graph in graphs]
        entry.block, entry.policies = self.block.data_ptr(), policies.data_ptr()
        entry.scratch, entry.log = scratch.data_ptr(), log.data_ptr()
        self.kept += [policies, scratch, log, graphs]
        return entry

    def _capture(self, stage, where, wrong, width, policies, scratch, log) -> torch.cuda.CUDAGraph:
        tokens = torch.zeros((ROWS, width), dtype=torch.int32, device=where)
        kv, query_lens, num_draft_tokens, n_select, action = (
            torch.zeros(ROWS, dtype=torch.int32, device=where) for _ in range(5)
        )
        columns = torch.arange(width, device=where)
        arrays = [t.data_ptr() for t in (tokens, kv, query_lens, num_draft_tokens, n_select, action)]
        scope = self.cuda.Scope.DEVICE if self.block.is_cuda else self.cuda.Scope.SYSTEM
        sizes = (self.block.data_ptr(), scope, stage, ROWS, width)

        def select() -> torch.Tensor:
            own = (query_lens - 1 - num_draft_tokens).unsqueeze(1) + columns
            said = tokens.gather(1, own.clamp(0, width - 1))
            off = 0 if stage == self.stages - 1 else (said % wrong == 0).int()
            return (follows(said) + off).to(torch.int32)

        def step() -> torch.Tensor:
            stream = torch.cuda.current_stream().cuda_stream
            self.cuda.open_step(scratch.data_ptr(), stream)
            self.cuda.plan(*sizes, policies.data_ptr(), scratch.data_ptr(), *arrays, stream)
            selected = select()
            self.cuda.commit(*sizes, *arrays, selected.data_ptr(), width, stream)
            self.cuda.close_step(
                sizes[0], self.shadow.data_ptr(), stage, ROWS, *arrays, scratch.data_ptr(), log.data_ptr(), stream
            )
            return selected

        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.device(where):
            # A kernel is loaded when it is first launched, which a capture may not allow. The block is reset before each run.
            step()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                selected = step()
            graph.instantiate()
        self.kept += [tokens, kv, query_lens, num_draft_tokens, n_select, action, columns, selected]
        return graph

    def launcher(self):
        return self.cuda.CudaLauncher(self.shadow.data_ptr(), self.entries)

    def text(self, row: int) -> list[int]:
        target = self.stages - 1
        return self.host.tokens(target, row, STARTS[row], self.host.length(target, row))


class NativeLauncher:
    """A launcher for :class:`Scheduler`."""

    def __init__(self, native) -> None:
        self.native = native


def run(chain: Chain, generations: int = 3) -> None:
    launcher = chain.launcher()
    scheduler = Scheduler(NativeLauncher(launcher), lookahead=(6,) * (chain.stages - 1), ahead=2, trace=4096)
    waits = set()
    for generation in range(generations):
        limits = [limit - 100 * generation for limit in LIMITS]
        chain.reset(limits)
        before = launcher.counters()
        scheduler.run()
        after = launcher.counters()
        assert scheduler.failures == []
        assert [chain.text(row) for row in range(ROWS)] == [plain(row, limits[row]) for row in range(ROWS)]
        traces = [scheduler.trace(stage) for stage in range(chain.stages)]
        assert after["launches"] - before["launches"] == sum(map(len, traces))
        waits.add(after["host_syncs"] - before["host_syncs"])
        for steps in traces:
            assert (steps["start_ns"] <= steps["end_ns"]).all()
            assert (steps["start_ns"][1:] >= steps["end_ns"][:-1]).all()
        assert (traces[-1]["rolled_back"] == 0).all()
    assert len(waits) == 1  # the number of waits does not depend on the number of steps


@pytest.mark.parametrize("pinned", [False, True], ids=["device", "pinned"])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_the_text_is_that_of_plain_decoding(stages: int, pinned: bool) -> None:
    run(Chain([0] * stages, pinned=pinned))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("devices", [[0, 1], [1, 0], [0, 1, 0], [1, 1]])
def test_stages_on_several_devices_meet_in_pinned_memory(devices: list[int]) -> None:
    run(Chain(devices, pinned=True))


def test_it_ends_where_nothing_runs_at_once() -> None:
    """Kernels run one after the other, through one queue. A kernel that waited for another one would hang."""
    environment = os.environ | {"CUDA_LAUNCH_BLOCKING": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "plain_decoding"]
    ran = subprocess.run(
        command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=200
    )
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert "passed" in ran.stdout


def test_what_does_not_fit_is_refused() -> None:
    chain = Chain([0, 0], pinned=False)
    there = torch.zeros(4096, dtype=torch.uint8, device="cuda:0")
    here = torch.zeros(4096, dtype=torch.uint8)
    for field, value, message in (
        ("device", 99, "no CUDA device 99"),
        ("widths", [2, 1, 4, 8], "ascending"),
        ("block", there.data_ptr(), "must use one block"),
        ("policies", here.data_ptr(), "draft 0: its policies must be in pinned memory"),
        ("scratch", chain.shadow.data_ptr(), "its scratch must be in the memory of device 0"),
        ("log", there.data_ptr(), "its log must be in pinned memory"),
    ):
        entry = chain.entries[0]
        before = getattr(entry, field)
        setattr(entry, field, value)
        with pytest.raises(ValueError, match=message):
            chain.launcher()
        setattr(entry, field, before)
    pageable = chain.shadow.clone()
    with pytest.raises(ValueError, match="the host shadow must be in pinned memory"):
        chain.cuda.CudaLauncher(pageable.data_ptr(), chain.entries)
    run(chain, generations=1)


# --- litmus ----------------------------------------------------------------------------------------------------------


def litmus_block() -> torch.Tensor:
    memory = torch.zeros(_native.Block.bytes(2, 1, 64), dtype=torch.uint8).pin_memory()
    _native.Block.create(memory.data_ptr(), 2, 1, 64).reset([1], [51], [7], [])
    return memory


EPOCHS, LENGTH, LOOKS = 2000, 50, 20_000


def scope_of(memory: torch.Tensor):
    cuda = pytest.importorskip("pipespec_kernels._cuda")
    return cuda.Scope.DEVICE if memory.is_cuda else cuda.Scope.SYSTEM


def write_on(device: int, memory: torch.Tensor) -> torch.cuda.Stream:
    """Start a writer on ``device``."""
    cuda = pytest.importorskip("pipespec_kernels._cuda")
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        cuda.litmus_write(memory.data_ptr(), scope_of(memory), 1, 0, EPOCHS, LENGTH, stream.cuda_stream)
    return stream


def read_on(device: int, memory: torch.Tensor) -> tuple[torch.cuda.Stream, torch.Tensor]:
    """Start a reader on ``device``. Returns its stream, and the tensor that receives the counts."""
    cuda = pytest.importorskip("pipespec_kernels._cuda")
    out = torch.zeros(len(cuda.LITMUS_FIELDS), dtype=torch.int64).pin_memory()
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        cuda.litmus_read(memory.data_ptr(), scope_of(memory), 1, 0, LOOKS, out.data_ptr(), stream.cuda_stream)
    return stream, out


def test_the_host_sees_a_devices_tokens_in_order() -> None:
    cuda = pytest.importorskip("pipespec_kernels._cuda")
    memory = litmus_block()
    stream = write_on(0, memory)
    done, tokens = False, 0
    while not done:
        done = stream.query()
        looks, _, checked, wrong = cuda.litmus_read_here(memory.data_ptr(), 1, 0, 200)
        assert wrong == 0
        tokens += checked
    assert looks > 0
    assert tokens > 0


def test_a_device_sees_the_hosts_tokens_in_order() -> None:
    cuda = pytest.importorskip("pipespec_kernels._cuda")
    memory = litmus_block()
    cuda.litmus_write_here(memory.data_ptr(), 1, 0, 1, LENGTH)
    stream, out = read_on(0, memory)
    while not stream.query():
        cuda.litmus_write_here(memory.data_ptr(), 1, 0, 100, LENGTH)
        # A read over the bus takes longer than an epoch of the host. Without a pause no read would fall within one epoch.
        time.sleep(0.001)
    looks, _, tokens, wrong = out.tolist()
    assert wrong == 0
    assert looks > 0
    assert tokens > 0


@pytest.mark.parametrize(
    ("pinned", "reader"), [(True, 0), (True, 1), (False, 0)], ids=["pinned", "two devices", "device"]
)
def test_a_device_sees_a_devices_tokens_in_order(pinned: bool, reader: int) -> None:
    cuda = pytest.importorskip("pipespec_kernels._cuda")
    if reader >= torch.cuda.device_count():
        pytest.skip("needs two CUDA devices")
    memory = litmus_block()
    cuda.litmus_write_here(memory.data_ptr(), 1, 0, 1, LENGTH)
    memory = memory if pinned else memory.to("cuda:0")
    torch.cuda.synchronize()
    writing = write_on(0, memory)
    reading, out = read_on(reader, memory)
    for stream in (writing, reading):
        stream.synchronize()
    looks, _, tokens, wrong = out.tolist()
    assert wrong == 0
    assert looks > 0
    assert tokens > 0
