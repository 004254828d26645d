"""Parts of a model that run one after the other, each in the native form, on a GPU in the fused one, or in that of its own modules."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from transformers import PreTrainedModel

from pipespec.engine.cache import RowCache
from pipespec.engine.form import LayerLoop, PartsForm
from pipespec.engine.forward import choose, forget_changed, forget_stale
from pipespec.engine.known import AUTOCAST, FUSED, NATIVE, NATIVE_DISABLED, OWN, identify
from pipespec.engine.native import native_form
from pipespec.engine.runtime import Forms
from pipespec.models.description import packed_bytes
from pipespec.models.parts import ModelParts
from pipespec_spd import captured
from pipespec_spd.captured import FusedParts, fused_parts, over_static


def stream_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of hidden states between the sections of a model of ``dtype``: on the CPU at least float32, as within the native form."""
    return torch.promote_types(dtype, torch.float32) if device.type == "cpu" else dtype


class ModelSection:
    """Parts of a model, called in the native form, on a GPU in the fused one, or in that of their own modules.

    ``model``: that of the parts, whose weights the fused form moves. Its layers run over a static cache. None: there is no such form.

    The parts are modules of any LLaMA-like model. Their form is chosen as :func:`pipespec.engine.forward.forward` chooses that of a whole model, in
    :func:`open_sections`, when a sequence begins. Hidden states have the dtype of :func:`stream_dtype`. Results are inference tensors, and arguments
    are not changed.
    """

    def __init__(self, parts: ModelParts, model: PreTrainedModel | None = None) -> None:
        self.parts, self._model = parts, model
        self._forms: Forms = {}
        self.use_modules()

    def use_modules(self) -> None:
        """Use the form of the parts' own modules, and free a packed copy."""
        forget_changed(self._forms, self.parts, OWN)
        self._modules = self._call = choose(self._forms, self.parts, OWN, lambda: LayerLoop(self.parts)).form
        self.stream_dtype = stream_dtype(self.parts.dtype, self.parts.device)
        if NATIVE in self._forms and self._forms[NATIVE].form is not None:
            del self._forms[NATIVE]

    def forget_stale(self) -> bool:
        """See :func:`pipespec.engine.forward.forget_stale`."""
        chosen = self._forms.get(NATIVE)
        return chosen is not None and chosen.form is not None and forget_stale(self._forms, chosen.form)

    @property
    def own_form(self) -> str:
        """The form of ours that these parts may have: native or fused."""
        return FUSED if self._model is not None and captured.captures(self.parts.device) else NATIVE

    @property
    def fused(self) -> FusedParts | None:
        """The fused form, if it is in use."""
        return self._call if isinstance(self._call, FusedParts) else None

    def _read_parts(self) -> ModelParts:
        return over_static(self.parts) if self.own_form == FUSED else self.parts

    def unsupported_reason(self) -> str | None:
        """Why there is no native or fused form, as far as that shows without packing the weights; None if there may be one."""
        name, parts = self.own_form, self._read_parts()
        if name == FUSED and torch.is_autocast_enabled(self.parts.device.type):
            return AUTOCAST
        forget_changed(self._forms, parts, name)
        return (self._forms.get(name) or identify(parts, name)).reason

    def pack(self, reserved: int) -> str | None:
        """Use the native form, or the fused one.

        Args:
            reserved: bytes that are to be allocated in addition to the packed copy.

        Returns:
            Why there is none; None if there is.
        """
        name, parts = self.own_form, self._read_parts()
        if name not in self._forms:
            self.use_modules()  # before another copy is made
        model = self._model if name == FUSED else None
        make = (lambda: native_form(parts, reserved)) if model is None else (lambda: fused_parts(self.parts, model))
        choice = choose(self._forms, parts, name, make)
        if choice.form is not None:
            self._call = choice.form
        return choice.reason

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embed ``tokens [rows, q]``. Returns ``[rows, q, H]``."""
        with torch.inference_mode():
            return self._form(tokens).embed(tokens).to(self.stream_dtype)

    def run_layers(
        self, hidden: torch.Tensor, cache: RowCache, features: Collection[int] = ()
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Run the layers on ``hidden [rows, q, H]``, see :meth:`PartsForm.run_layers`. ``cache`` is one of ``parts.cache_config()``."""
        with torch.inference_mode():
            form = self._form(hidden)
            hidden, streams = form.run_layers(hidden.to(form.dtype), cache, features)
            return hidden.to(self.stream_dtype), {k: stream.to(self.stream_dtype) for k, stream in streams.items()}

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Norm and head of ``hidden [rows, q, H]``. Returns ``[rows, q, vocabulary]``."""
        with torch.inference_mode():
            form = self._form(hidden)
            return form.logits(hidden.to(form.dtype), hidden.shape[1])

    def _form(self, given: torch.Tensor) -> PartsForm:
        # Autocast changes what the modules do.
        return self._modules if torch.is_autocast_enabled(given.device.type) else self._call


def open_sections(sections: Sequence[ModelSection], *, native: bool = True, reserved: int = 0) -> str:
    """Choose the forms of sections that run one after the other: all native, all fused, or none, so that a cut does not change the text.

    Args:
        sections: of one model.
        native: False: only forms with the bits of the model's own modules.
        reserved: bytes that are to be allocated in addition to the packed copies, for caches.

    Returns:
        The form, as :func:`described`.
    """
    reason: str | None = NATIVE_DISABLED
    if native:
        reason = next(filter(None, (section.unsupported_reason() for section in sections)), None)
    sizes = [packed_bytes(section.parts) for section in sections]
    for i, section in enumerate(sections):
        reason = reason or section.pack(sum(sizes[i + 1 :], reserved))
    if reason is None:
        return sections[0].own_form
    for section in sections:
        section.use_modules()
    return f"transformers: {reason}"
