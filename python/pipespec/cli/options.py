"""Options and input that several commands share."""

from __future__ import annotations

import argparse
import io
import math
import os
import re
import socket
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from pipespec.config import WEIGHT_FORMATS
from pipespec.process.files import require_model
from pipespec.process.progress import say
from pipespec.registry import DRAFTS

DTYPES = ("auto", "float32", "bfloat16", "float16")

Subparsers = Any
"""What ``ArgumentParser.add_subparsers`` returns; its class is private to argparse."""

_INSTALL = {"pipespec_spd": "pip install pipespec", "pipespec_train": "pip install 'pipespec[train]'"}


def command_of(package: str) -> Any:
    """The module ``command`` of a package that imports pipespec, and that pipespec itself never imports: only by name, for its own commands.

    Raises:
        ImportError: The package, or something that it needs, is not installed.
    """
    try:
        return import_module(f"{package}.command")
    except ImportError as error:
        raise ImportError(f"{package} cannot be imported ({error}): {_INSTALL[package]}") from error


def option(group: Any, name: str, metavar: str | tuple[str, ...] | None, kind: Any, text: str, **how: Any) -> None:
    """Add an option with a value to a parser or a group; ``how`` as for ``add_argument``."""
    group.add_argument(f"--{name}", metavar=metavar, type=kind, help=text, **how)


def flag(group: Any, name: str, text: str, **how: Any) -> None:
    """Add an option without a value."""
    group.add_argument(f"--{name}", action="store_true", help=text, **how)


# fmt: off
def add_models(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose and load the models."""
    option(parser, "target", "PATH", str, "model that defines the text: a folder, a hub name or a GGUF file (default: the bundled family)")
    option(parser, "draft", "PATH", str, "; ".join(["draft; several: smallest first", *(row.usage for row in DRAFTS if row.usage)]),
           action="append", default=[])
    option(parser, "tokenizer", "PATH", str, "folder, hub name or GGUF file of the target's tokenizer (default: the target)")
    option(parser, "dtype", None, str, "default: as stored; float32 for the bundled family", choices=DTYPES)
    option(parser, "device", "D", device, "cpu, cuda or cuda:1: one for all or one per stage, drafts first; cuda:1+cuda:2: a stage split over both; auto: GPUs by "
           "free memory; default: cpu", nargs="+")
    option(parser, "weights", "F", weight_format, "weight format: q8_0, q4_k, int8 and others; one for all or one per stage, drafts first; keep: as it is", nargs="+")
    flag(parser, "trust-remote-code", "allow a model's own Python code to run")
# fmt: on


def chosen_models(
    args: argparse.Namespace, bundled: Callable[[], list[str]]
) -> tuple[str | Path, list[str | Path], str]:
    """Target, drafts and dtype by the options of :func:`add_models`. ``bundled``: names of the drafts where no target is given, and the bundled one is used.

    Raises:
        FileNotFoundError: :func:`require_models`.
        ValueError: Likewise; drafts without a target. A draft that a name stands for needs none.
    """
    names = {row.name for row in DRAFTS}
    if args.target is None and set(args.draft) - names:
        raise ValueError("--draft needs a --target: the bundled family has its own drafts")
    require_models(args.target, *(path for path in (args.tokenizer, *args.draft) if path not in names))
    if args.target is not None:
        return args.target, list(args.draft), args.dtype or "auto"
    from pipespec.demo import family_path

    return family_path("target"), args.draft or [family_path(n) for n in bundled()], args.dtype or "float32"


def require_models(target: str | None, *others: str | None) -> None:
    """Refuse paths and hub names that lead nowhere, before torch is imported, which takes seconds. Without a network the hub's own retries are skipped.

    Raises:
        FileNotFoundError: Nothing is there, or a folder without a model; a hub name of which nothing was downloaded, and the hub cannot be reached.
        ValueError: A file that is no GGUF file.
    """
    if target is not None and (folder := Path(target)).is_dir():
        found = [path.name for path in folder.iterdir()]
        if "config.json" not in found and not any(name.lower().endswith(".gguf") for name in found):
            raise FileNotFoundError(f"{target} holds no model: there is no config.json in it")
    models = [model for model in (target, *others) if model]
    for model in models:
        require_model(model)
    for model in models:
        if not Path(model).exists():
            _require_of_hub(model)


def _require_of_hub(name: str) -> None:
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    host = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname
    if getproxies() or "HF_HUB_OFFLINE" in os.environ or host is None:
        return  # a proxy knows names that this machine does not
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        # Before anything reads it.
        os.environ["HF_HUB_OFFLINE"] = "1"
        from huggingface_hub.constants import HF_HUB_CACHE
        from huggingface_hub.file_download import repo_folder_name

        if not (Path(HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model")).exists():
            raise FileNotFoundError(
                f"there is no folder {name}; as a name of the hub it was not downloaded before, and {host} cannot be reached"
            ) from None
        say(f"{host} cannot be reached: {name} is what was downloaded before")


def loading_options(args: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """The arguments of ``Pipeline`` that say how the models are loaded."""
    weights = None if args.weights is None else [None if name == "keep" else name for name in args.weights]
    places = {
        "weights": {"drafts": None} if weights == [None] else one_or_all(weights),
        "device": one_or_all(args.device),
    }
    return {"dtype": dtype, "trust_remote_code": args.trust_remote_code, **places}


def one_or_all(values: list[Any] | None) -> Any:
    """Unpack an option that takes one value for all stages or one per stage, as ``Pipeline`` expects it."""
    return values[0] if values is not None and len(values) == 1 else values


def number(kind: Callable[[str], float], low: float, high: float = math.inf) -> Callable[[str], float]:
    """The type of an option whose value is a number of a range, both ends included: a wrong one is refused before models are loaded."""

    def read(text: str) -> float:
        value = kind(text)
        if not low <= value <= high:
            at_most = f" and at most {high}" if high < math.inf else ""
            raise argparse.ArgumentTypeError(f"must be at least {low}{at_most}, not {text}")
        return value

    read.__name__ = kind.__name__  # argparse names it where the text is no number
    return read


positive = number(int, 1)


def weight_format(text: str) -> str:
    """The type of an option whose value is a weight format."""
    if text not in (*WEIGHT_FORMATS, "keep"):
        raise argparse.ArgumentTypeError(f"{text!r} is none; the weight formats are {', '.join(WEIGHT_FORMATS)}")
    return text


def device(text: str) -> str:
    """The type of an option whose value is a device, or several with ``+`` between them. Whether they exist torch says later."""
    if not re.fullmatch(r"auto|(cpu|cuda(:\d+)?)(\+(cpu|cuda(:\d+)?))*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a device; use cpu, cuda, cuda:1, cuda:0+cuda:1 or auto")
    return text


def check_output(file: Path) -> None:
    """Raise ``OSError`` unless ``file`` can be written, before the work whose result goes there."""
    folder = file.absolute().parent
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    if file.is_dir():
        raise IsADirectoryError(f"{file} is a folder: name a file in it")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise PermissionError(f"{file} cannot be written")


def check_output_folder(folder: Path) -> None:
    """Raise ``OSError`` unless ``folder`` can be made or written into, before the work whose result goes there."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise NotADirectoryError(f"{there} is a file: name a folder for {folder}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} cannot be written")


def read_text(file: Path | None) -> str:
    """Read the text of a file, or of standard input, without its final line breaks, which editors and ``echo`` append.

    Raises:
        ValueError: The text is empty or not UTF-8, or standard input is a terminal.
        OSError: The file cannot be read.
    """
    where = str(file or "standard input")
    try:
        if file is not None:
            text = file.read_text(encoding="utf-8")
        elif sys.stdin is None or sys.stdin.isatty():
            raise ValueError("no prompt: give --prompt TEXT, --prompt-file FILE, or a text on standard input")
        else:
            if isinstance(sys.stdin, io.TextIOWrapper):
                sys.stdin.reconfigure(encoding="utf-8", errors="strict")  # whatever the locale is
            text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise _not_utf8(where) from error
    return require_text(text.rstrip("\r\n"), where)


def utf8(argument: str) -> str:
    """The type of an option whose value is text. Its bytes are read as UTF-8, whatever the locale is; other bytes as the locale has them."""
    try:
        return os.fsencode(argument).decode("utf-8")
    except UnicodeError:
        return argument


utf8.__name__ = "text"  # argparse names it in messages


def require_text(text: str, where: str) -> str:
    """Return ``text``; raises ``ValueError`` where it is empty or was not UTF-8."""
    if not text.strip():
        raise ValueError(f"the prompt is empty ({where})")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # bytes that no encoding has are surrogates
        raise _not_utf8(where) from error
    return text


def _not_utf8(where: str) -> ValueError:
    return ValueError(f"the prompt is not UTF-8 text: {where}")
