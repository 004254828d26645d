#include "arena.hpp"

#include <sys/mman.h>

#include <new>

namespace pipespec::cpu {

Arena::~Arena() {
  if (mapped_ != nullptr) munmap(mapped_, size_);
}

void Arena::allocate(int64_t bytes) {
  constexpr size_t kHuge = size_t{2} << 20;
  size_ = (size_t(bytes) + kHuge - 1) / kHuge * kHuge + kHuge;
  void* const all =
      mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (all == MAP_FAILED) throw std::bad_alloc();
  mapped_ = all;
#ifdef MADV_HUGEPAGE
  // Huge pages need fewer entries of the page table for a pass over all weights. If the system has
  // none, it uses small pages.
  madvise(all, size_, MADV_HUGEPAGE);
#endif
  const uintptr_t at = reinterpret_cast<uintptr_t>(all);
  begin_ = static_cast<unsigned char*>(all) + ((at + kHuge - 1) / kHuge * kHuge - at);
}

}  // namespace pipespec::cpu
