// What choosing from a row of logits is made of: the node's path, the request's processors, an order of scores as integers.
#pragma once

#include "kernels/common.cuh"

namespace specbuild {

// Numbers in the order of their scores: equal floats have equal keys, −0 and 0 too. A NaN has none.
__device__ __forceinline__ uint32_t key_of(float x) {
  const uint32_t bits = bits_of(__fadd_rn(x, 0.0f));
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}
__device__ __forceinline__ float score_of(uint32_t key) { return float_of(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu)); }
constexpr uint32_t kLeastKey = 0x007fffff, kMostKey = 0xff800000;  // of −∞ and ∞

__device__ __forceinline__ bool cuts_off(const specbuild_request &r) {
  return r.temperature > 0.0f && (r.top_k > 0 || r.top_p < 1.0 || score_of(kLeastKey) < r.min_p_log);
}

// Which tokens of a row of logits are legal, a bit each; null: all.
__device__ __forceinline__ const uint32_t *mask_of(const specbuild_choose &p, int64_t row) {
  return p.masks ? p.masks + row * ceil_div(p.vocab, 32) : nullptr;
}

// A node of the tree: its depth, and the tokens from it up to the root, the root excluded. Shared by a block.
struct Node {
  int32_t parents[SPECBUILD_MOST_POOL];
  int32_t path[SPECBUILD_MOST_NODES];
  int32_t depth, fault;
};

// Finds the node of a row; all threads of the block call it.
__device__ __forceinline__ void find_node(const specbuild_choose &p, int b, int row, Node &node) {
  for (int i = threadIdx.x; i < p.tree_nodes; i += blockDim.x)
    node.parents[i] = p.parents ? p.parents[int64_t(b) * p.tree_nodes + i] : i - 1;
  __syncthreads();
  if (threadIdx.x == 0) {
    int at = p.row_nodes ? p.row_nodes[int64_t(b) * p.nodes + row] : row, depth = 0;
    int fault = at < 0 || at >= p.tree_nodes ? SPECBUILD_FAULT_NODE : SPECBUILD_FAULT_NONE;
    while (!fault && at > 0) {
      const int parent = node.parents[at];
      if (parent < -1 || parent >= at || depth == SPECBUILD_MOST_NODES) {
        fault = SPECBUILD_FAULT_PARENT;
      } else {
        node.path[depth++] = at;
        at = parent;
      }
    }
    node.depth = depth, node.fault = fault;
    if (fault && p.fault) p.fault[b] = fault;
  }
  __syncthreads();
  if (!node.fault)
    for (int i = threadIdx.x; i < node.depth; i += blockDim.x) node.path[i] = p.tokens[int64_t(b) * p.tree_nodes + node.path[i]];
  __syncthreads();
}

// f before the cut-offs, bit for bit what NumPy computes: every operation rounds to float32, none are contracted.
struct Processors {
  const specbuild_choose &p;
  const specbuild_request request;
  const Node &node;
  const uint32_t *history;  // of the sequence; null where nothing asks for it
  bool repeats, counts;

  __device__ __forceinline__ Processors(const specbuild_choose &p, int b, const Node &node)
      : p(p), request(p.requests[b]), node(node), repeats(request.repetition != 1.0f),
        counts(request.frequency != 0.0f || request.presence != 0.0f) {
    history = p.history && (repeats || counts) ? p.history + int64_t(b) * p.vocab : nullptr;
  }

  __device__ __forceinline__ bool plain() const {  // f is the identity, or the temperature alone
    return !repeats && !counts && request.bias_begin == request.bias_end;
  }
  __device__ __forceinline__ bool noisy() const { return request.temperature > 0.0f; }

  // Marks the tokens from `first` on that the path or the bias concerns, so that no other token is looked for in them.
  __device__ __forceinline__ void mark(uint32_t *bits, int first, int count) const {
    for (int i = threadIdx.x; i < ceil_div(count, 32); i += blockDim.x) bits[i] = 0;
    __syncthreads();
    const int steps = repeats || counts ? node.depth : 0, biased = p.bias_tokens ? request.bias_end - request.bias_begin : 0;
    for (int i = threadIdx.x; i < steps + biased; i += blockDim.x) {
      const int at = (i < steps ? node.path[i] : p.bias_tokens[request.bias_begin + i - steps]) - first;
      if (at >= 0 && at < count) atomicOr(&bits[at / 32], 1u << at % 32);
    }
    __syncthreads();
  }

  __device__ __forceinline__ float operator()(float x, int token, bool marked) const {
    if (repeats || counts) {
      const uint32_t past = history ? history[token] : 0;
      bool seen = past >> 31;
      uint32_t times = past & 0x7fffffff;
      for (int i = 0; marked && i < node.depth; ++i)
        if (node.path[i] == token) seen = true, ++times;
      if (repeats && seen) x = x > 0.0f ? __fdiv_rn(x, request.repetition) : __fmul_rn(x, request.repetition);
      if (counts && times)
        x = __fsub_rn(x, __fadd_rn(__fmul_rn(request.frequency, float(times)), request.presence));
    }
    if (marked && p.bias_tokens) {  // the token's place in its request's list, which is ascending
      int low = request.bias_begin, high = request.bias_end;
      while (low < high) {
        const int middle = (low + high) / 2;
        if (p.bias_tokens[middle] < token) low = middle + 1;
        else high = middle;
      }
      if (low < request.bias_end && p.bias_tokens[low] == token) x = __fadd_rn(x, p.bias_values[low]);
    }
    if (request.temperature != 0.0f && request.temperature != 1.0f) x = __fdiv_rn(x, request.temperature);
    return x;
  }
};

}  // namespace specbuild
