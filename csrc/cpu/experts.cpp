#include "experts.hpp"

#include <cmath>

#include "buffer.hpp"
#include "kernels.hpp"

namespace pipespec::cpu {
namespace {

constexpr int64_t kPanel = kPanelOutputs;
// Pieces of a product that each thread has, so that they end at about the same time.
constexpr int64_t kPiecesPerThread = 4;
// Numbers that the caller handles by itself: another round costs more.
constexpr int64_t kAlone = 1 << 16;

int64_t whole(int64_t n, int64_t of) { return (n + of - 1) / of; }

// The two kinds of matrices of an expert, with what a product with them reads and writes.
enum Part { kGateUp, kDown };

struct Memory {
  Buffer logits, gathered, activated, outputs, products, rounded[2];
};

Memory& memory() {
  thread_local Memory of_thread;
  return of_thread;
}

class Step {
 public:
  Step(const ExpertLayer& layer, const float* x, int64_t count, int64_t hidden, const Rounds& run,
       int threads)
      : layer_(layer), x_(x), count_(count), hidden_(hidden), run_(run), threads_(threads) {
    for (const Expert& e : layer.experts) width_ = std::max(width_, whole(e.intermediate, kPanel));
    width_ *= kPanel;
  }

  void operator()(float* out) {
    choose();
    const int64_t places = grouping_.begins.back();
    gathered_ = memory().gathered.floats(places * hidden_);
    each(places, hidden_, [this](int64_t p) {
      std::copy_n(x_ + grouping_.column[size_t(p)] * hidden_, hidden_, gathered_ + p * hidden_);
    });
    activated_ = memory().activated.floats(places * width_);
    outputs_ = memory().outputs.floats(places * hidden_);
    multiply_all(kGateUp, gathered_, hidden_);
    multiply_all(kDown, activated_, width_);
    each(count_, hidden_ * chosen_, [this, out](int64_t c) { add_up(c, out + c * hidden_); });
  }

 private:
  // What one expert's product needs.
  struct Work {
    const Matrix* matrix;
    const float* from;  // [rows, stride]
    int64_t stride;
    Pieces pieces;
    int64_t begin, rows, first;  // first place, places, first unit
    RoundedInputs rounded[2] = {};
  };
  struct Piece {
    int64_t begin, rows, panel, panels;
    Piece(const Work& w, int64_t unit)
        : begin(unit / w.pieces.chunks * w.pieces.tile_rows),
          rows(std::min(w.pieces.tile_rows, w.rows - begin)),
          panel(unit % w.pieces.chunks * w.pieces.chunk_panels),
          panels(std::min(w.pieces.chunk_panels, w.matrix->panels() - panel)) {}
    Tile tile(const Work& w) const {
      return {w.from + begin * w.stride, w.stride, w.rounded, begin, rows};
    }
  };
  // The one that unit or place number `i` belongs to.
  static const Work& find(const std::vector<Work>& works, int64_t Work::* first, int64_t i) {
    return *(std::upper_bound(works.begin(), works.end(), i,
                              [first](int64_t at, const Work& w) { return at < w.*first; }) -
             1);
  }

  int64_t wanted() const { return threads_ == 1 ? 1 : kPiecesPerThread * threads_; }

  // A round of `units`, or none where that is too little work.
  void each(int64_t units, int64_t numbers, const std::function<void(int64_t)>& work) {
    if (units * numbers > kAlone) return run_(units, work);
    for (int64_t i = 0; i < units; ++i) work(i);
  }

  void choose() {
    const Matrix& router = layer_.router;
    const int64_t width = router.panels() * kPanel;
    float* const logits = memory().logits.floats(count_ * width);
    std::vector<Work> work{{&router, x_, hidden_, {router, count_, wanted()}, 0, count_, 0}};
    round_all(work);
    run_(work[0].pieces.count(), [&](int64_t i) {
      const Piece p(work[0], i);
      multiply(router, p.panel, p.panels, p.tile(work[0]), threads_,
               logits + p.begin * width + p.panel * kPanel, width);
    });
    const Routing& routing = layer_.routing;
    const float* const bias = layer_.bias.empty() ? nullptr : layer_.bias.data();
    chosen_ = routing.chosen + (layer_.has_shared ? 1 : 0);
    std::vector<int32_t> chosen(size_t(count_ * chosen_));
    weights_.resize(chosen.size());
    each(count_, routing.experts * 16, [&](int64_t c) {
      int32_t* const experts = chosen.data() + c * chosen_;
      float* const weights = weights_.data() + c * chosen_;
      const float* const of_column = logits + c * width;
      route(routing, of_column, bias, experts, weights);
      if (!layer_.has_shared) return;
      experts[chosen_ - 1] = int32_t(routing.experts);
      weights[chosen_ - 1] = 1.0f;
      if (!layer_.gates_shared) return;
      const float gate = of_column[whole(routing.experts, kPanel) * kPanel];
      weights[chosen_ - 1] = 1.0f / (1.0f + std::exp(-gate));
    });
    grouping_.assign(chosen, count_, int64_t(layer_.experts.size()));
  }

  // The products of all active experts with the rows of their places.
  void multiply_all(Part part, const float* rows, int64_t stride) {
    std::vector<Work> works;
    int64_t units = 0;
    const int64_t active = int64_t(grouping_.active.size());
    for (int64_t i = 0; i < active; ++i) {
      const Expert& expert = layer_.experts[size_t(grouping_.active[size_t(i)])];
      const Matrix& m = part == kGateUp ? expert.gate_up : expert.down;
      const int64_t begin = grouping_.begins[size_t(i)];
      const int64_t count = grouping_.begins[size_t(i) + 1] - begin;
      const Pieces pieces(m, count, whole(wanted(), active));
      works.push_back({&m, rows + begin * stride, stride, pieces, begin, count, units});
      units += pieces.count();
    }
    round_all(works);
    run_(units, [&](int64_t unit) {
      const Work& work = find(works, &Work::first, unit);
      multiply_piece(work, Piece(work, unit - work.first), part);
    });
  }

  // Rounds the rows of all of them where their matrices read them so.
  void round_all(std::vector<Work>& works) {
    const auto bytes = [](const Work& w, int wide) {
      const int64_t inputs = w.matrix->inputs;
      return !w.matrix->rounds[wide]
                 ? 0
                 : whole(RoundedInputs::memory_bytes(wide != 0, inputs, w.rows), 64) * 64;
    };
    bool is_rounded = false;
    for (int wide = 0; wide < 2; ++wide) {
      int64_t all = 0;
      for (const Work& w : works) all += bytes(w, wide);
      if (all == 0) continue;
      is_rounded = true;
      auto* at = reinterpret_cast<unsigned char*>(memory().rounded[wide].floats(all / 4));
      for (Work& w : works) {
        if (!w.matrix->rounds[wide]) continue;
        w.rounded[wide] = RoundedInputs(wide != 0, w.matrix->inputs, w.rows, at);
        at += bytes(w, wide);
      }
    }
    if (!is_rounded) return;
    each(works.back().begin + works.back().rows, works[0].matrix->inputs, [&](int64_t place) {
      const Work& w = find(works, &Work::begin, place);
      const int64_t row = place - w.begin;
      for (const RoundedInputs& to : w.rounded)
        if (to) to.round(w.from + row * w.stride, row);
    });
  }

  void multiply_piece(const Work& w, const Piece& p, Part part) const {
    const int64_t width = p.panels * kPanel;
    float* const products = memory().products.floats(p.rows * width);
    multiply(*w.matrix, p.panel, p.panels, p.tile(w), threads_, products, width);
    const int64_t first = p.panel * kPanel, place = w.begin + p.begin;
    if (part == kGateUp) {
      if (layer_.limit > 0.0f) clamp(products, p.rows * width);
      for (int64_t r = 0; r < p.rows; ++r)
        cpu::kernels().decoder.activate(layer_.activation, products + r * width, true, p.panels / 2,
                                        activated_ + (place + r) * width_ + first / 2);
      return;
    }
    const int64_t count = std::min(width, hidden_ - first);
    for (int64_t r = 0; r < p.rows; ++r)
      std::copy_n(products + r * width, count, outputs_ + (place + r) * hidden_ + first);
  }

  // Of gates and ups in turns: the former up to the limit, the latter within it, plus one.
  void clamp(float* products, int64_t count) const {
    for (int64_t p = 0; p < count; p += 2 * kPanel) {
      float *const gates = products + p, *const ups = gates + kPanel;
      for (int64_t i = 0; i < kPanel; ++i) {
        gates[i] = std::min(gates[i], layer_.limit);
        ups[i] = std::clamp(ups[i], -layer_.limit, layer_.limit) + 1.0f;
      }
    }
  }

  // In the order of the experts, and the shared one last.
  void add_up(int64_t c, float* to) const {
    std::fill_n(to, hidden_, 0.0f);
    for (int64_t i = 0; i < chosen_; ++i) {
      const float weight = weights_[size_t(c * chosen_ + i)];
      const float* const from = outputs_ + grouping_.place[size_t(c * chosen_ + i)] * hidden_;
      for (int64_t k = 0; k < hidden_; ++k) to[k] += weight * from[k];
    }
  }

  const ExpertLayer& layer_;
  const float* const x_;
  const int64_t count_, hidden_;
  const Rounds& run_;
  const int threads_;
  int64_t width_ = 0, chosen_ = 0;  // of activated rows; experts of a column, the shared one too
  std::vector<float> weights_;
  Grouping grouping_;
  float *gathered_ = nullptr, *activated_ = nullptr, *outputs_ = nullptr;
};

}  // namespace

void run_experts(const ExpertLayer& layer, const float* x, int64_t count, int64_t hidden,
                 const Rounds& run, int threads, float* out) {
  Step(layer, x, count, hidden, run, threads)(out);
}

}  // namespace pipespec::cpu
