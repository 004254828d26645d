"""The demo: a bundled model family, its prompts, and the comparison that ``pipespec demo`` shows.

Importing this package imports neither PyTorch nor Transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from pipespec.bench.contenders import Family

#: The family's models, from the slowest to the fastest.
FAMILY = ("target", "medium", "small")

#: Stages of the target that the bundled draft module is for.
MODULE_STAGES = 4

__all__ = ["FAMILY", "MODULE_STAGES", "draft_module_path", "family_path", "load_family", "prompts"]


def family_path(name: str) -> Path:
    """Return the folder of one bundled model (``"target"``, ``"medium"`` or ``"small"``), for ``from_pretrained``.

    Raises:
        ValueError: The family has no such model.
        FileNotFoundError: The weights are not installed.
    """
    if name not in FAMILY:
        raise ValueError(f"no model {name!r} in the bundled family: it has {', '.join(FAMILY)}")
    folder = Path(__file__).resolve().parent / "family" / name
    if not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(f"{folder} has no model.safetensors: this installation came without the demo's weights")
    return folder


def load_family(folder: Path | None = None, dtype: torch.dtype | str = "float32") -> Family:
    """Load the bundled family, or the one in ``folder`` (``target/``, ``medium/``, ``small/``), on the CPU."""
    from pipespec.bench.contenders import Family

    paths = {name: folder / name if folder else family_path(name) for name in FAMILY}
    drafts = {name: paths[name] for name in reversed(FAMILY) if name != "target"}
    return Family.load(folder.name if folder else "bundled", paths["target"], drafts, dtype=dtype)


def draft_module_path() -> Path:
    """Return the folder of the bundled target's draft module for ``MODULE_STAGES`` stages, for ``DraftModule.load``.

    Raises:
        FileNotFoundError: The weights are not installed.
    """
    folder = Path(__file__).resolve().parent / "family" / "module"
    if not (folder / "draft_module.safetensors").is_file():
        raise FileNotFoundError(f"{folder} has no draft module: this installation came without the demo's weights")
    return folder


def prompts(n: int, seed: int = 0) -> list[str]:
    """Return ``n`` distinct prompts: function heads of standard-library modules that no bundled model was trained on.

    The list is the same for the same interpreter, ``n`` and ``seed``.

    Raises:
        ValueError: The held-out modules have fewer than ``n`` functions.
    """
    from pipespec.demo.corpus import function_heads

    return [head.text for head in function_heads(n, seed)]
