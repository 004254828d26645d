"""Models from paths: safetensors only, no remote code unless asked for by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel


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

    Raises as :func:`load_config`; ``ValueError`` if the weights are damaged or incomplete, ``ImportError`` where a package is missing
    that they need, ``TypeError`` for anything that is neither a model nor a path.
    """
    if isinstance(model, PreTrainedModel):
        return model.eval()
    config = load_config(model, trust_remote_code=trust_remote_code)
    # Its packed weights cannot be moved (GPTQ, bitsandbytes 8-bit), or are packed on the way there.
    in_place = device is not None and getattr(config, "quantization_config", None) is not None
    try:
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
    except (SafetensorError, RuntimeError) as error:
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


def _damaged(model: str | Path, error: Exception) -> ValueError:
    return ValueError(f"{model}: its weights are damaged, or do not fit its config.json: {error}")
