"""Files that are complete whenever they exist."""

from __future__ import annotations

import os
import stat
import threading
from contextlib import suppress
from pathlib import Path


def replace(path: Path, text: str) -> None:
    """Write a file in one step, so that an interrupted process, or a full disk, leaves the earlier or the new contents.

    A link, a device and a pipe are written in place: a file would take their place.

    Raises:
        OSError: With the name of the file.
    """
    mode = path.lstat().st_mode if os.path.lexists(path) else None
    in_place = mode is not None and not stat.S_ISREG(mode)
    written = path if in_place else path.with_name(f".{os.getpid()}.{threading.get_ident()}.half")
    try:
        written.write_text(text, encoding="utf-8")
        if not in_place:
            if mode is not None:
                written.chmod(stat.S_IMODE(mode))
            written.replace(path)
    except BaseException as error:
        if not in_place:
            with suppress(OSError):  # on a full disk it would take the last room
                written.unlink()
        if isinstance(error, OSError) and error.filename in (None, str(written)):
            error.filename = str(path)
        raise
