// The decoder's forward on the host: products against sums in double, and forwards of one model in
// different shapes and with different threads, which must give the same bits. All arrays have
// exactly their size, so that AddressSanitizer sees a read after them.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "cpu/decoder.hpp"
#include "cpu/kernels.hpp"
#include "cpu/pool.hpp"
#include "simd_variants.hpp"

using namespace pipespec::cpu;

namespace {

constexpr DecoderShape kShape{40, 24, 6, 2, 20, 33, 12, 1e-6f, 0.25f, Activation::kSilu, 0.0f};
constexpr int64_t kRoom = 1 << 20;  // for copies
constexpr int64_t kLayers = 2, kRows = 3, kCapacity = 24;

// What a model has beside attention and dense feed-forwards: experts in all layers, or a recurrent
// part in the first one.
enum class Parts { kNone, kExperts, kDelta, kConvolution };

// A small model; `bits` of weights: 16 or 32.
struct Model {
  std::vector<std::vector<float>> held;
  std::vector<LayerWeights> layers;
  EndWeights ends;
  std::mt19937 rng{7};

  Weights random(int64_t count, int bits) {
    std::normal_distribution<float> normal(0.0f, 0.2f);
    std::vector<float> x(static_cast<size_t>(count));
    for (float& value : x) {
      value = normal(rng);
      uint32_t word;
      std::memcpy(&word, &value, 4);
      word = bits == 16 ? word & 0xFFFF0000 : word | 1;
      std::memcpy(&value, &word, 4);
    }
    held.push_back(std::move(x));
    return {held.back().data(), DType::kFloat32};
  }

  // A column has three of eight experts, out of two of four groups, and a shared one with a gate.
  ExpertWeights experts(int bits) {
    const int64_t h = kShape.hidden, count = 8, size = 21, shared = 9;
    ExpertWeights e;
    e.routing.experts = count, e.routing.chosen = 3, e.routing.scores = Scores::kSigmoid;
    e.routing.is_normalised = true, e.routing.groups = 4, e.routing.chosen_groups = 2;
    e.routing.group_best = 2, e.routing.factor = 1.5f;
    e.intermediate = size, e.shared_intermediate = shared, e.stride = 2 * size, e.up_first = size;
    e.limit = 0.3f;
    e.router = random(count * h, bits), e.router_bias = random(count, bits);
    e.choice_bias = random(count, bits);
    e.gate = e.up = random(count * 2 * size * h, bits);
    e.gate_bias = e.up_bias = random(count * 2 * size, bits);
    e.down = random(count * h * size, bits), e.down_bias = random(count * h, bits);
    e.shared_gate = random(shared * h, bits), e.shared_up = random(shared * h, bits);
    e.shared_down = random(h * shared, bits), e.shared_router = random(h, bits);
    return e;
  }

  RecurrentWeights recurrent(bool is_delta, int bits) {
    const int64_t h = kShape.hidden;
    RecurrentWeights r;
    r.taps = 3, r.channels = 301;  // of two units of a short convolution
    int64_t rows = 3 * r.channels, outputs = r.channels;
    if (is_delta) {
      const DeltaShape& d = r.delta = {2, 6, 5, 19};
      outputs = d.value_heads * d.value_dim;
      rows = r.channels = 2 * d.key_heads * d.key_dim + outputs;
      r.gates = random(outputs * h, bits), r.norm = random(d.value_dim, bits);
      r.beta = random(d.value_heads * h, bits), r.decay = random(d.value_heads * h, bits);
      r.decay_log = random(d.value_heads, bits), r.decay_bias = random(d.value_heads, bits);
    } else {
      r.in_bias = random(rows, bits), r.out_bias = random(h, bits);
    }
    r.in = random(rows * h, bits), r.out = random(h * outputs, bits);
    r.kernel = random(r.channels * r.taps, bits), r.kernel_bias = random(r.channels, bits);
    return r;
  }

  explicit Model(int bits, Parts parts = Parts::kNone) {
    const DecoderShape& s = kShape;
    const int64_t q = s.heads * s.head_dim, kv = s.kv_heads * s.head_dim;
    for (int64_t i = 0; i < kLayers; ++i) {
      LayerWeights l;
      l.input_norm = random(s.hidden, bits), l.post_norm = random(s.hidden, bits);
      l.q = random(q * s.hidden, bits), l.k = random(kv * s.hidden, bits);
      l.v = random(kv * s.hidden, bits), l.o = random(s.hidden * q, bits);
      l.gate = random(s.intermediate * s.hidden, bits);
      l.up = random(s.intermediate * s.hidden, bits);
      l.down = random(s.hidden * s.intermediate, bits);
      l.k_bias = random(kv, bits), l.down_bias = random(s.hidden, bits);
      l.q_norm = random(s.head_dim, bits), l.k_norm = random(s.head_dim, bits);
      const Weights none;
      if (parts == Parts::kExperts) {
        l.gate = l.up = l.down = l.down_bias = none;
        l.experts = experts(bits);
      } else if (parts != Parts::kNone && i == 0) {
        l.q = l.k = l.v = l.o = l.k_bias = l.q_norm = l.k_norm = none;
        l.recurrent = recurrent(parts == Parts::kDelta, bits);
      }
      layers.push_back(l);
    }
    ends.embedding = random(s.vocabulary * s.hidden, bits);
    ends.norm = random(s.hidden, bits);
    ends.head = random(s.vocabulary * s.hidden, bits);
  }
};

// The states of one recurrent layer after each of `columns` columns: zeros, and then NaNs.
struct Held {
  std::vector<unsigned char> inputs;
  std::vector<float> states;
  std::vector<int64_t> places;
  States all{};

  Held(const RecurrentWeights& r, int64_t columns, DType dtype) {
    const int64_t item = dtype == DType::kFloat32 ? 4 : 2, slots = columns + 1;
    const DeltaShape& d = r.delta;
    const int64_t size = kRows * d.value_heads * d.key_dim * d.value_dim;
    const int64_t input_size = kRows * r.channels * r.taps * item;
    inputs.assign(size_t(slots * input_size), 0xFF);
    states.assign(size_t(slots * size), std::nanf(""));
    std::fill_n(inputs.begin(), input_size, static_cast<unsigned char>(0));
    std::fill_n(states.begin(), size, 0.0f);
    all = {inputs.data(), dtype, states.data(), slots, kRows, nullptr};
  }

  // For a forward of `fed` columns after `at`. Those after every other column are not kept.
  const States* from(int64_t at, int64_t fed) {
    places.clear();
    for (int64_t r = 0; r < kRows; ++r)
      for (int64_t j = 0; j <= fed; ++j)
        places.push_back(j == 0 || j == fed || j % 2 == 0 ? at + j : -1);
    all.places = places.data();
    return &all;
  }
};

// Feeds `columns` tokens to all rows in pieces of `width`; returns all logits.
std::vector<float> feed(const Decoder& decoder, int64_t columns, int64_t width, DType cache_dtype,
                        int threads, const RecurrentWeights& recurrent = {}) {
  const DecoderShape& s = kShape;
  const int64_t item = cache_dtype == DType::kFloat32 ? 4 : 2;
  const int64_t capacity = std::max(columns, kCapacity);
  const int64_t size = kLayers * kRows * s.kv_heads * capacity * s.head_dim;
  std::vector<unsigned char> keys(size_t(size * item), 0xFF), values = keys;  // NaNs
  KeysValues cache{keys.data(), values.data(), cache_dtype, {}, {}};
  const int64_t strides[4] = {kRows * s.kv_heads * capacity * s.head_dim,
                              s.kv_heads * capacity * s.head_dim, capacity * s.head_dim,
                              s.head_dim};
  std::copy(strides, strides + 4, cache.key_strides);
  std::copy(strides, strides + 4, cache.value_strides);
  std::vector<float> cos(size_t(capacity * s.rotary_dim)), sin = cos;
  for (size_t i = 0; i < cos.size(); ++i) cos[i] = std::cos(float(i)), sin[i] = std::sin(float(i));
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < kRows * columns; ++i) tokens.push_back(int32_t(i * 7 % s.vocabulary));

  Held held(recurrent, columns, cache_dtype);
  std::vector<float> all(size_t(kRows * columns * s.vocabulary));
  for (int64_t at = 0; at < columns; at += width) {
    const int64_t fed = std::min(width, columns - at);
    const std::vector<int64_t> lengths(kRows, at);
    std::vector<float> out(size_t(kRows * fed * s.vocabulary));
    decoder.step({tokens.data() + at, 4, columns, 1}, {cache},
                 {kRows, fed, lengths.data(), cos.data(), sin.data(), capacity}, fed, out.data(),
                 DType::kFloat32, threads, {},
                 recurrent.channels == 0 ? nullptr : held.from(at, fed));
    for (int64_t r = 0; r < kRows; ++r)
      std::copy(out.begin() + r * fed * s.vocabulary, out.begin() + (r + 1) * fed * s.vocabulary,
                all.begin() + (r * columns + at) * s.vocabulary);
  }
  return all;
}

}  // namespace

// Rows of exactly their size, which begin anywhere, and of which the last panel has fewer than 16.
TEST(products_are_sums) {
  std::mt19937 rng(1);
  std::normal_distribution<float> normal;
  with_each_variant([&](const std::string&) {
    for (int64_t inputs : {1, 2, 7, 64, 301, 1100}) {  // the last: more than one part
      for (int64_t outputs : {1, 16, 35, 64}) {
        std::vector<float> weights(size_t(outputs * inputs));
        for (float& w : weights) w = float(std::clamp(int(normal(rng) * 50), -127, 127));
        for (int64_t columns : {1, 2, 3, 4, 6, 7, 13, 50}) {  // the last: more than one pass
          std::vector<float> x(size_t(columns * inputs));
          for (float& value : x) value = normal(rng);
          std::vector<float> expected;
          for (int bits : {32, 16, 8}) {
            const int64_t item = bits / 8, panels = (outputs + 15) / 16, width = panels * 16;
            const int64_t offset = item % 8;  // rows need not begin at a word
            std::vector<unsigned char> memory(size_t(outputs * inputs * item + offset));
            for (int64_t i = 0; i < outputs * inputs; ++i) {
              const float w = weights[size_t(i)];
              uint32_t word;
              std::memcpy(&word, &w, 4);
              const uint16_t high = uint16_t(word >> 16);
              unsigned char* const to = memory.data() + offset + i * item;
              if (bits == 8)
                *to = static_cast<unsigned char>(int8_t(w));
              else
                std::memcpy(to, bits == 16 ? static_cast<const void*>(&high) : &w, size_t(item));
            }
            std::vector<RowPanel> rows;
            for (int64_t p = 0; p < panels; ++p)
              rows.push_back({memory.data() + offset + p * 16 * inputs * item,
                              std::min<int64_t>(outputs - p * 16, 16)});
            std::vector<float> out(size_t(columns * width), NAN);
            const DecoderKernels& kernels = pipespec::cpu::kernels().decoder;
            (bits == 8    ? kernels.product8
             : bits == 16 ? kernels.product16
                          : kernels.product32)(rows.data(), panels, rows[0], inputs, x.data(),
                                               inputs, columns, out.data(), width);
            // Equal values give equal bits.
            if (bits == 32) expected = out;
            bool right = std::memcmp(out.data(), expected.data(), out.size() * 4) == 0;
            for (int64_t c = 0; c < columns; ++c) {
              for (int64_t o = 0; o < width; ++o) {
                double sum = 0, size = 0;
                for (int64_t k = 0; o < outputs && k < inputs; ++k) {
                  const double term =
                      double(x[size_t(c * inputs + k)]) * double(weights[size_t(o * inputs + k)]);
                  sum += term, size += std::abs(term);
                }
                right = right && std::abs(out[size_t(c * width + o)] - sum) <= size * 1e-5;
              }
            }
            if (!CHECK(right)) return;
          }
        }
      }
    }
  });
}

TEST(forwards_of_all_shapes_give_the_same_bits) {
  with_each_variant([&](const std::string&) {
    for (int bits : {16, 32}) {
      const Model model(bits);
      const Decoder decoder(kShape, model.layers, model.ends, kRoom, 2);
      CHECK_EQ(decoder.weight_bits(), bits);
      for (DType dtype : check::kinds<DType>({DType::kFloat32, DType::kBFloat16})) {
        const std::vector<float> expected = feed(decoder, kCapacity, 1, dtype, 1);
        for (float x : expected)
          if (!CHECK(std::isfinite(x))) return;
        for (int64_t width : {1, 2, 5, 24})
          for (int threads : {1, 2, 3}) {
            const std::vector<float> got = feed(decoder, kCapacity, width, dtype, threads);
            if (!CHECK(std::memcmp(got.data(), expected.data(), got.size() * 4) == 0)) return;
          }
      }
    }
  });
}

TEST(parts_give_the_same_bits_in_all_shapes) {
  with_each_variant([&](const std::string&) {
    for (const Parts parts : {Parts::kExperts, Parts::kDelta, Parts::kConvolution}) {
      const Model model(32, parts);
      const RecurrentWeights& recurrent = model.layers[0].recurrent;
      const Decoder decoder(kShape, model.layers, model.ends, kRoom, 3);
      for (const DType dtype : check::kinds<DType>({DType::kFloat32, DType::kBFloat16})) {
        const std::vector<float> expected = feed(decoder, kCapacity, 1, dtype, 1, recurrent);
        CHECK(std::all_of(expected.begin(), expected.end(),
                          [](float x) { return std::isfinite(x); }));
        for (int64_t width : {3, 7, 24})
          for (int threads : {1, 3})
            CHECK(feed(decoder, kCapacity, width, dtype, threads, recurrent) == expected);
      }
    }
  });
}

// More columns than go through the layers at once, where those of a piece end between kept states.
TEST(long_forwards_of_parts_give_the_same_bits) {
  constexpr int64_t kColumns = 400;
  for (const Parts parts :
       check::kinds<Parts>({Parts::kExperts, Parts::kConvolution, Parts::kDelta})) {
    const Model model(16, parts);
    const RecurrentWeights& recurrent = model.layers[0].recurrent;
    const Decoder decoder(kShape, model.layers, model.ends, kRoom, 2);
    const std::vector<float> expected = feed(decoder, kColumns, 50, DType::kFloat32, 1, recurrent);
    CHECK(feed(decoder, kColumns, kColumns, DType::kFloat32, 2, recurrent) == expected);
  }
}

// Four threads for six heads of keys: narrow forwards share the spans of positions among them.
TEST(spans_give_the_same_bits_on_any_threads) {
  constexpr int64_t kColumns = kAttendSpan + 20;
  const Model model(16);
  const Decoder decoder(kShape, model.layers, model.ends, kRoom, 4);
  with_each_variant([&](const std::string&) {
    for (DType dtype : check::kinds<DType>({DType::kFloat32, DType::kBFloat16})) {
      const std::vector<float> expected = feed(decoder, kColumns, kColumns, dtype, 1);
      for (float x : expected)
        if (!CHECK(std::isfinite(x))) return;
      for (int threads : {1, 4})
        if (!CHECK(feed(decoder, kColumns, 5, dtype, threads) == expected)) return;
    }
  });
}

TEST(several_callers_share_a_decoder) {
  const Model model(16);
  const Decoder decoder(kShape, model.layers, model.ends, kRoom, 2);
  const std::vector<float> expected = feed(decoder, kCapacity, 3, DType::kFloat32, 1);
  std::vector<std::thread> callers;
  for (int c = 0; c < 3; ++c) {
    callers.emplace_back([&, c] {
      for (int round = 0; round < 10; ++round)
        if (!CHECK(feed(decoder, kCapacity, 3, DType::kFloat32, 1 + (c + round) % 3) == expected))
          return;
    });
  }
  for (std::thread& t : callers) t.join();
}

// Units that wait for each other need two threads. A helper that has waited for long between two
// rounds comes back for the next one.
TEST(a_helper_works_in_each_round_of_a_job) {
  struct Meeting {
    std::atomic<int> arrived{0};
    std::atomic<bool> missed{false};
  } meeting;
  Team team(
      1,
      [](void* context, int64_t) {
        Meeting& of = *static_cast<Meeting*>(context);
        of.arrived.fetch_add(1);
        const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
        while (of.arrived.load() < 2) {
          if (std::chrono::steady_clock::now() > end) of.missed = true;
          if (of.missed) return;
          std::this_thread::yield();
        }
      },
      &meeting);
  for (int round = 0; round < 4 && CHECK(!meeting.missed); ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(round * 10));
    meeting.arrived = 0;
    team.run(2);
  }
}

TEST_MAIN()
