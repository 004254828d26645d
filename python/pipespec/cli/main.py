"""The command line: ``pipespec generate``, ``chat``, ``serve``, ``trace``, ``demo``, ``recommend``, ``spd``, ``train-draft`` and ``doctor``.

Text goes to stdout, everything else to stderr. Exit codes: 0 for success; 1 if the answer is "no" (texts differ, the installation cannot work); 2 for
an error; 130 after Ctrl-C; 141 if the reader of stdout has closed it. Only commands that need torch import it.
"""

from __future__ import annotations

import argparse
import difflib
import io
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import NoReturn

from pipespec.cli import chat, demo, doctor, generate, recommend, serve
from pipespec.cli.options import command_of
from pipespec.process.progress import say
from pipespec_kernels import __version__

# The messages of these errors describe the input. Other errors are shown with their type.
_INPUT_ERRORS = (ValueError, TypeError, OSError, NotImplementedError, ImportError)


_MEANT = {"--model": "--target", "-m": "--target", "-p": "--prompt", "-f": "--prompt-file"}
_MEANT |= {"-n": "--max-new-tokens", "--n-predict": "--max-new-tokens", "--max-tokens": "--max-new-tokens"}
_MEANT |= {"-md": "--draft", "--draft-model": "--draft", "--model-draft": "--draft", "--temp": "--temperature"}
"""Options of other programs, and ours."""
_COMMANDS_MEANT = {
    "run": "chat",
    "complete": "generate",
    "completion": "generate",
    "cli": "chat",
    "api": "serve",
    "server": "serve",
}
"""Commands of other programs, and ours."""


class _Parser(argparse.ArgumentParser):
    """Says an error in one line: the usage of a command has fourteen."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (`{self.prog} --help` lists the options)\n")


def main(arguments: list[str] | None = None) -> int:
    """Run one command, and return the exit code. ``arguments``: the command line without the program's name; default: ``sys.argv``."""
    if sys.stderr is None:  # closed
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    parser, commands = _parser()
    _refuse_command(parser, commands, sys.argv[1:] if arguments is None else arguments)
    args, unknown = parser.parse_known_args(arguments)
    if unknown and args.options:
        _refuse(args.refuse, unknown, args.options)
    if sys.stdout is None:
        say("error: standard output is closed")
        return 2
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error: no encoding ends a text midway
    command: Callable[[argparse.Namespace], int] = args.command
    try:
        with warnings.catch_warnings():
            # Without the line of code that they come from.
            warnings.showwarning = lambda message, *args, **kwargs: say(f"warning: {message}")
            return command(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our text has closed it (`| head`). Python must not try to flush it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        try:
            if args.debug:
                traceback.print_exc()
            # One line, except for errors that contain a table.
            message = str(error).rstrip() if getattr(error, "in_lines", False) else " ".join(str(error).split())
            message = message or type(error).__name__
            if isinstance(error, OSError) and error.filename is not None and error.strerror:
                message = f"{error.filename}: {error.strerror}"
            if not isinstance(error, _INPUT_ERRORS):
                message = f"{type(error).__name__}: {message}"
            hint = " (`pipespec doctor` checks the installation)" if isinstance(error, ImportError) else ""
            say(f"error: {message}{hint}")
        except OSError:  # nothing can be written there; Python must not try to at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        return 2


def _refuse_command(parser: argparse.ArgumentParser, commands: Collection[str], arguments: Sequence[str]) -> None:
    """End with an error where the first argument is no command's name, and say what may have been meant."""
    if not arguments:
        parser.error(f"which command? There are {', '.join(commands)}")
    name = arguments[0]
    if name.startswith("-") or name in commands:
        return
    meant = _COMMANDS_MEANT.get(name)
    near = [meant] if meant else difflib.get_close_matches(name, commands, 1)
    hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(commands)}"
    parser.error(f"there is no command {name}; {hint}")


def _refuse(refuse: Callable[[str], NoReturn], unknown: list[str], options: Sequence[str]) -> None:
    """End with an error that names the arguments which no option took, and what may have been meant."""
    option = next((text for text in unknown if text.startswith("-")), "").partition("=")[0]
    meant = _MEANT.get(option, "")
    near = [meant] if meant in options else difflib.get_close_matches(option, options, 1)
    if not option and "--target" in options:
        near = ["--target MODEL", "--prompt TEXT"] if "--prompt" in options else ["--target MODEL"]
    hint = f"; did you mean {' '.join(near)}?" if near else ""
    refuse(f"unrecognized arguments: {' '.join(unknown)}{hint}")


def _parser() -> tuple[argparse.ArgumentParser, Collection[str]]:
    """The parser, and the names of its commands."""
    parser = _Parser(
        "pipespec", description="Lossless speculative decoding: smaller models draft, and the text is the target's own."
    )
    parser.add_argument("--version", action="version", version=f"pipespec {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    # By name: pipespec imports no package that imports it.
    try:
        training = command_of("pipespec_train")
    except ImportError as error:
        training, missing = None, error

        def fail(args: argparse.Namespace) -> int:
            raise missing

        for name in ("spd", "train-draft"):
            command = commands.add_parser(name, help="not installed", add_help=False)
            command.add_argument("words", nargs="*")
            command.set_defaults(command=fail, options=(), debug=False)
    for subcommand in filter(None, (generate, chat, serve, demo, recommend, training, doctor)):
        for command in subcommand.add_parser(commands):
            command.add_argument("--debug", action="store_true", help="show the traceback of an error")
            command.set_defaults(options=tuple(command._option_string_actions), refuse=command.error)
    return parser, commands.choices


if __name__ == "__main__":
    sys.exit(main())
