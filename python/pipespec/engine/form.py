"""Form: one way to call a model, or parts of one."""

from __future__ import annotations

from collections.abc import Collection

import torch

from pipespec.engine.cache import RowCache
from pipespec.models.parts import ModelParts


class Form:
    """One way to call a model. It returns the logits of the last ``keep`` columns, and the cache grows."""

    def __call__(self, tokens: torch.Tensor, cache: RowCache, keep: int) -> torch.Tensor:
        raise NotImplementedError

    def is_current(self) -> bool:
        """Whether what the form has copied is still the model's."""
        return True


class PartsForm(Form):
    """One way to call parts of a model.

    Attributes:
        parts: those that run.
        dtype: of the hidden states that it takes and returns.
    """

    def __init__(self, parts: ModelParts, dtype: torch.dtype) -> None:
        self.parts, self.dtype = parts, dtype

    def __call__(self, tokens: torch.Tensor, cache: RowCache, keep: int) -> torch.Tensor:
        """Run all parts. Without an embedding, ``tokens`` are hidden states; without a head, hidden states are returned."""
        hidden = tokens.to(self.dtype) if self.parts.embed is None else self.embed(tokens)
        features, lengths, embedded = cache.features, cache.lengths, hidden
        if self.parts.layers:
            hidden, streams = self.run_layers(hidden, cache, () if features is None else features.layers)
            if features is not None:
                features.record(lengths, {0: embedded, **streams})
        if self.parts.head is None:
            return hidden[:, hidden.shape[1] - keep :]
        return self.logits(hidden, keep)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embed ``tokens [rows, q]``. Returns ``[rows, q, H]``."""
        raise NotImplementedError

    def run_layers(
        self, hidden: torch.Tensor, cache: RowCache, features: Collection[int] = ()
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Run the layers.

        Args:
            hidden: ``[rows, q, H]``; is not changed.
            cache: of these layers alone; it grows by ``q``.
            features: indices in transformers' ``hidden_states`` (k + 1 after layer k). Those of other layers do not matter.

        Returns:
            The hidden states behind the last layer, and by index those of ``features``, each ``[rows, q, H]``.
        """
        raise NotImplementedError

    def logits(self, hidden: torch.Tensor, keep: int) -> torch.Tensor:
        """Logits ``[rows, keep, vocabulary]`` of the last columns of ``hidden [rows, q, H]``."""
        raise NotImplementedError
