// Plain C++, for any processor: slow, and the measure of all others.
#include "tiles.h"

namespace specbuild {
namespace {

struct Portable {
  static constexpr int kByteBits = 0;
  static constexpr int kRows = 1;
  struct Ints { int32_t lanes[kColumns]; };
  struct Floats { float lanes[kColumns]; };

  template <class Lanes, class Function>
  static Lanes each(Function function) {
    Lanes result;
    for (int lane = 0; lane < kColumns; ++lane) result.lanes[lane] = function(lane);
    return result;
  }

  static Ints load(const uint8_t* p) {
    Ints result;
    std::memcpy(&result, p, sizeof(result));
    return result;
  }
  static Ints signed_bytes(const uint8_t* p) {
    return each<Ints>([=](int i) { return static_cast<int8_t>(p[i]); });
  }
  static Floats halves(const uint8_t* p) {
    uint16_t all[kColumns];
    std::memcpy(all, p, sizeof(all));
    return each<Floats>([&](int i) { return from_half(all[i]); });
  }
  static Floats load(const float* p) {
    Floats result;
    std::memcpy(&result, p, sizeof(result));
    return result;
  }
  static void store(float* p, Floats x) { std::memcpy(p, &x, sizeof(x)); }
  static Ints broadcast(int32_t x) {
    return each<Ints>([=](int) { return x; });
  }
  static Floats broadcast(float x) {
    return each<Floats>([=](int) { return x; });
  }
  static Ints both(Ints x, int32_t mask) {
    return each<Ints>([&](int i) { return x.lanes[i] & mask; });
  }
  template <int kBits>
  static Ints right(Ints x) {
    return each<Ints>([&](int i) { return static_cast<int32_t>(static_cast<uint32_t>(x.lanes[i]) >> kBits); });
  }
  template <int kBits>
  static Ints left(Ints x) {
    return each<Ints>([&](int i) { return static_cast<int32_t>(static_cast<uint32_t>(x.lanes[i]) << kBits); });
  }
  static Ints either(Ints x, Ints y) {
    return each<Ints>([&](int i) { return x.lanes[i] | y.lanes[i]; });
  }
  static Ints minus(Ints x, Ints y) {
    return each<Ints>([&](int i) { return x.lanes[i] - y.lanes[i]; });
  }
  static Ints dot_pairs(Ints sum, Ints x, Ints y) {
    return each<Ints>([&](int i) {
      const auto low = [](int32_t pair) { return static_cast<int16_t>(pair); };
      const auto high = [](int32_t pair) { return static_cast<int16_t>(static_cast<uint32_t>(pair) >> 16); };
      return sum.lanes[i] + low(x.lanes[i]) * low(y.lanes[i]) + high(x.lanes[i]) * high(y.lanes[i]);
    });
  }
  static Floats to_float(Ints x) {
    return each<Floats>([&](int i) { return static_cast<float>(x.lanes[i]); });
  }
  static Floats times(Floats x, Floats y) {
    return each<Floats>([&](int i) { return x.lanes[i] * y.lanes[i]; });
  }
  static Floats fma(Floats x, Floats y, Floats z) {
    return each<Floats>([&](int i) { return std::fma(x.lanes[i], y.lanes[i], z.lanes[i]); });
  }
  static Floats sums_of(const Floats* x) {
    return each<Floats>([&](int i) {
      Floats lanes = x[i];
      return specbuild::halves(lanes.lanes);
    });
  }
};

bool usable() { return true; }

}  // namespace

extern const Instructions kPortable = instructions<Portable>("portable", usable);

}  // namespace specbuild
