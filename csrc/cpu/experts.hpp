// A feed-forward of experts: a router chooses some of them for each column, and their outputs are
// added with weights. The columns of a forward are grouped by expert, so that each expert is read
// once. The numbers of a column do not depend on the others.
#pragma once

#include <cstdint>
#include <vector>

#include "product.hpp"
#include "routing.hpp"

namespace pipespec::cpu {

struct Expert {
  Matrix gate_up, down;
  int64_t intermediate = 0;
};

struct ExpertLayer {
  Routing routing;
  Matrix router;  // outputs: the experts, and in another panel the gate of the shared one, if any
  std::vector<float> bias;      // of the choice, or none
  std::vector<Expert> experts;  // with the shared one, if there is one, as the last
  bool has_shared = false, gates_shared = false;
  Activation activation = Activation::kSilu;
  float limit = 0.0f;  // gates and ups are clamped to it, and one is added to the latter; 0: not

  bool is_used() const { return !experts.empty(); }
};

// out[count, hidden]: the sums of the experts' outputs for x[count, hidden]. `threads`: of `run`.
void run_experts(const ExpertLayer& layer, const float* x, int64_t count, int64_t hidden,
                 const Rounds& run, int threads, float* out);

}  // namespace pipespec::cpu
