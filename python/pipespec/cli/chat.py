"""``pipespec chat``: a conversation in the terminal."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from pipespec.cli.generate import add_sampling, sampling_options
from pipespec.cli.options import (
    Subparsers,
    add_models,
    chosen_models,
    flag,
    loading_options,
    option,
    positive,
    require_text,
    utf8,
)
from pipespec.process.progress import quiet_transformers, reading_shown, working

HELP = "/reset starts again, /exit or Ctrl-D ends, Ctrl-C stops an answer"


# fmt: off
def add_parser(commands: Subparsers) -> list[argparse.ArgumentParser]:
    parser = commands.add_parser("chat", help="talk to a model in the terminal", description=run.__doc__)
    parser.set_defaults(command=run)
    add_models(parser)
    option(parser, "system", "TEXT", utf8, "the system prompt")
    option(parser, "max-new-tokens", "N", positive, "of each answer (default: %(default)s)", default=2048)
    add_sampling(parser)
    flag(parser, "report", "after each answer, print what each stage did")
    return [parser]
# fmt: on


def run(args: argparse.Namespace) -> int:
    """Talk to a model. The conversation is kept, and what was read once is not read again. /reset starts again, Ctrl-C stops an answer, /exit or Ctrl-D ends."""
    if args.target is None:
        raise ValueError("chat needs --target MODEL: the bundled models have no chat template")
    target, drafts, dtype = chosen_models(args, list)
    with working("importing torch and transformers"):
        from pipespec.api.pipeline import Pipeline
        from pipespec.models.tokenizers import load_tokenizer

    with quiet_transformers():
        with working("loading the models"):
            pipe = Pipeline(target, drafts, **loading_options(args, dtype))
        with pipe:
            tokenizer = load_tokenizer(args.tokenizer or target, trust_remote_code=args.trust_remote_code)
            if not tokenizer.chat_template:
                raise ValueError(
                    "the target's tokenizer has no chat template: use `pipespec generate`, which continues texts"
                )
            Conversation(pipe, tokenizer, args).talk()
    return 0


class Conversation:
    """A conversation in the terminal. ``args``: the options of the command."""

    def __init__(self, pipe: Any, tokenizer: Any, args: argparse.Namespace) -> None:
        from rich.console import Console

        self._pipe, self._tokenizer, self._args = pipe, tokenizer, args
        self._options = sampling_options(args, tokenizer)
        self._console = Console(highlight=False, soft_wrap=True)
        self._messages = self._begin()

    def _begin(self) -> list[dict[str, str]]:
        return [] if self._args.system is None else [{"role": "system", "content": self._args.system}]

    def talk(self) -> None:
        """Answer what is typed, or what comes from a pipe, line by line, until it ends."""
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            self._console.print(HELP, style="dim")
        while (asked := self._next(is_terminal)) is not None:
            if asked == "/reset":
                self._messages = self._begin()
            elif asked == "/exit":
                return
            elif asked.startswith("/"):
                self._console.print(f"there is no {asked.split()[0]}: {HELP}", style="dim", markup=False)
            elif asked.strip():
                self._messages.append({"role": "user", "content": require_text(asked, "the question")})
                self._answer()

    def _next(self, is_terminal: bool) -> str | None:
        """The next question; None where there is none. Ctrl-C drops what was typed."""
        while True:
            try:
                if is_terminal:
                    return self._console.input("[bold]> [/bold]").rstrip()
                line = sys.stdin.readline()
                return line.rstrip() if line else None
            except EOFError:
                return None
            except KeyboardInterrupt:
                if not is_terminal:
                    raise
                self._console.print()

    def _answer(self) -> None:
        """Show the answer to the last question, and keep it: as far as it came, if it was stopped."""
        from pipespec.api.text import TextStream

        pieces: list[str] = []

        def write(text: str, drafted: bool) -> None:
            pieces.append(text)
            self._console.out(text, end="")

        inputs = self._tokenizer.apply_chat_template(
            self._messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        most = self._room(inputs.input_ids.shape[1])
        if most < 1:
            self._messages.pop()
            self._console.print("the conversation has become too long for the model: /reset starts again", style="dim")
            return
        stream = TextStream(lambda tokens: self._tokenizer.decode(tokens, skip_special_tokens=True), write)
        try:
            with reading_shown():
                self._pipe.generate(
                    **inputs.to(self._pipe.target.device), max_new_tokens=most, streamer=stream, **self._options
                )
            self._console.print()
            if self._args.report:
                print(self._pipe.report, file=sys.stderr)
        except KeyboardInterrupt:
            stream.end()
            self._console.print(" (stopped)", style="dim")
        self._messages.append({"role": "assistant", "content": "".join(pieces)})

    def _room(self, prompt: int) -> int:
        limit = getattr(self._pipe.target.config.get_text_config(), "max_position_embeddings", None)
        most: int = self._args.max_new_tokens
        return most if limit is None else min(most, limit - prompt)
