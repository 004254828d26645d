// Whether check.hpp finds failures: a harness that cannot fail would pass everything.
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.hpp"

// The number of failures since the last call. They are intended here, so the count is reset.
static int rolled_back() { return check::failures.exchange(0); }

TEST(what_holds_passes) {
  CHECK(1 + 1 == 2);
  CHECK_EQ(1u, 1);
  CHECK_EQ(std::vector<int>({1, 2}), std::vector<int>({1, 2}));
  CHECK_EQ(std::string("a"), "a");
  CHECK_THROWS(throw std::runtime_error("wanted"));
}

TEST(what_does_not_hold_fails) {
  CHECK(false);
  CHECK_EQ(rolled_back(), 1);
  CHECK_EQ(-1, 4294967295u);
  CHECK_EQ(rolled_back(), 1);
  CHECK_EQ(std::vector<int>({1, 2}), std::vector<int>({1}));
  CHECK_EQ(rolled_back(), 1);
  CHECK_THROWS(1);
  CHECK_EQ(rolled_back(), 1);
}

TEST(checks_return_whether_they_held) {
  const bool held = CHECK(true) && CHECK_EQ(1, 1);
  const bool failed = CHECK(false) || CHECK_EQ(1, 2);
  CHECK_EQ(rolled_back(), 2);
  CHECK(held);
  CHECK(!failed);
}

TEST(values_are_shown) {
  CHECK_EQ(check::show(std::int8_t{3}), "3");
  CHECK_EQ(check::show(std::vector<int>({1, 2})), "[ 1 2 ]");
  CHECK_EQ(check::show(std::string("text")), "text");
}

TEST_MAIN()
