#include "decoder.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

#include "kernels.hpp"
#include "number.hpp"
#include "pack.hpp"
#include "pool.hpp"

namespace pipespec::cpu {
namespace {

constexpr int64_t kPanel = kPanelOutputs;
// Panels of one unit of work at most: what they compute for a tile stays in the second-level cache.
constexpr int64_t kMaxUnitPanels = 8;
// Columns of one unit of attention at most.
constexpr int64_t kAttendColumns = 16;
// Most rows of a narrow forward. It spends most of its time reading the weights, so the cost of a
// round shows.
constexpr int64_t kNarrow = 16;
// Inputs of a tile of rows: they are read once per group, from the second-level cache.
constexpr int64_t kTileBytes = 192 << 10;
constexpr int64_t kMaxTileRows = 48;  // whole blocks of rows
constexpr int64_t kUnitsPerThread = 4;

int64_t whole(int64_t n, int64_t of) { return (n + of - 1) / of; }
int64_t rounded(int64_t n, int64_t to) { return whole(n, to) * to; }

// Memory on cache lines that grows and never shrinks. Its contents are lost when it grows.
class Buffer {
 public:
  Buffer() = default;
  ~Buffer() { std::free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  float* floats(int64_t count) {
    if (count > count_) {
      std::free(data_);
      data_ = nullptr;
      count_ = 0;
      void* const fresh = std::aligned_alloc(64, size_t(rounded(count * 4, 64)));
      if (fresh == nullptr) throw std::bad_alloc();
      data_ = static_cast<float*>(fresh);
      count_ = count;
    }
    return data_;
  }

 private:
  float* data_ = nullptr;
  int64_t count_ = 0;
};

// What a thread needs for its units. `rows` are the normalised hidden states of round number
// `round`, from row `begin` on. The units of one round share them.
struct Scratch {
  Buffer rows, products, scores;
  uint64_t round = 0;
  int64_t begin = 0;
};

Scratch& scratch() {
  thread_local Scratch of_thread;
  return of_thread;
}

// What a caller needs for one forward: hidden states, and what the layers hand on.
struct Workspace {
  Buffer hidden, qkv, attended, activated;
};

Workspace& workspace() {
  thread_local Workspace of_thread;
  return of_thread;
}

std::atomic<uint64_t> g_round{0};

float value(const Weights& w, int64_t i) {
  return w.dtype == DType::kFloat32 ? static_cast<const float*>(w.data)[i]
                                    : float_of_bfloat16(static_cast<const uint16_t*>(w.data)[i]);
}

std::vector<float> floats(const Weights& w, int64_t count, float offset = 0.0f) {
  std::vector<float> out(size_t(w.data == nullptr ? 0 : count));
  for (size_t i = 0; i < out.size(); ++i) out[i] = value(w, int64_t(i)) + offset;
  return out;
}

// x[0 .. dim), rotated by the angles of its position: transformers' rotate_half.
void rotate(float* x, const float* cos, const float* sin, int64_t dim) {
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cos[i] - b * sin[i];
    x[i + half] = b * cos[i + half] + a * sin[i + half];
  }
}

void store(void* to, DType dtype, int64_t at, const float* from, int64_t count) {
  if (dtype == DType::kFloat32) {
    std::memcpy(static_cast<float*>(to) + at, from, size_t(count) * 4);
  } else {
    uint16_t* const out = static_cast<uint16_t*>(to) + at;
    for (int64_t i = 0; i < count; ++i) out[i] = bfloat16_of(from[i]);
  }
}

}  // namespace

// `groups` matrices of `outputs` outputs each, one behind the other: heads of queries, keys and
// values; elsewhere one.
struct Decoder::Matrix {
  int64_t inputs = 0, outputs = 0, groups = 1;
  int64_t offset = 0;  // in bytes, from the beginning of all weights
  const unsigned char* data = nullptr;
  std::vector<float> bias, scale;  // of all panels, or none

  int64_t group_panels() const { return whole(outputs, kPanel); }
  int64_t panels() const { return groups * group_panels(); }
};

struct Decoder::Layer {
  Matrix qkv, o, gate_up, down;
  std::vector<float> input_norm, post_norm, q_norm, k_norm;
  int64_t window;
};

struct Decoder::Packed {
  std::vector<Layer> layers;
  Matrix head;
  std::vector<float> norm;
  int weight_bits = 32;
  unsigned char* memory = nullptr;
  size_t mapped = 0;
  int64_t bytes = 0;

  ~Packed() {
    if (memory != nullptr) munmap(memory, mapped);
  }

  void allocate() {
    constexpr size_t kHuge = size_t{2} << 20;
    mapped = (size_t(bytes) + kHuge - 1) / kHuge * kHuge + kHuge;
    void* const all =
        mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED) throw std::bad_alloc();
    memory = static_cast<unsigned char*>(all);
#ifdef MADV_HUGEPAGE
    // Huge pages need fewer entries of the page table for a pass over all weights. If the system
    // has none, it uses small pages.
    madvise(all, mapped, MADV_HUGEPAGE);
#endif
  }
  unsigned char* begin() const {
    constexpr uintptr_t kHuge = uintptr_t{2} << 20;
    const uintptr_t at = reinterpret_cast<uintptr_t>(memory);
    return memory + ((at + kHuge - 1) / kHuge * kHuge - at);
  }
};

struct Decoder::Job {
  enum class Phase {
    kHead,
    kProject,
    kFinish,
    kAttend,
    kFinishAttend,
    kOut,
    kGateUp,
    kDown,
    kLogits
  };

  // Rows of the hidden states: of each row of the batch `columns` from `first` on, of `stride`.
  struct Part {
    int64_t rows, columns, first, stride;
    int64_t count() const { return rows * columns; }
    int64_t at(int64_t m) const { return m / columns * stride + first + m % columns; }
  };
  // A unit of a product: rows begin .. end - 1 of the part, and some panels.
  struct Piece {
    int64_t begin, end, panel, panels;
    int64_t rows() const { return end - begin; }
  };

  const DecoderShape& shape;
  const Packed& packed;
  const int threads;
  const DecoderKernels& kernels = cpu::kernels().decoder;
  Team team{threads - 1, work, this};

  Part all{}, kept{};  // of the hidden states: those fed, and those whose results are wanted
  float* hidden = nullptr;
  const KeysValues* cache = nullptr;
  const Columns* columns = nullptr;
  void* out = nullptr;
  DType out_dtype = DType::kFloat32;

  const Layer* layer = nullptr;
  int64_t layer_index = 0;
  float *qkv = nullptr, *attended = nullptr, *activated = nullptr;

  // Of the present round.
  Phase phase = Phase::kHead;
  uint64_t round = 0;
  int64_t base = 0;
  Part part{};
  int64_t tile_rows = 0, chunk_panels = 0, chunks = 0;

  Job(const Decoder& decoder, int threads_)
      : shape(decoder.shape_), packed(*decoder.packed_), threads(threads_) {}

  static void work(void* context, int64_t unit) {
    Job& job = *static_cast<Job*>(context);
    job.unit(job.base + unit);
  }

  void run(Phase next, int64_t units) {
    phase = next;
    round = g_round.fetch_add(1, std::memory_order_relaxed) + 1;
    for (base = 0; base < units; base += Team::kMaxUnits)
      team.run(std::min(units - base, Team::kMaxUnits));
  }

  // A product: tiles of rows times chunks of panels.
  void run(Phase next, const Part& of, const Matrix& matrix) {
    part = of;
    const int64_t fitting =
        std::clamp<int64_t>(kTileBytes / (matrix.inputs * 4) / 6 * 6, 6, kMaxTileRows);
    tile_rows = std::min(fitting, part.count());
    const int64_t tiles = whole(part.count(), tile_rows);
    const int64_t wanted = threads == 1 ? 1 : kUnitsPerThread * threads;
    chunk_panels =
        std::min(rounded(whole(matrix.panels() * tiles, wanted), kGroupPanels), kMaxUnitPanels);
    chunks = whole(matrix.panels(), chunk_panels);
    run(next, tiles * chunks);
  }

  void unit(int64_t i) {
    switch (phase) {
      case Phase::kHead:
        project_head(i);
        for (int64_t row = 0; row < all.rows; ++row) {
          finish(row, i);
          attend(row, i, 0, kept.columns);
        }
        return;
      case Phase::kProject:
        return project(i);
      case Phase::kFinish:
        return finish(i / shape.kv_heads, i % shape.kv_heads);
      case Phase::kAttend: {
        const int64_t pieces = whole(kept.columns, kAttendColumns);
        const int64_t begin = i % pieces * kAttendColumns, head = i / pieces;
        return attend(head / shape.kv_heads, head % shape.kv_heads, begin,
                      std::min(begin + kAttendColumns, kept.columns));
      }
      case Phase::kFinishAttend:
        finish(i / shape.kv_heads, i % shape.kv_heads);
        return attend(i / shape.kv_heads, i % shape.kv_heads, 0, kept.columns);
      case Phase::kOut:
        return add_product(layer->o, attended, attended_width(), i);
      case Phase::kGateUp:
        return gate_up(i);
      case Phase::kDown:
        return add_product(layer->down, activated, activated_width(), i);
      case Phase::kLogits:
        return head_product(i);
    }
  }

  int64_t qkv_width() const { return layer->qkv.panels() * kPanel; }
  int64_t attended_width() const { return shape.heads * shape.head_dim; }
  int64_t activated_width() const { return rounded(shape.intermediate, kPanel); }

  Piece piece(const Matrix& matrix, int64_t i) const {
    const int64_t begin = i / chunks * tile_rows, panel = i % chunks * chunk_panels;
    return {begin, std::min(begin + tile_rows, part.count()), panel,
            std::min(chunk_panels, matrix.panels() - panel)};
  }

  void product(const Matrix& m, int64_t panel, int64_t panels, const float* x, int64_t x_stride,
               int64_t rows, float* to, int64_t stride) const {
    const Product multiply = packed.weight_bits == 8    ? kernels.product8
                             : packed.weight_bits == 16 ? kernels.product16
                                                        : kernels.product32;
    multiply(m.data + panel * kPanel * m.inputs * (packed.weight_bits / 8), m.inputs, panels, x,
             x_stride, rows, to, stride);
    if (!m.scale.empty()) {
      const float* const scale = m.scale.data() + panel * kPanel;
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < panels * kPanel; ++i) to[r * stride + i] *= scale[i];
    }
    if (m.bias.empty()) return;
    const float* const bias = m.bias.data() + panel * kPanel;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = 0; i < panels * kPanel; ++i) to[r * stride + i] += bias[i];
  }

  // The normalised hidden states of rows begin .. end - 1 of a part. Each thread computes its own
  // copy, which is cheaper than a further round.
  const float* normed(const Part& of, int64_t begin, int64_t end,
                      const std::vector<float>& weight) const {
    Scratch& s = scratch();
    const int64_t h = shape.hidden;
    float* const rows = s.rows.floats((end - begin) * h);
    if (s.round != round || s.begin != begin) {
      for (int64_t m = begin; m < end; ++m)
        kernels.rms_norm(hidden + of.at(m) * h, weight.data(), h, shape.eps,
                         rows + (m - begin) * h);
      s.round = round;
      s.begin = begin;
    }
    return rows;
  }

  void project(int64_t i) const {
    const Piece p = piece(layer->qkv, i);
    product(layer->qkv, p.panel, p.panels, normed(part, p.begin, p.end, layer->input_norm),
            shape.hidden, p.rows(), qkv + p.begin * qkv_width() + p.panel * kPanel, qkv_width());
  }

  void project_head(int64_t head) const {
    const int64_t panels = layer->qkv.group_panels(), panel = head * panels;
    product(layer->qkv, panel, panels, normed(all, 0, all.count(), layer->input_norm), shape.hidden,
            all.count(), qkv + panel * kPanel, qkv_width());
  }

  int64_t group() const { return shape.heads / shape.kv_heads; }
  float* projected(int64_t row, int64_t column, int64_t head) const {
    return qkv + (row * all.columns + column) * qkv_width() +
           head * layer->qkv.group_panels() * kPanel;
  }
  int64_t place(const int64_t (&strides)[4], int64_t row, int64_t head) const {
    return layer_index * strides[0] + row * strides[1] + head * strides[2];
  }

  // Norms of queries and keys, rotation, and the keys and values into the cache.
  void finish(int64_t row, int64_t head) const {
    const int64_t d = shape.head_dim, r = shape.rotary_dim;
    for (int64_t j = 0; j < all.columns; ++j) {
      const int64_t position = columns->lengths[row] + j;
      const float* const cos = columns->cos + position * r;
      const float* const sin = columns->sin + position * r;
      float* const queries = projected(row, j, head);
      float* const key = queries + group() * d;
      for (float* x = queries; x <= key; x += d) {
        if (x != key && j < kept.first) continue;  // no output is wanted for this query
        const std::vector<float>& norm = x == key ? layer->k_norm : layer->q_norm;
        if (!norm.empty()) kernels.rms_norm(x, norm.data(), d, shape.eps, x);
        rotate(x, cos, sin, r);
      }
      store(cache->keys, cache->dtype,
            place(cache->key_strides, row, head) + position * cache->key_strides[3], key, d);
      store(cache->values, cache->dtype,
            place(cache->value_strides, row, head) + position * cache->value_strides[3], key + d,
            d);
    }
  }

  // Columns begin .. end - 1 of those kept.
  void attend(int64_t row, int64_t head, int64_t begin, int64_t end) const {
    const int64_t item = item_bytes(cache->dtype), width = attended_width();
    AttendTask task;
    task.queries = projected(row, kept.first + begin, head);
    task.query_stride = qkv_width();
    task.keys = static_cast<const char*>(cache->keys) + place(cache->key_strides, row, head) * item;
    task.values =
        static_cast<const char*>(cache->values) + place(cache->value_strides, row, head) * item;
    task.key_stride = cache->key_strides[3];
    task.value_stride = cache->value_strides[3];
    task.positions = columns->lengths[row] + kept.first + begin + 1;
    task.window = layer->window;
    task.columns = end - begin;
    task.group = group();
    task.head_dim = shape.head_dim;
    task.scale = shape.scale;
    task.softcap = 0.0f;
    task.out = attended + (row * kept.columns + begin) * width + head * group() * shape.head_dim;
    task.out_stride = width;
    task.scratch =
        scratch().scores.floats(kAttendQueries * (task.positions + task.columns + kMaxLanes));
    (cache->dtype == DType::kFloat32 ? kernels.attend32 : kernels.attend16)(task);
  }

  // hidden += x * matrix
  void add_product(const Matrix& m, const float* x, int64_t x_stride, int64_t i) const {
    const Piece p = piece(m, i);
    const int64_t width = p.panels * kPanel, h = shape.hidden, first = p.panel * kPanel;
    float* const products = scratch().products.floats(p.rows() * width);
    product(m, p.panel, p.panels, x + p.begin * x_stride, x_stride, p.rows(), products, width);
    const int64_t count = std::min(width, h - first);
    for (int64_t r = 0; r < p.rows(); ++r) {
      float* const to = hidden + part.at(p.begin + r) * h + first;
      for (int64_t k = 0; k < count; ++k) to[k] += products[r * width + k];
    }
  }

  void gate_up(int64_t i) const {
    const Piece p = piece(layer->gate_up, i);
    const int64_t width = p.panels * kPanel;
    float* const products = scratch().products.floats(p.rows() * width);
    product(layer->gate_up, p.panel, p.panels, normed(part, p.begin, p.end, layer->post_norm),
            shape.hidden, p.rows(), products, width);
    for (int64_t r = 0; r < p.rows(); ++r)
      kernels.activate(shape.activation, products + r * width, p.panels / 2,
                       activated + (p.begin + r) * activated_width() + p.panel / 2 * kPanel);
  }

  void head_product(int64_t i) const {
    const Piece p = piece(packed.head, i);
    const int64_t width = p.panels * kPanel, first = p.panel * kPanel;
    float* const products = scratch().products.floats(p.rows() * width);
    product(packed.head, p.panel, p.panels, normed(part, p.begin, p.end, packed.norm), shape.hidden,
            p.rows(), products, width);
    const int64_t count = std::min(width, shape.vocabulary - first);
    for (int64_t r = 0; r < p.rows(); ++r)
      store(out, out_dtype, (p.begin + r) * shape.vocabulary + first, products + r * width, count);
  }

  void run_layers(int64_t begin, int64_t end) {
    Workspace& w = workspace();
    const Part wanted = kept;
    const int64_t rows = all.count();
    for (int64_t l = begin; l < end; ++l) {
      layer = &packed.layers[size_t(l)];
      layer_index = l;
      // After the last layer only the wanted columns are read.
      kept = l + 1 == end ? wanted : all;
      qkv = w.qkv.floats(rows * qkv_width());
      attended = w.attended.floats(rows * attended_width());
      activated = w.activated.floats(rows * activated_width());
      attention();
      if (kept.count() == 0) continue;
      run(Phase::kOut, kept, layer->o);
      run(Phase::kGateUp, kept, layer->gate_up);
      run(Phase::kDown, kept, layer->down);
    }
  }

  void attention() {
    const int64_t heads = all.rows * shape.kv_heads;
    const bool heads_are_groups = layer->qkv.group_panels() % kGroupPanels == 0;
    if (all.count() <= kNarrow && shape.kv_heads % threads == 0 && heads_are_groups)
      return run(Phase::kHead, shape.kv_heads);
    run(Phase::kProject, all, layer->qkv);
    if (all.count() <= kNarrow) return run(Phase::kFinishAttend, heads);
    run(Phase::kFinish, heads);
    run(Phase::kAttend, heads * whole(kept.columns, kAttendColumns));
  }
};

Decoder::Decoder(const DecoderShape& shape, const std::vector<LayerWeights>& layers,
                 const EndWeights& ends, int threads)
    : shape_(shape), embedding_(ends.embedding), packed_(std::make_unique<Packed>()) {
  const DecoderShape& s = shape_;
  const int64_t q_size = s.heads * s.head_dim, kv_size = s.kv_heads * s.head_dim;
  const int64_t group = s.heads / s.kv_heads;
  std::vector<WeightSpan> spans{{ends.head, s.vocabulary * s.hidden}};
  for (const LayerWeights& l : layers) {
    for (const Weights& w : {l.q, l.o}) spans.push_back({w, q_size * s.hidden});
    for (const Weights& w : {l.k, l.v}) spans.push_back({w, kv_size * s.hidden});
    for (const Weights& w : {l.gate, l.up, l.down}) spans.push_back({w, s.intermediate * s.hidden});
  }
  const bool int8 = std::any_of(spans.begin(), spans.end(), [](const WeightSpan& span) {
    return span.weights.scale != nullptr;
  });
  Packed& p = *packed_;
  p.weight_bits = int8 ? 8 : are_bfloat16(spans, threads) ? 16 : 32;

  // First the offsets, in the order of a forward, then the contents.
  p.layers.resize(layers.size());
  const auto lay_out = [&p, int8](Matrix& m, int64_t outputs, int64_t inputs, int64_t groups,
                                  bool bias) {
    m.outputs = outputs, m.inputs = inputs, m.groups = groups;
    if (bias) m.bias.resize(size_t(m.panels() * kPanel));
    if (int8) m.scale.resize(size_t(m.panels() * kPanel));
    m.offset = p.bytes;
    p.bytes += rounded(m.panels() * kPanel * inputs * (p.weight_bits / 8), 64);
  };
  for (size_t i = 0; i < layers.size(); ++i) {
    const LayerWeights& l = layers[i];
    const auto any = [](const Weights& a, const Weights& b, const Weights& c) {
      return a.data != nullptr || b.data != nullptr || c.data != nullptr;
    };
    lay_out(p.layers[i].qkv, (group + 2) * s.head_dim, s.hidden, s.kv_heads,
            any(l.q_bias, l.k_bias, l.v_bias));
    lay_out(p.layers[i].o, s.hidden, q_size, 1, l.o_bias.data != nullptr);
    lay_out(p.layers[i].gate_up, 2 * rounded(s.intermediate, kPanel), s.hidden, 1,
            any(l.gate_bias, l.up_bias, {}));
    lay_out(p.layers[i].down, s.hidden, s.intermediate, 1, l.down_bias.data != nullptr);
  }
  if (ends.head.data != nullptr)
    lay_out(p.head, s.vocabulary, s.hidden, 1, ends.head_bias.data != nullptr);
  p.allocate();

  std::vector<PanelMatrix> matrices;
  const auto begin = [&](Matrix& m) {
    m.data = p.begin() + m.offset;
    matrices.push_back(
        {m.inputs, std::vector<MatrixRow>(size_t(m.panels() * kPanel)), p.begin() + m.offset});
  };
  // Output `row` of the weights becomes output `at` of the matrix that was begun last.
  const auto put = [&](Matrix& m, int64_t at, const Weights& weights, const Weights& bias,
                       int64_t row) {
    matrices.back().rows[size_t(at)] = {weights, row};
    if (bias.data != nullptr) m.bias[size_t(at)] = value(bias, row);
    if (weights.scale != nullptr) m.scale[size_t(at)] = weights.scale[row];
  };
  for (size_t i = 0; i < layers.size(); ++i) {
    const LayerWeights& from = layers[i];
    Layer& l = p.layers[i];
    begin(l.qkv);
    for (int64_t h = 0; h < s.kv_heads; ++h) {
      int64_t at = h * l.qkv.group_panels() * kPanel;
      for (int64_t r = 0; r < group * s.head_dim; ++r)
        put(l.qkv, at++, from.q, from.q_bias, h * group * s.head_dim + r);
      for (int64_t r = 0; r < s.head_dim; ++r)
        put(l.qkv, at++, from.k, from.k_bias, h * s.head_dim + r);
      for (int64_t r = 0; r < s.head_dim; ++r)
        put(l.qkv, at++, from.v, from.v_bias, h * s.head_dim + r);
    }
    begin(l.o);
    for (int64_t r = 0; r < s.hidden; ++r) put(l.o, r, from.o, from.o_bias, r);
    begin(l.gate_up);
    for (int64_t r = 0; r < s.intermediate; ++r) {
      const int64_t at = r / kPanel * 2 * kPanel + r % kPanel;
      put(l.gate_up, at, from.gate, from.gate_bias, r);
      put(l.gate_up, at + kPanel, from.up, from.up_bias, r);
    }
    begin(l.down);
    for (int64_t r = 0; r < s.hidden; ++r) put(l.down, r, from.down, from.down_bias, r);
    l.input_norm = floats(from.input_norm, s.hidden, s.norm_offset);
    l.post_norm = floats(from.post_norm, s.hidden, s.norm_offset);
    l.q_norm = floats(from.q_norm, s.head_dim, s.norm_offset);
    l.k_norm = floats(from.k_norm, s.head_dim, s.norm_offset);
    l.window = from.window;
  }
  if (ends.head.data != nullptr) {
    begin(p.head);
    for (int64_t r = 0; r < s.vocabulary; ++r) put(p.head, r, ends.head, ends.head_bias, r);
  }
  pack(matrices, p.weight_bits, threads);
  p.norm = floats(ends.norm, s.hidden, s.norm_offset);
}

Decoder::~Decoder() = default;

int64_t Decoder::bytes() const { return packed_->bytes; }

int Decoder::weight_bits() const { return packed_->weight_bits; }

void Decoder::embed(const Tokens& tokens, int64_t rows, int64_t columns, float* hidden) const {
  // All of them before anything is written.
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = 0; j < columns; ++j) {
      const int64_t id = tokens.at(r, j);
      if (id < 0 || id >= shape_.vocabulary)
        throw std::invalid_argument("tokens[" + std::to_string(r) + ", " + std::to_string(j) +
                                    "] is " + std::to_string(id) + ", but the vocabulary has " +
                                    std::to_string(shape_.vocabulary) + " entries");
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = 0; j < columns; ++j) {
      const int64_t at = tokens.at(r, j) * shape_.hidden;
      for (int64_t i = 0; i < shape_.hidden; ++i) *hidden++ = value(embedding_, at + i);
    }
  }
}

void Decoder::run_layers(float* hidden, const KeysValues& cache, const Columns& columns,
                         int64_t begin, int64_t end, int threads) const {
  Job job(*this, threads);
  job.all = job.kept = {columns.rows, columns.columns, 0, columns.columns};
  if (job.all.count() == 0) return;
  job.hidden = hidden;
  job.cache = &cache;
  job.columns = &columns;
  job.run_layers(begin, end);
}

void Decoder::logits(const float* hidden, int64_t count, void* out, DType dtype,
                     int threads) const {
  if (count == 0) return;
  Job job(*this, threads);
  job.kept = {1, count, 0, count};
  job.hidden = const_cast<float*>(hidden);  // is read only
  job.out = out;
  job.out_dtype = dtype;
  job.run(Job::Phase::kLogits, job.kept, packed_->head);
}

void Decoder::step(const Tokens& tokens, const KeysValues& cache, const Columns& columns,
                   int64_t keep, void* out, DType dtype, int threads) const {
  const int64_t count = columns.rows * columns.columns;
  if (count == 0) return;
  float* const hidden = workspace().hidden.floats(count * shape_.hidden);
  embed(tokens, columns.rows, columns.columns, hidden);
  Job job(*this, threads);
  job.all = {columns.rows, columns.columns, 0, columns.columns};
  job.kept = {columns.rows, keep, columns.columns - keep, columns.columns};
  job.hidden = hidden;
  job.cache = &cache;
  job.columns = &columns;
  job.out = out;
  job.out_dtype = dtype;
  job.run_layers(0, int64_t(packed_->layers.size()));
  if (keep > 0) job.run(Job::Phase::kLogits, job.kept, packed_->head);
}

}  // namespace pipespec::cpu
