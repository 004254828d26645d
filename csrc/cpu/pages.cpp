#include "pages.hpp"

#ifdef __linux__
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>

#include "share.hpp"

namespace pipespec::cpu {
namespace {

constexpr uintptr_t kHuge = uintptr_t{2} << 20;
// What is moved at a time: so much more memory is in use meanwhile, for each thread.
constexpr uintptr_t kUnit = 16 * kHuge;
// Since Linux 6.1; not in older headers.
constexpr int kCollapse = 25;

struct Mapping : AddressRange {
  bool is_file;
};

struct Unit {
  uintptr_t begin;
  size_t bytes;
  bool is_file;
};

bool has_huge_pages() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string modes;
  return std::getline(file, modes) && modes.find("[never]") == std::string::npos;
}

std::vector<Mapping> private_mappings() {
  std::vector<Mapping> found;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    unsigned long long begin, end, inode;
    char modes[5];
    if (std::sscanf(line.c_str(), "%llx-%llx %4s %*s %*s %llu", &begin, &end, modes, &inode) == 4 &&
        std::strcmp(modes, "rw-p") == 0)
      found.push_back({{uintptr_t(begin), uintptr_t(end)}, inode != 0});
  }
  return found;
}

// The whole huge pages of the ranges.
std::vector<Unit> units_of(std::vector<AddressRange> ranges) {
  std::sort(ranges.begin(), ranges.end(),
            [](const AddressRange& a, const AddressRange& b) { return a.begin < b.begin; });
  std::vector<AddressRange> joined;
  for (const AddressRange& range : ranges) {
    if (joined.empty() || range.begin > joined.back().end)
      joined.push_back(range);
    else
      joined.back().end = std::max(joined.back().end, range.end);
  }
  std::vector<Unit> units;
  for (const Mapping& mapping : private_mappings()) {
    for (const AddressRange& range : joined) {
      uintptr_t at = (std::max(mapping.begin, range.begin) + kHuge - 1) / kHuge * kHuge;
      const uintptr_t end = std::min(mapping.end, range.end) / kHuge * kHuge;
      for (; at < end; at += kUnit)
        units.push_back({at, size_t(std::min(kUnit, end - at)), mapping.is_file});
    }
  }
  return units;
}

// Copies a part of a private mapping of a file, and puts the copy in its place: at no moment is
// there anything else to read.
bool replace(const Unit& unit) {
  const size_t size = unit.bytes + kHuge;
  void* const all = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (all == MAP_FAILED) return false;
  const uintptr_t from = reinterpret_cast<uintptr_t>(all);
  const uintptr_t at = (from + kHuge - 1) / kHuge * kHuge;
  void *const copy = reinterpret_cast<void*>(at), *const to = reinterpret_cast<void*>(unit.begin);
  madvise(copy, unit.bytes, MADV_HUGEPAGE);
  std::memcpy(copy, to, unit.bytes);
  const bool is_moved =
      mremap(copy, unit.bytes, unit.bytes, MREMAP_MAYMOVE | MREMAP_FIXED, to) != MAP_FAILED;
  if (!is_moved) munmap(copy, unit.bytes);
  if (at > from) munmap(all, at - from);
  const uintptr_t end = at + unit.bytes;
  if (from + size > end) munmap(reinterpret_cast<void*>(end), from + size - end);
  return is_moved;
}

bool collapse(const Unit& unit) {
  void* const at = reinterpret_cast<void*>(unit.begin);
  return madvise(at, unit.bytes, MADV_HUGEPAGE) == 0 && madvise(at, unit.bytes, kCollapse) == 0;
}

}  // namespace

int64_t use_huge_pages(std::vector<AddressRange> ranges, int64_t room, int threads) {
  if (!has_huge_pages()) return 0;
  const std::vector<Unit> units = units_of(std::move(ranges));
  int64_t of_files = 0;
  for (const Unit& unit : units) of_files += unit.is_file ? int64_t(unit.bytes) : 0;
  std::atomic<int64_t> moved{0};
  share(threads, int64_t(units.size()), [&](int64_t i) {
    const Unit& unit = units[size_t(i)];
    if (unit.is_file ? of_files <= room && replace(unit) : collapse(unit))
      moved += int64_t(unit.bytes);
  });
  return moved;
}

}  // namespace pipespec::cpu

#else
namespace pipespec::cpu {
int64_t use_huge_pages(std::vector<AddressRange>, int64_t, int) { return 0; }
}  // namespace pipespec::cpu
#endif
