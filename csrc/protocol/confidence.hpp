// What the byte beside a token means. A stage publishes with a token its own probability p of it:
// the log-odds ln(p / (1-p)) in steps of 1/14 around 128, since the differences that matter lie
// near 1. 0: not known. Host only.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "state.hpp"

namespace pipespec {

inline constexpr double kConfidencePerLogit = 14.0, kConfidenceCentre = 128.0;
inline constexpr std::uint32_t kMostConfidence = 255;

inline std::uint32_t confidence_bin(std::uint32_t confidence) {
  return std::min(confidence, kMostConfidence) * kConfidenceBins / (kMostConfidence + 1);
}

// The stage's own probability at the centre of a bin. The first has unknown confidences.
inline double stated_chance(std::uint32_t bin) {
  static const std::array<double, kConfidenceBins> chances = [] {
    std::array<double, kConfidenceBins> out{};
    constexpr double size = double(kMostConfidence + 1) / kConfidenceBins;
    for (std::uint32_t i = 0; i < kConfidenceBins; ++i)
      out[i] = 1.0 / (1.0 + std::exp((kConfidenceCentre - (i + 0.5) * size) / kConfidencePerLogit));
    out[0] = 0.5;
    return out;
  }();
  return chances[bin];
}

}  // namespace pipespec
