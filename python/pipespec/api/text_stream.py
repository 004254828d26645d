"""TextStream, which decodes the target's tokens as they are committed. And the error of a failed call for readers of its streamer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from transformers import AsyncTextIteratorStreamer, TextIteratorStreamer


class TextStream:
    """A streamer for ``generate()`` that decodes step by step.

    It gets the tokens of each step as one block, so that it can tell accepted draft tokens from the target's own token.

    A token may end inside a character, and its text may depend on the token before it. So each token is decoded together with the one
    before, and its text is held back until its last character is complete.

    Args:
        decode: Token ids to text.
        write: Called with each new piece of text, and whether its token was an accepted draft token.
    """

    takes_blocks = True

    def __init__(self, decode: Callable[[list[int]], str], write: Callable[[str, bool], None]) -> None:
        self._decode = decode
        self._write = write
        self._tokens: list[int] = []
        self._context = 0  # tokens[context:done] are shown, and decoded again with the next ones
        self._done = 0
        self._prompt = True

    def put(self, value: Any) -> None:
        """Take the prompt, which is not shown, then the tokens of each step: accepted draft tokens and the target's own token."""
        if self._prompt:
            self._prompt = False
            return
        tokens = value.flatten().tolist()
        for i, token in enumerate(tokens):
            self._tokens.append(token)
            self._show(i < len(tokens) - 1, final=False)

    def end(self) -> None:
        """Show the text that is held back. Repeated calls show nothing twice."""
        self._show(False, final=True)

    def _show(self, drafted: bool, final: bool) -> None:
        shown = self._decode(self._tokens[self._context : self._done])
        text = self._decode(self._tokens[self._context :])
        if len(text) <= len(shown) or (text.endswith("\ufffd") and not final):
            return
        self._context, self._done = self._done, len(self._tokens)
        self._write(text[len(shown) :], drafted)


class _Failure:
    """A queue entry for transformers' iterators. They compare each entry with their stop signal, and this comparison raises the error in their thread."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __eq__(self, other: object) -> bool:
        raise RuntimeError(f"generate() failed ({type(self.error).__name__}: {self.error})") from self.error


@contextmanager
def notify_reader_of_failure(streamer: Any) -> Iterator[None]:
    """Raise the error of a failed call also in a thread that iterates over its streamer and would otherwise never end.

    The streamer's ``end()`` is not called: it means that the text is complete, and transformers does not call it either.
    """
    try:
        yield
    except BaseException as error:
        with suppress(Exception):  # the first error counts
            if isinstance(streamer, TextIteratorStreamer):
                streamer.text_queue.put(_Failure(error))
            elif isinstance(streamer, AsyncTextIteratorStreamer):
                streamer.loop.call_soon_threadsafe(streamer.text_queue.put_nowait, _Failure(error))
        raise
