// launch.cuh's side of the host, over a runtime that counts (cuda_runtime.h beside this), by a C interface.
#include "kernels.h"

#include <cuda_runtime.h>

#include <thread>
#include <vector>

#include "kernels/launch.cuh"

namespace {
void first(int) {}
void second(int) {}
}  // namespace

extern "C" {

const char *harness_error() { return specbuild::message; }

int harness_launch(int kernel, int on, int shared, int overlap) {
  device = on;
  return specbuild::launch(kernel ? second : first, specbuild::Grid{1, 1, 1, 32, size_t(shared)}, 7, nullptr, overlap);
}

int harness_compiled_for(int kernel, int on) {
  device = on;
  int architecture = 0;
  return specbuild::compiled_for(kernel ? second : first, &architecture) ? -1 : architecture;
}

// From several threads at once, with allowances of all sizes up to `most`.
void harness_launch_at_once(int threads, int most) {
  std::vector<std::thread> all;
  for (int i = 0; i < threads; ++i)
    all.emplace_back([=] {
      for (int size = 1 + i; size <= most; size += threads) harness_launch(0, 0, size, 0);
    });
  for (std::thread &each : all) each.join();
}

void harness_fail(int on) { failing = on; }

// Asked, allowed, launched, overlapped, and the last allowance.
void harness_counts(int *to) { to[0] = asked, to[1] = allowed, to[2] = launched, to[3] = overlapped, to[4] = allowance; }

}  // extern "C"
