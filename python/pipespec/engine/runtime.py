"""ModelRuntime: all that this process has read, made or borrowed of one model, in one place.

It is no attribute of the model, so that copies and pickles of the model do not have it. Nothing in it refers to the model, which it would keep alive.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from transformers import PreTrainedModel


class Identity(NamedTuple):
    """What the form of a model, or of parts of one, depends on, so that a change is noticed.

    Attributes:
        reason: why there is no such form; None where there may be one.
        seen: addresses and versions of the weights, and numbers in the modules; of their own modules what recurrent states depend on.
    """

    reason: str | None
    seen: tuple[Any, ...] | None = None


class ChosenForm(NamedTuple):
    """A form that was chosen.

    Attributes:
        identity: what it depends on. A change of it is a reason to choose again.
        form: the form; None where there is none.
        reason: why there is none; None where there is one.
    """

    identity: Identity
    form: Any
    reason: str | None


Forms = dict[str, ChosenForm]
"""By name, the forms that were chosen."""


@dataclass(eq=False)
class ModelRuntime:
    """The state of one model. All pipelines on the model share it.

    Attributes:
        record: a :class:`pipespec.engine.known.Record`: what the model was when it was last read; None: it is to be read.
        moves: how often :func:`pipespec.engine.known.moving` surrounded its weights.
        forms: see :mod:`pipespec.engine.forward`.
        group: a :class:`pipespec.engine.group.ForwardGroup`: the processes that hold a tensor-parallel model.
        borrowed: its own attention, and how many have borrowed it; None: it has its own.
        shared: its weights in shared memory, for worker processes.
    """

    record: Any = None
    moves: int = 0
    forms: Forms = field(default_factory=dict)
    group: Any = None
    borrowed: tuple[str, int] | None = None
    shared: Any = None


_runtimes: weakref.WeakKeyDictionary[PreTrainedModel, ModelRuntime] = weakref.WeakKeyDictionary()


def runtime_of(model: PreTrainedModel) -> ModelRuntime:
    """The runtime of a model, made at the first call."""
    found = _runtimes.get(model)
    return _runtimes.setdefault(model, ModelRuntime()) if found is None else found


def forget_records() -> None:
    """Let all models be read again."""
    for runtime in list(_runtimes.values()):
        runtime.record = None
