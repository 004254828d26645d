#include "select.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <vector>

#include "formats/packed.hpp"
#include "kernels.hpp"
#include "number.hpp"
#include "pool.hpp"

namespace pipespec::cpu {
namespace {

// Below this many bytes a round stays in the caller. Waking a parked helper costs the caller 7 to
// 12 us (measured on a virtual machine; the system call alone), and reading what a forward pass has
// just written takes one thread some 4 us per 256 KiB: two threads pay from about here on, with
// cold data somewhat earlier.
constexpr int64_t kParallelBytes = 384 << 10;
// With noise a logit costs ten times as much: one thread takes some 40 us for this many bytes.
constexpr int64_t kCoupledParallelBytes = 96 << 10;
// Units per thread and round: enough to make up for a helper that wakes late, and long enough for
// streaming reads.
constexpr int64_t kUnitsPerThread = 4;
constexpr int64_t kMinUnitBytes = 32 << 10;
constexpr int64_t kCoupledMinUnitBytes = 8 << 10;

// Kernels of one set of instructions, those of products with packed weights among them.
struct Variant {
  const char* name;
  const Kernels* kernels;
  const PackedKernels* packed;
};

#if defined(__x86_64__)
// Whether this process may use the tiles of AMX: Linux gives their state on request only.
bool has_tiles() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kTiles = 1u << 24, kInt8 = 1u << 25;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & kTiles) != 0 && (d & kInt8) != 0 &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// Those for AVX-512, with the products of pairs of bfloat16 where the CPU has them.
const Kernels* kernels_for_avx512() {
  if (avx512_kernels() == nullptr || bf16_attend_kernels() == nullptr ||
      !__builtin_cpu_supports("avx512bf16"))
    return avx512_kernels();
  static const Kernels with_pairs = [] {
    Kernels all = *avx512_kernels();
    all.decoder.attend16 = *bf16_attend_kernels();
    return all;
  }();
  return &with_pairs;
}
#elif defined(__aarch64__)
// Whether this CPU has dot products of bytes (FEAT_DotProd).
bool has_dot_products() {
#if defined(__linux__)
  constexpr unsigned long kDotProducts = 1ul << 20;  // HWCAP_ASIMDDP, not in older headers
  return (getauxval(AT_HWCAP) & kDotProducts) != 0;
#elif defined(__APPLE__)
  int has = 0;
  size_t size = sizeof(has);
  return sysctlbyname("hw.optional.arm.FEAT_DotProd", &has, &size, nullptr, 0) == 0 && has != 0;
#else
  return false;
#endif
}
#endif

// What runs here, best first.
std::vector<Variant> find_variants() {
  std::vector<Variant> found;
  const auto add = [&](const char* name, const Kernels* kernels, const PackedKernels* packed) {
    if (kernels != nullptr && packed != nullptr) found.push_back({name, kernels, packed});
  };
#if defined(__x86_64__)
  // The builtin checks the CPU *and* whether the operating system saves the registers (XCR0).
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    const bool has_vnni = __builtin_cpu_supports("avx512vnni") && vnni_packed_kernels() != nullptr;
    if (has_vnni && amx_packed_kernels() != nullptr && has_tiles())
      add("amx", kernels_for_avx512(), amx_packed_kernels());
    // A CPU with AVX-512 has what the file for AVX2 may use.
    add("avx512", kernels_for_avx512(), has_vnni ? vnni_packed_kernels() : avx2_packed_kernels());
  }
  // The compiler may use whatever the file's flags allow.
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") &&
      __builtin_cpu_supports("fma"))
    add("avx2", avx2_kernels(), avx2_packed_kernels());
#elif defined(__aarch64__)
  if (has_dot_products()) add("dotprod", neon_kernels(), dotprod_packed_kernels());
  add("neon", neon_kernels(), neon_packed_kernels());
#endif
  add("portable", portable_kernels(), portable_packed_kernels());
  return found;
}

const std::vector<Variant>& variants() {
  static const std::vector<Variant> found = find_variants();
  return found;
}

const Variant* chosen(const std::string& name) {
  std::string all;
  for (const Variant& variant : variants()) {
    if (variant.name == name) return &variant;
    all = variant.name + (all.empty() ? "" : ", " + all);
  }
  throw std::invalid_argument("SIMD variant '" + name +
                              "' (PIPESPEC_SIMD) cannot run here; available: " + all);
}

std::atomic<const Variant*> g_variant{nullptr};

const Variant& variant() {
  const Variant* v = g_variant.load(std::memory_order_acquire);
  if (v == nullptr) {
    const char* wanted = std::getenv("PIPESPEC_SIMD");
    v = wanted != nullptr && *wanted != '\0' ? chosen(wanted) : variants().data();
    g_variant.store(v, std::memory_order_release);
  }
  return *v;
}

}  // namespace

const Kernels& kernels() { return *variant().kernels; }

const PackedKernels& packed_kernels() { return *variant().packed; }

namespace {

int64_t offset(const Logits& logits, int64_t b, int64_t q) {
  return b * logits.batch_stride + q * logits.width_stride;
}

// How to select from rows of one dtype and length: greedily ...
struct Greedy {
  using Row = const unsigned char*;
  static constexpr int64_t kParallel = kParallelBytes, kMinUnit = kMinUnitBytes;

  const Logits& logits;
  Packed (*span)(const void*, int64_t, int32_t);
  int32_t inf;
  int64_t item_bytes;
  int64_t vocab;

  explicit Greedy(const Logits& from)
      : logits(from), item_bytes(cpu::item_bytes(from.dtype)), vocab(from.vocab) {
    const SpanKernels& k = kernels().span;
    span = item_bytes == 4 ? k.argmax32 : k.argmax16;
    inf = item_bytes == 4 ? 0x7F800000 : from.dtype == DType::kBFloat16 ? 0x7F80 : 0x7C00;
  }

  int64_t row_bytes() const { return vocab * item_bytes; }

  Row at(int64_t b, int64_t q) const {
    return static_cast<const unsigned char*>(logits.data) + offset(logits, b, q) * item_bytes;
  }

  // Part of a row, its index counted from the row's beginning.
  Packed part(Row row, int64_t begin, int64_t count) const {
    const Packed p = span(row + begin * item_bytes, count, inf);
    return (p >> 32 << 32) | uint32_t(~(uint32_t(~p) + uint32_t(begin)));
  }

  Packed whole(Row row) const { return span(row, vocab, inf); }
};

// ... or with noise.
struct Coupled {
  using Row = CoupledRow;
  static constexpr int64_t kParallel = kCoupledParallelBytes, kMinUnit = kCoupledMinUnitBytes;

  const Logits& logits;
  const Noise& noise;
  CoupledSelect span;
  int64_t item_bytes;
  int64_t vocab;

  Coupled(const Logits& from, const Noise& with)
      : logits(from), noise(with), item_bytes(cpu::item_bytes(from.dtype)), vocab(from.vocab) {
    const CoupledKernels& k = kernels().coupled;
    span = item_bytes == 4 ? k.float32 : from.dtype == DType::kBFloat16 ? k.bfloat16 : k.float16;
  }

  int64_t row_bytes() const { return vocab * item_bytes; }

  Row at(int64_t b, int64_t q) const {
    return {static_cast<const unsigned char*>(logits.data) + offset(logits, b, q) * item_bytes,
            noise.seeds[b],
            uint64_t(noise.positions[b]) + uint64_t(q),
            noise.stream,
            noise.inv_temperature[b],
            noise.cutoff == nullptr ? -std::numeric_limits<float>::infinity()
                                    : noise.cutoff[b * logits.width + q]};
  }

  Packed part(const Row& row, int64_t begin, int64_t count) const {
    return span(row, begin, count);
  }

  Packed whole(const Row& row) const { return span(row, 0, vocab); }
};

int32_t index(Packed p) { return int32_t(uint32_t(~p)); }

// Selection over a list of rows by a team: long rows are cut into parts, short rows are handed out
// in groups.
template <class Selector>
class RowTeam {
 public:
  using Row = typename Selector::Row;

  RowTeam(const Selector& selector, int threads)
      : selector_(selector), threads_(threads), team_(threads - 1, &RowTeam::unit, this) {}

  // out[i] = what rows[i] selects.
  void run(const std::vector<Row>& rows, std::vector<int32_t>& out) {
    const int64_t n = int64_t(rows.size());
    const int64_t row_bytes = selector_.row_bytes();
    const int64_t unit_bytes =
        std::max(Selector::kMinUnit, n * row_bytes / (threads_ * kUnitsPerThread));
    parts_ = std::max<int64_t>(1, (row_bytes + unit_bytes / 2) / unit_bytes);
    // Parts begin a whole number of cache lines apart.
    part_ = (((selector_.vocab + parts_ - 1) / parts_) + 63) / 64 * 64;
    parts_ = (selector_.vocab + part_ - 1) / part_;
    group_ = parts_ > 1 ? 1 : std::max<int64_t>(1, unit_bytes / row_bytes);
    while ((n + group_ - 1) / group_ * parts_ > Team::kMaxUnits) group_ *= 2;
    rows_ = rows.data();
    n_rows_ = n;
    best_.resize(size_t(n * parts_));
    team_.run((n + group_ - 1) / group_ * parts_);
    out.resize(rows.size());
    for (int64_t i = 0; i < n; ++i) {
      out[size_t(i)] =
          index(*std::max_element(best_.begin() + i * parts_, best_.begin() + (i + 1) * parts_));
    }
  }

 private:
  static void unit(void* self, int64_t unit) { static_cast<RowTeam*>(self)->unit(unit); }

  void unit(int64_t unit) {
    const int64_t part = unit % parts_;
    const int64_t first = unit / parts_ * group_;
    const int64_t begin = part * part_;
    const int64_t count = std::min(part_, selector_.vocab - begin);
    for (int64_t i = first; i < std::min(first + group_, n_rows_); ++i) {
      best_[size_t(i * parts_ + part)] = selector_.part(rows_[i], begin, count);
    }
  }

  const Selector selector_;
  const int64_t threads_;
  const Row* rows_ = nullptr;
  int64_t n_rows_ = 0, parts_ = 1, part_ = 0, group_ = 1;
  std::vector<Packed> best_;
  Team team_;  // last member: helpers may read the others
};

// One row of the batch on its way through its draft tokens.
struct Walk {
  int64_t row;
  int64_t first;  // column whose logits decide about the first draft token
  int64_t draft_tokens;
  int64_t at = 0;  // draft tokens accepted so far

  // Notes what was selected in column first + at; false at the end of the walk.
  bool step(const Tokens& tokens, int32_t id, int32_t* selected_row, int32_t* accepted) {
    selected_row[at] = id;
    if (at < draft_tokens && tokens.at(row, first + 1 + at) == id) {
      ++at;
      return true;
    }
    accepted[row] = int32_t(at);
    return false;
  }
};

template <class Selector>
void select_all(const Selector& selector, int32_t* selected, int threads) {
  const Logits& logits = selector.logits;
  const int64_t n = logits.batch * logits.width;
  if (threads == 1 || n * selector.row_bytes() < Selector::kParallel) {
    for (int64_t b = 0; b < logits.batch; ++b) {
      for (int64_t q = 0; q < logits.width; ++q)
        *selected++ = index(selector.whole(selector.at(b, q)));
    }
    return;
  }
  std::vector<typename Selector::Row> rows;
  rows.reserve(size_t(n));
  for (int64_t b = 0; b < logits.batch; ++b) {
    for (int64_t q = 0; q < logits.width; ++q) rows.push_back(selector.at(b, q));
  }
  std::vector<int32_t> out;
  RowTeam<Selector>(selector, threads).run(rows, out);
  std::copy(out.begin(), out.end(), selected);
}

template <class Selector>
void walk_all(const Selector& selector, const Tokens& tokens, const int32_t* query_lens,
              const int32_t* num_draft_tokens, int32_t* selected, int32_t* accepted, int threads) {
  const Logits& logits = selector.logits;
  std::fill_n(selected, logits.batch * logits.width, -1);
  std::fill_n(accepted, logits.batch, 0);

  const int64_t active = logits.batch - std::count(query_lens, query_lens + logits.batch, 0);
  const auto walk_of = [&](int64_t r) {
    return Walk{r, query_lens[r] - 1 - num_draft_tokens[r], num_draft_tokens[r]};
  };
  if (threads == 1 || active * selector.row_bytes() < Selector::kParallel) {
    for (int64_t r = 0; r < logits.batch; ++r) {
      if (query_lens[r] == 0) continue;
      Walk walk = walk_of(r);
      while (walk.step(tokens, index(selector.whole(selector.at(r, walk.first + walk.at))),
                       selected + r * logits.width, accepted)) {
      }
    }
    return;
  }
  // All rows advance together, one position per round. So each row stops exactly at its first
  // mismatch, and the remaining rows share the threads evenly.
  std::vector<Walk> walks;
  for (int64_t r = 0; r < logits.batch; ++r) {
    if (query_lens[r] > 0) walks.push_back(walk_of(r));
  }
  std::vector<typename Selector::Row> rows;
  std::vector<int32_t> ids;
  RowTeam<Selector> team(selector, threads);
  while (!walks.empty()) {
    rows.clear();
    for (const Walk& walk : walks) rows.push_back(selector.at(walk.row, walk.first + walk.at));
    team.run(rows, ids);
    size_t live = 0;
    for (size_t i = 0; i < walks.size(); ++i) {
      if (walks[i].step(tokens, ids[i], selected + walks[i].row * logits.width, accepted))
        walks[live++] = walks[i];
    }
    walks.resize(live);
  }
}

}  // namespace

void check(const Logits& logits, int threads) {
  if (logits.batch < 0 || logits.width < 0) throw std::invalid_argument("logits: negative size");
  if (logits.vocab < 1) throw std::invalid_argument("logits: the vocabulary is empty");
  if (logits.vocab > INT32_MAX)
    throw std::invalid_argument("logits: the vocabulary does not fit int32 ids");
  if (threads < 1)
    throw std::invalid_argument("threads must be at least 1, got " + std::to_string(threads));
}

void check(const Tokens& tokens) {
  if (tokens.item_bytes != 4 && tokens.item_bytes != 8)
    throw std::invalid_argument("tokens: need int32 or int64");
}

void check_counts(const Logits& logits, const int32_t* query_lens,
                  const int32_t* num_draft_tokens) {
  for (int64_t r = 0; r < logits.batch; ++r) {
    if (query_lens[r] == 0) continue;  // idle: whatever num_draft_tokens says, query_lens - 1 maybe
    const char* wrong = nullptr;
    if (query_lens[r] < 0 || num_draft_tokens[r] < 0) {
      wrong = "counts are negative";
    } else if (query_lens[r] > logits.width) {
      wrong = "query_lens exceeds the columns of logits";
    } else if (num_draft_tokens[r] >= query_lens[r]) {
      wrong =
          "num_draft_tokens must be smaller than query_lens (the last token before the draft "
          "tokens is needed)";
    }
    if (wrong != nullptr) {
      throw std::invalid_argument("row " + std::to_string(r) + ": " + wrong +
                                  ": query_lens=" + std::to_string(query_lens[r]) +
                                  ", num_draft_tokens=" + std::to_string(num_draft_tokens[r]) +
                                  ", Q=" + std::to_string(logits.width));
    }
  }
}

void check_scale(float inv_temperature, int64_t row, const char* name) {
  if (!(inv_temperature > 0) || !std::isfinite(inv_temperature))
    throw std::invalid_argument("row " + std::to_string(row) + ": " + name +
                                " must be finite and positive, is " +
                                std::to_string(inv_temperature));
}

void check_noise(const Logits& logits, const Noise& noise, int64_t row) {
  check_scale(noise.inv_temperature[row], row, "inv_temperature");
  // The last column must have a valid position, too.
  if (noise.positions[row] < 0 || noise.positions[row] > INT64_MAX - logits.width)
    throw std::invalid_argument("row " + std::to_string(row) +
                                ": positions must not be negative, is " +
                                std::to_string(noise.positions[row]));
}

int64_t item_bytes(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return 4;
    case DType::kBFloat16:
    case DType::kFloat16:
      return 2;
  }
  throw std::invalid_argument("logits: unknown dtype code");
}

void argmax(const Logits& logits, int32_t* selected, int threads) {
  check(logits, threads);
  select_all(Greedy(logits), selected, threads);
}

void sample(const Logits& logits, const Noise& noise, int32_t* selected, int threads) {
  check(logits, threads);
  if (logits.width > 0) {
    for (int64_t r = 0; r < logits.batch; ++r) check_noise(logits, noise, r);
  }
  select_all(Coupled(logits, noise), selected, threads);
}

void verify(const Logits& logits, const Tokens& tokens, const int32_t* query_lens,
            const int32_t* num_draft_tokens, int32_t* selected, int32_t* accepted, int threads,
            const Noise* noise) {
  check(logits, threads);
  check(tokens);
  check_counts(logits, query_lens, num_draft_tokens);
  if (noise == nullptr) {
    walk_all(Greedy(logits), tokens, query_lens, num_draft_tokens, selected, accepted, threads);
    return;
  }
  for (int64_t r = 0; r < logits.batch; ++r) {
    if (query_lens[r] > 0) check_noise(logits, *noise, r);
  }
  walk_all(Coupled(logits, *noise), tokens, query_lens, num_draft_tokens, selected, accepted,
           threads);
}

void gumbel_noise(uint64_t seed, int64_t position, uint32_t stream, int64_t begin, int64_t count,
                  float* out) {
  if (begin < 0 || count < 0 || begin + count > INT32_MAX)
    throw std::invalid_argument("need 0 <= begin and begin + count < 2^31");
  if (count > 0) kernels().coupled.noise(seed, uint64_t(position), stream, begin, count, out);
}

std::string simd() { return variant().name; }

std::string set_simd(const std::string& name) {
  const Variant* const wanted = chosen(name);
  const std::string before = simd();
  g_variant.store(wanted, std::memory_order_release);
  return before;
}

}  // namespace pipespec::cpu
