// The noise of a choice: the words of NumPy's Philox generator, and Gumbel's distribution of each.
#pragma once

#include "kernels/common.cuh"

namespace specbuild {

// Words 4·block … 4·block + 3 of numpy.random.Philox(key=[seed, position]). NumPy counts before it computes, so its first
// block has counter 1. Philox4x64-10: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011).
__device__ __forceinline__ void philox(uint64_t seed, uint64_t position, uint64_t block, uint64_t words[4]) {
  uint64_t a = block + 1, b = 0, c = 0, d = 0;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t high_a = __umul64hi(0xD2E7470EE14C6C93, a), low_a = 0xD2E7470EE14C6C93 * a;
    const uint64_t high_c = __umul64hi(0xCA5A826395121157, c), low_c = 0xCA5A826395121157 * c;
    a = high_c ^ b ^ seed, b = low_c, c = high_a ^ d ^ position, d = low_a;
    seed += 0x9E3779B97F4A7C15, position += 0xBB67AE8584CAA73B;
  }
  words[0] = a, words[1] = b, words[2] = c, words[3] = d;
}

// −log(−log u), u = (word >> 12 + ½) · 2⁻⁵². A u above ½ would lose its distance to 1 in float32, which the noise's upper
// tail is made of, so the inner logarithm takes 1 − u from the integer. The result is within 5e-6 of float64's: a unit in
// the last place of the outer logarithm is 2⁻¹⁸ at most, for a noise of at most 36.8, and the inner one's is 2⁻²³ of itself.
__device__ __forceinline__ float gumbel(uint64_t word) {
  const uint64_t odd = word >> 12 << 1 | 1;  // u · 2⁵³
  const bool high = odd >> 52;
  const float x = float(high ? (uint64_t(1) << 53) - odd : odd) * 1.1102230246251565e-16f;
  return -logf(high ? -log1pf(-x) : -logf(x));
}

}  // namespace specbuild
