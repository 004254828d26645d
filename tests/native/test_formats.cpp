// Products with blocks of weights: equal bits with all instructions, in all widths and with all
// threads, near the sums in double. Arrays have exactly their size, so that AddressSanitizer sees a
// read after them.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.hpp"
#include "cpu/formats/formats.hpp"
#include "simd_variants.hpp"

using namespace pipespec::cpu;

namespace {

struct Free {
  void operator()(unsigned char* p) const { std::free(p); }
};
using Bytes = std::unique_ptr<unsigned char[], Free>;

Bytes lines(int64_t bytes) {
  return Bytes(static_cast<unsigned char*>(std::aligned_alloc(64, size_t(bytes + 63) / 64 * 64)));
}

// Where the numbers in float16 of a block begin.
std::vector<int64_t> halves(Format format) {
  switch (format) {
    case Format::kQ4_1:
    case Format::kQ5_1:
    case Format::kQ4_K:
    case Format::kQ5_K:
      return {0, 2};
    case Format::kQ6_K:
      return {208};
    case Format::kQ3_K:
      return {108};
    case Format::kQ2_K:
      return {80, 82};
    case Format::kMXFP4:
    case Format::kNVFP4:
      return {};
    default:
      return {0};
  }
}

// Random blocks, all codes among them, with scales of about 1.
std::vector<unsigned char> random_blocks(Format format, int64_t count, std::mt19937& rng) {
  const int64_t bytes = traits(format).block_bytes;
  std::vector<unsigned char> blocks(size_t(count * bytes));
  for (unsigned char& byte : blocks) byte = static_cast<unsigned char>(rng());
  for (int64_t b = 0; b < count; ++b) {
    unsigned char* const block = blocks.data() + b * bytes;
    for (int64_t at : halves(format))
      block[at + 1] = static_cast<unsigned char>((block[at + 1] & 0x83) | 0x38);
    if (format == Format::kMXFP4) block[0] = static_cast<unsigned char>(120 + block[0] % 8);
    if (format == Format::kNVFP4)
      for (int i : {0, 4}) {
        const float scale = float(block[i]) / 128.0f - 1.0f;
        std::memcpy(block + i, &scale, 4);
      }
  }
  return blocks;
}

std::vector<float> random_inputs(int64_t count, std::mt19937& rng) {
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<size_t>(count));
  for (float& value : x) value = normal(rng);
  return x;
}

}  // namespace

TEST(products_have_the_same_bits_with_all_instructions) {
  std::mt19937 rng(1);
  for (int f = 0; f < kFormats; ++f) {
    const FormatTraits& t = traits(Format(f));
    for (int64_t blocks : {1, 2, 3, 5}) {
      const int64_t inputs = blocks * t.block, panels = 3, columns = 41;
      const int64_t panel_bytes = t.panel_bytes(inputs);
      const auto rows = random_blocks(Format(f), panels * 16 * blocks, rng);
      const Bytes packed = lines(panels * panel_bytes);
      for (int64_t o = 0; o < panels * 16; ++o)
        t.put(rows.data() + o * t.row_bytes(inputs), inputs, int(o % 16),
              packed.get() + o / 16 * panel_bytes);
      const auto x = random_inputs(columns * inputs, rng);
      std::vector<float> expected;
      with_each_variant([&](const std::string&) {
        for (int64_t count : {1, 2, 5, 16, 21, 32, int(columns)}) {
          const Bytes tile = lines(RoundedInputs::memory_bytes(t.rounds256, inputs, count));
          const RoundedInputs rounded(t.rounds256, inputs, count, tile.get());
          for (int64_t c = 0; c < count; ++c) rounded.round(x.data() + c * inputs, c);
          std::vector<float> out(size_t(count * panels * 16));
          packed_kernels().products[f](packed.get(), inputs, panels, rounded.tile(0), count,
                                       out.data(), panels * 16);
          if (expected.empty()) {
            // The first column, which is the reference of all others below.
            for (int64_t o = 0; o < panels * 16; ++o) {
              std::vector<float> row(static_cast<size_t>(inputs));
              t.row_values(rows.data() + o * t.row_bytes(inputs), inputs, row.data());
              double sum = 0, size = 0;
              for (int64_t k = 0; k < inputs; ++k) {
                sum += double(row[size_t(k)]) * x[size_t(k)];
                size += std::abs(double(row[size_t(k)]) * x[size_t(k)]);
              }
              CHECK(std::abs(out[size_t(o)] - sum) <= 0.02 * size);
            }
          }
          if (expected.size() < out.size()) {
            CHECK(std::equal(expected.begin(), expected.end(), out.begin()));
            expected = out;
          }
          if (!CHECK(std::memcmp(out.data(), expected.data(), out.size() * 4) == 0)) return;
        }
      });
    }
  }
}

TEST(a_matrix_gives_the_same_bits_in_all_shapes_of_a_call) {
  std::mt19937 rng(2);
  for (Format format : {Format::kQ8_0, Format::kQ5_1, Format::kQ4_K, Format::kQ6_K}) {
    const FormatTraits& t = traits(format);
    const int64_t inputs = 2 * t.block, outputs = 300, columns = 300;
    const auto rows = random_blocks(format, outputs * 2, rng);
    const auto x = random_inputs(columns * inputs, rng);
    const PackedMatrix matrix(format, rows.data(), outputs, inputs, 2);
    std::vector<float> expected(size_t(columns * outputs));
    for (int64_t c = 0; c < columns; ++c)
      matrix.product(x.data() + c * inputs, 1, expected.data() + c * outputs, 1);
    for (int64_t count : {int64_t{2}, int64_t{48}, int64_t{49}, int64_t{257}, columns}) {
      for (int threads : {1, 2, 3}) {
        std::vector<float> out(size_t(count * outputs));
        matrix.product(x.data(), count, out.data(), threads);
        if (!CHECK(std::memcmp(out.data(), expected.data(), out.size() * 4) == 0)) return;
      }
    }
    for (int64_t o : {int64_t{0}, int64_t{17}, outputs - 1}) {
      std::vector<float> row(static_cast<size_t>(inputs)), same = row;
      t.row_values(rows.data() + o * t.row_bytes(inputs), inputs, row.data());
      matrix.row(o, same.data());
      CHECK(row == same);
    }
  }
}

TEST(inputs_are_rounded_to_the_nearest) {
  with_each_variant([&](const std::string&) {
    std::vector<float> x(256);
    for (int i = 0; i < 256; ++i) x[size_t(i)] = float(i - 127) / 2;  // up to 64.5
    x[255] = -127.0f;                                                 // the scale is 1
    const Bytes tile = lines(sizeof(Inputs256));
    RoundedInputs(true, 256, 1, tile.get()).round(x.data(), 0);
    Inputs256 found;
    std::memcpy(&found, tile.get(), sizeof(found));
    CHECK_EQ(found.scale, 1.0f);
    int sums[8] = {};
    for (int i = 0; i < 256; ++i) {
      CHECK_EQ(int(found.codes[i]), int(std::nearbyint(x[size_t(i)])));  // ties to even
      sums[i / 32] += found.codes[i];
    }
    const int order[8] = {0, 2, 1, 3, 4, 6, 5, 7};
    for (int i = 0; i < 8; ++i) CHECK_EQ(int(found.sums32[i]), sums[order[i]]);
    for (float bad : {INFINITY, -INFINITY, NAN, 1e-31f}) {
      std::vector<float> block(32, 0.0f);
      block[3] = bad;
      const Bytes small = lines(sizeof(Inputs32));
      RoundedInputs(false, 32, 1, small.get()).round(block.data(), 0);
      Inputs32 one;
      std::memcpy(&one, small.get(), sizeof(one));
      CHECK(std::isfinite(bad) ? one.scale == 0.0f : std::isnan(one.scale));
      for (int8_t code : one.codes) CHECK_EQ(int(code), 0);
    }
  });
}

TEST_MAIN()
