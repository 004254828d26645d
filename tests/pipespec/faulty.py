"""Models that misbehave when told to, in whatever process they run. Imported by the tests and by the workers.

A model's buffers are shared with its worker, so a test turns the switches of a running worker by writing to its own copy.
"""

from __future__ import annotations

import random
import time

import torch
from transformers import LlamaForCausalLM

DELAY, FAIL, CALLS = range(3)


class Faulty(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        # seconds to sleep at most per forward; calls after which it fails (0: never); calls so far
        self.register_buffer("switches", torch.zeros(3), persistent=False)

    @classmethod
    def like(cls, model: LlamaForCausalLM) -> Faulty:
        other = cls(model.config)
        other.load_state_dict(model.state_dict())
        return other.eval()

    def set(self, *, delay: float = 0.0, fail_at: int = 0) -> None:
        """At most ``delay`` seconds of sleep per forward (negative: exactly so long); the ``fail_at``-th from now raises."""
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
