// CPUID says what the processor has, XCR0 which registers the system saves. (Intel SDM 1, 13 and 14.) The compilers' own
// `__builtin_cpu_supports` answered no to all in what zig 0.17 linked.
#include "processor.h"

#include <cpuid.h>

#include <cstdint>

namespace specbuild {
namespace {

struct Features {
  Features() {
    unsigned a, d, leaf1_b;
    if (!__get_cpuid(1, &a, &leaf1_b, &leaf1_c, &d) || !(leaf1_c >> 27 & 1)) return;  // no XGETBV
    __get_cpuid_count(7, 0, &a, &leaf7_b, &leaf7_c, &d);
    unsigned low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    saved = low;
  }

  bool saves(uint32_t registers) const { return (saved & registers) == registers; }

  unsigned leaf1_c = 0, leaf7_b = 0, leaf7_c = 0;
  uint32_t saved = 0;
};

const Features& features() {
  static const Features found;
  return found;
}

constexpr uint32_t kVectors = 1 << 1 | 1 << 2;                     // XMM, YMM
constexpr uint32_t kWide = kVectors | 1 << 5 | 1 << 6 | 1 << 7;  // masks, ZMM

}  // namespace

bool has_avx2() {
  const auto& f = features();
  const bool fma = f.leaf1_c >> 12 & 1, f16c = f.leaf1_c >> 29 & 1, avx2 = f.leaf7_b >> 5 & 1;
  return f.saves(kVectors) && fma && f16c && avx2;
}

bool has_avx512_vnni() {
  const auto& f = features();
  const bool foundation = f.leaf7_b >> 16 & 1, bytes = f.leaf7_b >> 30 & 1, vnni = f.leaf7_c >> 11 & 1;
  return f.saves(kWide) && foundation && bytes && vnni;
}

}  // namespace specbuild
