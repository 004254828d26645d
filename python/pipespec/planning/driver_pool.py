"""The drivers of the candidates of one chain, each built at its first use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext

from transformers import PreTrainedModel

from pipespec.config import SpeculationConfig
from pipespec.drivers import Driver, GenerationRequest, make_driver
from pipespec.drivers.graphed.driver import GraphedDriver
from pipespec.engine.ngram import NgramDraft
from pipespec.planning.planner import Candidate
from pipespec.process.progress import working

_STEPS = 256
"""Steps per stage of which a call's times are known, where the user asked for fewer."""


class DriverPool:
    """Drivers by way and drafts. Only one of them runs at a time, and the others hold no caches.

    Args:
        models: Drafts, then the target.
        trace: Steps per stage that the drivers' traces keep.
        native: See :class:`pipespec.config.SpeculationConfig`.
        ngram: The first draft, before ``models``, if it is an n-gram index: the candidates' draft 0.

    Attributes:
        holds_graphs: The present call runs without captured steps, and the captured ones keep their caches meanwhile.
    """

    def __init__(
        self, models: Sequence[PreTrainedModel], trace: int = 0, native: bool = True, ngram: NgramDraft | None = None
    ) -> None:
        self.models, self._trace, self._native, self._ngram = models, trace, native, ngram
        self.drivers: dict[tuple[str, tuple[int, ...]], Driver] = {}
        self.holds_graphs = False

    def has(self, candidate: Candidate) -> bool:
        """Whether the candidate's driver exists."""
        return (candidate.way, candidate.drafts) in self.drivers

    def has_graphs(self, candidate: Candidate) -> bool:
        """Whether the candidate's driver exists and has captured steps."""
        driver = self.drivers.get((candidate.way, candidate.drafts))
        return isinstance(driver, GraphedDriver) and bool(driver.target.all_buffers())

    def get(self, candidate: Candidate) -> Driver:
        """Return the candidate's driver with the candidate's settings, and release the caches of the others.

        Raises:
            ValueError: The models cannot run in this schedule.
            RuntimeError: Worker processes do not start.
            NotCapturable: A step cannot become a CUDA graph.
        """
        config = SpeculationConfig(
            schedule=candidate.schedule,
            graphs=candidate.captured,
            trace=max(self._trace, _STEPS if candidate.is_timed else 0),
            native=self._native,
            ngram=self._ngram if 0 in candidate.drafts else None,
            **candidate.steering,
        )
        at = (candidate.way, candidate.drafts)
        if at not in self.drivers:
            first = int(self._ngram is not None)
            models = [*(self.models[i - first] for i in candidate.drafts if i >= first), self.models[-1]]
            with working("starting draft processes") if candidate.schedule == "workers" else nullcontext():
                self.drivers[at] = make_driver(models, config)
        driver = self.drivers[at]
        driver.steer(config)
        for other in self.drivers.values():
            if other is not driver and not self._holds(other):
                other.release()
        return driver

    def _holds(self, driver: Driver) -> bool:
        return self.holds_graphs and isinstance(driver, GraphedDriver)

    def reusable_bytes(self, request: GenerationRequest) -> Counter[str]:
        """Bytes per device that a call reuses from earlier calls, whichever driver runs it."""
        found: Counter[str] = Counter()
        for driver in self.drivers.values():
            if not self._holds(driver):
                found |= driver.reusable_bytes(request)
        return found

    def release_unused(self, request: GenerationRequest) -> None:
        """Release the memory that the call does not reuse."""
        for driver in self.drivers.values():
            if self._holds(driver):
                driver.release()
            else:
                driver.release_unused(request)

    def close_all(self, *, but: Driver | None = None, graphed_only: bool = False) -> None:
        """Close and remove drivers, except ``but``."""
        for at, driver in list(self.drivers.items()):
            if driver is not but and (isinstance(driver, GraphedDriver) or not graphed_only):
                driver.close()
                del self.drivers[at]
