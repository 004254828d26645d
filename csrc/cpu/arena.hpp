// Memory for packed weights.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pipespec::cpu {

// In huge pages where the system has them.
class Arena {
 public:
  Arena() = default;
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  void allocate(int64_t bytes);  // of zeros
  unsigned char* begin() const { return begin_; }

 private:
  void* mapped_ = nullptr;
  size_t size_ = 0;
  unsigned char* begin_ = nullptr;
};

}  // namespace pipespec::cpu
