// Products with packed weights for AVX-512 with VNNI.
#include "packed.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && \
    defined(__AVX512VNNI__)
#include "lanes_vnni.hpp"
//
#include "products_impl.hpp"

namespace pipespec::cpu {
namespace {

constexpr PackedKernels kKernels = packed_table<Vnni>("avx512_vnni");

}  // namespace

const PackedKernels* vnni_packed_kernels() { return &kKernels; }

}  // namespace pipespec::cpu

#else
namespace pipespec::cpu {
const PackedKernels* vnni_packed_kernels() { return nullptr; }
}  // namespace pipespec::cpu
#endif
