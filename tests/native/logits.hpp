// Rows of logits in memory: numbers of each dtype, read by a decoder of their bits that shares no
// code with the library, and places between pages that crash on access.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>

#include "cpu/select.hpp"

namespace logits {

using pipespec::cpu::DType;

inline constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline const float kNan = std::numeric_limits<float>::quiet_NaN();

inline double value(DType dtype, const void* p) {
  if (dtype == DType::kFloat32) {
    float x;
    std::memcpy(&x, p, 4);
    return x;
  }
  std::uint16_t bits;
  std::memcpy(&bits, p, 2);
  const int exponent_bits = dtype == DType::kBFloat16 ? 8 : 5;
  const int fraction_bits = 15 - exponent_bits;
  const int fraction = bits & ((1 << fraction_bits) - 1);
  const int exponent = bits >> fraction_bits & ((1 << exponent_bits) - 1);
  const int bias = (1 << (exponent_bits - 1)) - 1;
  double x;
  if (exponent == (1 << exponent_bits) - 1) {
    x = fraction == 0 ? double(kInf) : double(kNan);
  } else if (exponent == 0) {
    x = std::ldexp(fraction, 1 - bias - fraction_bits);
  } else {
    x = std::ldexp((1 << fraction_bits) + fraction, exponent - bias - fraction_bits);
  }
  return bits >> 15 ? -x : x;
}

// Fractions are cut, exponents brought into the range of normal numbers.
inline void put(DType dtype, void* p, float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (dtype == DType::kFloat32) {
    std::memcpy(p, &bits, 4);
    return;
  }
  const auto sign = std::uint16_t((bits >> 31) << 15);
  std::uint16_t half;
  if (dtype == DType::kBFloat16) {
    half = std::uint16_t(bits >> 16);
    if (std::isnan(x)) half |= 1;  // a payload in the lost bits must not turn into infinity
  } else if (!std::isfinite(x)) {
    half = std::uint16_t(sign | (std::isnan(x) ? 0x7C01 : 0x7C00));
  } else {
    const auto exponent = std::uint32_t(std::clamp(int(bits >> 23 & 0xFF) - 127 + 15, 1, 30));
    half = std::uint16_t(x == 0 ? sign : sign | exponent << 10 | (bits >> 13 & 0x3FF));
  }
  std::memcpy(p, &half, 2);
}

// Memory whose first and last usable bytes lie next to pages that crash on access.
class Guarded {
 public:
  explicit Guarded(std::size_t bytes) : page_(std::size_t(sysconf(_SC_PAGESIZE))) {
    usable_ = (bytes + page_ - 1) / page_ * page_;
    void* p = mmap(nullptr, usable_ + 2 * page_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    base_ = static_cast<unsigned char*>(p);
    if (mprotect(begin(), usable_, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  ~Guarded() { munmap(base_, usable_ + 2 * page_); }
  unsigned char* begin() const { return base_ + page_; }
  // Room for so many bytes: up against the page before it, up against the page after it, and at an
  // odd address.
  unsigned char* place(std::int64_t bytes, std::uint64_t which) const {
    unsigned char* const last = begin() + usable_ - bytes;
    return which % 3 == 0 ? begin() : last - (which % 3 == 2);
  }
  void forbid(unsigned char* p, std::size_t bytes) const {
    if (mprotect(p, bytes, PROT_NONE) != 0) throw std::bad_alloc();
  }

 private:
  std::size_t page_, usable_ = 0;
  unsigned char* base_ = nullptr;
};

}  // namespace logits
