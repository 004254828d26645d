"""The call of a model over a cache, :func:`forward`, and the choice of its form: native, fused, or the model's own modules."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, cast

import torch
from transformers import PreTrainedModel

from pipespec.engine.cache import RowCache
from pipespec.engine.form import Form, LayerLoop, WholeModel
from pipespec.engine.known import AUTOCAST, EXACT, FUSED, NATIVE, NATIVE_DISABLED, OWN, identify, refusal_of_cache
from pipespec.engine.native import NativeForm, native_form
from pipespec.engine.runtime import ChosenForm, Forms, runtime_of
from pipespec.models.compat import library_columns
from pipespec.models.families import NotReadable
from pipespec.models.parts import ModelParts
from pipespec.models.properties import input_device
from pipespec.models.quantized import Int8Linear, has_blocks
from pipespec.process.threads import Lock

if TYPE_CHECKING:
    from pipespec.engine.fused import FusedForm


_choosing = Lock()


def forget_changed(forms: Forms, model: PreTrainedModel | ModelParts, *names: str) -> None:
    """Forget the forms of these names where something that they depend on has changed."""
    for name in names:
        chosen = forms.get(name)
        if chosen is not None and (
            chosen.identity != identify(model, name) or (chosen.form is not None and not chosen.form.is_current())
        ):
            forms.pop(name, None)  # another thread may do the same


def forget_stale(forms: Forms, form: Form) -> bool:
    """At the end of a call: whether the native form that it ran in has copied other values than the weights have. Then no later call gets it."""
    if form.was_current():
        return False
    chosen = forms.get(NATIVE)
    if chosen is not None and chosen.form is form:
        forms.pop(NATIVE, None)  # another thread may do the same
    return True


def choose(forms: Forms, model: PreTrainedModel | ModelParts, name: str, make: Callable[[], Form]) -> ChosenForm:
    """A form, chosen now unless it was before. ``make`` raises :class:`NotReadable` where there is no such form."""
    found = forms.get(name)
    if found is not None:
        return found
    with _choosing:
        # Another thread may have chosen it meanwhile, and a second copy of the weights would not fit.
        return forms.get(name) or _choose(forms, model, name, make)


def _choose(forms: Forms, model: PreTrainedModel | ModelParts, name: str, make: Callable[[], Form]) -> ChosenForm:
    identity, form = identify(model, name), None
    reason = identity.reason
    if reason is None:
        try:
            form = make()
        except NotReadable as error:
            reason = str(error)
        before, identity = identity, identify(model, name)
        if identity != before:
            # A merge has moved weights. Other forms hold them where they were.
            for other in (NATIVE, OWN):
                forms.pop(other, None)
    forms[name] = chosen = ChosenForm(identity, form, reason)
    return chosen


def forward(
    model: PreTrainedModel,
    tokens: torch.Tensor,
    cache: RowCache,
    *,
    keep: int,
    native: bool = True,
    last: torch.Tensor | None = None,
    form: Form | None = None,
) -> torch.Tensor:
    """Feed tokens at the cache's lengths.

    LLaMA-like models on the CPU run in the native form, after its logits were compared with the model's own, see
    :mod:`pipespec.engine.native`. Over a static cache a fused form runs if :func:`choose_fused` has chosen one. The layers of a model with recurrent
    layers are called one by one, see :mod:`pipespec.engine.recurrent`. Every other model is called as a whole, with an explicit mask and positions.
    The form is chosen when the cache is empty, so weights, attention and hooks may change between sequences and not within one; see :func:`recheck`.

    Args:
        model: in eval mode.
        tokens: int32 or int64 ``[rows, q]``.
        cache: of this model; it grows by ``q`` in every row. The caller truncates it to the columns that count.
        keep: compute logits of the last ``keep`` columns, 0 to ``q``.
        native: False: only the model's own modules, or a fused form.
        last: int64 ``[1]`` on the model's device: with ``keep=1``, the column whose logits are computed, in place of the last one. Only in a fused form.
        form: of :func:`form_of`; None: the one that it returns now.

    Returns:
        Logits ``[rows, keep, vocabulary]`` in the model's dtype: an inference tensor, to be changed in place under ``torch.inference_mode``
        only.

    Raises:
        ValueError: a ``keep`` or a number of rows that does not fit, or a cache that is full.
    """
    rows, q = tokens.shape
    if not 0 <= keep <= q or q < 1:
        raise ValueError(f"keep={keep} of {q} columns")
    if rows != cache.rows:
        raise ValueError(f"{rows} rows of tokens for a RowCache of {cache.rows} rows")
    form = form or form_of(model, cache, native=native)
    with torch.inference_mode():
        if last is None:
            return form(tokens, cache, keep)
        return cast("FusedForm", form)(tokens, cache, keep, last)


def wide_columns(model: PreTrainedModel, cache: RowCache, most: int, form: Callable[[], Form]) -> int | None:
    """The smallest number of columns for which the prompt runs through the model's own modules, where ``form()`` is native; None: :func:`forward` runs all
    up to ``most``.

    It depends on the model, its dtype and the processor: where oneDNN has instructions for a dtype that the native form computes in float32, wide products
    are several times faster there. So one machine reads one prompt by the same forwards in each schedule, batch and call.
    """
    wide = library_columns(cache.dtype)
    if (
        wide is None
        or most < wide
        or not isinstance(form(), NativeForm)
        or cache.is_recurrent
        or any(type(module) is Int8Linear for module in model.modules())
        or has_blocks(model)
    ):
        return None
    return wide


def forward_row(model: PreTrainedModel, tokens: torch.Tensor, cache: RowCache, row: int, keep: int = 0) -> torch.Tensor:
    """Cache part of the prompt of one row by the model's own modules, apart from the other rows, whose lengths would change its bits.

    Args:
        model: as for :func:`forward`.
        tokens: ``[1, q]``.
        cache: of this model; the row grows by ``q``.
        row: its index.
        keep: for how many of the last columns logits are computed.

    Returns:
        ``[1, keep, V]``.
    """
    alone = nullcontext(cache) if cache.rows == 1 else cache.row_alone(row, tokens.shape[1])
    with torch.inference_mode(), alone as row_cache:
        return WholeModel(model)(tokens, row_cache, keep)


def native_form_of(model: PreTrainedModel, cache: RowCache, *, native: bool = True) -> NativeForm | None:
    """The native form in which :func:`forward` runs a model over this cache now; None: it runs in another one.

    Between this call and the next forward over an empty cache the model must not change.
    """
    if not native or refusal_of_cache(cache) is not None:
        return None
    form = form_of(model, cache, native=native)
    return form if isinstance(form, NativeForm) else None


def form_of(model: PreTrainedModel, cache: RowCache, *, native: bool = True, begun: NativeForm | None = None) -> Form:
    """The form in which :func:`forward` runs a model over this cache now. Conditions are those of :func:`native_form_of`.

    ``begun``: that of the call's earlier forwards. It stays, though another call may have found meanwhile that the weights are others.
    """
    if refusal_of_cache(cache) is not None:
        return _fused(model, cache) or WholeModel(model)
    if begun is not None:
        return begun
    if cache.get_seq_length() == 0:
        recheck(model, native=native)
    chosen = _native(model, cache) if native else None
    if chosen is None or chosen.form is None:
        with torch.inference_mode():
            chosen = choose(
                runtime_of(model).forms,
                model,
                OWN,
                lambda: LayerLoop(ModelParts.of(model)) if cache.is_recurrent else WholeModel(model),
            )
    form: Form = chosen.form
    return form


def recheck(model: PreTrainedModel, *, native: bool = True) -> None:
    """Let the next :func:`forward` choose the form again if the model has changed. Where the cache is empty, it does so by itself."""
    forget_changed(runtime_of(model).forms, model, OWN, *((NATIVE,) if native else ()))


def choose_fused(model: PreTrainedModel, *, exact: bool = False) -> FusedForm | None:
    """Choose the form of the forwards over static caches: the fused one, or None for the model's modules. Not within a capture.

    The form is kept until the model changes. Its caches are to be added before their first forward.

    Args:
        model: in eval mode.
        exact: as for :class:`pipespec.engine.fused.FusedForm`. A model may have both forms, each with caches of its own.
    """
    name, forms = EXACT if exact else FUSED, runtime_of(model).forms
    forget_changed(forms, model, name)

    def make() -> FusedForm:
        # Only captured steps and GPUs need it.
        from pipespec.engine.fused import fused_form

        return fused_form(model, exact=exact)

    return cast("FusedForm | None", choose(forms, model, name, make).form)


def described(model: PreTrainedModel, cache: RowCache, *, native: bool = True) -> str:
    """The form that :func:`forward` uses now: ``"native"``, ``"fused"`` (``"fused, exact"`` in that form), or ``"transformers: "``
    and the reason. Empty before the first."""
    fused = _fused(model, cache)
    if fused is not None:
        return fused.name
    forms, reason = runtime_of(model).forms, refusal_of_cache(cache)
    if cache.is_static and reason != AUTOCAST:
        chosen = forms.get(FUSED)
        reason = (NATIVE_DISABLED if not native else chosen and chosen.reason) or reason
    if reason is None:
        chosen = forms.get(NATIVE if native else OWN)
        if chosen is None:
            return ""
        reason = chosen.reason if native else NATIVE_DISABLED
    return NATIVE if reason is None else f"transformers: {reason}"


def native_unsupported_reason(model: PreTrainedModel) -> str | None:
    """Why the next sequence of a model will not run in the native form; None if it will. This call chooses the form, which packs the weights."""
    like = RowCache.for_model(model, 1, 16)
    reason = refusal_of_cache(like)
    if reason is not None:
        return reason
    recheck(model)
    return _native(model, like).reason


def exact_unsupported_reason(model: PreTrainedModel) -> str | None:
    """Why captured steps of a model cannot run in the exact form; None if they can. This call chooses the form, which merges weights."""
    if torch.is_autocast_enabled(input_device(model).type):
        return AUTOCAST
    choose_fused(model, exact=True)
    return runtime_of(model).forms[EXACT].reason


def _native(model: PreTrainedModel, cache: RowCache) -> ChosenForm:
    """The native form, which runs over a cache."""
    return choose(runtime_of(model).forms, model, NATIVE, lambda: native_form(model, cache.nbytes))


def _fused(model: PreTrainedModel, cache: RowCache) -> FusedForm | None:
    """The fused form that takes this cache now, if one was chosen."""
    if torch.is_autocast_enabled(cache.device.type):
        return None
    forms = runtime_of(model).forms
    fused = (cast("FusedForm", forms[name].form) for name in (FUSED, EXACT) if name in forms and forms[name].form)
    return next((form for form in fused if cache in form.tables), None)
