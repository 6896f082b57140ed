// Growing a draft's tree, a block a sequence: runtime/drafting/model.py's Growth, node for node.
//
// grow_level: choices, scores [B, F, K] of the frontier's nodes to the pool's next level, the next frontier, and what the
// draft runs for it. Candidates are ranked by counting the better ones. Work: (F·K)² + P² comparisons in shared memory;
// bytes: 8·F·K in, 8·P of scores, some 30 per new node out. grow_finish: the final tree from the pool; P² comparisons.
#include "kernels/common.cuh"

namespace specbuild {

constexpr int kGrowThreads = 256, kMostCandidates = 4096;

// How many of `count` numbers come before number i: the larger ones, and its equals in front of it.
__device__ __forceinline__ int rank_of(const double *x, int begin, int count, int i) {
  int rank = 0;
  for (int j = begin; j < count; ++j) rank += x[j] > x[i] || (x[j] == x[i] && j < i);
  return rank;
}

// The root and the best `nodes` of the pool, as bits; all threads of the block call it.
struct Kept {
  uint32_t bits[SPECBUILD_MOST_POOL / 32];

  __device__ void find(const double *scores, int size, int nodes) {
    for (int i = threadIdx.x; i < SPECBUILD_MOST_POOL / 32; i += kGrowThreads) bits[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < size; i += kGrowThreads)
      if (i == 0 || size <= nodes + 1 || rank_of(scores, 1, size, i) < nodes) atomicOr(&bits[i / 32], 1u << i % 32);
    __syncthreads();
  }
  __device__ bool has(int node) const { return bits[node / 32] >> node % 32 & 1; }
  __device__ int before(int node) const {
    int count = 0;
    for (int i = 0; i < node / 32; ++i) count += __popc(bits[i]);
    return node % 32 ? count + __popc(bits[node / 32] << (32 - node % 32)) : count;
  }
};

__device__ __forceinline__ bool fits(const specbuild_grow &p, const specbuild_growth &growth) {
  return growth.branch >= 1 && growth.branch <= p.best && growth.expand >= 1 && growth.expand <= p.frontiers &&
         growth.width >= 1 && growth.depth >= 1 && growth.nodes < p.nodes && growth.depth <= SPECBUILD_MOST_POOL &&
         growth.width <= SPECBUILD_MOST_POOL && 1 + growth.width * growth.depth <= p.pool &&
         growth.expand * (growth.depth - 1) <= p.rows;
}

// Whether another level has room where the state says that the tree has come to.
__device__ __forceinline__ bool has_room(const specbuild_grow &p, const specbuild_growth &growth) {
  return growth.size >= 1 && growth.size <= p.pool - growth.width && growth.level >= 0 && growth.level < growth.depth &&
         growth.run >= 0 && (growth.level + 1 == growth.depth || growth.run <= p.rows - growth.expand);
}

// Adds the frontier's children to the pool, of which there are `count` places with `branch` children each.
__device__ __forceinline__ void add_level(const specbuild_grow &p, int b, specbuild_growth &growth, int count, double *likely,
                                          double *scores) {
  __shared__ int added;
  const int64_t pool = int64_t(b) * p.pool, frontier = int64_t(b) * p.frontiers;
  const int64_t asked = int64_t(b) * (p.first ? 1 : p.frontiers);
  const int branch = growth.branch;
  for (int i = threadIdx.x; i < growth.size; i += kGrowThreads) scores[i] = p.pool_scores[pool + i];
  if (threadIdx.x == 0) added = 0;
  __syncthreads();
  for (int row = threadIdx.x; row < count; row += kGrowThreads) {
    const int64_t from = (asked + row) * p.best;
    const float *const score = p.scores + from;
    double *const mine = likely + row * branch;
    double sum = 0.0;
#pragma unroll 1
    for (int j = 0; j < branch; ++j) sum += exp(double(score[j]) - double(score[0]));
    const double all = log(sum), above = scores[p.frontier[frontier + row]];
    for (int j = 0; j < branch; ++j) {
      const bool real = p.choices[from + j] >= 0 && score[j] > float_of(0xff800000);
      mine[j] = real ? double(score[j]) - double(score[0]) - all + above : double(float_of(0xff800000));
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < count * branch; i += kGrowThreads) {
    if (!(likely[i] > double(float_of(0xff800000)))) continue;
    const int rank = rank_of(likely, 0, count * branch, i), node = growth.size + rank;
    if (rank >= growth.width) continue;
    atomicAdd(&added, 1);
    scores[node] = p.pool_scores[pool + node] = likely[i];
    p.pool_tokens[pool + node] = p.choices[(asked + i / branch) * p.best + i % branch];
    p.pool_parents[pool + node] = p.frontier[frontier + i / branch];
    p.pool_rows[pool + node] = -1;
  }
  __syncthreads();
  growth.size += added;
  ++growth.level;
}

__device__ __forceinline__ void grow_level(const specbuild_grow &p) {
  __shared__ double likely[kMostCandidates], scores[SPECBUILD_MOST_POOL];
  __shared__ Kept kept;
  const int b = blockIdx.x;
  const int64_t pool = int64_t(b) * p.pool, frontier = int64_t(b) * p.frontiers;
  specbuild_growth growth = p.growths[b];
  int count = p.first ? 1 : p.level_counts[b];
  const bool idle = growth.nodes < 1, fresh = p.first || growth.done;
  const bool sound = idle || (fits(p, growth) && count >= 0 && count <= growth.expand && (fresh || has_room(p, growth)));
  if (p.first) {
    growth.size = !idle, growth.level = growth.run = growth.done = 0;
    for (int i = threadIdx.x; i < p.rows; i += kGrowThreads) p.level_parents[int64_t(b) * p.rows + i] = -1;
    if (threadIdx.x == 0) {
      p.pool_tokens[pool] = p.roots[b], p.pool_parents[pool] = p.pool_rows[pool] = -1, p.pool_scores[pool] = 0.0;
      p.frontier[frontier] = 0;
    }
  }
  if (!sound) growth.size = 1, growth.done = 1;  // the root alone: nothing is drafted
  __syncthreads();

  int next = 0;  // the new frontier's nodes
  const int first_row = growth.run;
  if (!idle && !growth.done) {
    const int known = growth.size;
    add_level(p, b, growth, count, likely, scores);
    kept.find(scores, growth.size, growth.nodes);
    // A level's nodes are best first, so those that are kept are its first ones.
    next = growth.level < growth.depth ? smaller(kept.before(growth.size) - kept.before(known), growth.expand) : 0;
    for (int at = threadIdx.x; at < next; at += kGrowThreads) {
      const int node = known + at;
      p.frontier[frontier + at] = node;
      p.pool_rows[pool + node] = first_row + at;
      p.level_parents[int64_t(b) * p.rows + first_row + at] = p.pool_rows[pool + p.pool_parents[pool + node]];
      p.level_tokens[frontier + at] = p.pool_tokens[pool + node];
      p.positions[frontier + at] = p.root_position[b] + growth.level;
    }
    growth.run += next;
    growth.done = next == 0;
  }
  for (int i = next + int(threadIdx.x); i < p.frontiers; i += kGrowThreads)
    p.level_tokens[frontier + i] = 0, p.positions[frontier + i] = p.root_position[b];
  if (threadIdx.x == 0) {
    p.growths[b] = growth, p.level_counts[b] = next, p.level_offset[b] = first_row;
    if (!sound && p.fault) p.fault[b] = SPECBUILD_FAULT_CAPACITY;
  }
}

__device__ __forceinline__ void grow_finish(const specbuild_grow &p) {
  __shared__ double scores[SPECBUILD_MOST_POOL];
  __shared__ Kept kept;
  const int b = blockIdx.x;
  const int64_t pool = int64_t(b) * p.pool, tree = int64_t(b) * p.nodes;
  specbuild_growth growth = p.growths[b];
  growth.size = larger(0, smaller(growth.size, p.pool));  // whatever lies there, nothing past the pool is touched
  for (int i = threadIdx.x; i < growth.size; i += kGrowThreads) scores[i] = p.pool_scores[pool + i];
  __syncthreads();
  kept.find(scores, growth.size, growth.nodes);
  const int count = kept.before(growth.size);
  for (int node = threadIdx.x; node < growth.size; node += kGrowThreads) {
    if (!kept.has(node)) continue;
    const int64_t at = tree + kept.before(node);
    const int parent = p.pool_parents[pool + node], row = p.pool_rows[pool + node];
    p.tree_tokens[at] = p.pool_tokens[pool + node];
    p.tree_parents[at] = parent < 0 ? -1 : kept.before(parent);
    p.tree_nodes[at] = node;
    p.node_rows[at] = node == 0 ? 0 : row < 0 ? -1 : row + 1;
  }
  for (int i = count + int(threadIdx.x); i < p.nodes; i += kGrowThreads)
    p.tree_tokens[tree + i] = 0, p.tree_parents[tree + i] = p.tree_nodes[tree + i] = p.node_rows[tree + i] = -1;
  if (threadIdx.x == 0) p.tree_counts[b] = count;
}

}  // namespace specbuild

extern "C" __global__ void __launch_bounds__(specbuild::kGrowThreads)
    grow_level(const __grid_constant__ specbuild_grow p) { specbuild::grow_level(p); }
extern "C" __global__ void __launch_bounds__(specbuild::kGrowThreads)
    grow_finish(const __grid_constant__ specbuild_grow p) { specbuild::grow_finish(p); }

#ifndef __CUDACC_RTC__
namespace specbuild {

inline int check_grow(const specbuild_grow *p) {
  if (p->batch < 1) return refuse("batch %d: at least 1", p->batch);
  if (p->pool < 2 || p->pool > SPECBUILD_MOST_POOL) return refuse("a pool of %d nodes: 2 to %d", p->pool, SPECBUILD_MOST_POOL);
  if (p->nodes < 2 || p->nodes > SPECBUILD_MOST_NODES)
    return refuse("a tree of %d nodes: 2 to %d", p->nodes, SPECBUILD_MOST_NODES);
  if (p->rows < 1 || p->rows > SPECBUILD_MOST_NODES)
    return refuse("a draft of %d rows: 1 to %d", p->rows, SPECBUILD_MOST_NODES);
  if (p->frontiers < 1 || p->frontiers > SPECBUILD_MOST_NODES)
    return refuse("%d nodes a level: 1 to %d", p->frontiers, SPECBUILD_MOST_NODES);
  if (p->best < 1 || p->best > SPECBUILD_MOST_BEST) return refuse("%d children a node: 1 to %d", p->best, SPECBUILD_MOST_BEST);
  const Pointer pointers[] = {
      {"growths", p->growths, 4}, {"pool_tokens", p->pool_tokens, 4}, {"pool_parents", p->pool_parents, 4},
      {"pool_rows", p->pool_rows, 4}, {"pool_scores", p->pool_scores, 8}, {"frontier", p->frontier, 4},
      {"level_counts", p->level_counts, 4}, {"roots", p->roots, 4}, {"root_position", p->root_position, 4},
      {"choices", p->choices, 4}, {"scores", p->scores, 4}, {"level_tokens", p->level_tokens, 4},
      {"positions", p->positions, 4}, {"level_parents", p->level_parents, 4}, {"level_offset", p->level_offset, 4},
      {"tree_tokens", p->tree_tokens, 4}, {"tree_parents", p->tree_parents, 4}, {"tree_counts", p->tree_counts, 4},
      {"tree_nodes", p->tree_nodes, 4}, {"node_rows", p->node_rows, 4}, {"fault", p->fault, 4, true}};
  return check_pointers(pointers);
}

}  // namespace specbuild

extern "C" {

int specbuild_grow_level(const specbuild_grow *p, void *stream) {
  using namespace specbuild;
  if (const int status = check_grow(p)) return status;
  return launch(::grow_level, Grid{p->batch, 1, 1, kGrowThreads, 0}, *p, stream);
}

int specbuild_finish_tree(const specbuild_grow *p, void *stream) {
  using namespace specbuild;
  if (const int status = check_grow(p)) return status;
  return launch(::grow_finish, Grid{p->batch, 1, 1, kGrowThreads, 0}, *p, stream);
}

}  // extern "C"
#endif
