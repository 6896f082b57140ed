// Products of rows with weights in blocks: the same panels, codes and factors that a CPU reads (cpu/products.h).
//
//   y[r, n] = Σ_b S[n, b] · Σ_k x[r, k] (q[n, k] − c) − M[n, b] · Σ_k x[r, k]
//
// A block of threads has a panel of 16 columns and 8·kTiles rows; its warps take a panel's units of 32 numbers of k in turns,
// multiply codes, which 16 bits hold exactly, on the tensor cores, and scale each block's sums in float32. The sums have one
// order whatever the number of rows: a row's bits are those of the row alone. Bytes: the panel once for every 8·kTiles rows.
#include "kernels/common.cuh"
#include "kernels/mma.cuh"

namespace specbuild {

constexpr int kProductWarps = 8, kProductThreads = 32 * kProductWarps, kUnit = 32, kStep = 256;

struct alignas(8) Numbers { uint32_t pairs[2]; };  // four of 16 bits

__device__ __forceinline__ uint32_t word_at(const uint8_t *at) { return *reinterpret_cast<const uint32_t *>(at); }

// Four codes of a column, one a byte: those of k = 4 `four` and the next three.
template <int kBits> __device__ __forceinline__ uint32_t codes_at(const uint8_t *panel, int four, int column) {
  if constexpr (kBits == 8) return word_at(panel + 64 * four + 4 * column);
  constexpr int kFours = kBits == 4 ? 2 : kBits == 5 ? 8 : 4;  // of a group
  const uint8_t *const group = panel + 8 * kBits * kFours * (four / kFours) + 4 * column;
  const int within = four % kFours;
  const uint32_t low = word_at(group + 64 * (within / 2)) >> 4 * (within % 2) & 0x0f0f0f0f;
  if constexpr (kBits == 4) return low;
  const uint32_t high = word_at(group + 32 * kFours) >> (kBits - 4) * within;
  return low | (high & (kBits == 5 ? 0x01010101 : 0x03030303)) << 4;
}

// Four codes less the code of 0, as two registers of two T each, in order.
template <class T> __device__ __forceinline__ void whole(uint32_t codes, int zero, uint32_t &first, uint32_t &second) {
  const auto number = [&](int i) { return float(int(codes >> 8 * i & 0xff) - zero); };
  first = pack<T>(number(0), number(1));
  second = pack<T>(number(2), number(3));
}
#ifndef SPECBUILD_HOST
// A code in the low bits of 1024 in half precision is 1024 more than the code.
template <> __device__ __forceinline__ void whole<F16>(uint32_t codes, int zero, uint32_t &first, uint32_t &second) {
  const uint32_t more = (0x6400u + zero) * 0x10001u;
  asm("prmt.b32 %0, %1, %2, 0x4140;" : "=r"(first) : "r"(codes), "r"(0x64646464));
  asm("prmt.b32 %0, %1, %2, 0x4342;" : "=r"(second) : "r"(codes), "r"(0x64646464));
  asm("sub.f16x2 %0, %0, %1;" : "+r"(first) : "r"(more));
  asm("sub.f16x2 %0, %0, %1;" : "+r"(second) : "r"(more));
}
#endif

__device__ __forceinline__ float factor_at(const uint8_t *factors, int bits, int at) {
  if (bits == 8) return float(reinterpret_cast<const int8_t *>(factors)[at]);
  if (bits == 16) return to_float(reinterpret_cast<const F16 *>(factors)[at]);
  return reinterpret_cast<const float *>(factors)[at];
}

// A panel's scales and minima.
struct Factors {
  const specbuild_product &p;
  const uint8_t *panel;
  int shift, of_step;  // a block has 2^shift numbers of k; bytes of 256 of them

  __device__ Factors(const specbuild_product &p, int index) : p(p), shift(31 - __clz(p.block)), of_step(bytes(kStep)) {
    const int last = p.inner % kStep;
    panel = p.factors + index * (p.inner / kStep * int64_t(of_step) + (last ? bytes(last) : 0));
  }
  __device__ int bytes(int numbers) const {
    const int steps = p.scale_bits == 8 ? (p.minimum_bits ? 128 : 64) : 0;
    return (numbers >> shift) * (p.scale_bits + p.minimum_bits) * 2 + steps;
  }
  __device__ float scale(int k, int column) const {
    const float number = factor_at(scales(k), p.scale_bits, at(k, column));
    return p.scale_bits == 8 ? number * factor_at(steps(k), 32, column) : number;
  }
  // Zero points, of 8 bits beside wider scales, are multiples of these.
  __device__ float minimum(int k, int column, float scale) const {
    const float number = factor_at(minima(k), p.minimum_bits, at(k, column));
    if (p.scale_bits == 8) return number * factor_at(steps(k), 32, 16 + column);
    return p.minimum_bits == 8 ? number * scale : number;
  }

 private:
  __device__ int at(int k, int column) const { return (k % kStep >> shift) * 16 + column; }
  __device__ int blocks(int k) const { return smaller(kStep, p.inner - k / kStep * kStep) >> shift; }  // of k's step
  __device__ const uint8_t *scales(int k) const { return panel + k / kStep * int64_t(of_step); }
  __device__ const uint8_t *minima(int k) const { return scales(k) + blocks(k) * p.scale_bits * 2; }
  __device__ const uint8_t *steps(int k) const { return minima(k) + blocks(k) * p.minimum_bits * 2; }
};

template <class T, int kBits, int kTiles> __device__ __forceinline__ void product(const specbuild_product &p) {
  __shared__ float parts[kProductWarps][kTiles][128];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = lane / 4, quarter = lane % 4;
  const int panel = blockIdx.x, first_row = int(blockIdx.y) * 8 * kTiles;
  const uint8_t *const codes = p.codes + panel * (int64_t(p.inner) * 2 * kBits);
  const T *const input = static_cast<const T *>(p.input);
  const Factors factors(p, panel);
  const int zero = p.minimum_bits ? 0 : 1 << (kBits - 1);
  const int scaled = smaller(p.block, kUnit);  // numbers of k that are scaled together: 16 or 32
  const uint32_t one = pack<T>(1.0f, 1.0f), ones[4] = {one, one, one, one};
  float sums[kTiles][4] = {};
  for (int unit = warp * kUnit; unit < p.inner; unit += kProductThreads) {
    for (int from = unit; from < smaller(unit + kUnit, p.inner); from += scaled) {
      float products[kTiles][4] = {}, inputs[kTiles][4] = {};
#pragma unroll 2
      for (int half = 0; half < scaled / 16; ++half) {
        // Any four numbers of k may be a lane's, as long as codes and inputs have the same: of 32, a lane has 8 in a row.
        const int k = scaled == kUnit ? from + 8 * quarter + 4 * half : from + 4 * quarter;
        uint32_t a[4];
        whole<T>(codes_at<kBits>(codes, k / 4, column), zero, a[0], a[2]);
        whole<T>(codes_at<kBits>(codes, k / 4, column + 8), zero, a[1], a[3]);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const int row = first_row + 8 * tile + column;
          const Numbers b = row < p.rows ? *reinterpret_cast<const Numbers *>(input + int64_t(row) * p.inner + k) : Numbers{};
          multiply_add<T>(products[tile], a, b.pairs);
          if (p.minimum_bits) multiply_add<T>(inputs[tile], ones, b.pairs);
        }
      }
      for (int side = 0; side < 2; ++side) {
        const float scale = factors.scale(from, column + 8 * side);
        const float minimum = p.minimum_bits ? factors.minimum(from, column + 8 * side, scale) : 0.0f;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
          for (int i = 2 * side; i < 2 * side + 2; ++i)
            sums[tile][i] = fmaf(-minimum, inputs[tile][i], fmaf(scale, products[tile][i], sums[tile][i]));
      }
    }
  }
  for (int tile = 0; tile < kTiles; ++tile)  // [rows, columns] of a tile
    for (int i = 0; i < 4; ++i) parts[warp][tile][(2 * quarter + i % 2) * 16 + column + 8 * (i / 2)] = sums[tile][i];
  __syncthreads();
  for (int at = threadIdx.x; at < 128 * kTiles; at += kProductThreads) {
    const int tile = at / 128, row = first_row + at / 16, n = 16 * panel + at % 16;
    float sum = 0.0f;
    for (int part = 0; part < kProductWarps; ++part) sum += parts[part][tile][at % 128];
    if (row < p.rows && n < p.columns) static_cast<T *>(p.output)[int64_t(row) * p.columns + n] = from_float<T>(sum);
  }
}

}  // namespace specbuild

#define EACH_TILES(X, T, BITS) X(T, BITS, 1) X(T, BITS, 2) X(T, BITS, 8)
#define EACH_BITS(X, T) EACH_TILES(X, T, 4) EACH_TILES(X, T, 5) EACH_TILES(X, T, 6) EACH_TILES(X, T, 8)
#ifdef SPECBUILD_ONE_BITS
#define EACH_PRODUCT(X) EACH_TILES(X, SPECBUILD_ONE_DTYPE, SPECBUILD_ONE_BITS)
#else
#define EACH_PRODUCT(X) EACH_BITS(X, F16) EACH_BITS(X, BF16)
#endif

// Of few rows, several blocks share a multiprocessor.
#define DEFINE(T, BITS, TILES)                                                             \
  extern "C" __global__ void __launch_bounds__(specbuild::kProductThreads, TILES > 2 ? 1 : 5 - TILES) \
      block_product_##T##_##BITS##_t##TILES(const __grid_constant__ specbuild_product p) { \
    specbuild::product<specbuild::T, BITS, TILES>(p);                                      \
  }
EACH_PRODUCT(DEFINE)

#ifndef __CUDACC_RTC__
extern "C" int specbuild_block_product(const specbuild_product *p, void *stream) {
  using namespace specbuild;
  const int tiles = p->rows <= 8 ? 1 : p->rows <= 16 ? 2 : 8;
  void (*run)(specbuild_product) = nullptr;
#define PICK(T, BITS, TILES) \
  if (p->dtype == SPECBUILD_##T && p->bits == BITS && tiles == TILES) run = block_product_##T##_##BITS##_t##TILES;
  EACH_PRODUCT(PICK)
#undef PICK
  if (!run) return refuse("codes of %d bits and numbers in %s: a product has 4, 5, 6 or 8 bits, float16 or bfloat16", p->bits, name_of(p->dtype));
  const int block = p->block;
  if ((block != 16 && block != 32 && block != 64 && block != 128) || (p->bits == 5 && block == 16))
    return refuse("blocks of %d columns, of %d bits: use 16, 32, 64 or 128, and 32 at least for 5 bits", block, p->bits);
  if (p->inner < 1 || p->inner % block) return refuse("rows of %d numbers in blocks of %d", p->inner, block);
  if (p->scale_bits != 8 && p->scale_bits != 16 && p->scale_bits != 32) return refuse("scales of %d bits: use 8, 16 or 32", p->scale_bits);
  if (p->minimum_bits != 0 && p->minimum_bits != 8 && (p->minimum_bits != p->scale_bits && p->minimum_bits != 32))
    return refuse("minima of %d bits beside scales of %d", p->minimum_bits, p->scale_bits);
  if (p->rows < 1 || p->rows > 65535 * 8) return refuse("%d rows: a product has 1 to 524280", p->rows);
  if (p->columns < 1) return refuse("%d columns: at least 1", p->columns);
  const Pointer pointers[] = {{"input", p->input}, {"codes", p->codes}, {"factors", p->factors}, {"output", p->output}};
  return launch(pointers, run, Grid{ceil_div(p->columns, 16), ceil_div(p->rows, 8 * tiles), 1, kProductThreads, 0}, *p, stream);
}
#endif
