// AVX-512 with VNNI: four products of bytes, or two of 16 bits, are added to a lane by one instruction.
#include "avx512.h"

namespace specbuild {
namespace {

struct Vnni : Avx512 {
  static constexpr int kByteBits = 8;

  static Ints dot_bytes(Ints sum, Ints codes, Ints x) { return _mm512_dpbusd_epi32(sum, codes, x); }
  static Ints dot_pairs(Ints sum, Ints x, Ints y) { return _mm512_dpwssd_epi32(sum, x, y); }
};

bool usable() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vnni");
}

}  // namespace

extern const Instructions kVnni = instructions<Vnni>("avx512-vnni", usable);

}  // namespace specbuild
