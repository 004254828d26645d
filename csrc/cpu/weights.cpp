#include "weights.hpp"

#include <algorithm>
#include <unordered_map>

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
      from.panels.push_back({narrow == narrow_.end() ? part.weights : narrow->second, begin,
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
      for (int64_t r = 0; r < parts[0].end; r += kPanel)
        for (const Rows& part : parts) add_panel(part, r);
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

// Copies of float32 matrices whose values bfloat16 represents, of up to `room` bytes.
Narrow narrow_copies(const std::vector<WeightSpan>& matrices, int64_t room, Arena& arena,
                     int64_t& bytes, int threads) {
  std::vector<WeightSpan> wide, copied;
  for (const WeightSpan& span : matrices) {
    const Weights& w = span.weights;
    if (w.data != nullptr && !w.format && w.scale == nullptr && w.dtype == DType::kFloat32)
      wide.push_back(span);
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
  const int64_t q_size = s.heads * s.head_dim, kv_size = s.kv_heads * s.head_dim;
  const int64_t group = s.heads / s.kv_heads, d = s.head_dim;
  const auto inputs = [&s](const LayerWeights& l) { return s.hidden * (l.side_norm.data ? 2 : 1); };
  std::vector<WeightSpan> spans{{ends.head, s.vocabulary * s.hidden}};
  for (const LayerWeights& l : from) {
    for (const Weights& w : {l.k, l.v}) spans.push_back({w, kv_size * inputs(l)});
    spans.insert(spans.end(), {{l.q, q_size * inputs(l)}, {l.o, q_size * s.hidden}});
    for (const Weights& w : {l.gate, l.up, l.down}) spans.push_back({w, s.intermediate * s.hidden});
  }
  const Narrow copies = narrow_copies(spans, room, narrow, bytes, threads);
  layers.resize(from.size());
  Layout layout(copies);
  for (size_t i = 0; i < from.size(); ++i) {
    const LayerWeights& w = from[i];
    Layer& l = layers[i];
    std::vector<Rows> parts;
    for (int64_t h = 0; h < s.kv_heads; ++h) {
      parts.push_back({w.q, w.q_bias, h * group * d, (h + 1) * group * d});
      parts.push_back({w.k, w.k_bias, h * d, (h + 1) * d});
      parts.push_back({w.v, w.v_bias, h * d, (h + 1) * d});
    }
    layout.add(l.qkv, inputs(w), s.kv_heads, parts);
    layout.add(l.o, q_size, 1, {{w.o, w.o_bias, 0, s.hidden}});
    layout.add(l.gate_up, s.hidden, 1,
               {{w.gate, w.gate_bias, 0, s.intermediate}, {w.up, w.up_bias, 0, s.intermediate}},
               true);
    layout.add(l.down, s.intermediate, 1, {{w.down, w.down_bias, 0, s.hidden}});
    l.input_norm = floats(w.input_norm, s.hidden, s.norm_offset);
    l.post_norm = floats(w.post_norm, s.hidden, s.norm_offset);
    l.q_norm = floats(w.q_norm, s.head_dim, s.norm_offset);
    l.k_norm = floats(w.k_norm, s.head_dim, s.norm_offset);
    l.side_norm = floats(w.side_norm, s.hidden, s.norm_offset);
    l.window = w.window;
    l.adds_to_norm = w.adds_to_norm;
  }
  if (ends.head.data != nullptr)
    layout.add(head, s.hidden, 1, {{ends.head, ends.head_bias, 0, s.vocabulary}});
  norm = floats(ends.norm, s.hidden, s.norm_offset);
  weight_bits = layout.weight_bits;
  bytes += layout.bytes;
  if (layout.bytes > 0) panels.allocate(layout.bytes);
  layout.pack_into(panels.begin(), threads);
}

}  // namespace pipespec::cpu
