"""OpenVINO GenAI as contenders: the alternative for a user of a CPU."""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pipespec.bench.contenders import Contender, GeneratedText, TunedSetting, Workload
from pipespec.bench.results import StepCounts

SERVER = Path(__file__).with_name("openvino_server.py")
NUM_DRAFT_TOKENS = (5, 3, 8)


class OpenVINOContender(Contender):
    """OpenVINO GenAI in float32: plain, with a draft model, or with prompt lookup. Tuned as HuggingFace's rows.

    Args:
        interpreter: A Python with openvino-genai and optimum-intel.
        folders: The models' folders by name; the target is ``"target"``.
        draft: Name of the draft model.
        lookup: Use prompt lookup.
    """

    slow = True

    def __init__(
        self, interpreter: str, folders: dict[str, Path], draft: str | None = None, lookup: bool = False
    ) -> None:
        key = f"openvino-{draft}" if draft else "openvino-lookup" if lookup else "openvino-plain"
        label = "OpenVINO GenAI" + (f", {draft}" if draft else ", prompt lookup" if lookup else "")
        super().__init__(key, label, "other", [draft] if draft else [])
        names = ["target", *self.drafts]
        # Isolated: this folder and PYTHONPATH have modules of the same names.
        self._command = [interpreter, "-I", str(SERVER), *(f"{name}={folders[name]}" for name in names)]
        self._lookup = lookup
        self._server: subprocess.Popen[str] | None = None

    def start(self, workload: Workload) -> None:
        if not workload.is_greedy or workload.family.target.dtype != torch.float32:
            raise ValueError("OpenVINO's rows are greedy and in float32")
        counts = NUM_DRAFT_TOKENS if self.drafts or self._lookup else (None,)
        # The outer loop is over the numbers of threads, because each one builds the pipeline again.
        self.settings = [TunedSetting(n, count) for n, count in itertools.product(workload.thread_numbers, counts)]
        self._built: int | None = None
        self._server = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer("built")
        super().start(workload)

    def use(self, setting: TunedSetting) -> None:
        super().use(setting)
        if self._built != setting.threads:
            draft = self.drafts[0] if self.drafts else None
            self._ask("built", draft=draft, lookup=self._lookup, threads=setting.threads)
            self._built = setting.threads

    def run(self, ids: torch.Tensor, new_tokens: int, seed: int) -> GeneratedText:
        tokens = self._ask(
            "tokens",
            ids=ids[0].tolist(),
            new_tokens=new_tokens,
            stop=self.workload.end_tokens,
            num_draft_tokens=self.setting.num_draft_tokens,
            lookup=self._lookup,
        )
        # It does not report the number of forwards with draft tokens.
        steps = 0 if self.drafts or self._lookup else len(tokens)
        return GeneratedText(tokens, (StepCounts("target", steps, len(tokens) if steps else 0),))

    def _ask(self, wanted: str, **request: Any) -> Any:
        assert self._server is not None
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return self._answer(wanted)

    def _answer(self, wanted: str) -> Any:
        assert self._server is not None
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        if not line:
            raise RuntimeError(f"OpenVINO's process ended with status {self._server.wait()}; its error is above")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer[wanted]

    def close(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.communicate()
            self._server = None


def openvino_contenders(interpreter: str, folders: dict[str, Path], drafts: Sequence[str]) -> list[Contender]:
    """Plain, prompt lookup, and one for each draft."""
    rows = [OpenVINOContender(interpreter, folders), OpenVINOContender(interpreter, folders, lookup=True)]
    return [*rows, *(OpenVINOContender(interpreter, folders, draft=name) for name in drafts)]
