// Litmus tests: each memory order that the protocol rests on, with every outcome that C++ and PTX
// allow (weak_memory.hpp). They run the protocol's own headers. Each test also takes orders away
// and says which ones it needs. test_threads.cpp has L1, L3, L7 and L8 with threads.
#define pipespec pipespec_weak  // keeps these inline functions apart from the core's
#define PIPESPEC_MEMORY "../tests/native/weak_memory.hpp"
#include "check.hpp"
#include "fake_stage.hpp"
#include "protocol/commit.hpp"
#include "protocol/replicate.hpp"

using namespace pipespec;
using fake::Tokens;
using weak::Without;
using u32 = std::uint32_t;

namespace {

constexpr u32 kCapacity = 8;
constexpr StepPolicy kPolicy{kCapacity, kCapacity, 0, kCapacity};

// The threads of a litmus test and the blocks between them, new for each execution.
class Litmus {
 public:
  Litmus(weak::Memory& memory, u32 stages, int writers_device, int readers_device, Scope scope)
      : memory_(memory),
        device_(writers_device),
        readers_{readers_device, {}, {}, {}},
        own_(stages, 1, kCapacity),
        copy_(stages, 1, kCapacity),
        block_(own_.base(), scope) {
    for (const Block& block : {own_.block(), copy_.block()}) {
      block.header().active_rows = 1;
      reset_row(block, 0, 1, kCapacity, 9);
    }
  }

  const Block& block() const { return block_; }
  const Block& copy() const { return copy_.block(); }
  template <class Body>
  void write(u32 stage, const Body& body) {
    weak::Thread& thread = writers_.emplace(stage, weak::Thread{device_, {}, {}, {}}).first->second;
    memory_.run(thread, body);
  }
  void settle(u32 stage) { memory_.settle(writers_.at(stage)); }
  template <class Body>
  void read(const Body& body) {
    memory_.run(readers_, body);
  }

 private:
  weak::Memory& memory_;
  int device_;
  std::map<u32, weak::Thread> writers_;
  weak::Thread readers_;
  fake::BlockMemory own_, copy_;
  Block block_;
};

struct Counts {
  u32 executions = 0, wrong = 0;
};

struct Where {
  int writer = 0, reader = 0;
  Scope scope = Scope::kDevice;
};

// `body(litmus)` returns whether the outcome of an execution is allowed.
template <class Body>
Counts explore(u32 stages, Without without, Where where, const Body& body) {
  weak::Memory memory(without);
  Counts counts;
  do {
    Litmus litmus(memory, stages, where.writer, where.reader, where.scope);
    ++counts.executions;
    counts.wrong += !body(litmus);
  } while (memory.again());
  return counts;
}

constexpr Without kEach[] = {Without::kRelease, Without::kAcquire, Without::kReleaseFence,
                             Without::kAcquireFence};

// The protocol as it is has no wrong outcome. It has one without any of the orders in `needed`, and
// none without any other order.
template <class Body>
void needs(u32 stages, std::initializer_list<Without> needed, const Body& body, Where where = {}) {
  const Counts intact = explore(stages, Without::kNothing, where, body);
  CHECK_EQ(intact.wrong, 0u);
  CHECK(intact.executions > 1);  // there was something to choose
  for (const Without without : kEach) {
    const bool is_needed = std::find(needed.begin(), needed.end(), without) != needed.end();
    const Counts counts = explore(stages, without, where, body);
    if (!CHECK_EQ(counts.wrong > 0, is_needed))
      std::fprintf(stderr, "  without %d: %u of %u\n", static_cast<int>(without), counts.wrong,
                   counts.executions);
  }
}

// The two texts of the writers: in epoch e, position p holds this.
std::int32_t token_of(u32 epoch, u32 p) { return static_cast<std::int32_t>(10 * (epoch + 1) + p); }

void write_epoch(OwnSequence& own, u32 length) {
  while (own.length() < length) own.append(token_of(own.epoch(), own.length()));
  own.publish();
}

// W: tokens of epoch 0, word, word of epoch 1, tokens of epoch 1, word.
void write_two_epochs(const Block& block, u32 stage) {
  OwnSequence own(block, stage, 0);
  write_epoch(own, 3);
  own.truncate(1);
  write_epoch(own, 3);
}

bool reads_one_epoch(const Sequence& sequence) {
  const Word seen = sequence.word();
  bool right = true;
  for (u32 p = 1; p < seen.length; ++p)
    right = (sequence.token(p) == token_of(seen.epoch, p)) && right;
  return right || !sequence.still(seen);
}

}  // namespace

// L1. Publication.   W: tokens 1, 2, word = (0, 3)   ||   R: word = (0, n), tokens below n
// Allowed: exactly the tokens that W wrote. Needs: release of the word, acquire of the word.
TEST(L1_a_reader_that_sees_a_length_sees_its_tokens) {
  const auto body = [](Litmus& litmus) {
    litmus.write(1, [&] {
      OwnSequence own(litmus.block(), 1, 0);
      write_epoch(own, 3);
    });
    bool right = true;
    litmus.read([&] {
      const Sequence seen(litmus.block(), 1, 0);
      const u32 length = seen.word().length;
      for (u32 p = 1; p < length; ++p) right = (seen.token(p) == token_of(0, p)) && right;
    });
    return right;
  };
  needs(2, {Without::kRelease, Without::kAcquire}, body);
  // Device scope does not reach another device or the host. System scope does.
  CHECK(explore(2, Without::kNothing, {0, 1, Scope::kDevice}, body).wrong > 0);
  CHECK_EQ(explore(2, Without::kNothing, {0, 1, Scope::kSystem}, body).wrong, 0u);
}

// L2. Epoch before overwrite.   W: word = (0, 3), word = (1, 1), tokens of epoch 1, word = (1, 3)
//                               R: word = (e, n), tokens below n, still(e)
// Allowed: not still; or every token is the one of epoch e. Needs: L1's orders, the fence after
// the new epoch, the fence before the second look.
TEST(L2_within_one_epoch_a_reader_sees_one_text) {
  const auto body = [](Litmus& litmus) {
    litmus.write(1, [&] { write_two_epochs(litmus.block(), 1); });
    bool right = true;
    litmus.read([&] { right = reads_one_epoch(Sequence(litmus.block(), 1, 0)); });
    return right;
  };
  needs(2, {kEach[0], kEach[1], kEach[2], kEach[3]}, body);
  CHECK(explore(2, Without::kNothing, {0, 1, Scope::kDevice}, body).wrong > 0);
  CHECK_EQ(explore(2, Without::kNothing, {0, 1, Scope::kSystem}, body).wrong, 0u);
}

// L4. Committed.   T (the target): tokens, word   ||   D (a draft with another text): plan()
//                R: word = (e, n) of D, committed = c of D, tokens below min(c, n), still(e)
// Allowed: not still; or the tokens are the target's. `committed` itself is relaxed.
TEST(L4_committed_tokens_are_the_targets) {
  needs(3, {kEach[0], kEach[1], kEach[2], kEach[3]}, [](Litmus& litmus) {
    const auto own_text = [&](u32 stage, std::int32_t differs) {
      OwnSequence own(litmus.block(), stage, 0);
      own.append(11);
      own.append(differs);
      own.publish();
    };
    litmus.write(2, [&] { own_text(2, 5); });
    litmus.write(1, [&] {
      own_text(1, 6);
      Tokens buffer(kCapacity);
      plan(litmus.block(), 1, 0, kPolicy, buffer.data());
    });
    bool right = true;
    litmus.read([&] {
      const Sequence draft(litmus.block(), 1, 0);
      const Word seen = draft.word();
      const u32 settled = std::min(draft.committed(), seen.length);
      for (u32 p = 1; p < settled; ++p) right = (draft.token(p) == (p == 1 ? 11 : 5)) && right;
      right = right || !draft.still(seen);
    });
    return right;
  });
}

// L5. Torn adoption heals.   N (a draft): rewrites its text   ||   R (its upstream, with N's first
// text): plan(), and plan() again when N has come to rest. Allowed: R's tokens are N's. Not: a
// mixture that stays. Needs: L1's orders. Without the fences of L2 the first plan() may see two
// texts at once and take them for one; the second sees the new epoch and compares again.
TEST(L5_torn_adoption_heals) {
  needs(3, {Without::kRelease, Without::kAcquire}, [](Litmus& litmus) {
    litmus.write(1, [&] { write_two_epochs(litmus.block(), 1); });
    Tokens buffer(kCapacity);
    litmus.write(0, [&] {
      OwnSequence own(litmus.block(), 0, 0);
      write_epoch(own, 3);  // N's first text
      plan(litmus.block(), 0, 0, kPolicy, buffer.data());
    });
    litmus.settle(0);
    litmus.write(0, [&] { plan(litmus.block(), 0, 0, kPolicy, buffer.data()); });
    return fake::tokens_of(litmus.block(), 0, 0, 1, 3) ==
               fake::tokens_of(litmus.block(), 1, 0, 1, 3) &&
           Sequence(litmus.block(), 0, 0).word().length == 3;
  });
}

// L6. Draft tokens.   U (a draft): rewrites its text   ||   T (the target): plan(), commit()
// Allowed: T's tokens are T's choices, whatever T read. Needs: nothing.
TEST(L6_the_text_needs_no_order) {
  const auto body = [](Litmus& litmus) {
    litmus.write(0, [&] { write_two_epochs(litmus.block(), 0); });
    litmus.write(1, [&] {
      Tokens buffer(kCapacity), selected(kCapacity);
      const Step step = plan(litmus.block(), 1, 0, kPolicy, buffer.data());
      for (u32 j = 0; j <= step.num_draft_tokens; ++j) selected[j] = token_of(0, 1 + j);
      commit(litmus.block(), 1, 0, step, buffer.data(), selected.data());
    });
    const u32 length = Sequence(litmus.block(), 1, 0).word().length;
    bool right = length > 1;
    for (u32 p = 1; p < length; ++p)
      right &= Sequence(litmus.block(), 1, 0).token(p) == token_of(0, p);
    return right;
  };
  needs(2, {}, body);
  CHECK_EQ(explore(2, Without::kAll, {}, body).wrong, 0u);
}

// L7. The host shadow.   W: a step, replicate(), a rollback, a step, replicate()   ||   R, on the
// host: word = (e, n), tokens below n, still(e). As L2, at system scope whatever that of W's block.
TEST(L7_the_host_shadow_keeps_the_order) {
  const auto body = [](bool narrow) {
    return [narrow](Litmus& litmus) {
      const Block copy(&litmus.copy().header(), narrow ? Scope::kDevice : Scope::kSystem);
      litmus.write(1, [&] {
        OwnSequence own(litmus.block(), 1, 0);
        write_epoch(own, 3);
        replicate(litmus.block(), copy, 1, 0, 1);
        own.truncate(1);
        write_epoch(own, 3);
        replicate(litmus.block(), copy, 1, 0, 1);
      });
      bool right = true;
      litmus.read([&] { right = reads_one_epoch(Sequence(litmus.copy(), 1, 0)); });
      return right;
    };
  };
  needs(2, {kEach[0], kEach[1], kEach[2], kEach[3]}, body(false), {0, 1, Scope::kDevice});
  CHECK(explore(2, Without::kNothing, {0, 1, Scope::kDevice}, body(true)).wrong > 0);
}

// L8. The end of a step.   W: replicate(), ended = 1   ||   R: ended = 1, word of the host shadow
// Allowed: the word of that step. An older one would let the scheduler sleep over a step that it
// could launch. Needs: release and acquire of `ended`.
TEST(L8_a_step_that_has_ended_is_in_the_host_shadow) {
  needs(2, {Without::kRelease, Without::kAcquire},
        [](Litmus& litmus) {
          std::uint64_t ended = 0;
          litmus.write(1, [&] {
            OwnSequence own(litmus.block(), 1, 0);
            write_epoch(own, 3);
            replicate(litmus.block(), litmus.copy(), 1, 0, 1);
            store_release(&ended, std::uint64_t{1});
          });
          bool right = true;
          litmus.read([&] {
            if (load_acquire(&ended) == 1) right = Sequence(litmus.copy(), 1, 0).word().length == 3;
          });
          return right;
        },
        {0, 1, Scope::kDevice});
}

TEST_MAIN()
