// What every kernel uses: 16-bit and 8-bit numbers, vectors, reductions of a warp, the tree in bits.
//
// Nothing here includes CUDA's math headers: the same text compiles with nvcc, with NVRTC without any header, and with a
// host compiler, where host/host.h takes the place of the language extensions.
#pragma once

#include "kernels.h"

#if defined(SPECBUILD_HOST)
#include "host/host.h"
#elif !defined(__CUDACC_RTC__)
#include <cuda_runtime.h>
#endif

namespace specbuild {

struct F16 { uint16_t bits; };
struct BF16 { uint16_t bits; };
struct E4M3 { uint8_t bits; };

__device__ __forceinline__ uint32_t bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ float float_of(uint32_t bits) { return __uint_as_float(bits); }

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(BF16 x) { return float_of(uint32_t(x.bits) << 16); }
__device__ __forceinline__ float to_float(F16 x) {
#ifdef SPECBUILD_HOST
  return host::half_to_float(x.bits);
#else
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
#endif
}
// E4M3 has no infinity; 0x7f is NaN. Its exponent's bias is 7, half precision's 15.
__device__ __forceinline__ float to_float(E4M3 x) {
  if ((x.bits & 0x7f) == 0x7f) return float_of(0x7fc00000);
  return to_float(F16{uint16_t((x.bits & 0x80) << 8 | (x.bits & 0x7f) << 7)}) * 256.0f;
}

template <class T> __device__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ F16 from_float<F16>(float x) {
#ifdef SPECBUILD_HOST
  return F16{host::float_to_half(x)};
#else
  uint16_t y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return F16{y};
#endif
}
template <> __device__ __forceinline__ BF16 from_float<BF16>(float x) {
  uint32_t u = bits_of(x);
  if ((u & 0x7fffffff) > 0x7f800000) return BF16{0x7fff};
  return BF16{uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16)};
}
// To the nearest, ties to even, saturating at ±448 (OCP 8-bit floating point, 2023).
template <> __device__ __forceinline__ E4M3 from_float<E4M3>(float x) {
  uint32_t u = bits_of(x), sign = u >> 24 & 0x80, size = u & 0x7fffffff;
  if (size > 0x7f800000) return E4M3{0x7f};
  if (size >= 0x43e00000) return E4M3{uint8_t(sign | 0x7e)};                                       // 448 and more
  if (size < 0x3c800000) return E4M3{uint8_t(sign | __float2int_rn(float_of(size) * 512.0f))};     // below 2^−6
  size += 0x7ffff + (size >> 20 & 1);
  return E4M3{uint8_t(sign | ((size >> 20) - (120 << 3)))};
}

// Two numbers in one register, the first in the low half, as the tensor cores take them.
template <class T> __device__ __forceinline__ uint32_t pack(float low, float high) {
  return uint32_t(from_float<T>(low).bits) | uint32_t(from_float<T>(high).bits) << 16;
}
#ifndef SPECBUILD_HOST
template <> __device__ __forceinline__ uint32_t pack<F16>(float low, float high) {
  uint32_t y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
template <> __device__ __forceinline__ uint32_t pack<BF16>(float low, float high) {
  uint32_t y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
#endif

// Eight numbers, the unit of loads and stores: 16 bytes of a 16-bit type, 8 of E4M3, 32 of float.
template <class T> struct alignas(sizeof(T) * 8 < 16 ? sizeof(T) * 8 : 16) Eight { T x[8]; };
template <class T> __device__ __forceinline__ void load8(const T *from, float to[8]) {
  const Eight<T> eight = *reinterpret_cast<const Eight<T> *>(from);
  for (int i = 0; i < 8; ++i) to[i] = to_float(eight.x[i]);
}
template <class T> __device__ __forceinline__ void store8(T *to, const float from[8]) {
  Eight<T> eight;
  for (int i = 0; i < 8; ++i) eight.x[i] = from_float<T>(from[i]);
  *reinterpret_cast<Eight<T> *>(to) = eight;
}

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
template <class T> __host__ __device__ constexpr T smaller(T a, T b) { return a < b ? a : b; }
template <class T> __host__ __device__ constexpr T larger(T a, T b) { return a > b ? a : b; }

constexpr unsigned kAllLanes = 0xffffffffu;

struct Largest {
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
  __device__ __forceinline__ uint64_t operator()(uint64_t a, uint64_t b) const { return larger(a, b); }
};
struct Sum {
  template <class X> __device__ __forceinline__ X operator()(X a, X b) const { return a + b; }
};

// What the numbers of a warp's threads, or of all threads, come to, two by two: for each of them. 0 changes nothing.
template <class Two, class X> __device__ __forceinline__ X warp_reduce(X x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = Two()(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}
template <class Two, class X> __device__ __forceinline__ X block_reduce(X x, X *shared) {
  x = warp_reduce<Two>(x);
  __syncthreads();  // what the last call wrote has been read
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  return warp_reduce<Two>(threadIdx.x % 32 < blockDim.x / 32 ? shared[threadIdx.x % 32] : X(0));
}

// The number of a sequence's row of one head, counted over a whole cache: [B, heads, capacity], or pages [·, heads, page_rows]
// of which the table [B, capacity / page_rows] says which are the sequence's.
__device__ __forceinline__ int64_t cache_row(const int32_t *page_table, int page_rows, int capacity, int heads, int b, int head,
                                             int row) {
  if (!page_rows) return (int64_t(b) * heads + head) * capacity + row;
  const int shift = __ffs(page_rows) - 1, page = page_table[b * (capacity >> shift) + (row >> shift)];
  return (int64_t(page) * heads + head) * page_rows + (row & (page_rows - 1));
}

// Whether page `at` of a sequence is one that the cache has; `Paged` is specbuild_attention or specbuild_cache.
template <class Paged> __device__ __forceinline__ bool has_page(const Paged &p, int b, int at) {
  return uint32_t(p.page_table[int64_t(b) * (p.capacity / p.page_rows) + at]) < uint32_t(p.pages);
}

// Whether every node's parent is an earlier node or −1; `parent` is the thread's own node's, −1 for threads without one.
// A barrier; `also`: what else is to hold for every thread.
__device__ __forceinline__ bool parents_are_sound(int parent, int nodes, bool also = true) {
  const int node = threadIdx.x;
  return __syncthreads_and(also && parent >= -1 && parent < (node < nodes ? node : 0));
}

// A tree's ancestors as bits: seen[i] has bit j where j is i itself or an ancestor of i; a node's depth is the number of
// its bits less one. Every node takes over its jump's bits and its jump's jump, so the distance doubles: log2(64) steps.
// All threads of the block call it, at least one a node.
__device__ __forceinline__ void link_ancestors(int parent, int nodes, uint64_t *seen, int8_t *jump) {
  const int node = threadIdx.x;
  const bool mine = node < nodes;
  if (mine) {
    seen[node] = uint64_t(1) << node;
    jump[node] = int8_t(parent);
  }
  __syncthreads();
  for (int step = 1; step < nodes; step *= 2) {
    const int next = mine ? jump[node] : -1;
    const uint64_t above = next >= 0 ? seen[next] : 0;
    const int8_t further = next >= 0 ? jump[next] : int8_t(-1);
    __syncthreads();
    if (mine) {
      seen[node] |= above;
      jump[node] = further;
    }
    __syncthreads();
  }
}

// Both; false where a parent is no earlier node.
__device__ __forceinline__ bool build_ancestors(const int32_t *parents, int nodes, uint64_t *seen, int8_t *jump) {
  const int parent = int(threadIdx.x) < nodes ? parents[threadIdx.x] : -1;
  if (!parents_are_sound(parent, nodes)) return false;
  link_ancestors(parent, nodes, seen, jump);
  return true;
}

}  // namespace specbuild

#ifndef __CUDACC_RTC__
#include "kernels/launch.cuh"
#endif
