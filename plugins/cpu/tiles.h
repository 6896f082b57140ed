// The loops of every set of instructions: `V` has 16 lanes, one for each column of a panel.
#pragma once

#include <type_traits>

#include "attention.h"
#include "products.h"

namespace specbuild {
namespace {

template <class Word>
Word word_at(const char* words, int index) {
  Word word;
  std::memcpy(&word, words + 4 * index, 4);
  return word;
}

template <class V, int kBits>
typename V::Ints right(typename V::Ints x) {
  if constexpr (kBits) return V::template right<kBits>(x);
  else return x;
}

// The codes of 4 k, one in each byte of a column's lane. `high` has the upper bits of a group's codes of 5 or 6 bits.
template <class V, int kBits, int kFour>
typename V::Ints four(const uint8_t* codes, typename V::Ints high) {
  if constexpr (kBits == 8) return V::load(codes + 64 * kFour);
  const auto low = V::both(right<V, 4 * (kFour % 2)>(V::load(codes + 64 * (kFour / 2))), 0x0f0f0f0f);
  if constexpr (kBits == 4) return low;
  constexpr int kFrom = kFour * (kBits - 4);
  auto upper = high;
  if constexpr (kFrom < 4) upper = V::template left<4 - kFrom>(high);
  else upper = right<V, kFrom - 4>(high);
  return V::either(low, V::both(upper, kBits == 5 ? 0x10101010 : 0x30303030));
}

template <class V, int kBits>
typename V::Ints high_bits(const uint8_t* codes) {
  return V::load(kBits == 5 || kBits == 6 ? codes + 8 * group(kBits) : codes);
}

// What codes are multiplied with: `kWords` words of each row of a tile for 4 of k. A block's sums begin with `start`, and
// `add` adds the products of all rows with a group's codes, from its four `kFour` on. A call would keep the sums in memory.

// Bytes: one instruction multiplies and adds all four.
template <class V>
struct Bytes {
  using Sum = typename V::Ints;
  static constexpr int kWords = 1;
  static Sum start(int32_t offset) { return V::broadcast(offset); }

  template <int kBits, int kRows, int kFour = 0>
  __attribute__((always_inline)) static void add(Sum* sums, const uint8_t* codes, typename V::Ints high, const char* words, int32_t center) {
    const auto bytes = four<V, kBits, kFour>(codes, high);
    for (int row = 0; row < kRows; ++row)
      sums[row] = V::dot_bytes(sums[row], bytes, V::broadcast(word_at<int32_t>(words, kFour * kRows + row)));
    if constexpr (4 * (kFour + 1) < group(kBits)) add<kBits, kRows, kFour + 1>(sums, codes, high, words, center);
  }
};

// Bytes, of codes below 64: products are added in pairs of 16 bits, as many of them as these can hold.
template <class V>
struct Shorts {
  using Sum = typename V::Ints;
  static constexpr int kWords = 1;
  static Sum start(int32_t offset) { return V::broadcast(offset); }

  template <int kBits, int kRows, int kFour = 0>
  __attribute__((always_inline)) static void add(Sum* sums, const uint8_t* codes, typename V::Ints high, const char* words, int32_t center) {
    constexpr int kFours = group(kBits) / 4, kHeld = kBits == 6 ? 2 : 4, kEnd = kFour + kHeld < kFours ? kFour + kHeld : kFours;
    typename V::Ints products[kRows];
    multiply<kBits, kRows, kFour, kEnd, true>(products, codes, high, words, center);
    for (int row = 0; row < kRows; ++row) sums[row] = V::dot_pairs(sums[row], products[row], V::broadcast(0x00010001));
    if constexpr (kEnd < kFours) add<kBits, kRows, kEnd>(sums, codes, high, words, center);
  }

  template <int kBits, int kRows, int kFour, int kEnd, bool kFirst>
  __attribute__((always_inline)) static void multiply(typename V::Ints* products, const uint8_t* codes, typename V::Ints high, const char* words, int32_t center) {
    const auto bytes = four<V, kBits, kFour>(codes, high);
    for (int row = 0; row < kRows; ++row) {
      const auto product = V::multiply_bytes(bytes, V::broadcast(word_at<int32_t>(words, kFour * kRows + row)));
      products[row] = kFirst ? product : V::add_shorts(products[row], product);
    }
    if constexpr (kFour + 1 < kEnd) multiply<kBits, kRows, kFour + 1, kEnd, false>(products, codes, high, words, center);
  }
};

// What takes numbers one part of 4 codes after the other, which keeps few of them in registers. `Part` has `kWords`.
template <class V, class Part>
struct Parts {
  using Sum = typename Part::Sum;
  static constexpr int kWords = Part::kWords;
  static Sum start(int32_t offset) { return Part::start(offset); }

  template <int kBits, int kRows, int kFour = 0>
  __attribute__((always_inline)) static void add(Sum* sums, const uint8_t* codes, typename V::Ints high, const char* words, int32_t center) {
    constexpr bool kPacked = kBits == 4;  // two codes in a byte: taken apart with the parts
    if constexpr (kPacked) add_part<4, 4 * (kFour % 2), kRows, kFour>(sums, V::load(codes + 64 * (kFour / 2)), words, center);
    else add_part<8, 0, kRows, kFour>(sums, four<V, kBits, kFour>(codes, high), words, center);
    if constexpr (4 * (kFour + 1) < group(kBits)) add<kBits, kRows, kFour + 1>(sums, codes, high, words, center);
  }

  template <int kBits, int kFrom, int kRows, int kFour, int kPart = 0>
  __attribute__((always_inline)) static void add_part(Sum* sums, typename V::Ints packed, const char* words, int32_t center) {
    const auto part = Part::template part<kBits, kFrom, kPart>(packed, center);
    for (int row = 0; row < kRows; ++row) sums[row] = Part::add(sums[row], part, words, (kFour * kRows + row) * kWords + kPart);
    if constexpr (kPart + 1 < kWords) add_part<kBits, kFrom, kRows, kFour, kPart + 1>(sums, packed, words, center);
  }
};

// Pairs of 16 bits, of the even codes and of the odd ones.
template <class V>
struct Pairs {
  using Sum = typename V::Ints;
  static constexpr int kWords = 2;
  template <int kBits, int kFrom, int kPart>
  static typename V::Ints part(typename V::Ints packed, int32_t) {
    return V::both(right<V, 8 * kPart + kFrom>(packed), kBits == 8 ? 0x00ff00ff : 0x000f000f);
  }
  static Sum add(Sum sum, typename V::Ints codes, const char* words, int at) {
    return V::dot_pairs(sum, codes, V::broadcast(word_at<int32_t>(words, at)));
  }
  static Sum start(int32_t offset) { return V::broadcast(offset); }
};

// Numbers in float32.
template <class V>
struct Numbers {
  using Sum = typename V::Floats;
  static constexpr int kWords = 4;
  template <int kBits, int kFrom, int kPart>
  static typename V::Floats part(typename V::Ints packed, int32_t center) {
    const auto codes = V::both(right<V, 8 * kPart + kFrom>(packed), kBits == 8 ? 255 : 15);
    return V::to_float(V::minus(codes, V::broadcast(center)));
  }
  static Sum add(Sum sum, typename V::Floats codes, const char* words, int at) {
    return V::fma(V::broadcast(word_at<float>(words, at)), codes, sum);
  }
  static Sum start(int32_t) { return V::broadcast(0.0f); }
};

// The factors of the blocks of one step in float32, [blocks, 16] each: where they lie, or made from fewer bits.
template <class V>
struct Factors {
  void read(const Weights& w, const Places& at) {
    const float* const step = numbers(at.step);
    scales = w.scale_bits == 8 ? multiples(at.scales, at.blocks, step, 0, made) : floats(at.scales, w.scale_bits, at.blocks, made);
    if (!w.minimum_bits) return;
    float* const to = made + kOfStep;
    if (w.minimum_bits != 8) minima = floats(at.minima, w.minimum_bits, at.blocks, to);
    else if (w.scale_bits == 8) minima = multiples(at.minima, at.blocks, numbers(at.minimum_step), 0, to);
    else minima = multiples(at.minima, at.blocks, scales, kColumns, to);
  }

  static const float* numbers(const uint8_t* at) { return reinterpret_cast<const float*>(at); }

  static const float* floats(const uint8_t* from, int bits, int64_t blocks, float* to) {
    if (bits == 32) return numbers(from);
    for (int64_t block = 0; block < blocks; ++block) V::store(to + block * kColumns, V::halves(from + block * 2 * kColumns));
    return to;
  }

  static const float* multiples(const uint8_t* from, int64_t blocks, const float* of, int64_t stride, float* to) {
    for (int64_t block = 0; block < blocks; ++block) {
      const auto factors = V::to_float(V::signed_bytes(from + block * kColumns));
      V::store(to + block * kColumns, V::times(factors, V::load(of + block * stride)));
    }
    return to;
  }

  const float* scales = nullptr;
  const float* minima = nullptr;  // null: none
  float made[2 * kOfStep];        // for the smallest blocks, of 16
};

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

constexpr int64_t kAhead = 4096;  // bytes: a processor's own prefetching stops at the end of a page

// Asks the second cache, which has more reads under way than the first, for what is read after the bytes from `at` on.
inline void fetch(const uint8_t* at, int64_t size) {
  for (int64_t line = 0; line < size; line += 64) __builtin_prefetch(at + kAhead + line, 0, 2);
}

template <class V, class X, int kBits, int kRows>
void tile(const Weights& w, int64_t panel, const Rows& x, int64_t first, int64_t last, float* y) {
  constexpr int kGroup = group(kBits);
  const uint8_t* codes = w.codes + panel * w.panel_bytes();
  const char* words = x.words + first * w.inner * X::kWords;
  int64_t at = first * w.blocks();  // of the block's factors
  const int32_t center = w.center();
  Factors<V> factors;
  typename V::Floats totals[kRows];
  for (auto& total : totals) total = V::broadcast(0.0f);
  for (int64_t step = 0; step < w.steps(); ++step) {
    const Places places(w, panel, step);
    fetch(places.scales, kColumns * w.bytes_of(places.blocks));
    factors.read(w, places);
    for (int64_t block = 0; block < places.blocks; ++block, at += kRows) {
      typename X::Sum sums[kRows];
      for (int row = 0; row < kRows; ++row) sums[row] = X::start(x.offsets[at + row]);
      for (int k = 0; k < w.block; k += kGroup, codes += 2 * kBits * kGroup, words += kGroup * X::kWords * kRows) {
        fetch(codes, 2 * kBits * kGroup);
        X::template add<kBits, kRows>(sums, codes, high_bits<V, kBits>(codes), words, center);
      }
      const auto scales = V::load(factors.scales + block * kColumns);
      for (int row = 0; row < kRows; ++row) {
        auto sum = V::times(scales, in_float<V>(sums[row]));
        if (factors.minima) sum = V::fma(V::broadcast(x.sums[at + row]), V::load(factors.minima + block * kColumns), sum);
        totals[row] = V::fma(V::broadcast(x.scales[at + row]), sum, totals[row]);
      }
    }
  }
  for (int row = 0; row < kRows && first + row < last; ++row)
    put_columns<V>(w, panel, y + (first + row) * w.columns, totals[row]);
}

// Tiles of `kRows` rows, and then smaller ones.
template <class V, class X, int kBits, int kRows>
void tiles(const Weights& w, int64_t panel, const Rows& x, int64_t first, int64_t last, float* y) {
  for (; first < last && rows_at_once(V::kRows, last - first) == kRows; first += kRows)
    tile<V, X, kBits, kRows>(w, panel, x, first, last, y);
  if constexpr (kRows > 1) {
    if (first < last) tiles<V, X, kBits, fewer_rows(kRows)>(w, panel, x, first, last, y);
  }
}

template <class V, class X, int kBits>
void all_tiles(const Weights& w, int64_t panel, const Rows& x, int64_t first, int64_t last, float* y) {
  tiles<V, X, kBits, V::kRows>(w, panel, x, first, last, y);
}

// What computes tiles of these codes: by bytes, if the instructions multiply such codes so, or else by pairs.
template <class V, int kBits>
auto tiles_for(Rounding rounding) {
  using Wide = Parts<V, Pairs<V>>;
  using Narrow = std::conditional_t<V::kByteBits == 8, Bytes<V>, std::conditional_t<kBits <= V::kByteBits, Shorts<V>, Wide>>;
  return rounding == Rounding::kNone    ? all_tiles<V, Parts<V, Numbers<V>>, kBits>
         : rounding == Rounding::kBits8 ? all_tiles<V, Narrow, kBits>
                                        : all_tiles<V, Wide, kBits>;
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
      float_tiles<V, V::kRows>(w, panel, reinterpret_cast<const float*>(x.words), first, last, k, k + kInnerOfFloats < w.inner ? k + kInnerOfFloats : w.inner, y);
    return;
  }
  const auto all = w.bits == 4   ? tiles_for<V, 4>(rounding)
                   : w.bits == 5 ? tiles_for<V, 5>(rounding)
                   : w.bits == 6 ? tiles_for<V, 6>(rounding)
                                 : tiles_for<V, 8>(rounding);
  all(w, panel, x, first, last, y);
}

// Rounds to the nearest, halves to even; |x| < 2^22.
inline float nearest(float x) {
  constexpr float kShift = 12582912.0f;
  return (x + kShift) - kShift;
}

// What numbers are multiplied with before they are rounded, and what one of them then stands for.
struct Scale {
  float inverse, scale;
};

// The largest of the numbers becomes `limit`. Numbers that are not finite become 0, and their scale NaN.
inline Scale scale_of(const float* x, int64_t size, float limit) {
  int32_t largest = 0;  // floats of one sign are ordered as their bits
  for (int64_t k = 0; k < size; ++k) {
    int32_t bits;
    std::memcpy(&bits, x + k, 4);
    bits &= 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  float bound;
  std::memcpy(&bound, &largest, 4);
  if (largest >= 0x7f800000) return {0.0f, NAN};
  return bound < 1e-30f ? Scale{0.0f, 0.0f} : Scale{limit / bound, bound / limit};
}

// Where numbers of k lie among 4, by what their word is.
inline int place(int8_t, int k) { return k; }
inline int place(float, int k) { return k; }
inline int place(int16_t, int k) {
  constexpr int kPlaces[] = {0, 2, 1, 3};
  return kPlaces[k];
}

// Writes 4 numbers for each 4 of k, `stride` numbers apart, and returns their sum.
template <class Word>
int32_t round_block(const float* x, int size, float inverse, Word* words, int64_t stride) {
  int32_t total = 0;
  for (int k = 0; k < size; k += 4, words += stride) {
    for (int each = 0; each < 4; ++each) {
      const int32_t number = inverse ? static_cast<int32_t>(nearest(x[k + each] * inverse)) : 0;
      words[place(Word(), each)] = static_cast<Word>(number);
      total += number;
    }
  }
  return total;
}

// A block of a row, the numbers of which lie `stride` apart: `word` is its first.
template <class Word>
void round_block(const Weights& w, const float* x, Rounding rounding, Word* words, int64_t stride, const Rows& to, int64_t at) {
  const Scale scale = scale_of(x, w.block, rounding == Rounding::kBits8 ? 127.0f : 32767.0f);
  const int32_t sum = round_block(x, w.block, scale.inverse, words, stride);
  to.scales[at] = scale.scale;
  to.sums[at] = static_cast<float>(-sum);
  to.offsets[at] = -w.center() * sum;
}

// Nothing is rounded; a block's numbers are added in order.
inline void round_block(const Weights& w, const float* x, Rounding, float* words, int64_t stride, const Rows& to, int64_t at) {
  float sum = 0.0f;
  for (int k = 0; k < w.block; ++k) {
    words[k / 4 * stride + k % 4] = x[k];
    sum += x[k];
  }
  to.scales[at] = 1.0f;
  to.sums[at] = -sum;
  to.offsets[at] = 0;
}

template <class Word>
void round_rows(const Weights& w, const float* x, int64_t rows, int most, Rounding rounding, const Rows& to) {
  Word* words = reinterpret_cast<Word*>(to.words);
  for (int64_t first = 0; first < rows; first += rows_at_once(most, rows - first)) {
    const int of_tile = rows_at_once(most, rows - first);
    for (int row = 0; row < of_tile; ++row)
      for (int64_t block = 0; block < w.blocks(); ++block)
        round_block(w, x + (first + row < rows ? first + row : rows - 1) * w.inner + block * w.block, rounding, words + first * w.inner + (block * w.block / 4 * of_tile + row) * 4,
                    4 * of_tile, to, first * w.blocks() + block * of_tile + row);
  }
}

template <class V>
void round_of(const Weights& w, const float* x, int64_t rows, Rounding rounding, const Rows& to) {
  if (w.bits == 32) return static_cast<void>(std::memcpy(to.words, x, rows * w.inner * sizeof(float)));
  const auto round = rounding == Rounding::kNone ? round_rows<float>
                     : rounding == Rounding::kBits8 && w.bits <= V::kByteBits ? round_rows<int8_t>
                                                                              : round_rows<int16_t>;
  round(w, x, rows, V::kRows, rounding, to);
}

template <class V>
constexpr Instructions instructions(const char* name, bool (*usable)()) {
  return {name, usable, V::kRows, V::kByteBits, round_of<V>, panel_of<V>, rms_norm<V>, swiglu, attend<V>};
}

}  // namespace
}  // namespace specbuild
