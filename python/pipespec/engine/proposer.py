"""A draft of the user's own: any object that proposes the next tokens of a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from pipespec.config import WIDTH
from pipespec.engine.chain import DraftSpec, InlineStage
from pipespec_kernels import _native
from pipespec_kernels.state import Action


@runtime_checkable
class Proposer(Protocol):
    """A draft of the user's own. An error in it costs speed and no token."""

    def propose(self, tokens: np.ndarray, count: int) -> Sequence[int]:
        """The next tokens of a text.

        Args:
            tokens: The text of one row, the prompt included, int32 ``[N]``.
            count: How many tokens are asked for.

        Returns:
            At most so many ids; none where it has nothing to propose.
        """
        ...


class ProposerStage(InlineStage):
    """A stage whose ``spec`` is a :class:`Proposer`."""

    def prefill(self, prompts: Sequence[np.ndarray]) -> None:
        self._texts = [prompt[:-1] for prompt in prompts]
        self._port = self.block.port(self.index, WIDTH)
        self._port.trace(self.trace)

    def fill(self, count: int) -> None:
        port, rows = self._port, len(self._texts)
        # By row, the rest of what it has proposed, and the token that this stage has published last.
        proposed: dict[int, tuple[Iterator[int], int]] = {}
        selected = np.zeros((rows, 1), dtype=np.int32)
        while port.plan(count, 0, 0) == Action.STEP:
            for row in range(rows):
                if (n := int(port.query_lens[row])) == 0:
                    continue
                new = port.tokens[row, :n]
                self._texts[row] = text = np.concatenate([self._texts[row][: int(port.kv[row])], new])
                if port.n_select[row] == 0:
                    continue
                rest, last = proposed.get(row, (None, -1))
                if rest is None or new.tolist() != [last]:  # the stage downstream has published meanwhile
                    rest = iter(self.spec.propose(text, count)[:count])
                if (token := next(rest, None)) is None:
                    port.query_lens[row] = 0  # the row commits nothing, and the next plan gives its tokens once more
                else:
                    selected[row, 0] = token
                    proposed[row] = rest, int(token)
            if not port.query_lens[:rows].any():
                return
            port.commit(selected.ctypes.data, 1)

    def relay(self, count: int) -> None:
        self.block.ngram_stage(self.index, WIDTH, _native.NgramIndex(1, 1), None).relay(count)


@dataclass(frozen=True, eq=False)
class ProposerDraft(DraftSpec):
    """A draft that asks ``proposer`` for tokens. In other processes runs a pickled copy of it."""

    label = "a draft of your own"
    form = "proposer"
    stage_class = ProposerStage
    inline = True

    proposer: Proposer

    @classmethod
    def recognise(cls, given: Any) -> ProposerDraft | None:
        return cls(given) if isinstance(given, Proposer) else None

    def propose(self, tokens: np.ndarray, count: int) -> Sequence[int]:
        return self.proposer.propose(tokens, count)
