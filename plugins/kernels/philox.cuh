// The noise of a choice: the halves of words of NumPy's Philox generator, and Gumbel's distribution of each.
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
#pragma unroll
  for (int i = 0; i < kPhilox; ++i) words[i] = uint32_t((i < 2 ? a : i < 4 ? b : i < 6 ? c : d) >> i % 2 * 32);
}

// −log(−log(1 − u)), u = (word + ½) · 2⁻³². A 1 − u near 0 would be lost in float32, so from u = ½ on it comes from the integer.
// The result is within 5e-6 of float64's: a unit in the last place of the outer logarithm is 2⁻¹⁹ at most, for a noise of at
// most 22.9, and the inner one's is 2⁻²³ of itself.
__device__ __forceinline__ float gumbel(uint32_t word) {
  const bool low = word >> 31;
  const float x = (float(low ? ~word : word) + 0.5f) * 2.3283064365386963e-10f;
  return -logf(-(low ? logf(x) : log1pf(-x)));
}

}  // namespace specbuild
