// A unit test in a few lines: TEST(name) { CHECK(...); CHECK_EQ(a, b); } and TEST_MAIN() at the end
// of the file. A failed check prints file:line and the values, and the test continues; the program
// then exits with 1. NDEBUG has no effect here. Arguments on the command line choose tests by a
// part of their name.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace check {

struct Test {
  const char* name;
  void (*run)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

inline std::atomic<int> failures{0};  // checks may run in several threads

inline bool is_nightly() {
  static const bool all = [] {
    const char* profile = std::getenv("PIPESPEC_TESTS");
    return profile != nullptr && std::string(profile) == "nightly";
  }();
  return all;
}

// How often a test repeats something: `ci` times, or `nightly` times where the environment variable
// PIPESPEC_TESTS is "nightly" (as in tests/trials.py). Under a sanitizer every trial is slower, and
// the number of trials is smaller by at most the same factor.
inline std::uint32_t trials(std::uint32_t ci, std::uint32_t nightly) {
#if defined(__SANITIZE_THREAD__)
  constexpr std::uint32_t kCost = 8;
#elif defined(__SANITIZE_ADDRESS__)
  constexpr std::uint32_t kCost = 3;
#else
  constexpr std::uint32_t kCost = 1;
#endif
  const std::uint32_t reduced = std::max(nightly / kCost, 1u);
  return is_nightly() ? reduced : std::min(ci, reduced);
}

// Instructions or types of data, on which threads work in the same way: under ThreadSanitizer the
// last of them alone, unless the tests are the nightly ones.
template <class T>
std::vector<T> kinds(std::vector<T> all) {
#if defined(__SANITIZE_THREAD__)
  if (!is_nightly()) all.erase(all.begin(), all.end() - 1);
#endif
  return all;
}

// Whether a check held; if it did not, says in which trial.
inline bool in_trial(std::uint32_t trial, bool held) {
  if (!held) std::fprintf(stderr, "  trial %u\n", trial);
  return held;
}

inline bool add(const char* name, void (*run)()) {
  tests().push_back({name, run});
  return true;
}

inline void fail(const char* file, int line, const std::string& what) {
  ++failures;
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
}

template <class T>
std::string show(const T& value) {
  std::ostringstream out;
  if constexpr (std::is_enum_v<T>) {
    out << static_cast<long long>(value);
  } else if constexpr (sizeof(T) == 1 && std::is_integral_v<T>) {
    out << static_cast<int>(value);  // int8_t is a number here, not a letter
  } else if constexpr (requires {
                         value.begin();
                         value.end();
                       } && !std::is_convertible_v<T, std::string>) {
    out << "[";
    for (const auto& item : value) out << " " << show(item);
    out << " ]";
  } else if constexpr (requires { out << value; }) {
    out << value;
  } else {
    out << "(a value that cannot be printed)";
  }
  return out.str();
}

template <class A, class B>
bool equal(const A& a, const B& b) {
  // Integers of different signs compare by value, without a warning and without wrapping around.
  if constexpr (std::is_integral_v<A> && std::is_integral_v<B> && !std::is_same_v<A, bool> &&
                !std::is_same_v<B, bool> && !std::is_same_v<A, char> && !std::is_same_v<B, char>) {
    return std::cmp_equal(a, b);
  } else {
    return a == b;
  }
}

template <class A, class B>
bool check_equal(const A& a, const B& b, const char* text, const char* file, int line) {
  if (equal(a, b)) return true;
  fail(file, line, std::string("CHECK_EQ(") + text + "): " + show(a) + " is not " + show(b));
  return false;
}

// Waits for a condition that becomes true on a machine of any speed. A wait that runs out of time
// would never have ended. Use: CHECK(check::eventually([&] { return done.load(); })).
template <class Condition>
bool eventually(Condition condition) {
  for (int tenths_ms = 0; tenths_ms < 1'200'000; ++tenths_ms) {
    if (condition()) return true;
    usleep(100);
  }
  return condition();
}

inline int run(int argc, char** argv) {
  int ran = 0;
  for (const Test& test : tests()) {
    bool wanted = argc < 2;
    for (int i = 1; i < argc; ++i) {
      wanted = wanted || std::string(test.name).find(argv[i]) != std::string::npos;
    }
    if (!wanted) continue;
    ++ran;
    const int before = failures;
    const auto begin = std::chrono::steady_clock::now();
    try {
      test.run();
    } catch (const std::exception& error) {
      fail(test.name, 0, std::string("exception: ") + error.what());
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    std::printf("%s %6.2f s  %s\n", failures == before ? "ok    " : "FAILED", seconds.count(),
                test.name);
    std::fflush(stdout);
  }
  if (ran == 0) fail(__FILE__, __LINE__, "no test ran");
  return failures == 0 ? 0 : 1;
}

}  // namespace check

#define TEST(name)                                                                     \
  static void test_##name();                                                           \
  [[maybe_unused]] static const bool added_##name = ::check::add(#name, &test_##name); \
  static void test_##name()

// Both return whether the check held, so that a loop can stop at the first failure: if
// (!CHECK(...)) return;
#define CHECK(...) \
  ((__VA_ARGS__) ? true : (::check::fail(__FILE__, __LINE__, "CHECK(" #__VA_ARGS__ ")"), false))
#define CHECK_EQ(a, b) ::check::check_equal((a), (b), #a ", " #b, __FILE__, __LINE__)

#define CHECK_THROWS(...)                                                         \
  do {                                                                            \
    bool threw = false;                                                           \
    try {                                                                         \
      (void)(__VA_ARGS__);                                                        \
    } catch (const std::exception&) {                                             \
      threw = true;                                                               \
    }                                                                             \
    if (!threw) ::check::fail(__FILE__, __LINE__, "no exception: " #__VA_ARGS__); \
  } while (false)

#define TEST_MAIN() \
  int main(int argc, char** argv) { return ::check::run(argc, argv); }
