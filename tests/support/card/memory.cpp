// Memory and copies: what is allocated is surrounded by bytes that nobody may write, and is rubbish at first and at last.
#include "card/card.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace card {
namespace {

constexpr size_t kGuard = 512, kMemory = size_t(4) << 30, kFilled = size_t(1) << 20;
constexpr int kFence = 0xf5, kFresh = 0xa7, kGone = 0xdb;

struct Block {
  size_t size;
  bool pinned;
};
std::map<uintptr_t, Block> blocks;
size_t totals[2];

char *allocate(size_t size, bool pinned) {
  const size_t whole = (size + kGuard - 1) / kGuard * kGuard + 2 * kGuard;
  char *const base = static_cast<char *>(aligned_alloc(kGuard, whole));
  if (!base) return nullptr;
  memset(base, kFence, kGuard);
  memset(base + kGuard, kFresh, size < kFilled ? size : kFilled);
  memset(base + kGuard + size, kFence, whole - kGuard - size);
  blocks[uintptr_t(base + kGuard)] = {size, pinned};
  totals[pinned] += size;
  return base + kGuard;
}

CUresult release(uintptr_t address, bool pinned) {
  const auto found = blocks.find(address);
  if (found == blocks.end() || found->second.pinned != pinned) return CUDA_ERROR_INVALID_VALUE;
  drain_all();  // as drivers do
  const size_t size = found->second.size;
  char *const at = reinterpret_cast<char *>(address);
  for (size_t i = 1; i <= kGuard; ++i)
    if (at[-long(i)] != char(kFence) || (i <= kGuard - size % kGuard && at[size + i - 1] != char(kFence)))
      fail(CUDA_ERROR_ILLEGAL_ADDRESS, "something was written beside what was allocated");
  memset(at, kGone, size < kFilled ? size : kFilled);
  totals[pinned] -= size;
  blocks.erase(found);
  free(at - kGuard);
  return CUDA_SUCCESS;
}

// Where it begins; null: in no block, so it is the program's own memory.
const Block *block_of(uintptr_t at, uintptr_t *begin) {
  auto next = blocks.upper_bound(at);
  if (next == blocks.begin()) return nullptr;
  --next;
  *begin = next->first;
  return at < next->first + next->second.size ? &next->second : nullptr;
}

enum class Place { device, pinned, own, wrong };
Place place(const void *from, size_t size) {
  const uintptr_t at = uintptr_t(from);
  uintptr_t begin = 0;
  const Block *const block = block_of(at, &begin);
  if (!block) return Place::own;
  if (at + size > begin + block->size) return Place::wrong;
  return block->pinned ? Place::pinned : Place::device;
}

struct Side {
  char *base;
  size_t pitch, height;
  char *at(size_t plane, size_t line) const { return base + (plane * height + line) * pitch; }
};
struct Copy {
  Side to, from;
  size_t width, height, depth;
  size_t reach(const Side &side) const { return size_t(side.at(depth - 1, height - 1) - side.base) + width; }
};

void perform(const Copy &copy) {
  for (const Side *side : {&copy.to, &copy.from})
    if (place(side->base, copy.reach(*side)) == Place::wrong) fail(CUDA_ERROR_ILLEGAL_ADDRESS, "a copy leaves its memory");
  for (size_t plane = 0; plane < copy.depth; ++plane)
    for (size_t line = 0; line < copy.height; ++line)
      memmove(copy.to.at(plane, line), copy.from.at(plane, line), copy.width);
}

bool overlaps(const Copy &copy) {
  for (size_t plane = 0; plane < copy.depth; ++plane)
    for (size_t line = 0; line < copy.height; ++line) {
      const char *const to = copy.to.at(plane, line), *const from = copy.from.at(plane, line);
      if (to < from + copy.width && from < to + copy.width) return true;
    }
  return false;
}

// Memory that is the program's own is read at once, and written only once all in front has run.
CUresult enqueue_copy(const Copy &copy, CUstream handle) {
  if (!copy.width || !copy.height || !copy.depth) return CUDA_SUCCESS;
  const Place to = place(copy.to.base, copy.reach(copy.to)), from = place(copy.from.base, copy.reach(copy.from));
  if (to == Place::wrong || from == Place::wrong) return CUDA_ERROR_INVALID_VALUE;
  if (to == Place::device && from == Place::device && overlaps(copy))
    fail(CUDA_ERROR_ILLEGAL_ADDRESS, "a copy of overlapping bytes has no defined result");
  const std::shared_ptr<Stream> stream = stream_of(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  const bool line = copy.height * copy.depth == 1;
  if (from == Place::own && line && !stream->capture) {
    const std::string bytes(copy.from.base, copy.width);
    return submit(handle, CU_GRAPH_NODE_TYPE_MEMCPY, [copy, bytes] { memcpy(copy.to.base, bytes.data(), bytes.size()); });
  }
  const CUresult status = submit(handle, CU_GRAPH_NODE_TYPE_MEMCPY, [copy] { perform(copy); });
  if (status == CUDA_SUCCESS && to == Place::own && !stream->capture) drain(*stream);
  return status;
}

// One side of a copy as the driver's structs have it, in two dimensions or in three.
struct Given {
  CUmemorytype type;
  CUdeviceptr device;
  const void *host;
  size_t pitch, height, x, y, z;
  Side side() const {
    const uintptr_t base = type == CU_MEMORYTYPE_HOST ? uintptr_t(host) : uintptr_t(device);
    return {reinterpret_cast<char *>(base) + (z * height + y) * pitch + x, pitch, height};
  }
  bool holds(size_t width, size_t lines) const {
    return type != CU_MEMORYTYPE_ARRAY && (!pitch || x + width <= pitch) && (!height || y + lines <= height);
  }
};
CUresult enqueue_box(const Given &to, const Given &from, size_t width, size_t height, size_t depth, CUstream stream) {
  if (!to.holds(width, height) || !from.holds(width, height)) return CUDA_ERROR_INVALID_VALUE;
  return enqueue_copy({to.side(), from.side(), width, height, depth}, stream);
}

CUresult synchronous(void *to, const void *from, size_t size) {
  const Place one = place(to, size), other = place(from, size);
  if (one == Place::wrong || other == Place::wrong) return CUDA_ERROR_INVALID_VALUE;
  const std::shared_ptr<Stream> stream = stream_of(nullptr);
  enqueue(*stream, [=](Stream &) { memmove(to, from, size); });
  drain(*stream);
  return CUDA_SUCCESS;
}

}  // namespace

size_t allocated(bool pinned) { return totals[pinned]; }

}  // namespace card

using namespace card;

extern "C" {

CUresult cuMemAlloc(CUdeviceptr *address, size_t size) {
  CARD_ENTER(Needs::context_uncaptured);
  if (!size) return CUDA_ERROR_INVALID_VALUE;
  if (size > kMemory - totals[false]) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = uintptr_t(allocate(size, false));
  return *address ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemFree(CUdeviceptr address) {
  CARD_ENTER(Needs::context_uncaptured);
  return address ? release(address, false) : CUDA_SUCCESS;
}
CUresult cuMemHostAlloc(void **address, size_t size, unsigned int) {
  CARD_ENTER(Needs::context_uncaptured);
  if (!size) return CUDA_ERROR_INVALID_VALUE;
  *address = allocate(size, true);
  return *address ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemAllocHost(void **address, size_t size) { return cuMemHostAlloc(address, size, 0); }
CUresult cuMemFreeHost(void *address) {
  CARD_ENTER(Needs::context_uncaptured);
  return release(uintptr_t(address), true);
}
CUresult cuMemHostGetDevicePointer(CUdeviceptr *device, void *host, unsigned int) {
  CARD_ENTER();
  return place(host, 1) == Place::pinned ? (*device = uintptr_t(host), CUDA_SUCCESS) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr at) {
  CARD_ENTER();
  const Place found = place(reinterpret_cast<void *>(at), 1);
  if (found == Place::own) return CUDA_ERROR_INVALID_VALUE;
  const bool pinned = found == Place::pinned;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      return *static_cast<unsigned *>(value) = pinned ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE, CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: return *static_cast<int *>(value) = 0, CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_HOST_POINTER: return *static_cast<CUdeviceptr *>(value) = at, CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: return *static_cast<int *>(value) = 0, CUDA_SUCCESS;
    default: return CUDA_ERROR_INVALID_VALUE;
  }
}
CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute *attributes, void **data, CUdeviceptr at) {
  for (unsigned i = 0; i < count; ++i) cuPointerGetAttribute(data[i], attributes[i], at);
  return CUDA_SUCCESS;
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
  CARD_ENTER();
  return enqueue_copy({{reinterpret_cast<char *>(to), 0, 1}, {reinterpret_cast<char *>(from), 0, 1}, size, 1, 1}, stream);
}
CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t size, CUstream stream) {
  return cuMemcpyAsync(to, uintptr_t(from), size, stream);
}
CUresult cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t size, CUstream stream) {
  return cuMemcpyAsync(uintptr_t(to), from, size, stream);
}
CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
  return cuMemcpyAsync(to, from, size, stream);
}
CUresult cuMemcpy2DAsync(const CUDA_MEMCPY2D *m, CUstream stream) {
  CARD_ENTER();
  const Given to = {m->dstMemoryType, m->dstDevice, m->dstHost, m->dstPitch, 0, m->dstXInBytes, m->dstY, 0};
  const Given from = {m->srcMemoryType, m->srcDevice, m->srcHost, m->srcPitch, 0, m->srcXInBytes, m->srcY, 0};
  return enqueue_box(to, from, m->WidthInBytes, m->Height, 1, stream);
}
CUresult cuMemcpy3DAsync(const CUDA_MEMCPY3D *m, CUstream stream) {
  CARD_ENTER();
  const Given to = {m->dstMemoryType, m->dstDevice, m->dstHost, m->dstPitch, m->dstHeight, m->dstXInBytes, m->dstY, m->dstZ};
  const Given from = {m->srcMemoryType, m->srcDevice, m->srcHost, m->srcPitch, m->srcHeight, m->srcXInBytes, m->srcY, m->srcZ};
  return enqueue_box(to, from, m->WidthInBytes, m->Height, m->Depth, stream);
}

CUresult cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t size) {
  CARD_ENTER(Needs::context_uncaptured);
  return synchronous(reinterpret_cast<void *>(to), from, size);
}
CUresult cuMemcpyDtoH(void *to, CUdeviceptr from, size_t size) {
  CARD_ENTER(Needs::context_uncaptured);
  return synchronous(to, reinterpret_cast<void *>(from), size);
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char byte, size_t size, CUstream stream) {
  CARD_ENTER();
  char *const at = reinterpret_cast<char *>(to);
  const Place found = place(at, size);
  if (found == Place::own || found == Place::wrong) return CUDA_ERROR_INVALID_VALUE;
  return submit(stream, CU_GRAPH_NODE_TYPE_MEMSET, [=] {
    if (place(at, size) == Place::own) fail(CUDA_ERROR_ILLEGAL_ADDRESS, "what is filled was freed");
    else memset(at, byte, size);
  });
}

}  // extern "C"
