// Bindings of the litmus test, for GPUs and for the host's side of it: addresses and numbers.
#include "cuda/litmus.hpp"

#include "bindings/cuda/bindings.hpp"
#include "cuda/check.hpp"

namespace py = pybind11;

namespace pipespec::cuda {
namespace {

using u32 = std::uint32_t;
using Address = std::uintptr_t;

void* pointer(Address address) { return reinterpret_cast<void*>(address); }

}  // namespace

void bind_litmus(py::module_& m) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  m.attr("LITMUS_FIELDS") = py::make_tuple("looks", "epochs", "tokens", "wrong");
  m.def(
      "litmus_write",
      [](Address block, Scope scope, u32 stage, u32 row, u32 epochs, u32 length, Address stream) {
        check(litmus_write(pointer(block), scope, stage, row, epochs, length, stream),
              "litmus_write");
      },
      unlocked);
  m.def(
      "litmus_read",
      [](Address block, Scope scope, u32 stage, u32 row, u32 looks, Address out, Address stream) {
        check(litmus_read(pointer(block), scope, stage, row, looks,
                          static_cast<LitmusCount*>(pointer(out)), stream),
              "litmus_read");
      },
      unlocked);
  m.def(
      "litmus_write_here",
      [](Address block, u32 stage, u32 row, u32 epochs, u32 length) {
        pipespec::litmus_write(Block(pointer(block)), stage, row, epochs, length);
      },
      unlocked);
  m.def("litmus_read_here", [](Address block, u32 stage, u32 row, u32 looks) {
    LitmusCount count;
    {
      const py::gil_scoped_release free;
      count = pipespec::litmus_read(Block(pointer(block)), stage, row, looks);
    }
    return py::make_tuple(count.looks, count.epochs, count.tokens, count.wrong);
  });
}

}  // namespace pipespec::cuda
