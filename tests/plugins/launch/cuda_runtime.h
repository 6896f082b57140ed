// As much of CUDA's runtime as a launch asks, which counts: two devices, and a call that fails where it is told to.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <thread>

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization };
typedef struct stream *cudaStream_t;

struct dim3 {
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  unsigned x, y, z;
};
struct cudaFuncAttributes { int ptxVersion; };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct { int programmaticStreamSerializationAllowed; } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute *attrs;
  unsigned numAttrs;
};

inline std::atomic<int> asked, allowed, launched, overlapped, allowance, failing;
inline thread_local int device;

inline const char *cudaGetErrorString(cudaError_t) { return "invalid argument"; }
inline cudaError_t cudaGetDevice(int *to) { return *to = device, cudaSuccess; }
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *to, const void *) {
  ++asked;
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // time for another thread to ask as well
  if (failing) return cudaErrorInvalidValue;
  to->ptxVersion = device == 0 ? 90 : 80;
  return cudaSuccess;
}
inline cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int value) {
  ++allowed;
  if (failing) return cudaErrorInvalidValue;
  allowance = value;
  return cudaSuccess;
}
template <class P> cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*)(P), P) {
  ++launched, overlapped += int(config->numAttrs);
  return cudaSuccess;
}
