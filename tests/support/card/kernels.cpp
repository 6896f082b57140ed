// Modules, libraries and launches: a kernel of an image is the one of its name that is compiled for the host.
#include "card/card.h"

#include <cstring>
#include <dlfcn.h>

namespace card {
namespace {

struct Kernel {
  const card_kernel *known;
  int shared = 48 * 1024;  // what a launch may ask for
};
struct Image {
  std::string bytes;
  std::map<std::string, Kernel> kernels;
};

constexpr int kMostShared = 227 * 1024;
std::map<const void *, std::unique_ptr<Image>> images;

// The library of kernels that lies beside this one.
const card_kernel *find(const std::string &name) {
  static const auto ask = [] {
    Dl_info self;
    dladdr(reinterpret_cast<const void *>(&cuModuleLoadData), &self);
    const std::string path = self.dli_fname, folder = path.substr(0, path.rfind('/') + 1);
    void *const library = dlopen((folder + "libspecbuild_kernels.so").c_str(), RTLD_NOW | RTLD_LOCAL);
    return library ? reinterpret_cast<decltype(&card_find_kernel)>(dlsym(library, "card_find_kernel")) : nullptr;
  }();
  return ask ? ask(name.c_str()) : nullptr;
}

size_t size_of(const void *image) {
  const unsigned char *const bytes = static_cast<const unsigned char *>(image);
  if (memcmp(bytes, "\177ELF", 4)) return strlen(static_cast<const char *>(image));  // PTX
  uint64_t sections;
  uint16_t each, count;
  memcpy(&sections, bytes + 40, 8), memcpy(&each, bytes + 58, 2), memcpy(&count, bytes + 60, 2);
  return size_t(sections) + size_t(each) * count;
}

template <class Handle> CUresult load(Handle *handle, const void *image) {
  if (!image) return CUDA_ERROR_INVALID_VALUE;
  auto made = std::make_unique<Image>();
  made->bytes.assign(static_cast<const char *>(image), size_of(image));
  *handle = reinterpret_cast<Handle>(made.get());
  images[made.get()] = std::move(made);
  return CUDA_SUCCESS;
}

template <class Handle> CUresult kernel_in(Handle *kernel, const void *of, const char *name) {
  const auto found = images.find(of);
  if (found == images.end()) return CUDA_ERROR_INVALID_HANDLE;
  Image &image = *found->second;
  const card_kernel *const known = find(name);
  if (!known || image.bytes.find(name) == std::string::npos) return CUDA_ERROR_NOT_FOUND;
  Kernel &there = image.kernels[name];
  there.known = known;
  *kernel = reinterpret_cast<Handle>(&there);
  return CUDA_SUCCESS;
}

CUresult parameter(const void *kernel, size_t index, size_t *offset, size_t *size) {
  const card_kernel &known = *static_cast<const Kernel *>(kernel)->known;
  if (index >= known.count) return CUDA_ERROR_INVALID_VALUE;
  *offset = 0;
  for (size_t i = 0; i < index; ++i) *offset += known.sizes[i];
  if (size) *size = known.sizes[index];
  return CUDA_SUCCESS;
}

CUresult set_attribute(CUfunction_attribute attribute, int value, void *kernel) {
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_SUCCESS;
  if (value < 0 || value > kMostShared) return CUDA_ERROR_INVALID_VALUE;
  return static_cast<Kernel *>(kernel)->shared = value, CUDA_SUCCESS;
}

CUresult attribute_of(int *value, CUfunction_attribute attribute, const void *kernel) {
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return *value = 1024, CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION: return *value = 90, CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
      return *value = static_cast<const Kernel *>(kernel)->shared, CUDA_SUCCESS;
    default: return *value = 0, CUDA_SUCCESS;
  }
}

bool overlaps(const CUlaunchConfig &config) {
  for (unsigned i = 0; i < config.numAttrs; ++i)
    if (config.attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
      return config.attrs[i].value.programmaticStreamSerializationAllowed;
  return false;
}

}  // namespace

CUresult prepare(const CUDA_KERNEL_NODE_PARAMS_v3 &launch, std::function<void()> *work) {
  const Kernel *const kernel = reinterpret_cast<const Kernel *>(launch.func ? static_cast<void *>(launch.func) : launch.kern);
  if (!kernel || launch.extra) return CUDA_ERROR_INVALID_VALUE;
  const card_kernel *const known = kernel->known;
  const unsigned threads = launch.blockDimX * launch.blockDimY * launch.blockDimZ;
  if (!launch.gridDimX || !launch.gridDimY || !launch.gridDimZ || launch.gridDimY > 65535 || launch.gridDimZ > 65535 ||
      !threads || threads > 1024 || int(launch.sharedMemBytes) > kernel->shared)
    return CUDA_ERROR_INVALID_VALUE;
  std::vector<std::string> arguments;
  for (size_t i = 0; i < known->count; ++i)
    arguments.emplace_back(static_cast<const char *>(launch.kernelParams[i]), known->sizes[i]);
  *work = [=] {
    std::vector<void *> at;
    for (const std::string &argument : arguments) at.push_back(const_cast<char *>(argument.data()));
    const char *const problem =
        known->run(at.data(), launch.gridDimX, launch.gridDimY, launch.gridDimZ, threads, launch.sharedMemBytes);
    if (problem) fail(CUDA_ERROR_LAUNCH_FAILED, problem);
  };
  return CUDA_SUCCESS;
}

}  // namespace card

using namespace card;

extern "C" {

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  CARD_ENTER(Needs::context_uncaptured);
  return load(module, image);
}
CUresult cuModuleUnload(CUmodule module) {
  CARD_ENTER(Needs::context_uncaptured);
  return images.erase(module) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  CARD_ENTER();
  return kernel_in(function, module, name);
}
CUresult cuLibraryLoadData(CUlibrary *library, const void *image, CUjit_option *, void **, unsigned int, CUlibraryOption *,
                           void **, unsigned int) {
  CARD_ENTER(Needs::context_uncaptured);
  return load(library, image);
}
CUresult cuLibraryUnload(CUlibrary library) {
  CARD_ENTER();
  return images.erase(library) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name) {
  CARD_ENTER();
  return kernel_in(kernel, library, name);
}
CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel) {
  CARD_ENTER();
  return *function = reinterpret_cast<CUfunction>(kernel), CUDA_SUCCESS;
}

CUresult cuFuncGetParamInfo(CUfunction function, size_t index, size_t *offset, size_t *size) {
  CARD_ENTER();
  return parameter(function, index, offset, size);
}
CUresult cuKernelGetParamInfo(CUkernel kernel, size_t index, size_t *offset, size_t *size) {
  CARD_ENTER();
  return parameter(kernel, index, offset, size);
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  CARD_ENTER();
  return set_attribute(attribute, value, function);
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  CARD_ENTER();
  return attribute_of(value, attribute, function);
}
CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice) {
  CARD_ENTER();
  return set_attribute(attribute, value, kernel);
}
CUresult cuKernelGetAttribute(int *value, CUfunction_attribute attribute, CUkernel kernel, CUdevice) {
  CARD_ENTER();
  return attribute_of(value, attribute, kernel);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  CARD_ENTER();
  CUDA_KERNEL_NODE_PARAMS_v3 launch = {};
  launch.func = function, launch.kernelParams = parameters, launch.extra = extra;
  launch.gridDimX = config->gridDimX, launch.gridDimY = config->gridDimY, launch.gridDimZ = config->gridDimZ;
  launch.blockDimX = config->blockDimX, launch.blockDimY = config->blockDimY, launch.blockDimZ = config->blockDimZ;
  launch.sharedMemBytes = config->sharedMemBytes;
  std::function<void()> work;
  if (const CUresult status = prepare(launch, &work)) return status;
  return submit(config->hStream, CU_GRAPH_NODE_TYPE_KERNEL, std::move(work), overlaps(*config));
}
CUresult cuLaunchKernel(CUfunction function, unsigned int gridX, unsigned int gridY, unsigned int gridZ, unsigned int blockX,
                        unsigned int blockY, unsigned int blockZ, unsigned int shared, CUstream stream, void **parameters,
                        void **extra) {
  CARD_ENTER();
  const CUlaunchConfig config = {gridX, gridY, gridZ, blockX, blockY, blockZ, shared, stream, nullptr, 0};
  return cuLaunchKernelEx(&config, function, parameters, extra);
}

}  // extern "C"
