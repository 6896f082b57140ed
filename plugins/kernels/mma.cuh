// The tensor cores and the asynchronous copies, as functions: PTX on a device, the same meaning on a host.
//
// Fragments are those of mma.m16n8k16 (PTX ISA, "Matrix fragments for mma.m16n8k16"): lane l holds rows l/4 and l/4 + 8 of A
// and C, columns 2(l%4) and the next (and 8 further in A); of B, column l/4, rows as A's columns.
#pragma once

#include "kernels/common.cuh"

namespace specbuild {

#if defined(SPECBUILD_HOST) ? defined(SPECBUILD_HOST_BULK) \
                            : defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && !defined(SPECBUILD_NO_BULK)
constexpr bool kBulk = true;  // rows are copied by the copy engine, a thread a row
#else
constexpr bool kBulk = false;  // rows are copied 16 bytes a thread
#endif

#ifdef SPECBUILD_HOST

// Matrices of 8 × 8 16-bit numbers; lane 8m + r gives the address of row r of matrix m.
template <int kMatrices, bool kTransposed>
__device__ void load_matrices(uint32_t *to, const void *row) {
  const unsigned char *rows = host::exchange(&row, sizeof row);
  const unsigned lane = host::lane();
  for (int m = 0; m < kMatrices; ++m) {
    uint16_t pair[2];
    if (lane == 0) host::read_matrix(rows + host::kStride * 8 * m);
    for (unsigned i = 0; i < 2; ++i) {
      const unsigned r = kTransposed ? lane % 4 * 2 + i : lane / 4, c = kTransposed ? lane / 4 : lane % 4 * 2 + i;
      const unsigned char *from;
      memcpy(&from, rows + host::kStride * (8 * m + r), sizeof from);
      host::expect(host::aligned(from), "host: a matrix's row is not aligned to 16 bytes");
      memcpy(&pair[i], from + 2 * c, 2);
    }
    to[m] = pair[0] | uint32_t(pair[1]) << 16;
  }
}

template <class T> __device__ void multiply_add(float c[4], const uint32_t a[4], const uint32_t b[2]) {
  float mine[12];  // A's words, then B's
  for (int i = 0; i < 12; ++i) mine[i] = to_float(T{uint16_t((i < 8 ? a[i / 2] : b[i / 2 - 4]) >> 16 * (i % 2))});
  const unsigned char *lanes = host::exchange(mine, sizeof mine);
  const unsigned lane = host::lane();
  const auto numbers = [&](unsigned from) { return reinterpret_cast<const float *>(lanes + host::kStride * from); };
  for (int i = 0; i < 4; ++i)
    for (unsigned four = 0; four < 8; ++four) {  // two numbers of k in each of four lanes, twice
      const float *const x = numbers(lane / 4 * 4 + four % 4) + 4 * (four / 4) + i / 2 * 2;
      const float *const y = numbers((lane % 4 * 2 + i % 2) * 4 + four % 4) + 8 + 2 * (four / 4);
      c[i] += x[0] * y[0];
      c[i] += x[1] * y[1];
    }
}

__device__ inline void copy16(void *to, const void *from, bool there) { host::later(to, from, 16, !there); }
__device__ inline void close_copies() { host::group(); }
template <int kGroups> __device__ void wait_copies() { host::wait(kGroups); }
__device__ inline void init_phase(uint64_t *at, uint32_t arrivals) { host::phase_init(at, arrivals); }
__device__ inline void arrive_phase(uint64_t *at, uint32_t bytes) { host::phase_arrive(at, bytes); }
__device__ inline void copy_row(uint64_t *at, void *to, const void *from, uint32_t bytes) {
  host::phase_copy(at, to, from, bytes);
}
__device__ inline void wait_phase(uint64_t *at, uint32_t parity) { host::phase_wait(at, parity); }
__device__ inline void publish_to_copies() {}
__device__ inline void publish_shared_to_copies() {}
__device__ inline void start_next_kernel() {}
__device__ inline void await_last_kernel() {}
__device__ inline float exp2_fast(float x) { return exp2f(x); }

#else

__device__ __forceinline__ uint32_t shared_address(const void *p) { return uint32_t(__cvta_generic_to_shared(p)); }

template <int kMatrices, bool kTransposed>
__device__ __forceinline__ void load_matrices(uint32_t *to, const void *row) {
  static_assert(kMatrices == 4 || (kMatrices == 2 && kTransposed), "what the kernels use");
  if constexpr (kMatrices == 4 && !kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(shared_address(row)) : "memory");
  else if constexpr (kMatrices == 4)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(shared_address(row)) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(to[0]), "=r"(to[1]) : "r"(shared_address(row)) : "memory");
}

template <class T> __device__ __forceinline__ void multiply_add(float c[4], const uint32_t a[4], const uint32_t b[2]);
template <> __device__ __forceinline__ void multiply_add<F16>(float c[4], const uint32_t a[4], const uint32_t b[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <> __device__ __forceinline__ void multiply_add<BF16>(float c[4], const uint32_t a[4], const uint32_t b[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// 16 bytes to shared memory, zeros where there is nothing to read.
__device__ __forceinline__ void copy16(void *to, const void *from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"(shared_address(to)), "l"(from), "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kGroups> __device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" :: "n"(kGroups) : "memory");
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__device__ __forceinline__ void init_phase(uint64_t *at, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(at)), "r"(arrivals) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void arrive_phase(uint64_t *at, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(shared_address(at)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_row(uint64_t *at, void *to, const void *from, uint32_t bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(at)) : "memory");
}
__device__ __forceinline__ void wait_phase(uint64_t *at, uint32_t parity) {
  uint32_t done = 0;
  while (!done)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(shared_address(at)), "r"(parity) : "memory");
}
// What this thread has written by ordinary stores comes before what the copy engine does after the next barrier.
__device__ __forceinline__ void publish_to_copies() { asm volatile("fence.proxy.async;" ::: "memory"); }
// The same for shared memory alone, which costs less.
__device__ __forceinline__ void publish_shared_to_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void start_next_kernel() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ __forceinline__ void await_last_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#else
__device__ __forceinline__ void init_phase(uint64_t *, uint32_t) {}
__device__ __forceinline__ void arrive_phase(uint64_t *, uint32_t) {}
__device__ __forceinline__ void copy_row(uint64_t *, void *, const void *, uint32_t) {}
__device__ __forceinline__ void wait_phase(uint64_t *, uint32_t) {}
__device__ __forceinline__ void publish_to_copies() {}
__device__ __forceinline__ void publish_shared_to_copies() {}
__device__ __forceinline__ void start_next_kernel() {}
__device__ __forceinline__ void await_last_kernel() {}
#endif

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

#endif

// Four E4M3 numbers as two registers of two T each, in order; times 2^8 less for F16, see kUnit.
template <class T> __device__ __forceinline__ void widen(uint32_t four, uint32_t &first, uint32_t &second);
// What a widened E4M3 has to be multiplied by: its exponent is moved, not rebiased, where the format has subnormals to spare.
template <class T> struct Unit { static constexpr float value = 1.0f; };
template <> struct Unit<F16> { static constexpr float value = 256.0f; };
template <> __device__ __forceinline__ void widen<F16>(uint32_t four, uint32_t &first, uint32_t &second) {
  const uint32_t low = (four & 0xff) << 8 | (four & 0xff00) << 16, high = (four >> 16 & 0xff) << 8 | (four & 0xff000000);
  first = (low & 0x80008000) | (low & 0x7f007f00) >> 1;
  second = (high & 0x80008000) | (high & 0x7f007f00) >> 1;
}
// bfloat16's exponent is too long for that trick: its subnormals would be 2^−120 small. By way of float.
__device__ __forceinline__ uint32_t widen_bf16(uint32_t two) {
  const uint32_t moved = (two & 0x80008000) | (two & 0x7f007f00) >> 4;  // 2^120 too small
#ifdef SPECBUILD_HOST
  return pack<BF16>(float_of(moved << 16) * 0x1p120f, float_of(moved & 0xffff0000) * 0x1p120f);
#else
  uint32_t y;  // · 2^120 + −0
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(moved), "r"(0x7b807b80), "r"(0x80008000));
  return y;
#endif
}
template <> __device__ __forceinline__ void widen<BF16>(uint32_t four, uint32_t &first, uint32_t &second) {
  first = widen_bf16((four & 0xff) << 8 | (four & 0xff00) << 16);
  second = widen_bf16((four >> 16 & 0xff) << 8 | (four & 0xff000000));
}

}  // namespace specbuild
