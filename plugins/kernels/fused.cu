// The small fused operators around the matrix products: residual + RMS norm (+ quantization), SwiGLU, embedding rows.
//
// All of them move bytes and compute next to nothing. Norm: a block a row; x, y and weight in, norm and sum out, once each.
// SwiGLU: eight numbers a thread; gate and up in, output out. Gather: a row a block; the row in and out.
#include "kernels/common.cuh"

namespace specbuild {

constexpr int kNormThreads = 256;

template <class T> __device__ __forceinline__ T quantized(float x);
template <> __device__ __forceinline__ E4M3 quantized<E4M3>(float x) { return from_float<E4M3>(x); }
template <> __device__ __forceinline__ int8_t quantized<int8_t>(float x) {
  return int8_t(__float2int_rn(fminf(fmaxf(x, -127.0f), 127.0f)));
}

template <class Q> __device__ __forceinline__ void store_quantized(void *to, int64_t at, const float x[8], float unit) {
  Eight<Q> eight;
  for (int i = 0; i < 8; ++i) eight.x[i] = quantized<Q>(x[i] * unit);
  *reinterpret_cast<Eight<Q> *>(static_cast<Q *>(to) + at) = eight;
}

template <class T> __device__ __forceinline__ void norm_row(const specbuild_norm &p) {
#ifdef SPECBUILD_HOST
  float *const row = reinterpret_cast<float *>(host::dynamic());
#else
  extern __shared__ __align__(16) float row[];
#endif
  __shared__ float of_warps[32];
  const int64_t first = int64_t(blockIdx.x) * p.width;
  float squares = 0.0f, x[8], y[8];
  for (int at = threadIdx.x * 8; at < p.width; at += kNormThreads * 8) {
    load8(static_cast<const T *>(p.x) + first + at, x);
    if (p.y) {
      load8(static_cast<const T *>(p.y) + first + at, y);
      for (int i = 0; i < 8; ++i) x[i] = to_float(from_float<T>(x[i] + y[i]));  // the sum as the residual stream keeps it
    }
    if (p.sum) store8(static_cast<T *>(p.sum) + first + at, x);
    for (int i = 0; i < 8; ++i) squares += x[i] * x[i], row[at + i] = x[i];
  }
  const float factor = rsqrtf(block_reduce<Sum>(squares, of_warps) / p.width + p.epsilon);
  float largest = 0.0f;
  for (int at = threadIdx.x * 8; at < p.width; at += kNormThreads * 8) {
    for (int i = 0; i < 8; ++i) {
      x[i] = row[at + i] * factor * p.weight[at + i];
      row[at + i] = x[i];
      largest = fmaxf(largest, fabsf(x[i]));
    }
    if (!p.scales) store8(static_cast<T *>(p.output) + first + at, x);
  }
  if (!p.scales) return;
  const float scale = fmaxf(block_reduce<Largest>(largest, of_warps), 1e-12f) / (p.output_dtype == SPECBUILD_E4M3 ? 448.0f : 127.0f);
  if (threadIdx.x == 0) p.scales[blockIdx.x] = scale;
  for (int at = threadIdx.x * 8; at < p.width; at += kNormThreads * 8) {
    if (p.output_dtype == SPECBUILD_E4M3) store_quantized<E4M3>(p.output, first + at, row + at, 1.0f / scale);
    else store_quantized<int8_t>(p.output, first + at, row + at, 1.0f / scale);
  }
}

template <class T> __device__ __forceinline__ void swiglu_eight(const specbuild_swiglu &p) {
  const int64_t at = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
  if (at >= int64_t(p.rows) * p.width) return;
  const int64_t row = at / p.width, column = at % p.width;
  float gate[8], up[8];
  load8(static_cast<const T *>(p.gate) + row * p.stride + column, gate);
  load8(static_cast<const T *>(p.up) + row * p.stride + column, up);
  for (int i = 0; i < 8; ++i) up[i] *= gate[i] / (1.0f + expf(-gate[i]));
  store8(static_cast<T *>(p.output) + at, up);
}

}  // namespace specbuild

#define DEFINE_FUSED(T)                                                                                       \
  extern "C" __global__ void __launch_bounds__(specbuild::kNormThreads)                                       \
      rms_norm_##T(const __grid_constant__ specbuild_norm p) { specbuild::norm_row<specbuild::T>(p); }        \
  extern "C" __global__ void __launch_bounds__(specbuild::kNormThreads)                                       \
      swiglu_##T(const __grid_constant__ specbuild_swiglu p) { specbuild::swiglu_eight<specbuild::T>(p); }
DEFINE_FUSED(F16)
DEFINE_FUSED(BF16)

extern "C" __global__ void __launch_bounds__(specbuild::kNormThreads)
    gather_rows(const __grid_constant__ specbuild_gather p) {
  const int32_t id = p.ids[blockIdx.x];
  const bool known = id >= 0 && id < p.vocab;
  if (!known && p.fault && threadIdx.x == 0) *p.fault = SPECBUILD_FAULT_TOKEN;
  using Piece = specbuild::Eight<specbuild::BF16>;
  const Piece *const from = static_cast<const Piece *>(p.table) + int64_t(known ? id : 0) * (p.row_bytes / 16);
  Piece *const to = static_cast<Piece *>(p.output) + int64_t(blockIdx.x) * (p.row_bytes / 16);
  for (int i = threadIdx.x; i < p.row_bytes / 16; i += blockDim.x) to[i] = known ? from[i] : Piece{};
}

#ifndef __CUDACC_RTC__
extern "C" {

int specbuild_rms_norm(const specbuild_norm *p, void *stream) {
  using namespace specbuild;
  if (p->dtype != SPECBUILD_F16 && p->dtype != SPECBUILD_BF16) return refuse("a norm of %s: use float16 or bfloat16", name_of(p->dtype));
  if (p->scales ? p->output_dtype != SPECBUILD_E4M3 && p->output_dtype != SPECBUILD_INT8 : p->output_dtype != p->dtype)
    return refuse("a norm of %s gives itself, or with scales float8 E4M3 or int8, not %s", name_of(p->dtype), name_of(p->output_dtype));
  if (p->rows < 1) return refuse("%d rows: at least 1", p->rows);
  if (p->width < 8 || p->width % 8 || p->width > 16384) return refuse("width %d: use a multiple of 8 up to 16384", p->width);
  if (!(p->epsilon >= 0.0f)) return refuse("a norm's epsilon of %g", p->epsilon);
  const Pointer pointers[] = {{"x", p->x}, {"weight", p->weight}, {"output", p->output},
                              {"y", p->y, 16, true}, {"sum", p->sum, 16, true}, {"scales", p->scales, 4, true}};
  const Grid grid = {p->rows, 1, 1, kNormThreads, size_t(p->width) * sizeof(float)};
  return launch(pointers, p->dtype == SPECBUILD_F16 ? rms_norm_F16 : rms_norm_BF16, grid, *p, stream);
}

int specbuild_swiglu_gate(const specbuild_swiglu *p, void *stream) {
  using namespace specbuild;
  if (p->dtype != SPECBUILD_F16 && p->dtype != SPECBUILD_BF16) return refuse("SwiGLU of %s: use float16 or bfloat16", name_of(p->dtype));
  if (p->rows < 1) return refuse("%d rows: at least 1", p->rows);
  if (p->width < 8 || p->width % 8) return refuse("width %d: use a multiple of 8", p->width);
  if (p->stride < p->width || p->stride % 8) return refuse("stride %lld of rows of %d: a multiple of 8, no less", (long long)p->stride, p->width);
  const Pointer pointers[] = {{"gate", p->gate}, {"up", p->up}, {"output", p->output}};
  if (const int status = check_pointers(pointers)) return status;
  const int64_t blocks = (int64_t(p->rows) * p->width / 8 + kNormThreads - 1) / kNormThreads;
  if (blocks > 0x7fffffff) return refuse("%d rows of %d are too many for one launch", p->rows, p->width);
  return launch(p->dtype == SPECBUILD_F16 ? swiglu_F16 : swiglu_BF16, Grid{int(blocks), 1, 1, kNormThreads, 0}, *p, stream);
}

int specbuild_gather_rows(const specbuild_gather *p, void *stream) {
  using namespace specbuild;
  if (p->rows < 1 || p->vocab < 1) return refuse("%d rows of a vocabulary of %d: at least 1", p->rows, p->vocab);
  if (p->row_bytes < 16 || p->row_bytes % 16) return refuse("rows of %d bytes: use a multiple of 16", p->row_bytes);
  const Pointer pointers[] = {{"table", p->table}, {"ids", p->ids, 4}, {"output", p->output}, {"fault", p->fault, 4, true}};
  return launch(pointers, gather_rows, Grid{p->rows, 1, 1, kNormThreads, 0}, *p, stream);
}

}  // extern "C"
#endif
