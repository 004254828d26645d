// Huge pages for weights, at the addresses that they have.
#pragma once

#include <cstdint>
#include <vector>

namespace pipespec::cpu {

struct AddressRange {
  uintptr_t begin, end;
};

// Puts what lies in private mappings that can be written to into huge pages. Addresses, values and
// whatever refers to them stay. A pass over weights in small pages takes a fifth longer: each page
// has an entry to look up, and stops the hardware's requests ahead.
//
// Pages of files become memory of the process: up to `room` bytes, or none. Other threads may read
// them meanwhile. What another thread writes to them meanwhile may be lost.
//
// Returns the bytes that were put there; 0 where the system has no huge pages.
int64_t use_huge_pages(std::vector<AddressRange> ranges, int64_t room, int threads);

}  // namespace pipespec::cpu
