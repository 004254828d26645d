// Products with packed weights for NEON.
#include "packed.hpp"
//
#include "lanes_neon.hpp"
//
#include "products_impl.hpp"

namespace pipespec::cpu {
namespace {

constexpr PackedKernels kKernels = packed_table<PackedNeon>("neon");

}  // namespace

const PackedKernels* neon_packed_kernels() { return &kKernels; }

}  // namespace pipespec::cpu
