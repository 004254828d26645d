"""The demo: a bundled model family, its prompts, and the comparison that ``pipespec demo`` shows.

Importing this package imports neither PyTorch nor Transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: The family's models, from the slowest to the fastest.
FAMILY = ("target", "medium", "small")

#: Stages of the target that the bundled draft module is for.
MODULE_STAGES = 4

__all__ = ["FAMILY", "MODULE_STAGES", "Family", "draft_module_path", "family_path", "load_family", "prompts"]


def family_path(name: str) -> Path:
    """Return the folder of one bundled model, for ``from_pretrained``. Raises ``FileNotFoundError`` where the weights are not installed."""
    if name not in FAMILY:
        raise ValueError(f"no model {name!r} in the bundled family: it has {', '.join(FAMILY)}")
    return _folder_with(name, "model.safetensors")


def _folder_with(name: str, weights: str) -> Path:
    folder = Path(__file__).resolve().parent / "family" / name
    if not (folder / weights).is_file():
        raise FileNotFoundError(f"{folder} has no {weights}: this installation came without the demo's weights")
    return folder


@dataclass(frozen=True)
class Family:
    """A target, its drafts by name (smallest first), and their tokenizer."""

    target: Any
    drafts: dict[str, Any]
    tokenizer: Any

    def encode(self, text: str) -> torch.Tensor:
        """Return the token ids, LongTensor ``[1, S]``."""
        ids: torch.Tensor = self.tokenizer(text, return_tensors="pt").input_ids
        return ids


def load_family(folder: Path | None = None, dtype: torch.dtype | str = "float32") -> Family:
    """Load the bundled family, or the one in ``folder`` (``target/``, ``medium/``, ``small/``), on the CPU."""
    from pipespec.models.loading import load_model
    from pipespec.models.tokenizers import load_tokenizer

    paths = {name: folder / name if folder else family_path(name) for name in FAMILY}
    models = {name: load_model(path, dtype=dtype) for name, path in paths.items()}
    drafts = {name: models[name] for name in reversed(FAMILY) if name != "target"}
    return Family(models["target"], drafts, load_tokenizer(paths["target"]))


def draft_module_path() -> Path:
    """Return the folder of the bundled target's draft module for ``MODULE_STAGES`` stages, for ``DraftModule.load``. Raises as :func:`family_path`."""
    return _folder_with("module", "draft_module.safetensors")


def prompts(n: int, seed: int = 0) -> list[str]:
    """Return ``n`` distinct prompts: function heads of standard-library modules that no bundled model was trained on, see :mod:`pipespec.demo.corpus`."""
    from pipespec.demo.corpus import function_heads

    return [head.text for head in function_heads(n, seed)]
