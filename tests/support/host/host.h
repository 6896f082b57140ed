// CUDA's language on a CPU, enough of it to run the kernels' own source: blocks one after another, a block's threads as
// fibers that take turns. For tests; nothing here is fast.
//
// A fiber runs until it waits: at a block's barrier, or in a warp for all its lanes. Under a seed other than 0 warps and
// lanes take turns in a random order, a warp running ahead of the others as far as it can, and asynchronous copies are done
// at once where the seed is odd, else when they are waited for: so a missing barrier or wait shows as a result that depends
// on the seed. Dynamic shared memory is filled with NaN before each block, static is left as it was, and threads that wait for something that
// cannot come end the launch with an error.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __restrict__

namespace host {

struct Index {
  unsigned x, y, z;
};

// Runs the kernel at an address; null, or what went wrong.
const char *run(const void *address, int x, int y, int z, int threads, size_t shared,
                const std::function<void()> &kernel);
// The same at once, or, where somebody keeps streams (tests/support/card), when its turn comes.
using Run = std::function<const char *()>;
inline const char *(*keeper)(void *stream, bool overlap, const Run &run) = nullptr;
template <class Grid>
const char *launch(void *stream, bool overlap, const void *address, Grid grid, std::function<void()> kernel) {
  const Run go = [=] { return run(address, grid.x, grid.y, grid.z, grid.threads, grid.shared, kernel); };
  return keeper ? keeper(stream, overlap, go) : go();
}
void barrier();
void vote(bool value, int *all, int *any, int *count);  // a barrier as well
// Hands `bytes` bytes to the other lanes of the warp; returns the 32 lanes' bytes, `stride` apart, until the next exchange.
const unsigned char *exchange(const void *mine, size_t bytes);
constexpr size_t kStride = 64;
unsigned lane();
void later(void *to, const void *from, size_t bytes, bool zero);  // an asynchronous copy of this thread
void group();                                                       // closes the thread's group of copies
void wait(int groups);                                              // until at most so many of its groups are under way
unsigned char *dynamic();
void expect(bool holds, const char *what);  // ends the launch with an error where it does not
inline bool aligned(const void *at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; }

// A barrier in shared memory that counts arrivals and bytes, and bulk copies that complete on it (PTX's mbarrier and
// cp.async.bulk): a phase ends when all have arrived and as many bytes have come as were announced.
void phase_init(uint64_t *at, unsigned arrivals);
void phase_arrive(uint64_t *at, unsigned bytes);
void phase_copy(uint64_t *at, void *to, const void *from, size_t bytes);
void phase_wait(uint64_t *at, unsigned parity);

extern uint64_t products;  // the upper halves of products of 64 bits, so many were asked for
void read_matrix(const unsigned char *rows);  // counts what eight rows' addresses, kStride apart, cost in bank conflicts

float half_to_float(uint16_t bits);
uint16_t float_to_half(float x);

template <class T> T shuffle(T value, unsigned from) {
  T result;
  memcpy(&result, exchange(&value, sizeof value) + kStride * (from & 31), sizeof value);
  return result;
}

}  // namespace host

extern host::Index threadIdx, blockIdx, blockDim, gridDim;

inline void __syncthreads() { host::barrier(); }
inline int __syncthreads_and(int value) { int all, any, count; host::vote(value, &all, &any, &count); return all; }
inline int __syncthreads_or(int value) { int all, any, count; host::vote(value, &all, &any, &count); return any; }
inline int __syncthreads_count(int value) { int all, any, count; host::vote(value, &all, &any, &count); return count; }
inline void __syncwarp(unsigned = 0) { host::exchange("", 1); }
template <class T> T __shfl_sync(unsigned, T value, int from) { return host::shuffle(value, from); }
template <class T> T __shfl_xor_sync(unsigned, T value, int mask) { return host::shuffle(value, host::lane() ^ mask); }
template <class T> T __shfl_down_sync(unsigned, T value, int by) {
  const unsigned from = host::lane() + by;
  return host::shuffle(value, from < 32 ? from : host::lane());
}
inline unsigned __ballot_sync(unsigned, int value) {
  const char mine = value != 0;
  const unsigned char *all = host::exchange(&mine, 1);
  unsigned bits = 0;
  for (unsigned i = 0; i < 32; ++i) bits |= unsigned(all[host::kStride * i]) << i;
  return bits;
}
inline int __any_sync(unsigned mask, int value) { return __ballot_sync(mask, value) != 0; }
inline int __all_sync(unsigned mask, int value) { return __ballot_sync(mask, value) == 0xffffffffu; }

template <class T> T atomicAdd(T *at, T value) { T old = *at; *at = old + value; return old; }
template <class T> T atomicMax(T *at, T value) { T old = *at; if (value > old) *at = value; return old; }
template <class T> T atomicOr(T *at, T value) { T old = *at; *at = old | value; return old; }
template <class T> T atomicExch(T *at, T value) { T old = *at; *at = value; return old; }
inline void __threadfence() {}
inline void __threadfence_system() {}
// A handle is the address of the condition's value.
inline void cudaGraphSetConditional(uint64_t handle, unsigned value) { *reinterpret_cast<unsigned *>(handle) = value; }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  ++host::products;
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline uint32_t __float_as_uint(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
inline float __uint_as_float(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }
inline int __float2int_rn(float x) { return int(nearbyintf(x)); }
// Rounded after every operation: the host library is compiled without contraction.
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
