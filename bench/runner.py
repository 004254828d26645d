"""The runner of all whole generations: systems x prompts -> JSON lines in a folder of results, of which the tables are views.

Systems take turns prompt by prompt, the first one changing with each prompt. They share the models, the prompts and one process, and do not see the attention
implementations that others set. transformers' systems are tuned first, on prompts that are not measured; ours run with their defaults. The number of CPU threads is
tuned for every system that runs in one process. Every text is compared with the reference's. A run can be interrupted at any time and started again: it does what
is missing.
"""

import gc
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from bench import tables
from bench.machine import utc
from bench.samples import VERSION, ResultsFolder, Sample
from bench.systems import REFERENCE, System, Workload
from pipespec.process.progress import RemainingWork, say

TRIES = 2
"""Failures of a system in a row, after which it is not tried again in this process."""

OPEN = 6
"""Systems that may keep processes or graphs at the same time. The others of this kind start again, and warm up, before their turn."""

SLOW_START_SHARE, TUNING_SHARE = 0.3, 0.5
"""Shares of the time limit: slow systems start before the first, and tuning ends at the second."""

TURN_SHARE, MIN_TURN_S = 0.3, 10.0
"""A start or a text that takes longer than this share of the time limit and longer than these seconds has failed."""

_WARM_UP_TOKENS = 8


@dataclass
class Dataset:
    """One dataset: its prompts by sample, and prompts for calibration, LongTensors ``[1, S]``. ``files``: where the prompts come from."""

    name: str
    format: str
    prompts: dict[str, torch.Tensor]
    calibration: list[torch.Tensor]
    files: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        """The dataset in the results."""
        lengths = {name: ids.shape[1] for name, ids in self.prompts.items()}
        return {"name": self.name, "format": self.format, "files": list(self.files), "prompt_tokens": lengths}


_SAME = {
    "family": ("target", "drafts", "parameters"),
    "run": ("dtype", "device", "sampling", "seed", "threads", "new_tokens", "chat_template"),
    "machine": ("cpu", "gpus", "torch", "transformers", "pipespec"),
}
_SYSTEM = ("kind", "drafts", "options")
_DATASET = ("format", "files")


def continued(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run that a second start continues. Systems, datasets, samples and repeats may be added.

    Raises:
        ValueError: Something else differs, so that the new samples would not compare with the old ones.
    """
    systems, data = {s["key"]: s for s in before["systems"]}, {d["name"]: d for d in before["datasets"]}
    pairs = [("", before.get(part, {}), now.get(part, {}), names) for part, names in _SAME.items()]
    pairs += [(f" of {s['key']}", systems[s["key"]], s, _SYSTEM) for s in now["systems"] if s["key"] in systems]
    pairs += [(f" of {d['name']}", data[d["name"]], d, _DATASET) for d in now["datasets"] if d["name"] in data]
    differing = [
        f"{name}{what} is {old.get(name)!r} there and {new.get(name)!r} here"
        for what, old, new, names in pairs
        for name in names
        if old.get(name) != new.get(name)
    ]
    if differing:
        raise ValueError(f"the folder holds a run with other settings: {'; '.join(differing)}. Give another --out")
    for dataset in now["datasets"]:
        found = data.setdefault(dataset["name"], dataset)
        found["prompt_tokens"] |= dataset["prompt_tokens"]
    for system in now["systems"]:
        systems.setdefault(system["key"], system).pop("not_measured", None)
    repeats = max(before["run"]["repeats"], now["run"]["repeats"])
    return before | {
        "run": before["run"] | {"repeats": repeats, "finished": None},
        "systems": list(systems.values()),
        "datasets": list(data.values()),
        "resumed": [*before.get("resumed", []), now["machine"]],
    }


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise ``TimeoutError`` in a block that takes longer, where Python handles signals: only in the main thread."""
    if seconds == float("inf") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(number: int, frame: object) -> None:
        raise TimeoutError(f"not over after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Runner:
    """Measures what is missing in a results folder.

    Args:
        folder: Where.
        workload: What the systems generate.
        systems: The rows.
        datasets: The prompts.
        about: ``machine``, ``family`` and ``run`` of the settings, and whatever a table needs besides.
        tuning: Candidates tried of each system that is tuned; 0: none.
        tuning_tokens: New tokens of the runs that tune; None: the workload's.
        limit: Seconds after which no new round begins.

    Raises:
        ValueError: The folder holds a run with other settings.
    """

    def __init__(
        self,
        folder: ResultsFolder,
        workload: Workload,
        systems: Sequence[System],
        datasets: Sequence[Dataset],
        about: dict[str, Any],
        *,
        tuning: int = 4,
        tuning_tokens: int | None = None,
        limit: float = float("inf"),
    ) -> None:
        self.folder, self.workload, self.datasets = folder, workload, list(datasets)
        self.systems = {system.key: system for system in systems}
        self.tuning, self.tuning_tokens, self.limit = tuning, tuning_tokens, limit
        now = {"version": VERSION, "reference": REFERENCE, **about}
        now["run"] = {"repeats": 1, "started": utc(), "finished": None} | now["run"]
        now |= {"systems": [s.record() for s in systems], "datasets": [d.record() for d in datasets]}
        self.repeats: int = now["run"]["repeats"]
        # Samples of systems and datasets that this start does not name are kept, and not continued.
        self.settings = continued(folder.settings(), now) if folder.exists else now
        self.records = {record["key"]: record for record in self.settings["systems"]}
        self._failures: Counter[str] = Counter()
        self._open: list[str] = []
        self._started: set[str] = set()
        self._attention: dict[str, list[str | None]] = {}
        """By system: the attention implementation of each model that it used last."""
        self._began = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began

    def _rounds(self) -> list[tuple[int, Dataset, str]]:
        return [(repeat, d, name) for repeat in range(self.repeats) for d in self.datasets for name in d.prompts]

    def _is_missing(self, key: str, repeat: int, dataset: Dataset, name: str) -> bool:
        sample = self.folder.samples.get((dataset.name, key, name, repeat))
        return "not_measured" not in self.records[key] and (sample is None or sample.error is not None)

    def missing(self) -> int:
        """Number of samples that are not complete."""
        return sum(self._is_missing(key, *round_) for round_ in self._rounds() for key in self.systems)

    def run(self) -> dict[str, Any]:
        """Measure; returns the summary, which is also written after each round. Whatever is raised, the samples that are complete are in the folder."""
        rounds, todo = self._rounds(), self.missing()
        total = len(self.systems) * len(rounds)
        if 0 < todo < total:
            say(f"{total - todo} of {total} samples are there already")
        longest = 0.0
        self.save()
        with RemainingWork(total, total - todo) as self.bar:
            try:
                for number, (repeat, dataset, name) in enumerate(rounds):
                    # A round begins only if it can be expected to end within the time limit; one always runs.
                    if number and self.elapsed + longest > self.limit:
                        break
                    began = self.elapsed
                    self._round(number, repeat, dataset, name)
                    longest = max(longest, self.elapsed - began)
                    self.save()
            finally:
                for key in self._started:
                    self.systems[key].close()
                summary = self.save()
        if summary["complete"]:
            self.settings["run"]["finished"] = utc()
            summary = self.save()
        return summary

    def save(self) -> dict[str, Any]:
        """Write the settings and the summary; returns the summary."""
        # With one system and no drafts it is what that system needs.
        self.settings["run"]["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        self.folder.write("settings.json", self.settings)
        summary = tables.summarise(self.settings, self.folder.samples.values())
        self.folder.write("summary.json", summary)
        return summary

    def _round(self, number: int, repeat: int, dataset: Dataset, name: str) -> None:
        """One prompt in all systems that lack it. The first system changes, so that no system always follows the same one."""
        keys = list(self.systems)
        first = number % max(1, len(keys))
        for key in (*keys[first:], *keys[:first]):
            if self._is_missing(key, repeat, dataset, name) and self._failures[key] < TRIES:
                self.bar.show(f"{dataset.name} {name}: {self.systems[key].label}")
                self._measure(self.systems[key], repeat, dataset, name)
        self._compare(dataset, name)

    def _measure(self, system: System, repeat: int, dataset: Dataset, name: str) -> None:
        """Write one sample: a text, or the error."""
        ids = dataset.prompts[name]
        try:
            if not self._ready(system, dataset):
                return
            sample = self.call(system, ids, self.workload.new_tokens, list(dataset.prompts).index(name))
        except Exception as error:
            sample = Sample(error=self._failed(system, error))
        sample.dataset, sample.system, sample.sample, sample.repeat = dataset.name, system.key, name, repeat
        sample.prompt_tokens = ids.shape[1]
        self.folder.add(sample)
        if sample.error is None:
            self._failures[system.key] = 0
            self.bar.done += 1
            return
        self._failures[system.key] += 1
        if self._failures[system.key] == TRIES:
            say(f"{system.label}: not tried again in this run ({sample.error})")

    def _failed(self, system: System, error: Exception) -> str:
        """Close a system that failed; returns the message. Raises ``RuntimeError`` where it has destroyed the GPU's context."""
        text = str(error).strip() or "no reason given"
        message = f"{type(error).__name__}: {text.splitlines()[0]}"
        say(f"{system.label}: {message}")
        if system.key in self._open:
            self._open.remove(system.key)
        try:
            system.close()
        except Exception as further:
            say(f"{system.label}, closing: {type(further).__name__}: {further}")
        if self.workload.family.target.device.type == "cuda":
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except Exception as lost:
                raise RuntimeError(
                    f"the GPU could not be used any more after {system.label} had failed ({message}); start the command again to continue"
                ) from lost
        return message

    @contextmanager
    def turn(self, system: System) -> Iterator[None]:
        """A context around everything that a system does: the attention that it sets on the shared models is its own, and its time is limited."""
        configs = [model.config for model in self.workload.family.models.values()]
        first = [config._attn_implementation for config in configs]

        def use(wanted: list[str | None]) -> None:
            for config, implementation in zip(configs, wanted, strict=True):
                if config._attn_implementation != implementation:
                    config._attn_implementation = implementation

        use(self._attention.get(system.key, first))
        try:
            with within(max(MIN_TURN_S, TURN_SHARE * self.limit)):
                yield
        finally:
            self._attention[system.key] = [config._attn_implementation for config in configs]
            use(first)
            torch.set_num_threads(self.workload.threads)

    def call(self, system: System, ids: torch.Tensor, new_tokens: int, number: int = 0) -> Sample:
        """Let a system that has started generate once after ``ids``, LongTensor ``[1, S]``. The seed follows from the prompt's ``number``."""
        on_gpu = self.workload.family.target.device.type == "cuda"
        with self.turn(system):
            ids = ids.to(self.workload.family.target.device)
            torch.set_num_threads(system.threads)
            if on_gpu:
                torch.cuda.synchronize()
            began = time.perf_counter()
            sample = system.run(ids, new_tokens, self.settings["run"].get("seed", 0) + number)
            if on_gpu:
                torch.cuda.synchronize()
            sample.seconds = time.perf_counter() - began
        return sample

    def _ready(self, system: System, dataset: Dataset) -> bool:
        """Start, tune and warm up a system where it needs that. False where it is not measured."""
        if system.key not in self._open:
            fresh = system.key not in self._started
            if system.slow and fresh and self.elapsed > self.limit * SLOW_START_SHARE:
                self.records[system.key]["not_measured"] = "not started: the time was over"
                return False
            self._started.add(system.key)
            try:
                with self.turn(system):
                    system.start(self.workload)
            except NotImplementedError as error:
                self.records[system.key]["not_measured"] = str(error)
                return False
            warm_up = dataset.calibration[0][:, : self.workload.longest]
            self.call(system, warm_up, self.workload.new_tokens if fresh else _WARM_UP_TOKENS)
            if len(system.settings) > 1 and self.tuning:
                self._tune(system, dataset)
        else:
            self._open.remove(system.key)
        self._open.append(system.key)
        held = [key for key in self._open if self.systems[key].is_heavy]
        for key in held[:-OPEN]:
            self._open.remove(key)
            self.systems[key].pause()
            gc.collect()
        return True

    def _tune(self, system: System, dataset: Dataset) -> None:
        """Use the setting that was found before, or find the fastest one."""
        record, known = self.records[system.key], {str(setting): setting for setting in system.settings}
        if record.get("setting") in known:
            system.use(known[record["setting"]])
            return
        found: list[dict[str, Any]] = []
        for i, setting in enumerate(system.settings[: self.tuning]):
            if self.elapsed > self.limit * TUNING_SHARE:
                break
            self.bar.show(f"tuning: {system.label}, {setting}")
            system.use(setting)
            tokens = self.tuning_tokens or self.workload.new_tokens
            # The start of another system may change the storage of the weights, and the next call then packs them again. A
            # compiled system compiles again for each number of threads. Neither belongs to the speed of a setting.
            if i == 0 or system.slow:
                self.call(system, dataset.calibration[0], tokens)
            runs = [self.call(system, ids, tokens) for ids in dataset.calibration]
            speed = sum(len(run.tokens) for run in runs) / sum(run.seconds for run in runs)
            found.append({"setting": str(setting), "tokens_per_second": speed})
        best = max(range(len(found)), key=lambda i: found[i]["tokens_per_second"], default=0)
        system.use(system.settings[best])
        record |= {"setting": str(system.setting), "tuning": found}

    def _compare(self, dataset: Dataset, name: str) -> None:
        """Compare the texts of a prompt with the reference's."""
        samples = self.folder.samples
        for key, system in self.systems.items():
            reference = samples.get((dataset.name, system.compared_with or self.settings["reference"], name, 0))
            if reference is None or reference.error is not None or not system.is_exact(self.workload):
                continue
            for repeat in range(self.repeats):
                sample = samples.get((dataset.name, key, name, repeat))
                if sample is None or sample.error is not None or sample.identical is not None:
                    continue
                sample.differs_at = differs_at(sample.tokens, reference.tokens)
                sample.identical = sample.differs_at is None
                self.folder.add(sample)


def differs_at(text: Sequence[int], reference: Sequence[int]) -> int | None:
    """The first position at which two texts differ (the shorter length for a prefix); None if they are equal."""
    for i, (a, b) in enumerate(zip(text, reference, strict=False)):
        if a != b:
            return i
    return None if len(text) == len(reference) else min(len(text), len(reference))
