"""The draft module: a few decoder blocks over the residual streams of the target's stages, and its files.

SPD (arXiv 2605.30852). For a token that has passed d stages, the residual streams of these stages are known: the anchors. One projection
per type fuses the anchors of a token into a row. Blocks of the target's own architecture attend over the rows, and the newest row gives
the next token. Anchors have HF indices: 0 is the output of the embedding, k >= 1 the residual stream after decoder layer k - 1.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedModel

from pipespec.models.layout import FULL, GATED_DELTA, CacheLayout
from pipespec.models.loading import fill, load_config, open_stored, read_stored
from pipespec.models.properties import text_config
from pipespec.process.records import build, parse_json

VERSION = 1
CONFIG_FILE, WEIGHTS_FILE = "draft_module.json", "draft_module.safetensors"

LayerRanges = tuple[tuple[int, int], ...]
"""Layer ranges [begin, end) of the stages, in order."""


def anchors_for(stages: LayerRanges, types: int | None = None) -> tuple[int, ...]:
    """The HF indices that a module for this split reads: 0, the output of each stage but the last, and that of the last layer but one.

    Index L serves verification only. A module reads it only if L = 1.

    Args:
        stages: Layer ranges of the stages.
        types: Most anchors, evenly chosen with the first and the last among them. None: all.

    Raises:
        ValueError: ``types`` is below 2.
    """
    layers = stages[-1][1]
    found = sorted({0, *(end for _, end in stages[:-1]), max(1, layers - 1)})
    if types is None or types >= len(found):
        return tuple(found)
    if types < 2:
        raise ValueError(f"a draft module needs at least 2 anchors, not {types}")
    chosen = np.linspace(0, len(found) - 1, types).round().astype(int)
    return tuple(found[i] for i in chosen)


def types_for(stages: LayerRanges, anchors: Sequence[int]) -> tuple[int, ...]:
    """The type of a token at each depth 0 to n, the number of stages passed. Type i reads anchors 0 to i, which exist at that depth."""
    reached = [0, *(end for _, end in stages)]
    return tuple(max(i for i, anchor in enumerate(anchors) if anchor <= index) for index in reached)


@dataclass(frozen=True)
class DraftModuleConfig:
    """The architecture of a draft module and the target that it belongs to.

    Args:
        stages: Layer ranges of the target's stages.
        anchors: HF indices that the module reads, ascending from 0.
        layers: Number of blocks.
        vocabulary: Token ids of the draft vocabulary, ascending. None: all of the target's.
        target: Decoder configuration of the target, from which the blocks are built.
        digest: :func:`target_digest` of the target.
        version: Version of this format.
        blocks: Decoder configuration that the blocks are built from in place of ``target``, for modules from elsewhere; None: ``target``.

    Raises:
        ValueError: The values contradict each other.
    """

    stages: LayerRanges
    anchors: tuple[int, ...]
    layers: int
    vocabulary: tuple[int, ...] | None
    target: dict[str, Any]
    digest: str
    version: int = VERSION
    blocks: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ValueError(f"a draft module of format {self.version}; this pipespec reads format {VERSION}")
        depth, vocabulary = self.target["num_hidden_layers"], self.target["vocab_size"]
        ends = [end for _, end in self.stages]
        begins = [begin for begin, _ in self.stages]
        if begins != [0, *ends[:-1]] or ends[-1] != depth or any(e <= b for b, e in self.stages):
            raise ValueError(
                f"the stages {_ranges(self.stages)} are not consecutive layers that cover all {depth} of the target"
            )
        if len(self.anchors) < 2 or self.anchors[0] != 0 or list(self.anchors) != sorted(set(self.anchors)):
            raise ValueError(f"anchors must ascend from 0, at least two of them, not {list(self.anchors)}")
        if self.anchors[-1] > depth:
            raise ValueError(f"anchor {self.anchors[-1]} does not exist: the target has {depth} layers")
        if not 1 <= self.layers <= depth:
            raise ValueError(f"a draft module of {self.layers} layers: at least 1, at most the target's {depth}")
        ids = self.vocabulary
        if ids is not None and (any(b <= a for a, b in itertools.pairwise((-1, *ids, vocabulary))) or not ids):
            raise ValueError(
                f"the draft vocabulary must be ascending token ids of the target's {vocabulary}, at least one"
            )

    @classmethod
    def for_target(
        cls,
        target: PreTrainedModel,
        stages: LayerRanges,
        *,
        layers: int = 1,
        vocabulary: Iterable[int] | None = None,
        types: int | None = None,
        anchors: Sequence[int] | None = None,
    ) -> DraftModuleConfig:
        """The configuration for a target and its stages. Without ``anchors`` by the rule of :func:`anchors_for`."""
        return cls(
            stages=stages,
            anchors=anchors_for(stages, types) if anchors is None else tuple(anchors),
            layers=layers,
            vocabulary=None if vocabulary is None else tuple(sorted(set(vocabulary))),
            target=json.loads(json.dumps(described(target.config), default=str)),
            digest=target_digest(target),
        )

    @functools.cached_property
    def types(self) -> tuple[int, ...]:
        """Type of each depth 0 to n."""
        return types_for(self.stages, self.anchors)

    @property
    def n(self) -> int:
        """Number of stages."""
        return len(self.stages)

    @property
    def hidden(self) -> int:
        return int(self.target["hidden_size"])

    @property
    def logits(self) -> int:
        """Size of the draft vocabulary."""
        return len(self.vocabulary) if self.vocabulary is not None else int(self.target["vocab_size"])

    def to_json(self) -> dict[str, Any]:
        record = asdict(self) | {"types": self.types}
        return record if self.blocks is not None else {k: v for k, v in record.items() if k != "blocks"}

    @classmethod
    def from_json(cls, record: Any, where: str = "the draft module's config") -> DraftModuleConfig:
        """The inverse of :meth:`to_json`. Raises ValueError for missing, unknown or contradictory entries."""
        try:
            # Their types follow from the other entries.
            return cast(DraftModuleConfig, build(cls, {k: v for k, v in record.items() if k != "types"}))
        except (AttributeError, TypeError, ValueError, KeyError) as error:
            raise ValueError(f"{where} is no draft module's config: {error}") from error

    @classmethod
    def load(cls, folder: str | Path) -> DraftModuleConfig:
        """Read the configuration in a module's folder. Raises FileNotFoundError if there is none, ValueError if it is damaged."""
        file = Path(folder) / CONFIG_FILE
        if not file.is_file():
            raise FileNotFoundError(f"{folder} holds no draft module: there is no {CONFIG_FILE} in it")
        try:
            record = parse_json(file.read_bytes())
        except ValueError as error:
            raise ValueError(f"{file} is damaged: {error}") from error
        return cls.from_json(record, str(file))

    def require(self, target: PreTrainedModel | str | Path | None = None, stages: LayerRanges | None = None) -> None:
        """Raise ValueError for another target (a model or its folder) or other stages than those of the training."""
        if stages is not None and tuple(tuple(s) for s in stages) != self.stages:
            raise ValueError(
                f"the draft module was trained for the stages {_ranges(self.stages)}, not for {_ranges(stages)}: "
                "use that split, or train a module for this one (pipespec spd train)"
            )
        if target is None:
            return
        config = text_config(target.config if isinstance(target, PreTrainedModel) else load_config(target))
        for name, what in (("vocab_size", "tokens"), ("hidden_size", "hidden units"), ("num_hidden_layers", "layers")):
            if getattr(config, name) != self.target[name]:
                raise ValueError(
                    f"the draft module is for a target with {self.target[name]} {what}; this one has {getattr(config, name)}"
                )
        if target_digest(target) != self.digest:
            raise ValueError(
                "the draft module was trained for another target: sizes fit, but config or weights differ (their digests do); "
                "use the model it was trained for, or train a module for this one (pipespec spd train)"
            )


def described(config: Any) -> dict[str, Any]:
    """A decoder's config without the entries about its origin and its loading."""
    record = text_config(config).to_dict()
    apart = ("_name_or_path", "transformers_version", "architectures", "dtype", "id2label", "label2id")
    return {name: value for name, value in record.items() if name not in apart}


def _ranges(stages: Iterable[Sequence[int]]) -> str:
    return " ".join(f"{begin}-{end - 1}" for begin, end in stages)


# ---- identity of the target

# The entries that determine a decoder's arithmetic, without dtype, cache settings, names and versions.
_DIGESTED = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias", "tie_word_embeddings", "rope_parameters",
)  # fmt: skip
_DIGEST_ROWS, _DIGEST_COLUMNS = 4, 16


def target_digest(target: PreTrainedModel | str | Path) -> str:
    """SHA-256 (hex) of a target, from the model or from its folder. The folder's model is not loaded: only kilobytes are read.

    The digest covers the entries of the config that determine the arithmetic. For each weight and bias it covers name, shape and samples: 16
    evenly spaced elements of 4 evenly spaced rows. Samples are rounded to bfloat16, so that the dtype of storing or loading does not
    matter, except for float16 values below its normal range. A tied output matrix counts once.
    """
    folder = None if isinstance(target, PreTrainedModel) else Path(target)
    config = text_config(target.config if isinstance(target, PreTrainedModel) else load_config(target))
    tied = bool(config.tie_word_embeddings)
    record = {name: getattr(config, name, None) for name in _DIGESTED}
    state = hashlib.sha256(json.dumps(record, sort_keys=True, default=str).encode())
    found = _samples_in(folder) if folder is not None else _samples_of(target)
    samples = {name: (shape, values) for name, shape, values in found if not (tied and name == "lm_head.weight")}
    for name in sorted(samples):
        shape, values = samples[name]
        state.update(f"{name}{shape}".encode())
        state.update(values.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes())
    return state.hexdigest()


_COUNTED = (".weight", ".bias")
"""Names of parameters end with these. Old checkpoints have buffers beside them."""


def _grid(size: int, points: int) -> list[int]:
    return np.linspace(0, size - 1, min(size, points)).round().astype(int).tolist()


def _sample(name: str, values: Any, shape: Sequence[int]) -> tuple[str, list[int], torch.Tensor]:
    """Name, shape and samples of a tensor, or of a slice of a file."""
    rows = [values[i : i + 1] for i in _grid(shape[0], _DIGEST_ROWS)] if len(shape) > 1 else [values[:]]
    return name, list(shape), torch.stack([row.reshape(-1)[_grid(row.numel(), _DIGEST_COLUMNS)] for row in rows])


def _samples_of(model: Any) -> Iterator[tuple[str, list[int], torch.Tensor]]:
    for name, p in model.named_parameters():
        if name.endswith(_COUNTED):
            yield _sample(name, p, p.shape)


def _samples_in(folder: Path) -> Iterator[tuple[str, list[int], torch.Tensor]]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no safetensors weights")
    for file in files:
        with open_stored(file) as tensors:
            for stored in tensors.keys():  # noqa: SIM118  it is not a mapping
                # A decoder that is stored as a part of a model for images and text.
                name = stored.replace("model.language_model.", "model.", 1)
                if name.endswith(_COUNTED) and not name.startswith(("model.visual.", "mtp.")):
                    values = tensors.get_slice(stored)
                    yield _sample(name, values, values.get_shape())


# ---- the module


class DraftModule(nn.Module):
    """Projections, blocks, the target's final norm and a head. It maps rows of anchors to logits over the draft vocabulary.

    ``projections[i]`` maps the concatenated anchors 0 to i, ``[(i + 1) H]``, to ``[H]``. The blocks have the class and the config of the
    target's decoder layers and its rotary embedding, at the tokens' own positions. ``norm`` is the target's and frozen. A new module has
    random weights; :meth:`of_target` starts from the target's, and :meth:`load` reads files.
    """

    def __init__(self, config: DraftModuleConfig) -> None:
        super().__init__()
        self.config = config
        self.block_config = _block_config(config)
        base = AutoModel.from_config(self.block_config, dtype=torch.float32)
        self.layers, self.norm, self.rotary_emb = base.layers, base.norm, base.rotary_emb
        self.norm.requires_grad_(False)
        hidden = config.hidden
        self.projections = nn.ModuleList(
            nn.Linear((i + 1) * hidden, hidden, bias=False) for i in range(len(config.anchors))
        )
        self.head = nn.Linear(hidden, config.logits, bias=False)

    @classmethod
    def of_target(cls, target: PreTrainedModel, config: DraftModuleConfig) -> DraftModule:
        """A new float32 module with the target's norm, the rows of its head, and its last layers as blocks.

        A projection starts as its deepest anchor plus a little noise. At full depth that anchor is the input of the target's last layer.
        """
        module = cls(config)
        base = target.base_model
        layout = CacheLayout.of(target.config)
        # Blocks have attention. Without enough such layers in the target, the first blocks keep random weights.
        like = [base.layers[i] for i in layout.attention][-config.layers :]
        with torch.no_grad():
            module.norm.load_state_dict(base.norm.state_dict())
            for own, theirs in zip(list(module.layers)[config.layers - len(like) :], like, strict=True):
                own.load_state_dict(theirs.state_dict())
            rows = target.get_output_embeddings().weight
            ids = config.vocabulary
            module.head.weight.copy_(rows if ids is None else rows[torch.tensor(ids, device=rows.device)])
            generator = torch.Generator().manual_seed(0)
            for projection in module.projections:
                weight = next(projection.parameters())
                weight.normal_(std=0.002, generator=generator)
                weight[:, -config.hidden :] += torch.eye(config.hidden)
        return module

    def fuse(self, anchors: torch.Tensor, kind: int) -> torch.Tensor:
        """Fuse ``anchors [..., k, H]`` into rows ``[..., H]`` of type ``kind``, which reads the first ``kind + 1`` anchors."""
        rows: torch.Tensor = self.projections[kind](anchors[..., : kind + 1, :].flatten(-2))
        return rows

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits ``[..., Vd]`` over the draft vocabulary of ``rows [..., H]``."""
        out: torch.Tensor = self.head(self.norm(rows))
        return out

    def save(self, folder: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write config and weights to ``folder``. ``dtype`` is that of the stored weights; None keeps theirs."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: value.detach().to("cpu", dtype or value.dtype) for name, value in self.state_dict().items()}
        save_file({name: value.contiguous() for name, value in weights.items()}, folder / WEIGHTS_FILE)
        record = self.config.to_json()
        (folder / CONFIG_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        target: PreTrainedModel | str | Path | None = None,
        stages: LayerRanges | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> DraftModule:
        """Load a module in eval mode.

        Args:
            folder: Folder of the module.
            target: Target to check the module against, before its weights are read.
            stages: Stages to check the module against.
            dtype: Dtype of the weights.
            device: Device of the weights.

        Raises:
            FileNotFoundError: There is no module in ``folder``.
            ValueError: The module is for another target or other stages, or it is damaged or incomplete.
        """
        config = DraftModuleConfig.load(folder)
        config.require(target, stages)
        file = Path(folder) / WEIGHTS_FILE
        if not file.is_file():
            raise FileNotFoundError(f"{folder} holds no draft module's weights: there is no {WEIGHTS_FILE} in it")
        weights = read_stored(file)
        where = f"{file} does not fit its {CONFIG_FILE}"
        if config.layers + len(config.anchors) > len(weights):  # a damaged config may state any number
            raise ValueError(
                f"{where}: {len(weights)} weights for {config.layers} blocks and {len(config.anchors)} anchors"
            )
        try:
            with torch.device("meta"):  # nor is there memory for any size
                module = cls(config)
            module.rotary_emb = type(module.rotary_emb)(module.block_config)
        except Exception as error:  # transformers' constructors raise errors of many types for bad values
            raise ValueError(
                f"{Path(folder) / CONFIG_FILE} is damaged: no module can be built from it ({type(error).__name__}: {error})"
            ) from error
        fill(module, weights, where, assign=True)
        return module.to(device=device, dtype=dtype).eval()


def _block_config(config: DraftModuleConfig) -> Any:
    """The config of the blocks with the module's number of layers, full attention in all of them, and a vocabulary of one token."""
    record = copy.deepcopy(config.target if config.blocks is None else config.blocks)
    kind = record.pop("model_type")
    for name in ("layer_types", "sliding_window", "max_window_layers"):
        record.pop(name, None)
    record |= {"num_hidden_layers": config.layers, "vocab_size": 1}
    if kind in GATED_DELTA:
        # Their default has recurrent layers.
        record["layer_types"] = [FULL] * config.layers
    record |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    built = AutoConfig.for_model(kind, **record)
    if hasattr(built, "use_sliding_window"):
        built.use_sliding_window = False
    if getattr(built, "sliding_window", None) is not None:
        # The default of some classes.
        built.sliding_window = None
    built._attn_implementation = "sdpa"
    return built
