// The noise of a choice, bit by bit as runtime/sampling/noise.py defines it: exponential clocks, in races if there are many.
#pragma once

#include "kernels/common.cuh"

namespace specbuild {

constexpr int kPhilox = 8;  // words of 32 bits that Philox makes at a time

// Words 8·block … 8·block + 7 of numpy.random.Philox(key=[seed, position]), the lower half of each of NumPy's first. NumPy
// counts before it computes, so its first block has counter 1. Philox4x64-10: Salmon et al., "Parallel Random Numbers: As Easy
// as 1, 2, 3" (2011).
__device__ __forceinline__ void philox(uint64_t seed, uint64_t position, uint64_t block, uint32_t words[kPhilox]) {
  uint64_t a = block + 1, b = 0, c = 0, d = 0;
#pragma unroll 5  // ten would cost a choice registers
  for (int round = 0; round < 10; ++round) {
    const uint64_t high_a = __umul64hi(0xD2E7470EE14C6C93, a), low_a = 0xD2E7470EE14C6C93 * a;
    const uint64_t high_c = __umul64hi(0xCA5A826395121157, c), low_c = 0xCA5A826395121157 * c;
    a = high_c ^ b ^ seed, b = low_c, c = high_a ^ d ^ position, d = low_a;
    seed += 0x9E3779B97F4A7C15, position += 0xBB67AE8584CAA73B;
  }
  for (int i = 0; i < kPhilox; ++i) words[i] = uint32_t((i < 2 ? a : i < 4 ? b : i < 6 ? c : d) >> i % 2 * 32);
}

// The upper half of word `index` of a SplitMix64 generator (Steele et al. 2014).
__device__ __forceinline__ uint32_t split_mix(uint64_t key, uint64_t index) {
  uint64_t z = key + (index + 1) * 0x9E3779B97F4A7C15;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
  z = (z ^ z >> 27) * 0x94D049BB133111EB;
  return uint32_t((z ^ z >> 31) >> 32);
}

// −log(1 − u), u = (⌊word / unit⌋ + ½) · unit · 2⁻³², unit a power of two. A 1 − u near 0 would be lost in float32, so from
// u = ½ on it comes from the integer.
__device__ __forceinline__ float exponential(uint32_t word, uint32_t unit) {
  const bool high = word >> 31;
  const float x = (float((high ? ~word : word) & (0u - unit)) + 0.5f * float(unit)) * 2.3283064365386963e-10f;
  return -(high ? logf(x) : log1pf(-x));
}

// Which races there are: token x is runner ⌊x / races⌋ in race x mod races, and each race has a word.
struct Races {
  uint32_t races, tokens;  // tokens: of a race
  __device__ __forceinline__ explicit Races(int vocab) {
    tokens = vocab > SPECBUILD_SMALL_VOCAB ? 32 : 1;
    races = uint32_t(ceil_div(vocab, 8 * int(tokens))) * 8;
  }

  // The key of all times after a race's first: Philox's word after the races'.
  __device__ __forceinline__ uint64_t key(uint64_t seed, uint64_t position) const {
    uint32_t words[kPhilox];
    philox(seed, position, races / kPhilox, words);
    return words[0] | uint64_t(words[1]) << 32;
  }

  // Which runner a token is, and its seven next neighbours, and their races' words; the token is a multiple of 8.
  __device__ __forceinline__ uint32_t words(uint64_t seed, uint64_t position, uint32_t token, uint32_t out[kPhilox]) const {
    const uint32_t runner = token / races;
    philox(seed, position, (token - runner * races) / kPhilox, out);
    return runner;
  }

  // g of a token, given its race's word and its place there, within 5e-6 of float64's: a unit in the last place of the
  // logarithm is 2⁻¹⁹ at most, for a noise of at most 22.9, and the times' is 2⁻²³ of themselves.
  __device__ __forceinline__ float noise(uint32_t word, uint32_t runner, uint64_t key, uint32_t token) const {
    float time = exponential(word, tokens) * (tokens > 1 ? 1.0f / 32 : 1.0f);
    if ((word & (tokens - 1)) != runner) time += exponential(split_mix(key, token), 1);
    return -logf(time);
  }
};

}  // namespace specbuild
