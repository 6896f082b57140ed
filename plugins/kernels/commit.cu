// Commits accepted rows: in every layer of both caches the path's rows move up to the root's (runtime/backends/cpu/kv_cache.py).
//
// path int32 [B, N], length int32 [B]; caches [2·layers] × [B, Hkv, S, row_bytes], or pages. A thread owns a column of 16
// bytes (8 where rows are no multiple of 16) of one head and moves it for all rows: since rows move towards the root's,
// and keep their order, eight loads may go before their eight stores. Bytes: each moved row in and out, 2·layers·Hkv·row_bytes.
#include "kernels/common.cuh"

namespace specbuild {

constexpr int kCommitThreads = 128, kRowsAtOnce = 8;

constexpr int kNoPage = -2;  // in place of a row that lies, or would move, where the cache has no page

// What a block knows of its sequence in one cache: which rows are kept; they move where they are not in place already.
struct Moves {
  int32_t rows[SPECBUILD_MOST_NODES], nodes[SPECBUILD_MOST_NODES];
  int32_t kept, fault;
};

__device__ __forceinline__ void find_moves(const specbuild_commit &p, const specbuild_cache &cache, int b, Moves &moves) {
  const int length = p.length[b], base = cache.base[b];
  const int64_t first = int64_t(b) * p.nodes;
  const bool fits = length >= 0 && length <= p.nodes;
  const auto lies = [&](int row) {  // a row past the capacity has no entry to ask
    return !cache.page_rows || base < 0 || row >= cache.capacity - base || has_page(cache, b, (base + row) / cache.page_rows);
  };
  for (int j = threadIdx.x; fits && j < length; j += blockDim.x) {
    const int node = p.path[first + j];
    const int row = node < 0 || node >= p.nodes ? -1 : larger(cache.node_rows ? cache.node_rows[first + node] : node, -1);
    moves.nodes[j] = node;
    moves.rows[j] = row < 0 || (lies(row) && lies(j)) ? row : kNoPage;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    int kept = 0, fault = fits ? SPECBUILD_FAULT_NONE : SPECBUILD_FAULT_NODE;
    while (!fault && kept < length && (moves.rows[kept] != -1 || moves.nodes[kept] < 0 || moves.nodes[kept] >= p.nodes)) {
      const int row = moves.rows[kept];
      if (row == kNoPage) fault = SPECBUILD_FAULT_PAGE;
      else if (row < kept || (kept > 0 && row <= moves.rows[kept - 1])) fault = SPECBUILD_FAULT_NODE;
      else if (base < 0 || row >= cache.capacity - base) fault = SPECBUILD_FAULT_CAPACITY;
      ++kept;
    }
    moves.kept = kept, moves.fault = fault;
    if (fault && p.fault) p.fault[b] = fault;
  }
  __syncthreads();
}

template <class Unit>
__device__ __forceinline__ void move_rows(const specbuild_cache &cache, unsigned char *layer, int b, const Moves &moves) {
  const int columns = cache.row_bytes / int(sizeof(Unit)), base = cache.base[b];
  const int column = int(blockIdx.x) * kCommitThreads + threadIdx.x, head = column / columns;
  if (head >= cache.heads) return;
  const auto at = [&](int row) {
    const int64_t at = cache_row(cache.page_table, cache.page_rows, cache.capacity, cache.heads, b, head, base + row);
    return reinterpret_cast<Unit *>(layer + at * cache.row_bytes + column % columns * int64_t(sizeof(Unit)));
  };
  int first = 0;
  while (first < moves.kept && moves.rows[first] == first) ++first;
  for (; first < moves.kept; first += kRowsAtOnce) {
    Unit held[kRowsAtOnce];
    for (int i = 0; i < kRowsAtOnce; ++i)
      if (first + i < moves.kept) held[i] = *at(moves.rows[first + i]);
    for (int i = 0; i < kRowsAtOnce; ++i)
      if (first + i < moves.kept) *at(first + i) = held[i];
  }
}

__device__ __forceinline__ void commit(const specbuild_commit &p) {
  __shared__ Moves moves;
  __shared__ bool last;
  const int b = blockIdx.z, which = int(blockIdx.y) >= p.caches[0].count;
  const specbuild_cache &cache = p.caches[which];
  find_moves(p, cache, b, moves);
  if (!moves.fault) {
    unsigned char *const layer = static_cast<unsigned char *>(cache.layers[blockIdx.y - (which ? p.caches[0].count : 0)]);
    if (cache.row_bytes % 16 == 0) move_rows<Eight<BF16>>(cache, layer, b, moves);
    else move_rows<uint64_t>(cache, layer, b, moves);
  }
  __syncthreads();
  if (threadIdx.x == 0) {  // a base may be the length itself, so that changes once every block has read it
    if (blockIdx.x == 0 && (blockIdx.y == 0 || int(blockIdx.y) == p.caches[0].count))
      p.kept[which * p.batch + b] = moves.fault ? 0 : moves.kept;
    __threadfence();
    last = atomicAdd(p.ticket, 1u) == gridDim.x * gridDim.y * gridDim.z - 1;
    if (last) *p.ticket = 0;
    __threadfence();
  }
  __syncthreads();
  for (int i = threadIdx.x; last && i < p.batch; i += kCommitThreads) {  // both first read: they may share their arrays
    int lengths[2] = {-1, -1};
    for (int c = 0; c < 2; ++c)
      if (p.caches[c].count && p.kept[c * p.batch + i] > 0) lengths[c] = p.caches[c].base[i] + p.kept[c * p.batch + i];
    for (int c = 0; c < 2; ++c)
      if (lengths[c] >= 0) p.caches[c].cache_len[i] = lengths[c];
  }
}

}  // namespace specbuild

extern "C" __global__ void __launch_bounds__(specbuild::kCommitThreads)
    commit_path(const __grid_constant__ specbuild_commit p) { specbuild::commit(p); }

#ifndef __CUDACC_RTC__
extern "C" int specbuild_commit_path(const specbuild_commit *p, void *stream) {
  using namespace specbuild;
  if (p->batch < 1 || p->batch > 65535) return refuse("batch %d is not in 1…65535", p->batch);
  if (p->nodes < 1 || p->nodes > SPECBUILD_MOST_NODES)
    return refuse("a tree of %d nodes: 1 to %d", p->nodes, SPECBUILD_MOST_NODES);
  const Pointer pointers[] = {{"path", p->path, 4}, {"length", p->length, 4}, {"kept", p->kept, 4}, {"ticket", p->ticket, 4},
                              {"fault", p->fault, 4, true}};
  if (const int status = check_pointers(pointers)) return status;
  int layers = 0, blocks = 1;
  for (int i = 0; i < 2; ++i) {
    const specbuild_cache &cache = p->caches[i];
    if (cache.count < 0) return refuse("cache %d has %d layers of keys and values", i, cache.count);
    if (cache.count == 0) continue;
    if (cache.heads < 1) return refuse("cache %d has %d heads", i, cache.heads);
    if (cache.row_bytes < 8 || cache.row_bytes % 8)
      return refuse("cache %d has rows of %d bytes: use a multiple of 8", i, cache.row_bytes);
    if (cache.capacity < 1) return refuse("cache %d has a capacity of %d rows", i, cache.capacity);
    if ((cache.page_rows != 0) != (cache.page_table != nullptr))
      return refuse("cache %d has %d rows a page, and %s page table", i, cache.page_rows, cache.page_table ? "a" : "no");
    const int page_rows = cache.page_rows;
    if (page_rows < 0 || (page_rows & (page_rows - 1)) || (page_rows && cache.capacity % page_rows))
      return refuse("cache %d has %d rows a page of a capacity of %d: use a power of two that divides it", i, page_rows,
                    cache.capacity);
    if (page_rows ? cache.pages < 1 : cache.pages != 0)
      return refuse("cache %d has %d pages of %d rows: at least 1, and none where linear", i, cache.pages, page_rows);
    const Pointer arrays[] = {{"layers", cache.layers, 8}, {"base", cache.base, 4}, {"cache_len", cache.cache_len, 4},
                              {"page_table", cache.page_table, 4, true}, {"node_rows", cache.node_rows, 4, true}};
    if (const int status = check_pointers(arrays)) return status;
    layers += cache.count;
    blocks = larger(blocks, ceil_div(cache.heads * (cache.row_bytes / (cache.row_bytes % 16 ? 8 : 16)), kCommitThreads));
  }
  if (layers < 1 || layers > 65535) return refuse("%d layers of keys and values in both caches: 1 to 65535", layers);
  return launch(commit_path, Grid{blocks, layers, p->batch, kCommitThreads, 0}, *p, stream);
}
#endif
