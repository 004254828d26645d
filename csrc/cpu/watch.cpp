#include "watch.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

#include "pool.hpp"
#include "share.hpp"

namespace pipespec::cpu {
namespace {

constexpr std::size_t kSmall = 4096;  // bytes of a range that each check reads
constexpr std::size_t kAllAlways =
    512 << 10;  // bytes of all ranges, up to which each check reads them all
constexpr std::size_t kBlock = 16 << 10;    // bytes of a block
constexpr std::size_t kSamples = 256;       // samples of a unit
constexpr std::size_t kAlways = 4;          // samples of a large range that each check reads
constexpr std::size_t kFurther = 64;        // further ranges that each check reads
constexpr std::size_t kPerUnit = 64;        // blocks of a unit of work
constexpr std::size_t kAtATime = 4096;      // blocks of a part of the rest
constexpr std::size_t kWorthThreads = 256;  // blocks from which on threads pay
constexpr std::uint64_t kFactor = 0x9e3779b97f4a7c15;

std::uint64_t mix(std::uint64_t digest, std::uint64_t word) {
  digest = (digest ^ word) * kFactor;
  return digest ^ (digest >> 29);
}

// Eight bytes at every stride, the last ones at the end of the range.
std::uint64_t digest_of_samples(const unsigned char* data, std::size_t bytes, std::size_t stride) {
  std::uint64_t found = bytes, word;
  for (std::size_t at = 0; at < bytes; at += stride) {
    std::memcpy(&word, data + std::min(at, bytes - sizeof word), sizeof word);
    found = mix(found, word);
  }
  return found;
}

}  // namespace

std::uint64_t digest(const unsigned char* data, std::size_t bytes) {
  // The second sums weigh each word by its place.
  constexpr std::size_t kLanes = 8, kLine = kLanes * sizeof(std::uint64_t);
  std::uint64_t first[kLanes] = {}, second[kLanes] = {}, line[kLanes];
  std::size_t at = 0;
  for (; at + kLine <= bytes; at += kLine) {
    std::memcpy(line, data + at, kLine);
    for (std::size_t i = 0; i < kLanes; ++i) second[i] += first[i] += line[i];
  }
  std::memset(line, 0, kLine);
  std::memcpy(line, data + at, bytes - at);
  std::uint64_t found = bytes;
  for (std::size_t i = 0; i < kLanes; ++i) {
    second[i] += first[i] += line[i];
    found = mix(mix(found, first[i]), second[i]);
  }
  return found;
}

void MemoryWatch::add(const void* data, std::size_t bytes, std::size_t stride) {
  if (bytes != 0) ranges_.push_back({static_cast<const unsigned char*>(data), bytes, stride});
}

void MemoryWatch::remember(int threads) {
  const bool all = bytes() <= kAllAlways;
  for (const Range& range : ranges_) {
    const auto [data, bytes, stride] = range;
    if (all || bytes <= kSmall) {
      always_.push_back({{data, bytes, 0}, digest(data, bytes)});
      continue;
    }
    const std::size_t wide = std::max(stride, (bytes / stride / kAlways) * stride);
    always_.push_back({{data, bytes, wide}, digest_of_samples(data, bytes, wide)});
    for (std::size_t at = 0; at < bytes; at += kSamples * stride) {
      const std::size_t size = std::min(bytes - at, kSamples * stride);
      // The last samples may be fewer bytes than one is read from.
      const std::size_t from = size < sizeof(std::uint64_t) ? bytes - sizeof(std::uint64_t) : at;
      const std::size_t length = std::min(bytes - from, kSamples * stride);
      samples_.push_back({{data + from, length, stride}, 0});
    }
    for (std::size_t at = 0; at < bytes; at += kBlock) {
      const std::size_t size = std::min(bytes - at, kBlock);
      blocks_.push_back({{data + at, size, 0}, 0});
    }
  }
  for (std::vector<Unit>* units : {&samples_, &blocks_}) {
    const bool pays = units->size() >= kWorthThreads;
    share(pays ? threads : 1, int64_t((units->size() + kPerUnit - 1) / kPerUnit), [&](int64_t i) {
      const std::size_t begin = std::size_t(i) * kPerUnit;
      for (std::size_t j = begin; j < std::min(begin + kPerUnit, units->size()); ++j)
        (*units)[j].digest = digest_of((*units)[j].range);
    });
  }
}

void MemoryWatch::remember_block(const void* data, std::size_t bytes) {
  const Range range{static_cast<const unsigned char*>(data), bytes, 0};
  if (further_ < kFurther) {
    ++further_;
    always_.push_back({range, digest_of(range)});
    return;
  }
  blocks_.push_back({range, digest_of(range)});
  // It stands behind the last block, in front of those that a round compares after that one.
  if (left_ != 0) ++left_;
}

std::uint64_t MemoryWatch::digest_of(const Range& range) {
  const auto [data, bytes, stride] = range;
  return stride ? digest_of_samples(data, bytes, stride) : digest(data, bytes);
}

bool MemoryWatch::is_same(const Unit& unit) { return unit.digest == digest_of(unit.range); }

bool MemoryWatch::agree(double seconds) {
  using Clock = std::chrono::steady_clock;
  left_ = blocks_.size();
  if (!std::all_of(always_.begin(), always_.end(), is_same)) return false;
  const auto end = Clock::now() + std::chrono::duration<double>(std::min(seconds, 1e6));
  const auto turn = [&](const std::vector<Unit>& units, std::size_t& next, auto compared) {
    for (std::size_t i = 0; i < units.size() && (i == 0 || Clock::now() < end); ++i) {
      if (!is_same(units[next])) return false;
      next = (next + 1) % units.size();
      compared();
    }
    return true;
  };
  return turn(samples_, next_sample_, [] {}) && turn(blocks_, next_block_, [this] { --left_; });
}

bool MemoryWatch::rest_agrees(int threads) {
  struct Job {
    const MemoryWatch* watch;
    std::size_t first, count, per_unit;
    std::atomic<bool> agrees{true};
    static void work(void* context, int64_t unit) {
      auto& job = *static_cast<Job*>(context);
      const std::size_t begin = std::size_t(unit) * job.per_unit;
      const auto& blocks = job.watch->blocks_;
      for (std::size_t i = begin; i < std::min(begin + job.per_unit, job.count); ++i)
        if (!is_same(blocks[(job.first + i) % blocks.size()])) job.agrees = false;
    }
  } job{this, next_block_, std::min(left_, kAtATime), kPerUnit};
  if (job.count == 0) return true;
  Team team(job.count < kWorthThreads ? 0 : threads - 1, Job::work, &job);
  team.run(int64_t((job.count + kPerUnit - 1) / kPerUnit));
  next_block_ = (next_block_ + job.count) % blocks_.size();
  left_ -= job.count;
  return job.agrees;
}

std::size_t MemoryWatch::samples() const {
  std::size_t found = 0;
  for (const Unit& unit : samples_) found += (unit.range.bytes - 1) / unit.range.stride + 1;
  return found;
}

std::size_t MemoryWatch::bytes() const {
  std::size_t found = 0;
  for (const Range& range : ranges_) found += range.bytes;
  return found;
}

}  // namespace pipespec::cpu
