// AVX2 and FMA: 16 lanes are two vectors.
#include <immintrin.h>

#include "tiles.h"

namespace specbuild {
namespace {

struct Avx2 {
  static constexpr bool kBytes = false;  // vpmaddubsw saturates
  static constexpr int kRows = 4;
  struct Ints { __m256i a, b; };
  struct Floats { __m256 a, b; };

  static Ints load(const uint8_t* p) {
    const auto* v = reinterpret_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(v), _mm256_loadu_si256(v + 1)};
  }
  static Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static void store(float* p, Floats x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
  static Ints broadcast(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
  static Floats broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static Ints zero(Ints) { return broadcast(0); }
  static Floats zero(Floats) { return broadcast(0.0f); }
  static Ints both(Ints x, int32_t mask) {
    const __m256i bits = _mm256_set1_epi32(mask);
    return {_mm256_and_si256(x.a, bits), _mm256_and_si256(x.b, bits)};
  }
  template <int kBits>
  static Ints right(Ints x) {
    return {_mm256_srli_epi32(x.a, kBits), _mm256_srli_epi32(x.b, kBits)};
  }
  static Ints minus(Ints x, Ints y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
  static Ints dot_pairs(Ints sum, Ints x, Ints y) {
    sum = {_mm256_add_epi32(sum.a, _mm256_madd_epi16(x.a, y.a)), _mm256_add_epi32(sum.b, _mm256_madd_epi16(x.b, y.b))};
    asm("" : "+x"(sum.a), "+x"(sum.b));  // or the compiler adds products first, and keeps sums in memory
    return sum;
  }
  static Floats to_float(Ints x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
  static Floats times(Floats x, Floats y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
  static Floats fma(Floats x, Floats y, Floats z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
  }
};

bool usable() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

}  // namespace

extern const Instructions kAvx2 = instructions<Avx2>("avx2", usable);

}  // namespace specbuild
