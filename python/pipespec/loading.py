"""Models from paths: safetensors only, no remote code unless asked for by name."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel


class DoesNotFit(ValueError):
    """The stages do not fit the memory. Its text may have several lines: what, a table, what helps."""

    in_lines = True


def load_config(model: str | Path, *, trust_remote_code: bool = False) -> Any:
    """The configuration of the model that a path (or hub name) holds; no weight is read.

    Raises ``FileNotFoundError`` if the path holds no model, ``ValueError`` if its weights are not safetensors, ``TypeError`` for
    anything that is not a path.
    """
    if not isinstance(model, (str, Path)):
        raise TypeError(
            f"a model must be a transformers model or a path, not {type(model).__name__}"
            + (" (wrap: give the underlying transformers model)" if isinstance(model, torch.nn.Module) else "")
        )
    path = Path(model)
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
    except (SafetensorError, RuntimeError) as error:
        raise _damaged(model, error) from error


def load_model(
    model: PreTrainedModel | str | Path,
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A model object as it is (in eval mode), or the one that a path (or hub name) holds, on ``device`` (None: the CPU).

    Weights pass through this machine's memory on their way to a GPU, one model after the other; quantised ones are read on the device itself,
    which needs the package accelerate.

    Raises as :func:`load_config`; ``ValueError`` if the weights are damaged or incomplete, :class:`DoesNotFit` where the memory does not suffice
    to read them, ``ImportError`` where a package is missing that they need, ``TypeError`` for anything that is neither a model nor a path.
    """
    if isinstance(model, PreTrainedModel):
        return model.eval()
    config = load_config(model, trust_remote_code=trust_remote_code)
    # Its packed weights cannot be moved (GPTQ, bitsandbytes 8-bit), or are packed on the way there.
    in_place = device is not None and getattr(config, "quantization_config", None) is not None
    try:
        with _heard() as heard:
            loaded, found = AutoModelForCausalLM.from_pretrained(
                model,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                **({"device_map": {"": device}} if in_place else {}),
            )
    except OSError as error:
        raise _no_model(model, error) from error
    except (MemoryError, SafetensorError, RuntimeError) as error:
        if isinstance(error, MemoryError) or _is_of_memory(str(error), *heard):
            raise _too_large(model, device if in_place else None, error) from error
        raise _damaged(model, error) from error
    if found["missing_keys"]:
        # transformers would make them up at random, with a warning.
        missing = sorted(found["missing_keys"])
        raise ValueError(
            f"{model}: its safetensors lack {', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''} "
            f"({len(missing)} in all); get the complete weights"
        )
    return loaded.eval() if device is None or in_place else loaded.to(device).eval()


def _no_model(model: str | Path, error: Exception) -> FileNotFoundError:
    return FileNotFoundError(f"{model} holds no model that can be loaded: {error}")


@contextmanager
def _heard() -> Iterator[list[str]]:
    """What transformers logs meanwhile: it quantises weights as it reads them, and tells only there why that has failed."""
    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        yield heard
    finally:
        logger.removeHandler(handler)


def _is_of_memory(*said: str) -> bool:
    """Of torch's allocators on GPUs and CPUs and of other libraries; only the first has a class of its own."""
    return any(
        words in text
        for text in said
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


def _damaged(model: str | Path, error: Exception) -> ValueError:
    return ValueError(f"{model}: its weights are damaged, or do not fit its config.json: {error}")
