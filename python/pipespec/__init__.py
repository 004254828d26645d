"""pipespec: a large language model's own answer, faster. A drop-in ``generate()`` for HuggingFace LLaMA models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipespec.attention import register_attention, register_when_imported
from pipespec_kernels import __version__

if TYPE_CHECKING:
    from pipespec.attachment import attach, attached, detach
    from pipespec.observe import Report, StageReport
    from pipespec.pipeline import Pipeline

__all__ = ["Pipeline", "Report", "StageReport", "__version__", "attach", "attached", "detach", "register_attention"]

_HOMES = {
    "Pipeline": "pipespec.pipeline",
    "Report": "pipespec.observe",
    "StageReport": "pipespec.observe",
    "attach": "pipespec.attachment",
    "attached": "pipespec.attachment",
    "detach": "pipespec.attachment",
}


register_when_imported()


def __getattr__(name: str) -> Any:
    # torch and transformers take seconds to import: `pipespec doctor` and `--help` should not wait for them.
    if name not in _HOMES:
        raise AttributeError(f"module 'pipespec' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
