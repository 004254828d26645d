"""Drafters without weights, for tests: with a known text, at random, or failing."""

import random

import torch

from pipespec_spd import Drafter


class Known(Drafter):
    """Drafts from known texts, by prompt. A draft is right at rate ``a``, drawn per position and visit, and otherwise certainly wrong."""

    def __init__(self, vocabulary: int, a: float = 1.0, seed: int = 0) -> None:
        self.vocabulary, self.a = vocabulary, a
        self.draw = random.Random(seed)
        self.texts: dict[tuple[int, ...], list[int]] = {}

    def learn(self, prompts: list[torch.Tensor], out: torch.Tensor) -> None:
        """``out [B, S + new]``: the target's, padded left as the prompts and right after the text."""
        width = max(len(p) for p in prompts)
        for prompt, row in zip(prompts, out.tolist(), strict=True):
            self.texts[tuple(prompt.tolist())] = row[width - len(prompt) :]

    def start(self, prompts, capacity, select):
        self.rows = [self.texts[tuple(p)] for p in prompts]

    def draft(self, requests):
        out = []
        for row, tokens, _ in requests:
            text = self.rows[row]
            right = text[len(tokens)] if len(tokens) < len(text) else 0
            out.append(right if self.draw.random() < self.a else (right + 1) % self.vocabulary)
        return out


class Blind(Drafter):
    """Draws ids at random."""

    def __init__(self, vocabulary: int, seed: int = 0) -> None:
        self.vocabulary, self.draw = vocabulary, random.Random(seed)

    def draft(self, requests):
        return [self.draw.randrange(self.vocabulary) for _ in requests]


class Failing(Drafter):
    """Raises in the ``at``-th call of one of its methods; otherwise it guesses token 5."""

    features = (0, 2)

    def __init__(self, method: str, at: int = 1, what=None) -> None:
        self.method, self.at, self.what, self.calls = method, at, what, 0

    def _called(self, method: str):
        if method == self.method:
            self.calls += 1
            if self.calls == self.at:
                if self.what is not None:
                    return self.what
                raise ArithmeticError("made to fail")
        return None

    def start(self, prompts, capacity, select):
        self._called("start")

    def observe(self, index, rows, positions, values):
        self._called("observe")

    def draft(self, requests):
        wrong = self._called("draft")
        return [5] * len(requests) if wrong is None else wrong

    def truncate(self, row, length):
        self._called("truncate")

    def finish(self):
        self._called("finish")
