#include "recurrent.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "buffer.hpp"
#include "kernels.hpp"
#include "number.hpp"

namespace pipespec::cpu {
namespace {

constexpr int64_t kPanel = kPanelOutputs;
// Channels of a short convolution that are one unit of work.
constexpr int64_t kPartChannels = 256;
// Columns that a unit works on at once: what they need stays in the second-level cache.
constexpr int64_t kBlockColumns = 32;

int64_t whole(int64_t n, int64_t of) { return (n + of - 1) / of; }
int64_t rounded(int64_t n, int64_t to) { return whole(n, to) * to; }

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

struct Memory {
  Buffer raw, mixed, outputs, states;
};

Memory& memory() {
  thread_local Memory of_thread;
  return of_thread;
}

// Channels that are neighbours both in the layer and in a unit.
struct Segment {
  int64_t channel, at, width;
};

class Unit {
 public:
  Unit(const RecurrentLayer& layer, const States& states, int64_t number,
       const RecurrentColumns& columns, int64_t row, int64_t part)
      : layer_(layer),
        states_(states),
        number_(number),
        columns_(columns),
        row_(row),
        part_(part),
        places_(states.places + row * (columns.fed + 1)) {
    const DeltaShape& d = layer.delta;
    if (!layer.is_delta()) {
      const int64_t begin = part * kPartChannels;
      add(begin, std::min(kPartChannels, layer.channels - begin));
    } else {
      add(part * d.key_dim, d.key_dim);
      add((d.key_heads + part) * d.key_dim, d.key_dim);
      add(2 * d.key_heads * d.key_dim + part * d.group() * d.value_dim, d.group() * d.value_dim);
    }
  }

  void run() {
    raw_ = memory().raw.floats((layer_.taps + kBlockColumns) * width_);
    mixed_ = memory().mixed.floats(kBlockColumns * width_);
    load_inputs();
    begin_states();
    for (int64_t j = 0; j < columns_.columns; j += kBlockColumns) {
      const int64_t count = std::min(kBlockColumns, columns_.columns - j);
      convolve(j, count);
      if (layer_.is_delta())
        run_heads(j, count);
      else
        multiply_outputs(j, count);
      // The last inputs of this block come before those of the next one.
      std::memmove(raw_, raw_ + count * width_, size_t(layer_.taps * width_) * sizeof(float));
    }
  }

 private:
  void add(int64_t channel, int64_t width) {
    segments_[segment_count_++] = {channel, width_, width};
    width_ += width;
  }

  const float* in(int64_t j) const {
    return columns_.in + (row_ * columns_.columns + j) * columns_.in_stride;
  }
  float* out(int64_t j) const {
    const int64_t kept = columns_.columns - columns_.kept_from;
    return columns_.out + (row_ * kept + j - columns_.kept_from) * layer_.outputs();
  }

  // The slot that holds the states after `count` columns. Where a part of a forward ends between
  // two slots, its states lie in the next slot until the next part continues. Negative: there is
  // none.
  int64_t slot_after(int64_t count) const {
    const bool is_end = count == columns_.first || count == columns_.first + columns_.columns;
    if (!is_end || count == 0) return places_[count];
    const int64_t* const end = places_ + columns_.fed + 1;
    const int64_t* const found =
        std::find_if(places_ + count, end, [](int64_t slot) { return slot >= 0; });
    return found == end ? -1 : *found;
  }
  int64_t begin_slot() const {
    const int64_t slot = slot_after(columns_.first);
    return slot < 0 ? places_[0] : slot;
  }
  int64_t place(int64_t slot) const {
    return (number_ * states_.slots + slot) * states_.rows + row_;
  }

  int64_t input_at(int64_t slot, int64_t channel) const {
    return (place(slot) * layer_.channels + channel) * layer_.taps;
  }

  void load_inputs() {
    const int64_t slot = begin_slot();
    for (const Segment* s = segments_; s != segments_ + segment_count_; ++s) {
      for (int64_t i = 0; i < s->width; ++i) {
        const int64_t from = input_at(slot, s->channel + i);
        for (int64_t t = 0; t < layer_.taps; ++t)
          raw_[t * width_ + s->at + i] =
              states_.dtype == DType::kFloat32
                  ? static_cast<const float*>(states_.inputs)[from + t]
                  : float_of_bfloat16(static_cast<const uint16_t*>(states_.inputs)[from + t]);
      }
    }
  }

  // The inputs up to column `j` of the block, into a slot.
  void keep_inputs(int64_t slot, int64_t j) const {
    const float* const raw = raw_ + (j + 1) * width_;
    for (const Segment* s = segments_; s != segments_ + segment_count_; ++s) {
      for (int64_t i = 0; i < s->width; ++i) {
        const int64_t to = input_at(slot, s->channel + i);
        for (int64_t t = 0; t < layer_.taps; ++t) {
          const float x = raw[t * width_ + s->at + i];
          if (states_.dtype == DType::kFloat32)
            static_cast<float*>(states_.inputs)[to + t] = x;
          else
            static_cast<uint16_t*>(states_.inputs)[to + t] = bfloat16_of(x);
        }
      }
    }
  }

  // Columns `first` on of this part of the forward: their inputs, as precise as they are kept, and
  // the convolution over them.
  void convolve(int64_t first, int64_t count) {
    const RecurrentKernels& kernels = cpu::kernels().recurrent;
    for (int64_t j = 0; j < count; ++j) {
      float* const row = raw_ + (layer_.taps + j) * width_;
      const float* const from = in(first + j);
      const int64_t third = 2 * rounded(layer_.channels, kPanel);
      for (const Segment* s = segments_; s != segments_ + segment_count_; ++s) {
        for (int64_t i = 0; i < s->width; ++i) {
          float x = from[s->channel + i];
          if (!layer_.is_delta()) x *= from[third + s->channel + i];
          row[s->at + i] = states_.dtype == DType::kFloat32 ? x : float_of_bfloat16(bfloat16_of(x));
        }
        const float* const bias =
            layer_.kernel_bias.empty() ? nullptr : layer_.kernel_bias.data() + s->channel;
        kernels.convolve(raw_ + (j + 1) * width_ + s->at, width_, layer_.kernel.data() + s->channel,
                         layer_.channels, layer_.taps, bias, s->width, layer_.is_delta(),
                         mixed_ + j * width_ + s->at);
      }
      const int64_t slot = slot_after(columns_.first + first + j + 1);
      if (slot >= 0) keep_inputs(slot, j);
    }
  }

  void multiply_outputs(int64_t first, int64_t count) const {
    const Segment& s = segments_[0];
    const int64_t second = rounded(layer_.channels, kPanel);
    for (int64_t j = std::max<int64_t>(columns_.kept_from - first, 0); j < count; ++j) {
      const float* const factor = in(first + j) + second + s.channel;
      for (int64_t i = 0; i < s.width; ++i)
        out(first + j)[s.channel + i] = factor[i] * mixed_[j * width_ + i];
    }
  }

  float* state(int64_t slot, int64_t head) const {
    const DeltaShape& d = layer_.delta;
    return states_.states + (place(slot) * d.value_heads + head) * d.key_dim * d.value_dim;
  }

  void begin_states() {
    const DeltaShape& d = layer_.delta;
    if (!layer_.is_delta()) return;
    const int64_t size = rounded(d.key_dim * d.value_dim, kPanel);
    float* const scratch = memory().states.floats(d.group() * size);
    for (int64_t g = 0; g < d.group(); ++g) {
      now_.push_back(state(begin_slot(), part_ * d.group() + g));
      scratch_.push_back(scratch + g * size);
    }
  }

  void run_heads(int64_t first, int64_t count) {
    const DeltaShape& d = layer_.delta;
    const DecoderKernels& kernels = cpu::kernels().decoder;
    float* const outputs = memory().outputs.floats(count * d.value_dim);
    for (int64_t j = 0; j < count; ++j) {
      float *const query = mixed_ + j * width_, *const key = query + d.key_dim;
      // The norms of both are one over the root of the sum of squares plus 1e-6.
      kernels.rms_norm(query, layer_.query_norm.data(), d.key_dim, 1e-6f / float(d.key_dim), query);
      kernels.rms_norm(key, layer_.key_norm.data(), d.key_dim, 1e-6f / float(d.key_dim), key);
    }
    for (int64_t g = 0; g < d.group(); ++g) run_head(first, count, g, outputs);
  }

  void run_head(int64_t first, int64_t count, int64_t g, float* outputs) {
    const DeltaShape& d = layer_.delta;
    const int64_t head = part_ * d.group() + g;
    const int64_t gates_at = rounded(layer_.channels, kPanel);
    const int64_t beta_at = gates_at + rounded(d.value_heads * d.value_dim, kPanel);
    const int64_t decay_at = beta_at + rounded(d.value_heads, kPanel);
    float decay[kBlockColumns], beta[kBlockColumns];
    float* after[kBlockColumns + 1];
    after[0] = now_[size_t(g)];
    for (int64_t j = 0; j < count; ++j) {
      const float* const from = in(first + j);
      const float x = from[decay_at + head] + layer_.decay_bias[size_t(head)];
      decay[j] = std::exp(layer_.decay[size_t(head)] * softplus(x));
      beta[j] = sigmoid(from[beta_at + head]);
      const int64_t slot = slot_after(columns_.first + first + j + 1);
      after[j + 1] = slot < 0 ? scratch_[size_t(g)] : state(slot, head);
    }
    now_[size_t(g)] = after[count];
    const float* const values = mixed_ + 2 * d.key_dim + g * d.value_dim;
    const RecurrentKernels& kernels = cpu::kernels().recurrent;
    kernels.delta_rule({mixed_, mixed_ + d.key_dim, values, width_, decay, beta, after, count,
                        d.key_dim, d.value_dim, outputs, d.value_dim});
    for (int64_t j = std::max<int64_t>(columns_.kept_from - first, 0); j < count; ++j) {
      float* const to = out(first + j) + d.output(head) * d.value_dim;
      cpu::kernels().decoder.rms_norm(outputs + j * d.value_dim, layer_.norm.data(), d.value_dim,
                                      layer_.eps, to);
      kernels.gate(in(first + j) + gates_at + head * d.value_dim, d.value_dim, true, to);
    }
  }

  const RecurrentLayer& layer_;
  const States& states_;
  const int64_t number_;
  const RecurrentColumns& columns_;
  const int64_t row_, part_;
  const int64_t* const places_;
  Segment segments_[3];
  int segment_count_ = 0;
  int64_t width_ = 0;  // channels of this unit
  float *raw_ = nullptr, *mixed_ = nullptr;
  std::vector<float*> now_, scratch_;  // per head
};

}  // namespace

int64_t RecurrentLayer::parts() const {
  return is_delta() ? delta.key_heads : whole(channels, kPartChannels);
}

void run_recurrent(const RecurrentLayer& layer, const States& states, int64_t number,
                   const RecurrentColumns& columns, int64_t row, int64_t part) {
  Unit(layer, states, number, columns, row, part).run();
}

}  // namespace pipespec::cpu
