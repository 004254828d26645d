"""Published runs of PipeSpec (arXiv 2505.01572), as the authors logged them: what the files hold, and how they are read.

FOLDER has one JSON file per run, as the authors' program writes it (BradMcDanel/pipespec, MIT licence). Fields that are read::

    {"metadata": {"strategy": "greedy" | "chain" | "async-chain", "lookahead": L,
                  "model_configs": [{"path": ".../Llama-3.1-8B-Instruct"}, ...]},   smallest first, the target last
     "results": [{"metrics": {"total_time": s, "tokens_generated": n,
                              "token_times": [...],                                 greedy only
                              "model_times": [[...], ...],                          else, per stage, seconds of every step
                              "accepted_tokens": [[...], ...]},                     per verifying stage, tokens appended by each step
                  "gpustats": [{"gpu_powers": [W, ...]}, ...]}]}                    may be missing
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipespec.process.records import build, parse_json

_STRATEGIES = {"greedy": "plain", "chain": "lockstep", "async-chain": "pipeline"}
LONGEST = 100
"""Maximum of tokens that one step can append, in the reference and in the perf model's histograms."""


@dataclass(frozen=True)
class PublishedSample:
    """One prompt.

    Attributes:
        steps_s: Seconds of each step, per stage.
        appended: Tokens of each step, per verifying stage.
        watts: Mean power of all GPUs of the machine together; None where it was not logged.
    """

    seconds: float
    tokens: int
    steps_s: tuple[np.ndarray, ...]
    appended: tuple[np.ndarray, ...]
    watts: float | None = None


@dataclass(frozen=True)
class PublishedRun:
    """One file. ``kind``: plain, lockstep or pipeline. ``models``: short names, the target last."""

    kind: str
    models: tuple[str, ...]
    lookahead: int
    samples: tuple[PublishedSample, ...]

    @property
    def name(self) -> str:
        return f"{self.kind} {'/'.join(self.models)}"

    @property
    def label(self) -> str:
        """The name and the recorded lookahead."""
        return self.name if self.kind == "plain" else f"{self.name} L={self.lookahead}"

    def joules_per_token(self) -> float | None:
        """Energy of all GPUs of the machine per token; None where the power of a sample was not logged."""
        joules = [s.watts * s.seconds for s in self.samples if s.watts is not None]
        return sum(joules) / sum(s.tokens for s in self.samples) if len(joules) == len(self.samples) else None

    def ms_per_token(self, count: int | None = None, keep: Sequence[int] | None = None) -> float:
        """Sum of times over sum of tokens: of all samples, of the first ``count``, or of those in ``keep``."""
        chosen = [self.samples[i] for i in keep] if keep is not None else self.samples[:count]
        return 1e3 * sum(s.seconds for s in chosen) / sum(s.tokens for s in chosen)


def load(folder: Path | str) -> list[PublishedRun]:
    """Load all runs in ``folder``: plain ones first, then lockstep, then pipelines.

    Raises:
        FileNotFoundError: The folder has no JSON file.
        ValueError: A file is not such a run: no samples, times that are not positive, or logs that do not fit together.
    """
    folder = Path(folder)
    files = sorted(folder.glob("*.json"))
    if not files:
        raise FileNotFoundError(f"{folder}: no published runs there (one .json file per run)")
    runs = [_read(file) for file in files]
    kinds = list(_STRATEGIES.values())
    return sorted(
        runs, key=lambda r: (kinds.index(r.kind), len(r.models), [(len(m), m) for m in r.models], r.lookahead)
    )


def _read(file: Path) -> PublishedRun:
    try:
        return _run(parse_json(file.read_bytes()))
    except KeyError as error:
        raise ValueError(f"{file}: {error} is missing; it is not a published run") from error
    except (ValueError, TypeError, AttributeError, LookupError, OverflowError) as error:
        raise ValueError(f"{file}: it is not a published run ({error})") from error


def _run(data: dict[str, Any]) -> PublishedRun:
    about, results = data["metadata"], data["results"]
    if about["strategy"] not in _STRATEGIES:
        raise ValueError(f"unknown strategy {about['strategy']!r}")
    models = tuple(_short_name(build(str, m["path"], "path")) for m in about["model_configs"])
    if not models or not results:
        raise ValueError("no models" if not models else "no samples")
    samples = tuple(_sample(i, result, len(models)) for i, result in enumerate(results))
    lookahead = build(int, about["lookahead"], "the lookahead")
    if not 0 <= lookahead <= LONGEST:
        raise ValueError(f"the lookahead {lookahead} is not between 0 and {LONGEST}")
    return PublishedRun(_STRATEGIES[about["strategy"]], models, lookahead, samples)


def _short_name(path: str) -> str:
    size = re.search(r"\d+(?:\.\d+)?B", path)
    return size.group() if size else path.rpartition("/")[2]


def _sample(index: int, result: dict[str, Any], stages: int) -> PublishedSample:
    where, data = f"sample {index}: ", result["metrics"]
    seconds, tokens = build(float, data["total_time"], "total_time"), build(int, data["tokens_generated"], "tokens")
    if seconds <= 0 or tokens < 1:
        raise ValueError(f"{where}{tokens} tokens in {seconds} s")
    logged = [data["token_times"]] if "token_times" in data else data["model_times"]
    steps = tuple(np.asarray(s, dtype=float) for s in build(list[list[float]], logged, "the step times"))
    counts = build(list[list[int]], data.get("accepted_tokens", []), "accepted_tokens")
    appended = tuple(np.asarray(a, dtype=int) for a in counts)
    powers = [sum(entry["gpu_powers"]) for entry in result.get("gpustats") or ()]
    watts = float(np.mean(powers)) if powers else None
    if len(steps) != stages or len(appended) != (0 if stages == 1 else stages - 1):
        raise ValueError(f"{where}the logs are not those of {stages} stages")
    for s in steps:
        if len(s) == 0 or (s <= 0).any():
            raise ValueError(f"{where}step times must be positive numbers, at least one per stage")
    for a in appended:
        if len(a) == 0 or (a < 1).any() or (a > LONGEST).any():
            raise ValueError(f"{where}every step appends between one and {LONGEST} tokens")
    if stages > 1 and len(appended[-1]) != len(steps[-1]):
        raise ValueError(f"{where}{len(steps[-1])} steps of the target, but {len(appended[-1])} counts of its tokens")
    if tokens > LONGEST * (len(steps[-1]) + 1):
        raise ValueError(f"{where}{tokens} tokens in {len(steps[-1])} steps")
    return PublishedSample(seconds, tokens, steps, appended, watts)
