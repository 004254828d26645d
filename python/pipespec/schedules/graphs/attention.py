"""BorrowedAttention: models run with the attention ``"pipespec"`` for a time, then get their own back."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from transformers import PreTrainedModel

from pipespec.engine.attention import ATTENTION
from pipespec.engine.chain import stage_names
from pipespec.engine.runtime import runtime_of
from pipespec.errors import NotCapturable


class _BorrowedName(str):
    """``"pipespec"`` in the configuration of a model. A copy or a pickle of it is the name of the model's own attention, because nothing restores
    that later."""

    own: str

    def __deepcopy__(self, memo: object) -> str:
        return self.own

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (self.own,)


class BorrowedAttention:
    """Sets ``attn_implementation="pipespec"`` on models until :meth:`close`. Copies of the models have their own attention at once.

    Several may be open for the same model; the last one that closes restores it. Garbage collection closes, too. Raises ``NotCapturable`` where a model
    does not accept the attention.
    """

    def __init__(self, models: Sequence[PreTrainedModel]) -> None:
        # Weak, as a model may refer to its pipeline.
        held: list[weakref.ref[PreTrainedModel]] = []
        self._finalizer = weakref.finalize(self, _restore, held)
        self._finalizer.atexit = False
        for i, model in enumerate(models):
            runtime = runtime_of(model)
            own, holders = runtime.borrowed or (model.config._attn_implementation, 0)
            cause = "it stays as it is"
            try:
                if model.config._attn_implementation != ATTENTION:
                    model.set_attn_implementation(ATTENTION)
                    if model.config._attn_implementation == ATTENTION:
                        model.config._attn_implementation = name = _BorrowedName(ATTENTION)
                        name.own = own
            except (ValueError, ImportError) as error:
                cause = str(error)
            if model.config._attn_implementation != ATTENTION:
                self.close()
                part = f"{type(model).__name__}'s {own} attention, which is not {ATTENTION!r}"
                raise NotCapturable(stage_names(len(models))[i], part, cause)
            runtime.borrowed = own, holders + 1
            held.append(weakref.ref(model))

    def close(self) -> None:
        """Restore the attention of each model that no other instance holds. May be called more than once."""
        self._finalizer()


def _restore(models: list[weakref.ref[PreTrainedModel]]) -> None:
    for held in models:
        model = held()
        if model is None:
            continue
        runtime = runtime_of(model)
        assert runtime.borrowed is not None
        own, holders = runtime.borrowed
        if holders > 1:
            runtime.borrowed = own, holders - 1
            continue
        runtime.borrowed = None
        # Otherwise the user has set another attention in the meantime.
        if model.config._attn_implementation == ATTENTION and own != ATTENTION:
            model.set_attn_implementation(own)
