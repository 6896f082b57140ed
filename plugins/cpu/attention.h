// Attention of a tree's nodes over a cache. A node's sums run over the rows that it sees, in order, and over nothing else:
// its bits depend on its own path alone, whatever rows lie between and whatever nodes are computed beside it.
//
// A score adds its products in 16 lanes, d = 0, 16, 32, … in the first, and the lanes in halves; the sum of the weights
// has 16 lanes as well, by a row's number among those that are seen. `V` has 16 lanes.
#pragma once

#include <cmath>
#include <cstring>

#include "products.h"

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

template <class V>
float dot(const float* q, const float* k, int64_t size) {
  auto sums = V::broadcast(0.0f);
  int64_t d = 0;
  for (; d + kLanes <= size; d += kLanes) sums = V::fma(V::load(q + d), V::load(k + d), sums);
  if (d < size) sums = V::fma(rest<V>(q + d, size - d), rest<V>(k + d, size - d), sums);
  float lanes[kLanes];
  V::store(lanes, sums);
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

// Turns scores into weights that add up to 1 with the sink's, if there is one.
inline void normalize(float* scores, int64_t count, const float* sink) {
  float largest = sink ? *sink : -INFINITY;
  for (int64_t n = 0; n < count; ++n) largest = scores[n] > largest ? scores[n] : largest;
  for (int64_t n = 0; n < count; ++n) scores[n] = exponential(scores[n] - largest);
  float lanes[kLanes] = {};
  int64_t n = 0;
  for (; n + kLanes <= count; n += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += scores[n + lane];
  for (int lane = 0; n < count; ++n, ++lane) lanes[lane] += scores[n];
  const float total = halves(lanes) + (sink ? exponential(*sink - largest) : 0.0f);
  for (n = 0; n < count; ++n) scores[n] /= total;
}

// Adds rows of values in order, `kParts` vectors of them at a time.
template <class V, int kParts>
void add_values(const float* values, int64_t size, const int32_t* rows, int64_t count, const float* weights, float* y) {
  typename V::Floats sums[kParts];
  for (auto& sum : sums) sum = V::broadcast(0.0f);
  for (int64_t n = 0; n < count; ++n) {
    const auto weight = V::broadcast(weights[n]);
    const float* row = values + rows[n] * size;
    for (int part = 0; part < kParts; ++part) sums[part] = V::fma(weight, V::load(row + part * kLanes), sums[part]);
  }
  for (int part = 0; part < kParts; ++part) V::store(y + part * kLanes, sums[part]);
}

template <class V>
void add_all_values(const float* values, int64_t size, const int32_t* rows, int64_t count, const float* weights, float* y) {
  int64_t d = 0;
  for (; d + 4 * kLanes <= size; d += 4 * kLanes) add_values<V, 4>(values + d, size, rows, count, weights, y + d);
  for (; d + kLanes <= size; d += kLanes) add_values<V, 1>(values + d, size, rows, count, weights, y + d);
  for (int64_t at = d; at < size; ++at) {
    y[at] = 0.0f;
    for (int64_t n = 0; n < count; ++n) y[at] = fused(weights[n], values[rows[n] * size + at], y[at]);
  }
}

// Computes one head of one node. `rows` are the cache rows that it sees, in order; `scores` has room for as many.
template <class V>
void attend(const Attention& a, int64_t slot, int64_t head, const float* q, const int32_t* rows, int64_t count, float* scores, float* y) {
  const int64_t of = (slot * a.kv_heads + head / (a.heads / a.kv_heads)) * a.capacity;
  const float* keys = a.keys + of * a.key_size;
  for (int64_t n = 0; n < count; ++n) scores[n] = dot<V>(q, keys + rows[n] * a.key_size, a.key_size) * a.scale;
  if (a.softcap > 0)
    for (int64_t n = 0; n < count; ++n) scores[n] = a.softcap * tangent(scores[n] / a.softcap);
  normalize(scores, count, a.sinks ? a.sinks + head : nullptr);
  add_all_values<V>(a.values + of * a.value_size, a.value_size, rows, count, scores, y);
}

}  // namespace
}  // namespace specbuild
