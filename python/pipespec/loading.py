"""Models from paths: safetensors only, no remote code unless asked for by name."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel


def load_model(
    model: PreTrainedModel | str | Path,
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A model object as it is (in eval mode), or the one that a path (or hub name) holds.

    Raises ``FileNotFoundError`` if the path holds no model, ``ValueError`` if its weights are not safetensors, are damaged or
    incomplete, ``TypeError`` for anything that is neither a model nor a path.
    """
    if isinstance(model, PreTrainedModel):
        return model.eval()
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
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
        loaded, found = AutoModelForCausalLM.from_pretrained(
            model,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except OSError as error:
        raise FileNotFoundError(f"{model} holds no model that can be loaded: {error}") from error
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"{model}: its weights are damaged, or do not fit its config.json: {error}") from error
    if found["missing_keys"]:
        # transformers would make them up at random, with a warning.
        missing = sorted(found["missing_keys"])
        raise ValueError(
            f"{model}: its safetensors lack {', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''} "
            f"({len(missing)} in all); get the complete weights"
        )
    return loaded.to(device).eval() if device is not None else loaded.eval()
