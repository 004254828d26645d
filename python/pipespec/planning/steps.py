"""Step times of models by their width."""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass

from pipespec.planning.validation import non_negative, positive, same_length


@dataclass(frozen=True)
class StepTimes:
    """Step times of one model with one number of threads.

    Attributes:
        name: Of the model.
        threads: CPU threads.
        widths: Tokens that a step feeds, ascending.
        seconds: ``seconds[i]`` is the time of a step of ``widths[i]``.
        prefill_s: Seconds per token of a prompt.
        device: Models with one number share a device.

    Raises:
        ValueError: A value is out of range.
    """

    name: str
    threads: int
    widths: tuple[int, ...]
    seconds: tuple[float, ...]
    prefill_s: float = 0.0
    device: int = 0

    def __post_init__(self) -> None:
        same_length("seconds", self.seconds, len(self.widths), "width")
        if not self.widths or list(self.widths) != sorted(set(self.widths)) or self.widths[0] < 1 or self.threads < 1:
            raise ValueError(
                f"{self.name}: widths must grow from at least 1, on at least one thread, not {self.widths}"
            )
        for s in self.seconds:
            positive(s, f"a step time of {self.name}")
        non_negative(self.prefill_s, f"the prompt's time of {self.name}")

    def at(self, width: float) -> float:
        """Seconds of a step of ``width``: interpolated, and extrapolated from the last two widths."""
        w, s = self.widths, self.seconds
        if len(w) == 1 or width <= w[0]:
            return s[0]
        i = min(bisect(w, width), len(w) - 1)
        slope = (s[i] - s[i - 1]) / (w[i] - w[i - 1])
        if width >= w[-1]:  # a wider step is never faster
            return s[-1] + max(0.0, slope) * (width - w[-1])
        return s[i - 1] + slope * (width - w[i - 1])
