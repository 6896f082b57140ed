// Choosing: the K best tokens of f(logits) + g of every row, with runtime/sampling/sampler.py's processors f and noise g.
//
// choose_best_*: logits [B, N, V] in float32, float16 or bfloat16 to choices int32 [B, N, K] and scores float32 [B, N, K].
// A block takes 4096 tokens of a row; the last one of a row to end merges the row's candidates. Work: per token the
// processors, and under noise two or three logarithms where the cut-offs leave it; a Philox block (20 products of 64 bits)
// for eight tokens of which they leave one, and one more in all. Bytes: the logits once, with penalties 4·V of history a
// row, 8·K per slice out and back; with a mask V / 8 more a row, and no logits of 256 neighbours (a warp's) that are all
// illegal.
//
// choose_cuts_*: the same rows to the least key that top-k, top-p and min-p leave in, a block a row, for requests that have
// any. Work and bytes: the row once, and for top-k and top-p once more, from the L2 cache; 4 times more for each that falls
// below the 2048 best tokens or so; the mask as often.
#include "kernels/cut_offs.cuh"
#include "kernels/noise.cuh"
#include "kernels/processors.cuh"

namespace specbuild {

constexpr int kChooseThreads = 256, kSlice = 4096;
constexpr uint64_t kNotANumber = ~uint64_t(0);  // above every candidate

// A candidate is its score's key and its token, the lowest token above its equals; 0 is none.
__device__ __forceinline__ uint64_t candidate(uint32_t key, int token) { return uint64_t(key) << 32 | uint32_t(~token); }

// In the workspace: candidates [B·N, slices, K], then the cut kernel's least keys [B·N].
__host__ __device__ __forceinline__ int slices_of(const specbuild_choose &p) { return ceil_div(p.vocab, kSlice); }
__device__ __forceinline__ uint64_t *candidates_of(const specbuild_choose &p, int64_t row) {
  return static_cast<uint64_t *>(p.workspace) + row * slices_of(p) * p.best;
}
__device__ __forceinline__ uint32_t *least_keys(const specbuild_choose &p) {
  return reinterpret_cast<uint32_t *>(candidates_of(p, int64_t(p.batch) * p.nodes));
}

// The best of all threads' candidates, one after another: next(k, the k-th best, whether it was this thread's) gives the
// thread's next one. 0 is none, and comes last.
template <class Next> __device__ __forceinline__ void rank(int best, uint64_t mine, uint64_t *shared, Next next) {
  for (int k = 0; k < best; ++k) {
    const uint64_t top = block_reduce<Largest>(mine, shared);
    const uint64_t after = next(k, top, top != 0 && top == mine);
    if (top == mine) mine = after;
  }
}

// Turns a row's slices into its choices; one block, after all slices' candidates are in memory.
__device__ __forceinline__ void merge(const specbuild_choose &p, int64_t row, uint64_t *shared) {
  const bool real = int(threadIdx.x) < slices_of(p);
  const uint64_t *const list = candidates_of(p, row) + int64_t(real ? threadIdx.x : 0) * p.best;
  int at = 0;
  bool sound = true;
  rank(p.best, real ? list[0] : 0, shared, [&](int k, uint64_t top, bool mine) {
    const uint32_t key = uint32_t(top >> 32);
    if (k == 0) sound = key > kLeastKey && key < kMostKey;
    if (threadIdx.x == 0) {
      p.choices[row * p.best + k] = sound && top ? int32_t(~uint32_t(top)) : -1;
      if (p.scores) p.scores[row * p.best + k] = sound && top ? score_of(key) : score_of(kLeastKey);
    }
    return mine && ++at < p.best ? list[at] : 0;
  });
}

template <class T> __device__ __forceinline__ void choose(const specbuild_choose &p) {
  __shared__ Node node;
  __shared__ uint32_t keys[kSlice], marks[kSlice / 32];
  __shared__ uint64_t tops[kChooseThreads / 32];
  __shared__ bool last;
  __shared__ uint64_t key;  // of the noise
  const int b = blockIdx.z, slices = slices_of(p), first = int(blockIdx.x) * kSlice;
  const int64_t row = int64_t(b) * p.nodes + blockIdx.y;
  const bool there = !p.counts || int(blockIdx.y) < p.counts[b];
  if (there) find_node(p, b, blockIdx.y, node);
  if (!there || node.fault) {
    for (int k = threadIdx.x; k < p.best && blockIdx.x == 0; k += kChooseThreads) {
      p.choices[row * p.best + k] = -1;
      if (p.scores) p.scores[row * p.best + k] = score_of(kLeastKey);
    }
    return;
  }
  const Processors processors(p, b, node);
  const bool plain = processors.plain(), noisy = processors.noisy();
  const uint32_t least = p.cut_offs && cuts_off(processors.request) ? least_keys(p)[row] : 0;
  const uint64_t position = uint64_t(int64_t(p.root_position[b]) + node.depth);
  const Races races(p.vocab);
  if (!plain) processors.mark(marks, first, kSlice);
  if (noisy && races.tokens > 1) {
    if (threadIdx.x == 0) key = races.key(processors.request.seed, position);
    __syncthreads();
  }

  const T *const logits = static_cast<const T *>(p.logits) + row * p.stride + first;
  const uint32_t *const mask = mask_of(p, row);
  uint64_t mine = 0;
  bool bad = false;
#pragma unroll 1
  for (int at = threadIdx.x * kPhilox; at < kSlice; at += kChooseThreads * kPhilox) {
    const uint32_t legal = mask && first + at < p.vocab ? mask[(first + at) / 32] >> at % 32 & 255 : 255;
    if (legal == 0) {
      for (int i = 0; i < kPhilox; ++i) keys[at + i] = 0;
      continue;
    }
#pragma unroll
    for (int i = 0; i < kPhilox; ++i)
      keys[at + i] = first + at + i < p.vocab && legal >> i & 1 ? key_of(to_float(logits[at + i])) : kLeastKey;
    const uint32_t marked = plain ? 0 : marks[at / 32] >> at % 32;
    uint32_t left = 0, runner = 0, words[kPhilox];
#pragma unroll 1  // more would spill registers
    for (int i = 0; i < kPhilox; ++i) {
      float x = score_of(keys[at + i]);
      // −∞ stays −∞ under all processors and noise: the illegal, and what is past the vocabulary
      if (x > score_of(kLeastKey)) x = processors(x, first + at + i, marked >> i & 1);
      bad |= x != x;
      left |= keys[at + i] = key_of(x) >= larger(least, kLeastKey + 1) ? key_of(x) : 0;
    }
    if (noisy && left) runner = races.words(processors.request.seed, position, uint32_t(first + at), words);
#pragma unroll
    for (int i = 0; i < kPhilox; ++i) {
      uint32_t found = keys[at + i];
      if (noisy && found)
        keys[at + i] = found = key_of(__fadd_rn(score_of(found), races.noise(words[i], runner, key, first + at + i)));
      if (found) mine = larger(mine, candidate(found, first + at + i));
    }
  }
  if (bad) mine = kNotANumber;
  uint64_t *const found = candidates_of(p, row) + int64_t(blockIdx.x) * p.best;
  rank(p.best, mine, tops, [&](int k, uint64_t top, bool owner) {
    if (threadIdx.x == 0) found[k] = top;
    uint64_t after = 0;
    if (owner && top != kNotANumber) {
      keys[int32_t(~uint32_t(top)) - first] = 0;
      for (int at = threadIdx.x * kPhilox; at < kSlice; at += kChooseThreads * kPhilox)
#pragma unroll
        for (int i = 0; i < kPhilox; ++i)
          if (keys[at + i]) after = larger(after, candidate(keys[at + i], first + at + i));
    }
    return after;
  });

  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(&p.tickets[row], 1u) == uint32_t(slices - 1);
    if (last) p.tickets[row] = 0;
    __threadfence();
  }
  __syncthreads();
  if (last) merge(p, row, tops);
}

template <class T> __device__ __forceinline__ void cut(const specbuild_choose &p) {
#ifdef SPECBUILD_HOST
  uint32_t *const marks = reinterpret_cast<uint32_t *>(host::dynamic());
#else
  extern __shared__ uint32_t marks[];
#endif
  __shared__ Node node;
  __shared__ Histogram bins;
  __shared__ Kept kept;
  __shared__ uint64_t tops[kCutThreads / 32];
  const int b = blockIdx.y;
  if (!cuts_off(p.requests[b]) || (p.counts && int(blockIdx.x) >= p.counts[b])) return;
  find_node(p, b, blockIdx.x, node);
  if (node.fault) return;
  const Processors processors(p, b, node);
  const specbuild_request &request = processors.request;
  const bool plain = processors.plain();
  if (!plain) processors.mark(marks, 0, p.vocab);

  const int64_t row = int64_t(b) * p.nodes + blockIdx.x;
  const T *const logits = static_cast<const T *>(p.logits) + row * p.stride;
  const uint32_t *const mask = mask_of(p, row);
  const auto key_at = [&](int token) {
    if (mask && !(mask[token / 32] >> token % 32 & 1)) return kLeastKey;
    const float x = processors(to_float(logits[token]), token, !plain && (marks[token / 32] >> token % 32 & 1));
    return x == x ? key_of(x) : 0u;
  };
  uint32_t least = 0, best = 0;
  each_key(p.vocab, key_at, [&](uint32_t key) { best = larger(best, key); });
  const float top = score_of(uint32_t(block_reduce<Largest>(uint64_t(best), tops)));
  const bool cuts_k = request.top_k > 0 && request.top_k < p.vocab, cuts_p = request.top_p < 1.0;
  if (cuts_k || cuts_p) {
    // A token's mass in units of 2⁻⁴⁰ of the best one's: sums are exact, so their order does not matter.
    const auto mass = [&](uint32_t key) {
      return key >= least && key > kLeastKey ? uint64_t(expf(__fsub_rn(score_of(key), top)) * 1099511627776.0f) : 0;
    };
    const auto kept_at = [&](int i) { return kept.keys[i]; };
    uint64_t mine = 0;
    const uint32_t bar = bound(best, cuts_k ? request.top_k : kCutThreads * 3 / 4, kept);
    each_key(p.vocab, key_at, [&](uint32_t key) {
      if (cuts_p && !cuts_k) mine += mass(key);
      if (key < bar) return;
      const uint32_t at = atomicAdd(&kept.count, 1u);
      if (at < kKept) kept.keys[at] = key;
    });
    const uint64_t row_mass = block_reduce<Sum>(mine, tops);
    const int count = int(kept.count);
    const bool few = count > 0 && count <= kKept;
    if (cuts_k) {
      const auto limit = [&](uint64_t) { return uint64_t(request.top_k); };
      const auto one = [](uint32_t) { return 1; };
      if (!few) least = least_key(p.vocab, top, bins, key_at, one, limit);
      else if (count >= request.top_k) least = least_key(count, top, bins, kept_at, one, limit);
    }
    if (cuts_p) {
      mine = 0;
      if (few) each_key(count, kept_at, [&](uint32_t key) { mine += mass(key); });
      const uint64_t kept_mass = block_reduce<Sum>(mine, tops), whole = cuts_k ? kept_mass : row_mass;
      const auto limit_of = [&](uint64_t all) { return larger(uint64_t(ceil(request.top_p * double(all))), uint64_t(1)); };
      const auto limit = [&](uint64_t) { return limit_of(whole); };
      if (few && kept_mass >= limit_of(whole)) least = larger(least, least_key(count, top, bins, kept_at, mass, limit));
      else least = larger(least, least_key(p.vocab, top, bins, key_at, mass, limit_of));
    }
  }
  if (score_of(kLeastKey) < request.min_p_log) least = larger(least, key_of(float(double(top) + request.min_p_log)));
  if (threadIdx.x == 0) least_keys(p)[row] = least;
}

__device__ __forceinline__ void make_noise(const specbuild_noise &p) {
  const Races races(p.vocab);
  const int64_t first = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, all = int64_t(p.rows) * p.vocab;
  for (int64_t i = first; i < all; i += int64_t(gridDim.x) * blockDim.x) {
    const uint64_t seed = p.seeds[i / p.vocab], position = p.positions[i / p.vocab];
    const uint32_t token = uint32_t(i % p.vocab);
    uint32_t words[kPhilox];
    const uint32_t runner = races.words(seed, position, token / kPhilox * kPhilox, words);
    p.noise[i] = races.noise(words[token % kPhilox], runner, races.key(seed, position), token);
  }
}

}  // namespace specbuild

#define EACH_LOGITS(X) X(F32, float) X(F16, specbuild::F16) X(BF16, specbuild::BF16)
#define DEFINE(NAME, T)                                                                                        \
  extern "C" __global__ void __launch_bounds__(specbuild::kChooseThreads, 4)                                   \
      choose_best_##NAME(const __grid_constant__ specbuild_choose p) { specbuild::choose<T>(p); }              \
  extern "C" __global__ void __launch_bounds__(specbuild::kCutThreads, 1)                                      \
      choose_cuts_##NAME(const __grid_constant__ specbuild_choose p) { specbuild::cut<T>(p); }
EACH_LOGITS(DEFINE)
extern "C" __global__ void __launch_bounds__(256) choose_noise(const __grid_constant__ specbuild_noise p) {
  specbuild::make_noise(p);
}

#ifndef __CUDACC_RTC__
extern "C" {

size_t specbuild_choose_workspace(const specbuild_choose *p) {
  const size_t rows = size_t(p->batch) * p->nodes;
  return rows * specbuild::slices_of(*p) * p->best * sizeof(uint64_t) + rows * sizeof(uint32_t);
}

int specbuild_choose_tokens(const specbuild_choose *p, void *stream) {
  using namespace specbuild;
  struct { void (*choose)(specbuild_choose); void (*cut)(specbuild_choose); } found = {nullptr, nullptr};
#define PICK(NAME, T) if (p->dtype == SPECBUILD_##NAME) found = {choose_best_##NAME, choose_cuts_##NAME};
  EACH_LOGITS(PICK)
#undef PICK
  if (!found.choose) return refuse("logits of %s: choosing takes float32, float16 and bfloat16", name_of(p->dtype));
  if (p->batch < 1 || p->batch > 65535) return refuse("batch %d is not in 1…65535", p->batch);
  if (p->nodes < 1 || p->nodes > 65535) return refuse("%d rows a sequence are not in 1…65535", p->nodes);
  if (p->vocab < 1 || p->vocab > SPECBUILD_MOST_VOCAB)
    return refuse("a vocabulary of %d: 1 to %d", p->vocab, SPECBUILD_MOST_VOCAB);
  if (p->best < 1 || p->best > SPECBUILD_MOST_BEST) return refuse("the %d best tokens: 1 to %d", p->best, SPECBUILD_MOST_BEST);
  if (p->stride < p->vocab) return refuse("rows of %d logits lie %lld apart", p->vocab, (long long)p->stride);
  if (p->tree_nodes < 1 || p->tree_nodes > SPECBUILD_MOST_POOL)
    return refuse("a tree of %d nodes: 1 to %d", p->tree_nodes, SPECBUILD_MOST_POOL);
  if (!p->row_nodes && p->nodes > p->tree_nodes)
    return refuse("%d rows of a tree of %d nodes need row_nodes", p->nodes, p->tree_nodes);
  if ((p->bias_tokens != nullptr) != (p->bias_values != nullptr)) 
    return refuse("a bias has tokens at %p and values at %p: it needs both", (const void *)p->bias_tokens, (const void *)p->bias_values);
  const Pointer pointers[] = {
      {"logits", p->logits, 2}, {"requests", p->requests, 8}, {"tokens", p->tokens, 4}, {"root_position", p->root_position, 4},
      {"choices", p->choices, 4}, {"workspace", p->workspace, 8}, {"tickets", p->tickets, 4}, {"history", p->history, 4, true},
      {"masks", p->masks, 4, true}, {"bias_tokens", p->bias_tokens, 4, true}, {"bias_values", p->bias_values, 4, true},
      {"parents", p->parents, 4, true}, {"row_nodes", p->row_nodes, 4, true}, {"counts", p->counts, 4, true},
      {"scores", p->scores, 4, true}, {"fault", p->fault, 4, true}};
  if (const int status = check_pointers(pointers)) return status;
  if (p->cut_offs) {
    const Grid grid = {p->nodes, p->batch, 1, kCutThreads, size_t(ceil_div(p->vocab, 32)) * 4};
    if (const int status = launch(found.cut, grid, *p, stream)) return status;
  }
  return launch(found.choose, Grid{slices_of(*p), p->nodes, p->batch, kChooseThreads, 0}, *p, stream);
}

int specbuild_make_noise(const specbuild_noise *p, void *stream) {
  using namespace specbuild;
  if (p->rows < 1 || p->vocab < 1) return refuse("noise of %d rows of %d tokens: at least 1", p->rows, p->vocab);
  const Pointer pointers[] = {{"seeds", p->seeds, 8}, {"positions", p->positions, 8}, {"noise", p->noise, 4}};
  const int64_t blocks = (int64_t(p->rows) * p->vocab + 255) / 256;
  return launch(pointers, choose_noise, Grid{int(smaller<int64_t>(blocks, 1 << 16)), 1, 1, 256, 0}, *p, stream);
}

}  // extern "C"
#endif
