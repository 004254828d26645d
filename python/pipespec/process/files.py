"""Files that are complete whenever they exist."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def replace(path: Path, text: str) -> None:
    """Write a file in one step, so that an interrupted process, or a full disk, leaves the earlier or the new contents.

    Raises:
        OSError: With the name of the file.
    """
    half = path.with_name(f"{path.name}.{os.getpid()}.half")
    try:
        half.write_text(text, encoding="utf-8")
        half.replace(path)
    except BaseException as error:
        with suppress(OSError):  # on a full disk it would take the last room
            half.unlink()
        if isinstance(error, OSError) and error.filename in (None, str(half)):
            error.filename = str(path)
        raise
