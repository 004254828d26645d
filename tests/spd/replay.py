"""Decoding on symbols: the tokens in flight and their depths in every cycle, and the rows that a draft module then sees.

It follows from the machine's rules alone (a token enters, each stage passes it on, the oldest leaves, a wrong draft empties the pipe) and uses
nothing of the package.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Call:
    """One call of the module: the rows (position, depth) that it is fed, and the cached rows before them, both in order."""

    fill: int
    cached: list[tuple[int, int]]
    fed: list[tuple[int, int]]

    @property
    def newest(self) -> int:
        return self.fed[-1][0]


@dataclass
class Machine:
    """``n`` stages; ``prompt`` positions are complete. Depth n means complete."""

    n: int
    prompt: int
    depth: dict[int, int] = field(default_factory=dict)  # position -> stages passed, of those in flight
    cache: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.depth[self.prompt] = 0

    def cycle(self, right: bool) -> Call:
        """Run one cycle. ``right``: whether the draft token behind the exiting one equals the target's."""
        n, flight = self.n, sorted(self.depth)
        oldest, newest = flight[0], flight[-1]
        before = list(self.cache)
        done = [(p, n) for p in range(len(self.cache), oldest)]
        call = Call(len(flight), before, done + [(p, self.depth[p]) for p in flight])
        self.cache += done
        for p in flight:
            self.depth[p] += 1
        if self.depth[oldest] == n:  # leaves the last stage
            del self.depth[oldest]
            if not right:
                self.depth = {oldest + 1: 0}
                return call
        self.depth[newest + 1] = 0
        return call


def trace(n: int, prompt: int, outcomes: list[bool]) -> Iterator[Call]:
    machine = Machine(n, prompt)
    for right in outcomes:
        yield machine.cycle(right)
