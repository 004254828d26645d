// Memory on cache lines that grows and never shrinks.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

namespace pipespec::cpu {

// Its contents are lost when it grows.
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
      void* const fresh = std::aligned_alloc(64, size_t((count * 4 + 63) / 64 * 64));
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

}  // namespace pipespec::cpu
