// AVX2, FMA and F16C: 16 lanes are two vectors.
#include <immintrin.h>

#include "processor.h"
#include "tiles.h"

namespace specbuild {
namespace {

struct Avx2 {
  static constexpr int kByteBits = 6;  // vpmaddubsw saturates with more
  static constexpr int kRows = 4;
  struct Ints { __m256i a, b; };
  struct Floats { __m256 a, b; };

  static Ints load(const uint8_t* p) {
    const auto* v = reinterpret_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(v), _mm256_loadu_si256(v + 1)};
  }
  static Ints signed_bytes(const uint8_t* p) {
    const auto* v = reinterpret_cast<const __m128i*>(p);
    const __m128i bytes = _mm_loadu_si128(v);
    return {_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(bytes, bytes))};
  }
  static Floats halves(const uint8_t* p) {
    const auto* v = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(v)), _mm256_cvtph_ps(_mm_loadu_si128(v + 1))};
  }
  static Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static void store(float* p, Floats x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
  static Ints broadcast(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
  static Floats broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static Ints both(Ints x, int32_t mask) {
    const __m256i bits = _mm256_set1_epi32(mask);
    return {_mm256_and_si256(x.a, bits), _mm256_and_si256(x.b, bits)};
  }
  template <int kBits>
  static Ints right(Ints x) {
    return {_mm256_srli_epi32(x.a, kBits), _mm256_srli_epi32(x.b, kBits)};
  }
  template <int kBits>
  static Ints left(Ints x) {
    return {_mm256_slli_epi32(x.a, kBits), _mm256_slli_epi32(x.b, kBits)};
  }
  static Ints either(Ints x, Ints y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
  static Ints minus(Ints x, Ints y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
  // Sums are added in this order: or the compiler adds products first, and keeps sums in memory.
  static Ints now(Ints sum) {
    asm("" : "+x"(sum.a), "+x"(sum.b));
    return sum;
  }
  static Ints dot_pairs(Ints sum, Ints x, Ints y) {
    return now({_mm256_add_epi32(sum.a, _mm256_madd_epi16(x.a, y.a)), _mm256_add_epi32(sum.b, _mm256_madd_epi16(x.b, y.b))});
  }
  static Ints multiply_bytes(Ints codes, Ints x) { return {_mm256_maddubs_epi16(codes.a, x.a), _mm256_maddubs_epi16(codes.b, x.b)}; }
  static Ints add_shorts(Ints x, Ints y) { return now({_mm256_add_epi16(x.a, y.a), _mm256_add_epi16(x.b, y.b)}); }
  static Floats to_float(Ints x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
  static Floats times(Floats x, Floats y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
  static Floats fma(Floats x, Floats y, Floats z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
  }

  // Each step adds halves of what is left of two vectors, side by side.
  static Floats sums_of(const Floats* x) {
    __m256 eights[16], fours[8], twos[4], ones[2];
    for (int n = 0; n < 16; ++n) eights[n] = _mm256_add_ps(x[n].a, x[n].b);
    for (int n = 0; n < 8; ++n) {
      const __m256 a = eights[n], b = eights[n + 8];
      fours[n] = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    }
    for (int n = 0; n < 4; ++n) {
      const __m256d a = _mm256_castps_pd(fours[n]), b = _mm256_castps_pd(fours[n + 4]);
      twos[n] = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)), _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));
    }
    for (int n = 0; n < 2; ++n)
      ones[n] = _mm256_add_ps(_mm256_shuffle_ps(twos[n], twos[n + 2], 0x88), _mm256_shuffle_ps(twos[n], twos[n + 2], 0xdd));
    // Of rows 0, 4, 2, 6 and 8, 12, 10, 14; and of the odd ones.
    const __m256d low = _mm256_castps_pd(_mm256_unpacklo_ps(ones[0], ones[1]));
    const __m256d high = _mm256_castps_pd(_mm256_unpackhi_ps(ones[0], ones[1]));
    const __m256 a = _mm256_castpd_ps(_mm256_unpacklo_pd(low, high)), b = _mm256_castpd_ps(_mm256_unpackhi_pd(low, high));
    return {_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31)};
  }
};

}  // namespace

extern const Instructions kAvx2 = instructions<Avx2>("avx2", has_avx2);

}  // namespace specbuild
