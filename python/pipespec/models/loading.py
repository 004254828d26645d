"""Models from paths: safetensors or GGUF, and remote code only on request."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import cached_file

from pipespec.errors import DoesNotFit
from pipespec.models.adapters import without_wrapper
from pipespec.process.threads import renew_pool

DAMAGE = (
    SafetensorError,
    StrictDataclassError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
)
"""Errors of transformers and safetensors for damaged files. A size of 0 in config.json, for example, fails in the arithmetic of a constructor."""


def load_config(model: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Load the configuration of a model. No weight is read.

    Args:
        model: a folder, a hub name, or a GGUF file.
        trust_remote_code: as ``from_pretrained`` takes it.

    Raises:
        FileNotFoundError: the path holds no model.
        ValueError: its weights are not safetensors, or its files are damaged.
        TypeError: not a path.
    """
    if not isinstance(model, (str, Path)):
        raise TypeError(
            f"a model must be a transformers model or a path, not {type(model).__name__}"
            + (" (wrap: give the underlying transformers model)" if isinstance(model, torch.nn.Module) else "")
        )
    path = Path(model)
    if is_gguf(path):
        return _gguf_config(path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise FileNotFoundError(f"{path} holds no model: there is no config.json in it")
        if not any(path.glob("*.safetensors")):
            unsafe = sorted(p.name for p in path.glob("*.bin"))
            raise ValueError(
                f"{path} holds no safetensors weights"
                + (f" (only {', '.join(unsafe)}, which can run code when loaded); convert them" if unsafe else "")
            )
    elif path.is_absolute() or str(model).startswith(".") or str(model).count("/") > 1:
        raise FileNotFoundError(
            f"there is no folder {model}: a model is a folder with config.json and safetensors, or a hub name"
        )
    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    except OSError as error:
        raise _no_model(model, error) from error
    except (ValueError, *DAMAGE) as error:
        raise unusable(model, error) from error


def stored_tensors(path: str | Path) -> list[tuple[str, int]]:
    """dtype and bytes of each tensor in the safetensors of a folder, from their headers; empty for a hub name.

    Raises:
        ValueError: the headers cannot be read.
    """
    folder, found = Path(path), []
    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file():
            files = sorted({folder / name for name in json.loads(index.read_bytes())["weight_map"].values()})
        else:
            files = [file for file in [folder / "model.safetensors"] if file.is_file()]
        for file in files:
            with file.open("rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                header: dict[str, Any] = json.loads(opened.read(min(size, file.stat().st_size)))
            header.pop("__metadata__", None)
            for tensor in header.values():
                begin, end = tensor["data_offsets"]
                found.append((str(tensor["dtype"]), int(end) - int(begin)))
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: the headers of its safetensors cannot be read: {error}") from error
    return found


@contextmanager
def open_stored(file: str | Path) -> Iterator[Any]:
    """The open safetensors of a file. Raises ``ValueError`` for a damaged one."""
    try:
        with safe_open(file, "pt") as stored:
            yield stored
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged: {error}") from error


def fill(module: torch.nn.Module, tensors: dict[str, torch.Tensor], where: str, assign: bool = False) -> None:
    """Load all tensors of a module. ``ValueError`` names what lacks, is unknown, or has another shape. ``assign``: see ``load_state_dict``."""
    try:
        module.load_state_dict(tensors, assign=assign)
    except RuntimeError as error:
        raise ValueError(f"{where}: {error}") from error


def load_model(
    model: PreTrainedModel | str | Path,
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str | dict[str, str] | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load a model, in eval mode.

    Weights pass through the memory of the host on their way to a GPU. Quantised weights are read on the device itself, which needs the
    package accelerate. So are those of a model that is split over devices.

    Args:
        model: a folder, a hub name, or a GGUF file. The matrices of a GGUF file, and on a CPU those of GPTQ, AWQ and compressed-tensors, are in blocks where the family is known. A loaded model is returned as it is, in its mode, and of a ``PeftModel`` the model within.
        dtype: as ``from_pretrained`` takes it.
        device: where to, or the devices by names of modules; None: the CPU.
        trust_remote_code: as ``from_pretrained`` takes it.

    Raises:
        DoesNotFit: the memory does not suffice to read the weights.
        FileNotFoundError: the path holds no model.
        ImportError: the weights need a package that is not installed.
        TypeError: neither a model nor a path.
        ValueError: the weights are damaged or incomplete, or no safetensors.
    """
    model = without_wrapper(model)
    if isinstance(model, PreTrainedModel):
        return model
    source, more = model, dict[str, Any](use_safetensors=True)
    if is_gguf(model):
        in_blocks = _in_blocks(model, dtype, device)
        if in_blocks is not None:
            return in_blocks
        source, more = Path(model).parent, {"gguf_file": Path(model).name}
    config = load_config(model, trust_remote_code=trust_remote_code)
    if not isinstance(device, dict) and torch.device(device or "cpu").type == "cpu" and not trust_remote_code:
        in_blocks = _repacked(model, config)
        if in_blocks is not None:
            return in_blocks
    # Packed weights cannot be moved (GPTQ, bitsandbytes 8-bit), or are packed on the way there.
    is_split = isinstance(device, dict)
    in_place = device is not None and (is_split or getattr(config, "quantization_config", None) is not None)
    if is_split:
        require_accelerate(model)
    renew_pool()  # transformers reads weights with several threads
    try:
        with _logged() as logged:
            loaded, found = AutoModelForCausalLM.from_pretrained(
                source,
                config=config,
                dtype=dtype,
                **more,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                **({"device_map": device if is_split else {"": device}} if in_place else {}),
            )
    except OSError as error:
        raise _no_model(model, error) from error
    except (MemoryError, ValueError, *DAMAGE) as error:
        if is_out_of_memory(error, *logged):
            where = ", ".join(dict.fromkeys(device.values())) if isinstance(device, dict) else device
            raise _too_large(model, where if in_place else None, error) from error
        raise unusable(model, error) from error
    if found["missing_keys"]:
        # transformers would initialise them at random, with a warning.
        missing = sorted(found["missing_keys"])
        raise ValueError(
            f"{model}: its weights lack {', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''} "
            f"({len(missing)} in all); get the complete weights"
        )
    return loaded.eval() if device is None or isinstance(device, dict) or in_place else loaded.to(device).eval()


def is_gguf(model: Any) -> bool:
    """Whether a user's model is the path of a GGUF file."""
    return isinstance(model, (str, Path)) and str(model).endswith(".gguf")


def gguf_path(model: Any, file: str | None) -> Any:
    """The path of a GGUF file in a folder or a hub repository, as ``gguf_file`` of ``from_pretrained`` names it; None: the model as it is."""
    if file is None:
        return model
    if not isinstance(model, (str, Path)):
        raise TypeError(
            f"gguf_file={file!r} is a file in a folder or on the hub, and the target is a {type(model).__name__}"
        )
    try:
        return cached_file(str(model), file)
    except OSError as error:
        raise _no_model(model, error) from error


def _in_blocks(
    path: str | Path, dtype: torch.dtype | str, device: torch.device | str | dict[str, str] | None
) -> PreTrainedModel | None:
    """A model around the blocks of a GGUF file; None for an architecture that only transformers reads, which dequantises it."""
    from pipespec.models.gguf import GgufFile
    from pipespec.models.gguf_models import family_of_file, model_of

    file = GgufFile.open(path)
    if family_of_file(file) is None:
        return None
    if isinstance(device, dict):
        raise ValueError(f"{path}: a model out of a GGUF file is not split over devices: name one")
    loaded = model_of(file, dtype)
    return loaded if device is None else loaded.to(device)


def _repacked(source: str | Path, config: Any) -> PreTrainedModel | None:
    """A model around blocks of the integer weights of a checkpoint; None where it has none, or only transformers reads them."""
    from pipespec.models.group_checkpoints import repacked, settings_of

    settings = settings_of(config)
    if settings is None:
        return None
    try:
        return repacked(source, config, settings)
    except OSError as error:
        raise _no_model(source, error) from error
    except DAMAGE as error:
        raise unusable(source, error) from error


def gguf_bytes(path: str | Path) -> int:
    """Bytes of the tensors of a GGUF file whose matrices stay in blocks; 0 for other architectures."""
    from pipespec.models.gguf import GgufFile
    from pipespec.models.gguf_models import family_of_file

    file = GgufFile.open(path)
    return 0 if family_of_file(file) is None else file.nbytes


def _gguf_config(path: Path) -> Any:
    from pipespec.models.gguf import GgufFile
    from pipespec.models.gguf_models import family_of_file, gguf_config

    file = GgufFile.open(path)
    if family_of_file(file) is not None:
        return gguf_config(file)
    try:
        return AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    except (OSError, ImportError, ValueError, *DAMAGE) as error:
        raise unusable(path, error) from error


def require_accelerate(what: Any) -> None:
    """Raise ``ImportError`` if the package is missing that splits models over devices."""
    if importlib.util.find_spec("accelerate") is None:
        raise ImportError(
            f"{what}: a model over several devices needs the package accelerate, which moves its hidden states between them: pip install "
            "accelerate"
        )


def _no_model(model: str | Path, error: Exception) -> FileNotFoundError:
    return FileNotFoundError(f"{model} holds no model that can be loaded: {error}")


@contextmanager
def _logged() -> Iterator[list[str]]:
    """Collect what transformers logs. It quantises weights while it reads them, and only logs why that failed."""
    logged: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        yield logged
    finally:
        logger.removeHandler(handler)


def is_out_of_memory(error: BaseException, *messages: str) -> bool:
    """Whether an error, or a message, comes from an allocator. Of torch's allocators only that for GPUs raises a class of its own."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(
        words in text
        for text in (str(error), *messages)
        for words in (
            "out of memory",
            "MemoryError",
            "can't allocate memory",
            "Cannot allocate memory",
            "not enough memory",
        )
    )


def _too_large(model: str | Path, device: torch.device | str | None, error: Exception) -> DoesNotFit:
    where = "cpu" if device is None else device
    return DoesNotFit(
        f"{model}: {where} ran out of memory while its weights were read, which may take more than they do afterwards: {error}\n"
        "What helps: another device for a stage (device=), fewer drafts, or weights that are stored smaller"
    )


def unusable(model: str | Path, error: Exception) -> ValueError:
    """The error for a model that transformers or safetensors cannot read."""
    return ValueError(f"{model} holds no model that can be loaded: {error or type(error).__name__}")
