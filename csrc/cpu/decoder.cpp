#include "decoder.hpp"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

#include "buffer.hpp"
#include "experts.hpp"
#include "formats/formats.hpp"
#include "kernels.hpp"
#include "number.hpp"
#include "pool.hpp"
#include "product.hpp"
#include "weights.hpp"

namespace pipespec::cpu {
namespace {

constexpr int64_t kPanel = kPanelOutputs;
// Queries of one unit of attention.
constexpr int64_t kAttendQueries = 64;
// Maximum rows of a narrow forward. It spends most of its time reading the weights, so the cost of
// a round shows.
constexpr int64_t kNarrow = 16;
constexpr int64_t kUnitsPerThread = 4;
// Inputs that the caller rounds by itself: another round costs more.
constexpr int64_t kRoundAlone = 1 << 16;
// Columns of all rows that go through the layers at once: what a forward needs next to its
// hidden states stays small.
constexpr int64_t kPieceColumns = 512;

int64_t whole(int64_t n, int64_t of) { return (n + of - 1) / of; }
int64_t rounded(int64_t n, int64_t to) { return whole(n, to) * to; }

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
  Buffer hidden, joined, qkv, attended, partials, activated, added, rounded[2];
  Buffer queries, absorbed, values;  // of latent attention
  Buffer inputs;                     // of each layer, beside the hidden states
};

Workspace& workspace() {
  thread_local Workspace of_thread;
  return of_thread;
}

std::atomic<uint64_t> g_round{0};

// x[0 .. dim), rotated by the angles of its position: transformers' rotate_half.
void rotate(float* x, const float* cos, const float* sin, int64_t dim) {
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cos[i] - b * sin[i];
    x[i + half] = b * cos[i + half] + a * sin[i + half];
  }
}

// The same where neighbours make a pair: elements 2 i and 2 i + 1 turn by angle i.
void rotate_neighbours(float* x, const float* cos, const float* sin, int64_t dim) {
  for (int64_t i = 0; i < dim / 2; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1];
    x[2 * i] = a * cos[i] - b * sin[i];
    x[2 * i + 1] = b * cos[i] + a * sin[i];
  }
}

// to[0 .. width) = scale * row `id` of a matrix.
void read_row(const Weights& w, int64_t id, int64_t width, float scale, float* to) {
  if (!w.format) {
    for (int64_t i = 0; i < width; ++i) to[i] = scale * value(w, id * width + i);
    return;
  }
  const FormatTraits& f = traits(*w.format);
  f.row_values(static_cast<const unsigned char*>(w.data) + id * f.row_bytes(width), width, to);
  for (int64_t i = 0; i < width; ++i) to[i] *= scale;
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

struct Decoder::Job {
  enum class Phase {
    kHead,
    kRound,
    kProject,
    kQueries,
    kNormHeads,
    kFinish,
    kAttend,
    kAttendSpans,
    kMergeSpans,
    kFinishAttend,
    kAddProduct,
    kGateUp,
    kAdd,
    kGate,
    kInputs,
    kInputGate,
    kLogits,
    kCall
  };

  // Rows of the hidden states: of each row of the batch `columns` from `first` on, of `stride`.
  struct Part {
    int64_t rows, columns, first, stride;
    int64_t count() const { return rows * columns; }
    int64_t at(int64_t m) const { return m / columns * stride + first + m % columns; }
  };
  // What a product reads: the hidden states of a part, normalised, or rows of `stride` floats.
  struct Source {
    const Norm* norm;
    const float* rows;
    int64_t stride;
  };
  // A unit of a product: rows begin .. end - 1 of the part, and some panels.
  struct Piece {
    int64_t begin, end, panel, panels;
    int64_t rows() const { return end - begin; }
  };

  const Decoder& decoder;
  const DecoderShape& shape;
  const PackedWeights& packed;
  const int threads;
  const DecoderKernels& kernels = cpu::kernels().decoder;
  Team team{threads - 1, work, this};

  Part all{}, kept{};  // of the hidden states: those fed, and those whose results are wanted
  float* hidden = nullptr;
  const float* side = nullptr;
  const Taps* taps = nullptr;
  const Tokens* tokens = nullptr;  // of per-layer inputs
  const Stores* stores = nullptr;
  const KeysValues* cache = nullptr;  // of the present layer
  const Columns* columns = nullptr;
  const States* states = nullptr;
  void* out = nullptr;
  DType out_dtype = DType::kFloat32;
  Part out_part{};  // where in `out` the logits of `kept` belong

  const Layer* layer = nullptr;
  float *qkv = nullptr, *attended = nullptr, *activated = nullptr, *partials = nullptr;
  float *queries = nullptr, *absorbed = nullptr;  // of latent attention
  float* added = nullptr;                         // [part, H], what a norm behind a product reads
  const Norm* behind = nullptr;
  const Matrix* adding = nullptr;
  Part read{};              // of the hidden states: those with per-layer inputs
  float* inputs = nullptr;  // [read, panels of the inputs of all layers]
  int64_t spans = 0;        // of the longest row

  // Of the present round.
  Phase phase = Phase::kHead;
  const std::function<void(int64_t)>* call = nullptr;
  uint64_t round = 0;
  int64_t base = 0;
  Part part{};
  Source source{};
  RoundedInputs rounded_inputs[2];
  Pieces pieces;

  Job(const Decoder& of, int threads_)
      : decoder(of), shape(of.shape_), packed(*of.packed_), threads(threads_) {}

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

  // Rounds what a product with blocks of weights reads.
  void round_inputs(const Part& of, const Matrix& matrix, const Source& from) {
    if (!matrix.reads_rounded()) return;
    part = of;
    source = from;
    const int64_t count = part.count(), inputs = matrix.inputs;
    for (int wide = 0; wide < 2; ++wide) {
      rounded_inputs[wide] = {};
      if (!matrix.rounds[wide]) continue;
      const int64_t bytes = RoundedInputs::memory_bytes(wide != 0, inputs, count);
      rounded_inputs[wide] = RoundedInputs(
          wide != 0, inputs, count,
          reinterpret_cast<unsigned char*>(workspace().rounded[wide].floats(whole(bytes, 4))));
    }
    run_rows(Phase::kRound, count, inputs);
  }

  // A unit per row of `width` floats: for few, another round of the team costs more.
  void run_rows(Phase next, int64_t count, int64_t width) {
    if (count * width > kRoundAlone) return run(next, count);
    phase = next;
    for (int64_t m = 0; m < count; ++m) unit(m);
  }

  void round_row(int64_t m) const {
    const float* x = source.rows + m * source.stride;
    if (source.norm != nullptr) {
      const int64_t h = shape.hidden;
      float* const row = scratch().products.floats(h);
      normalize(*source.norm, hidden + part.at(m) * h, row);
      x = row;
    }
    for (const RoundedInputs& to : rounded_inputs)
      if (to) to.round(x, m);
  }

  // A product: tiles of rows times chunks of panels.
  void run(Phase next, const Part& of, const Matrix& matrix, const Source& from) {
    round_inputs(of, matrix, from);
    part = of;
    source = from;
    pieces = Pieces(matrix, part.count(), threads == 1 ? 1 : kUnitsPerThread * threads);
    run(next, pieces.count());
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
      case Phase::kRound:
        return round_row(i);
      case Phase::kProject:
        return project(i);
      case Phase::kQueries:
        return project_queries(i);
      case Phase::kNormHeads:
        return norm_heads(i);
      case Phase::kFinish:
        return finish(i / layer->sizes.kv_heads, i % layer->sizes.kv_heads);
      case Phase::kAttend: {
        const int64_t pieces = whole(kept.columns, attend_columns());
        const int64_t begin = i % pieces * attend_columns(), head = i / pieces;
        return attend(head / layer->sizes.kv_heads, head % layer->sizes.kv_heads, begin,
                      std::min(begin + attend_columns(), kept.columns));
      }
      case Phase::kAttendSpans:
        return attend_kernels().attend_spans(whole_task(i / spans), i % spans, i % spans + 1);
      case Phase::kMergeSpans:
        return attend_kernels().merge_spans(whole_task(i));
      case Phase::kFinishAttend:
        finish(i / layer->sizes.kv_heads, i % layer->sizes.kv_heads);
        return attend(i / layer->sizes.kv_heads, i % layer->sizes.kv_heads, 0, kept.columns);
      case Phase::kAddProduct:
        return add_product(*adding, i);
      case Phase::kGateUp:
        return activate(layer->gate_up, layer->is_gated, activated_width(), i);
      case Phase::kAdd:
        return add_normed(i);
      case Phase::kGate:
        return gate_attended(i);
      case Phase::kInputs:
        return project_inputs(i);
      case Phase::kInputGate:
        return gate_inputs(i);
      case Phase::kLogits:
        return head_product(i);
      case Phase::kCall:
        return (*call)(i);
    }
  }

  const Matrix& projection() const {
    if (layer->latent.is_used()) return layer->latent.in;
    return layer->recurrent.is_used() ? layer->recurrent.in : layer->qkv;
  }
  int64_t qkv_width() const { return projection().panels() * kPanel; }
  int64_t attended_width() const {
    return layer->recurrent.is_used() ? layer->recurrent.outputs()
                                      : shape.heads * layer->sizes.head_dim;
  }
  int64_t activated_width() const { return rounded(layer->sizes.intermediate, kPanel); }

  Piece piece(const Matrix& matrix, int64_t i) const {
    const int64_t begin = i / pieces.chunks * pieces.tile_rows;
    const int64_t panel = i % pieces.chunks * pieces.chunk_panels;
    return {begin, std::min(begin + pieces.tile_rows, part.count()), panel,
            std::min(pieces.chunk_panels, matrix.panels() - panel)};
  }

  // Rows begin .. begin + rows - 1 of the part, times some panels.
  void product(const Matrix& m, int64_t panel, int64_t panels, int64_t begin, int64_t rows,
               float* to, int64_t stride) const {
    const float* x = nullptr;
    int64_t x_stride = source.stride;
    if (m.reads_floats) {
      const bool is_normed = source.norm != nullptr;
      x = is_normed ? normed(begin, begin + rows) : source.rows + begin * x_stride;
      if (is_normed) x_stride = shape.hidden;
    }
    multiply(m, panel, panels, {x, x_stride, rounded_inputs, begin, rows}, threads, to, stride);
  }

  // to = the norm of x, [H]; x itself where there is none.
  void normalize(const Norm& norm, const float* x, float* to) const {
    const int64_t h = shape.hidden;
    const float* const bias = norm.bias.empty() ? nullptr : norm.bias.data();
    if (norm.weight.empty())
      std::memcpy(to, x, size_t(h) * sizeof(float));
    else
      normalize(norm.weight.data(), bias, x, h, to);
  }
  void normalize(const float* weight, const float* bias, const float* x, int64_t n,
                 float* to) const {
    if (shape.norm == NormKind::kRms)
      kernels.rms_norm(x, weight, n, shape.eps, to);
    else
      kernels.layer_norm(x, weight, bias, n, shape.eps, to);
  }

  // The normalised hidden states of rows begin .. end - 1 of the part. Each thread computes its own
  // copy, which is cheaper than a further round.
  const float* normed(int64_t begin, int64_t end) const {
    Scratch& s = scratch();
    const int64_t h = shape.hidden;
    float* const rows = s.rows.floats((end - begin) * h);
    if (s.round != round || s.begin != begin) {
      for (int64_t m = begin; m < end; ++m)
        normalize(*source.norm, hidden + part.at(m) * h, rows + (m - begin) * h);
      s.round = round;
      s.begin = begin;
    }
    return rows;
  }

  void project(int64_t i) const {
    const Piece p = piece(projection(), i);
    product(projection(), p.panel, p.panels, p.begin, p.rows(),
            qkv + p.begin * qkv_width() + p.panel * kPanel, qkv_width());
  }

  void project_head(int64_t head) const {
    const int64_t panels = layer->qkv.group_panels, panel = head * panels;
    product(layer->qkv, panel, panels, 0, all.count(), qkv + panel * kPanel, qkv_width());
  }

  int64_t group() const { return shape.heads / layer->sizes.kv_heads; }
  float* projected(int64_t row, int64_t column, int64_t head) const {
    return qkv + (row * all.columns + column) * qkv_width() +
           head * layer->qkv.group_panels * kPanel;
  }
  int64_t place(const int64_t (&strides)[4], int64_t row, int64_t head) const {
    return layer->store * strides[0] + row * strides[1] + head * strides[2];
  }

  int64_t key_at() const { return rounded(group() * layer->sizes.head_dim, kPanel); }

  // The norms over all heads of the queries, and of the keys, of column m of all rows.
  void norm_heads(int64_t m) const {
    const auto over_all = [&](const Norm& norm, int64_t at, int64_t size) {
      if (norm.weight.empty()) return;
      float* const x = scratch().products.floats(size * layer->sizes.kv_heads);
      const auto part = [&](int64_t head) {
        return projected(m / all.columns, m % all.columns, head) + at;
      };
      for (int64_t head = 0; head < layer->sizes.kv_heads; ++head)
        std::copy_n(part(head), size, x + head * size);
      normalize(norm.weight.data(), nullptr, x, size * layer->sizes.kv_heads, x);
      for (int64_t head = 0; head < layer->sizes.kv_heads; ++head)
        std::copy_n(x + head * size, size, part(head));
    };
    over_all(layer->q_norm, 0, group() * layer->sizes.head_dim);
    over_all(layer->k_norm, key_at(), layer->sizes.head_dim);
  }

  // x, rotated by the angles of a position, where the layer rotates.
  void rotate_at(float* x, int64_t position) const {
    if (layer->rope < 0) return;
    const int64_t r = layer->sizes.rotary_dim,
                  at = (layer->rope * columns->positions + position) * shape.rotary_dim;
    (shape.rotates_pairs ? rotate_neighbours : rotate)(x, columns->cos + at, columns->sin + at, r);
  }

  // The norm of one head, number `head` of its kind, and its rotation at a position.
  void norm_and_rotate(float* x, const Norm& norm, int64_t head, int64_t position) const {
    const int64_t d = layer->sizes.head_dim;
    const bool has_norm = !norm.weight.empty() && layer->head_norms != HeadNorms::kJoint;
    const auto normalize_head = [&] {
      const int64_t at = layer->head_norms == HeadNorms::kOwn ? head * d : 0;
      normalize(norm.weight.data() + at, nullptr, x, d, x);
    };
    if (has_norm && !shape.norms_rotated) normalize_head();
    rotate_at(x, position);
    if (has_norm && shape.norms_rotated) normalize_head();
  }

  void finish_query(float* x, int64_t head, int64_t position) const {
    norm_and_rotate(x, layer->q_norm, head, position);
    if (columns->query_factors == nullptr) return;
    const float factor = columns->query_factors[position];
    for (int64_t i = 0; i < layer->sizes.head_dim; ++i) x[i] *= factor;
  }

  // Norms of queries and keys, rotation, and the keys and values into the cache.
  void finish(int64_t row, int64_t head) const {
    const int64_t d = layer->sizes.head_dim, value_at = key_at() + rounded(d, kPanel);
    for (int64_t j = 0; j < all.columns; ++j) {
      const int64_t position = columns->lengths[row] + all.first + j;
      float* const queries = projected(row, j, head);
      float* const key = queries + key_at();
      // Otherwise no output is wanted for these queries.
      if (all.first + j >= kept.first)
        for (int64_t g = 0; g < group(); ++g)
          finish_query(queries + g * d, head * group() + g, position);
      if (!layer->stores_keys) continue;
      norm_and_rotate(key, layer->k_norm, head, position);
      if (!layer->v_norm.weight.empty()) {
        float* const values = queries + value_at;
        normalize(layer->v_norm.weight.data(), nullptr, values, d, values);
      }
      store(cache->keys, cache->dtype,
            place(cache->key_strides, row, head) + position * cache->key_strides[3], key, d);
      store(cache->values, cache->dtype,
            place(cache->value_strides, row, head) + position * cache->value_strides[3],
            queries + value_at, d);
    }
  }

  const AttendKernels& attend_kernels() const {
    return cache->dtype == DType::kFloat32 ? kernels.attend32 : kernels.attend16;
  }
  int64_t attend_columns() const { return std::max<int64_t>(kAttendQueries / group(), 1); }

  // Columns begin .. end - 1 of those kept.
  AttendTask attend_task(int64_t row, int64_t head, int64_t begin, int64_t end) const {
    const int64_t item = item_bytes(cache->dtype), width = attended_width();
    AttendTask task;
    const bool is_latent = layer->latent.is_used();
    const int64_t column = kept.first - all.first + begin;
    task.queries =
        is_latent ? absorbed + (row * all.columns + column) * width : projected(row, column, head);
    task.query_stride = is_latent ? width : qkv_width();
    task.keys = static_cast<const char*>(cache->keys) + place(cache->key_strides, row, head) * item;
    // A latent is the value; the rotated part behind it takes part, and its sum is not read.
    task.values = is_latent ? task.keys
                            : static_cast<const char*>(cache->values) +
                                  place(cache->value_strides, row, head) * item;
    task.key_stride = cache->key_strides[3];
    task.value_stride = cache->value_strides[3];
    task.positions = columns->lengths[row] + kept.first + begin + 1;
    task.window = layer->window;
    task.columns = end - begin;
    task.group = group();
    task.head_dim = layer->sizes.head_dim;
    task.scale = shape.scale;
    task.softcap = shape.softcap;
    if (!layer->sinks.empty()) task.sinks = layer->sinks.data() + head * group();
    task.out =
        attended + (row * kept.columns + begin) * width + head * group() * layer->sizes.head_dim;
    task.out_stride = width;
    task.scratch = scratch().scores.floats(attend_kernels().scratch_floats(layer->sizes.head_dim));
    task.partials = nullptr;
    task.spans = 0;
    return task;
  }

  void attend(int64_t row, int64_t head, int64_t begin, int64_t end) const {
    if (begin < end) attend_kernels().attend(attend_task(row, head, begin, end));
  }

  // All columns of head number i of all rows, in spans.
  AttendTask whole_task(int64_t i) const {
    AttendTask task =
        attend_task(i / layer->sizes.kv_heads, i % layer->sizes.kv_heads, 0, kept.columns);
    task.partials = partials + i * partial_floats();
    task.spans = spans;
    return task;
  }
  int64_t partial_floats() const {
    return kept.columns * group() * spans * attend_kernels().partial_floats(layer->sizes.head_dim);
  }

  // hidden += x * matrix, or the product as it is where a norm stands behind it.
  void add_product(const Matrix& m, int64_t i) const {
    const Piece p = piece(m, i);
    const int64_t width = p.panels * kPanel, h = shape.hidden, first = p.panel * kPanel;
    float* const products = scratch().products.floats(p.rows() * width);
    product(m, p.panel, p.panels, p.begin, p.rows(), products, width);
    const int64_t count = std::min(width, h - first);
    for (int64_t r = 0; r < p.rows(); ++r) {
      if (!behind->weight.empty())
        std::copy_n(products + r * width, count, added + (p.begin + r) * h + first);
      else
        add(products + r * width, count, hidden + part.at(p.begin + r) * h + first);
    }
  }

  void add(const float* x, int64_t count, float* to) const {
    for (int64_t k = 0; k < count; ++k) to[k] += shape.residual_scale * x[k];
  }

  // hidden += row m of what was added, or its norm
  void add_normed(int64_t m) const {
    const int64_t h = shape.hidden;
    if (!behind->weight.empty()) normalize(*behind, added + m * h, added + m * h);
    add(added + m * h, h, hidden + part.at(m) * h);
  }

  // hidden += the norm `behind_` of x * matrix, of the kept columns.
  void run_added(const Matrix& m, const float* x, int64_t stride, const Norm& behind_) {
    behind = &behind_, adding = &m;
    added = workspace().added.floats(behind->weight.empty() ? 0 : kept.count() * shape.hidden);
    run(Phase::kAddProduct, kept, m, {nullptr, x, stride});
    if (behind->weight.empty()) return;
    run_rows(Phase::kAdd, kept.count(), shape.hidden);
  }

  // activated[part, to_width] of a product with a matrix.
  void activate(const Matrix& m, bool is_gated, int64_t to_width, int64_t i) const {
    const Piece p = piece(m, i);
    const int64_t width = p.panels * kPanel, matrices = is_gated ? 2 : 1;
    float* const products = scratch().products.floats(p.rows() * width);
    product(m, p.panel, p.panels, p.begin, p.rows(), products, width);
    for (int64_t r = 0; r < p.rows(); ++r)
      kernels.activate(shape.activation, products + r * width, is_gated, p.panels / matrices,
                       activated + (p.begin + r) * to_width + p.panel / matrices * kPanel);
  }

  // ---- per-layer inputs

  int64_t per_layer_width() const { return rounded(shape.per_layer, kPanel); }
  int64_t inputs_width() const { return packed.per_layer_in.panels() * kPanel; }

  void project_inputs(int64_t i) const {
    const Piece p = piece(packed.per_layer_in, i);
    product(packed.per_layer_in, p.panel, p.panels, p.begin, p.rows(),
            inputs + p.begin * inputs_width() + p.panel * kPanel, inputs_width());
  }

  // Of row m: norms of what the embedding gives, and the sums with the inputs' own embeddings.
  void finish_inputs(int64_t m, int64_t layers) const {
    const int64_t n = shape.per_layer;
    float* const own = scratch().products.floats(decoder.per_layer_width_);
    decoder.embed_per_layer(tokens->at(m / read.columns, read.first + m % read.columns), own);
    for (int64_t l = 0; l < layers; ++l) {
      float* const x = inputs + m * inputs_width() + l * per_layer_width();
      for (int64_t k = 0; k < n; ++k) x[k] *= shape.per_layer_in_scale;
      normalize(packed.per_layer_in_norm.weight.data(), nullptr, x, n, x);
      for (int64_t k = 0; k < n; ++k) x[k] = (x[k] + own[l * n + k]) * shape.per_layer_sum_scale;
    }
  }

  // The inputs of all layers, from the embeddings.
  void read_inputs() {
    static const Norm none;
    read = all;
    inputs = workspace().inputs.floats(all.count() * inputs_width());
    run(Phase::kInputs, all, packed.per_layer_in, {&none, nullptr, 0});
    const int64_t layers = int64_t(packed.layers.size());
    const std::function<void(int64_t)> finish_work = [this, layers](int64_t m) {
      finish_inputs(m, layers);
    };
    call = &finish_work;
    run_rows(Phase::kCall, all.count(), inputs_width());
  }

  void gate_inputs(int64_t i) const {
    const Piece p = piece(layer->per_layer_gate, i);
    const int64_t width = per_layer_width(), first = p.panel * kPanel;
    activate(layer->per_layer_gate, false, width, i);
    const int64_t of_layer = (layer - packed.layers.data()) * width;
    for (int64_t m = p.begin; m < p.end; ++m) {
      const int64_t column = m % kept.columns + kept.first - read.first;
      const float* const own =
          inputs + (m / kept.columns * read.columns + column) * inputs_width() + of_layer;
      for (int64_t k = first; k < first + p.panels * kPanel; ++k)
        activated[m * width + k] *= own[k];
    }
  }

  // hidden += what the layer makes of its inputs; then the factor of its output.
  void add_inputs() {
    static const Norm none;
    const int64_t h = shape.hidden, width = per_layer_width();
    if (width > 0) {
      run(Phase::kInputGate, kept, layer->per_layer_gate, {&none, nullptr, 0});
      run_added(layer->per_layer_out, activated, width, layer->per_layer_norm);
    }
    if (layer->output_scale == 1.0f) return;
    const std::function<void(int64_t)> scale_work = [this, h](int64_t m) {
      float* const x = hidden + kept.at(m) * h;
      for (int64_t k = 0; k < h; ++k) x[k] *= layer->output_scale;
    };
    call = &scale_work;
    run_rows(Phase::kCall, kept.count(), h);
  }

  // ---- the layers

  void head_product(int64_t i) const {
    const Piece p = piece(packed.head, i);
    const int64_t width = p.panels * kPanel, first = p.panel * kPanel;
    float* const products = scratch().products.floats(p.rows() * width);
    product(packed.head, p.panel, p.panels, p.begin, p.rows(), products, width);
    const int64_t count = std::min(width, shape.vocabulary - first);
    if (shape.logit_scale != 1.0f)
      for (int64_t k = 0; k < p.rows() * width; ++k) products[k] *= shape.logit_scale;
    if (shape.logit_softcap > 0.0f) kernels.cap(products, p.rows() * width, shape.logit_softcap);
    for (int64_t r = 0; r < p.rows(); ++r)
      store(out, out_dtype, out_part.at(p.begin + r) * shape.vocabulary + first,
            products + r * width, count);
  }

  void run_layers(int64_t begin, int64_t end) {
    Workspace& w = workspace();
    const Part wanted = kept;
    // Behind this layer only the wanted columns are read.
    int64_t last = begin;
    for (int64_t l = begin; l < end; ++l) {
      const Layer& of = packed.layers[size_t(l)];
      if (of.stores_keys || of.recurrent.is_used()) last = l;
    }
    for (int64_t tapped : taps->layers) last = std::max(last, tapped);
    tap(begin);
    if (shape.per_layer > 0) read_inputs();
    for (int64_t l = begin; l < end; ++l) {
      layer = &packed.layers[size_t(l)];
      kept = l >= last ? wanted : all;
      // What stores nothing computes no other columns.
      if (!layer->stores_keys && !layer->recurrent.is_used()) all = kept;
      const int64_t rows = all.count();
      if (rows == 0) break;
      if (!layer->recurrent.is_used()) cache = &(*stores)[size_t(layer->store_kind)];
      qkv = w.qkv.floats(rows * qkv_width());
      attended = w.attended.floats(rows * attended_width());
      activated = w.activated.floats(rows * std::max(activated_width(), per_layer_width()));
      if (layer->recurrent.is_used())
        recurrence();
      else if (layer->latent.is_used())
        latent_attention();
      else
        attention();
      if (kept.count() == 0) continue;
      if (layer->gates_attention) run_rows(Phase::kGate, kept.count(), attended_width());
      // In a parallel layer, the feed-forward reads what the attention has read.
      if (shape.is_parallel) run_gate_up();
      const Matrix& o = layer->recurrent.is_used() ? layer->recurrent.out : layer->o;
      if (layer->latent.is_used())
        run_added(o, values_of_latents(), layer->latent.outputs(), layer->o_norm);
      else
        run_added(o, attended, attended_width(), layer->o_norm);
      if (layer->experts.is_used()) {
        run_experts();
      } else {
        if (!shape.is_parallel) run_gate_up();
        run_added(layer->down, activated, activated_width(), layer->down_norm);
      }
      add_inputs();
      tap(l + 1);
    }
    kept = wanted;
  }

  void run_gate_up() {
    const bool reads_input = shape.is_parallel && layer->post_norm.weight.empty();
    const Norm& norm = reads_input ? layer->input_norm : layer->post_norm;
    run(Phase::kGateUp, kept, layer->gate_up, {&norm, nullptr, 0});
  }

  // What a recurrent layer has in place of the attention.
  void recurrence() {
    const RecurrentLayer& r = layer->recurrent;
    run(Phase::kProject, all, r.in, {&layer->input_norm, nullptr, 0});
    const RecurrentColumns fed{
        columns->columns, all.first, all.columns, kept.first - all.first, qkv,
        qkv_width(),      attended};
    const std::function<void(int64_t)> units_work = [&](int64_t i) {
      cpu::run_recurrent(r, *states, layer->store, fed, i / r.parts(), i % r.parts());
    };
    call = &units_work;
    run(Phase::kCall, all.rows * r.parts());
  }

  // Factors of row m of what the attention gives.
  void gate_attended(int64_t m) const {
    const int64_t size = group() * layer->sizes.head_dim;
    const int64_t at = key_at() + 2 * rounded(layer->sizes.head_dim, kPanel);
    const int64_t column = m % kept.columns + kept.first - all.first;
    for (int64_t head = 0; head < layer->sizes.kv_heads; ++head)
      cpu::kernels().recurrent.gate(projected(m / kept.columns, column, head) + at, size, false,
                                    attended + m * attended_width() + head * size);
  }

  // The feed-forward of experts, of the kept columns.
  void run_experts() {
    const int64_t h = shape.hidden, count = kept.count();
    const Rounds rounds = [this](int64_t units, const std::function<void(int64_t)>& units_work) {
      call = &units_work;
      run(Phase::kCall, units);
    };
    float* const x = workspace().joined.floats(count * h);
    added = workspace().added.floats(count * h);
    behind = &layer->down_norm;
    part = kept;
    for (int64_t m = 0; m < count; ++m)
      normalize(layer->post_norm, hidden + part.at(m) * h, x + m * h);
    cpu::run_experts(layer->experts, x, count, h, rounds, threads, added);
    run_rows(Phase::kAdd, count, h);
  }

  // Copies the hidden states of all columns to the taps of one layer.
  void tap(int64_t layer_number) const {
    const int64_t h = shape.hidden, count = int64_t(taps->layers.size());
    for (int64_t i = 0; i < count; ++i) {
      if (taps->layers[size_t(i)] != layer_number) continue;
      for (int64_t m = 0; m < all.count(); ++m) {
        const int64_t column = (all.first + m % all.columns) * taps->stride;
        store(taps->out, taps->dtype, taps->begin[m / all.columns] + column + i * h,
              hidden + all.at(m) * h, h);
      }
    }
  }

  // What queries, keys and values of a layer with side inputs read: [rows, 2 * H].
  const float* joined() const {
    const int64_t h = shape.hidden;
    float* const rows = workspace().joined.floats(all.count() * 2 * h);
    for (int64_t m = 0; m < all.count(); ++m) {
      float *const to = rows + m * 2 * h, *const state = hidden + all.at(m) * h;
      normalize(layer->side_norm, side + all.at(m) * h, to);
      normalize(layer->input_norm, state, to + h);
      if (layer->adds_to_norm) std::memcpy(state, to + h, size_t(h) * sizeof(float));
    }
    return rows;
  }

  void attention() {
    const int64_t heads = all.rows * layer->sizes.kv_heads;
    const Matrix& m = layer->qkv;
    const Source inputs = layer->side_norm.weight.empty()
                              ? Source{&layer->input_norm, nullptr, 0}
                              : Source{nullptr, joined(), 2 * shape.hidden};
    const bool is_joint = layer->head_norms == HeadNorms::kJoint;
    if (all.count() <= kNarrow && layer->sizes.kv_heads % threads == 0 && !is_joint) {
      round_inputs(all, m, inputs);
      part = all;
      source = inputs;
      return run(Phase::kHead, layer->sizes.kv_heads);
    }
    run(Phase::kProject, all, m, inputs);
    if (is_joint) run_rows(Phase::kNormHeads, all.count(), qkv_width());
    const bool is_narrow = all.count() <= kNarrow;
    const int64_t longest = *std::max_element(columns->lengths, columns->lengths + all.rows);
    spans = whole(longest + all.first + all.columns, kAttendSpan);
    if (is_narrow && (heads % threads == 0 || spans == 1)) return run(Phase::kFinishAttend, heads);
    run(Phase::kFinish, heads);
    attend_finished();
  }

  // The attention of queries whose keys and values are in the cache.
  void attend_finished() {
    const int64_t heads = all.rows * layer->sizes.kv_heads;
    if (all.count() > kNarrow)
      return run(Phase::kAttend, heads * whole(kept.columns, attend_columns()));
    if (kept.columns == 0) return;
    partials = workspace().partials.floats(heads * partial_floats());
    run(Phase::kAttendSpans, heads * spans);
    run(Phase::kMergeSpans, heads);
  }

  int64_t queries_stride() const {
    const LatentLayer& l = layer->latent;
    return (l.query_rank > 0 ? l.queries : l.in).panels() * kPanel;
  }

  void project_queries(int64_t i) const {
    const Matrix& m = layer->latent.queries;
    const Piece p = piece(m, i);
    product(m, p.panel, p.panels, p.begin, p.rows(),
            queries + p.begin * queries_stride() + p.panel * kPanel, queries_stride());
  }

  // Norms of the latents of column m of all rows, the rotation, and what the cache holds of it.
  void finish_latents(int64_t m) const {
    const LatentLayer& l = layer->latent;
    const int64_t row = m / all.columns;
    const int64_t position = columns->lengths[row] + all.first + m % all.columns;
    const int64_t first =
        l.query_rank > 0 ? l.query_rank : shape.heads * (l.plain + shape.rotary_dim);
    float *const of_queries = qkv + m * qkv_width(), *const key =
                                                         of_queries + rounded(first, kPanel);
    if (l.query_rank > 0)
      kernels.rms_norm(of_queries, l.query_norm.data(), l.query_rank, l.eps, of_queries);
    rotate_at(key + l.rank, position);
    kernels.rms_norm(key, l.norm.data(), l.rank, l.eps, key);
    store(cache->keys, cache->dtype,
          place(cache->key_strides, row, 0) + position * cache->key_strides[3], key, l.rank);
    store(cache->values, cache->dtype,
          place(cache->value_strides, row, 0) + position * cache->value_strides[3], key + l.rank,
          shape.rotary_dim);
  }

  // The queries of one head, as they are multiplied with latents, and their rotated parts.
  void absorb(int64_t head) const {
    const LatentLayer& l = layer->latent;
    const int64_t size = l.plain + shape.rotary_dim;
    multiply_head(l.keys[size_t(head)], queries + head * size, queries_stride(), all.count(),
                  l.rank, absorbed + head * layer->sizes.head_dim, attended_width());
    for (int64_t m = 0; m < all.count(); ++m) {
      float* const to = absorbed + m * attended_width() + head * layer->sizes.head_dim + l.rank;
      std::copy_n(queries + m * queries_stride() + head * size + l.plain, shape.rotary_dim, to);
      rotate_at(to, columns->lengths[m / all.columns] + all.first + m % all.columns);
    }
  }

  // to[row, 0 .. count) = the product of a row with a matrix of floats.
  void multiply_head(const Matrix& m, const float* x, int64_t x_stride, int64_t rows, int64_t count,
                     float* to, int64_t stride) const {
    const int64_t width = m.panels() * kPanel;
    constexpr int64_t kRows = 64;
    for (int64_t begin = 0; begin < rows; begin += kRows) {
      const int64_t some = std::min(kRows, rows - begin);
      float* const products = scratch().products.floats(some * width);
      multiply(m, 0, m.panels(), {x + begin * x_stride, x_stride, nullptr, 0, some}, 1, products,
               width);
      for (int64_t r = 0; r < some; ++r)
        std::copy_n(products + r * width, count, to + (begin + r) * stride);
    }
  }

  void latent_attention() {
    const LatentLayer& l = layer->latent;
    const std::function<void(int64_t)> finish_work = [this](int64_t m) { finish_latents(m); };
    const std::function<void(int64_t)> absorb_work = [this](int64_t head) { absorb(head); };
    run(Phase::kProject, all, l.in, {&layer->input_norm, nullptr, 0});
    call = &finish_work;
    run_rows(Phase::kCall, all.count(), qkv_width());
    queries = qkv;
    if (l.query_rank > 0) {
      queries = workspace().queries.floats(all.count() * l.queries.panels() * kPanel);
      run(Phase::kQueries, all, l.queries, {nullptr, qkv, qkv_width()});
    }
    if (kept.count() == 0) return;
    absorbed = workspace().absorbed.floats(all.count() * attended_width());
    call = &absorb_work;
    run(Phase::kCall, shape.heads);
    const int64_t longest = *std::max_element(columns->lengths, columns->lengths + all.rows);
    spans = whole(longest + all.first + all.columns, kAttendSpan);
    attend_finished();
  }

  // The values of what the attention gives, which are latents: [kept, heads * value_dim].
  const float* values_of_latents() {
    const LatentLayer& l = layer->latent;
    float* const values = workspace().values.floats(kept.count() * l.outputs());
    const std::function<void(int64_t)> work = [&](int64_t head) {
      multiply_head(l.values[size_t(head)], attended + head * layer->sizes.head_dim,
                    attended_width(), kept.count(), l.value_dim, values + head * l.value_dim,
                    l.outputs());
    };
    call = &work;
    run(Phase::kCall, shape.heads);
    return values;
  }
};

Decoder::Decoder(const DecoderShape& shape, const std::vector<LayerWeights>& layers,
                 const EndWeights& ends, int64_t room, int threads)
    : shape_(shape),
      embedding_(ends.embedding),
      per_layer_embedding_(ends.per_layer_embedding),
      per_layer_width_(ends.per_layer_width),
      embeds_from_head_(ends.embedding.format && ends.embedding.data == ends.head.data),
      packed_(std::make_unique<PackedWeights>(shape, layers, ends, room, threads)) {}

Decoder::~Decoder() = default;

int64_t Decoder::bytes() const { return packed_->bytes; }

int Decoder::weight_bits() const { return packed_->weight_bits; }

void Decoder::check(const Tokens& tokens, int64_t rows, int64_t columns) const {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = 0; j < columns; ++j) {
      const int64_t id = tokens.at(r, j);
      if (id < 0 || id >= shape_.vocabulary)
        throw std::invalid_argument("tokens[" + std::to_string(r) + ", " + std::to_string(j) +
                                    "] is " + std::to_string(id) + ", but the vocabulary has " +
                                    std::to_string(shape_.vocabulary) + " entries");
    }
  }
}

void Decoder::embed(const Tokens& tokens, int64_t rows, int64_t columns, float* hidden) const {
  check(tokens, rows, columns);  // before anything is written
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t j = 0; j < columns; ++j, hidden += shape_.hidden)
      embed_one(tokens.at(r, j), hidden);
}

void Decoder::embed_one(int64_t id, float* to) const {
  const int64_t h = shape_.hidden;
  if (embeds_from_head_) {
    const Run& run = packed_->head.runs[0];
    traits(*embedding_.format)
        .lane_values(run.data + id / kPanel * run.panel_bytes, h, int(id % kPanel), to);
    for (int64_t i = 0; i < h; ++i) to[i] *= shape_.embedding_scale;
  } else {
    read_row(embedding_, id, h, shape_.embedding_scale, to);
  }
}

void Decoder::embed_per_layer(int64_t id, float* to) const {
  read_row(per_layer_embedding_, id, per_layer_width_, shape_.per_layer_scale, to);
}

void Decoder::run_pieces(Job& job, const Columns& columns, int64_t keep, int64_t begin, int64_t end,
                         bool has_head) const {
  const int64_t n = columns.columns, step = std::max<int64_t>(kPieceColumns / columns.rows, 1);
  for (int64_t first = 0; first < n; first += step) {
    const int64_t last = std::min(first + step, n),
                  kept = std::clamp<int64_t>(last - (n - keep), 0, last - first);
    job.all = {columns.rows, last - first, first, n};
    job.kept = {columns.rows, kept, last - kept, n};
    job.run_layers(begin, end);
    if (!has_head || kept == 0) continue;
    job.out_part = {columns.rows, kept, last - kept - (n - keep), keep};
    job.run(Job::Phase::kLogits, job.kept, packed_->head, {&packed_->norm, nullptr, 0});
  }
}

void Decoder::run_layers(float* hidden, const float* side, const Tokens* tokens,
                         const Stores& stores, const Columns& columns, int64_t begin, int64_t end,
                         int threads, const Taps& taps, const States* states) const {
  if (columns.rows * columns.columns == 0) return;
  if (tokens != nullptr) check(*tokens, columns.rows, columns.columns);
  Job job(*this, threads);
  job.hidden = hidden;
  job.side = side;
  job.tokens = tokens;
  job.taps = &taps;
  job.stores = &stores;
  job.columns = &columns;
  job.states = states;
  run_pieces(job, columns, columns.columns, begin, end, false);
}

void Decoder::logits(const float* hidden, int64_t count, void* out, DType dtype,
                     int threads) const {
  if (count == 0) return;
  Job job(*this, threads);
  job.kept = job.out_part = {1, count, 0, count};
  job.hidden = const_cast<float*>(hidden);  // is read only
  job.out = out;
  job.out_dtype = dtype;
  const Job::Source inputs = packed_->norm.weight.empty()
                                 ? Job::Source{nullptr, hidden, shape_.hidden}
                                 : Job::Source{&packed_->norm, nullptr, 0};
  job.run(Job::Phase::kLogits, job.kept, packed_->head, inputs);
}

void Decoder::step(const Tokens& tokens, const Stores& stores, const Columns& columns, int64_t keep,
                   void* out, DType dtype, int threads, const Taps& taps,
                   const States* states) const {
  const int64_t count = columns.rows * columns.columns;
  if (count == 0) return;
  float* const hidden = workspace().hidden.floats(count * shape_.hidden);
  embed(tokens, columns.rows, columns.columns, hidden);
  Job job(*this, threads);
  job.hidden = hidden;
  job.tokens = &tokens;
  job.taps = &taps;
  job.stores = &stores;
  job.columns = &columns;
  job.states = states;
  job.out = out;
  job.out_dtype = dtype;
  run_pieces(job, columns, keep, 0, int64_t(packed_->layers.size()), true);
}

}  // namespace pipespec::cpu
