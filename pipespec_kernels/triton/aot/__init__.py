"""Kernels that were compiled ahead of time, so that a first call compiles nothing: ``python -m pipespec_kernels.triton.aot build``.

Triton's cache on disk is addressed by content. The name of an entry is a hash of the kernel's source and of all it calls, the types, constants and
alignment of its arguments, the options, the architecture, and the versions of Triton and ptxas. The folder holds entries of such a cache, under the same
names. A process looks first where Triton looks, then here. So a folder that does not fit is never found to fit: its kernels are compiled as without it.

Nothing is written or copied when the folder is used, so any number of processes may use it, also from a disk that cannot be written.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.runtime.cache import FileCacheManager

from pipespec_kernels.signals import pass_on

VARIABLE = "PIPESPEC_AOT"
"""Of the environment: the folder, if it is not the default."""
MANIFEST = "manifest.json"
FORMAT = 1

_log = logging.getLogger(__name__)


def folder() -> Path:
    """Where this process looks for compiled kernels. The folder need not exist."""
    return Path(os.environ.get(VARIABLE) or Path(__file__).parent / "built")


def versions() -> dict[str, Any]:
    """What a folder must have been built with to be used here. Triton looks up the architecture, and ptxas, kernel by kernel."""
    return {
        "format": FORMAT,
        "triton": triton.__version__,
        "python": sysconfig.get_config_var("SOABI"),  # of the launchers, which are extension modules
        "sources": _sources(),
    }


@functools.cache
def _sources() -> str:
    """Hash of the modules with kernels."""
    whole = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].glob("*.py")):
        text = file.read_bytes()
        whole.update(f"{file.name} {len(text)}\n".encode() + text)
    return whole.hexdigest()


class State(NamedTuple):
    """Of a folder.

    Attributes:
        kernels: Compiled kernels by architecture, as in ``{"sm_90": 37}``; empty where there are none that fit.
        why_not: Why those that are there are not used; None if they are, or if there are none.
    """

    kernels: dict[str, int]
    why_not: str | None

    def __str__(self) -> str:
        if self.why_not:
            return self.why_not
        return ", ".join(f"{count} for {arch}" for arch, count in self.kernels.items()) or "none"


def state(where: Path | None = None) -> State:
    """Of the folder ``where``, default :func:`folder`. Never raises for what is in it."""
    try:
        manifest = json.loads(((where or folder()) / MANIFEST).read_text())
        kernels = {str(arch): int(count) for arch, count in manifest["kernels"].items()}
        built_with = {name: manifest[name] for name in versions()}
    except FileNotFoundError:
        return State({}, None)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        pass_on(error)
        return State({}, f"unreadable ({type(error).__name__}: {error}): build again")
    for name, here in versions().items():
        if built_with[name] != here:
            if name == "sources":
                return State({}, "stale: the kernels have changed since: build again")
            return State({}, f"stale: {name} {here} here, built by {built_with[name]}: build again")
    if _has_own_manager():
        return State({}, "not used: another cache manager is set (TRITON_CACHE_MANAGER)")
    return State(kernels, None)


def _has_own_manager() -> bool:
    """Whether something else than this module has replaced Triton's cache."""
    if "TRITON_CACHE_MANAGER" in os.environ:
        return True
    return triton.knobs.cache.manager_class not in (None, LayeredCache)


class LayeredCache(FileCacheManager):  # type: ignore[misc]
    """Triton's cache on disk, and behind it the folder of kernels that were compiled ahead of time."""

    layer = Path()

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        super().__init__(key, override=override, dump=dump)
        self._built = None if override or dump else self.layer / key

    def get_file(self, filename: str) -> str | None:
        """The path of a file of this entry, None if it is in neither place."""
        found: str | None = super().get_file(filename)
        if found is None and self._built is not None and (self._built / filename).is_file():
            found = str(self._built / filename)
        return found

    def get_group(self, filename: str) -> dict[str, str] | None:
        """The paths of all files of this entry by name, None if it is in neither place; ``filename``: the last one that was written."""
        found: dict[str, str] | None = super().get_group(filename)
        # Triton's group has the absolute paths of its files, and is of use only if the first of them exists.
        if (not found or filename not in found) and self._built is not None and (self._built / filename).is_file():
            found = {file.name: str(file) for file in self._built.iterdir()}
        return found


def use(where: Path | None = None) -> State:
    """Use a folder from now on, in this process, if it fits; returns its state.

    A cache manager that someone has set stays. The interpreter compiles nothing.

    Args:
        where: default :func:`folder`.
    """
    where = where or folder()
    found = state(where)
    _log.debug("ahead-of-time kernels in %s: %s", where, found)
    if found.kernels and not triton.knobs.runtime.interpret:
        LayeredCache.layer = where.absolute()
        triton.knobs.cache.manager_class = LayeredCache
    return found
