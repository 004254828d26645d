// Products with packed weights for NEON with dot products of bytes.
#include "packed.hpp"
//
#include "lanes_neon.hpp"
//
#include "products_impl.hpp"

namespace pipespec::cpu {
namespace {

constexpr PackedKernels kKernels = packed_table<PackedNeon>("dotprod");

}  // namespace

const PackedKernels* dotprod_packed_kernels() { return &kKernels; }

}  // namespace pipespec::cpu
