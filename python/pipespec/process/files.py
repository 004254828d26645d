"""Files that are written atomically, so that one that exists is complete, and paths of models. Without torch."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path


def require_model(model: str | Path) -> None:
    """Refuse a path at which no model can be.

    Raises:
        FileNotFoundError: ``model`` is a path, and not a hub name, and nothing is there.
        ValueError: A file that is no GGUF file is there.
    """
    path, text = Path(model), str(model)
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError(
                    f"{model} is no GGUF file: it does not begin with GGUF (a model is such a file, a folder with config.json and safetensors, or a hub name)"
                )
    if path.exists():
        return
    if path.suffix.lower() == ".gguf":
        raise FileNotFoundError(f"there is no file {model}")
    if path.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1:
        raise FileNotFoundError(
            f"there is no folder {model}: a model is a folder with config.json and safetensors, or a hub name"
        )


def replace(path: Path, text: str | bytes) -> None:
    """Write a file in one step, so that an interrupted process, or a full disk, leaves the earlier or the new contents.

    A link, a device and a pipe are written in place: a file would take their place.

    Raises:
        OSError: With the name of the file.
    """
    in_place = os.path.lexists(path) and (path.is_symlink() or not path.is_file())
    written = path if in_place else path.with_name(f".{os.getpid()}.{threading.get_ident()}.half")
    try:
        written.write_bytes(text.encode("utf-8") if isinstance(text, str) else text)
        if not in_place:
            if path.exists():
                shutil.copymode(path, written)
            written.replace(path)
    except BaseException as error:
        if not in_place:
            written.unlink(missing_ok=True)  # on a full disk it would take the last room
        if isinstance(error, OSError):
            error.filename = str(path)
        raise
