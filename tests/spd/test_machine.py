"""The decode machine without a model: a text in which each token depends on the whole prefix, and drafts that a test makes right or wrong."""

from __future__ import annotations

import itertools
import math
import random
import subprocess
import sys

import pytest

from pipespec_spd.law import spd_tokens_per_cycle
from pipespec_spd.machine import Machine

VOCABULARY = 1000


def truth(prefix) -> int:
    """The target: its next token is a function of all tokens before."""
    value = 17
    for token in prefix:
        value = (value * 31 + token + 7) % 1_000_003
    return value % VOCABULARY


def text_of(prompt, length: int) -> list[int]:
    out = list(prompt)
    while len(out) < length:
        out.append(truth(out))
    return out


def made(prompts, limits, eos, n, kind=Machine) -> Machine:
    machine = kind(n)
    machine.reset(prompts, limits, eos)
    return machine


class Trace:
    """Runs a machine, and records independently what each stage has processed and when."""

    def __init__(self, prompts, limits, eos, n, right):
        """``right(row, position)``: whether the draft of that position is the target's token."""
        self.machine = made(prompts, limits, eos, n)
        self.n, self.right, self.limits = n, right, limits
        self.held = [[len(p)] * n for p in prompts]  # [row][stage]
        self.flushes = []  # (row, exited, fill, held before, length)
        self.fills: list[list[int]] = [[] for _ in prompts]
        self.exited: list[list[int]] = [[] for _ in prompts]
        self.machine.begin([truth(p) for p in prompts])

    def cycle(self, without=()) -> None:
        m, n = self.machine, self.n
        drafts = {}
        before = {i: m.all_tokens(i) for i in range(len(self.held))}
        for row, tokens, fill in m.requests():
            assert list(tokens) == before[row]
            assert 1 <= fill <= n
            if row in without:
                continue
            token = truth(tokens)
            drafts[row] = token if self.right(row, len(tokens)) else (token + 1) % VOCABULARY
        entries = m.entries()
        fill = dict.fromkeys(range(len(self.held)), 0)
        for stage, work in enumerate(entries):
            for row, position, token in work:
                assert position == self.held[row][stage], "keys and values are appended"
                assert token == before[row][position]
                self.held[row][stage] += 1
                fill[row] += 1
        chosen = {}
        for row, position, _ in m.exits():
            chosen[row] = truth(before[row][: position + 1])
            self.exited[row].append(position)
        for row, f in fill.items():
            if f:
                self.fills[row].append(f)
        for row, length in m.commit(drafts, chosen):
            exited = self.exited[row][-1]
            self.flushes.append((row, exited, fill[row], list(self.held[row]), length))
            self.held[row] = [min(h, length) for h in self.held[row]]
        for stage in range(n):
            assert m.held(stage) == [held[stage] for held in self.held]
        for row, limit in enumerate(self.limits):
            assert max(len(m.all_tokens(row)), *self.held[row]) <= limit

    def run(self) -> Trace:
        while self.machine.running:
            self.cycle()
        return self

    def text(self, row: int = 0) -> list[int]:
        return self.machine.tokens(0, row, 0, self.machine.length(0, row))


def prompt_of(length: int) -> list[int]:
    return [(i * 37 + length) % VOCABULARY for i in range(length)]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("prompt", [1, 2, 3, 9])
def test_the_text_whatever_is_drafted(n, prompt):
    """All patterns of right and wrong drafts over up to eight positions, so every fill level, lag, limit and boundary occurs."""
    start = prompt_of(prompt)
    for new in (1, 2, 5, 8):
        for pattern in range(2**new):
            trace = Trace([start], [prompt + new], (), n, lambda _, p, w=pattern: bool(w >> (p - prompt) & 1)).run()
            assert trace.text() == text_of(start, prompt + new)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
def test_lengths_after_every_flush(n):
    """When c leaves a full pipe, stage s has processed position c + n - 1 - s, and holds c + n - s positions. A flush cuts all stages to c + 1."""
    seen, draw = set(), random.Random(n)
    for _ in range(200):
        limit = 5 + draw.randint(2, 30)
        trace = Trace([prompt_of(5)], [limit], (), n, lambda *_: draw.random() < 0.7).run()
        for _, exited, fill, before, length in trace.flushes:
            assert length == exited + 1
            # Near the limit nothing is drafted any more, so the first stages idle.
            assert before == [min(exited + n - s, limit) for s in range(n)]
            assert fill == min(n, limit - exited)
            seen.add(fill)
    assert seen == set(range(min(2, n), n + 1)) if n > 1 else seen == {1}


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8, 20])
def test_the_oracle_follows_the_law_exactly(n):
    """One token per cycle after the pipe has filled, which takes n - 1 cycles. The prefill's token takes no cycle."""
    for new in (1, 2, 3, n, n + 1, 50):
        trace = Trace([prompt_of(4)], [4 + new], (), n, lambda *_: True).run()
        counts = trace.machine.count(0)
        assert counts.tokens == new
        assert counts.cycles == (new - 1 + n - 1 if new > 1 else 0)
        assert counts.flushes == 0
        assert counts.accepted == counts.checked == (new - 1)
        if new == 50:
            assert (counts.tokens - 1) / (counts.cycles - (n - 1)) == spd_tokens_per_cycle(1.0, n)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("a", [0.0, 0.3, 0.7, 0.9])
def test_random_drafts_follow_the_law(n, a):
    """Within five standard errors, and exactly if no draft is right: then every token but the prefill's takes n cycles. The number of tokens between
    flushes is geometric, so K varies by (n - 1) per flush."""
    tokens, draw = 5_000, random.Random(1000 * n + int(10 * a))
    machine = made([[1]], [1 + tokens], (), n)
    machine.begin([2])
    while machine.running:  # a text of equal tokens
        drafts = {row: 2 if draw.random() < a else 3 for row, _, _ in machine.requests()}
        machine.commit(drafts, dict.fromkeys((e.row for e in machine.exits()), 2))
    counts = machine.count(0)
    found = (counts.tokens - 1) / (counts.cycles - (n - 1) * (a > 0))
    error = math.sqrt(a * (1 - a) / counts.checked)
    assert abs(counts.accepted / counts.checked - a) <= 5 * error
    assert abs(1 / found - 1 / spd_tokens_per_cycle(a, n)) <= 5 * (n - 1) * error


def test_cycles_are_counted_exactly():
    """K = (N - 1) + (n - 1)(1 + flushes that were followed by more), whatever happens."""
    draw = random.Random(3)
    for _ in range(300):
        n, new = draw.randint(1, 6), draw.randint(2, 25)
        trace = Trace([prompt_of(3)], [3 + new], (), n, lambda *_: draw.random() < 0.6).run()
        counts = trace.machine.count(0)
        ended_by_flush = bool(trace.flushes) and trace.flushes[-1][4] == 3 + new - 1
        fillings = 1 + len(trace.flushes) - ended_by_flush
        assert counts.cycles == (counts.tokens - 1) + (n - 1) * fillings


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6])
def test_an_end_at_every_lag(n):
    """The text stops at its end, wherever the end is, right after the prefill included, and whatever the drafts are."""
    whole = text_of(prompt_of(2), 2 + 14)
    assert len(set(whole[2:])) == 14
    for place, wrong in itertools.product(range(14), range(-1, 14)):
        eos = {whole[2 + place], VOCABULARY + 5}
        trace = Trace([prompt_of(2)], [16], eos, n, lambda _, p, w=wrong: p != 2 + w).run()
        assert trace.text() == whole[: 2 + place + 1]
        assert trace.machine.count(0).tokens == place + 1
        assert not any(trace.machine.entries())


def test_an_end_that_is_only_drafted():
    """A drafted end token does not end the row, and nothing is drafted after it, because the row would end if it were right."""
    n = 4
    whole = text_of(prompt_of(2), 30)
    end = (whole[6] + 1) % VOCABULARY
    assert end not in whole
    trace = Trace([prompt_of(2)], [30], {end}, n, lambda _, p: p != 6)
    idle = 0
    while trace.machine.running:
        idle += trace.machine.requests() == []
        trace.cycle()
    assert trace.text() == whole
    assert idle == n - 1 + (n - 1)  # while it flew; and the limit's last ones


def test_rows_are_machines_of_their_own():
    """Each row of a batch equals the same row alone, cycle for cycle."""
    n, prompts, limits = 3, [prompt_of(k) for k in (1, 4, 2, 7)], [25, 9, 30, 12]

    def right(row, position):
        return (position * 7 + row) % 5 > 0

    together = Trace(prompts, limits, {3, 4}, n, right).run()
    for row, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        alone = Trace([prompt], [limit], {3, 4}, n, lambda _, p, r=row: right(r, p)).run()
        assert alone.text() == together.text(row)
        assert alone.machine.count(0) == together.machine.count(row)
        assert alone.fills[0] == together.fills[row]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_cycles_without_drafts(n):
    """The drafter gives none in any of nine cycles, again and again: the text is right, and without any draft each token takes n cycles."""
    for pattern in range(2**9):
        trace, cycles = Trace([prompt_of(2)], [12], (), n, lambda _, p: p % 4 > 0), 0
        while trace.machine.running:
            trace.cycle(without=(0,) if pattern >> (cycles % 9) & 1 else ())
            cycles += 1
        assert trace.text() == text_of(prompt_of(2), 12)
    assert cycles == 9 * n
    assert trace.machine.count(0).checked == 0


def test_a_row_that_is_ended_from_outside():
    trace = Trace([prompt_of(2), prompt_of(3)], [20, 20], (), 3, lambda *_: True)
    for _ in range(6):
        trace.cycle()
    trace.machine.end_row(0)
    held = trace.machine.length(0, 0)
    trace.run()
    assert trace.text(0) == text_of(prompt_of(2), held)
    assert trace.text(1) == text_of(prompt_of(3), 20)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (([[1]], [5], (), 0), "at least one stage"),
        (([[]], [5], (), 2), "prompt of row 0 is empty"),
        (([[1], [1, 2]], [5, 2], (), 2), "row 1 may grow to 2 tokens, its prompt has 2"),
        (([], [], (), 2), "0 prompts"),
        (([[1]], [5, 6], (), 2), "1 prompts and 2 limits"),
    ],
)
def test_sizes_that_make_no_sense(arguments, match):
    with pytest.raises(ValueError, match=match):
        made(*arguments)


def test_what_does_not_belong_to_a_cycle():
    machine = made([[1], [2]], [9, 2], (), 2)
    machine.begin([5, 5])
    with pytest.raises(ValueError, match=r"drafts for rows \[1\], which requested none"):
        machine.commit({0: 1, 1: 1}, {})
    with pytest.raises(ValueError, match=r"choices for rows \[0\], but rows \[\] left"):
        machine.commit({0: 1}, {0: 1})
    machine.commit({0: 1}, {})
    with pytest.raises(ValueError, match=r"choices for rows \[\], but rows \[0\] left"):
        machine.commit({0: 1}, {})


def test_no_torch():
    code = "import sys, pipespec_spd.machine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
