// The threshold of a cut-off: how far down a row's scores count or mass allow, exactly and in any order of threads.
#pragma once

#include "kernels/processors.cuh"

namespace specbuild {

constexpr int kCutThreads = 1024, kBins = 2048, kKept = 2048;

// The weights of a row's tokens by their keys' 11 bits, in two words each so that adding is exact in any order.
struct Histogram {
  uint32_t low[kBins], high[kBins];
  uint64_t parts[32];

  __device__ void add(int bin, uint64_t weight) {
    const uint32_t part = uint32_t(weight), before = atomicAdd(&low[bin], part);
    const uint32_t carried = uint32_t(weight >> 32) + (before + part < before);
    if (carried) atomicAdd(&high[bin], carried);
  }
  __device__ uint64_t at(int bin) const { return uint64_t(high[bin]) << 32 | low[bin]; }
};

// Keys that few tokens reach, among which almost every cut-off falls: a few passes over them, not over the row.
struct Kept {
  uint32_t keys[kKept], count, bound;
};

// The rank-th largest of all threads' keys, which so many tokens reach at least; no less than that of a legal token.
__device__ __forceinline__ uint32_t bound(uint32_t mine, int rank, Kept &kept) {
  if (threadIdx.x == 0) kept.count = kept.bound = 0;
  kept.keys[threadIdx.x] = mine;
  __syncthreads();
  int above = 0, level = 0;
  for (int i = 0; i < kCutThreads; ++i) above += kept.keys[i] > mine, level += kept.keys[i] >= mine;
  if (above < rank && rank <= level) kept.bound = mine;
  __syncthreads();
  return larger(kept.bound, kLeastKey + 1);
}

// Visits every token's key, four reads under way at a time.
template <class Key, class Visit> __device__ __forceinline__ void each_key(int vocab, Key key_at, Visit visit) {
  for (int first = threadIdx.x; first < vocab; first += 4 * kCutThreads) {
    uint32_t keys[4];
    for (int i = 0; i < 4; ++i) keys[i] = key_at(smaller(first + i * kCutThreads, vocab - 1));
    for (int i = 0; i < 4; ++i)
      if (first + i * kCutThreads < vocab) visit(keys[i]);
  }
}

// The least key for which the tokens of larger keys weigh less than limit_of(weight of all). First by the distance to the
// best score in steps of 1/64, which spreads a row over the bins, so that few threads add to the same; then, within one
// such step, 11 bits of the key a pass. What is 32 and more below the best has no mass to add, and comes last in any count.
template <class Key, class Weight, class Limit>
__device__ __forceinline__ uint32_t least_key(int vocab, float top, Histogram &bins, Key key_at, Weight weight_of, Limit limit_of) {
  const auto step_of = [=](uint32_t key) {
    return kBins - 1 - int(fminf(__fmul_rn(__fsub_rn(top, score_of(key)), 64.0f), float(kBins - 1)));
  };
  int step = 0;
  uint32_t prefix = 0;
  uint64_t above = 0, limit = 0;
  for (int shift = 33; shift >= 0; shift -= 11) {
    const bool coarse = shift == 33;
    __syncthreads();
    for (int i = threadIdx.x; i < kBins; i += kCutThreads) bins.low[i] = bins.high[i] = 0;
    __syncthreads();
    each_key(vocab, key_at, [&](uint32_t key) {
      const int of_key = step_of(key), bin = coarse ? of_key : int(key >> shift & (kBins - 1));
      if (coarse ? bin > 0 : of_key == step && key >> shift >> 11 == prefix) bins.add(bin, weight_of(key));
    });
    __syncthreads();
    if (threadIdx.x < 32) {
      uint64_t sum = 0;
      for (int i = 0; i < 64; ++i) sum += bins.at(threadIdx.x * 64 + (threadIdx.x + i) % 64);
      bins.parts[threadIdx.x] = sum;
    }
    __syncthreads();
    if (coarse) {
      uint64_t whole = 0;
      for (int i = 0; i < 32; ++i) whole += bins.parts[i];
      limit = limit_of(whole);
    }
    int part = 31;
    while (part > 0 && above + bins.parts[part] < limit) above += bins.parts[part--];
    int bin = part * 64 + 63;
    while (bin > part * 64 && above + bins.at(bin) < limit) above += bins.at(bin--);
    if (coarse) step = bin;
    else prefix = prefix << 11 | uint32_t(bin);
  }
  return prefix;
}

}  // namespace specbuild
