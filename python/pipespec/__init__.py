"""pipespec: speculative decoding behind ``generate()`` of HuggingFace LLaMA models, with the text of the large model alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipespec.engine.attention import register_attention, register_when_imported
from pipespec_kernels import __version__

if TYPE_CHECKING:
    from pipespec.api.attach import attach, attached, detach
    from pipespec.api.output import Report, StageReport
    from pipespec.api.pipeline import Pipeline
    from pipespec.engine.grammar import TokenMatcher
    from pipespec.engine.known import refresh
    from pipespec.engine.ngram import NgramDraft
    from pipespec.engine.originals import trust
    from pipespec.engine.sampling import OutputPenaltyLogitsProcessor
    from pipespec.models.tokenizers import load_tokenizer
    from pipespec.schedules.base import SpeedWarning, StageFailure, StaleText

__all__ = [
    "NgramDraft",
    "OutputPenaltyLogitsProcessor",
    "Pipeline",
    "Report",
    "SpeedWarning",
    "StageFailure",
    "StageReport",
    "StaleText",
    "TokenMatcher",
    "__version__",
    "attach",
    "attached",
    "detach",
    "load_tokenizer",
    "refresh",
    "register_attention",
    "trust",
]

_HOMES = {
    "NgramDraft": "pipespec.engine.ngram",
    "OutputPenaltyLogitsProcessor": "pipespec.engine.sampling",
    "Pipeline": "pipespec.api.pipeline",
    "Report": "pipespec.api.output",
    "SpeedWarning": "pipespec.schedules.base",
    "StageFailure": "pipespec.schedules.base",
    "StageReport": "pipespec.api.output",
    "StaleText": "pipespec.schedules.base",
    "TokenMatcher": "pipespec.engine.grammar",
    "attach": "pipespec.api.attach",
    "attached": "pipespec.api.attach",
    "detach": "pipespec.api.attach",
    "load_tokenizer": "pipespec.models.tokenizers",
    "refresh": "pipespec.engine.known",
    "trust": "pipespec.engine.originals",
}


register_when_imported()


def __getattr__(name: str) -> Any:
    # torch and transformers take seconds to import: `pipespec doctor` and `--help` should not wait for them.
    from importlib import import_module

    if name == "spd":  # a package of its own, which imports this one: it is imported by name, at the first use
        return import_module("pipespec_spd")
    if name not in _HOMES:
        raise AttributeError(f"module 'pipespec' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
