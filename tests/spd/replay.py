"""Decoding on symbols: the tokens in flight and their depths in every cycle.

It follows from the machine's rules alone (a token enters, each stage passes it on, the oldest leaves, a wrong draft empties the pipe) and uses
nothing of the package.
"""


class Machine:
    """``n`` stages; ``prompt`` positions are complete. ``depth``: by position the stages passed, of the tokens in flight."""

    def __init__(self, n: int, prompt: int) -> None:
        self.n, self.depth = n, {prompt: 0}

    def cycle(self, right: bool) -> None:
        """Run one cycle. ``right``: whether the draft token after the exiting one equals the target's."""
        oldest, newest = min(self.depth), max(self.depth)
        for position in self.depth:
            self.depth[position] += 1
        if self.depth[oldest] == self.n:  # leaves the last stage
            del self.depth[oldest]
            if not right:
                self.depth = {oldest + 1: 0}
                return
        self.depth[newest + 1] = 0
