// The loops of every set of instructions: `V` has 16 lanes, one for each column of a panel.
#pragma once

#include <cmath>
#include <cstring>

#include "attention.h"
#include "products.h"

namespace specbuild {
namespace {

inline int32_t word_at(const void* words, int64_t index) {
  int32_t word;
  std::memcpy(&word, static_cast<const char*>(words) + 4 * index, 4);
  return word;
}

// What is multiplied with 4 codes of k: `kWords` words of a row, each with a part of the codes.

// Bytes: one instruction multiplies and adds all four.
template <class V>
struct Bytes {
  using Sum = typename V::Ints;
  static constexpr int kWords = 1;
  template <int kPart>
  static typename V::Ints part(typename V::Ints codes, int) {
    return codes;
  }
  static Sum add(Sum sum, typename V::Ints codes, const void* words, int64_t at) {
    return V::dot_bytes(sum, codes, V::broadcast(word_at(words, at)));
  }
};

// Pairs of 16 bits, of the even codes and of the odd ones.
template <class V>
struct Pairs {
  using Sum = typename V::Ints;
  static constexpr int kWords = 2;
  template <int kPart>
  static typename V::Ints part(typename V::Ints codes, int) {
    return V::both(V::template right<8 * kPart>(codes), 0x00ff00ff);
  }
  static Sum add(Sum sum, typename V::Ints codes, const void* words, int64_t at) {
    return V::dot_pairs(sum, codes, V::broadcast(word_at(words, at)));
  }
};

// Numbers in float32.
template <class V>
struct Numbers {
  using Sum = typename V::Floats;
  static constexpr int kWords = 4;
  template <int kPart>
  static typename V::Floats part(typename V::Ints codes, int center) {
    return V::to_float(V::minus(V::both(V::template right<8 * kPart>(codes), 255), V::broadcast(center)));
  }
  static Sum add(Sum sum, typename V::Floats codes, const void* words, int64_t at) {
    return V::fma(V::broadcast(static_cast<const float*>(words)[at]), codes, sum);
  }
};

// Adds the products of all rows with one part of 4 codes after the other, which keeps few numbers in registers. A call
// would keep the sums in memory.
template <class V, class X, int kRows, int kPart = 0>
__attribute__((always_inline)) inline void add_parts(typename X::Sum* sums, typename V::Ints codes, int center, const void* words, int64_t at, int64_t stride) {
  const auto part = X::template part<kPart>(codes, center);
  for (int row = 0; row < kRows; ++row) sums[row] = X::add(sums[row], part, words, at + kPart + row * stride);
  if constexpr (kPart + 1 < X::kWords) add_parts<V, X, kRows, kPart + 1>(sums, codes, center, words, at, stride);
}

template <class V>
typename V::Floats scaled(const Weights&, typename V::Ints sum, int center, const Rows& x, int64_t at) {
  return V::to_float(V::minus(sum, V::broadcast(center * static_cast<int32_t>(x.sums[at]))));
}

template <class V>
typename V::Floats scaled(const Weights&, typename V::Floats sum, int, const Rows&, int64_t) {
  return sum;
}

// The panel's columns of a row of y; the last panel may have fewer than 16.
template <class V>
void put_columns(const Weights& w, int64_t panel, float* y, typename V::Floats numbers) {
  const int64_t column = panel * kColumns, left = w.columns - column;
  if (left >= kColumns) return V::store(y + column, numbers);
  float all[kColumns];
  V::store(all, numbers);
  std::memcpy(y + column, all, left * sizeof(float));
}

template <class V>
typename V::Floats get_columns(const Weights& w, int64_t panel, const float* y) {
  const int64_t column = panel * kColumns, left = w.columns - column;
  if (left >= kColumns) return V::load(y + column);
  float all[kColumns] = {};
  std::memcpy(all, y + column, left * sizeof(float));
  return V::load(all);
}

template <class V, class X, int kBits, int kRows>
void tile(const Weights& w, int64_t panel, const Rows& x, int64_t first, float* y) {
  constexpr int kCenter = kBits == 4 ? 8 : 128, kCodes = kBits == 4 ? 8 : 4;  // codes of k in 64 bytes
  const int64_t blocks = w.blocks(), row_words = w.inner / 4 * X::kWords;
  const uint8_t* codes = w.codes + panel * w.panel_bytes();
  typename V::Floats totals[kRows];
  for (auto& total : totals) total = V::broadcast(0.0f);
  for (int64_t block = 0, word = first * row_words; block < blocks; ++block) {
    typename X::Sum sums[kRows];
    for (auto& sum : sums) sum = V::zero(typename X::Sum());
    for (int k = 0; k < w.block; k += kCodes, codes += 64) {
      const auto packed = V::load(codes);
      const auto low = kBits == 4 ? V::both(packed, 0x0f0f0f0f) : packed;
      add_parts<V, X, kRows>(sums, low, kCenter, x.words, word, row_words);
      word += X::kWords;
      if (kBits == 4) {
        const auto high = V::both(V::template right<4>(packed), 0x0f0f0f0f);
        add_parts<V, X, kRows>(sums, high, kCenter, x.words, word, row_words);
        word += X::kWords;
      }
    }
    const int64_t at = (panel * blocks + block) * kColumns;
    const auto scales = V::load(w.scales + at);
    for (int row = 0; row < kRows; ++row) {
      const int64_t its = (first + row) * blocks + block;
      auto sum = V::times(scales, scaled<V>(w, sums[row], kCenter, x, its));
      if (w.minima) sum = V::fma(V::broadcast(-x.sums[its]), V::load(w.minima + at), sum);
      totals[row] = V::fma(V::broadcast(x.scales[its]), sum, totals[row]);
    }
  }
  for (int row = 0; row < kRows; ++row) put_columns<V>(w, panel, y + (first + row) * w.columns, totals[row]);
}

template <class V, class X, int kBits, int kRows>
void tiles(const Weights& w, int64_t panel, const Rows& x, int64_t first, int64_t last, float* y) {
  for (; first + kRows <= last; first += kRows) tile<V, X, kBits, kRows>(w, panel, x, first, y);
  if constexpr (kRows > 1) {
    if (first < last) tiles<V, X, kBits, kRows / 2>(w, panel, x, first, last, y);
  }
}

template <class V, class X>
void tiles_of(const Weights& w, int64_t panel, const Rows& x, int64_t first, int64_t last, float* y) {
  (w.bits == 4 ? tiles<V, X, 4, V::kRows> : tiles<V, X, 8, V::kRows>)(w, panel, x, first, last, y);
}

// Weights in float32: sums over k, in order, from `begin` to `end`; y has those before.
template <class V, int kRows>
void float_tiles(const Weights& w, int64_t panel, const float* x, int64_t first, int64_t last, int64_t begin, int64_t end, float* y) {
  const float* weights = reinterpret_cast<const float*>(w.codes) + panel * w.inner * kColumns;
  for (; first + kRows <= last; first += kRows) {
    typename V::Floats sums[kRows];
    for (int row = 0; row < kRows; ++row)
      sums[row] = begin ? get_columns<V>(w, panel, y + (first + row) * w.columns) : V::broadcast(0.0f);
    for (int64_t k = begin; k < end; ++k) {
      const auto column = V::load(weights + k * kColumns);
      for (int row = 0; row < kRows; ++row) sums[row] = V::fma(V::broadcast(x[(first + row) * w.inner + k]), column, sums[row]);
    }
    for (int row = 0; row < kRows; ++row) put_columns<V>(w, panel, y + (first + row) * w.columns, sums[row]);
  }
  if constexpr (kRows > 1) {
    if (first < last) float_tiles<V, kRows / 2>(w, panel, x, first, last, begin, end, y);
  }
}

constexpr int64_t kInnerOfFloats = 256;  // of k at a time: 16 KiB of a panel stay in the first cache for all rows

template <class V>
void panel_of(const Weights& w, int64_t panel, const Rows& x, int64_t first, int64_t last, Rounding rounding, float* y) {
  if (w.bits == 32) {
    for (int64_t k = 0; k < w.inner; k += kInnerOfFloats)
      float_tiles<V, V::kRows>(w, panel, static_cast<const float*>(x.words), first, last, k, k + kInnerOfFloats < w.inner ? k + kInnerOfFloats : w.inner, y);
    return;
  }
  if (rounding == Rounding::kNone) return tiles_of<V, Numbers<V>>(w, panel, x, first, last, y);
  if constexpr (V::kBytes) {
    if (rounding == Rounding::kBits8) return tiles_of<V, Bytes<V>>(w, panel, x, first, last, y);
  }
  tiles_of<V, Pairs<V>>(w, panel, x, first, last, y);
}

// Rounds to the nearest, halves to even; |x| < 2^22.
inline float nearest(float x) {
  constexpr float kShift = 12582912.0f;
  return (x + kShift) - kShift;
}

inline void put(int8_t* words, int64_t k, int32_t number) { words[k] = static_cast<int8_t>(number); }

inline void put(int16_t* words, int64_t k, int32_t number) {
  constexpr int kPlaces[] = {0, 2, 1, 3};
  words[(k & ~int64_t{3}) + kPlaces[k & 3]] = static_cast<int16_t>(number);
}

template <class Word>
void round_block(const float* x, int64_t begin, int size, float limit, Word* words, float* scale, float* sum) {
  int32_t largest = 0;  // floats of one sign are ordered as their bits
  for (int k = 0; k < size; ++k) {
    int32_t bits;
    std::memcpy(&bits, x + begin + k, 4);
    bits &= 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  float bound;
  std::memcpy(&bound, &largest, 4);
  const bool finite = largest < 0x7f800000, tiny = bound < 1e-30f;
  const float inverse = !finite || tiny ? 0.0f : limit / bound;
  *scale = !finite ? NAN : tiny ? 0.0f : bound / limit;
  int32_t total = 0;
  for (int k = 0; k < size; ++k) {
    const int32_t number = finite ? static_cast<int32_t>(nearest(x[begin + k] * inverse)) : 0;
    put(words, begin + k, number);
    total += number;
  }
  *sum = static_cast<float>(total);
}

template <class Word>
void round_rows(const Weights& w, const float* x, int64_t rows, float limit, Word* words, float* scales, float* sums) {
  for (int64_t block = 0; block < rows * w.blocks(); ++block)
    round_block(x, block * w.block, w.block, limit, words, scales + block, sums + block);
}

// Nothing is rounded; a block's numbers are added in order.
inline void sum_rows(const Weights& w, const float* x, int64_t rows, float* scales, float* sums) {
  for (int64_t block = 0; block < rows * w.blocks(); ++block) {
    scales[block] = 1.0f;
    sums[block] = 0.0f;
    for (int k = 0; k < w.block; ++k) sums[block] += x[block * w.block + k];
  }
}

template <class V>
void round_of(const Weights& w, const float* x, int64_t rows, Rounding rounding, void* words, float* scales, float* sums) {
  if (rounding == Rounding::kNone) return sum_rows(w, x, rows, scales, sums);
  const float limit = rounding == Rounding::kBits8 ? 127.0f : 32767.0f;
  if (V::kBytes && rounding == Rounding::kBits8)
    round_rows(w, x, rows, limit, static_cast<int8_t*>(words), scales, sums);
  else
    round_rows(w, x, rows, limit, static_cast<int16_t*>(words), scales, sums);
}

template <class V>
constexpr Instructions instructions(const char* name, bool (*usable)()) {
  return {name, usable, V::kBytes, round_of<V>, panel_of<V>, attend<V>};
}

}  // namespace
}  // namespace specbuild
