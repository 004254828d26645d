// A CUDA runtime without a GPU, for tests of csrc/cuda/: what the tests say to it. A stream is a
// thread that runs what was queued in order, as late as it likes. A copy reads its source when it
// runs. A device whose code fails is broken from then on, as a CUDA context is: nothing queued
// there runs any more, and every call that meets it returns the error. Uses that a real runtime
// would answer with undefined behaviour are counted as misuses.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cuda_runtime.h"

namespace fake_cudart {

// Everything as in a new process with so many devices: no error, no call counted. Before each
// queued operation, and in calls, there are pauses of up to `pauses_us`. While no stream exists.
void reset(int devices, std::uint32_t pauses_us = 0, std::uint64_t seed = 0);

// The call number n (from 0) of this function since reset(), or of any with "", returns `error` and
// does nothing else. Those that report what has run, and those that free, cannot fail in this way:
// there the device breaks.
void fail_call(const std::string& function, std::uint64_t n, cudaError_t error);
// Calls of a function since reset(), or of all with "".
std::uint64_t calls(const std::string& function = "");
// The device that the last such call was for; -1: none has failed yet.
int failed_device();
// As code that fails while it runs does.
void break_device(int device, cudaError_t error);

// Whether some device is broken.
bool is_broken();
// No device is broken, and no call will fail.
void heal();

// Queues a function as if it were a kernel, also into a graph. What it throws breaks the device.
cudaError_t enqueue(cudaStream_t stream, std::function<void()> kernel);

// What has been used wrongly since reset(): a graph that was destroyed, memory that was freed, a
// warp whose threads diverge.
std::vector<std::string> misuses();
// Streams and events that exist.
std::uint64_t living();

}  // namespace fake_cudart
