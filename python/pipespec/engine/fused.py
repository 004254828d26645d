"""The fused form of a model's forward over a static cache, from the operations of :mod:`pipespec_kernels.ops`.

For steps that are captured in a CUDA graph. A layer takes 5 launches where transformers' modules take 40: norm with queries, keys, values, RoPE and append to the cache;
attention; output with the residual sum; norm with gate, up and activation; down with the residual sum. With norms of heads (Qwen3) RoPE and append are a sixth one.
All sums have a fixed order, so a token's bits are the same in every such step: those of a verification are those of decoding token by token. Steps of more than 16 rows, as
those of prompts, take products of the library and 9 launches (the norms, RoPE and the activation between the products). The weights are the model's own, without a copy: those of one input
(queries, keys and values; gate and up) become one matrix, of which the model's parameters are views. The parameters stay the same objects with the same values, so state
dicts, optimizers and changes in place work as before. Whatever gives a parameter other memory (``.to()``, another ``.data``) ends the merge of its matrix: :func:`merged` no
longer finds it. Opaque modules in the place of linear ones (quantised, or with an adapter) are called as they are: a layer of them
takes their launches and 6 of ours.

The exact form runs wide steps, too, in the products of narrow ones, 16 rows at a time. A row's logits are then a function of its text, however the text is cut into
steps and batches.
"""

from __future__ import annotations

import copy
import itertools
import sys
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from pipespec.engine.cache import RowCache
from pipespec.engine.form import Form, WholeModel, check_outputs, probe, probe_cache, probe_inputs, probed
from pipespec.engine.known import FUSED, moving
from pipespec.models import description, families, tiled
from pipespec.models.families import NotReadable
from pipespec.models.loading import is_out_of_memory
from pipespec.models.parts import ModelParts
from pipespec_kernels import ops
from pipespec_kernels.kv import attention_tickets
from pipespec_kernels.products import MAX_ROWS, can_append, can_halve
from pipespec_kernels.tiles import TiledMatrix


def merged(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The tensor whose rows are those of all parts, in order: a view of the memory that they share. None where they lie elsewhere."""
    first = parts[0]
    at, rows = first.storage_offset(), 0
    for part in parts:
        # Not by address: tensors on torch's meta device have none.
        same = part.untyped_storage()._cdata == first.untyped_storage()._cdata and part.storage_offset() == at
        if not same or not part.is_contiguous():
            return None
        at, rows = at + part.numel(), rows + part.shape[0]
    shape = torch.Size((rows, *first.shape[1:]))
    return first.as_strided(shape, (*shape[1:], 1))


def merge(groups: Iterable[Sequence[torch.Tensor]]) -> None:
    """Give the tensors of each group one memory. The extra memory is that of one group.

    Raises:
        NotReadable: there is no memory for a group. Those before it are merged.
    """
    for group in groups:
        if merged(group) is not None:
            continue
        try:
            # Data of a parameter are an inference tensor if it is one.
            with torch.inference_mode(group[0].is_inference()), torch.no_grad():
                whole = torch.cat([parameter.detach() for parameter in group])
                for parameter, part in zip(group, whole.split([len(parameter) for parameter in group]), strict=True):
                    parameter.data = part
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise NotReadable("there is no memory to merge its matrices") from error


def check_separate(model: nn.Module, groups: Iterable[Sequence[torch.Tensor]]) -> None:
    """Check that no memory of the groups belongs to another parameter, too: a merge would end what they share.

    Raises:
        NotReadable: names two parameters.
    """
    moving = {id(parameter) for parameter in itertools.chain.from_iterable(groups)}
    reached: dict[int, tuple[int, str, int]] = {}  # per storage, the span that reaches furthest
    for storage, begin, end, name, one in sorted(_spans(model)):
        far, other_name, other = reached.get(storage, (0, "", 0))
        if begin < far and not moving.isdisjoint((one, other)):
            raise NotReadable(f"{other_name} and {name} share memory")
        reached[storage] = max((end, name, one), (far, other_name, other))


def _spans(model: nn.Module) -> Iterator[tuple[int, int, int, str, int]]:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        begin = int(parameter.storage_offset())
        yield parameter.untyped_storage()._cdata, begin, begin + parameter.numel(), name, id(parameter)


_numbers = itertools.count(1)


class _Run(NamedTuple):
    """A product of one or several matrices of one input. Each in one part, or in several that :meth:`whole` copies into one: before the merge, for the check
    alone. ``format``: of the tiles of the matrices, whose shape is ``shape`` in all; None: they are numbers."""

    weight: tuple[torch.Tensor, ...]
    bias: tuple[torch.Tensor, ...]
    format: str | None
    shape: tuple[int, int]

    @classmethod
    def of(cls, linears: list[Any]) -> _Run:
        matrices: list[Any] = [description.matrix_of(linear) for linear in linears]
        weights = [matrix.data if isinstance(matrix, TiledMatrix) else matrix for matrix in matrices]
        given = [linear.bias.detach() for linear in linears if linear.bias is not None]
        if given and len(given) < len(linears):
            raise NotReadable("of the matrices of one input some have biases and some have none")
        whole, whole_bias = merged(weights), merged(given) if given else None
        return cls(
            tuple(weights) if whole is None else (whole,),
            tuple(given) if whole_bias is None else (whole_bias,),
            next((matrix.format for matrix in matrices if isinstance(matrix, TiledMatrix)), None),
            (sum(matrix.shape[0] for matrix in matrices), matrices[0].shape[1]),
        )

    def whole(self) -> tuple[Any, torch.Tensor | None]:
        """Weight, a tensor or a :class:`TiledMatrix`, and bias, each in one part."""
        weight, bias = (
            parts[0] if len(parts) == 1 else torch.cat(parts) if parts else None for parts in (self.weight, self.bias)
        )
        assert weight is not None
        return weight if self.format is None else TiledMatrix(self.format, weight, self.shape), bias


class _Product(NamedTuple):
    """Products of one input: one for each run of matrices in one format. Where one is opaque: the modules."""

    runs: tuple[_Run, ...] = ()
    modules: tuple[Any, ...] = ()

    @classmethod
    def of(cls, linears: tuple[Any, ...]) -> _Product:
        if any(map(families.is_opaque, linears)):
            return cls(modules=linears)
        return cls(tuple(map(_Run.of, families.runs(linears))))

    def whole(self) -> tuple[Any, torch.Tensor | None] | None:
        """Weight and bias of all in one part; None where they have several formats."""
        return self.runs[0].whole() if len(self.runs) == 1 else None


class _Layer(NamedTuple):
    """``norms``: weights of the norms before and after the attention, and of the one behind the layer; ``head_norms``: of queries and keys, by the names of
    :func:`ops.rope_append`."""

    norms: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    head_norms: dict[str, Any]
    qkv: _Product
    o: _Product
    gate_up: _Product
    down: _Product


class _Part(NamedTuple):
    """At most 16 columns of a step: ``columns`` of ``rows``. ``lengths`` and ``new``: those of these rows at the first of these columns."""

    rows: slice
    columns: slice
    lengths: torch.Tensor
    new: torch.Tensor | None


class _Step(NamedTuple):
    """What the layers of one forward share. Between the attentions, a row is a column of the step.

    Attributes:
        shape: rows and columns.
        stored: keys and then values of each layer.
        lengths: of the rows, on the device.
        new: columns of each row that are no padding, on the device, or None: a forward of the graph of a step that finds no work returns at once.
        parts: what one launch of queries, keys and values takes.
        tables: cosines and sines.
        attention: options of :func:`ops.verify_attention`.
        mixed: ``[n, heads * head_dim]``, whose columns attention writes. Layers share it.
        features: indices of hidden states that are published, in transformers' order.
        streams: those hidden states, and the first ones.
    """

    shape: tuple[int, int]
    stored: Any
    lengths: torch.Tensor
    new: torch.Tensor | None
    parts: list[_Part]
    tables: tuple[torch.Tensor, torch.Tensor]
    attention: dict[str, Any]
    mixed: torch.Tensor
    features: Collection[int]
    streams: dict[int, torch.Tensor]

    @property
    def counts(self) -> torch.Tensor | None:
        """``new`` as products take it, which read the counts of up to 16 rows."""
        return self.new if self.shape[0] <= MAX_ROWS else None

    def note(self, index: int, hidden: torch.Tensor) -> None:
        if index in self.features:
            self.streams[index] = hidden


class FusedForm(Form):
    """A model's forward over static caches. :meth:`add_cache` comes before the first forward over a cache.

    Args:
        model: one that :func:`pipespec.models.families.identity` accepts, or the parts of one.
        exact: whether the bits of a row may depend on nothing but its text.

    Attributes:
        number: differs for each form. A graph that has captured one form reads its tables.
        narrow_rows: rows of a step, all its columns counted, up to which products are :func:`ops.linear_small`; 0: all are the library's. In the exact
            form there is no limit.
        has_opaque: whether modules of others compute some of its products. They may see the other rows of a product.
        tables: by cache, cosines and sines ``[capacity, rotary_dim]`` and the work space of attention, at fixed addresses: graphs read and write them.

    Raises:
        NotReadable: a part of the model has no operation here.
    """

    def __init__(self, model: PreTrainedModel | ModelParts, *, exact: bool = False) -> None:
        self.number = self.token = next(_numbers)
        self._read = read = description.read(model, matrices=False)
        if read.beyond_llama is not None:
            raise NotReadable(f"the fused operations lack {read.beyond_llama}")
        parts = model if isinstance(model, ModelParts) else ModelParts.of(model)
        self._ends = parts._replace(layers=())
        *products, self._head = map(_Product.of, families.products_of(parts))
        layers, each = parts.layers, iter(products)
        norms = [*(_weight(layer.input_layernorm) for layer in layers), read.norm]
        self._layers = [
            _Layer(
                (before, _weight(layer.post_attention_layernorm), after),
                {n: _weight(getattr(layer.self_attn, n)) for n in ("q_norm", "k_norm") if hasattr(layer.self_attn, n)},
                *four,
            )
            for layer, before, after, *four in zip(layers, norms[:-1], norms[1:], each, each, each, each, strict=True)
        ]
        self._last_norm = read.norm
        self._norm: dict[str, Any] = {"eps": read.shape.eps, "one_plus_weight": read.shape.norm_offset == 1.0}
        self.tables: weakref.WeakKeyDictionary[RowCache, tuple[torch.Tensor, ...]] = weakref.WeakKeyDictionary()
        self.has_opaque = any(product.modules for product in (*products, self._head))
        if exact and self.has_opaque:
            raise NotReadable("its quantised modules, or those with an adapter, may depend on the number of rows")
        self.narrow_rows = sys.maxsize if exact else 0 if self.has_opaque else MAX_ROWS
        self.repeats_bits = exact

    @property
    def name(self) -> str:
        """What the report says."""
        return f"{FUSED}, exact" if self.repeats_bits else FUSED

    def add_cache(self, cache: RowCache) -> None:
        """Compute RoPE for all positions of a cache, from the model's own rotary embedding, and allocate the work space of attention."""
        if cache in self.tables:
            return
        with torch.inference_mode(False), torch.no_grad():
            like = torch.empty(0, dtype=cache.compute_dtype, device=cache.device)
            cos, sin = self._read.rotary(like, position_ids=torch.arange(cache.capacity, device=cache.device)[None])
            shape = self._read.shape
            columns = max(1, MAX_ROWS // cache.rows)
            tickets = attention_tickets(cache.rows, columns, shape.heads, shape.kv_heads, cache.capacity)
            workspace = torch.zeros(tickets, dtype=torch.int32, device=cache.device)
            self.tables[cache] = cos[0].contiguous(), sin[0].contiguous(), workspace

    def __call__(
        self, tokens: torch.Tensor, cache: RowCache, keep: int, last: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As :class:`Form`. ``last``: int64 ``[1]``, with ``keep=1`` the column whose logits are computed, in place of the last one."""
        rows, q = tokens.shape
        narrow, features = rows * q <= self.narrow_rows, cache.features
        hidden = families.embedded(self._ends, tokens.reshape(-1))
        step = self._step(hidden, rows, q, cache)
        x = (self._run_narrow if narrow else self._run_wide)(hidden, step)
        if features is not None:
            streams = {index: hidden.view(rows, q, -1) for index, hidden in step.streams.items()}
            features.record(step.lengths, streams)
        cache.close()
        if keep < q:
            columns = x.view(rows, q, x.shape[1])
            x = (columns[:, q - keep :] if last is None else columns.index_select(1, last)).flatten(0, 1)
        if narrow:
            logits = _small(x, self._head.runs[0], step, norm=self._last_norm, **self._norm)
        else:
            logits = _joined(x, self._head)
        return logits.view(rows, keep, logits.shape[1])

    def _step(self, hidden: torch.Tensor, rows: int, q: int, cache: RowCache) -> _Step:
        """Begin a forward over ``hidden [rows * q, H]``, the first hidden states."""
        (cos, sin, workspace), shape, n = self.tables[cache], self._read.shape, rows * q
        _, stored = cache.open(q)
        mixed = hidden.new_empty((n, shape.heads * shape.head_dim))
        out = mixed.view(rows, q, shape.heads, shape.head_dim).transpose(1, 2)
        invariant = n <= MAX_ROWS or self.repeats_bits
        options: dict[str, Any] = {"scale": shape.scale, "invariant": invariant, "workspace": workspace, "out": out}
        wanted = () if cache.features is None else cache.features.layers
        lengths, new = cache.device_lengths, cache.new_columns
        parts = _parts(rows, q, lengths, new) if n <= self.narrow_rows else []
        return _Step((rows, q), stored, lengths, new, parts, (cos, sin), options, mixed, wanted, {0: hidden})

    def _run_narrow(self, hidden: torch.Tensor, step: _Step) -> torch.Tensor:
        """The layers in products of few rows. Returns the last hidden states."""
        for i, layer in enumerate(self._layers):
            queries = self._queries(hidden, i, step, norm=layer.norms[0], **self._norm)
            hidden = self._behind_queries(queries, hidden, i, step)
            step.note(i + 1, hidden)
        return hidden

    def _behind_queries(self, queries: torch.Tensor, hidden: torch.Tensor, i: int, step: _Step) -> torch.Tensor:
        """The output of layer ``i``. ``hidden``: what its attention is added to."""
        layer, kind = self._layers[i], self._read.shape.activation
        hidden = _small(self._attend(queries, i, step), layer.o.runs[0], step, residual=hidden)
        norm: dict[str, Any] = {"norm": layer.norms[1], **self._norm}
        gate_up = layer.gate_up.whole()
        if gate_up is None or not can_halve(gate_up[0]):
            both = [_small(hidden, run, step, **norm) for run in layer.gate_up.runs]
            x = ops.silu_mul(both[0] if len(both) == 1 else torch.cat(both, -1), activation=kind)
        else:
            x = _small(hidden, layer.gate_up.runs[0], step, activation=kind, **norm)
        return _small(x, layer.down.runs[0], step, residual=hidden)

    def _queries(self, hidden: torch.Tensor, i: int, step: _Step, **norm: Any) -> torch.Tensor:
        """The rotated queries of layer ``i``, from products of few rows; its keys and values go to the cache. ``norm``: of its input, as :func:`ops.linear_small`
        takes it."""
        layer = self._layers[i]
        shape, (rows, q), product = self._read.shape, step.shape, layer.qkv.whole()
        if layer.head_norms or product is None or not can_append(product[0], shape.head_dim, step.tables[0].shape[1]):
            return self._rotated([_small(hidden, run, step, **norm) for run in layer.qkv.runs], i, step)
        queries = hidden.new_empty((rows, q, shape.heads, shape.head_dim)).transpose(1, 2)
        columns = hidden.view(rows, q, -1)
        for part in step.parts:
            storage = [stored[part.rows] for stored in self._storage(i, step)]
            given = columns[part.rows, part.columns], *product, *step.tables, *storage, part.lengths, part.new
            ops.qkv_append(*given, out=queries[part.rows, :, part.columns], **norm)
        return queries

    def _run_wide(self, hidden: torch.Tensor, step: _Step) -> torch.Tensor:
        """The layers in products of the library, or of opaque modules. Returns the last hidden states, normalised."""
        x, _ = ops.add_rms_norm(hidden, None, self._layers[0].norms[0], **self._norm)
        for i, layer in enumerate(self._layers):
            mixed = self._attend(self._rotated(_multiply(x, layer.qkv), i, step), i, step)
            x, hidden = ops.add_rms_norm(_joined(mixed, layer.o), hidden, layer.norms[1], **self._norm)
            x = ops.silu_mul(_joined(x, layer.gate_up), activation=self._read.shape.activation)
            x, hidden = ops.add_rms_norm(_joined(x, layer.down), hidden, layer.norms[2], **self._norm)
            step.note(i + 1, hidden)
        return x

    def _storage(self, i: int, step: _Step) -> tuple[torch.Tensor, torch.Tensor]:
        return step.stored[i], step.stored[len(self._layers) + i]

    def _rotated(self, products: list[torch.Tensor], i: int, step: _Step) -> torch.Tensor:
        """The rotated queries of layer ``i``; its keys and values go to the cache. ``products``: of all heads, each with heads of one kind or
        of several."""
        shape, (rows, q) = self._read.shape, step.shape
        parts = [part.view(rows, q, -1, shape.head_dim).transpose(1, 2) for part in products]
        kinds, heads = iter((shape.heads, shape.kv_heads, shape.kv_heads)), list[torch.Tensor]()
        for part in parts:
            while part.shape[1]:
                n = next(kinds)
                heads.append(part[:, :n])
                part = part[:, n:]
        queries, keys, values = heads
        norms: dict[str, Any] = {**self._layers[i].head_norms, **self._norm}
        storage = self._storage(i, step)
        return ops.rope_append(queries, keys, values, *step.tables, *storage, step.lengths, step.new, **norms)

    def _attend(self, queries: torch.Tensor, i: int, step: _Step) -> torch.Tensor:
        """The heads' results ``[n, heads * head_dim]`` of layer ``i``."""
        storage, window = self._storage(i, step), self._read.windows[i]
        ops.verify_attention(queries, *storage, step.lengths, step.new, window=window, **step.attention)
        return step.mixed


def _parts(rows: int, q: int, lengths: torch.Tensor, new: torch.Tensor | None) -> list[_Part]:
    """The parts of a step of ``rows`` rows of ``q`` columns, each of whole rows, or of one."""
    if rows * q <= MAX_ROWS:
        return [_Part(slice(0, rows), slice(0, q), lengths, new)]
    each, width, parts = max(1, MAX_ROWS // q), min(q, MAX_ROWS), list[_Part]()
    for begin in range(0, q, width):
        columns = slice(begin, min(begin + width, q))
        at = lengths + begin if begin else lengths
        fed = None if new is None else (new - begin).clamp(0, columns.stop - begin)
        for first in range(0, rows, each):
            some = slice(first, min(first + each, rows))
            parts.append(_Part(some, columns, at[some], None if fed is None else fed[some]))
    return parts


def _small(
    x: torch.Tensor, run: _Run, step: _Step, *, residual: torch.Tensor | None = None, **options: Any
) -> torch.Tensor:
    """:func:`ops.linear_small` of any number of rows, 16 at a time."""
    whole, outputs = run.whole(), []
    for begin in range(0, max(len(x), 1), MAX_ROWS):
        some = slice(begin, begin + MAX_ROWS)
        before = None if residual is None else residual[some]
        outputs.append(ops.linear_small(x[some], *whole, residual=before, query_lens=step.counts, **options))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _multiply(x: torch.Tensor, product: _Product) -> list[torch.Tensor]:
    """Products of rows ``x [n, K]``: one per run, or of opaque modules one each."""
    if product.modules:
        return [module(x) for module in product.modules]
    return [tiled.product(x, *run.whole()) for run in product.runs]


def _joined(x: torch.Tensor, product: _Product) -> torch.Tensor:
    outputs = _multiply(x, product)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)


def _weight(norm: Any) -> torch.Tensor:
    found: torch.Tensor = norm.weight.detach()
    return found


def _without_autocast(device: str) -> AbstractContextManager[Any]:
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def fused_form(model: PreTrainedModel, *, exact: bool = False) -> FusedForm:
    """The fused form of a model, after its logits agreed with those of the model's own modules, see :func:`check_outputs`.

    It merges the weights of the model, see :mod:`pipespec.engine.fused`.

    Args:
        model: a known one, see :func:`pipespec.engine.known.identify`.
        exact: as for :class:`FusedForm`.

    Raises:
        NotReadable: a part of the model has no operation here, the logits do not agree, its weights cannot be merged, or the exact form's
            logits depend on how a text is cut into steps. An opaque module does not take rows as it takes a batch.
    """
    _check(model)
    groups = families.of_one_input(model)
    check_separate(model, groups)
    # No form may hold the weights of before the merge.
    with moving(model):
        merge(groups)
    form = FusedForm(model, exact=exact)
    if exact:
        _check_exact(model, form)
    return form


class _StandIn(nn.Module):
    """Replaces an opaque module in the check: each output copies one input. So the check compares the operations between the products, not the products."""

    places: torch.Tensor

    def __init__(self, inputs: int, outputs: int, number: int, device: torch.device) -> None:
        super().__init__()
        # A prime and an odd offset: no two modules have one order.
        self.register_buffer("places", (torch.arange(outputs, device=device) * 7919 + 2 * number + 1) % inputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[..., self.places]


def _with_stand_ins(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model's modules, over the same tensors, with a :class:`_StandIn` for each opaque one, which is tried: it must give rows
    ``[n, K]`` the bits that it gives them in a batch. The model itself where it has none."""
    stand_ins: dict[int, nn.Module] = {}
    dtype = model.model.norm.weight.dtype
    names = {id(module): name for name, module in model.named_modules()}
    noise = torch.Generator().manual_seed(0)
    for linear in families.opaque(model):
        name, inputs = f"{names[id(linear)]} ({type(linear).__name__})", getattr(linear, "in_features", None)
        if not isinstance(inputs, int):
            raise NotReadable(f"{name} does not tell its in_features")
        x = torch.randn((2, 3, inputs), generator=noise, dtype=torch.float32, device="cpu").to(model.device, dtype)
        own, ours = linear(x), linear(x.flatten(0, 1))
        if ours.dtype != dtype or not ours.is_contiguous() or not torch.equal(own.flatten(0, 1), ours):
            raise NotReadable(f"{name} does not take rows as it takes a batch")
        stand_ins[id(linear)] = _StandIn(inputs, ours.shape[-1], len(stand_ins), x.device)

    def copied(module: nn.Module) -> nn.Module:
        if id(module) in stand_ins:
            return stand_ins[id(module)]
        made = copy.copy(module)
        made._modules = {name: child and copied(child) for name, child in module._modules.items()}
        return made

    return cast("PreTrainedModel", copied(model)) if stand_ins else model


@contextmanager
def refused_operations() -> Iterator[None]:
    """Raise :class:`NotReadable` for what an operation does not take."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise NotReadable(f"an operation does not take it: {error}") from error


def _check(model: PreTrainedModel) -> None:
    """Raise :class:`NotReadable` unless the logits agree. The form of the check has the operations and the sums of the later one."""
    with torch.inference_mode(), _without_autocast(model.device.type):
        model = _with_stand_ins(model)
    form, parts = FusedForm(model), ModelParts.of(model)
    texts = probe_inputs(parts)

    def logits(call: Form) -> torch.Tensor:
        cache = probe_cache(parts, static=True)
        form.add_cache(cache)
        return probe(call, cache, texts)

    # Autocast holds for this call alone, and the form serves later ones.
    with torch.inference_mode(), _without_autocast(model.device.type):
        own = logits(WholeModel(model))
        # The probes are steps of few rows. They also run through the products of wider ones.
        for narrow_rows in dict.fromkeys((form.narrow_rows, 0)):
            form.narrow_rows = narrow_rows
            with refused_operations():
                ours = logits(form)
            check_outputs(parts, texts, own, ours)


def _check_exact(model: PreTrainedModel, form: FusedForm) -> None:
    """Raise :class:`NotReadable` unless the probes have the same bits in several steps of both texts, and in one step of each text."""
    parts = ModelParts.of(model)
    texts = probe_inputs(parts)

    def cache(rows: int) -> RowCache:
        made = probe_cache(parts, rows, static=True)
        form.add_cache(made)
        return made

    with torch.inference_mode(), _without_autocast(model.device.type):
        whole = torch.cat([form(text[None], cache(1), len(text)) for text in texts])
        if not torch.equal(probe(form, cache(2), texts), probed(whole)):
            raise NotReadable("its logits depend on how a text is cut into steps and batches")
