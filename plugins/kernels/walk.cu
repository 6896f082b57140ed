// Acceptance: from the root along the choices, as far as a child carries the choice (runtime/speculation/acceptance.py).
//
// tokens, parents, choices int32 [B, N] to path, emitted int32 [B, N] and length int32 [B], and for the next round roots [B]
// and pair [B, 2]. A warp walks a sequence's tree, two nodes a lane; a step is one vote. Work: a step per accepted node. Bytes: 3·4·N in and 2·4·N out per sequence.
#include "kernels/common.cuh"

namespace specbuild {

__device__ __forceinline__ void walk(const specbuild_walk &p) {
  static_assert(SPECBUILD_MOST_NODES == 64, "two nodes a lane");
  const int b = blockIdx.x, lane = threadIdx.x, count = p.counts ? p.counts[b] : p.nodes;
  const int64_t first = int64_t(b) * p.nodes;
  bool sound = count >= 0 && count <= p.nodes;
  int parents[2], tokens[2], choices[2];
  for (int i = 0; i < 2; ++i) {
    const int node = lane + 32 * i;
    const bool real = node < count && node < p.nodes;
    parents[i] = !real ? -2 : p.parents ? p.parents[first + node] : node - 1;
    tokens[i] = real ? p.tokens[first + node] : -1;
    choices[i] = real ? p.choices[first + node] : -1;
    if (real) sound = sound && parents[i] >= -1 && parents[i] < node;
  }
  const bool all_sound = __all_sync(kAllLanes, sound);
  int node = all_sound && count > 0 ? 0 : -1, length = 0, last = 0, bonus = -1;
  int path[2] = {-1, -1}, emitted[2] = {-1, -1};
  while (node >= 0) {
    const int choice = __shfl_sync(kAllLanes, node < 32 ? choices[0] : choices[1], node % 32);
    for (int i = 0; i < 2; ++i)
      if (length == lane + 32 * i) path[i] = node, emitted[i] = choice;
    if (p.history && lane == 0 && choice >= 0 && choice < p.vocab) {
      uint32_t &times = p.history[int64_t(b) * p.vocab + choice];
      times = (times | 0x80000000u) + 1;
    }
    ++length, last = node, bonus = choice;
    const unsigned low = __ballot_sync(kAllLanes, parents[0] == node && tokens[0] == choice);
    const unsigned high = __ballot_sync(kAllLanes, parents[1] == node && tokens[1] == choice);
    node = high ? 63 - __clz(int(high)) : 31 - __clz(int(low));  // −1 where no child carries the choice
    if (p.trunk && node != length) node = -1;  // the choice is emitted, and the next round's root
  }
  for (int i = 0; i < 2; ++i) {
    const int at = lane + 32 * i;
    if (at < p.nodes) p.path[first + at] = path[i], p.emitted[first + at] = emitted[i];
  }
  const int before = __shfl_sync(kAllLanes, last < 32 ? tokens[0] : tokens[1], last % 32);  // the last accepted node's
  if (lane == 0) {
    p.length[b] = length;
    if (p.roots && length) p.roots[b] = bonus;
    if (p.pair && length) p.pair[2 * b] = before, p.pair[2 * b + 1] = bonus;
    const bool fits = count >= 0 && count <= p.nodes;
    if (!all_sound && p.fault) p.fault[b] = fits ? SPECBUILD_FAULT_PARENT : SPECBUILD_FAULT_CAPACITY;
  }
}

}  // namespace specbuild

extern "C" __global__ void __launch_bounds__(32) walk_tree(const __grid_constant__ specbuild_walk p) { specbuild::walk(p); }

#ifndef __CUDACC_RTC__
extern "C" int specbuild_walk_tree(const specbuild_walk *p, void *stream) {
  using namespace specbuild;
  if (p->batch < 1) return refuse("batch %d: at least 1", p->batch);
  if (p->nodes < 1 || p->nodes > SPECBUILD_MOST_NODES)
    return refuse("a tree of %d nodes: 1 to %d", p->nodes, SPECBUILD_MOST_NODES);
  if (p->history && p->vocab < 1) return refuse("a history of a vocabulary of %d: at least 1", p->vocab);
  const Pointer pointers[] = {{"tokens", p->tokens, 4}, {"choices", p->choices, 4}, {"path", p->path, 4},
                              {"length", p->length, 4}, {"emitted", p->emitted, 4},
                              {"parents", p->parents, 4, true}, {"counts", p->counts, 4, true},
                              {"history", p->history, 4, true}, {"roots", p->roots, 4, true}, {"pair", p->pair, 4, true},
                              {"fault", p->fault, 4, true}};
  return launch(pointers, walk_tree, Grid{p->batch, 1, 1, 32, 0}, *p, stream);
}
#endif
