// ARM's NEON: 16 lanes are four vectors.
#include <arm_neon.h>
#include <sys/auxv.h>

#include "tiles.h"

namespace specbuild {
namespace {

struct Neon {
  static constexpr int kByteBits = 8;
  static constexpr int kRows = 4;
  struct Ints { int32x4_t v[4]; };
  struct Floats { float32x4_t v[4]; };

  template <class Lanes, class Function>
  static Lanes each(Function function) {
    return {{function(0), function(1), function(2), function(3)}};
  }

  static Ints load(const uint8_t* p) {
    return each<Ints>([&](int i) { return vreinterpretq_s32_u8(vld1q_u8(p + 16 * i)); });
  }
  static Ints signed_bytes(const uint8_t* p) {
    const int8x16_t bytes = vreinterpretq_s8_u8(vld1q_u8(p));
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
    return {{vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)), vmovl_s16(vget_low_s16(high)),
             vmovl_s16(vget_high_s16(high))}};
  }
  static Floats halves(const uint8_t* p) {
    return each<Floats>([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p + 8 * i))); });
  }
  static Floats load(const float* p) {
    return each<Floats>([&](int i) { return vld1q_f32(p + 4 * i); });
  }
  static void store(float* p, Floats x) {
    for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, x.v[i]);
  }
  static Ints broadcast(int32_t x) {
    return each<Ints>([&](int) { return vdupq_n_s32(x); });
  }
  static Floats broadcast(float x) {
    return each<Floats>([&](int) { return vdupq_n_f32(x); });
  }
  static Ints both(Ints x, int32_t mask) {
    return each<Ints>([&](int i) { return vandq_s32(x.v[i], vdupq_n_s32(mask)); });
  }
  template <int kBits>
  static Ints right(Ints x) {
    return each<Ints>([&](int i) { return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(x.v[i]), kBits)); });
  }
  template <int kBits>
  static Ints left(Ints x) {
    return each<Ints>([&](int i) { return vshlq_n_s32(x.v[i], kBits); });
  }
  static Ints either(Ints x, Ints y) {
    return each<Ints>([&](int i) { return vorrq_s32(x.v[i], y.v[i]); });
  }
  static Ints minus(Ints x, Ints y) {
    return each<Ints>([&](int i) { return vsubq_s32(x.v[i], y.v[i]); });
  }
  // The codes are unsigned and the instruction is not: 128 is taken off and added again, by the sum of x.
  static Ints dot_bytes(Ints sum, Ints codes, Ints x) {
    return each<Ints>([&](int i) {
      const int8x16_t numbers = vreinterpretq_s8_s32(x.v[i]);
      const uint8x16_t flipped = veorq_u8(vreinterpretq_u8_s32(codes.v[i]), vdupq_n_u8(128));
      const int32x4_t dot = vdotq_s32(sum.v[i], vreinterpretq_s8_u8(flipped), numbers);
      return vsubq_s32(dot, vshlq_n_s32(vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(-1), numbers), 7));
    });
  }
  static Ints dot_pairs(Ints sum, Ints x, Ints y) {
    return each<Ints>([&](int i) {
      const int16x8_t a = vreinterpretq_s16_s32(x.v[i]), b = vreinterpretq_s16_s32(y.v[i]);
      const int32x4_t low = vmull_s16(vget_low_s16(a), vget_low_s16(b)), high = vmull_high_s16(a, b);
      return vaddq_s32(sum.v[i], vpaddq_s32(low, high));
    });
  }
  static Floats to_float(Ints x) {
    return each<Floats>([&](int i) { return vcvtq_f32_s32(x.v[i]); });
  }
  static Floats times(Floats x, Floats y) {
    return each<Floats>([&](int i) { return vmulq_f32(x.v[i], y.v[i]); });
  }
  static Floats fma(Floats x, Floats y, Floats z) {
    return each<Floats>([&](int i) { return vfmaq_f32(z.v[i], x.v[i], y.v[i]); });
  }

  // Each step adds halves of what is left.
  static Floats sums_of(const Floats* x) {
    return each<Floats>([&](int i) {
      float32x4_t twos[2];
      for (int n = 0; n < 2; ++n) {
        const float32x4_t a = four(x[4 * i + 2 * n]), b = four(x[4 * i + 2 * n + 1]);
        twos[n] = vaddq_f32(vcombine_f32(vget_low_f32(a), vget_low_f32(b)), vcombine_f32(vget_high_f32(a), vget_high_f32(b)));
      }
      return vpaddq_f32(twos[0], twos[1]);
    });
  }
  static float32x4_t four(Floats x) { return vaddq_f32(vaddq_f32(x.v[0], x.v[2]), vaddq_f32(x.v[1], x.v[3])); }
};

bool usable() { return getauxval(AT_HWCAP) & (1 << 20); }  // HWCAP_ASIMDDP

}  // namespace

extern const Instructions kNeon = instructions<Neon>("neon-dotprod", usable);

}  // namespace specbuild
