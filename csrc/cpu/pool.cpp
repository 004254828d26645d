#include "pool.hpp"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace pipespec::cpu {
namespace {

constexpr int kMaxHelpers = 63;
// Polls before a thread sleeps: a caller polls for units in progress, a helper for the next round.
// A round of several units wakes a sleeping helper. The polls take some tens of microseconds, about
// as long as one unit or one futex wake-up.
constexpr int kLooks = 1000;

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// One round in one word, so that a unit can only be claimed from the round it belongs to:
// bit 63: no further round follows | 23 bits: round | 20 bits: units | 20 bits: next unit.
constexpr uint64_t kLast = uint64_t{1} << 63;
constexpr uint64_t ticket(uint64_t round, uint64_t units) {
  return (round & 0x7FFFFF) << 40 | units << 20;
}
constexpr uint64_t units_of(uint64_t t) { return t >> 20 & 0xFFFFF; }
constexpr uint64_t next_of(uint64_t t) { return t & 0xFFFFF; }

}  // namespace

class Pool {
 public:
  // For one job at a time. A caller that does not get the pool works alone.
  bool acquire(int helpers, Team::Work work, void* context) {
    if (!busy_.try_lock()) return false;
    start_threads(helpers);
    // Both are read only after a unit was claimed from a ticket that is stored later.
    work_ = work;
    context_ = context;
    // No longer "last", so that a helper which wakes before the first round waits for it.
    ticket_.store(ticket(++round_, 0), std::memory_order_relaxed);
    int wanted;
    {
      std::lock_guard lock(mutex_);
      open_ = true;
      wanted = helpers - inside_;  // a helper that has not left the last job yet joins this one
      wanted_ = wanted;
    }
    for (int i = 0; i < wanted; ++i) wake_.notify_one();
    return true;
  }

  void release() {
    // Helpers that still poll leave at their next poll. The caller does not wait for them: they
    // touch nothing of this job.
    ticket_.fetch_or(kLast, std::memory_order_seq_cst);
    {
      std::lock_guard lock(mutex_);
      open_ = false;
    }
    wake_resting();
    busy_.unlock();
  }

  void run(int64_t units) {
    done_.store(0, std::memory_order_relaxed);
    // Sequentially consistent, as are resting_ and the look at the ticket after it: a helper that
    // goes to rest finds this round, or is found here.
    ticket_.store(ticket(++round_, uint64_t(units)), std::memory_order_seq_cst);
    if (units > 1) wake_resting();
    work_off();
    wait_for(uint64_t(units));
  }

  int threads() {
    std::lock_guard lock(mutex_);
    return alive_;
  }

  void stop() {
    busy_.lock();  // waits for a job in another thread, and is kept: there will be no more jobs
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    next_round_.notify_all();
    for (std::thread& t : threads_) t.join();
    std::lock_guard lock(mutex_);
    alive_ = 0;
  }

 private:
  void start_threads(int count) {
    if (int(threads_.size()) >= count) return;
    // Signals belong to the threads of the application (Python handles them in its main thread).
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      while (int(threads_.size()) < count) threads_.emplace_back([this] { help(); });
    } catch (const std::system_error&) {
      // Out of threads: fewer helpers, the same results.
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    std::lock_guard lock(mutex_);
    alive_ = int(threads_.size());
  }

  void help() {
#ifdef __linux__
    pthread_setname_np(pthread_self(), "pipespec-cpu");
#endif
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return stop_ || (open_ && wanted_ > 0); });
      if (stop_) return;
      --wanted_;
      ++inside_;
      lock.unlock();
      while (help_with_job()) rest();
      lock.lock();
      --inside_;
    }
  }

  // Works on the rounds of a job; returns whether the job goes on after a long wait for a round.
  bool help_with_job() {
    for (int looks = 0; looks < kLooks; ++looks) {
      if (work_off()) looks = 0;
      if (ticket_.load(std::memory_order_relaxed) & kLast) return false;
      relax();
    }
    return true;
  }

  // Sleeps until a round of several units wakes it, or until no round follows. A round of one unit
  // is done by the caller, sooner than a helper wakes.
  void rest() {
    std::unique_lock lock(mutex_);
    resting_.fetch_add(1, std::memory_order_seq_cst);
    next_round_.wait(lock, [this] {
      const uint64_t t = ticket_.load(std::memory_order_seq_cst);
      return stop_ || (t & kLast) || next_of(t) < units_of(t);
    });
    resting_.fetch_sub(1, std::memory_order_relaxed);
  }

  void wake_resting() {
    if (resting_.load(std::memory_order_seq_cst) == 0) return;
    {
      std::lock_guard lock(mutex_);
    }  // a helper that rests waits by now
    next_round_.notify_all();
  }

  // Claims units until the round has none left; returns whether there was any.
  bool work_off() {
    bool any = false;
    uint64_t t = ticket_.load(std::memory_order_relaxed);
    while (next_of(t) < units_of(t)) {
      if (!ticket_.compare_exchange_weak(t, t + 1, std::memory_order_acquire,
                                         std::memory_order_relaxed))
        continue;
      work_(context_, int64_t(next_of(t)));
      any = true;
      done_.fetch_add(1, std::memory_order_seq_cst);
      if (sleeping_.load(std::memory_order_seq_cst)) {
        {
          std::lock_guard lock(mutex_);
        }  // the sleeper has checked done_ before, or waits by now
        finished_.notify_one();
      }
      t = ticket_.load(std::memory_order_relaxed);
    }
    return any;
  }

  void wait_for(uint64_t units) {
    for (int looks = 0; looks < kLooks; ++looks) {
      if (done_.load(std::memory_order_acquire) == units) return;
      relax();
    }
    // The helper that the caller waits for may need this core.
    std::unique_lock lock(mutex_);
    sleeping_.store(true, std::memory_order_seq_cst);
    finished_.wait(lock, [&] { return done_.load(std::memory_order_seq_cst) == units; });
    sleeping_.store(false, std::memory_order_relaxed);
  }

  std::mutex busy_;
  // Written by the holder of busy_.
  std::vector<std::thread> threads_;
  uint64_t round_ = 0;
  Team::Work work_ = nullptr;
  void* context_ = nullptr;

  alignas(64) std::atomic<uint64_t> ticket_{kLast};
  alignas(64) std::atomic<uint64_t> done_{0};
  std::atomic<bool> sleeping_{false};
  std::atomic<int> resting_{0};  // helpers inside of a job that wait for its next round

  alignas(64) std::mutex mutex_;
  std::condition_variable wake_, next_round_, finished_;
  // Guarded by mutex_.
  bool open_ = false, stop_ = false;
  int wanted_ = 0, inside_ = 0, alive_ = 0;
};

namespace {

// Never destroyed: threads may read it until the process ends.
std::atomic<Pool*> g_pool{nullptr};
std::atomic<bool> g_closed{false};

// The child of a fork has none of the threads, and its copy of the pool may be in any state. So the
// child does not use it.
void forget_pool() { g_pool.store(nullptr, std::memory_order_relaxed); }

Pool* pool() {
  Pool* current = g_pool.load(std::memory_order_acquire);
  if (current != nullptr || g_closed.load(std::memory_order_relaxed)) return current;
  [[maybe_unused]] static const int registered = pthread_atfork(nullptr, nullptr, forget_pool);
  Pool* fresh = new Pool;
  if (g_pool.compare_exchange_strong(current, fresh, std::memory_order_acq_rel)) return fresh;
  delete fresh;
  return current;
}

struct AtExit {
  ~AtExit() { shutdown_pool(); }
};
const AtExit g_at_exit;

}  // namespace

Team::Team(int helpers, Work work, void* context) : work_(work), context_(context) {
  if (helpers < 1) return;
  Pool* p = pool();
  if (p != nullptr && p->acquire(std::min(helpers, kMaxHelpers), work, context)) pool_ = p;
}

Team::~Team() {
  if (pool_ != nullptr) pool_->release();
}

void Team::run(int64_t units) {
  if (pool_ != nullptr) {
    pool_->run(units);
  } else {
    for (int64_t unit = 0; unit < units; ++unit) work_(context_, unit);
  }
}

int pool_threads() {
  Pool* p = g_pool.load(std::memory_order_acquire);
  return p == nullptr ? 0 : p->threads();
}

void shutdown_pool() {
  if (g_closed.exchange(true)) return;
  Pool* p = g_pool.load(std::memory_order_acquire);
  if (p != nullptr) p->stop();
}

}  // namespace pipespec::cpu
