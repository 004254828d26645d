"""What the processes of a chain send each other over any connection: a call, and the status of a draft. Both are JSON, and nothing is unpickled."""

from __future__ import annotations

import json
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import numpy as np
import torch

from pipespec.engine.inputs import StageInputs
from pipespec.engine.sampling import STATELESS, Prompt, SamplingParams
from pipespec.process.records import build, parse_json


@dataclass(frozen=True)
class Status:
    """The state of a draft: sent when it is ready, when the backend of its forward is known, at the end of each generation, and when it fails.

    Attributes:
        ended: The last generation that has ended; 0: none.
        form: How its forward runs; empty before the first step.
        translated: Of the generation that has ended, see ``Driver.translated``; None for a draft with the target's tokenizer.
        failure: The error that ended this generation, or the start of the process, in a line; empty if there is none.
        details: The traceback of the failure.
    """

    ended: int = 0
    form: str = ""
    translated: tuple[int, int] | None = None
    failure: str = ""
    details: str = ""

    def failed(self, error: BaseException) -> Status:
        """This status with a failure."""
        details = "".join(traceback.format_exception(error))
        return replace(self, failure=f"{type(error).__name__}: {error}", details=details)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises ``TypeError`` or ``ValueError`` for what is no status."""
        found: Self = build(cls, parse_json(text))
        return found


@dataclass(frozen=True)
class Call:
    """One generation to take part in.

    Attributes:
        generation: Its number, at least 1.
        inputs: What a draft starts from, without a grammar: only the target has its matchers.
        eos: The ids that end a row.
    """

    generation: int
    inputs: StageInputs
    eos: Sequence[int]

    def to_json(self) -> str:
        inputs, params = self.inputs, self.inputs.sampling_params
        return json.dumps(
            [
                self.generation,
                list(self.eos),
                [prompt.tolist() for prompt in inputs.prompts],
                {"limits": list(inputs.limits)} | {name: getattr(inputs, name) for name in _OF_INPUTS},
                {name: _plain(getattr(params, name)) for name in _OF_SAMPLING} | {"ends": sorted(params.ends)},
            ]
        )

    @classmethod
    def from_json(cls, text: str, device: torch.device | str) -> Self:
        """The call, with the tensors of its logits processors on ``device``."""
        generation, eos, prompts, sizes, sampling = json.loads(text)
        ends = frozenset(sampling.pop("ends"))
        values = {name: _value(plain, torch.device(device)) for name, plain in sampling.items()}
        values["prompts"] = tuple(Prompt(*prompt) for prompt in values["prompts"])
        params = SamplingParams(ends=ends, **values)
        return cls(
            generation,
            StageInputs([np.array(p, dtype=np.int32) for p in prompts], sampling_params=params, **sizes),
            eos,
        )


_OF_INPUTS = ("vocabulary", "chunk")
_OF_SAMPLING = ("seeds", "temperature", "top_k", "top_p", "min_p", "processors", "prompts")
_PROCESSORS = {kind.__name__: kind for kind in STATELESS}


def _plain(value: Any) -> Any:
    """A value as JSON has it. Objects become lists: the name of their kind, then their parts."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case np.generic():
            return value.item()
        case torch.Tensor():
            return ["tensor", value.tolist(), str(value.dtype).removeprefix("torch.")]
        case np.ndarray():
            return ["array", value.tolist(), str(value.dtype)]
        case list() | tuple():
            return ["list" if isinstance(value, list) else "tuple", *map(_plain, value)]
        case dict():
            return ["dict", *([_plain(key), _plain(item)] for key, item in value.items())]
    if type(value) not in STATELESS:
        raise TypeError(f"a message has no {type(value).__name__}")
    return [type(value).__name__, _plain(vars(value))]


def _value(plain: Any, device: torch.device) -> Any:
    """The value of :func:`_plain`."""
    if not isinstance(plain, list):
        return plain
    kind, *parts = plain
    match kind:
        case "tensor":
            return torch.tensor(parts[0], dtype=getattr(torch, parts[1]), device=device)
        case "array":
            return np.array(parts[0], dtype=parts[1])
        case "list" | "tuple":
            items = [_value(part, device) for part in parts]
            return items if kind == "list" else tuple(items)
        case "dict":
            return {_value(key, device): _value(item, device) for key, item in parts}
    processor: Any = object.__new__(_PROCESSORS[kind])
    vars(processor).update(_value(parts[0], device))
    return processor
