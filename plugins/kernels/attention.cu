// TreeAttention: query, key, value [B, N, H or Hkv, D] in float16 or bfloat16 and a cache [B, Hkv, S, D] of the same type or
// E4M3, linear or paged, to output [B, N, H, D], the new rows in the cache. Here are the kernel and the combination of its
// parts; the pieces, the units of work and the bytes are in attention.cuh, what the launcher refuses in attention_launch.cuh.
#include "kernels/attention.cuh"

namespace specbuild {

// Where a query row's result goes: its number among all (sequence, node, head).
__device__ __forceinline__ int64_t row_of(const specbuild_attention &p, int b, int head, int row) {
  const int group = p.heads / p.kv_heads;
  return (int64_t(b) * p.nodes + row / group) * p.heads + head * group + row % group;
}
__device__ __forceinline__ Weight *weights_of(const specbuild_attention &p) {
  return reinterpret_cast<Weight *>(p.workspace + int64_t(p.batch) * p.nodes * p.heads * p.splits * p.head_dim);
}

template <class T, class C, int D, int kRowWarps>
__device__ __forceinline__ void attend(const specbuild_attention &p) {
  using S = Tile<C, D, kRowWarps>;
#ifdef SPECBUILD_HOST
  unsigned char *const shared = host::dynamic();
#else
  extern __shared__ __align__(16) unsigned char shared[];
#endif
  __shared__ uint64_t ancestors[SPECBUILD_MOST_NODES];
  __shared__ int8_t jump[SPECBUILD_MOST_NODES];
  __shared__ Weight weights[kWarps][16];
  __shared__ uint64_t phases[4];

  const int group = p.heads / p.kv_heads, row_tiles = ceil_div(p.nodes * group, S::kRows);
  const int b = blockIdx.z, head = blockIdx.y / row_tiles, first_row = blockIdx.y % row_tiles * S::kRows;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row_warp = warp / S::kKeyWarps, key_warp = warp % S::kKeyWarps;
  const uint64_t *const seen = p.parents ? ancestors : nullptr;
  start_next_kernel();

  const int32_t *const parents = p.parents + int64_t(b) * p.tree_nodes;
  const int parent = seen && int(threadIdx.x) < p.tree_nodes ? parents[threadIdx.x] : -1;
  const Part part = part_of(p, b, first_row, S::kRows, S::kKeys);
  const int tree = part.offset + part.count, mine = int(threadIdx.x) < tree ? parent : -1;
  if (kBulk && threadIdx.x < S::kStages) init_phase(&phases[threadIdx.x], 1);
  const bool fits = part.sound(p), paged = !fits || part.paged(p, b), sound = parents_are_sound(mine, tree, paged);
  const int fault = !fits ? SPECBUILD_FAULT_CAPACITY : sound ? SPECBUILD_FAULT_NONE
                    : __syncthreads_and(paged) ? SPECBUILD_FAULT_PARENT : SPECBUILD_FAULT_PAGE;
  if (fault && p.fault && threadIdx.x == 0) p.fault[b] = fault;
  const int real_rows = part.count * group - first_row;
  const bool idle = fault || real_rows <= 0 || part.begin >= part.end;

  Weight weight[2] = {{kNothing, 0.0f}, {kNothing, 0.0f}};  // of rows lane / 4 and lane / 4 + 8 of the warp
  float output[D / 8][4] = {};
  if (!idle) {
    const int tiles = ceil_div(part.end - part.begin, part.step);
    const auto fetch = [&](int tile) {
      const int stage = tile % S::kStages;
      if (tile < tiles)
        load_tile<C, D, S>(p, part, b, head, part.begin + tile * part.step, shared + stage * S::kStage, &phases[stage]);
      if (!kBulk) close_copies();
    };
    // The first tiles are on their way while the queries are made, unless the new rows are among them.
    const bool early = !part.appends || part.begin + (S::kStages - 2) * part.step + S::kKeys <= part.fresh;
    for (int tile = 0; early && tile < S::kStages - 1; ++tile) fetch(tile);
    if (seen) link_ancestors(mine, tree, ancestors, jump);
    if (part.appends) {
      append<T, C, D, S::kKeys>(p, part, b, head, seen);
      publish_to_copies();
    }
    __syncthreads();
    for (int tile = 0; !early && tile < S::kStages - 1; ++tile) fetch(tile);

    unsigned char *const queries = shared + S::kQueryAt, *const my_queries = queries + row_warp * 16 * S::kQueryStride;
    load_queries<T, D, S::kRows, S::kQueryStride>(p, part, b, head, first_row, seen, queries);
    publish_shared_to_copies();
    __syncthreads();
    uint32_t query[S::kQueryStays ? 1 : D / 16][4];
    if constexpr (!S::kQueryStays) {
#pragma unroll
      for (int step = 0; step < D / 16; ++step) load_query<C>(query[step], my_queries, S::kQueryStride, step);
    }
    Sight sight[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = smaller(row_warp * 16 + lane / 4 + 8 * half, real_rows - 1) + first_row;
      sight[half].node = part.offset + row / group;
      sight[half].seen = seen ? seen[sight[half].node] : 0;
      sight[half].position = part.committed + (seen ? __popcll(sight[half].seen) - 1 : sight[half].node);
    }
    const float unit = p.scale * (sizeof(C) == 1 ? Unit<T>::value * (p.key_scale ? p.key_scale[head] : 1.0f) : 1.0f);

    for (int tile = 0; tile < tiles; ++tile) {
      const int stage = tile % S::kStages, first = part.begin + tile * part.step + key_warp * S::kStep;
      if constexpr (kBulk) wait_phase(&phases[stage], tile / S::kStages & 1);
      else wait_copies<S::kStages - 2>();
      __syncthreads();
      fetch(tile + S::kStages - 1);
      const unsigned char *const keys = shared + stage * S::kStage + key_warp * S::kStep * S::kStride;
      const unsigned char *const values = keys + S::kKeys * S::kStride;

      float scores[S::kStep / 8][4] = {};
#pragma unroll
      for (int step = 0; step < D / 16; ++step) {
        if constexpr (S::kQueryStays) load_query<C>(query[0], my_queries, S::kQueryStride, step);
#pragma unroll
        for (int n = 0; n < S::kStep / 16; ++n) {
          uint32_t two[4];
          load_keys<T, C>(two, keys + n * 16 * S::kStride, S::kStride, step);
          multiply_add<T>(scores[2 * n], query[S::kQueryStays ? 0 : step], two);
          multiply_add<T>(scores[2 * n + 1], query[S::kQueryStays ? 0 : step], two + 2);
        }
      }
      if (p.softcap > 0.0f) {
#pragma unroll
        for (int i = 0; i < S::kStep / 2; ++i) {
          float &score = scores[i / 4][i % 4];
          score = p.softcap * kLog2e * tanhf(score * unit / p.softcap);
        }
      } else {
#pragma unroll
        for (int i = 0; i < S::kStep / 2; ++i) scores[i / 4][i % 4] *= unit * kLog2e;
      }
      const bool all_seen = first + S::kStep <= smaller(part.end, part.committed) &&
                            (!p.window || larger(sight[0].position, sight[1].position) - first < p.window);
      if (!all_seen) {
#pragma unroll
        for (int i = 0; i < S::kStep / 2; ++i) {
          const int row = first + i / 4 * 8 + lane % 4 * 2 + i % 2;
          if (!visible(p, part, seen, sight[i / 2 % 2], row)) scores[i / 4][i % 4] = float_of(0xff800000);  // −∞
        }
      }

#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float top = weight[half].top;
#pragma unroll
        for (int n = 0; n < S::kStep / 8; ++n) top = fmaxf(top, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
        top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
        top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
        const float kept = exp2_fast(weight[half].top - top);
        weight[half].top = top;
        weight[half].sum *= kept;
#pragma unroll
        for (int n = 0; n < S::kStep / 8; ++n) {
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) weight[half].sum += scores[n][i] = exp2_fast(scores[n][i] - top);
        }
#pragma unroll
        for (int n = 0; n < D / 8; ++n) output[n][2 * half] *= kept, output[n][2 * half + 1] *= kept;
      }

#pragma unroll
      for (int n = 0; n < S::kStep / 16; ++n) {
        const float(*const s)[4] = scores + 2 * n;
        const uint32_t a[4] = {pack<T>(s[0][0], s[0][1]), pack<T>(s[0][2], s[0][3]), pack<T>(s[1][0], s[1][1]),
                               pack<T>(s[1][2], s[1][3])};
#pragma unroll
        for (int step = 0; step < D / 16; ++step) {
          uint32_t two[4];
          load_values<T, C>(two, values + n * 16 * S::kStride, S::kStride, step);
          multiply_add<T>(output[2 * step], a, two);
          multiply_add<T>(output[2 * step + 1], a, two + 2);
        }
      }
    }
    __syncthreads();  // the stages have been read: what follows lies over them
  }

  // The key warps' parts of a row are one warp's memory away from each other.
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    weight[half].sum += __shfl_xor_sync(kAllLanes, weight[half].sum, 1);
    weight[half].sum += __shfl_xor_sync(kAllLanes, weight[half].sum, 2);
    if (lane % 4 == 0) weights[warp][lane / 4 + 8 * half] = weight[half];
  }
  float *const partial = reinterpret_cast<float *>(shared);
#pragma unroll
  for (int i = 0; i < D / 2; ++i)
    partial[(warp * 16 + lane / 4 + i / 2 % 2 * 8) * S::kPartial + number_of<C>(i / 4, i % 4)] = output[i / 4][i % 4];
  __syncthreads();

  const float unit = sizeof(C) == 1 ? Unit<T>::value * (p.value_scale ? p.value_scale[head] : 1.0f) : 1.0f;
  for (int i = threadIdx.x; i < S::kRows * (D / 8); i += kThreads) {
    const int row = i / (D / 8), at = i % (D / 8) * 8, first_warp = row / 16 * S::kKeyWarps;
    if (first_row + row >= p.nodes * group) break;
    const bool real = !idle && row < real_rows;  // padding takes nothing, not even times 0: the cache may hold a NaN
    Weight whole = {kNothing, 0.0f};
    float sum[8] = {};
    for (int w = first_warp; real && w < first_warp + S::kKeyWarps; ++w) whole.top = fmaxf(whole.top, weights[w][row % 16].top);
    for (int w = first_warp; real && w < first_warp + S::kKeyWarps; ++w) {
      const float factor = exp2_fast(weights[w][row % 16].top - whole.top);
      whole.sum += factor * weights[w][row % 16].sum;
#pragma unroll
      for (int j = 0; j < 8; ++j) sum[j] += factor * partial[(w * 16 + row % 16) * S::kPartial + at + j];
    }
    const int64_t to = row_of(p, b, head, first_row + row);
    const float factor = unit * (p.splits == 1 ? share(p, head * group + (first_row + row) % group, whole) : 1.0f);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[j] *= factor;
    if (p.splits == 1) {
      store8(static_cast<T *>(p.output) + to * D + at, sum);
    } else {
      if (real) store8(p.workspace + (to * p.splits + blockIdx.x) * D + at, sum);  // else its weight, 0, says enough
      if (at == 0) weights_of(p)[to * p.splits + blockIdx.x] = whole;
    }
  }
}

// Adds up a row's parts, a warp a row. Bytes: 8 a split, 4·D a split that has rows of the cache, and 2·D out.
template <class T> __device__ __forceinline__ void combine(const specbuild_attention &p) {
  const int64_t row = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  await_last_kernel();
  if (row >= int64_t(p.batch) * p.nodes * p.heads) return;
  const Weight *const weights = weights_of(p) + row * p.splits;
  static_assert(SPECBUILD_MOST_SPLITS == 64, "two splits a lane");
  const Weight nothing = {kNothing, 0.0f};
  const Weight first = lane < p.splits ? weights[lane] : nothing, second = lane + 32 < p.splits ? weights[lane + 32] : nothing;
  Weight whole;
  whole.top = warp_reduce<Largest>(fmaxf(first.top, second.top));
  const float factors[2] = {first.sum > 0.0f ? exp2_fast(first.top - whole.top) : 0.0f,
                            second.sum > 0.0f ? exp2_fast(second.top - whole.top) : 0.0f};
  whole.sum = warp_reduce<Sum>(factors[0] * first.sum + factors[1] * second.sum);
  const float left = share(p, int(row % p.heads), whole);
  const float *const parts = p.workspace + row * p.splits * p.head_dim;
  constexpr int kAtOnce = 8;  // loads under way
  struct alignas(16) Four { float x[4]; };
  for (int at = lane * 4; at < ceil_div(p.head_dim, 128) * 128; at += 128) {
    const bool in = at < p.head_dim;
    float sum[4] = {};
    for (int first = 0; first < p.splits; first += kAtOnce) {
      Four four[kAtOnce];
      float factor[kAtOnce];  // 0: nobody has written that part, or there is none
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        factor[i] = __shfl_sync(kAllLanes, first + i < 32 ? factors[0] : factors[1], (first + i) % 32);
        const float *const part = parts + (first + i) * p.head_dim + at;
        four[i] = in && factor[i] != 0.0f ? *reinterpret_cast<const Four *>(part) : Four{};
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[j] += factor[i] * four[i].x[j];
    }
    if (in) {
#pragma unroll
      for (int j = 0; j < 4; ++j) static_cast<T *>(p.output)[row * p.head_dim + at + j] = from_float<T>(sum[j] * left);
    }
  }
}

}  // namespace specbuild

// Every kernel there is, by activations' and cache's type, head size and query rows of a block. A build that knows its
// model compiles its own alone (SPECBUILD_ONE_…).
#ifdef SPECBUILD_ONE_HEAD_DIM
#define EACH_SHAPE(X, T, C) EACH_ROWS_OF(X, T, C, SPECBUILD_ONE_HEAD_DIM)
#define EACH_ROWS_OF(X, T, C, D) EACH_ROWS(X, T, C, D)
#if SPECBUILD_ONE_HEAD_DIM == 256
#define EACH_ROWS(X, T, C, D) X(T, C, D, 32)
#else
#define EACH_ROWS(X, T, C, D) X(T, C, D, 16) X(T, C, D, 32) X(T, C, D, 64)
#endif
#define EACH_KERNEL(X) EACH_SHAPE(X, SPECBUILD_ONE_DTYPE, SPECBUILD_ONE_CACHE_DTYPE)
#else
#define EACH_ROWS(X, T, C, D) X(T, C, D, 16) X(T, C, D, 32) X(T, C, D, 64)
#define EACH_SHAPE(X, T, C) \
  EACH_ROWS(X, T, C, 64) EACH_ROWS(X, T, C, 80) EACH_ROWS(X, T, C, 96) EACH_ROWS(X, T, C, 128) X(T, C, 256, 32)
#define EACH_KERNEL(X) EACH_SHAPE(X, F16, F16) EACH_SHAPE(X, BF16, BF16) EACH_SHAPE(X, F16, E4M3) EACH_SHAPE(X, BF16, E4M3)
#endif

// A compiler that is asked for no architecture takes one that is too old; the launcher refuses what came of it, by name.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define ATTEND(T, C, D, ROWS) __trap()
#else
#define ATTEND(T, C, D, ROWS) specbuild::attend<specbuild::T, specbuild::C, D, ROWS / 16>(p)
#endif
#define DEFINE(T, C, D, ROWS) DEFINE_NAMED(T, C, D, ROWS)
#define DEFINE_NAMED(T, C, D, ROWS)                                                                    \
  extern "C" __global__ void __launch_bounds__(specbuild::kThreads, 2)                                 \
      tree_attention_##T##_##C##_d##D##_r##ROWS(const __grid_constant__ specbuild_attention p) {       \
    ATTEND(T, C, D, ROWS);                                                                             \
  }
EACH_KERNEL(DEFINE)
extern "C" __global__ void __launch_bounds__(specbuild::kThreads)
    tree_attention_combine_F16(const __grid_constant__ specbuild_attention p) { specbuild::combine<specbuild::F16>(p); }
extern "C" __global__ void __launch_bounds__(specbuild::kThreads)
    tree_attention_combine_BF16(const __grid_constant__ specbuild_attention p) { specbuild::combine<specbuild::BF16>(p); }

#ifndef __CUDACC_RTC__
#include "kernels/attention_launch.cuh"
#endif
