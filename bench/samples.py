"""The results folder of a run: what it contains, and how it is read and written.

::

    DIR/settings.json    what was asked for, and the machine
    DIR/samples.jsonl    one text of one system per line; a later line counts     Sample
    DIR/summary.json     the settings, and the rows of the tables, which follow from the samples (bench.tables)

``settings.json`` has ``machine`` (:func:`bench.machine.provenance`), ``family`` (the models: ``name``, ``target``, ``drafts``, ``parameters``,
``bytes_per_step``, ``planted``), ``run`` (``dtype``, ``device``, ``sampling``, ``seed``, ``new_tokens``, ``repeats``, ``threads``, ...), ``systems``
(:meth:`bench.systems.System.record`), ``datasets``, ``bytes_per_second`` of a plain read or copy, and ``resumed``, the machine of each later process. A value
that was not measured is ``null``; no file contains NaN.
"""

import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pipespec.process.files import replace
from pipespec.process.records import build, parse_json

VERSION = 3
"""Of the format. A reader refuses a folder of another version."""


@dataclass
class StepCounts:
    """Counts of one model in one text, those of :class:`pipespec.api.output.StageReport`. 0 where the system does not count it.

    Attributes:
        name: Of the model: the draft's name, or ``"target"``.
        steps: Forwards after the prompt's.
        histogram: Steps by accepted draft tokens. Empty: unknown.
    """

    name: str
    steps: int
    produced: int = 0
    drafted: int = 0
    accepted: int = 0
    fed: int = 0
    adopted: int = 0
    rollbacks: int = 0
    wasted: int = 0
    histogram: tuple[int, ...] = ()


@dataclass(kw_only=True)
class Sample:
    """One text of one system. A system makes it, without its place in the results and what other texts decide.

    Attributes:
        dataset: Name of the dataset.
        system: Key of the system.
        sample: Identifier within the dataset.
        repeat: Number of the repeat.
        prompt_tokens: Tokens of the prompt.
        tokens: Ids of the new tokens.
        seconds: From the call to the last token, prompt included.
        commits: ``[seconds since the call, new tokens until then]``, one entry per commit of the target, ascending.
        stages: Counts of each model, the target last.
        schedule: The schedule that ran; it may differ from the one asked for, see ``notes``.
        forward: The form of the target's forwards.
        notes: Remarks of the system about this call.
        phases: SPD: as in its report, like ``cycles``, ``verified``, ``stage_seconds`` and ``parallel_seconds``.
        identical: Whether the tokens equal those of the reference; None where they need not.
        differs_at: The first new token that differs.
        error: The message of the failure that ended the text; the other figures are empty then.
    """

    dataset: str = ""
    system: str = ""
    sample: str = ""
    repeat: int = 0
    prompt_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0
    commits: list[tuple[float, int]] = field(default_factory=list)
    stages: list[StepCounts] = field(default_factory=list)
    schedule: str | None = None
    forward: str | None = None
    notes: list[str] = field(default_factory=list)
    phases: dict[str, float] | None = None
    cycles: int | None = None
    verified: int | None = None
    stage_seconds: list[float] | None = None
    parallel_seconds: float | None = None
    identical: bool | None = None
    differs_at: int | None = None
    error: str | None = None

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.dataset, self.system, self.sample, self.repeat

    @property
    def first_token(self) -> float | None:
        """Seconds from the call to the first token."""
        return self.commits[0][0] if self.commits else None


class ResultsFolder:
    """Reads and writes the files of one run. One process writes at a time. The folder need not exist before something is written."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._is_whole = False

    @property
    def exists(self) -> bool:
        return (self.path / "settings.json").is_file()

    def settings(self) -> dict[str, Any]:
        """Read ``settings.json``.

        Raises:
            FileNotFoundError: The folder has none.
            ValueError: It is of another version, or damaged.
        """
        path = self.path / "settings.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist: is {self.path} a folder that `bench.run --out` wrote?")
        try:
            data = parse_json(path.read_bytes())
            if not isinstance(data, dict) or data.get("version") != VERSION:
                version = data.get("version") if isinstance(data, dict) else None
                raise ValueError(f"it has version {version} of the format, this program reads version {VERSION}")
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        return data

    def write(self, name: str, record: dict[str, Any]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        replace(self.path / name, json.dumps(record, indent=1, allow_nan=False) + "\n")

    @cached_property
    def samples(self) -> dict[tuple[str, str, str, int], Sample]:
        """All samples by :attr:`Sample.key`, as the file had them at first, and those added since.

        Raises:
            ValueError: A line is damaged. A last line without an end was interrupted and is left out.
        """
        found: dict[tuple[str, str, str, int], Sample] = {}
        lines = self._file.read_bytes().split(b"\n")[:-1] if self._file.is_file() else []
        for number, line in enumerate(lines, 1):
            try:
                sample = build(Sample, parse_json(line))
                if sample.tokens and not sample.seconds > 0:
                    raise ValueError(f"{len(sample.tokens)} tokens in {sample.seconds} seconds")
            except (ValueError, TypeError) as error:
                raise ValueError(f"{self._file} cannot be read: line {number}: {error}") from error
            found[sample.key] = sample
        return found

    def add(self, sample: Sample) -> None:
        line = json.dumps(asdict(sample), allow_nan=False) + "\n"
        self.samples[sample.key] = sample
        self.path.mkdir(parents=True, exist_ok=True)
        with self._file.open("a+b") as file:
            if not self._is_whole:  # an earlier process may have been interrupted within a line
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
                self._is_whole = True
            file.write(line.encode())

    @property
    def _file(self) -> Path:
        return self.path / "samples.jsonl"
