// The mask of a tree, for a standard attention: who sees which cache row (attention.cuh's visible, written out).
//
// parents int32 [B, M] to output [B, N, S] as bool, or 0 and −∞ in float32, float16 or bfloat16. A block writes 1024 columns
// of all of a sequence's nodes, the first one also their positions [B, N] and the first one's row [B]. Bytes: N·S·sizeof per
// sequence out, the tree in. Without an output one block checks the tree, and the row is that of the tree's first node.
#include "kernels/common.cuh"

namespace specbuild {

constexpr int kMaskThreads = 256, kMaskColumns = 1024;

template <class T> __device__ __forceinline__ T mask_value(bool seen) {
  return from_float<T>(seen ? 0.0f : float_of(0xff800000));
}
template <> __device__ __forceinline__ bool mask_value<bool>(bool seen) { return seen; }

template <class T> __device__ __forceinline__ void mask(const specbuild_mask &p) {
  __shared__ uint64_t ancestors[SPECBUILD_MOST_NODES];
  __shared__ int8_t jump[SPECBUILD_MOST_NODES];
  const int b = blockIdx.y, first = int(blockIdx.x) * kMaskColumns, last = smaller(first + kMaskColumns, p.capacity);
  const int64_t start = int64_t(p.cache_len[b]) + p.shift;
  const int committed = int(start), offset = p.tree_offset ? p.tree_offset[b] : 0, count = p.counts ? p.counts[b] : p.nodes;
  int fault = SPECBUILD_FAULT_NONE;
  if (start < 0 || offset < 0 || count < 0 || count > p.nodes || start + offset + count > p.capacity ||
      (p.rows && p.output && count > 0 && start + offset + p.nodes > p.capacity) || (p.parents && offset + count > p.tree_nodes))
    fault = SPECBUILD_FAULT_CAPACITY;
  else if (p.parents && !build_ancestors(p.parents + int64_t(b) * p.tree_nodes, offset + count, ancestors, jump))
    fault = SPECBUILD_FAULT_PARENT;
  if (fault && p.fault && threadIdx.x == 0) p.fault[b] = fault;
  const auto depth_of = [&](int self) { return p.parents ? __popcll(ancestors[self]) - 1 : self; };
  for (int i = threadIdx.x; p.positions && blockIdx.x == 0 && i < p.nodes; i += kMaskThreads)
    p.positions[int64_t(b) * p.nodes + i] = !fault && i < count ? committed + depth_of(offset + i) : 0;
  if (p.rows && blockIdx.x == 0 && threadIdx.x == 0)
    p.rows[b] = p.output ? int(larger<int64_t>(0, smaller<int64_t>(start + offset, p.capacity - p.nodes))) : committed;
  for (int i = 0; p.output && i < p.nodes; ++i) {
    const bool real = !fault && i < count;
    const int self = offset + i, depth = real ? depth_of(self) : 0;
    T *const row = static_cast<T *>(p.output) + (int64_t(b) * p.nodes + i) * p.capacity;
    for (int column = first + threadIdx.x; column < last; column += kMaskThreads) {
      const int node = column - committed;  // negative: a committed row, whose position is its row
      bool seen = column == 0;
      if (real) {
        seen = node < 0 || (p.parents ? node <= self && ancestors[self] >> node & 1 : node <= self);
        const int position = node < 0 || !p.parents ? column : committed + (seen ? depth_of(node) : 0);
        seen = seen && (!p.window || committed + depth - position < p.window);
      }
      row[column] = mask_value<T>(seen);
    }
  }
}

}  // namespace specbuild

#define EACH_MASK(X) X(BOOL, bool) X(F32, float) X(F16, specbuild::F16) X(BF16, specbuild::BF16)
#define DEFINE(NAME, T)                                                 \
  extern "C" __global__ void __launch_bounds__(specbuild::kMaskThreads) \
      tree_mask_##NAME(const __grid_constant__ specbuild_mask p) { specbuild::mask<T>(p); }
EACH_MASK(DEFINE)

#ifndef __CUDACC_RTC__
extern "C" int specbuild_tree_mask(const specbuild_mask *p, void *stream) {
  using namespace specbuild;
  void (*run)(specbuild_mask) = nullptr;
#define PICK(NAME, T) if (p->dtype == SPECBUILD_##NAME) run = tree_mask_##NAME;
  EACH_MASK(PICK)
#undef PICK
  if (!run) return refuse("a mask of %s: use bool, float32, float16 or bfloat16", name_of(p->dtype));
  if (p->batch < 1 || p->batch > 65535) return refuse("batch %d is not in 1…65535", p->batch);
  if (p->nodes < 1 || (p->parents && p->nodes > SPECBUILD_MOST_NODES))
    return refuse("%d nodes: a tree has 1 to %d", p->nodes, SPECBUILD_MOST_NODES);
  if (p->parents && (p->tree_nodes < p->nodes || p->tree_nodes > SPECBUILD_MOST_NODES))
    return refuse("a tree of %d nodes for %d new ones: use %d to %d", p->tree_nodes, p->nodes, p->nodes, SPECBUILD_MOST_NODES);
  if (p->capacity < 1) return refuse("capacity %d of a cache slot: at least 1", p->capacity);
  if (p->rows && p->nodes > p->capacity) return refuse("%d nodes in a cache slot of %d rows", p->nodes, p->capacity);
  if (p->window < 0) return refuse("window %d: 0 for none, or the positions a node sees", p->window);
  const Pointer pointers[] = {{"cache_len", p->cache_len, 4}, {"output", p->output, 4, true}, {"parents", p->parents, 4, true},
                              {"tree_offset", p->tree_offset, 4, true}, {"counts", p->counts, 4, true},
                              {"positions", p->positions, 4, true}, {"rows", p->rows, 4, true}, {"fault", p->fault, 4, true}};
  return launch(pointers, run, Grid{p->output ? ceil_div(p->capacity, kMaskColumns) : 1, p->batch, 1, kMaskThreads, 0}, *p, stream);
}
#endif
