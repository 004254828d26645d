"""Faults of the machine: a clock that jumps, disks that are full, memory that is limited."""

import errno
import gc
import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from pipespec import Pipeline
from pipespec.process.files import replace
from tests.conftest import VOCABULARY, noisy, random_llama, random_prompts
from tests.support.processes import ENVIRONMENT, program
from tests.trials import PROFILE
from tests.waiting import SECONDS

NEW = 24

# ---- the clock of the day

_STRUCK = """
import os, sys, time, warnings
import torch
from pipespec import Pipeline
from tests.conftest import noisy, random_llama
from tests.support.forks import fork_drafts_here
from tests.support.processes import peers_of

fork_drafts_here()
looks = [time.time() for _ in range(20)]
assert max(looks) - min(looks) > 3600, "the clock does not jump"
target, prompt = random_llama(3), torch.tensor([[5, 6, 7, 8]])
wanted = target.generate(prompt, max_new_tokens=40, do_sample=False)
for schedule in ("streams", "workers"):
    with Pipeline(target, [noisy(target, 0.02), noisy(target, 0.01)], schedule=schedule) as pipe:
        for number in (0, *map(int, sys.argv[1:])):
            if schedule == "workers" and number:
                os.kill(peers_of(pipe)[0].process.pid, number)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert torch.equal(pipe.generate(prompt, max_new_tokens=40), wanted)
print("done")
"""


@pytest.fixture(scope="module")
def jumping(tmp_path_factory):
    """Environment of a process, and of its children, in which the clock of the day jumps by up to a day at each look."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = tmp_path_factory.mktemp("clock") / "wall_clock.so"
    source = Path(__file__).with_name("wall_clock.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return ENVIRONMENT | {"LD_PRELOAD": str(library)}


def test_a_clock_that_jumps_during_calls(jumping):
    """Workers are killed and stopped, so that the caller waits for all that it ever waits for. A wait until a time of the clock could last a day."""
    command = [sys.executable, "-c", _STRUCK, *(str(int(number)) for number in (signal.SIGKILL, signal.SIGSTOP))]
    done = subprocess.run(command, env=jumping, capture_output=True, text=True, timeout=SECONDS)
    assert done.stdout == "done\n", done.stderr


@pytest.mark.skipif(PROFILE != "nightly", reason="nightly: processes over gloo take long to start")
def test_a_clock_that_jumps_under_ranks(jumping, tmp_path):
    paths = [tmp_path / str(i) for i in range(3)]
    target = random_llama(3)
    for path, model in zip(paths, (noisy(target, 0.1, 1), noisy(target, 0.02), target), strict=True):
        model.save_pretrained(path)
    _, killed, *_ = program("tests.pipespec.ranks_program", *paths, **jumping)
    wanted = target.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=60, do_sample=False).tolist()
    assert killed["texts"] == [wanted] * 2

    cases = ["cycle5:kill-soon:0", "cycle9:kill-soon:1", "cycle20:kill-soon:2", "cycle7:stop-soon:1"]
    ended = program("tests.spd.ranks_harness", "phases", paths[-1], *cases, **jumping)
    for ranks in ended:
        assert [status for status, error in ranks if error].count(1) == 2, ranks


# ---- full disks


def mounted(path: Path, size: int) -> bool:
    """Whether a file system in memory of ``size`` bytes could be mounted at ``path``."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.fixture
def full_disk(tmp_path):
    """A folder on a disk with 8 KiB left."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or not mounted(folder, 16 << 10):
        pytest.skip("needs the right to mount a small file system")
    try:
        (folder / "other").write_bytes(bytes(8 << 10))
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_result_that_does_not_fit_a_disk_leaves_the_earlier_one(full_disk):
    file = full_disk / "result.json"
    replace(file, "earlier")
    with pytest.raises(OSError, match="No space left on device") as caught:
        replace(file, "x" * (64 << 10))
    assert caught.value.errno == errno.ENOSPC
    assert file.read_text() == "earlier"
    assert sorted(path.name for path in full_disk.iterdir()) == ["other", "result.json"]
    replace(file, "later")
    assert file.read_text() == "later"


def test_what_is_no_regular_file_is_written_in_place(full, tmp_path):
    """A device would else become a file: ``--out /dev/null`` of root would take it from all programs."""
    file, link, pipe = (tmp_path / name for name in ("file", "link", "pipe"))
    file.write_text("earlier")
    file.chmod(0o640)
    link.symlink_to(file)
    replace(link, "by the link")
    assert link.is_symlink()
    assert file.read_text() == "by the link"
    replace(file, "later")
    assert file.read_text() == "later"
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        replace(pipe, "through the pipe")
        assert os.read(reader, 100) == b"through the pipe"
        assert pipe.is_fifo()
    finally:
        os.close(reader)
    (tmp_path / "disk").symlink_to(full)
    with pytest.raises(OSError, match="No space left") as caught:
        replace(tmp_path / "disk", "x")
    assert caught.value.filename == str(tmp_path / "disk")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "file", "link", "pipe"]


def test_threads_that_write_one_file(tmp_path):
    file, texts = tmp_path / "file", [letter * 5000 for letter in "ab"]
    with ThreadPoolExecutor() as pool:
        for _ in pool.map(lambda i: replace(file, texts[i % 2]), range(400)):
            assert file.read_text() in texts
    assert list(tmp_path.iterdir()) == [file]


def test_a_trace_that_does_not_fit_a_disk_can_be_saved_elsewhere(full_disk, tmp_path):
    target, ids = random_llama(3), random_prompts(1, seed=2)[0][None]
    with Pipeline(target, noisy(target, 0.02), schedule="lockstep", trace=1000) as pipe:
        out = pipe.generate(ids, max_new_tokens=60)
        with pytest.raises(OSError, match="No space left on device"):
            pipe.report.save_trace(full_disk / "run.json")
        pipe.report.save_trace(tmp_path / "run.json")
        assert len(json.loads((tmp_path / "run.json").read_text())["traceEvents"]) > 60
        assert torch.equal(pipe.generate(ids, max_new_tokens=60), out)


_FULL_MEMORY_DISK = """
import os, sys, torch
from pathlib import Path
assert os.statvfs("/dev/shm").f_bavail == 0
from pipespec import Pipeline
from tests.conftest import noisy, random_llama

target, prompt = random_llama(3), torch.tensor([[5, 6, 7, 8]])
wanted = target.generate(prompt, max_new_tokens=40, do_sample=False)
with Pipeline(target, noisy(target, 0.02), schedule="workers") as pipe:
    assert torch.equal(pipe.generate(prompt, max_new_tokens=40), wanted)
print("done")
"""


@pytest.mark.skipif(PROFILE != "nightly", reason="nightly: one more process that starts workers")
def test_workers_need_no_room_in_dev_shm():
    """Containers give it 64 MB, which other programs may have filled."""
    fill = "mount -t tmpfs -o size=4096 tmpfs /dev/shm && head -c 4096 /dev/zero > /dev/shm/full"
    probe = (
        subprocess.run(["unshare", "-m", "sh", "-c", fill], capture_output=True) if shutil.which("unshare") else None
    )
    if probe is None or probe.returncode:
        pytest.skip("needs the right to mount in a namespace of its own")
    command = ["unshare", "-m", "sh", "-c", f'{fill} && exec "$@"', "sh", sys.executable, "-c", _FULL_MEMORY_DISK]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=SECONDS)
    assert done.stdout == "done\n", done.stderr


# ---- limits of memory


@pytest.mark.parametrize("room", [0, 4 << 20], ids=["none", "4 MiB"])
@pytest.mark.parametrize("schedule", ["plain", "lockstep", "workers"])
def test_a_call_that_a_limit_refuses_memory(schedule, room):
    """The error tells what helps, and the next call has its text."""
    target, ids = random_llama(3), random_prompts(1, seed=2)[0][None]
    wanted = target.generate(ids, max_new_tokens=NEW, do_sample=False)
    # The keys of a layer take 184 MB: malloc never takes more than 32 MiB from what it keeps for later, and what other tests left ends before.
    many = torch.randint(2, VOCABULARY, (2048, 400), generator=torch.Generator().manual_seed(0))
    before = resource.getrlimit(resource.RLIMIT_AS)
    with Pipeline(target, noisy(target, 0.02), schedule=schedule) as pipe:
        assert torch.equal(pipe.generate(ids, max_new_tokens=NEW), wanted)
        gc.collect()
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + room, before[1]))
        try:
            with pytest.raises((MemoryError, OSError, RuntimeError)) as caught:
                pipe.generate(many, max_new_tokens=300)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)
        notes = " ".join(caught.value.__notes__)
        assert "lower max_new_tokens or the batch" in notes
        assert "(ulimit -v)" in notes
        assert torch.equal(pipe.generate(ids, max_new_tokens=NEW), wanted)
