// TreeConvolution: a short convolution over each node's own path; a row of the caches is a token's numbers.
//
// x [1, T, C], the caches keys [slots, 1, capacity, K] and values [slots, 1, capacity, C - K], which have a row's first K
// numbers and the others, slots int32 [T], rows int32 [T], committed int32 [slots], visible bool [T, W] as TreeAttention
// takes them, weight [C, …, L], whose last column is a node's own, bias [C] -> [1, T, C].
//
// A node's sum runs over its last L rows in order, and over nothing else: its bits depend on its own path alone.
#include <algorithm>
#include <cstring>
#include <memory>

#include "operators.h"

namespace specbuild {
namespace {

struct TreeConvolution {
  static constexpr const char* kName = "TreeConvolution";
  static constexpr OrtElementType kInputs[] = {kOrtFloat, kOrtFloat, kOrtFloat, kOrtInt32, kOrtInt32,
                                               kOrtInt32, kOrtBool,  kOrtFloat, kOrtFloat};
  static constexpr size_t kRequired = 8;

  explicit TreeConvolution(const OrtKernelInfo*) {}

  void compute(OrtKernelContext* context) const {
    const Tensor x = input(context, 0), keys = input(context, 1), values = input(context, 2), slots = input(context, 3);
    const Tensor rows = input(context, 4), committed = input(context, 5), visible = input(context, 6);
    const Tensor weight = input(context, 7), bias = input(context, 8);
    require(x.shape.size() == 3 && keys.shape.size() == 4 && values.shape.size() == 4, "an input has a wrong shape");
    require(visible.shape.size() == 2 && weight.shape.size() >= 2, "an input has a wrong shape");
    const int64_t nodes = product(slots.shape), channels = weight.shape[0], taps = weight.shape.back();
    require(product(weight.shape) == channels * taps, "weight has a wrong shape");
    const int64_t first = keys.shape[3], second = values.shape[3], capacity = keys.shape[2], width = visible.shape[1];
    require(product(x.shape) == nodes * channels && first + second == channels, "x has a wrong shape");
    require(keys.shape[1] == 1 && values.shape == std::vector<int64_t>({keys.shape[0], 1, capacity, second}),
            "the caches have wrong shapes");
    require(product(rows.shape) == nodes && visible.shape[0] == nodes && product(committed.shape) == keys.shape[0],
            "nodes differ in number");
    require(!bias.data || product(bias.shape) == channels, "bias has a wrong shape");
    const auto* slot = static_cast<const int32_t*>(slots.data);
    const auto* row = static_cast<const int32_t*>(rows.data);
    const auto* ends = static_cast<const int32_t*>(committed.data);
    const auto* numbers = static_cast<const float*>(x.data);
    auto* const heads = static_cast<float*>(keys.data);
    auto* const tails = static_cast<float*>(values.data);
    for (int64_t node = 0; node < nodes; ++node) {
      require(slot[node] >= 0 && slot[node] < keys.shape[0] && row[node] >= 0 && row[node] < capacity,
              "a node has no row in a cache");
      require(ends[slot[node]] >= 0 && ends[slot[node]] <= capacity, "committed is out of range");
      const int64_t at = slot[node] * capacity + row[node];
      std::memcpy(heads + at * first, numbers + node * channels, first * sizeof(float));
      std::memcpy(tails + at * second, numbers + node * channels + first, second * sizeof(float));
    }
    const std::unique_ptr<float[]> turned(new float[taps * channels]);
    for (int64_t channel = 0; channel < channels; ++channel)
      for (int64_t tap = 0; tap < taps; ++tap)
        turned[tap * channels + channel] = static_cast<const float*>(weight.data)[channel * taps + tap];
    float* const y = output(context, {1, nodes, channels});
    parallel(context, nodes, [&](int64_t node) {
      // The last rows that the node sees, the newest first.
      std::vector<int64_t> seen;
      const int32_t end = ends[slot[node]];
      const bool* marks = static_cast<const bool*>(visible.data) + node * width;
      for (int64_t at = std::min(width, capacity - end); at-- && static_cast<int64_t>(seen.size()) < taps;)
        if (marks[at]) seen.push_back(end + at);
      for (int64_t at = end; at-- && static_cast<int64_t>(seen.size()) < taps;) seen.push_back(at);
      float* const sums = y + node * channels;
      if (bias.data) std::memcpy(sums, bias.data, channels * sizeof(float));
      else std::fill(sums, sums + channels, 0.0f);
      for (int64_t back = static_cast<int64_t>(seen.size()); back--;) {
        const float* factors = turned.get() + (taps - 1 - back) * channels;
        const int64_t at = slot[node] * capacity + seen[back];
        for (int64_t c = 0; c < first; ++c) sums[c] += factors[c] * heads[at * first + c];
        for (int64_t c = 0; c < second; ++c) sums[first + c] += factors[first + c] * tails[at * second + c];
      }
    });
  }
};

}  // namespace

OrtCustomOp tree_convolution() { return describe<TreeConvolution>(); }

}  // namespace specbuild
