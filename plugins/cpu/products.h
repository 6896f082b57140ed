// Products of rows with block-quantized weights. A row's sums have one fixed order, whatever rows are beside it and
// whatever instructions compute them: its bits are those of the row alone, on every processor.
//
//   y[n] = Σ_b s_b · (S[n, b] · float(Σ_k x_k (q[n, k] − c)) − M[n, b] · float(Σ_k x_k))
//
// b runs over the blocks of k in order, each step one fused multiply-add in float32. x_k are the row's numbers, rounded
// to 8 or 16 bits with one scale s_b per block, so that the sums over k are exact integers; or float32, in which case
// s_b = 1 and the sums over k are fused multiply-adds in order of k. q are codes of 4, 5, 6 or 8 bits, S their scales,
// and M, if there are any, their minima; c is 0 with minima, and else the middle of the codes.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace specbuild {

constexpr int kColumns = 16;      // of a panel
constexpr int64_t kOfStep = 256;  // numbers of k for which a step stands

// How many codes of k are packed together.
constexpr int group(int bits) { return bits == 5 ? 32 : 16; }

// Weights as they are packed when a bundle is built, in panels of 16 columns. Codes of 8 bits: 64 bytes for every 4 of k,
// byte 4 n + k. Of 4 bits: 64 bytes for every 8 of k, byte 4 n + k % 4, the second four in the high halves. Of 5 and 6
// bits: a group's low 4 bits as those of 4 bits, and then 64 bytes of high ones: byte 4 n + k % 4, from its lowest bit on.
//
// A panel's factors are, for every 256 numbers of k in turn, the scales of their blocks [blocks, 16] in float32, float16
// or int8, their minima in the same way, and where scales are int8 the step [16] in float32 whose multiples scales, and
// then the step whose multiples minima are. Minima in int8 beside other scales are zero points: multiples of their
// block's scale.
struct Weights {
  const uint8_t* codes;
  const uint8_t* factors;
  int64_t inner;    // K, a multiple of `block`
  int64_t columns;  // N; the last panel may be partly unused
  int bits;         // 4, 5, 6, 8 or 32 (float32)
  int block;        // a multiple of `group(bits)` and of 8, at most 128; K for float32
  int scale_bits;   // 8, 16 or 32
  int minimum_bits; // 8, 16, 32, or 0: no minima

  int64_t blocks() const { return inner / block; }
  int64_t of_step() const { return kOfStep / block; }  // blocks
  int64_t steps() const { return (blocks() + of_step() - 1) / of_step(); }
  int64_t blocks_of(int64_t step) const { return step < steps() - 1 ? of_step() : blocks() - step * of_step(); }
  int64_t panels() const { return (columns + kColumns - 1) / kColumns; }
  int64_t panel_bytes() const { return inner * kColumns * bits / 8; }
  // Bytes of the factors of so many blocks of a step, for each column.
  int64_t bytes_of(int64_t some) const {
    return some * (scale_bits + minimum_bits) / 8 + (scale_bits == 8 ? 4 + minimum_bits / 2 : 0);
  }
  int64_t factor_bytes() const {
    return kColumns * ((steps() - 1) * bytes_of(of_step()) + bytes_of(blocks_of(steps() - 1)));
  }
  // The code of 0.
  int32_t center() const { return minimum_bits ? 0 : 1 << (bits - 1); }
};

// Where the factors of a panel's columns lie for the numbers of one step.
struct Places {
  Places(const Weights& w, int64_t panel, int64_t step)
      : blocks(w.blocks_of(step)),
        scales(w.factors + panel * w.factor_bytes() + step * kColumns * w.bytes_of(w.of_step())),
        minima(scales + blocks * kColumns * w.scale_bits / 8),
        step(minima + blocks * kColumns * w.minimum_bits / 8),
        minimum_step(this->step + 4 * kColumns) {}

  int64_t blocks;
  const uint8_t *scales, *minima, *step, *minimum_step;
};

// Returns a number of float16.
inline float from_half(uint16_t half) {
  const int exponent = half >> 10 & 31, fraction = half & 1023;
  const float size = exponent == 31 ? NAN : std::ldexp(static_cast<float>(exponent ? fraction | 1024 : fraction), (exponent ? exponent : 1) - 25);
  return half >> 15 ? -size : size;
}

// How many rows are computed at once where so many are left: at most `most`. Sizes of 5 and 7 are not compiled: the last
// row is computed twice instead, which costs less than rows that are left over.
constexpr int rows_at_once(int most, int64_t left) {
  return left >= most || left > 6 ? most : left > 4 ? 6 : static_cast<int>(left);
}

// The next smaller size that is compiled.
constexpr int fewer_rows(int rows) { return rows == 8 ? 6 : rows == 6 ? 4 : rows - 1; }

// The rows for which `Rows` has room: the last tile may have one more than there are.
constexpr int64_t rows_of_tiles(int most, int64_t rows) {
  return rows % most ? rows - rows % most + rows_at_once(most, rows % most) : rows;
}

// Rows of x, those that are computed at once side by side: [tiles, …, rows of a tile]. `words` has what the instructions
// take for 4 numbers of k, in order: 4 bytes, or 4 numbers of 16 bits as k = 0, 2, 1, 3, or 4 floats. Beside weights in
// float32 it has the rows as they are.
struct Rows {
  char* words;       // [tiles, K / 4, rows of a tile]
  float* scales;     // [tiles, blocks, rows of a tile], as what follows
  float* sums;       // −Σ x_k: whole, and exact, if numbers are rounded
  int32_t* offsets;  // −c Σ x_k, unless nothing is rounded
};

enum class Rounding { kBits8 = 8, kBits16 = 16, kNone = 32 };

// Attention of one layer over the caches of all slots, which the runtime owns and the operator writes.
struct Attention {
  int64_t heads, kv_heads, key_size, value_size, capacity;
  float scale, softcap;  // a softcap of 0 is none
  float* keys;           // [slots, kv_heads, capacity, key_size]
  float* values;         // [slots, kv_heads, capacity, value_size]
  const float* sinks;    // [heads], or null
};

// A head of a node.
struct Head {
  int64_t slot, number;
  const float* query;   // rotated
  const int32_t* rows;  // the cache rows that it sees, in order
  int64_t count;        // of them
  float* scores;        // room for them, and for 15 more
  float* y;
};

// One set of instructions.
struct Instructions {
  const char* name;
  bool (*usable)();
  int rows;  // that are computed at once
  // Numbers of 8 bits are bytes for codes of at most so many bits; for others they take 16 bits as well.
  int byte_bits;
  // Rounds `rows` rows of K numbers to where `Rows` points.
  void (*round)(const Weights&, const float* x, int64_t rows, Rounding, const Rows&);
  // Computes a panel's 16 columns of rows `first` to `last`; y is [rows, N]. Before `first` there are whole tiles.
  void (*panel)(const Weights&, int64_t panel, const Rows&, int64_t first, int64_t last, Rounding, float* y);
  // `functions.h` has both.
  void (*rms_norm)(const float* x, const float* weight, int64_t size, float epsilon, float* y);
  void (*swiglu)(const float* gate, const float* up, int64_t size, float* y);
  void (*attend)(const Attention&, const Head* heads, int64_t number);
};

extern const Instructions kPortable;
#if defined(__x86_64__)
extern const Instructions kAvx2, kVnni;
#elif defined(__aarch64__)
extern const Instructions kNeon;
#endif

// Every set that this build has, the fastest first.
const Instructions* const* all_instructions(int* count);

}  // namespace specbuild
