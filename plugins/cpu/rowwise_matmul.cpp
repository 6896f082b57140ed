// RowwiseMatMul(x [..., K], codes uint8, factors uint8?, _, norm [K]?, bias [N]?, residual [..., N]?) -> [..., N]:
// products.h. What stands around a product is computed with it, while its numbers are in a thread's cache: RMSNorm of x
// before, with the weight `norm` and the attribute epsilon; after it a bias and a residual sum; or, with the attribute
// gated, SwiGLU of the first and the second half of the columns, which leaves [..., N / 2].
// RowwiseMatMul(x [R, K], codes, factors?, experts int64 [S]) -> [S, N]: there is a weight for each expert, one after
// another; row s is row s · R / S of x, by the weight of its expert. S is a multiple of R.
// RowwiseGather(ids int64 [...], codes, factors?) -> [..., K]: columns of the same weights, in float32.
//
// Attributes: inner (K), columns (N), bits, block, scale_bits, minimum_bits; of RowwiseMatMul also rounding (8, 16 or 32)
// and, for tests, instructions: an index into `all_instructions`, -1 for the fastest that the processor has.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "operators.h"

namespace specbuild {
namespace {

constexpr int64_t kTaskBytes = 128 * 1024;  // of weights that a thread takes at a time: they stay in its cache
constexpr int64_t kMostNumbers = 1 << 24;   // of a side of a weight
constexpr int64_t kRowBytes = 128 * 1024;   // of rows that are computed with them before the next rows

// What both operators know of their weights.
struct Packing {
  explicit Packing(const OrtKernelInfo* info) {
    weights.inner = attribute(info, "inner");
    weights.columns = attribute(info, "columns");
    weights.bits = static_cast<int>(attribute(info, "bits"));
    weights.block = static_cast<int>(attribute(info, "block"));
    weights.scale_bits = static_cast<int>(attribute(info, "scale_bits"));
    weights.minimum_bits = static_cast<int>(attribute(info, "minimum_bits"));
    const int bits = weights.bits, block = weights.block, scale = weights.scale_bits, minimum = weights.minimum_bits;
    require(bits == 4 || bits == 5 || bits == 6 || bits == 8 || bits == 32, "bits must be 4, 5, 6, 8 or 32");
    require(scale == 8 || scale == 16 || scale == 32, "scale_bits must be 8, 16 or 32");
    require(minimum == 0 || minimum == 8 || (scale != 8 && (minimum == 16 || minimum == 32)),
            "minimum_bits must be 0, 8, 16 or 32, and 0 or 8 beside scales of 8 bits");
    require(weights.inner > 0 && weights.columns > 0 && block > 0, "inner, columns and block must be positive");
    require(weights.inner <= kMostNumbers && weights.columns <= kMostNumbers, "inner or columns is too large");
    require(bits == 32 || block == 16 || block == 32 || block == 64 || block == 128, "block must be 16, 32, 64 or 128");
    require(bits != 5 || block >= 32, "block must be 32 or more for codes of 5 bits");
    require(weights.inner % block == 0, "inner must be whole blocks");
  }

  Weights of(OrtKernelContext* context, int64_t experts = 1) const {
    const Tensor codes = input(context, 1), factors = input(context, 2);
    Weights found = weights;
    const int64_t panels = experts * found.panels();
    require(product(codes.shape) == panels * found.panel_bytes(), "codes are not as many as the attributes say");
    require(found.bits == 32 || product(factors.shape) == panels * found.factor_bytes(), "factors are not as many as the attributes say");
    found.codes = static_cast<const uint8_t*>(codes.data);
    found.factors = static_cast<const uint8_t*>(factors.data);
    return found;
  }

  Weights weights{};
};

// The weight of one of several experts.
Weights weight_of(Weights w, int64_t expert) {
  w.codes += expert * w.panels() * w.panel_bytes();
  if (w.factors) w.factors += expert * w.panels() * w.factor_bytes();
  return w;
}

struct MatMul {
  static constexpr const char* kName = "RowwiseMatMul";
  static constexpr OrtElementType kInputs[] = {kOrtFloat, kOrtUint8, kOrtUint8, kOrtInt64, kOrtFloat, kOrtFloat, kOrtFloat};
  static constexpr size_t kRequired = 2;

  explicit MatMul(const OrtKernelInfo* info)
      : packing(info), rounding(Rounding(attribute(info, "rounding"))), epsilon(attribute_or(info, "epsilon", 0.0f)),
        halves(attribute_or<int64_t>(info, "gated", 0) ? 2 : 1), uses(instructions_of(attribute(info, "instructions"))) {
    const int64_t bits = attribute(info, "rounding");
    require(bits == 8 || bits == 16 || bits == 32, "rounding must be 8, 16 or 32");
    require(halves == 1 || packing.weights.columns % (2 * kColumns) == 0, "gated columns must be whole panels in each half");
  }

  void compute(OrtKernelContext* context) const {
    const Tensor x = input(context, 0), chosen = input(context, 3);
    if (chosen.data) return by_experts(context, x, chosen);
    const Weights w = packing.of(context);
    require(!x.shape.empty() && x.shape.back() == w.inner, "the input's last axis must be `inner` long");
    std::vector<int64_t> shape = x.shape;
    shape.back() = w.columns / halves;
    const int64_t rows = product(x.shape) / w.inner;
    const Around around{floats(context, 4, w.inner, "norm"), floats(context, 5, w.columns, "bias"),
                        floats(context, 6, rows * w.columns, "residual")};
    require(halves == 1 || !around.residual, "a gated product has no residual sum");
    float* y = output(context, shape);
    if (rows) multiply(context, w, static_cast<const float*>(x.data), rows, around, y);
  }

  // What stands around a product: a null is not there.
  struct Around {
    const float *norm, *bias, *residual;
  };

  static const float* floats(OrtKernelContext* context, size_t index, int64_t size, const char* name) {
    const Tensor found = input(context, index);
    if (found.data && product(found.shape) != size) throw Failure{ort().status((std::string(name) + " has another size").c_str())};
    return static_cast<const float*>(found.data);
  }

  // Brings rows of one expert together, so that each weight that is chosen is read once.
  void by_experts(OrtKernelContext* context, const Tensor& x, const Tensor& chosen) const {
    const int64_t inner = packing.weights.inner, columns = packing.weights.columns;
    const Tensor codes = input(context, 1);
    const int64_t experts = product(codes.shape) / (packing.weights.panels() * packing.weights.panel_bytes());
    const Weights w = packing.of(context, experts);
    const int64_t given = product(x.shape) / inner, rows = product(chosen.shape);
    require(!x.shape.empty() && x.shape.back() == inner, "the input's last axis must be `inner` long");
    require(given ? rows % given == 0 : !rows, "experts are not as many as the rows ask for");
    float* y = output(context, {rows, columns});
    if (!rows) return;
    const auto* expert = static_cast<const int64_t*>(chosen.data);
    std::vector<int64_t> ends(experts, 0), order(rows);
    for (int64_t row = 0; row < rows; ++row) {
      require(expert[row] >= 0 && expert[row] < experts, "there is no such expert");
      ++ends[expert[row]];
    }
    for (int64_t each = 1; each < experts; ++each) ends[each] += ends[each - 1];
    for (int64_t row = rows; row--;) order[--ends[expert[row]]] = row;
    const std::unique_ptr<float[]> sorted(new float[rows * inner]), products(new float[rows * columns]);
    for (int64_t at = 0; at < rows; ++at) {
      const float* from = static_cast<const float*>(x.data) + order[at] / (rows / given) * inner;
      std::memcpy(sorted.get() + at * inner, from, inner * sizeof(float));
    }
    struct Part {
      int64_t expert, first, last, place;  // where its tiles begin
    };
    std::vector<Part> parts;
    int64_t places = 0;
    for (int64_t at = 0, end; at < rows; at = end) {
      for (end = at + 1; end < rows && expert[order[end]] == expert[order[at]];) ++end;
      parts.push_back({expert[order[at]], at, end, places});
      places += rows_of_tiles(uses.rows, end - at);
    }
    const Rounded rounded(w, places, row_bytes(w));
    parallel(context, static_cast<int64_t>(parts.size()), [&](int64_t part) {
      const auto [_, first, last, place] = parts[part];
      round(w, sorted.get() + first * inner, last - first, rounded.from(w, place));
    });
    const int64_t panels = std::max<int64_t>(1, kTaskBytes / w.panel_bytes()), tasks = (w.panels() + panels - 1) / panels;
    parallel(context, tasks * static_cast<int64_t>(parts.size()), [&](int64_t task) {
      const Part& part = parts[task / tasks];
      const Weights own = weight_of(w, part.expert);
      const int64_t first = task % tasks * panels, last = std::min(w.panels(), first + panels);
      for (int64_t panel = first; panel < last; ++panel)
        uses.panel(own, panel, rounded.from(w, part.place), 0, part.last - part.first, rounding, products.get() + part.first * columns);
    });
    for (int64_t at = 0; at < rows; ++at)
      std::memcpy(y + order[at] * columns, products.get() + at * columns, columns * sizeof(float));
  }

  // Rows of x as the instructions take them.
  struct Rounded {
    Rounded(const Weights& w, int64_t rows, int64_t row_bytes)
        : row_bytes(row_bytes), words(new char[rows * row_bytes]), numbers(new float[2 * rows * w.blocks()]), offsets(new int32_t[rows * w.blocks()]), rows(rows) {}

    Rows from(const Weights& w, int64_t row) const {
      const int64_t block = row * w.blocks();
      return {words.get() + row * row_bytes, numbers.get() + block, numbers.get() + rows * w.blocks() + block, offsets.get() + block};
    }

    int64_t row_bytes;
    std::unique_ptr<char[]> words;
    std::unique_ptr<float[]> numbers;  // scales, and sums
    std::unique_ptr<int32_t[]> offsets;
    int64_t rows;
  };

  int64_t row_bytes(const Weights& w) const {
    return w.inner * (w.bits == 32 || rounding == Rounding::kNone ? 4 : rounding == Rounding::kBits8 && w.bits <= uses.byte_bits ? 1 : 2);
  }

  void round(const Weights& w, const float* x, int64_t rows, const Rows& to, const float* norm = nullptr) const {
    const std::unique_ptr<float[]> normed(norm ? new float[rows * w.inner] : nullptr);
    for (int64_t at = 0; norm && at < rows * w.inner; at += w.inner) uses.rms_norm(x + at, norm, w.inner, epsilon, normed.get() + at);
    uses.round(w, norm ? normed.get() : x, rows, rounding, to);
  }

  // As many rows as are whole tiles.
  int64_t tiles_of(int64_t rows) const { return std::max<int64_t>(1, rows / uses.rows) * uses.rows; }

  void multiply(OrtKernelContext* context, const Weights& w, const float* x, int64_t rows, const Around& around, float* y) const {
    const Rounded rounded(w, rows_of_tiles(uses.rows, rows), row_bytes(w));
    const int64_t at_once = tiles_of(kTaskBytes / (4 * w.inner));
    parallel(context, (rows + at_once - 1) / at_once, [&](int64_t part) {
      const int64_t first = part * at_once;
      round(w, x + first * w.inner, std::min(rows - first, at_once), rounded.from(w, first), around.norm);
    });
    const std::unique_ptr<float[]> both(halves > 1 ? new float[rows * w.columns] : nullptr);
    float* const products = halves > 1 ? both.get() : y;
    const int64_t of_half = w.panels() / halves, panels = std::max<int64_t>(1, kTaskBytes / (halves * w.panel_bytes()));
    const int64_t in_cache = tiles_of(std::max<int64_t>(16, kRowBytes / rounded.row_bytes));
    parallel(context, (of_half + panels - 1) / panels, [&](int64_t task) {
      const int64_t begin = task * panels, end = std::min(of_half, begin + panels);
      for (int64_t row = 0; row < rows; row += in_cache) {
        const int64_t last = std::min(rows, row + in_cache);
        for (int64_t panel = begin; panel < end; ++panel)
          for (int64_t half = 0; half < halves; ++half)
            uses.panel(w, half * of_half + panel, rounded.from(w, 0), row, last, rounding, products);
        finish(w, row, last, begin * kColumns, std::min(w.columns / halves, end * kColumns), around, products, y);
      }
    });
  }

  // Computes what comes after a product in some rows and columns.
  void finish(const Weights& w, int64_t row, int64_t last, int64_t begin, int64_t end, const Around& around, float* products, float* y) const {
    const int64_t columns = w.columns / halves;
    for (; row < last; ++row) {
      float* const product = products + row * w.columns;
      for (int64_t of = 0; around.bias && of < w.columns; of += columns) add(around.bias + of + begin, end - begin, product + of + begin);
      if (around.residual) add(around.residual + row * columns + begin, end - begin, product + begin);
      if (halves > 1) uses.swiglu(product + begin, product + columns + begin, end - begin, y + row * columns + begin);
    }
  }

  static void add(const float* x, int64_t size, float* y) {
    for (int64_t n = 0; n < size; ++n) y[n] += x[n];
  }

  Packing packing;
  Rounding rounding;
  float epsilon;
  int64_t halves;  // of the columns: 2 if they are gated
  const Instructions& uses;
};

struct Gather {
  static constexpr const char* kName = "RowwiseGather";
  static constexpr OrtElementType kInputs[] = {kOrtInt64, kOrtUint8, kOrtUint8};
  static constexpr size_t kRequired = 2;

  explicit Gather(const OrtKernelInfo* info) : packing(info) {}

  void compute(OrtKernelContext* context) const {
    const Weights w = packing.of(context);
    const Tensor ids = input(context, 0);
    std::vector<int64_t> shape = ids.shape;
    shape.push_back(w.inner);
    float* y = output(context, shape);
    const auto* column = static_cast<const int64_t*>(ids.data);
    for (int64_t at = 0, count = product(ids.shape); at < count; ++at, y += w.inner) {
      require(column[at] >= 0 && column[at] < w.columns, "an id is out of range");
      copy(w, column[at], y);
    }
  }

  static void copy(const Weights& w, int64_t column, float* y) {
    const int64_t panel = column / kColumns, lane = column % kColumns;
    const uint8_t* codes = w.codes + panel * w.panel_bytes() + 4 * lane;
    if (w.bits == 32) {
      for (int64_t k = 0; k < w.inner; ++k) std::memcpy(y + k, codes + 64 * k, 4);
      return;
    }
    for (int64_t step = 0, k = 0; step < w.steps(); ++step) {
      const Places places(w, panel, step);
      for (int64_t block = 0; block < places.blocks; ++block) {
        float scale = factor(places.scales, w.scale_bits, block, lane);
        if (w.scale_bits == 8) scale *= factor(places.step, 32, 0, lane);
        float minimum = w.minimum_bits ? factor(places.minima, w.minimum_bits, block, lane) : 0;
        if (w.minimum_bits == 8) minimum *= w.scale_bits == 8 ? factor(places.minimum_step, 32, 0, lane) : scale;
        for (const int64_t end = k + w.block; k < end; ++k)
          y[k] = static_cast<float>(code(codes, w.bits, k) - w.center()) * scale - minimum;
      }
    }
  }

  static float factor(const uint8_t* numbers, int bits, int64_t block, int64_t lane) {
    const uint8_t* at = numbers + (block * kColumns + lane) * bits / 8;
    if (bits == 8) return static_cast<int8_t>(*at);
    uint16_t half;
    float number;
    std::memcpy(&half, at, 2);
    if (bits == 16) return from_half(half);
    std::memcpy(&number, at, 4);
    return number;
  }

  // The code of a column, whose bytes begin at `codes`.
  static int code(const uint8_t* codes, int bits, int64_t k) {
    const int of_group = group(bits), four = static_cast<int>(k % of_group) / 4;
    codes += k / of_group * 2 * bits * of_group + k % 4;
    if (bits == 8) return codes[64 * four];
    const int low = codes[64 * (four / 2)] >> 4 * (four % 2) & 15;
    return bits == 4 ? low : low | (codes[8 * of_group] >> four * (bits - 4) & ((1 << (bits - 4)) - 1)) << 4;
  }

  Packing packing;
};

}  // namespace

OrtCustomOp rowwise_mat_mul() { return describe<MatMul>(); }
OrtCustomOp rowwise_gather() { return describe<Gather>(); }

}  // namespace specbuild
