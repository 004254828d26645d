"""Numbers of examples, and a process of its own for what may crash."""

import os
import resource
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from hypothesis import settings

from tests.trials import trials

SECONDS = 60
"""Until an example counts as hung. Each takes milliseconds."""


def examples(ci: int, nightly: int) -> settings:
    """So many examples of each profile."""
    return settings(max_examples=trials(ci, nightly))


def check_names(error: Exception, file: Path) -> None:
    """Check that the message of a refusal names the file."""
    assert str(file) in str(error), str(error)


# ---- processes


def in_child(function: Callable[[], None], *, memory: int | None = None) -> None:
    """Call ``function`` in a child of this process, and fail as it does. A crash and a hang are failures of the example, not of the test run.

    Args:
        function: Raises where the example fails.
        memory: How many bytes the child may take beyond what this process has.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reading)
            torch.set_num_threads(1)  # the threads of OpenMP are not in a child, which would wait for them
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(SECONDS)
            if memory is not None:
                pages = int(Path("/proc/self/statm").read_text().split()[0])
                resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory,) * 2)
            function()
            status = 0
        except BaseException:
            os.write(writing, traceback.format_exc()[-3000:].encode())
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as said:
        error = said.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, error or f"ended by {signal.Signals(-status).name}"
