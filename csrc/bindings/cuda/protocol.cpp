// Bindings of plan() and commit() on the device: addresses and numbers;
// pipespec_kernels/device_state.py has checked them.
#include "bindings/cuda/bindings.hpp"
#include "cuda/check.hpp"
#include "cuda/protocol_kernels.hpp"

namespace py = pybind11;

namespace pipespec::cuda {
namespace {

using Address = std::uintptr_t;

template <class T = void>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

StepArrays arrays(Address tokens, Address kv, Address query_lens, Address num_draft_tokens,
                  Address n_select, Address action) {
  using T = std::int32_t;
  return {pointer<T>(tokens),           pointer<T>(kv),       pointer<T>(query_lens),
          pointer<T>(num_draft_tokens), pointer<T>(n_select), pointer<T>(action)};
}

}  // namespace

void bind_protocol(py::module_& m) {
  py::enum_<Scope>(m, "Scope").value("SYSTEM", Scope::kSystem).value("DEVICE", Scope::kDevice);
  m.def("plan",
        [](Address block, Scope scope, std::uint32_t stage, std::uint32_t rows, std::uint32_t width,
           Address policies, Address scratch, Address tokens, Address kv, Address query_lens,
           Address num_draft_tokens, Address n_select, Address action, std::uintptr_t stream) {
          check(plan(pointer(block), scope, stage, rows, width, pointer<StepPolicy>(policies),
                     pointer<StepScratch>(scratch),
                     arrays(tokens, kv, query_lens, num_draft_tokens, n_select, action), stream),
                "plan");
        });
  m.def("commit", [](Address block, Scope scope, std::uint32_t stage, std::uint32_t rows,
                     std::uint32_t width, Address tokens, Address kv, Address query_lens,
                     Address num_draft_tokens, Address n_select, Address action, Address selected,
                     std::int64_t stride, std::uintptr_t stream) {
    check(commit(pointer(block), scope, stage, rows, width,
                 arrays(tokens, kv, query_lens, num_draft_tokens, n_select, action),
                 pointer<std::int32_t>(selected), stride, stream),
          "commit");
  });
  m.def("open_step", [](Address scratch, std::uintptr_t stream) {
    check(open_step(pointer<StepScratch>(scratch), stream), "open_step");
  });
  m.def("close_step",
        [](Address block, Address shadow, std::uint32_t stage, std::uint32_t rows, Address tokens,
           Address kv, Address query_lens, Address num_draft_tokens, Address n_select,
           Address action, Address scratch, Address log, std::uintptr_t stream) {
          check(close_step(pointer(block), pointer(shadow), stage, rows,
                           arrays(tokens, kv, query_lens, num_draft_tokens, n_select, action),
                           pointer<StepScratch>(scratch), pointer<StepLog>(log), stream),
                "close_step");
        });
}

}  // namespace pipespec::cuda
