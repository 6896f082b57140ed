// Attention of a tree's nodes over a cache. A node's sums run over the rows that it sees, in order, and over nothing else:
// its bits depend on its own path alone, whatever rows lie between and whatever nodes are computed beside it.
//
// A score adds its products in 16 lanes, d = 0, 16, 32, … in the first, and the lanes in halves; the sum of the weights
// has 16 lanes as well, by a row's number among those that are seen. `V` has 16 lanes.
#pragma once

#include "functions.h"
#include "products.h"

namespace specbuild {
namespace {

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
