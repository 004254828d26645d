"""Do captured graphs compute the same bits whatever else happens in the process? ``python -m bench.corruption [--json FILE] [--seconds S] [--dry]``

One pipeline with captured rounds generates the same text again and again; each step replays its graph. Tokens, keys and values of all layers are compared
bit by bit with the first run alone: again alone; while graphs of other models run in another thread; after torch's cuBLAS work spaces are cleared, the
allocator's free memory is returned, and that memory is allocated and filled with something else; and with all of it at once. The filled memory is
compared, too: a graph that keeps the address of memory that it no longer owns may compute the right bits and overwrite another owner's.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bench.devices import check_captured, device_for
from bench.figures import Figures, parser
from pipespec import Pipeline
from pipespec.bench.planted import plant

REPLAYS = 200
"""Graph launches of a phase, at least."""

NEW_TOKENS, ROUND = 40, 5
"""Of each run; most tokens of a round."""

JUNK_BYTES = 6 << 30
"""The fill pattern: no plausible number in any dtype of a model."""

_PATTERN = 0x7F


class Corruption:
    """The phases. ``dry``: on the CPU with small models."""

    def __init__(self, dry: bool) -> None:
        self.dry, self.device = dry, device_for(dry)
        self.runs = 1 if dry else -(-REPLAYS * ROUND // NEW_TOKENS)
        self.replays = 0
        self.junk: list[torch.Tensor] = []
        self.chain: Pipeline | None = None
        self.others: Pipeline | None = None
        where: dict[str, Any] = {"texts": 0, "device": self.device.name, "dtype": self.device.dtype}
        names = ("tiny-small", "tiny-target") if dry else ("1B", "3B")
        self.models = plant(names, seed=1, **where).models
        self.other_models = plant(names[:1], seed=2, **where).models
        self.ids = torch.arange(3, 35, device=self.device.name)[None]

    def run(self, figures: Figures) -> int:
        try:
            for section in (self.alone, self.beside, self.after_clearing, self.together):
                figures.section(section.__name__, section)
                if "alone" in figures.record["errors"]:
                    break
        finally:
            for pipe in (self.chain, self.others):
                if pipe is not None:
                    pipe.close()
        return figures.finish()

    def _state(self) -> list[torch.Tensor]:
        """Tokens, and the keys and values of all layers of the target, of one run."""
        assert self.chain is not None
        output = self.chain.generate(
            self.ids,
            attention_mask=torch.ones_like(self.ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
        )
        check_captured(self.chain, "lockstep")
        assert self.chain.report is not None
        self.replays += self.chain.report.stages[-1].steps
        cache = output.past_key_values
        length = max(cache.lengths)
        parts = [output.sequences]
        for layer in cache.layers:
            parts += [layer.keys[:, :, :length], layer.values[:, :, :length]]
        return [part.clone() for part in parts]

    def _compare(self, figures: Figures, name: str, repeats: int) -> None:
        wrong, first = 0, ""
        for _ in range(repeats):
            now = self._state()
            differing = [i for i, (a, b) in enumerate(zip(now, self.expected, strict=True)) if not _same_bits(a, b)]
            if differing:
                wrong += 1
                first = first or ("tokens" if differing[0] == 0 else f"layer {(differing[0] - 1) // 2}")
        figure = f"corruption.{name}"
        figures.add(figure, figures.record["figures"].get(figure, 0) + wrong)
        figures.detail("replays", self.replays)
        if wrong:
            raise AssertionError(f"{wrong} of {repeats} runs differ from the run alone, the first one from {first} on")

    def alone(self, figures: Figures) -> None:
        """The reference, and whether it repeats itself."""
        self.chain = Pipeline(self.models[-1], list(self.models[:-1]), schedule="lockstep", graphs=True)
        self.expected = self._state()
        assert self.chain.report is not None
        figures.detail("schedule", self.chain.report.schedule)
        figures.detail("decisions", self.chain.report.decisions)
        self._compare(figures, "alone", max(1, self.runs // 8))

    def beside(self, figures: Figures) -> None:
        """While another pipeline's graphs run."""
        with self._others():
            self._compare(figures, "beside", self.runs)

    def after_clearing(self, figures: Figures) -> None:
        """After a release of all memory that torch counts as unused."""
        self._clear()
        self._compare(figures, "after_clearing", self.runs)
        self._check_junk(figures)

    def together(self, figures: Figures) -> None:
        """Clearing while the other graphs run."""
        with self._others():
            for _ in range(3):
                self._clear()
                self._compare(figures, "together", max(1, self.runs // 8))
                self._check_junk(figures)

    def _check_junk(self, figures: Figures) -> None:
        """Whether all filled pieces of memory are unchanged. Releases them."""
        overwritten = sum(bool((piece != _PATTERN).any()) for piece in self.junk)
        figure = "corruption.overwritten"
        figures.add(figure, figures.record["figures"].get(figure, 0) + overwritten)
        pieces = len(self.junk)
        self.junk.clear()
        if overwritten:
            raise AssertionError(f"{overwritten} of {pieces} pieces of memory that no graph owns were overwritten")

    def _clear(self) -> None:
        if self.dry:
            self.junk = [torch.full((1 << 16,), _PATTERN, dtype=torch.uint8)]
            return
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        # In the sizes of work spaces, so that the driver hands out the same addresses.
        piece = 32 << 20
        self.junk = [
            torch.full((piece,), _PATTERN, dtype=torch.uint8, device="cuda") for _ in range(JUNK_BYTES // piece)
        ]
        torch.cuda.synchronize()

    @contextmanager
    def _others(self) -> Iterator[None]:
        """Other models decode in another thread meanwhile."""
        if self.others is None:
            self.others = Pipeline(self.other_models[0], schedule="plain", graphs=True)
        others, errors, stop, began = self.others, [], threading.Event(), threading.Event()

        def decode() -> None:
            try:
                while not stop.is_set():
                    others.generate(
                        self.ids, attention_mask=torch.ones_like(self.ids), max_new_tokens=NEW_TOKENS, do_sample=False
                    )
                    check_captured(others, "plain")
                    began.set()
            except Exception as error:
                errors.append(error)
            finally:
                began.set()

        thread = threading.Thread(target=decode, name="other models", daemon=True)
        thread.start()
        began.wait()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        if errors:
            raise errors[0]


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit by bit: NaN equals itself, and 0 is not -0."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.shape == b.shape and torch.equal(a.contiguous().view(integers), b.contiguous().view(integers))


def main() -> int:
    options = parser("Whether captured graphs compute the same bits beside others.").parse_args()
    figures = Figures(options.json, options.seconds)
    with torch.no_grad():
        return Corruption(options.dry).run(figures)


if __name__ == "__main__":
    sys.exit(main())
