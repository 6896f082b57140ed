// Functions of a row's numbers. Every rounding is written out, so that all sets of instructions round alike. Sums run in
// 16 lanes, k = 0, 16, 32, … in the first, which are added in halves. `V` has 16 lanes.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace specbuild {
namespace {

constexpr int kLanes = 16;

inline float fused(float x, float y, float z) { return __builtin_fmaf(x, y, z); }

inline float halves(float* lanes) {
  for (int half = kLanes / 2; half; half /= 2)
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

// The last numbers of a row that are no full lanes, and zeros.
template <class V>
typename V::Floats rest(const float* numbers, int64_t count) {
  float all[kLanes] = {};
  std::memcpy(all, numbers, count * sizeof(float));
  return V::load(all);
}

// The lanes of the products of a row with each of `kRows` others.
template <class V, int kRows>
void dots(const float* x, const float* const* rows, int64_t size, typename V::Floats* lanes) {
  typename V::Floats sums[kRows];
  for (auto& sum : sums) sum = V::broadcast(0.0f);
  int64_t d = 0;
  for (; d + kLanes <= size; d += kLanes) {
    const auto part = V::load(x + d);
    for (int row = 0; row < kRows; ++row) sums[row] = V::fma(part, V::load(rows[row] + d), sums[row]);
  }
  for (int row = 0; row < kRows; ++row)
    lanes[row] = d < size ? V::fma(rest<V>(x + d, size - d), rest<V>(rows[row] + d, size - d), sums[row]) : sums[row];
}

template <class V>
float dot(const float* x, const float* y, int64_t size) {
  typename V::Floats sum;
  dots<V, 1>(x, &y, size, &sum);
  float lanes[kLanes];
  V::store(lanes, sum);
  return halves(lanes);
}

// e to the x, x <= 0: 2^n e^r with |r| <= ln 2 / 2, and Cephes' polynomial for e^r; 0 below -87.
inline float exponential(float x) {
  constexpr float kShift = 12582912.0f;
  const float n = fused(x < -87.0f ? -87.0f : x, 1.44269504f, kShift) - kShift;
  const float r = fused(n, 2.12194440e-4f, fused(n, -0.693359375f, x < -87.0f ? -87.0f : x));
  float p = fused(r, 1.9875691500e-4f, 1.3981999507e-3f);
  p = fused(p, r, 8.3334519073e-3f);
  p = fused(p, r, 4.1665795894e-2f);
  p = fused(p, r, 1.6666665459e-1f);
  p = fused(p, r, 5.0000001201e-1f);
  p = fused(p, r * r, r) + 1.0f;
  const int32_t exponent = (static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &exponent, 4);
  return x < -87.0f ? 0.0f : p * power;
}

// The hyperbolic tangent.
inline float tangent(float x) {
  const float e = exponential(-2.0f * std::fabs(x));
  return std::copysign((1.0f - e) / (1.0f + e), x);
}

// RMSNorm (Zhang and Sennrich 2019): x / √(mean of x² + ε) · weight.
template <class V>
void rms_norm(const float* x, const float* weight, int64_t size, float epsilon, float* y) {
  const float scale = 1.0f / std::sqrt(dot<V>(x, x, size) / static_cast<float>(size) + epsilon);
  for (int64_t k = 0; k < size; ++k) y[k] = x[k] * scale * weight[k];
}

// silu(gate) · up: SwiGLU (Shazeer 2020).
inline void swiglu(const float* gate, const float* up, int64_t size, float* y) {
  for (int64_t n = 0; n < size; ++n) {
    const float e = exponential(-std::fabs(gate[n]));
    y[n] = gate[n] * ((gate[n] < 0.0f ? e : 1.0f) / (1.0f + e)) * up[n];
  }
}

}  // namespace
}  // namespace specbuild
