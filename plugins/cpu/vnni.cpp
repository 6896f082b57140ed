// AVX-512 with VNNI: 16 lanes are one vector; one instruction adds four products of bytes, or two of 16 bits, to a lane.
#include <immintrin.h>

#include "processor.h"
#include "tiles.h"

namespace specbuild {
namespace {

struct Vnni {
  static constexpr int kByteBits = 8;
  static constexpr int kRows = 8;
  using Ints = __m512i;
  using Floats = __m512;

  static Ints load(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static Ints signed_bytes(const uint8_t* p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static Floats halves(const uint8_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static Floats load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
  static Ints broadcast(int32_t x) { return _mm512_set1_epi32(x); }
  static Floats broadcast(float x) { return _mm512_set1_ps(x); }
  static Ints both(Ints x, int32_t mask) { return _mm512_and_si512(x, _mm512_set1_epi32(mask)); }
  template <int kBits>
  static Ints right(Ints x) {
    return _mm512_srli_epi32(x, kBits);
  }
  template <int kBits>
  static Ints left(Ints x) {
    return _mm512_slli_epi32(x, kBits);
  }
  static Ints either(Ints x, Ints y) { return _mm512_or_si512(x, y); }
  static Ints minus(Ints x, Ints y) { return _mm512_sub_epi32(x, y); }
  static Ints dot_bytes(Ints sum, Ints codes, Ints x) { return _mm512_dpbusd_epi32(sum, codes, x); }
  static Ints dot_pairs(Ints sum, Ints x, Ints y) { return _mm512_dpwssd_epi32(sum, x, y); }
  static Floats to_float(Ints x) { return _mm512_cvtepi32_ps(x); }
  static Floats times(Floats x, Floats y) { return _mm512_mul_ps(x, y); }
  static Floats fma(Floats x, Floats y, Floats z) { return _mm512_fmadd_ps(x, y, z); }

  // Each step adds halves of what is left of two vectors, side by side.
  static Floats sums_of(const Floats* x) {
    Floats eights[8], fours[4], twos[2];
    for (int n = 0; n < 8; ++n)
      eights[n] = _mm512_add_ps(_mm512_shuffle_f32x4(x[n], x[n + 8], 0x44), _mm512_shuffle_f32x4(x[n], x[n + 8], 0xee));
    for (int n = 0; n < 4; ++n) {
      const Floats a = eights[n], b = eights[n + 4];
      fours[n] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    }
    for (int n = 0; n < 2; ++n) {
      const __m512d a = _mm512_castps_pd(fours[n]), b = _mm512_castps_pd(fours[n + 2]);
      twos[n] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    const Floats sums = _mm512_add_ps(_mm512_shuffle_ps(twos[0], twos[1], 0x88), _mm512_shuffle_ps(twos[0], twos[1], 0xdd));
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15), sums);
  }
};

}  // namespace

extern const Instructions kVnni = instructions<Vnni>("avx512-vnni", has_avx512_vnni);

}  // namespace specbuild
