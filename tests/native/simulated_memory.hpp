// A memory below the protocol under a deterministic scheduler (csrc/protocol/hd.hpp includes it for
// PIPESPEC_MEMORY). The threads of a test are fibers. Each access of a fiber to a word that others
// use is a step: the scheduler may let another fiber go on instead, for as long as it likes, or end
// the fiber there. All that it decides is a function of one seed.
//
// The memory model is that of weak_memory.hpp: each word keeps all its values, and a thread's view
// says per word the oldest value that it may still load. Which of the allowed values a load gets is
// drawn, not enumerated, and threads may read each other. All stores of a word come from one
// thread, so the order of a word's values is the order in which they were stored. What the model
// leaves out is load buffering: a load that sees a store that its own thread's later stores lead
// to.
#pragma once

#include <sys/mman.h>
#include <time.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <new>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace simulated {

using pipespec::Order, pipespec::Scope;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

// --- fibers --------------------------------------------------------------------------------------

#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__)
// ucontext enters the kernel at each change, for the signal mask. That would take most of the time.
#define PIPESPEC_OWN_FIBERS
#if !defined(__clang__)
[[gnu::noipa]]  // GCC must not conclude from these few instructions which registers survive
#endif
[[gnu::naked, gnu::noinline]] inline void change_stack(void**, void*) {
  asm volatile(
      "push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
      "mov %rsp, (%rdi)\n mov %rsi, %rsp\n"
      "pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret\n");
}
#endif

// A fiber that is not resumed is gone, with all that lies on its stack: it owns nothing elsewhere.
class Fiber {
 public:
  Fiber() = default;
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber() {
    if (stack_ != nullptr) munmap(stack_, kStack);
  }

  // The next change to this fiber calls `body`, which never returns.
  [[gnu::noinline]] void prepare(void (*body)()) {
    if (stack_ == nullptr) {
      stack_ = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (stack_ == MAP_FAILED) throw std::bad_alloc();
    }
    body_ = body;
#if defined(PIPESPEC_OWN_FIBERS)
    // As if entry() had been called, with the six registers of change_stack() below.
    auto* top = reinterpret_cast<u64*>(static_cast<char*>(stack_) + kStack);
    std::fill(top - 8, top, 0);
    const auto begin = &entry;
    std::memcpy(top - 2, &begin, sizeof begin);
    top_ = top - 8;
#else
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(stack_, kStack);  // what an earlier fiber left
    fake_stack_ = nullptr;
#endif
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack_;
    context_.uc_stack.ss_size = kStack;
    makecontext(&context_, &Fiber::entry, 0);
#endif
  }

  // Returns when a fiber changes back to this one.
  void change_to(Fiber& to) {
    current_ = &to;
#if defined(PIPESPEC_OWN_FIBERS)
    change_stack(&top_, to.top_);
#else
#if defined(__SANITIZE_ADDRESS__)
    const bool to_host = to.stack_ == nullptr;
    __sanitizer_start_switch_fiber(&fake_stack_, to_host ? host_stack_ : to.stack_,
                                   to_host ? host_size_ : kStack);
#endif
    swapcontext(&context_, &to.context_);
    arrived(*this);
#endif
  }

 private:
  static constexpr std::size_t kStack = 64 << 10;

  static void entry() {
    arrived(*current_);
    current_->body_();
  }
  static void arrived([[maybe_unused]] Fiber& here) {
#if defined(__SANITIZE_ADDRESS__)
    const void* bottom = nullptr;
    std::size_t size = 0;
    __sanitizer_finish_switch_fiber(here.fake_stack_, &bottom, &size);
    if (host_stack_ == nullptr) {  // the first change comes from the host's own stack
      host_stack_ = bottom;
      host_size_ = size;
    }
#endif
  }

  static inline Fiber* current_ = nullptr;
  void* stack_ = nullptr;  // null: the host's
  void (*body_)() = nullptr;
#if defined(PIPESPEC_OWN_FIBERS)
  void* top_ = nullptr;
#else
  ucontext_t context_;
#endif
#if defined(__SANITIZE_ADDRESS__)
  void* fake_stack_ = nullptr;
  static inline const void* host_stack_ = nullptr;
  static inline std::size_t host_size_ = 0;
#endif
};

// --- random numbers ------------------------------------------------------------------------------

struct Random {  // splitmix64
  u64 state = 0;
  u64 next() {
    u64 x = state += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }
  u32 below(u32 n) { return static_cast<u32>((next() >> 32) * n >> 32); }
  bool chance(u32 percent) { return below(100) < percent; }
  template <class T, std::size_t N>
  T pick(const T (&of)[N]) {
    return of[below(N)];
  }
};

// --- the words and who uses them -----------------------------------------------------------------

enum class Kind : std::uint8_t {
  kNone,  // of one thread, or never changed while threads run
  kWord,
  kCommitted,
  kToken,
  kLimit,
  kAlive,
  kLookahead,
  kGeneration,
  kBell,  // from here on accessed sequentially consistently, see load_newest()
  kParked,
};
inline const char* const kKinds[] = {"",      "word",      "committed",  "token", "limit",
                                     "alive", "lookahead", "generation", "bell",  "parked"};

struct Place {
  Kind kind = Kind::kNone;
  bool copy = false;  // in the host shadow
  std::uint8_t stage = 0, row = 0;
  std::uint8_t index = 0;  // of the token in its ring
};

// What is wrong with the memory, to see whether the checks find it.
enum class Fault : std::uint8_t {
  kNone,
  kPublishesRelaxed,   // the word is stored without release
  kReadsRelaxed,       // the word is loaded without acquire
  kNoReleaseFence,     // a rollback is not ordered before what overwrites
  kNoAcquireFence,     // the second look is not ordered after what was read
  kSecondLookIsOld,    // still() sees the word that it compares with
  kTokensAfterWord,    // a token is stored after the word that publishes it
  kEpochAfterTokens,   // a new epoch is stored after the first token of it
  kEpochLost,          // a new epoch is not stored
  kPublicationLost,    // a longer word is not stored, now and then
  kTokenLost,          // a token is not stored, now and then
  kTornWord,           // the length is stored first, then the epoch
  kEpochOnly,          // a rollback keeps the old length until it has adopted
  kCommittedLost,      // the committed length is not stored, now and then
  kCommittedAhead,     // it is stored one too high
  kLoadsOldTokens,     // a token may be older than the thread's view
  kLoadsOldWords,      // the word may be older than the thread's view
  kTokenOfAnotherRow,  // rows of a batch are mixed up
  kLimitUnseen,        // the limit is loaded as if there were none
  kAliveUnseen,        // a dead stage is taken for a living one
  kGenerationUnseen,   // the stop is not seen
  kCopyWithoutFence,   // replicate() has no fence
  kWakeLost,           // who waits on a futex sleeps on, now and then
  kParkedUnseen,       // who rings does not see at once that another one sleeps
  kBellUnheard,        // who parks does not see at once that it rang
  kCount,
};
inline const char* const kFaults[] = {"none",
                                      "publishes_relaxed",
                                      "reads_relaxed",
                                      "no_release_fence",
                                      "no_acquire_fence",
                                      "second_look_is_old",
                                      "tokens_after_word",
                                      "epoch_after_tokens",
                                      "epoch_lost",
                                      "publication_lost",
                                      "token_lost",
                                      "torn_word",
                                      "epoch_only",
                                      "committed_lost",
                                      "committed_ahead",
                                      "loads_old_tokens",
                                      "loads_old_words",
                                      "token_of_another_row",
                                      "limit_unseen",
                                      "alive_unseen",
                                      "generation_unseen",
                                      "copy_without_fence",
                                      "wake_lost",
                                      "parked_unseen",
                                      "bell_unheard"};

// Told of every store, in the order in which they happen.
class Watch {
 public:
  virtual void stored(u32 thread, const Place& place, u64 bits) = 0;
  // The thread is gone: it ends at this access.
  virtual void crashed(u32 thread) = 0;

 protected:
  ~Watch() = default;
};

class Machine {
 public:
  static constexpr u32 kThreads = 8, kNobody = kThreads, kWords = 1024;
  static constexpr u32 kStages = 5, kRows = 3;
  static constexpr u64 kNever = ~u64{0}, kForever = u64{1} << 60;  // the latter as a timeout

  enum class Why : std::uint8_t { kRest, kBudget, kStopped };

  struct Thread {
    bool runs = false, idles = false;
    u32 weight = 1;           // of being the next
    u32 stale_percent = 0;    // how often it loads an old value
    u64 wakes_at = 0;         // sleeps until this step
    u64 times_out_at = 0;     // idles until this step at the latest
    u64 crashes_in = kNever;  // accesses
    // What the first acquire of a word gave since look(), and the first load of a limit. Copies
    // are left out.
    u64 seen_word[kStages][kRows] = {};
    u32 seen_limit[kRows] = {};

    void look() {
      for (auto& words : seen_word) std::fill(std::begin(words), std::end(words), kNever);
      std::fill(std::begin(seen_limit), std::end(seen_limit), ~u32{0});
    }

   private:
    friend class Machine;
    Fiber fibers[2];  // the second one is for what it does after its crash
    u32 fiber = 0;
    u32 released = 0;                                  // view since the last release fence
    u32 joined[kThreads] = {}, fenced[kThreads] = {};  // newest view of each thread in these two:
    std::int16_t now[kWords] = {};                     // what a load sees
    std::int16_t acquired[kWords] = {};                // what it sees after an acquire fence
    u32 delayed = 0;                                   // a word whose store is late (a fault)
    u64 delayed_bits = 0;
    u64 last_word[kStages][kRows] = {};  // that it has acquired
    const void* waits_for = nullptr;     // a futex
    bool stored_to_copy = false;
    u32 count = 0;  // of what a fault does now and then
  };

  // All words lie in the arena.
  Machine(void* arena, std::size_t bytes) : arena_(static_cast<char*>(arena)), table_(bytes / 4) {}

  // Back to the state of a new memory: without threads, and without names of words.
  void begin(u64 seed, Watch& watch) {
    random_ = {seed};
    watch_ = &watch;
    for (Thread& t : threads_) {
      t.runs = false;
      t.weight = 1;
    }
    accesses = stale_loads = 0;
    steps_ = 0;
    mean_slice_ = 1;
    fresh_ = swaps_ = false;
    threads_in_use_ = 0;
    is_stopped_ = false;
    traced_ = 0;
    std::fill(table_.begin(), table_.end(), 0);
    n_ = 1;
  }
  void name(const void* p, Place place) {
    table_[offset(p) / 4] = static_cast<std::uint16_t>(n_);
    places_[n_] = place;
    addresses_[n_++] = static_cast<const char*>(p);
  }
  // All threads have seen what is in memory now: no older value is left.
  void settle() {
    stride_ = (n_ + 15) / 16 * 16;
    views_.assign(stride_, 0);
    for (u32 w = 1; w < n_; ++w) {
      values_[w].clear();
      values_[w].push_back({plain(w), 0, kNobody});
    }
    for (Thread& t : threads_) {
      std::fill_n(t.now, stride_, std::int16_t{0});
      std::fill_n(t.acquired, stride_, std::int16_t{0});
      std::fill(std::begin(t.joined), std::end(t.joined), 0);
      std::fill(std::begin(t.fenced), std::end(t.fenced), 0);
      t.released = t.delayed = t.count = 0;
      t.stored_to_copy = false;
      t.look();
    }
  }

  Thread& thread(u32 t) { return threads_[t]; }
  void start(u32 t, void (*body)(), u32 fiber = 0) {
    Thread& thread = threads_[t];
    thread.fiber = fiber;
    thread.fibers[fiber].prepare(body);
    thread.runs = true;
    thread.idles = false;
    thread.wakes_at = 0;
    thread.crashes_in = kNever;
    threads_in_use_ = std::max(threads_in_use_, t + 1);
  }

  // Runs those of `threads` (a bit each) until none of them has anything to do, or for so many
  // steps.
  Why run(u32 threads, u64 budget) {
    mask_ = threads;
    end_ = steps_ + budget;
    why_ = Why::kRest;
    current_ = choose();
    if (current_ != kNobody) {
      active = this;
      running_ = &fiber_of(current_);
      host_.change_to(*running_);
      active = nullptr;
    }
    return is_stopped_ ? Why::kStopped : why_;
  }

  // --- called by fibers ---
  u32 current() const { return current_; }
  // Until wake(), or for so many steps.
  void idle(u64 steps = kNever) {
    Thread& t = threads_[current_];
    t.idles = true;
    t.times_out_at = steps < kNever - steps_ ? steps_ + steps : kNever;
    give_way();
    t.idles = false;
    t.waits_for = nullptr;
  }
  void sleep(u64 steps) {
    threads_[current_].wakes_at = steps_ + steps;
    give_way();
  }
  [[noreturn]] void end() {
    threads_[current_].runs = false;
    give_way();
    __builtin_unreachable();
  }
  // Back to the host, for good.
  void stop() {
    is_stopped_ = true;
    if (active != nullptr) running_->change_to(host_);
  }

  template <Order order, typename T>
  T load(const T* p) {
    const u32 word = find(p);
    if (word == 0) return *p;
    access();
    Thread& t = threads_[current_];
    const u32 of = fault_ == Fault::kNone ? word : faulty_load(t, word);
    const auto& values = values_[of];
    const auto newest = static_cast<u32>(values.size()) - 1;
    auto oldest = static_cast<u32>(t.now[of]);
    if (fault_ == Fault::kLoadsOldTokens && places_[of].kind == Kind::kToken &&
        places_[of].stage != current_)
      oldest = 0;
    if (fault_ == Fault::kLoadsOldWords && places_[of].kind == Kind::kWord &&
        places_[of].stage != current_)
      oldest = 0;
    u32 found = newest;
    if (oldest != newest && !fresh_ && random_.chance(t.stale_percent)) {
      found = random_.chance(30) ? oldest : oldest + random_.below(newest - oldest + 1);
      stale_loads += found != newest;
    }
    const Value& value = values[found];
    const auto at = static_cast<std::int16_t>(found);
    t.now[of] = std::max(t.now[of], at);
    t.acquired[of] = std::max(t.acquired[of], at);
    if (value.view != 0) {
      join(t.acquired, t.fenced, value);
      if (order != Order::kRelaxed && fault_ != Fault::kReadsRelaxed) join(t.now, t.joined, value);
    }
    u64 bits = value.bits;
    const Place& place = places_[of];
    if (place.kind == Kind::kWord && !place.copy) {
      u64& seen = t.seen_word[place.stage][place.row];
      u64& last = t.last_word[place.stage][place.row];
      if (order == Order::kAcquire) {
        last = bits;
        if (seen == kNever) seen = bits;
      } else if (fault_ == Fault::kSecondLookIsOld && place.stage != current_) {
        bits = last;
      }
    } else if (place.kind == Kind::kLimit) {
      if (fault_ == Fault::kLimitUnseen) bits = 0xffff;
      u32& seen = t.seen_limit[place.row];
      if (seen == ~u32{0}) seen = static_cast<u32>(bits);
    } else if (place.kind == Kind::kAlive && fault_ == Fault::kAliveUnseen) {
      bits = 1;
    } else if (place.kind == Kind::kGeneration && fault_ == Fault::kGenerationUnseen) {
      bits = values[0].bits;
    }
    if (tracing_) trace(place, "load", order, bits, newest - found);
    T out;
    std::memcpy(&out, &bits, sizeof out);
    return out;
  }

  template <Order order, typename T>
  void store(T* p, T value) {
    const u32 word = find(p);
    if (word == 0) {
      *p = value;
      return;
    }
    access();
    u64 bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    if (fault_ != Fault::kNone && faulty_store(word, bits, order)) return;
    put(word, bits, order);
  }

  void fence(Order order) {
    if (active != this) return;
    Thread& t = threads_[current_];
    if (order == Order::kAcquire && fault_ != Fault::kNoAcquireFence) {
      std::copy_n(t.acquired, stride_, t.now);
      std::copy(std::begin(t.fenced), std::end(t.fenced), std::begin(t.joined));
    }
    if (order == Order::kRelease && fault_ != Fault::kNoReleaseFence &&
        !(fault_ == Fault::kCopyWithoutFence && t.stored_to_copy))
      t.released = snapshot(t);
    if (tracing_) trace({}, "fence", order, 0, 0);
  }

  // The sequentially consistent accesses of csrc/runtime/park.hpp. All of them to one word are
  // such, so that they see its newest value.
  template <typename T>
  T load_newest(const T* p) {
    const u32 word = find(p);
    if (word == 0) return *p;
    access();
    Thread& t = threads_[current_];
    const auto& values = values_[word];
    auto newest = values.size() - 1;
    const Kind kind = places_[word].kind;
    if ((fault_ == Fault::kParkedUnseen && kind == Kind::kParked) ||
        (fault_ == Fault::kBellUnheard && kind == Kind::kBell)) {
      const auto oldest = static_cast<std::size_t>(t.now[word]);
      if (oldest < newest && random_.chance(30)) newest = oldest;
    }
    const Value& value = values[newest];
    t.now[word] = t.acquired[word] = static_cast<std::int16_t>(newest);
    if (value.view != 0) {
      join(t.acquired, t.fenced, value);
      join(t.now, t.joined, value);
    }
    if (tracing_) trace(places_[word], "load", Order::kAcquire, value.bits, 0);
    return static_cast<T>(value.bits);
  }
  template <typename T>
  void store_newest(T* p, T value) {
    const u32 word = find(p);
    if (word == 0) {
      *p = value;
      return;
    }
    access();
    put(word, value, Order::kRelease);
  }
  // As the kernel has it: it compares the newest value, and sleeps, in one step. A time is a number
  // of steps here.
  void futex_wait(const u32* p, u32 value, u64 steps) {
    if (active != this) return;
    access();
    if (tracing_) trace(places_[find(p)], "wait", Order::kRelaxed, *p, 0);
    if (*p != value) return;
    threads_[current_].waits_for = p;
    idle(steps);
  }
  void futex_wake(const u32* p) {
    if (active == this) {
      access();
      if (tracing_) trace(places_[find(p)], "wake", Order::kRelaxed, *p, 0);
      if (fault_ == Fault::kWakeLost && ++threads_[current_].count % 2 == 0) return;
    }
    for (u32 i = 0; i < threads_in_use_; ++i)
      if (threads_[i].waits_for == p) wake(i);
  }

  // --- how it runs, for the host ---
  void set_mean_slice(u32 accesses) { mean_slice_ = accesses; }
  void set_swaps(bool on) { swaps_ = on; }        // who was slow is fast from some moment on
  void set_fresh(bool fresh) { fresh_ = fresh; }  // no load of an old value any more
  void set_fault(Fault fault) { fault_ = fault; }
  void set_tracing(bool on) { tracing_ = on; }
  void wake(u32 t) { threads_[t].idles = false; }
  // What the host has stored since, for all threads to see.
  void refresh() {
    for (u32 w = 1; w < n_; ++w)
      if (plain(w) != values_[w].back().bits) values_[w].push_back({plain(w), 0, kNobody});
  }
  void print_trace() const {
    const std::size_t first = traced_ > kTrace ? traced_ - kTrace : 0;
    for (std::size_t i = first; i < traced_; ++i) {
      const Entry& e = trace_[i % kTrace];
      std::fprintf(stderr, "  step %6llu  thread %u  %-5s %-7s",
                   static_cast<unsigned long long>(e.step), e.thread, e.what,
                   e.order == Order::kRelaxed   ? "relaxed"
                   : e.order == Order::kAcquire ? "acquire"
                                                : "release");
      if (e.place.kind != Kind::kNone)
        std::fprintf(stderr, "  %s%s of stage %u, row %u", e.place.copy ? "copied " : "",
                     kKinds[static_cast<u32>(e.place.kind)], e.place.stage, e.place.row);
      if (e.place.kind == Kind::kWord) {
        std::fprintf(stderr, " = epoch %u, length %u", static_cast<u32>(e.bits >> 32),
                     static_cast<u32>(e.bits));
      } else if (e.place.kind == Kind::kToken) {
        std::fprintf(stderr, " [%u] = %d", e.place.index, static_cast<std::int32_t>(e.bits));
      } else if (e.place.kind != Kind::kNone) {
        std::fprintf(stderr, " = %llu", static_cast<unsigned long long>(e.bits));
      }
      if (e.age > 0) std::fprintf(stderr, "  (%u newer values)", e.age);
      std::fprintf(stderr, "\n");
    }
  }

  u64 accesses = 0, stale_loads = 0;        // of this schedule
  static inline Machine* active = nullptr;  // null: the host runs, with plain accesses

 private:
  struct Value {
    u64 bits;
    u32 view;  // what an acquire of it takes over: a piece of views_; 0: nothing
    u32 writer;
  };
  struct Entry {
    u64 step;
    u32 thread;
    Place place;
    const char* what;
    Order order;
    u64 bits;
    u32 age;
  };
  static constexpr std::size_t kTrace = 300, kMostValues = 30'000;

  std::size_t offset(const void* p) const {
    return static_cast<std::size_t>(static_cast<const char*>(p) - arena_);
  }
  u32 find(const void* p) const {
    if (active != this) return 0;
    const std::size_t at = offset(p) / 4;
    return at < table_.size() ? table_[at] : 0;
  }
  u64 plain(u32 word) const {
    u64 bits = 0;
    std::memcpy(&bits, addresses_[word], size(word));
    return bits;
  }
  std::size_t size(u32 word) const { return places_[word].kind == Kind::kWord ? 8 : 4; }

  void access() {
    Thread& t = threads_[current_];
    if (t.crashes_in-- == 0) {
      t.runs = false;
      watch_->crashed(current_);
      give_way();
      __builtin_unreachable();
    }
    ++accesses;
    ++steps_;
    if (--slice_ == 0) give_way();
  }
  bool can_run(u32 i) const {
    const Thread& t = threads_[i];
    return t.runs && (mask_ >> i & 1) != 0 && wakes_at(t) <= steps_;
  }
  u64 wakes_at(const Thread& t) const { return t.idles ? t.times_out_at : t.wakes_at; }
  u32 choose() {
    slice_ = mean_slice_ == 1 ? 1 : 1 + random_.below(2 * mean_slice_ - 1);
    if (steps_ >= end_) {
      why_ = Why::kBudget;
      return kNobody;
    }
    if (swaps_ && random_.below(200) == 0) {
      Thread& one = threads_[random_.below(threads_in_use_)];
      std::swap(one.weight, threads_[random_.below(threads_in_use_)].weight);
    }
    for (;;) {
      u32 total = 0, ready = 0;
      u64 first = kNever;
      for (u32 i = 0; i < threads_in_use_; ++i) {
        const Thread& t = threads_[i];
        if (can_run(i)) {
          total += t.weight;
          ready |= 1u << i;
        } else if (t.runs && (mask_ >> i & 1) != 0) {
          first = std::min(first, wakes_at(t));
        }
      }
      if (ready != 0) {
        u32 at = random_.below(total), i = 0;
        for (;; ++i) {
          if ((ready >> i & 1) == 0) continue;
          if (at < threads_[i].weight) return i;
          at -= threads_[i].weight;
        }
      }
      if (first == kNever) return kNobody;
      steps_ = first;  // all sleep
    }
  }
  void give_way() {
    current_ = choose();
    Fiber* from = running_;
    Fiber* to = current_ == kNobody ? &host_ : &fiber_of(current_);
    if (to == from) return;
    running_ = to;
    from->change_to(*to);
  }
  Fiber& fiber_of(u32 t) { return threads_[t].fibers[threads_[t].fiber]; }

  u32 snapshot(const Thread& t) {
    views_.insert(views_.end(), t.now, t.now + stride_);
    return static_cast<u32>(views_.size() / stride_) - 1;
  }
  // A thread's later views hold its earlier ones.
  void join(std::int16_t* view, u32* newest, const Value& value) const {
    if (value.view <= newest[value.writer]) return;
    newest[value.writer] = value.view;
    const std::int16_t* other = &views_[std::size_t{value.view} * stride_];
    for (u32 i = 0; i < stride_; ++i) view[i] = std::max(view[i], other[i]);
  }

  void put(u32 word, u64 bits, Order order) {
    Thread& t = threads_[current_];
    const Place& place = places_[word];
    if (tracing_) trace(place, "store", order, bits, 0);
    auto& values = values_[word];
    t.now[word] = t.acquired[word] = static_cast<std::int16_t>(values.size());
    const bool releases = order == Order::kRelease && fault_ != Fault::kPublishesRelaxed;
    if (values.size() == kMostValues) end_ = 0, slice_ = 1;  // it never ends
    values.push_back({bits, releases ? snapshot(t) : t.released, current_});
    std::memcpy(const_cast<char*>(addresses_[word]), &bits, size(word));
    t.stored_to_copy = place.copy;
    watch_->stored(current_, place, bits);
  }

  u32 faulty_load(Thread& t, u32 word);
  bool faulty_store(u32 word, u64 bits, Order order);

  void trace(const Place& place, const char* what, Order order, u64 bits, u32 age) {
    trace_[traced_++ % kTrace] = {steps_, current_, place, what, order, bits, age};
  }

  char* arena_;
  std::vector<std::uint16_t> table_;  // per four bytes: the number of the word there, or 0
  std::array<Place, kWords> places_;
  std::array<const char*, kWords> addresses_{};
  std::array<std::vector<Value>, kWords> values_;
  std::vector<std::int16_t> views_;  // per view and word: the oldest value that may be loaded
  u32 n_ = 1, stride_ = 0;
  std::array<Thread, kThreads> threads_;
  Fiber* running_ = nullptr;
  u32 threads_in_use_ = 0;
  Fiber host_;
  u32 current_ = kNobody, mask_ = 0, slice_ = 1, mean_slice_ = 1;
  u64 steps_ = 0, end_ = 0;
  bool fresh_ = false, swaps_ = false, is_stopped_ = false, tracing_ = false;
  Why why_ = Why::kRest;
  Fault fault_ = Fault::kNone;
  Random random_;
  Watch* watch_ = nullptr;
  std::array<Entry, kTrace> trace_;
  std::size_t traced_ = 0;
};

// The word that is loaded in place of another one. A late store is not later than what its own
// thread loads.
inline u32 Machine::faulty_load(Thread& t, u32 word) {
  if (t.delayed == word) {
    t.delayed = 0;
    put(word, t.delayed_bits, Order::kRelease);
  }
  const Place& place = places_[word];
  if (fault_ == Fault::kTokenOfAnotherRow && place.kind == Kind::kToken &&
      place.stage != current_ && place.row > 0) {
    for (u32 w = 1; w < n_; ++w) {
      const Place& other = places_[w];
      if (other.kind == Kind::kToken && other.copy == place.copy && other.stage == place.stage &&
          other.row == 0 && other.index == place.index)
        return w;
    }
  }
  return word;
}

// Whether the store has been dealt with.
inline bool Machine::faulty_store(u32 word, u64 bits, Order order) {
  Thread& t = threads_[current_];
  const Place& place = places_[word];
  const u64 before = plain(word);
  const bool is_word = place.kind == Kind::kWord && !place.copy;
  const bool new_epoch = is_word && bits >> 32 != before >> 32;
  const bool longer = is_word && !new_epoch && static_cast<u32>(bits) > static_cast<u32>(before);
  const auto delay = [&] {
    t.delayed = word;
    t.delayed_bits = bits;
    return true;
  };
  const auto late = [&] {  // this store, then the late one
    const u32 other = t.delayed;
    t.delayed = 0;
    if (other != word) put(word, bits, order);
    put(other, other == word ? bits : t.delayed_bits, Order::kRelease);
    return true;
  };
  if (t.delayed != 0) return late();
  switch (fault_) {
    case Fault::kTokensAfterWord:
      return place.kind == Kind::kToken && ++t.count % 2 == 0 && delay();
    case Fault::kEpochAfterTokens:
      return new_epoch && delay();
    case Fault::kEpochLost:
      return new_epoch;
    case Fault::kPublicationLost:
      return longer && ++t.count % 5 == 0;
    case Fault::kTokenLost:
      return place.kind == Kind::kToken && ++t.count % 5 == 0;
    case Fault::kTornWord:
      if (!new_epoch) return false;
      put(word, (before >> 32 << 32) | static_cast<u32>(bits), order);
      access();
      put(word, bits, order);
      return true;
    case Fault::kEpochOnly:
      if (!new_epoch) return false;
      put(word, (bits >> 32 << 32) | static_cast<u32>(before), order);
      access();
      put(word, bits, order);
      return true;
    case Fault::kCommittedLost:
      return place.kind == Kind::kCommitted && ++t.count % 3 == 0;
    case Fault::kCommittedAhead:
      if (place.kind != Kind::kCommitted) return false;
      put(word, bits + 1, order);
      return true;
    default:
      return false;
  }
}

// In place of what csrc/runtime/park.hpp calls.
template <typename T>
T load_newest(const T* p) {
  return Machine::active != nullptr ? Machine::active->load_newest(p) : *p;
}
template <typename T>
void store_newest(T* p, T value) {
  if (Machine::active != nullptr) {
    Machine::active->store_newest(p, value);
  } else {
    *p = value;
  }
}
inline void futex(Machine& machine, const u32* p, bool wait, u32 value, const timespec* timeout) {
  if (!wait) return machine.futex_wake(p);
  const auto steps =
      static_cast<u64>(timeout->tv_sec) * 1'000'000'000 + static_cast<u64>(timeout->tv_nsec);
  machine.futex_wait(p, value, steps < Machine::kForever ? steps : Machine::kNever);
}

}  // namespace simulated

namespace pipespec::memory {

template <Order order, typename T>
T load(const T* p, Scope) {
  using simulated::Machine;
  return Machine::active != nullptr ? Machine::active->load<order>(p) : *p;
}
template <Order order, typename T>
void store(T* p, T value, Scope) {
  using simulated::Machine;
  if (Machine::active != nullptr) {
    Machine::active->store<order>(p, value);
  } else {
    *p = value;
  }
}
template <Order order>
void fence(Scope) {
  if (simulated::Machine::active != nullptr) simulated::Machine::active->fence(order);
}

}  // namespace pipespec::memory
