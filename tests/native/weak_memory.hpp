// A memory below the protocol that gives every answer the orders of its accesses allow, one
// execution after the other (csrc/protocol/hd.hpp includes it for PIPESPEC_MEMORY).
//
// The model is the operational form of release and acquire in C++ (Kang, Hur, Lahav, Vafeiadis,
// Dreyer: "A Promising Semantics for Relaxed-Memory Concurrency", POPL 2017, without promises and
// without read-modify-write), with the scopes of PTX. Each word keeps all its values. A thread has
// a view: per word the oldest value that it may still load. A release attaches the view to a value,
// and an acquire of that value takes it over, if the scopes of both include both threads. Without
// promises a load never sees a store that depends on a later store of its own thread. The protocol
// has no such executions, because the stores that others wait for are releases.
//
// The threads of a test run one after the other, in an order in which none reads what a later one
// writes. No outcome is lost: the reader may still load any old value. This memory cannot express a
// test in which two threads read each other.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <map>
#include <stdexcept>
#include <vector>

namespace weak {

using pipespec::Order, pipespec::Scope;

// An order that a test takes away from the protocol everywhere.
enum class Without { kNothing, kRelease, kAcquire, kReleaseFence, kAcquireFence, kAll };

using View = std::map<const void*, std::size_t>;

inline void join(View& view, const View& other) {
  for (const auto& [word, at] : other) view[word] = std::max(view[word], at);
}

struct Thread {
  int device;
  View now, acquired, released;  // what a load sees; after an acquire fence; since a release fence
};

struct Value {
  std::uint64_t bits;
  View view;
  int device;
  Scope scope;
};

struct Word {
  const Thread* writer = nullptr;
  std::vector<Value> values;
};

class Memory {
 public:
  explicit Memory(Without without) : without_(without) {}

  // Another execution; false: there was none left.
  bool again() {
    words_.clear();
    at_ = 0;
    while (!choices_.empty() && choices_.back().taken + 1 == choices_.back().of)
      choices_.pop_back();
    if (choices_.empty()) return false;
    ++choices_.back().taken;
    return true;
  }

  template <class Run>
  void run(Thread& thread, const Run& body) {
    thread_ = &thread;
    current = this;
    body();
    current = nullptr;
  }
  // The thread waits until all other threads have ended.
  void settle(Thread& thread) const {
    for (const auto& [address, word] : words_) thread.now[address] = word.values.size() - 1;
  }

  template <typename T>
  T load(const T* p, Order order, Scope scope) {
    Word& word = at(p);
    const std::size_t oldest = thread_->now[p], of = word.values.size() - oldest;
    const std::size_t found = oldest + choose(of);
    const Value& value = word.values[found];
    thread_->now[p] = thread_->acquired[p] = found;
    if (reaches(value, scope)) {
      join(thread_->acquired, value.view);
      if (order != Order::kRelaxed && !lacks(Without::kAcquire)) join(thread_->now, value.view);
    }
    T out;
    std::memcpy(&out, &value.bits, sizeof out);
    return out;
  }

  template <typename T>
  void store(T* p, T value, Order order, Scope scope) {
    Word& word = at(p);
    if (word.writer != nullptr && word.writer != thread_)
      throw std::logic_error("a word has two writers");
    word.writer = thread_;
    thread_->now[p] = thread_->acquired[p] = word.values.size();
    const bool releases = order == Order::kRelease && !lacks(Without::kRelease);
    Value stored{0, releases ? thread_->now : thread_->released, thread_->device, scope};
    stored.view[p] = word.values.size();
    std::memcpy(&stored.bits, &value, sizeof value);
    word.values.push_back(std::move(stored));
    *p = value;
  }

  void fence(Order order) {
    if (order == Order::kAcquire && !lacks(Without::kAcquireFence))
      thread_->now = thread_->acquired;
    if (order == Order::kRelease && !lacks(Without::kReleaseFence))
      thread_->released = thread_->now;
  }

  static inline Memory* current = nullptr;  // null: plain accesses, as while a test is set up

 private:
  struct Choice {
    std::size_t taken, of;
  };

  std::size_t choose(std::size_t of) {
    if (of == 1) return 0;
    if (at_ == choices_.size()) choices_.push_back({0, of});
    return choices_[at_++].taken;
  }
  template <typename T>
  Word& at(const T* p) {
    Word& word = words_[p];
    if (word.values.empty()) {
      std::uint64_t bits = 0;
      std::memcpy(&bits, p, sizeof *p);
      word.values.push_back({bits, {}, thread_->device, Scope::kSystem});
    }
    return word;
  }
  bool lacks(Without what) const { return without_ == what || without_ == Without::kAll; }
  bool reaches(const Value& value, Scope scope) const {
    return value.device == thread_->device ||
           (value.scope == Scope::kSystem && scope == Scope::kSystem);
  }

  Without without_;
  Thread* thread_ = nullptr;
  std::map<const void*, Word> words_;
  std::vector<Choice> choices_;  // of this execution; the next one differs in the last of them
  std::size_t at_ = 0;
};

}  // namespace weak

namespace pipespec::memory {

template <Order order, typename T>
T load(const T* p, Scope scope) {
  return weak::Memory::current != nullptr ? weak::Memory::current->load(p, order, scope) : *p;
}
template <Order order, typename T>
void store(T* p, T value, Scope scope) {
  if (weak::Memory::current != nullptr) {
    weak::Memory::current->store(p, value, order, scope);
  } else {
    *p = value;
  }
}
template <Order order>
void fence(Scope) {
  if (weak::Memory::current != nullptr) weak::Memory::current->fence(order);
}

}  // namespace pipespec::memory
