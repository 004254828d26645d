// The CUDA devices of the machine. Without a driver, every call works or says what is missing.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace pipespec::cuda {

struct Device {
  std::string name;
  int major, minor;  // compute capability
  int multiprocessors;
  std::size_t memory_bytes;
};

int runtime_version();          // of the runtime linked into this module, e.g. 13000
int driver_version();           // newest runtime that the driver supports; 0 without a driver
std::vector<Device> devices();  // throws std::runtime_error that says why where there is none

}  // namespace pipespec::cuda
