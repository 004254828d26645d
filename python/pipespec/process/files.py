"""Files that are complete whenever they exist."""

from __future__ import annotations

import errno
import os
import stat
import threading
from contextlib import suppress
from pathlib import Path


def replace(path: Path, text: str) -> None:
    """Write a file in one step, so that an interrupted process, or a full disk, leaves the earlier or the new contents.

    What another file cannot take the place of is written in place: a link, a device or a pipe, a file with several names or of another owner, and one
    whose folder may not be written.

    Raises:
        OSError: With the name of the file.
    """
    status = _status(path)
    in_place = status is not None and not (
        stat.S_ISREG(status.st_mode)
        and status.st_nlink <= 1  # 0: another has just taken its place
        and status.st_uid == os.geteuid()
        and os.access(path.parent, os.W_OK, effective_ids=True)
    )
    written = path if in_place else path.with_name(f".{os.getpid()}.{threading.get_ident()}.half")
    try:
        written.write_text(text, encoding="utf-8")
        if not in_place:
            if status is not None:
                written.chmod(stat.S_IMODE(status.st_mode))
            _rename(written, path)
    except BaseException as error:
        if not in_place:
            with suppress(OSError):  # on a full disk it would take the last room
                written.unlink()
        if isinstance(error, OSError) and error.filename in (None, str(written)):
            error.filename = str(path)
        raise


def _rename(written: Path, path: Path) -> None:
    try:
        written.replace(path)
    except OSError as error:
        if error.errno != errno.EBUSY:  # a file that is mounted by itself, as in containers
            raise
        path.write_text(written.read_text(encoding="utf-8"), encoding="utf-8")
        written.unlink()


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except FileNotFoundError:
        return None
