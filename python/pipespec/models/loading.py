"""Models from paths: safetensors or GGUF, and remote code only on request."""

from __future__ import annotations

import json
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import cached_file

from pipespec.errors import DoesNotFit, user_stacklevel
from pipespec.models.properties import without_wrapper
from pipespec.models.quantized import with_kv_of
from pipespec.process.files import require_model
from pipespec.process.threads import renew_pool

if TYPE_CHECKING:
    from pipespec.models.gguf import GgufFile

LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
"""Names of parts of split GGUF files that are not the first."""

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
    require_model(model)
    path = Path(model)
    if (file := file_in_blocks(model)) is not None:
        from pipespec.models.gguf_config import gguf_config

        return gguf_config(file)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise FileNotFoundError(f"{path} holds no model: there is no config.json in it")
        if not any(path.glob("*.safetensors")):
            unsafe = sorted(p.name for p in path.glob("*.bin"))
            raise ValueError(
                f"{path} holds no safetensors weights"
                + (f" (only {', '.join(unsafe)}, which can run code when loaded); convert them" if unsafe else "")
            )
    source, more = (path.parent, {"gguf_file": path.name}) if is_gguf(path) else (model, {})
    with readable(model):
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code, **more)
    of_mlx = getattr(config, "quantization", None)
    if isinstance(of_mlx, dict) and "group_size" in of_mlx:
        raise ValueError(
            f"{model} holds weights in MLX's format of {of_mlx.get('bits')} bits, which is not supported: take the original model, its GGUF file, or GPTQ or AWQ"
        )
    return config


def weight_files(source: str | Path, prefixes: tuple[str, ...] = ("",)) -> list[Path]:
    """The safetensors of a folder or a hub name that hold weights whose names begin with one of ``prefixes``. Raises ``OSError`` where one is not there."""
    index = cached_file(str(source), "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False)
    names = {"model.safetensors"}
    if index is not None:
        where: dict[str, str] = json.loads(Path(index).read_bytes())["weight_map"]
        names = {file for name, file in where.items() if name.startswith(prefixes)}
    return [Path(cached_file(str(source), name)) for name in sorted(names)]


def stored_bytes(path: str | Path) -> int:
    """Bytes of the tensors in the safetensors of a folder; 0 for a hub name, from which nothing is downloaded."""
    found = 0
    for file in weight_files(path) if Path(path).is_dir() else ():
        with file.open("rb") as opened:
            # Its header, and before that the size of the header.
            found += file.stat().st_size - 8 - int.from_bytes(opened.read(8), "little")
    return found


@contextmanager
def open_stored(file: str | Path) -> Iterator[Any]:
    """The open safetensors of a file. Raises ``ValueError`` for a damaged one."""
    try:
        with safe_open(file, "pt") as stored:
            yield stored
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged: {error}") from error


def read_stored(file: str | Path, prefixes: tuple[str, ...] = ("",)) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file whose names begin with one of ``prefixes``. Raises ``ValueError`` for a damaged file."""
    with open_stored(file) as stored:
        return {name: stored.get_tensor(name) for name in stored.keys() if name.startswith(prefixes)}  # noqa: SIM118  it is not a mapping


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
        model: a folder, a hub name, or a GGUF file. The matrices of a GGUF file, and those of GPTQ, AWQ and compressed-tensors, are in blocks where the family is known, and on a GPU in tiles. A loaded model is returned as it is, in its mode, and of a ``PeftModel`` the model within.
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
    is_split = isinstance(device, dict)
    on_cpu = not isinstance(device, dict) and torch.device(device or "cpu").type == "cpu"
    if (file := file_in_blocks(model)) is not None:
        from pipespec.models.gguf_models import model_of

        if is_split:
            raise ValueError(f"{model}: a model out of a GGUF file is not split over devices: name one")
        made = model_of(file, dtype)
        return with_kv_of(dtype, made) if on_cpu else _on_gpu(made, device, dtype, torch.bfloat16)
    if is_gguf(model):
        from pipespec.models.gguf_models import warn_of_memory

        source, more = Path(model).parent, {"gguf_file": Path(model).name}
        warn_of_memory(model)
    config = load_config(model, trust_remote_code=trust_remote_code)
    # Packed weights cannot be moved (GPTQ, bitsandbytes 8-bit), or are packed on the way there.
    in_place = device is not None and (is_split or getattr(config, "quantization_config", None) is not None)
    renew_pool()  # transformers reads weights with several threads
    with readable(model), _logged() as logged:
        refusal = None
        try:
            if not is_split and not trust_remote_code:
                made, refusal = _repacked(model, config, dtype, None if on_cpu else device)
                if made is not None:
                    return with_kv_of(dtype, made) if on_cpu else _on_gpu(made, device, dtype, config.dtype)
            loaded, found = AutoModelForCausalLM.from_pretrained(
                source,
                config=config,
                dtype=dtype,
                **more,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                **({"device_map": device if is_split else {"": device}} if in_place else {}),
            )
        except Exception as error:
            if not is_out_of_memory(error, *logged):
                if refusal is not None:
                    raise type(refusal)(f"{refusal}; and of transformers' own modules: {error}") from error
                raise
            where = ", ".join(dict.fromkeys(device.values())) if isinstance(device, dict) else device
            raise DoesNotFit(
                f"{model}: {where if in_place else 'cpu'} ran out of memory while its weights were read, which may take more than they do "
                f"afterwards: {error}\nWhat helps: another device for a stage (device=), fewer drafts, or weights that are stored smaller"
            ) from error
    if refusal is not None:
        warnings.warn(
            f"{refusal}. So transformers' own modules multiply with the weights of {model}",
            stacklevel=user_stacklevel(),
        )
    if found["missing_keys"]:
        # transformers would initialise them at random, with a warning.
        missing = sorted(found["missing_keys"])
        raise ValueError(
            f"{model}: its weights lack {', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''} "
            f"({len(missing)} in all); get the complete weights"
        )
    return loaded.eval() if in_place or device is None else loaded.to(device).eval()


def _repacked(
    model: str | Path, config: Any, dtype: torch.dtype | str, gpu: Any
) -> tuple[PreTrainedModel | None, ValueError | None]:
    """A checkpoint of integers or floats of 8 bits with its matrices in blocks, on the CPU; None: of a kind that only transformers reads. Where no block holds it,
    its packages may serve: for a GPU a warning says so, for a CPU the error is returned that holds without them."""
    from pipespec.models.group_checkpoints import NotHeld, repacked, settings_of

    try:
        settings = settings_of(config)
        # Tiles hold no experts, and transformers has kernels for those of gpt-oss.
        if gpu is not None and settings is not None and settings["quant_method"] == "mxfp4":
            return None, None
        if settings is None:
            return None, None
        given: Any = torch.bfloat16 if dtype == "auto" else dtype
        rounded = getattr(torch, given) if isinstance(given, str) else given
        return repacked(model, weight_files(model), config, settings, rounded if gpu is None else None), None
    except ValueError as error:
        if gpu is None:
            if not isinstance(error, NotHeld):
                raise
            return None, NotHeld(str(error))  # without its frames, which hold the weights read so far
        warnings.warn(
            f"{error}. So on {gpu} transformers' own modules multiply with the weights of {model}: each takes launches of its own, and a step may take longer than with "
            "weights in 16 bits",
            stacklevel=user_stacklevel(),
        )
        return None, None


def _on_gpu(
    model: PreTrainedModel, device: Any, dtype: torch.dtype | str, own: torch.dtype | str | None
) -> PreTrainedModel:
    """A model of blocks, moved to a GPU. ``own``: the dtype of its file, which ``"auto"`` stands for where it has 16 bits."""
    from pipespec.models.tiled import on_gpu

    given: Any = own if dtype == "auto" else dtype
    wanted: Any = getattr(torch, given) if isinstance(given, str) else given
    is_wide = dtype == "auto" and wanted not in (torch.bfloat16, torch.float16)
    return on_gpu(model, device, torch.bfloat16 if is_wide else wanted)


def is_gguf(model: Any) -> bool:
    """Whether a user's model is the path of a GGUF file: one by its first bytes, or one that is not there and would be by its name."""
    if not isinstance(model, (str, Path)):
        return False
    path = Path(model)
    if path.is_file():
        with path.open("rb") as opened:
            return path.suffix.lower() == ".gguf" or opened.read(4) == b"GGUF"
    return path.suffix.lower() == ".gguf"


def model_path(model: Any) -> Any:
    """A user's model: of a folder without weights of other kinds that holds one GGUF file, or the parts of one, that file.

    Raises:
        FileNotFoundError: the folder holds later parts of a file, and not the first.
        ValueError: the folder holds several: the message lists them.
    """
    if not isinstance(model, (str, Path)) or not (folder := Path(model)).is_dir():
        return model
    if any(path.suffix in (".safetensors", ".bin") for path in folder.iterdir()):
        return model
    found = sorted(path for path in folder.iterdir() if path.suffix.lower() == ".gguf" and path.is_file())
    # Projectors of images are not models of text.
    found = [path for path in found if "mmproj" not in path.name.lower()] or found
    files = [path for path in found if not LATER_PART.search(path.name)]
    if found and not files:
        raise FileNotFoundError(
            f"{model} holds parts of a split GGUF file ({found[0].name}, ...), and not the first (-00001-of-...)"
        )
    if len(files) > 1:
        raise ValueError(
            f"{model} holds several GGUF files: name one of {', '.join(path.name for path in files)} (its path, or gguf_file=)"
        )
    return files[0] if files else model


def file_in_blocks(model: Any) -> GgufFile | None:
    """The GGUF file of a user's model whose matrices stay in blocks; None: it is none, or of an architecture that transformers reads, in floats."""
    if not is_gguf(model):
        return None
    from pipespec.models.gguf import GgufFile
    from pipespec.models.gguf_config import architecture_of

    file = GgufFile.open(model)
    return None if architecture_of(file) is None else file


def gguf_path(model: Any, file: str | None) -> Any:
    """The path of a GGUF file in a folder or a hub repository, as ``gguf_file`` of ``from_pretrained`` names it; None: see :func:`model_path`."""
    if file is None:
        return model_path(model)
    if not isinstance(model, (str, Path)):
        raise TypeError(
            f"gguf_file={file!r} is a file in a folder or on the hub, and the target is a {type(model).__name__}"
        )
    with readable(model):
        return cached_file(str(model), file)


@contextmanager
def readable(model: str | Path) -> Iterator[None]:
    """Within it, errors of transformers and safetensors become ``FileNotFoundError`` or ``ValueError``, and name the model."""
    try:
        yield
    except DoesNotFit:
        raise
    except OSError as error:
        raise FileNotFoundError(f"{model} holds no model that can be loaded: {error}") from error
    except (ValueError, *DAMAGE) as error:
        what, detail = "holds no model that can be loaded", str(error) or type(error).__name__
        if is_gguf(model):
            from pipespec.models.gguf import GgufFile

            what = f"is of the architecture {GgufFile.open(model).architecture!r}, which transformers {transformers.__version__} does not read"
        if "ignore_mismatched_sizes" in detail:
            detail = "its tensors have other shapes than its configuration says"
        elif isinstance(error, KeyError):
            detail = f"there is no {detail}"
        if sys.flags.optimize > 1:
            detail += " (transformers needs the docstrings that python -OO removes: use -O)"
        raise ValueError(f"{model} {what}: {detail}") from error


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
