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
};

}  // namespace

extern const Instructions kVnni = instructions<Vnni>("avx512-vnni", has_avx512_vnni);

}  // namespace specbuild
