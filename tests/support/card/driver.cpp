// How the stand-in starts: entry points by name, errors, the device, its context; and what tests ask of it.
#include "card/card.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>

namespace card {

std::recursive_mutex lock;

namespace {

constexpr int kVersion = 13000;
constexpr size_t kMemory = size_t(4) << 30;
constexpr CUresult kSuccess = CUDA_SUCCESS;

struct Refusal {
  CUresult status;
  int after;
};
std::map<std::string, Refusal> refusals;
CUresult failed = kSuccess;
bool started = false;
int retained = 0;
char context_is_here;  // its address is the context's handle
thread_local CUcontext current = nullptr;

CUcontext primary() { return reinterpret_cast<CUcontext>(&context_is_here); }

// "cuMemAlloc_v2" is cuMemAlloc; an instantiation is one, with whatever it is called.
std::string plain(const char *name) {
  if (!strncmp(name, "cuGraphInstantiate", 18)) return "cuGraphInstantiate";
  const char *suffix = strstr(name, "_v");
  return suffix ? std::string(name, suffix) : name;
}

CUresult refused(const char *name) {
  const auto found = refusals.find(plain(name));
  if (found == refusals.end() || found->second.after-- > 0) return kSuccess;
  const CUresult status = found->second.status;
  refusals.erase(found);
  return status;
}

}  // namespace

Entry::Entry(const char *name, Needs needs) : guard(lock), status(refused(name)) {
  if (status == kSuccess && needs != Needs::nothing && !started) status = CUDA_ERROR_NOT_INITIALIZED;
  if (status == kSuccess && needs != Needs::nothing && !current) status = CUDA_ERROR_INVALID_CONTEXT;
  if (status == kSuccess && needs != Needs::nothing) status = failed;
  if (status == kSuccess && needs == Needs::context_uncaptured) status = unsafe();
}

void fail(CUresult status, const char *what) {
  fprintf(stderr, "card: %s\n", what);
  if (failed == kSuccess) failed = status;
}

CUresult failure() { return failed; }

void die(const char *what, const void *handle) {
  fprintf(stderr, "card: %s: %p is none, or it was destroyed\n", what, handle);
  abort();
}

}  // namespace card

using namespace card;

extern "C" {

CUresult cuInit(unsigned int) {
  CARD_ENTER(Needs::nothing);
  started = true;
  return kSuccess;
}
CUresult cuDriverGetVersion(int *version) {
  CARD_ENTER(Needs::nothing);
  return *version = kVersion, kSuccess;
}

CUresult cuGetProcAddress(const char *symbol, void **address, int, cuuint64_t, CUdriverProcAddressQueryResult *found) {
  static const char *const versions[] = {"_v4", "_v3", "_v2", ""};
  Dl_info self;
  dladdr(reinterpret_cast<void *>(&cuInit), &self);
  void *const library = dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  *address = nullptr;
  const std::string name = strcmp(symbol, "cuGraphInstantiate") ? symbol : "cuGraphInstantiateWithFlags";
  for (const char *version : versions)
    if (!*address) *address = dlsym(library, (name + version).c_str());
  if (found) *found = *address ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *address ? kSuccess : CUDA_ERROR_NOT_FOUND;
}

// NVRTC asks a driver for functions that have no names, by a number of this beginning, and does without those of a table that
// is empty. CUDA's runtime asks for others, and gives up without.
CUresult cuGetExportTable(const void **table, const CUuuid *number) {
  static const size_t empty[1] = {sizeof empty};
  *table = memcmp(number->bytes, "\xda\x91\x51\xd3", 4) ? nullptr : empty;
  return *table ? kSuccess : CUDA_ERROR_NOT_FOUND;
}

// ---- the device

CUresult cuDeviceGetCount(int *count) {
  CARD_ENTER(Needs::nothing);
  return started ? (*count = 1, kSuccess) : CUDA_ERROR_NOT_INITIALIZED;
}
CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  CARD_ENTER(Needs::nothing);
  return ordinal ? CUDA_ERROR_INVALID_DEVICE : (*device = 0, kSuccess);
}
CUresult cuDeviceGetName(char *name, int length, CUdevice) { return snprintf(name, length, "stand-in card"), kSuccess; }
CUresult cuDeviceTotalMem(size_t *bytes, CUdevice) { return *bytes = kMemory, kSuccess; }
CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice) { return memset(uuid, 7, sizeof *uuid), kSuccess; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  CARD_ENTER(Needs::nothing);
  if (device) return CUDA_ERROR_INVALID_DEVICE;
  static const std::map<int, int> known = {
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0},
      {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 8},
      {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1'500'000},
      {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 1'000'000},
      {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 256},
      {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
      {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
      {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 2048},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 48 * 1024},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 227 * 1024},
      {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
      {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
      {CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1},
      {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 2},
      {CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 1},
  };
  const auto found = known.find(attribute);
  *value = found == known.end() ? 0 : found->second;
  return kSuccess;
}

// ---- its context

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice) {
  CARD_ENTER(Needs::nothing);
  if (!started) return CUDA_ERROR_NOT_INITIALIZED;
  return ++retained, *context = primary(), kSuccess;
}
CUresult cuDevicePrimaryCtxRelease(CUdevice) { return retained ? (--retained, kSuccess) : CUDA_ERROR_INVALID_CONTEXT; }
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned *flags, int *active) {
  return *flags = 0, *active = retained > 0, kSuccess;
}
CUresult cuCtxSetCurrent(CUcontext context) {
  CARD_ENTER(Needs::nothing);
  return current = context, kSuccess;
}
CUresult cuCtxGetCurrent(CUcontext *context) {
  CARD_ENTER(Needs::nothing);
  return *context = current, kSuccess;
}
CUresult cuCtxPushCurrent(CUcontext context) { return current = context, kSuccess; }
CUresult cuCtxPopCurrent(CUcontext *context) {
  if (context) *context = current;
  return current = nullptr, kSuccess;
}
CUresult cuCtxGetDevice(CUdevice *device) { return current ? (*device = 0, kSuccess) : CUDA_ERROR_INVALID_CONTEXT; }
CUresult cuCtxGetId(CUcontext, unsigned long long *number) { return *number = 1, kSuccess; }
CUresult cuCtxGetApiVersion(CUcontext, unsigned int *version) { return *version = 4000, kSuccess; }
CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, kSuccess; }
CUresult cuCtxSynchronize(void) {
  CARD_ENTER(Needs::context_uncaptured);
  drain_all();
  return failed;
}

CUresult cuMemGetInfo(size_t *free, size_t *total) {
  CARD_ENTER();
  return *total = kMemory, *free = kMemory - allocated(false), kSuccess;
}

// ---- errors

CUresult cuGetErrorName(CUresult error, const char **text) {
  static const std::map<int, const char *> names = {
#define NAMED(NAME) {NAME, #NAME}
      NAMED(CUDA_SUCCESS), NAMED(CUDA_ERROR_INVALID_VALUE), NAMED(CUDA_ERROR_OUT_OF_MEMORY),
      NAMED(CUDA_ERROR_NOT_INITIALIZED), NAMED(CUDA_ERROR_NO_DEVICE), NAMED(CUDA_ERROR_INVALID_DEVICE),
      NAMED(CUDA_ERROR_INVALID_CONTEXT), NAMED(CUDA_ERROR_INVALID_HANDLE), NAMED(CUDA_ERROR_ILLEGAL_STATE),
      NAMED(CUDA_ERROR_LOSSY_QUERY), NAMED(CUDA_ERROR_NOT_FOUND), NAMED(CUDA_ERROR_NOT_READY),
      NAMED(CUDA_ERROR_INVALID_IMAGE), NAMED(CUDA_ERROR_ILLEGAL_ADDRESS), NAMED(CUDA_ERROR_LAUNCH_FAILED),
      NAMED(CUDA_ERROR_NOT_SUPPORTED), NAMED(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED),
      NAMED(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED), NAMED(CUDA_ERROR_STREAM_CAPTURE_MERGE),
      NAMED(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED), NAMED(CUDA_ERROR_STREAM_CAPTURE_UNJOINED),
      NAMED(CUDA_ERROR_STREAM_CAPTURE_ISOLATION), NAMED(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT),
      NAMED(CUDA_ERROR_CAPTURED_EVENT), NAMED(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD), NAMED(CUDA_ERROR_UNKNOWN),
#undef NAMED
  };
  const auto found = names.find(error);
  *text = found == names.end() ? "an error without a name here" : found->second;
  return kSuccess;
}
CUresult cuGetErrorString(CUresult error, const char **text) { return cuGetErrorName(error, text); }

// ---- what tests ask

void card_fail(const char *what) {
  const std::lock_guard<std::recursive_mutex> guard(lock);
  fail(CUDA_ERROR_LAUNCH_FAILED, what);
}
void card_refuse(const char *entry_point, int status, int after) {
  const std::lock_guard<std::recursive_mutex> guard(lock);
  if (entry_point) refusals[plain(entry_point)] = {CUresult(status), after};
  else refusals.clear();
}

}  // extern "C"
