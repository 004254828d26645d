"""Models with switches for failures and delays, in any process. The tests and the workers import them.

A model's buffers are shared with its worker, so a test turns the switches of a running worker by writing to its own copy.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import time
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from pipespec import trust

DELAY, FAIL, CALLS = range(3)


class Faulty(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        # longest sleep per forward in seconds; number of the call that fails (0: none); calls so far
        self.register_buffer("switches", torch.zeros(3), persistent=False)

    @classmethod
    def like(cls, model: LlamaForCausalLM) -> Faulty:
        other = cls(model.config)
        other.load_state_dict(model.state_dict())
        return other.eval()

    def set(self, *, delay: float = 0.0, fail_at: int = 0) -> None:
        """Sleep at most ``delay`` seconds per forward (negative: exactly as long), and raise in the ``fail_at``-th forward from now."""
        with torch.inference_mode(False), torch.no_grad():
            self.switches.copy_(torch.tensor([delay, fail_at, 0.0]))

    def forward(self, *args, **kwargs):
        with torch.inference_mode(False), torch.no_grad():
            self.switches[CALLS] += 1
        delay, fail_at, calls = self.switches.tolist()
        if fail_at and calls >= fail_at:
            raise ArithmeticError("made to fail")
        time.sleep(-delay if delay < 0 else random.uniform(0, delay))
        return super().forward(*args, **kwargs)


trust(Faulty)


class Telling(LlamaForCausalLM):
    """A draft whose worker does not start: it exits (``deed`` is "exit"), raises ``EOFError`` ("end"), or an error that describes its environment."""

    def __init__(self, config):
        if os.getpid() == config.caller:
            super().__init__(config)
            return
        if config.deed == "exit":
            os._exit(7)
        if config.deed == "end":
            raise EOFError("of its own")
        os.write(1, b"to stdout")
        os.write(2, b"to stderr")
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        cores = sorted(os.sched_getaffinity(0))
        raise RuntimeError([os.environ.get("DEED"), os.getcwd(), cores, niceness, os.getppid()])


class Stopping(Faulty):
    """A draft whose worker stops itself while it builds the model, if the environment has the caller's process id."""

    def __init__(self, config):
        # The caller builds the model, too, to compare.
        if os.environ.get("STOP_WHILE_STARTING", str(os.getpid())) != str(os.getpid()):
            os.kill(os.getpid(), signal.SIGSTOP)
        super().__init__(config)


class Stray(Faulty):
    """A draft whose worker, in each forward while ``strays`` is set, writes to shared memory that it must not write."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("strays", torch.zeros(1), persistent=False)

    def forward(self, *args, **kwargs):
        if self.strays.item() == 1 and os.getpid() != self.config.caller:
            for line in Path("/proc/self/maps").read_text().splitlines():
                addresses, rights, *_, name = line.split(maxsplit=5)
                if rights == "r--s" and "memfd:pipespec" in name:
                    ctypes.memset(int(addresses.split("-")[0], 16) + 8, 255, 8)
        return super().forward(*args, **kwargs)
