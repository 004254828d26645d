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

// The byte of p = part / whole. `rest`: whole - part, which may be more precise than a difference.
// 0 unless all are finite and not negative.
inline std::uint8_t confidence_of(double part, double rest) {
  if (!(part >= 0.0) || !(rest >= 0.0) || !(part + rest > 0.0) || !std::isfinite(part + rest))
    return 0;
  const double least = 1e-300;  // keeps the quotient finite
  const double logit = std::log(std::max(part, least) / std::max(rest, least));
  const double byte = std::nearbyint(kConfidenceCentre + kConfidencePerLogit * logit);
  return static_cast<std::uint8_t>(std::clamp(byte, 1.0, double{kMostConfidence}));
}

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
