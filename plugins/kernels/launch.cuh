// The host's side of every launcher: how it refuses, what it checks of pointers, how it launches. Included by common.cuh.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <map>
#include <mutex>

namespace specbuild {

// The last refusal's text; one a thread, shared by all files of the library.
inline thread_local char message[256] = "";

__attribute__((format(printf, 1, 2))) inline int refuse(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  return SPECBUILD_BAD_INPUT;
}

struct Grid {
  int x, y, z, threads;
  size_t shared;
};

#ifdef SPECBUILD_HOST
template <class P> int compiled_for(void (*)(P), int *architecture) { return *architecture = 90, SPECBUILD_OK; }
template <class P> int launch(void (*kernel)(P), Grid grid, const P &p, void *stream, bool overlap = false) {
  const void *const address = reinterpret_cast<const void *>(kernel);
  const char *problem = host::launch(stream, overlap, address, grid, [=] { kernel(p); });
  if (!problem) return SPECBUILD_OK;
  snprintf(message, sizeof message, "%s", problem);
  return SPECBUILD_CUDA_ERROR;
}
#else
inline int cuda_status(cudaError_t error) {
  if (error == cudaSuccess) return SPECBUILD_OK;
  snprintf(message, sizeof message, "CUDA: %s", cudaGetErrorString(error));
  return SPECBUILD_CUDA_ERROR;
}

// Of a kernel on the current device the compute capability that the code it runs there was compiled for, 90 for 9.0; 0: the
// driver does not say. And lets it have so many bytes of dynamic shared memory. CUDA is asked once, and again for more bytes,
// not at every launch of every layer; nor does a smaller allowance follow a larger one of another thread.
inline cudaError_t prepare(const void *kernel, size_t shared, int *architecture) {
  struct Known { int architecture; size_t shared; };
  static std::mutex one;
  static std::map<std::pair<const void *, int>, Known> all;
  std::lock_guard<std::mutex> lock(one);
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device)) return error;
  auto known = all.find({kernel, device});
  if (known == all.end()) {
    cudaFuncAttributes compiled = {};
    if (const cudaError_t error = cudaFuncGetAttributes(&compiled, kernel)) return error;
    // With the static part more than this may exceed the 48 KiB that need no asking.
    known = all.insert({{kernel, device}, {compiled.ptxVersion, 16 * 1024}}).first;
  }
  *architecture = known->second.architecture;
  if (shared <= known->second.shared) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared));
  if (error == cudaSuccess) known->second.shared = shared;
  return error;
}

template <class P> int compiled_for(void (*kernel)(P), int *architecture) {
  return cuda_status(prepare(reinterpret_cast<const void *>(kernel), 0, architecture));
}

// overlap: the kernel may start before the one in front of it in the stream has ended, and waits for it by itself: if it was
// compiled for compute capability 9.0 or later, for only then it has the instruction (griddepcontrol.wait).
template <class P> int launch(void (*kernel)(P), Grid grid, const P &p, void *stream, bool overlap = false) {
  int architecture = 0;
  cudaError_t error = prepare(reinterpret_cast<const void *>(kernel), grid.shared, &architecture);
  if (error == cudaSuccess) {
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(grid.x, grid.y, grid.z);
    config.blockDim = dim3(grid.threads);
    config.dynamicSmemBytes = grid.shared;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &attribute;
    config.numAttrs = overlap && architecture >= 90 ? 1 : 0;
    error = cudaLaunchKernelEx(&config, kernel, p);
  }
  return cuda_status(error);
}
#endif

inline const char *name_of(int dtype) {
  static const char *const names[] = {"float32", "float16", "bfloat16", "float8 E4M3", "bool", "int8"};
  return dtype >= 0 && dtype < int(sizeof names / sizeof *names) ? names[dtype] : "an unknown type";
}

inline bool aligned(const void *at, unsigned to = 16) { return reinterpret_cast<uintptr_t>(at) % to == 0; }

struct Pointer {
  const char *name;
  const void *at;
  unsigned alignment = 16;
  bool optional = false;
};
template <size_t kCount> int check_pointers(const Pointer (&pointers)[kCount]) {
  for (const Pointer &p : pointers) {
    if (!p.at && !p.optional) return refuse("%s is null", p.name);
    if (!aligned(p.at, p.alignment)) return refuse("%s lies at %p: align it to %u bytes", p.name, p.at, p.alignment);
  }
  return SPECBUILD_OK;
}
template <size_t kCount, class P>
int launch(const Pointer (&pointers)[kCount], void (*kernel)(P), Grid grid, const P &p, void *stream) {
  const int status = check_pointers(pointers);
  return status ? status : launch(kernel, grid, p, stream);
}

}  // namespace specbuild
