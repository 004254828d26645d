"""A draft of the user's own: any object that proposes the next tokens of a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from pipespec.config import WIDTH
from pipespec.engine.chain import DraftSpec, InlineStage
from pipespec_kernels import _native
from pipespec_kernels.state import Action, StateBlock


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


@dataclass(frozen=True, eq=False)
class ProposerDraft(DraftSpec):
    """A draft that asks an object for tokens. In other processes runs a pickled copy of the object.

    Args:
        proposer: The object.
    """

    label = "a draft of your own"
    form = "proposer"
    inline = True

    proposer: Proposer

    @classmethod
    def recognise(cls, given: Any) -> ProposerDraft | None:
        return cls(given) if isinstance(given, Proposer) else None

    def make_stage(
        self, model: Any, block: StateBlock, index: int, trace: _native.TraceBuffer | None = None, **options: Any
    ) -> ProposerStage:
        return ProposerStage(self.proposer, block, index, trace, options.get("upstream"))


class ProposerStage(InlineStage):
    """The stage of a :class:`Proposer`.

    Args:
        proposer: The object.
        trace: Buffer for the times of its steps; None: no trace.
        others: See :class:`pipespec.engine.chain.InlineStage`.
    """

    def __init__(
        self,
        proposer: Proposer,
        block: StateBlock,
        index: int,
        trace: _native.TraceBuffer | None = None,
        upstream: InlineStage | None = None,
    ) -> None:
        super().__init__(block, index, upstream)
        self._proposer, self._trace = proposer, trace

    def prefill(self, prompts: Sequence[np.ndarray]) -> None:
        self._texts = [prompt[:-1] for prompt in prompts]
        self._port = self.block.port(self.index, WIDTH)
        self._port.trace(self._trace)

    def fill(self, count: int) -> None:
        port = self._port
        # By row, the rest of what it has proposed, and the token that this stage has published last.
        proposed: dict[int, tuple[Iterator[int], int]] = {}
        while port.plan(count, 0, 0) == Action.STEP:
            selected = np.zeros((len(self._texts), 1), dtype=np.int32)
            for row, text in enumerate(self._texts):
                if (n := int(port.query_lens[row])) == 0:
                    continue
                new = port.tokens[row, :n]
                self._texts[row] = text = np.concatenate([text[: int(port.kv[row])], new])
                if port.n_select[row] == 0:
                    continue
                rest, last = proposed.get(row, (None, -1))
                if rest is None or new.tolist() != [last]:  # the stage downstream has published meanwhile
                    rest = iter(self._proposer.propose(text, count)[:count])
                token = next(rest, None)
                if token is None:
                    # The row commits nothing, and the next plan gives its tokens once more.
                    port.query_lens[row] = 0
                else:
                    proposed[row] = rest, int(token)
                    selected[row, 0] = int(token)
            if not port.query_lens[: len(self._texts)].any():
                return
            port.commit(selected.ctypes.data, 1)

    def relay(self, count: int) -> None:
        self.block.ngram_stage(self.index, WIDTH, _native.NgramIndex(1, 1), None).relay(count)
