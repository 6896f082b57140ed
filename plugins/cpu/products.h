// Products of rows with block-quantized weights. A row's sums have one fixed order, whatever rows are beside it and
// whatever instructions compute them: its bits are those of the row alone, on every processor.
//
//   y[n] = Σ_b s_b · (S[n, b] · float(Σ_k x_k (q[n, k] − c)) − M[n, b] · float(Σ_k x_k))
//
// b runs over the blocks of k in order, each step one fused multiply-add in float32. x_k are the row's numbers, rounded
// to 8 or 16 bits with one scale s_b per block, so that the sums over k are exact integers; or float32, in which case
// s_b = 1 and the sums over k are fused multiply-adds in order of k. q are codes of 4 or 8 bits around c = 8 or 128, S
// their scales, and M, if there are any, their minima.
#pragma once

#include <cstdint>

namespace specbuild {

constexpr int kColumns = 16;  // of a panel

// Weights as they are packed when a bundle is built, in panels of 16 columns. A panel has 64 bytes for every 4 codes of
// k (8 bits: byte 4 n + k) or 8 codes of k (4 bits: byte 4 n + k % 4, the second four in the high halves).
struct Weights {
  const uint8_t* codes;
  const float* scales;  // [panels, blocks, 16]
  const float* minima;  // the same, or null
  int64_t inner;        // K, a multiple of `block`
  int64_t columns;      // N; the last panel may be partly unused
  int bits;             // 4, 8 or 32 (float32)
  int block;            // a multiple of 8, at most 128; K for float32

  int64_t blocks() const { return inner / block; }
  int64_t panels() const { return (columns + kColumns - 1) / kColumns; }
  int64_t panel_bytes() const { return inner * kColumns * bits / 8; }
};

// The code of 0.
constexpr int32_t center(int bits) { return 1 << (bits - 1); }

// Rows of x. `words` has what the instructions take for 4 numbers of k, in order: 4 bytes, or 4 numbers of 16 bits as
// k = 0, 2, 1, 3, or 4 floats.
struct Rows {
  const void* words;
  float* scales;     // [rows, blocks]
  float* sums;       // [rows, blocks], of the rounded numbers: whole, and exact
  int32_t* offsets;  // [rows, blocks]: −c · sums, unless nothing is rounded
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

// One set of instructions.
struct Instructions {
  const char* name;
  bool (*usable)();
  // Whether 8 bits are kept as bytes; else they take 16 bits as well.
  bool bytes;
  // Rounds rows of K numbers into `words` and what else `Rows` points to.
  void (*round)(const Weights&, const float* x, int64_t rows, Rounding, void* words, const Rows&);
  // Computes a panel's 16 columns of rows `first` to `last`; y is [rows, N].
  void (*panel)(const Weights&, int64_t panel, const Rows&, int64_t first, int64_t last, Rounding, float* y);
  // Computes one head of one node. `rows` are the cache rows that it sees, in order; `scores` has room for as many.
  void (*attend)(const Attention&, int64_t slot, int64_t head, const float* q, const int32_t* rows, int64_t count,
                 float* scores, float* y);
};

extern const Instructions kPortable;
#if defined(__x86_64__)
extern const Instructions kAvx2, kAvx512, kVnni;
#elif defined(__aarch64__)
extern const Instructions kNeon;
#endif

// Every set that this build has, the fastest first.
const Instructions* const* all_instructions(int* count);

}  // namespace specbuild
