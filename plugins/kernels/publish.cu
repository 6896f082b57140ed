// A round's end in a loop that stays on the device: what was emitted goes to a ring in the host's memory, and the loop ends
// where nothing is left to do.
//
// length, fault, counts int32 [B] and emitted int32 [B, N] to an entry int32 [B, N + 3] of the ring; one block. Bytes: 4·B·(N + 3) in
// and, over the bus, out; one word over the bus in. cudaGraphSetConditional is the driver's own, found when the code is
// loaded, as printf is: neither a header nor a device linker is needed for it.
#include "kernels/common.cuh"

#ifdef __CUDACC_RTC__
extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned int value);
#endif

namespace specbuild {

constexpr int kPublishThreads = 256;

__device__ __forceinline__ void publish(const specbuild_ring &p) {
  const uint64_t round = *p.round;
  const int width = p.nodes + 3, all = p.batch * width;
  const bool stopped = threadIdx.x == 0 && p.stop && *p.stop;
  int32_t *const entry = p.ring + int64_t(round % uint64_t(p.rounds)) * all;
  bool emitted = false, ended = false;
  for (int i = threadIdx.x; i < all; i += kPublishThreads) {
    const int b = i / width, column = i % width;
    if (column == 0) emitted |= p.length[b] > 0, ended |= p.ends && p.length[b] > 0 && p.root_position[b] >= p.ends[b];
    entry[i] = column == 0   ? p.length[b]
               : column == 1 ? (p.fault ? p.fault[b] : 0)
               : column == 2 ? p.counts[b]
                             : p.emitted[int64_t(b) * p.nodes + column - 3];
  }
  const bool over = __syncthreads_or(ended);
  const bool more = __syncthreads_or(emitted) && !over;  // behind it, every thread has read the round's number and written its part
  if (threadIdx.x) return;
  __threadfence_system();
  *p.published = *p.round = round + 1;
  if (p.handle && (stopped || !more || round + 1 >= p.most)) cudaGraphSetConditional(p.handle, 0);
}

}  // namespace specbuild

extern "C" __global__ void __launch_bounds__(specbuild::kPublishThreads)
    publish(const __grid_constant__ specbuild_ring p) { specbuild::publish(p); }

#ifndef __CUDACC_RTC__
extern "C" int specbuild_publish(const specbuild_ring *p, void *stream) {
  using namespace specbuild;
  if (p->batch < 1 || p->batch > 65535) return refuse("batch %d is not in 1…65535", p->batch);
  if (p->nodes < 1 || p->nodes > SPECBUILD_MOST_NODES)
    return refuse("a tree of %d nodes: 1 to %d", p->nodes, SPECBUILD_MOST_NODES);
  if (p->rounds < 1) return refuse("a ring of %d rounds: at least 1", p->rounds);
  const Pointer pointers[] = {{"ring", p->ring, 4}, {"round", p->round, 8}, {"published", (const void *)p->published, 8},
                              {"length", p->length, 4}, {"emitted", p->emitted, 4}, {"counts", p->counts, 4}, {"fault", p->fault, 4, true},
                              {"root_position", p->root_position, 4}, {"ends", p->ends, 4, true},
                              {"stop", (const void *)p->stop, 4, true}};
  return launch(pointers, ::publish, Grid{1, 1, 1, kPublishThreads, 0}, *p, stream);
}
#endif
