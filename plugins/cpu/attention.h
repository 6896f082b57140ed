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

// Scores of the cache rows from `first` on, as many as lanes; behind the last one they mean nothing.
template <class V>
void score(const Attention& a, const Head& head, const float* keys, int64_t first) {
  typename V::Floats sums[kLanes];
  for (int lane = 0; lane < kLanes; lane += V::kRows) {
    const float* row[V::kRows];
    for (int n = 0; n < V::kRows; ++n) {
      const int64_t at = first + lane + n;
      row[n] = keys + head.rows[at < head.count ? at : head.count - 1] * a.key_size;
    }
    dots<V, V::kRows>(head.query, row, a.key_size, sums + lane);
  }
  V::store(head.scores + first, V::times(V::sums_of(sums), V::broadcast(a.scale)));
}

// Adds rows of values in order to `y`, `kParts` vectors of them at a time.
template <class V, int kParts>
void add_values(const float* values, int64_t size, const int32_t* rows, int64_t count, const float* weights, float* y) {
  typename V::Floats sums[kParts];
  for (int part = 0; part < kParts; ++part) sums[part] = V::load(y + part * kLanes);
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
  for (; d + V::kRows * kLanes <= size; d += V::kRows * kLanes) add_values<V, V::kRows>(values + d, size, rows, count, weights, y + d);
  for (; d + kLanes <= size; d += kLanes) add_values<V, 1>(values + d, size, rows, count, weights, y + d);
  for (; d < size; ++d)
    for (int64_t n = 0; n < count; ++n) y[d] = fused(weights[n], values[rows[n] * size + d], y[d]);
}

// Computes some heads. All of them read as many cache rows as there are lanes before any reads more.
template <class V>
void attend(const Attention& a, const Head* heads, int64_t number) {
  const auto cache = [&a](const Head& head, const float* numbers, int64_t size) {
    return numbers + (head.slot * a.kv_heads + head.number / (a.heads / a.kv_heads)) * a.capacity * size;
  };
  int64_t longest = 0;
  for (const Head* head = heads; head < heads + number; ++head) longest = head->count > longest ? head->count : longest;
  for (int64_t first = 0; first < longest; first += kLanes)
    for (const Head* head = heads; head < heads + number; ++head)
      if (first < head->count) score<V>(a, *head, cache(*head, a.keys, a.key_size), first);
  for (const Head* head = heads; head < heads + number; ++head) {
    for (int64_t n = 0; a.softcap > 0 && n < head->count; ++n) head->scores[n] = a.softcap * tangent(head->scores[n] / a.softcap);
    normalize(head->scores, head->count, a.sinks ? a.sinks + head->number : nullptr);
    for (int64_t d = 0; d < a.value_size; ++d) head->y[d] = 0.0f;
  }
  for (int64_t first = 0; first < longest; first += kLanes)
    for (const Head* head = heads; head < heads + number; ++head)
      if (const int64_t left = head->count - first; left > 0)
        add_all_values<V>(cache(*head, a.values, a.value_size), a.value_size, head->rows + first, left < kLanes ? left : kLanes,
                          head->scores + first, head->y);
}

}  // namespace
}  // namespace specbuild
