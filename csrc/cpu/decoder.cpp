#include "decoder.hpp"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

#include "formats/formats.hpp"
#include "kernels.hpp"
#include "number.hpp"
#include "pool.hpp"
#include "weights.hpp"

namespace pipespec::cpu {
namespace {

constexpr int64_t kPanel = kPanelOutputs;
// Maximum panels of one unit of work: what they compute for a tile stays in the second-level cache.
constexpr int64_t kMaxUnitPanels = 8;
// Panels by which units differ in size: whole pairs of gates and ups.
constexpr int64_t kUnitStep = 4;
// Queries of one unit of attention.
constexpr int64_t kAttendQueries = 64;
// Maximum rows of a narrow forward. It spends most of its time reading the weights, so the cost of
// a round shows.
constexpr int64_t kNarrow = 16;
// Inputs of a tile of rows: they are read once per group, from the second-level cache.
constexpr int64_t kTileBytes = 192 << 10;
constexpr int64_t kMaxTileRows = 48;  // whole blocks of rows
constexpr int64_t kUnitsPerThread = 4;
// Inputs that the caller rounds by itself: another round costs more.
constexpr int64_t kRoundAlone = 1 << 16;
// Columns of all rows that go through the layers at once: what a forward needs next to its
// hidden states stays small.
constexpr int64_t kPieceColumns = 512;

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
  Buffer hidden, joined, qkv, attended, partials, activated, rounded[2];
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
    kFinish,
    kAttend,
    kAttendSpans,
    kMergeSpans,
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
  // What a product reads: the hidden states of a part, normalised, or rows of `stride` floats.
  struct Source {
    const std::vector<float>* norm;
    const float* rows;
    int64_t stride;
  };
  // A unit of a product: rows begin .. end - 1 of the part, and some panels.
  struct Piece {
    int64_t begin, end, panel, panels;
    int64_t rows() const { return end - begin; }
  };

  const DecoderShape& shape;
  const PackedWeights& packed;
  const int threads;
  const DecoderKernels& kernels = cpu::kernels().decoder;
  const PackedKernels& packed_kernels = cpu::packed_kernels();
  Team team{threads - 1, work, this};

  Part all{}, kept{};  // of the hidden states: those fed, and those whose results are wanted
  float* hidden = nullptr;
  const float* side = nullptr;
  const Taps* taps = nullptr;
  const KeysValues* cache = nullptr;
  const Columns* columns = nullptr;
  void* out = nullptr;
  DType out_dtype = DType::kFloat32;
  Part out_part{};  // where in `out` the logits of `kept` belong

  const Layer* layer = nullptr;
  int64_t layer_index = 0;
  float *qkv = nullptr, *attended = nullptr, *activated = nullptr, *partials = nullptr;
  int64_t spans = 0;  // of the longest row

  // Of the present round.
  Phase phase = Phase::kHead;
  uint64_t round = 0;
  int64_t base = 0;
  Part part{};
  Source source{};
  RoundedInputs rounded_inputs[2];
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
    if (count * inputs > kRoundAlone) return run(Phase::kRound, count);
    for (int64_t m = 0; m < count; ++m) round_row(m);
  }

  void round_row(int64_t m) const {
    const float* x = source.rows + m * source.stride;
    if (source.norm != nullptr) {
      const int64_t h = shape.hidden;
      float* const row = scratch().products.floats(h);
      kernels.rms_norm(hidden + part.at(m) * h, source.norm->data(), h, shape.eps, row);
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
    const int64_t fitting =
        matrix.reads_rounded()
            ? RoundedInputs::tile_columns(part.count())
            : std::clamp<int64_t>(kTileBytes / (matrix.inputs * 4) / 6 * 6, 6, kMaxTileRows);
    tile_rows = std::min(fitting, part.count());
    const int64_t tiles = whole(part.count(), tile_rows);
    const int64_t wanted = threads == 1 ? 1 : kUnitsPerThread * threads;
    chunk_panels =
        std::min(rounded(whole(matrix.panels() * tiles, wanted), kUnitStep), kMaxUnitPanels);
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
      case Phase::kRound:
        return round_row(i);
      case Phase::kProject:
        return project(i);
      case Phase::kFinish:
        return finish(i / shape.kv_heads, i % shape.kv_heads);
      case Phase::kAttend: {
        const int64_t pieces = whole(kept.columns, attend_columns());
        const int64_t begin = i % pieces * attend_columns(), head = i / pieces;
        return attend(head / shape.kv_heads, head % shape.kv_heads, begin,
                      std::min(begin + attend_columns(), kept.columns));
      }
      case Phase::kAttendSpans:
        return attend_kernels().attend_spans(whole_task(i / spans), i % spans, i % spans + 1);
      case Phase::kMergeSpans:
        return attend_kernels().merge_spans(whole_task(i));
      case Phase::kFinishAttend:
        finish(i / shape.kv_heads, i % shape.kv_heads);
        return attend(i / shape.kv_heads, i % shape.kv_heads, 0, kept.columns);
      case Phase::kOut:
        return add_product(layer->o, i);
      case Phase::kGateUp:
        return gate_up(i);
      case Phase::kDown:
        return add_product(layer->down, i);
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
    auto run = std::upper_bound(m.runs.begin(), m.runs.end(), panel,
                                [](int64_t p, const Run& r) { return p < r.first; });
    for (--run; run != m.runs.end() && run->first < panel + panels; ++run) {
      const int64_t first = std::max(panel, run->first);
      const int64_t count = std::min(panel + panels, run->first + run->panels) - first;
      float* const out_at = to + (first - panel) * kPanel;
      if (run->format) {
        packed_kernels.products[int(*run->format)](
            run->data + (first - run->first) * run->panel_bytes, m.inputs, count,
            rounded_inputs[traits(*run->format).rounds256].tile(begin), rows, out_at, stride);
        continue;
      }
      const RowProduct multiply = run->bits == 8    ? kernels.product8
                                  : run->bits == 16 ? kernels.product16
                                                    : kernels.product32;
      // The other threads take the units in between.
      const int64_t at = first - run->first;
      const int64_t after = std::min(at + count + (threads - 1) * panels, run->panels - 1);
      multiply(&run->rows[size_t(at)], count, run->rows[size_t(after)], m.inputs, x, x_stride, rows,
               out_at, stride);
    }
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

  // The normalised hidden states of rows begin .. end - 1 of the part. Each thread computes its own
  // copy, which is cheaper than a further round.
  const float* normed(int64_t begin, int64_t end) const {
    Scratch& s = scratch();
    const int64_t h = shape.hidden;
    float* const rows = s.rows.floats((end - begin) * h);
    if (s.round != round || s.begin != begin) {
      for (int64_t m = begin; m < end; ++m)
        kernels.rms_norm(hidden + part.at(m) * h, source.norm->data(), h, shape.eps,
                         rows + (m - begin) * h);
      s.round = round;
      s.begin = begin;
    }
    return rows;
  }

  void project(int64_t i) const {
    const Piece p = piece(layer->qkv, i);
    product(layer->qkv, p.panel, p.panels, p.begin, p.rows(),
            qkv + p.begin * qkv_width() + p.panel * kPanel, qkv_width());
  }

  void project_head(int64_t head) const {
    const int64_t panels = layer->qkv.group_panels, panel = head * panels;
    product(layer->qkv, panel, panels, 0, all.count(), qkv + panel * kPanel, qkv_width());
  }

  int64_t group() const { return shape.heads / shape.kv_heads; }
  float* projected(int64_t row, int64_t column, int64_t head) const {
    return qkv + (row * all.columns + column) * qkv_width() +
           head * layer->qkv.group_panels * kPanel;
  }
  int64_t place(const int64_t (&strides)[4], int64_t row, int64_t head) const {
    return layer_index * strides[0] + row * strides[1] + head * strides[2];
  }

  // Norms of queries and keys, rotation, and the keys and values into the cache.
  void finish(int64_t row, int64_t head) const {
    const int64_t d = shape.head_dim, r = shape.rotary_dim;
    const int64_t key_at = rounded(group() * d, kPanel), value_at = key_at + rounded(d, kPanel);
    for (int64_t j = 0; j < all.columns; ++j) {
      const int64_t position = columns->lengths[row] + all.first + j;
      const float* const cos = columns->cos + position * r;
      const float* const sin = columns->sin + position * r;
      float* const queries = projected(row, j, head);
      float* const key = queries + key_at;
      const auto turn = [&](float* x, const std::vector<float>& norm) {
        if (!norm.empty()) kernels.rms_norm(x, norm.data(), d, shape.eps, x);
        rotate(x, cos, sin, r);
      };
      // Otherwise no output is wanted for these queries.
      if (all.first + j >= kept.first)
        for (int64_t g = 0; g < group(); ++g) turn(queries + g * d, layer->q_norm);
      turn(key, layer->k_norm);
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
    task.queries = projected(row, kept.first - all.first + begin, head);
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
    task.scratch = scratch().scores.floats(attend_kernels().scratch_floats(shape.head_dim));
    task.partials = nullptr;
    task.spans = 0;
    return task;
  }

  void attend(int64_t row, int64_t head, int64_t begin, int64_t end) const {
    if (begin < end) attend_kernels().attend(attend_task(row, head, begin, end));
  }

  // All columns of head number i of all rows, in spans.
  AttendTask whole_task(int64_t i) const {
    AttendTask task = attend_task(i / shape.kv_heads, i % shape.kv_heads, 0, kept.columns);
    task.partials = partials + i * partial_floats();
    task.spans = spans;
    return task;
  }
  int64_t partial_floats() const {
    return kept.columns * group() * spans * attend_kernels().partial_floats(shape.head_dim);
  }

  // hidden += x * matrix
  void add_product(const Matrix& m, int64_t i) const {
    const Piece p = piece(m, i);
    const int64_t width = p.panels * kPanel, h = shape.hidden, first = p.panel * kPanel;
    float* const products = scratch().products.floats(p.rows() * width);
    product(m, p.panel, p.panels, p.begin, p.rows(), products, width);
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
    product(layer->gate_up, p.panel, p.panels, p.begin, p.rows(), products, width);
    for (int64_t r = 0; r < p.rows(); ++r)
      kernels.activate(shape.activation, products + r * width, p.panels / 2,
                       activated + (p.begin + r) * activated_width() + p.panel / 2 * kPanel);
  }

  void head_product(int64_t i) const {
    const Piece p = piece(packed.head, i);
    const int64_t width = p.panels * kPanel, first = p.panel * kPanel;
    float* const products = scratch().products.floats(p.rows() * width);
    product(packed.head, p.panel, p.panels, p.begin, p.rows(), products, width);
    const int64_t count = std::min(width, shape.vocabulary - first);
    for (int64_t r = 0; r < p.rows(); ++r)
      store(out, out_dtype, out_part.at(p.begin + r) * shape.vocabulary + first,
            products + r * width, count);
  }

  void run_layers(int64_t begin, int64_t end) {
    Workspace& w = workspace();
    const Part wanted = kept;
    const int64_t rows = all.count();
    const bool taps_end = std::count(taps->layers.begin(), taps->layers.end(), end) > 0;
    tap(begin);
    for (int64_t l = begin; l < end; ++l) {
      layer = &packed.layers[size_t(l)];
      layer_index = l;
      // After the last layer only the wanted columns are read.
      kept = l + 1 == end && !taps_end ? wanted : all;
      qkv = w.qkv.floats(rows * qkv_width());
      attended = w.attended.floats(rows * attended_width());
      activated = w.activated.floats(rows * activated_width());
      attention();
      if (kept.count() == 0) continue;
      run(Phase::kOut, kept, layer->o, {nullptr, attended, attended_width()});
      run(Phase::kGateUp, kept, layer->gate_up, {&layer->post_norm, nullptr, 0});
      run(Phase::kDown, kept, layer->down, {nullptr, activated, activated_width()});
      tap(l + 1);
    }
    kept = wanted;
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
      kernels.rms_norm(side + all.at(m) * h, layer->side_norm.data(), h, shape.eps, to);
      kernels.rms_norm(state, layer->input_norm.data(), h, shape.eps, to + h);
      if (layer->adds_to_norm) std::memcpy(state, to + h, size_t(h) * sizeof(float));
    }
    return rows;
  }

  void attention() {
    const int64_t heads = all.rows * shape.kv_heads;
    const Matrix& m = layer->qkv;
    const Source inputs = layer->side_norm.empty() ? Source{&layer->input_norm, nullptr, 0}
                                                   : Source{nullptr, joined(), 2 * shape.hidden};
    if (all.count() <= kNarrow && shape.kv_heads % threads == 0) {
      round_inputs(all, m, inputs);
      part = all;
      source = inputs;
      return run(Phase::kHead, shape.kv_heads);
    }
    run(Phase::kProject, all, m, inputs);
    const bool is_narrow = all.count() <= kNarrow;
    const int64_t longest = *std::max_element(columns->lengths, columns->lengths + all.rows);
    spans = whole(longest + all.first + all.columns, kAttendSpan);
    if (is_narrow && (heads % threads == 0 || spans == 1)) return run(Phase::kFinishAttend, heads);
    run(Phase::kFinish, heads);
    if (!is_narrow) return run(Phase::kAttend, heads * whole(kept.columns, attend_columns()));
    if (kept.columns == 0) return;
    partials = workspace().partials.floats(heads * partial_floats());
    run(Phase::kAttendSpans, heads * spans);
    run(Phase::kMergeSpans, heads);
  }
};

Decoder::Decoder(const DecoderShape& shape, const std::vector<LayerWeights>& layers,
                 const EndWeights& ends, int64_t room, int threads)
    : shape_(shape),
      embedding_(ends.embedding),
      embeds_from_head_(ends.embedding.format && ends.embedding.data == ends.head.data),
      packed_(std::make_unique<PackedWeights>(shape, layers, ends, room, threads)) {}

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
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t j = 0; j < columns; ++j, hidden += shape_.hidden)
      embed_one(tokens.at(r, j), hidden);
}

void Decoder::embed_one(int64_t id, float* to) const {
  const int64_t h = shape_.hidden;
  if (!embedding_.format) {
    for (int64_t i = 0; i < h; ++i) to[i] = value(embedding_, id * h + i);
    return;
  }
  const FormatTraits& f = traits(*embedding_.format);
  if (embeds_from_head_) {
    const Run& run = packed_->head.runs[0];
    f.lane_values(run.data + id / kPanel * run.panel_bytes, h, int(id % kPanel), to);
  } else {
    f.row_values(static_cast<const unsigned char*>(embedding_.data) + id * f.row_bytes(h), h, to);
  }
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

void Decoder::run_layers(float* hidden, const float* side, const KeysValues& cache,
                         const Columns& columns, int64_t begin, int64_t end, int threads,
                         const Taps& taps) const {
  if (columns.rows * columns.columns == 0) return;
  Job job(*this, threads);
  job.hidden = hidden;
  job.side = side;
  job.taps = &taps;
  job.cache = &cache;
  job.columns = &columns;
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
  const Job::Source inputs = packed_->norm.empty() ? Job::Source{nullptr, hidden, shape_.hidden}
                                                   : Job::Source{&packed_->norm, nullptr, 0};
  job.run(Job::Phase::kLogits, job.kept, packed_->head, inputs);
}

void Decoder::step(const Tokens& tokens, const KeysValues& cache, const Columns& columns,
                   int64_t keep, void* out, DType dtype, int threads, const Taps& taps) const {
  const int64_t count = columns.rows * columns.columns;
  if (count == 0) return;
  float* const hidden = workspace().hidden.floats(count * shape_.hidden);
  embed(tokens, columns.rows, columns.columns, hidden);
  Job job(*this, threads);
  job.hidden = hidden;
  job.taps = &taps;
  job.cache = &cache;
  job.columns = &columns;
  job.out = out;
  job.out_dtype = dtype;
  run_pieces(job, columns, keep, 0, int64_t(packed_->layers.size()), true);
}

}  // namespace pipespec::cpu
