"""The native core of pipespec: state protocol, row selection, kernels. It works on tokens, logits and lengths, not on models.

``pipespec_kernels.ops`` has the operations, ``pipespec_kernels.state`` the state block, ``collect_env()`` says what is
installed and what was built. Importing this package alone loads neither torch nor the native module.
"""

from __future__ import annotations

import importlib
import sys
import sysconfig
from pathlib import Path
from typing import Any

from pipespec_kernels._version import __version__
from pipespec_kernels.env import collect_env, problems

__all__ = ["__version__", "collect_env", "problems"]


def __getattr__(name: str) -> Any:
    # `from pipespec_kernels import _native` comes here first, so that the error can say what to do, and so that
    # collect_env() and `pipespec doctor` still work when it fails.
    if name in ("_native", "_cuda"):
        try:
            return importlib.import_module(f"{__name__}.{name}")
        except ImportError as error:
            raise ImportError(_explain(name, error), name=f"{__name__}.{name}") from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _explain(name: str, error: ImportError) -> str:
    """The cause and the remedy, for a native module that does not import."""
    folder = Path(__file__).parent
    in_source_tree = (folder.parent / "setup.py").exists()
    if in_source_tree:
        rebuild = f"run `{sys.executable} -m pip install -e .` (or `make native`) in {folder.parent}"
    else:
        rebuild = f"run `{sys.executable} -m pip install --force-reinstall --no-deps .` in pipespec's source tree"
    if name == "_cuda":
        rebuild += ", with nvcc on PATH and PIPESPEC_CUDA=on"

    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    built = sorted(path.name for path in folder.glob(f"{name}.*so"))
    if not built:
        message = f"pipespec_kernels.{name} is not built: there is none in {folder}. To build it, {rebuild}."
        if in_source_tree:
            message += " (If pipespec is installed already: here the source tree hides it; change to another folder.)"
    elif name + suffix not in built:
        message = (
            f"pipespec_kernels.{name} was built for another Python: found {', '.join(built)}, but this Python "
            f"{sys.version.split()[0]} needs {name + suffix}. Use the Python it was built for, or {rebuild}."
        )
    else:
        message = f"pipespec_kernels.{name} does not load: {error}. To build it for this machine, {rebuild}."
    return message
