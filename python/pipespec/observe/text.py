"""TextStream: tokens in, as the target commits them; readable text out, as soon as it is complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class TextStream:
    """A streamer for ``generate()`` that decodes step by step.

    It takes the tokens of each step as one block, and so can tell accepted drafts from the target's own token.

    A token may end in the middle of a character, and its text may depend on the token before it: each is decoded together with
    the one before, and held back until its last character is whole.

    Parameters
    ----------
    decode: token ids to text.
    write: gets each new piece of text, and whether a draft proposed its token (False: the target's own token).
    """

    takes_blocks = True

    def __init__(self, decode: Callable[[list[int]], str], write: Callable[[str, bool], None]) -> None:
        self._decode = decode
        self._write = write
        self._tokens: list[int] = []
        self._context = 0  # tokens[context:done] are shown and decoded again with what follows
        self._done = 0
        self._prompt = True

    def put(self, value: Any) -> None:
        """First the prompt, which is not shown; then the tokens of each step: accepted drafts, the target's own token last."""
        if self._prompt:
            self._prompt = False
            return
        tokens = value.flatten().tolist()
        for i, token in enumerate(tokens):
            self._tokens.append(token)
            self._show(i < len(tokens) - 1, final=False)

    def end(self) -> None:
        """Show what is held back. After it, nothing is shown twice: it may be called again."""
        self._show(False, final=True)

    def _show(self, drafted: bool, final: bool) -> None:
        shown = self._decode(self._tokens[self._context : self._done])
        text = self._decode(self._tokens[self._context :])
        if len(text) <= len(shown) or (text.endswith("\ufffd") and not final):
            return
        self._context, self._done = self._done, len(self._tokens)
        self._write(text[len(shown) :], drafted)
