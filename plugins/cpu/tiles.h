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

template <class V, int kBits>
typename V::Ints right(typename V::Ints x) {
  if constexpr (kBits) return V::template right<kBits>(x);
  else return x;
}

// What is multiplied with 4 codes of k: `kWords` words of a row, each with a part of the codes. A byte of `packed` has a
// code of `kBits` bits from bit `kFrom` on. The sums of a block begin with `start`.

// Bytes: one instruction multiplies and adds all four.
template <class V>
struct Bytes {
  using Sum = typename V::Ints;
  static constexpr int kWords = 1;
  template <int kBits, int kFrom, int kPart>
  static typename V::Ints part(typename V::Ints packed) {
    return kBits == 8 ? packed : V::both(right<V, kFrom>(packed), 0x0f0f0f0f);
  }
  static Sum add(Sum sum, typename V::Ints codes, const void* words, int64_t at) {
    return V::dot_bytes(sum, codes, V::broadcast(word_at(words, at)));
  }
  static Sum start(const Rows& x, int64_t at) { return V::broadcast(x.offsets[at]); }
};

// Pairs of 16 bits, of the even codes and of the odd ones.
template <class V>
struct Pairs {
  using Sum = typename V::Ints;
  static constexpr int kWords = 2;
  template <int kBits, int kFrom, int kPart>
  static typename V::Ints part(typename V::Ints packed) {
    return V::both(right<V, 8 * kPart + kFrom>(packed), kBits == 8 ? 0x00ff00ff : 0x000f000f);
  }
  static Sum add(Sum sum, typename V::Ints codes, const void* words, int64_t at) {
    return V::dot_pairs(sum, codes, V::broadcast(word_at(words, at)));
  }
  static Sum start(const Rows& x, int64_t at) { return V::broadcast(x.offsets[at]); }
};

// Numbers in float32.
template <class V>
struct Numbers {
  using Sum = typename V::Floats;
  static constexpr int kWords = 4;
  template <int kBits, int kFrom, int kPart>
  static typename V::Floats part(typename V::Ints packed) {
    const auto codes = V::both(right<V, 8 * kPart + kFrom>(packed), kBits == 8 ? 255 : 15);
    return V::to_float(V::minus(codes, V::broadcast(center(kBits))));
  }
  static Sum add(Sum sum, typename V::Floats codes, const void* words, int64_t at) {
    return V::fma(V::broadcast(static_cast<const float*>(words)[at]), codes, sum);
  }
  static Sum start(const Rows&, int64_t) { return V::broadcast(0.0f); }
};

// Adds the products of all rows with one part of 4 codes after the other, which keeps few numbers in registers. A call
// would keep the sums in memory.
template <class V, class X, int kBits, int kFrom, int kRows, int kPart = 0>
__attribute__((always_inline)) inline void add_parts(typename X::Sum* sums, typename V::Ints packed, const void* words, int64_t at, int64_t stride) {
  const auto part = X::template part<kBits, kFrom, kPart>(packed);
  for (int row = 0; row < kRows; ++row) sums[row] = X::add(sums[row], part, words, at + kPart + row * stride);
  if constexpr (kPart + 1 < X::kWords) add_parts<V, X, kBits, kFrom, kRows, kPart + 1>(sums, packed, words, at, stride);
}

template <class V>
typename V::Floats in_float(typename V::Ints sum) {
  return V::to_float(sum);
}

template <class V>
typename V::Floats in_float(typename V::Floats sum) {
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
  constexpr int kCodes = kBits == 4 ? 8 : 4;  // codes of k in 64 bytes
  const int64_t blocks = w.blocks(), row_words = w.inner / 4 * X::kWords;
  const uint8_t* codes = w.codes + panel * w.panel_bytes();
  typename V::Floats totals[kRows];
  for (auto& total : totals) total = V::broadcast(0.0f);
  for (int64_t block = 0, word = first * row_words; block < blocks; ++block) {
    const int64_t its = first * blocks + block;  // of the first row
    typename X::Sum sums[kRows];
    for (int row = 0; row < kRows; ++row) sums[row] = X::start(x, its + row * blocks);
    for (int k = 0; k < w.block; k += kCodes, codes += 64) {
      const auto packed = V::load(codes);
      add_parts<V, X, kBits, 0, kRows>(sums, packed, x.words, word, row_words);
      word += X::kWords;
      if constexpr (kBits == 4) {
        add_parts<V, X, kBits, 4, kRows>(sums, packed, x.words, word, row_words);
        word += X::kWords;
      }
    }
    const int64_t at = (panel * blocks + block) * kColumns;
    const auto scales = V::load(w.scales + at);
    for (int row = 0; row < kRows; ++row) {
      auto sum = V::times(scales, in_float<V>(sums[row]));
      if (w.minima) sum = V::fma(V::broadcast(-x.sums[its + row * blocks]), V::load(w.minima + at), sum);
      totals[row] = V::fma(V::broadcast(x.scales[its + row * blocks]), sum, totals[row]);
    }
  }
  for (int row = 0; row < kRows; ++row) put_columns<V>(w, panel, y + (first + row) * w.columns, totals[row]);
}

template <class V, class X, int kBits, int kRows>
void tiles(const Weights& w, int64_t panel, const Rows& x, int64_t first, int64_t last, float* y) {
  for (; first + kRows <= last; first += kRows) tile<V, X, kBits, kRows>(w, panel, x, first, y);
  if constexpr (kRows > 1) {
    if (first < last) tiles<V, X, kBits, kRows - 1>(w, panel, x, first, last, y);
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
    if (first < last) float_tiles<V, kRows - 1>(w, panel, x, first, last, begin, end, y);
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

// Returns the sum of the numbers.
template <class Word>
int32_t round_block(const float* x, int64_t begin, int size, float limit, Word* words, float* scale) {
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
  return total;
}

template <class Word>
void round_rows(const Weights& w, const float* x, int64_t rows, float limit, Word* words, const Rows& to) {
  for (int64_t block = 0; block < rows * w.blocks(); ++block) {
    const int32_t sum = round_block(x, block * w.block, w.block, limit, words, to.scales + block);
    to.sums[block] = static_cast<float>(sum);
    to.offsets[block] = -center(w.bits) * sum;
  }
}

// Nothing is rounded; a block's numbers are added in order.
inline void sum_rows(const Weights& w, const float* x, int64_t rows, const Rows& to) {
  for (int64_t block = 0; block < rows * w.blocks(); ++block) {
    to.scales[block] = 1.0f;
    to.sums[block] = 0.0f;
    for (int k = 0; k < w.block; ++k) to.sums[block] += x[block * w.block + k];
  }
}

template <class V>
void round_of(const Weights& w, const float* x, int64_t rows, Rounding rounding, void* words, const Rows& to) {
  if (rounding == Rounding::kNone) return sum_rows(w, x, rows, to);
  const float limit = rounding == Rounding::kBits8 ? 127.0f : 32767.0f;
  if (V::kBytes && rounding == Rounding::kBits8)
    round_rows(w, x, rows, limit, static_cast<int8_t*>(words), to);
  else
    round_rows(w, x, rows, limit, static_cast<int16_t*>(words), to);
}

template <class V>
constexpr Instructions instructions(const char* name, bool (*usable)()) {
  return {name, usable, V::kBytes, round_of<V>, panel_of<V>, attend<V>};
}

}  // namespace
}  // namespace specbuild
