// The device side of TreeAttention: one block attends 16, 32 or 64 query rows of one key/value head to one part of the
// context; a row is a head of the group at a node.
//
// Work: 4·D operations per query row and visible cache row. Bytes: every visible cache row once per tile of query rows,
// 2·Hkv·D·sizeof(C) each; queries, new rows and output once; with splits, H·N·splits·(D + 2) floats out and back in.
// After FlashAttention-2 (Dao 2023) and its split along the context, Flash-Decoding (Dao et al. 2023).
#pragma once

#include "kernels/mma.cuh"

namespace specbuild {

constexpr int kThreads = 128, kWarps = 4;
constexpr float kLog2e = 1.44269504f;

// Bytes from one row in shared memory to the next: an odd number of the 16 bytes that are copied and read at once, so that
// any eight neighbours have the eight groups of four banks to themselves.
constexpr int stride_of(int bytes) { return (bytes / 16 | 1) * 16; }

// How a block shares its work: kRowWarps × 16 query rows; the other factor of its 4 warps divides the keys of a tile.
template <class C, int D, int kRowWarps> struct Tile {
  static constexpr int kKeyWarps = kWarps / kRowWarps, kRows = 16 * kRowWarps, kKeys = D <= 128 ? 64 : 32;
  static constexpr int kStep = kKeys / kKeyWarps;            // keys of a warp in a tile
  static constexpr int kStride = stride_of(D * int(sizeof(C))), kQueryStride = stride_of(D * 2);  // a cache row, a query's
  static constexpr int kStage = 2 * kKeys * kStride;         // keys and values
  static constexpr int kStages = kStage > 36 * 1024 ? 2 : larger(2, smaller(4, 72 * 1024 / kStage));
  static constexpr bool kQueryStays = D > 128;               // too large for registers: read again for every tile
  static constexpr int kQueryAt = (kStages - (kQueryStays ? 0 : 1)) * kStage;  // else it lies where the last stage will
  static constexpr int kPartial = D + 4;                     // floats of a row of output between warps
  static constexpr int kShared = larger(larger(kQueryAt + kRows * kQueryStride, kStages * kStage), kWarps * 16 * kPartial * 4);
  static_assert(kStep % 16 == 0 && D % 16 == 0, "whole fragments");
  static_assert(kStride % 32 == 16 && kQueryStride % 32 == 16, "eight rows of a matrix in different banks");
  static_assert(kShared <= 99 * 1024 - 2048, "what every architecture since 8.0 has");
};

// What a block knows of its sequence, and which rows are its part.
struct Part {
  int committed, offset, fresh, total;  // fresh: the first new row; total: past the last row seen by this block's queries
  int count;                            // new nodes
  int lowest, begin, step, end;         // cache rows: the first that any query sees; the part's first tile, how far its tiles
                                        // are apart, and the end of all
  bool appends;                         // some of the new rows are in this part

  __device__ bool sound(const specbuild_attention &p) const {
    return committed >= 0 && offset >= 0 && count >= 0 && count <= p.nodes &&
           int64_t(committed) + offset + count <= p.capacity && (!p.parents || offset + count <= p.tree_nodes);
  }
  // This thread's share of the sequence's pages, of all its queries' rows, so that its blocks decide alike.
  __device__ bool paged(const specbuild_attention &p, int b) const {
    if (!p.page_rows || count == 0) return true;
    bool all = true;
    const int shift = __ffs(p.page_rows) - 1, last = (fresh + count - 1) >> shift;
    for (int page = (lowest >> shift) + int(threadIdx.x); page <= last; page += kThreads) all = has_page(p, b, page) && all;
    return all;
  }
};

// Where row `row` of a head begins in the cache, in elements.
__device__ __forceinline__ int64_t row_at(const specbuild_attention &p, int b, int head, int row) {
  return cache_row(p.page_table, p.page_rows, p.capacity, p.kv_heads, b, head, row) * p.head_dim;
}

// One row of D numbers, normed and rotated by a group of 8 lanes, given to store(at, eight numbers) in pieces. The halves of
// the first rotary_dim numbers are each other's partners (the "rotate_half" layout of Llama).
template <class T, int D, class Store>
__device__ __forceinline__ void rotate_row(const specbuild_attention &p, const T *row, const float *norm, int position, Store store) {
  const int member = threadIdx.x % 8, pairs = p.rotary_dim / 16, units = pairs + (D - p.rotary_dim) / 8;
  float factor = 1.0f;
  if (norm) {
    float sum = 0.0f, x[8];
    for (int i = member; i < D / 8; i += 8) {
      load8(row + 8 * i, x);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum += x[j] * x[j];
    }
    for (int step = 4; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
    factor = rsqrtf(sum / D + p.norm_epsilon);
  }
  const int at_most = larger(p.positions - 1, 0);
  const int64_t angle = int64_t(smaller(position, at_most)) * (p.rotary_dim / 2);
  for (int unit = member; unit < units; unit += 8) {
    const bool pair = unit < pairs;
    const int first = pair ? 8 * unit : p.rotary_dim + 8 * (unit - pairs), second = first + p.rotary_dim / 2;
    float x[8], y[8];
    load8(row + first, x);
    if (pair) load8(row + second, y);
    if (norm) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        x[j] *= factor * norm[first + j];
        if (pair) y[j] *= factor * norm[second + j];
      }
    }
    if (pair) {
      float cos[8], sin[8];
      load8(p.cos + angle + first, cos);
      load8(p.sin + angle + first, sin);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float turned = x[j] * cos[j] - y[j] * sin[j];
        y[j] = y[j] * cos[j] + x[j] * sin[j];
        x[j] = turned;
      }
      store(second, y);
    }
    store(first, x);
  }
}

// The new nodes' keys and values into the cache, each by the block that reads it there next.
template <class T, class C, int D, int kKeys>
__device__ void append(const specbuild_attention &p, const Part &part, int b, int head, const uint64_t *seen) {
  const float key_unit = p.key_scale ? 1.0f / p.key_scale[head] : 1.0f, value_unit = p.value_scale ? 1.0f / p.value_scale[head] : 1.0f;
  const int new_rows = part.total - part.fresh;
  // All lanes of a warp take part in every turn, for the sums of a norm are shuffled: a group without a row repeats the last.
  for (int first = 0; first < new_rows; first += kThreads / 8) {
    const int node = smaller(first + int(threadIdx.x) / 8, new_rows - 1);
    const int depth = seen ? __popcll(seen[part.offset + node]) - 1 : part.offset + node;
    const int64_t from = int64_t(b) * p.nodes + node, to = row_at(p, b, head, part.fresh + node);
    const bool mine = (part.fresh + node) / kKeys % p.splits == int(blockIdx.x);
    const auto store = [&](C *cache, float unit) {
      return [=](int at, float x[8]) {
        if (!mine) return;
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] *= unit;
        store8(cache + to + at, x);
      };
    };
    rotate_row<T, D>(p, static_cast<const T *>(p.key) + from * p.key_stride + int64_t(head) * D, p.key_norm,
                     part.committed + depth, store(static_cast<C *>(p.key_cache), key_unit));
    const T *value = static_cast<const T *>(p.value) + from * p.value_stride + int64_t(head) * D;
    for (int i = threadIdx.x % 8; i < D / 8; i += 8) {
      float x[8];
      load8(value + 8 * i, x);
      store(static_cast<C *>(p.value_cache), value_unit)(8 * i, x);
    }
  }
}

// The tile's query rows into shared memory, zeros for rows that are none.
template <class T, int D, int kRows, int kStride>
__device__ void load_queries(const specbuild_attention &p, const Part &part, int b, int head, int first, const uint64_t *seen, unsigned char *to) {
  const int group = p.heads / p.kv_heads, rows = part.count * group;
  for (int i = threadIdx.x / 8; i < kRows; i += kThreads / 8) {
    const int row = smaller(first + i, rows - 1), node = row / group, query_head = head * group + row % group;
    const int depth = seen ? __popcll(seen[part.offset + node]) - 1 : part.offset + node;
    T *const shared = reinterpret_cast<T *>(to + i * kStride);
    const bool real = first + i < rows;
    rotate_row<T, D>(p, static_cast<const T *>(p.query) + (int64_t(b) * p.nodes + node) * p.query_stride + int64_t(query_head) * D,
                     p.query_norm, part.committed + depth, [=](int at, float x[8]) {
#pragma unroll
                       for (int j = 0; j < 8; ++j) x[j] = real ? x[j] : 0.0f;
                       store8(shared + at, x);
                     });
  }
}

// Starts the copy of a tile's keys and values to a stage; rows that no query sees, before the first that one does and past
// the end, become zeros, for 0 · NaN is NaN.
template <class C, int D, class S>
__device__ __forceinline__ void load_tile(const specbuild_attention &p, const Part &part, int b, int head, int first, unsigned char *stage, uint64_t *phase) {
  const C *const keys = static_cast<const C *>(p.key_cache), *const values = static_cast<const C *>(p.value_cache);
  constexpr int kBytes = D * int(sizeof(C));
  if constexpr (kBulk) {
    const int before = larger(part.lowest - first, 0), there = smaller(part.end - first, S::kKeys);
    if (threadIdx.x == 0) arrive_phase(phase, uint32_t(2 * (there - before) * kBytes));
    for (int i = threadIdx.x; i < 2 * S::kKeys; i += kThreads) {
      const int row = i % S::kKeys;
      unsigned char *const to = stage + i * S::kStride;
      if (row >= before && row < there) {
        copy_row(phase, to, (i < S::kKeys ? keys : values) + row_at(p, b, head, first + row), kBytes);
      } else {
        for (int at = 0; at < kBytes; at += 16) *reinterpret_cast<Eight<BF16> *>(to + at) = Eight<BF16>{};
      }
    }
  } else {
    constexpr int kPieces = kBytes / 16;
    for (int i = threadIdx.x; i < 2 * S::kKeys * kPieces; i += kThreads) {
      const int line = i / kPieces, at = i % kPieces * 16, row = first + line % S::kKeys;
      const int64_t from = row_at(p, b, head, larger(smaller(row, part.end - 1), part.lowest));
      copy16(stage + line * S::kStride + at, reinterpret_cast<const unsigned char *>((line < S::kKeys ? keys : values) + from) + at,
             row >= part.lowest && row < part.end);
    }
  }
}

// A fragment of A: 16 query rows, numbers 16·step to 16·step + 15. E4M3 keys are read four neighbours a lane, so the
// queries' columns are taken in that order too.
template <class C> __device__ __forceinline__ void load_query(uint32_t a[4], const unsigned char *rows, int stride, int step) {
  const int lane = threadIdx.x % 32;
  if constexpr (sizeof(C) == 2) {
    load_matrices<4, false>(a, rows + lane % 16 * stride + step * 32 + lane / 16 * 16);
  } else {
    const unsigned char *const at = rows + lane / 4 * stride + step * 32 + lane % 4 * 8;
    a[0] = *reinterpret_cast<const uint32_t *>(at), a[2] = *reinterpret_cast<const uint32_t *>(at + 4);
    a[1] = *reinterpret_cast<const uint32_t *>(at + 8 * stride), a[3] = *reinterpret_cast<const uint32_t *>(at + 8 * stride + 4);
  }
}

// Two fragments of B: 16 keys, numbers 16·step to 16·step + 15.
template <class T, class C> __device__ __forceinline__ void load_keys(uint32_t b[4], const unsigned char *rows, int stride, int step) {
  const int lane = threadIdx.x % 32;
  if constexpr (sizeof(C) == 2) {
    load_matrices<4, false>(b, rows + (lane / 16 * 8 + lane % 8) * stride + step * 32 + lane / 8 % 2 * 16);
  } else {
    const unsigned char *const at = rows + lane / 4 * stride + step * 16 + lane % 4 * 4;
    widen<T>(*reinterpret_cast<const uint32_t *>(at), b[0], b[1]);
    widen<T>(*reinterpret_cast<const uint32_t *>(at + 8 * stride), b[2], b[3]);
  }
}

// Two fragments of B: 16 cache rows, 16 numbers of their values from 16·step on: for 16-bit caches the first and the last
// eight of them, for E4M3 the even and the odd ones, for transposing moves 16 bits, and those are two numbers.
template <class T, class C> __device__ __forceinline__ void load_values(uint32_t b[4], const unsigned char *rows, int stride, int step) {
  const int lane = threadIdx.x % 32;
  if constexpr (sizeof(C) == 2) {
    load_matrices<4, true>(b, rows + lane % 16 * stride + step * 32 + lane / 16 * 16);
  } else {
    uint32_t pairs[2];
    load_matrices<2, true>(pairs, rows + lane % 16 * stride + step * 16);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t x = pairs[i];  // numbers 0 and 1 of one row, then of the next
      widen<T>((x & 0xff) | (x >> 8 & 0xff00) | (x & 0xff00) << 8 | (x & 0xff000000), b[i], b[2 + i]);
    }
  }
}

// The number of the head that accumulator `i` of fragment `n` holds.
template <class C> __device__ __forceinline__ int number_of(int n, int i) {
  const int column = threadIdx.x % 4 * 2 + i % 2;
  return sizeof(C) == 2 ? 8 * n + column : 16 * (n / 2) + 2 * column + n % 2;
}

// Who sees what: a query row's node, as far as a mask asks.
struct Sight {
  uint64_t seen;  // ancestors and itself, by node
  int node, position;
};

__device__ __forceinline__ bool visible(const specbuild_attention &p, const Part &part, const uint64_t *seen, const Sight &sight, int row) {
  if (row >= part.end) return false;
  const int node = row - part.committed;
  if (node < 0) return !p.window || sight.position - row < p.window;
  if (!seen) return node <= sight.node && (!p.window || sight.node - node < p.window);
  return (sight.seen >> node & 1) && (!p.window || sight.position - part.committed - __popcll(seen[node]) + 1 < p.window);
}

constexpr float kNothing = -3.0e38f;  // the largest of no scores; finite, so that differences are

struct Weight {
  float top, sum;  // largest score, in units of log 2, and the sum of exp2(score − top)
};

// A sink takes its share of the softmax; what is left of each number of the row.
__device__ __forceinline__ float share(const specbuild_attention &p, int head, Weight weight) {
  if (weight.sum <= 0.0f) return 0.0f;
  if (!p.sinks) return 1.0f / weight.sum;
  const float sink = p.sinks[head] * kLog2e, top = larger(weight.top, sink);
  return exp2_fast(weight.top - top) / (weight.sum * exp2_fast(weight.top - top) + exp2_fast(sink - top));
}

// This block's part of the context; begin == end where there is none.
__device__ __forceinline__ Part part_of(const specbuild_attention &p, int b, int first_row, int rows, int keys) {
  Part part;
  part.committed = p.cache_len[b], part.offset = p.tree_offset ? p.tree_offset[b] : 0;
  part.count = p.counts ? p.counts[b] : p.nodes;
  part.fresh = part.committed + part.offset;
  const int group = p.heads / p.kv_heads;
  part.total = part.fresh + (p.parents ? part.count : smaller(part.count, ceil_div(first_row + rows, group)));
  part.lowest = p.window ? larger(0, part.committed - p.window + 1) : 0;
  // Every splits-th tile, counted from row 0: which rows are summed up together depends neither on how long the context
  // is nor on which rows are new, so a tree's first path has the bits of one token at a time. No part has two more.
  const auto next_tile = [&](int row) {
    const int tile = row / keys, splits = p.splits;
    return (tile + (int(blockIdx.x) + splits - tile % splits) % splits) * keys;
  };
  part.begin = next_tile(part.lowest), part.step = p.splits * keys, part.end = part.total;
  part.appends = part.fresh < part.total && next_tile(part.fresh) < part.total;
  return part;
}

}  // namespace specbuild
