// A CUDA runtime without a GPU, for tests of csrc/cuda/: its controls. A stream is a thread that
// runs its queue in order, after random delays. A copy reads its source when it runs. A device
// whose code fails is broken from then on, as a CUDA context is: nothing queued there runs any
// more, and every call that meets it returns the error. Uses that a real runtime would answer with
// undefined behaviour are counted as misuses.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cuda_runtime.h"

namespace fake_cudart {

// Returns to the state of a new process with this number of devices: no error, no call counted.
// Each queued operation and some calls wait for up to `pauses_us`. Only while no stream exists.
void reset(int devices, std::uint32_t pauses_us = 0, std::uint64_t seed = 0);

// The call number n (from 0) of this function since reset(), or of any with "", returns `error` and
// does nothing else. Those that report what has run, and those that free, cannot fail in this way:
// there the device breaks.
void fail_call(const std::string& function, std::uint64_t n, cudaError_t error);
// Calls of a function since reset(), or of all with "".
std::uint64_t calls(const std::string& function = "");
// The device that the last such call was for; -1: none has failed yet.
int failed_device();
// Breaks the device like code that fails while it runs.
void break_device(int device, cudaError_t error);

// Whether some device is broken.
bool is_broken();
// Repairs all devices; no call fails from here on.
void heal();

// Queues a function as if it were a kernel, also into a graph. An exception breaks the device.
cudaError_t enqueue(cudaStream_t stream, std::function<void()> kernel);

// Misuses since reset(): use of a destroyed graph or of freed memory, a warp whose threads diverge.
std::vector<std::string> misuses();
// Streams and events that exist.
std::uint64_t living();

}  // namespace fake_cudart
