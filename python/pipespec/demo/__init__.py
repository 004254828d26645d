"""The demo: a model family that is small enough to ship, the script that trains it, and its prompts.

Importing this package imports neither PyTorch nor Transformers; the helpers load what they need.
"""

from __future__ import annotations

from pathlib import Path

#: The family's models, from the slowest to the fastest.
FAMILY = ("target", "medium", "small")

#: Stages of the target that the bundled draft module is for.
MODULE_STAGES = 4

__all__ = ["FAMILY", "MODULE_STAGES", "draft_module_path", "family_path", "prompts"]


def family_path(name: str) -> Path:
    """The folder of one bundled model (``"target"``, ``"medium"`` or ``"small"``), for ``from_pretrained``.

    Raises ``ValueError`` for another name and ``FileNotFoundError`` where the weights are not installed.
    """
    if name not in FAMILY:
        raise ValueError(f"no model {name!r} in the bundled family: it has {', '.join(FAMILY)}")
    folder = Path(__file__).resolve().parent / "family" / name
    if not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(f"{folder} has no model.safetensors: this installation came without the demo's weights")
    return folder


def draft_module_path() -> Path:
    """The folder of the target's draft module for ``MODULE_STAGES`` stages, for ``pipespec.spd.draft_module.DraftModule.load``.

    Raises ``FileNotFoundError`` where the weights are not installed.
    """
    folder = Path(__file__).resolve().parent / "family" / "module"
    if not (folder / "draft_module.safetensors").is_file():
        raise FileNotFoundError(f"{folder} has no draft module: this installation came without the demo's weights")
    return folder


def prompts(n: int, seed: int = 0) -> list[str]:
    """``n`` distinct prompts: function heads of standard-library modules that no bundled model was trained on.

    The same list for the same interpreter, ``n`` and ``seed``; raises ``ValueError`` where there are fewer.
    """
    from .corpus import function_heads

    return [head.text for head in function_heads(n, seed)]
