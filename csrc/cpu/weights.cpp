#include "weights.hpp"

#include <algorithm>
#include <cmath>
#include <unordered_map>
#include <unordered_set>

#include "decoder_kernels.hpp"
#include "formats/formats.hpp"
#include "number.hpp"

namespace pipespec::cpu {
namespace {

constexpr int64_t kPanel = kPanelOutputs;

int64_t whole(int64_t n, int64_t of) { return (n + of - 1) / of; }
int64_t rounded(int64_t n, int64_t to) { return whole(n, to) * to; }

std::vector<float> floats(const Weights& w, int64_t count, float offset = 0.0f) {
  std::vector<float> out(size_t(w.data == nullptr ? 0 : count));
  for (size_t i = 0; i < out.size(); ++i) out[i] = value(w, int64_t(i)) + offset;
  return out;
}

// Some outputs of a matrix: rows begin .. end - 1 of `weights`.
struct Rows {
  const Weights& weights;
  const Weights& bias;
  int64_t begin, end;
};

// The float32 matrices that are copied, by their data.
using Narrow = std::unordered_map<const void*, Weights>;

// Lays out one matrix after the other.
class Layout {
 public:
  explicit Layout(const Narrow& narrow) : narrow_(narrow) {}

  // Of the next matrix, the panels in their order: each part in whole panels; in `pairs`, a panel
  // of the first and a panel of the second of two parts take turns.
  void add(Matrix& m, int64_t inputs, int64_t groups, const std::vector<Rows>& parts,
           bool pairs = false) {
    PanelMatrix from{inputs, {}, {}};
    const bool has_bias = std::any_of(parts.begin(), parts.end(),
                                      [](const Rows& r) { return r.bias.data != nullptr; });
    const bool has_scale = std::any_of(parts.begin(), parts.end(),
                                       [](const Rows& r) { return r.weights.scale != nullptr; });
    const auto add_panel = [&](const Rows& part, int64_t begin) {
      const auto narrow = narrow_.find(part.weights.data);
      const int64_t* const order = part.weights.order;
      from.panels.push_back({narrow == narrow_.end() ? part.weights : narrow->second,
                             order == nullptr ? begin : order[begin],
                             std::min(part.end - begin, kPanel)});
      for (int64_t r = begin; r < begin + kPanel; ++r) {
        const bool is_row = r < part.end;
        if (has_bias)
          m.bias.push_back(is_row && part.bias.data != nullptr ? value(part.bias, r) : 0.0f);
        if (has_scale)
          m.scale.push_back(is_row && part.weights.scale != nullptr ? part.weights.scale[r] : 1.0f);
      }
    };
    if (pairs) {
      for (int64_t r = 0; r < parts[0].end - parts[0].begin; r += kPanel)
        for (const Rows& part : parts) add_panel(part, part.begin + r);
    } else {
      for (const Rows& part : parts)
        for (int64_t r = part.begin; r < part.end; r += kPanel) add_panel(part, r);
    }
    m.inputs = inputs, m.groups = groups;
    m.group_panels = int64_t(from.panels.size()) / groups;
    from.runs = runs_of(from);
    for (Run& run : from.runs) {
      bytes = rounded(bytes, 64);
      offsets_.push_back(bytes);
      bytes += run.panels * run.panel_bytes;
      weight_bits = std::max(weight_bits, run.bits);
      if (run.format)
        m.rounds[traits(*run.format).rounds256] = true;
      else
        m.reads_floats = true;
    }
    matrices_.push_back(std::move(from));
    to_.push_back(&m);
  }

  void add(ExpertLayer& l, const ExpertWeights& w, const DecoderShape& s) {
    const int64_t count = w.routing.experts, h = s.hidden;
    const Weights none;
    l.routing = w.routing;
    l.activation = s.activation, l.limit = w.limit;
    l.bias = floats(w.choice_bias, count);
    l.has_shared = w.shared_intermediate > 0;
    l.gates_shared = w.shared_router.data != nullptr;
    std::vector<Rows> router{{w.router, w.router_bias, 0, count}};
    if (l.gates_shared) router.push_back({w.shared_router, none, 0, 1});
    add(l.router, h, 1, router);
    l.experts.resize(size_t(count + (l.has_shared ? 1 : 0)));
    const auto add_expert = [&](Expert& expert, int64_t size, const Rows& gate, const Rows& up,
                                const Rows& down) {
      expert.intermediate = size;
      add(expert.gate_up, h, 1, {gate, up}, true);
      add(expert.down, size, 1, {down});
    };
    for (int64_t e = 0; e < count; ++e) {
      const int64_t size = w.intermediate, gate = e * w.stride, up = gate + w.up_first;
      add_expert(l.experts[size_t(e)], size, {w.gate, w.gate_bias, gate, gate + size},
                 {w.up, w.up_bias, up, up + size}, {w.down, w.down_bias, e * h, (e + 1) * h});
    }
    const int64_t shared = w.shared_intermediate;
    if (l.has_shared)
      add_expert(l.experts.back(), shared, {w.shared_gate, none, 0, shared},
                 {w.shared_up, none, 0, shared}, {w.shared_down, none, 0, h});
  }

  void add(RecurrentLayer& l, const RecurrentWeights& w, const DecoderShape& s) {
    const int64_t heads = w.delta.value_heads, channels = w.channels;
    const Weights none;
    l.delta = w.delta, l.channels = channels, l.taps = w.taps, l.eps = s.eps;
    std::vector<Rows> parts{{w.in, w.in_bias, 0, channels}};
    if (l.is_delta()) {
      parts.push_back({w.gates, none, 0, l.outputs()});
      parts.push_back({w.beta, none, 0, heads});
      parts.push_back({w.decay, none, 0, heads});
    } else {
      parts.push_back({w.in, w.in_bias, channels, 2 * channels});
      parts.push_back({w.in, w.in_bias, 2 * channels, 3 * channels});
    }
    add(l.in, s.hidden, 1, parts);
    add(l.out, l.outputs(), 1, {{w.out, w.out_bias, 0, s.hidden}});
    l.kernel.resize(size_t(channels * w.taps));
    for (int64_t c = 0; c < channels; ++c)
      for (int64_t t = 0; t < w.taps; ++t)
        l.kernel[size_t(t * channels + c)] = value(w.kernel, c * w.taps + t);
    l.kernel_bias = floats(w.kernel_bias, channels);
    l.decay = floats(w.decay_log, heads);
    for (float& x : l.decay) x = -std::exp(x);
    l.decay_bias = floats(w.decay_bias, heads);
    l.norm = floats(w.norm, w.delta.value_dim);
    const float size = float(w.delta.key_dim);
    l.query_norm.assign(size_t(w.delta.key_dim), 1.0f / size);
    l.key_norm.assign(size_t(w.delta.key_dim), 1.0f / std::sqrt(size));
  }

  void add(LatentLayer& l, const LatentWeights& w, const DecoderShape& s) {
    const int64_t heads = s.heads, rank = s.latent;
    const Weights none;
    l.rank = rank, l.plain = w.plain, l.value_dim = w.value_dim, l.query_rank = w.query_rank;
    l.eps = w.eps;
    const int64_t queries = heads * (w.plain + s.rotary_dim);
    const bool has_latents = w.query_rank > 0;
    add(l.in, s.hidden, 1,
        {has_latents ? Rows{w.query_latents, w.query_latents_bias, 0, w.query_rank}
                     : Rows{w.queries, none, 0, queries},
         {w.latents, w.latents_bias, 0, s.head_dim}});
    if (has_latents) add(l.queries, w.query_rank, 1, {{w.queries, none, 0, queries}});
    l.keys.resize(size_t(heads));
    l.values.resize(size_t(heads));
    for (int64_t h = 0; h < heads; ++h) {
      add(l.keys[size_t(h)], w.plain, 1, {{w.keys, none, h * rank, (h + 1) * rank}});
      const int64_t first = h * w.value_dim;
      add(l.values[size_t(h)], rank, 1, {{w.values, none, first, first + w.value_dim}});
    }
    l.norm = floats(w.norm, rank);
    l.query_norm = floats(w.query_norm, w.query_rank);
  }

  void pack_into(unsigned char* memory, int threads) {
    size_t next = 0;
    for (PanelMatrix& m : matrices_)
      for (Run& run : m.runs) run.data = memory + offsets_[next++];
    pack(matrices_, threads);
    for (size_t i = 0; i < matrices_.size(); ++i) to_[i]->runs = std::move(matrices_[i].runs);
  }

  int64_t bytes = 0;
  int weight_bits = 0;

 private:
  const Narrow& narrow_;
  std::vector<PanelMatrix> matrices_;
  std::vector<Matrix*> to_;
  std::vector<int64_t> offsets_;
};

LayerSizes sizes_of(const LayerWeights& layer, const DecoderShape& s) {
  return layer.sizes ? *layer.sizes
                     : LayerSizes{s.intermediate, s.kv_heads, s.head_dim, s.rotary_dim};
}

// What queries, keys and values read.
int64_t inputs_of(const LayerWeights& layer, const DecoderShape& s) {
  return s.hidden * (layer.side_norm.data == nullptr ? 1 : 2);
}

// All matrices as they are stored.
std::vector<WeightSpan> matrices_of(const DecoderShape& s, const std::vector<LayerWeights>& layers,
                                    const EndWeights& ends) {
  std::vector<WeightSpan> found;
  const auto add = [&found](const Weights& w, int64_t rows, int64_t inputs) {
    found.push_back({w, (w.order == nullptr ? rows : w.stored) * inputs});
  };
  const int64_t h = s.hidden;
  add(ends.head, s.vocabulary, h);
  add(ends.per_layer_in, int64_t(layers.size()) * s.per_layer, h);
  for (const LayerWeights& l : layers) {
    const LayerSizes own = sizes_of(l, s);
    const int64_t q_size = s.heads * own.head_dim, kv_size = own.kv_heads * own.head_dim;
    add(l.per_layer_gate, s.per_layer, h);
    add(l.per_layer_out, h, s.per_layer);
    for (const Weights& w : {l.k, l.v}) add(w, kv_size, inputs_of(l, s));
    for (const Weights& w : {l.q, l.q_gate}) add(w, q_size, inputs_of(l, s));
    const LatentWeights& a = l.latent;
    const int64_t query_size = s.heads * (a.plain + s.rotary_dim);
    add(l.o, h, a.plain > 0 ? s.heads * a.value_dim : q_size);
    add(a.query_latents, a.query_rank, h);
    add(a.queries, query_size, a.query_rank > 0 ? a.query_rank : h);
    add(a.latents, s.head_dim, h);
    add(a.keys, s.heads * s.latent, a.plain);
    add(a.values, s.heads * a.value_dim, s.latent);
    for (const Weights& w : {l.gate, l.up}) add(w, own.intermediate, h);
    add(l.down, h, own.intermediate);
    const RecurrentWeights& r = l.recurrent;
    const int64_t heads = r.delta.value_heads, outputs = heads * r.delta.value_dim;
    add(r.in, outputs > 0 ? r.channels : 3 * r.channels, h);
    add(r.gates, outputs, h);
    for (const Weights& w : {r.beta, r.decay}) add(w, heads, h);
    add(r.out, h, outputs > 0 ? outputs : r.channels);
    const ExpertWeights& e = l.experts;
    const int64_t count = e.routing.experts;
    // Of gates and ups in one matrix, the rows of both lie from its beginning on.
    for (const Weights& w : {e.gate, e.up}) add(w, count * e.stride, h);
    add(e.router, count, h);
    add(e.down, count * h, e.intermediate);
    for (const Weights& w : {e.shared_gate, e.shared_up}) add(w, e.shared_intermediate, h);
    add(e.shared_down, h, e.shared_intermediate);
    add(e.shared_router, 1, h);
  }
  return found;
}

// Copies of float32 matrices whose values bfloat16 represents, of up to `room` bytes.
Narrow narrow_copies(const std::vector<WeightSpan>& matrices, int64_t room, Arena& arena,
                     int64_t& bytes, int threads) {
  std::vector<WeightSpan> wide, copied;
  std::unordered_set<const void*> seen;  // parts may lie in one matrix
  for (const WeightSpan& span : matrices) {
    const Weights& w = span.weights;
    const bool is_wide = w.data != nullptr && !w.format && w.scale == nullptr;
    if (is_wide && w.dtype == DType::kFloat32 && seen.insert(w.data).second) wide.push_back(span);
  }
  Narrow found;
  int64_t size = 0;
  for (const WeightSpan& span : wide) size += span.count * int64_t(sizeof(uint16_t));
  if (size == 0 || size > room) return found;
  const std::vector<bool> fits = are_bfloat16(wide, threads);
  size = 0;
  for (size_t i = 0; i < wide.size(); ++i) {
    if (!fits[i]) continue;
    copied.push_back(wide[i]);
    size += wide[i].count * int64_t(sizeof(uint16_t));
  }
  if (copied.empty()) return found;
  arena.allocate(size);
  bytes += size;
  auto* to = reinterpret_cast<uint16_t*>(arena.begin());
  narrow(copied, to, threads);
  for (const WeightSpan& span : copied) {
    found[span.weights.data] = {to, DType::kBFloat16};
    to += span.count;
  }
  return found;
}

}  // namespace

float value(const Weights& w, int64_t i) {
  return w.dtype == DType::kFloat32 ? static_cast<const float*>(w.data)[i]
                                    : float_of_bfloat16(static_cast<const uint16_t*>(w.data)[i]);
}

PackedWeights::PackedWeights(const DecoderShape& s, const std::vector<LayerWeights>& from,
                             const EndWeights& ends, int64_t room, int threads) {
  const Narrow copies = narrow_copies(matrices_of(s, from, ends), room, narrow, bytes, threads);
  layers.resize(from.size());
  int64_t states = 0;
  std::vector<LayerSizes> kinds;  // of keys and values
  std::vector<int64_t> stores;    // of each kind, so far
  const Weights none;
  Layout layout(copies);
  for (size_t i = 0; i < from.size(); ++i) {
    const LayerWeights& w = from[i];
    Layer& l = layers[i];
    l.gates_attention = w.q_gate.data != nullptr;
    l.sizes = sizes_of(w, s);
    const int64_t d = l.sizes.head_dim, kv_heads = l.sizes.kv_heads, group = s.heads / kv_heads;
    const int64_t q_size = s.heads * d, kv_size = kv_heads * d;
    const bool is_recurrent = w.recurrent.taps > 0;
    l.stores_keys = !is_recurrent && w.keys_of < 0;
    l.store_kind = 0;
    if (is_recurrent) {
      l.store = states++;
    } else if (w.keys_of >= 0) {
      const Layer& from = layers[size_t(w.keys_of)];
      l.store = from.store, l.store_kind = from.store_kind;
    } else {
      const auto same = [&](const LayerSizes& of) {
        return of.kv_heads == kv_heads && of.head_dim == d;
      };
      const auto kind = std::find_if(kinds.begin(), kinds.end(), same);
      l.store_kind = kind - kinds.begin();
      if (kind == kinds.end()) kinds.push_back(l.sizes), stores.push_back(0);
      l.store = stores[size_t(l.store_kind)]++;
    }
    std::vector<Rows> parts;
    for (int64_t h = 0; h < kv_heads; ++h) {
      parts.push_back({w.q, w.q_bias, h * group * d, (h + 1) * group * d});
      if (l.stores_keys) {
        parts.push_back({w.k, w.k_bias, h * d, (h + 1) * d});
        parts.push_back({w.v, w.v_bias, h * d, (h + 1) * d});
      }
      if (l.gates_attention)
        parts.push_back({w.q_gate, w.q_gate_bias, h * group * d, (h + 1) * group * d});
    }
    if (is_recurrent) {
      layout.add(l.recurrent, w.recurrent, s);
    } else if (w.latent.plain > 0) {
      layout.add(l.latent, w.latent, s);
      layout.add(l.o, l.latent.outputs(), 1, {{w.o, w.o_bias, 0, s.hidden}});
    } else {
      layout.add(l.qkv, inputs_of(w, s), kv_heads, parts);
      layout.add(l.o, q_size, 1, {{w.o, w.o_bias, 0, s.hidden}});
    }
    const int64_t intermediate = l.sizes.intermediate;
    const Rows up{w.up, w.up_bias, 0, intermediate};
    l.is_gated = w.gate.data != nullptr;
    if (w.experts.routing.experts > 0) {
      layout.add(l.experts, w.experts, s);
    } else {
      if (l.is_gated)
        layout.add(l.gate_up, s.hidden, 1, {{w.gate, w.gate_bias, 0, intermediate}, up}, true);
      else
        layout.add(l.gate_up, s.hidden, 1, {up});
      layout.add(l.down, intermediate, 1, {{w.down, w.down_bias, 0, s.hidden}});
    }
    if (s.per_layer > 0) {
      layout.add(l.per_layer_gate, s.hidden, 1, {{w.per_layer_gate, none, 0, s.per_layer}});
      layout.add(l.per_layer_out, s.per_layer, 1, {{w.per_layer_out, none, 0, s.hidden}});
    }
    const auto norm = [&s](const Weights& weight, const Weights& bias = {}) {
      return Norm{floats(weight, s.hidden, s.norm_offset), floats(bias, s.hidden)};
    };
    l.input_norm = norm(w.input_norm, w.input_norm_bias);
    l.post_norm = norm(w.post_norm, w.post_norm_bias);
    l.o_norm = norm(w.o_norm), l.down_norm = norm(w.down_norm), l.side_norm = norm(w.side_norm);
    l.per_layer_norm = norm(w.per_layer_norm);
    const bool shared = w.head_norms == HeadNorms::kShared;
    l.q_norm.weight = floats(w.q_norm, shared ? d : q_size, s.norm_offset);
    l.k_norm.weight = floats(w.k_norm, shared ? d : kv_size, s.norm_offset);
    l.v_norm.weight = floats(w.v_norm, d, s.norm_offset);
    l.output_scale = w.output_scale.data == nullptr ? 1.0f : value(w.output_scale, 0);
    l.sinks = floats(w.sinks, s.heads);
    l.window = w.window, l.rope = w.rope;
    l.adds_to_norm = w.adds_to_norm;
    l.head_norms = w.head_norms;
  }
  if (ends.head.data != nullptr)
    layout.add(head, s.hidden, 1, {{ends.head, ends.head_bias, 0, s.vocabulary}});
  norm = {floats(ends.norm, s.hidden, s.norm_offset), floats(ends.norm_bias, s.hidden)};
  if (s.per_layer > 0) {
    std::vector<Rows> parts;
    for (int64_t i = 0; i < int64_t(from.size()); ++i)
      parts.push_back({ends.per_layer_in, none, i * s.per_layer, (i + 1) * s.per_layer});
    layout.add(per_layer_in, s.hidden, 1, parts);
    per_layer_in_norm.weight = floats(ends.per_layer_in_norm, s.per_layer, s.norm_offset);
  }
  weight_bits = layout.weight_bits;
  bytes += layout.bytes;
  if (layout.bytes > 0) panels.allocate(layout.bytes);
  layout.pack_into(panels.begin(), threads);
}

}  // namespace pipespec::cpu
