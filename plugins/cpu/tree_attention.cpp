// TreeAttention: rotates queries and keys, writes keys and values into the caches, and attends.
//
// query [1, T, heads · key_size], key and value alike (left out if query has all three, one after another), the caches
// keys and values [slots, kv_heads, capacity, size], slots int32 [T], rows int32 [T]: each node's slot and cache row,
// committed int32 [slots]: the rows that all nodes of a slot see, visible bool [T, W]: which of the rows from there on a
// node sees, positions int64 [1, T], cos and sin [positions, n] (for heads whose first 2 n numbers are rotated by halves),
// row_positions int32 [slots, capacity] (with a window alone), sinks [heads] -> [1, T, heads · value_size].
//
// Attributes: heads, kv_heads, key_size, value_size, window (positions; 0: all; −c: those of its chunk of c), scale,
// softcap, instructions.
#include <algorithm>
#include <cstring>
#include <memory>

#include "operators.h"

namespace specbuild {
namespace {

struct TreeAttention {
  static constexpr const char* kName = "TreeAttention";
  static constexpr OrtElementType kInputs[] = {
      kOrtFloat, kOrtFloat, kOrtFloat, kOrtFloat, kOrtFloat, kOrtInt32, kOrtInt32,
      kOrtInt32, kOrtBool,  kOrtInt64, kOrtFloat, kOrtFloat, kOrtInt32, kOrtFloat};
  static constexpr size_t kRequired = 1;  // a left out key has others after it

  explicit TreeAttention(const OrtKernelInfo* info)
      : heads(attribute(info, "heads")),
        kv_heads(attribute(info, "kv_heads")),
        key_size(attribute(info, "key_size")),
        value_size(attribute(info, "value_size")),
        window(attribute(info, "window")),
        scale(attribute<float>(info, "scale")),
        softcap(attribute<float>(info, "softcap")),
        uses(instructions_of(attribute(info, "instructions"))) {
    require(kv_heads > 0 && heads > 0 && heads % kv_heads == 0, "heads must be a multiple of kv_heads");
    require(key_size > 0 && value_size > 0, "heads must have a size");
    require(heads <= kMost && key_size <= kMost && value_size <= kMost, "there are too many heads, or they are too large");
  }

  // What a step gives: pointers into the inputs.
  struct Step {
    int64_t nodes, slots, width, table;  // `width` of visible; `table`: n of cos
    const float *query, *key, *value, *cos, *sin;
    int64_t query_stride, key_stride, value_stride;
    const int32_t *slot, *row, *committed, *row_positions;
    const bool* visible;
    const int64_t* positions;
    Attention attention;
  };

  void compute(OrtKernelContext* context) const {
    const Step step = read(context);
    float* y = output(context, {1, step.nodes, heads * value_size});
    if (!step.nodes) return;
    const std::unique_ptr<float[]> queries(new float[step.nodes * heads * key_size]);
    for (int64_t node = 0; node < step.nodes; ++node) write(step, node, queries.get());
    // A task has some nodes, and of the heads that share a key's all, or some where there are few nodes.
    const int64_t group = heads / kv_heads, together = std::clamp<int64_t>(step.nodes * heads / kTasks, 1, group);
    const int64_t parts = (group + together - 1) / together, chunks = (step.nodes + kNodes - 1) / kNodes;
    parallel(context, kv_heads * parts * chunks, [&](int64_t task) {
      const int64_t first = task / chunks / parts * group + task / chunks % parts * together;
      const int64_t end = std::min(first + together, (first / group + 1) * group), node = task % chunks * kNodes;
      attend(step, node, std::min(step.nodes, node + kNodes), first, end, queries.get(), y);
    });
  }

 private:
  static constexpr int64_t kTasks = 8;  // at least, if there are as many heads
  static constexpr int64_t kNodes = 8;  // of a task: they read the same cache rows, one after another
  static constexpr int64_t kMost = 1 << 16;

  Step read(OrtKernelContext* context) const {
    const Tensor query = input(context, 0), key = input(context, 1), value = input(context, 2);
    const Tensor keys = input(context, 3), values = input(context, 4), slot = input(context, 5), row = input(context, 6);
    const Tensor committed = input(context, 7), visible = input(context, 8), positions = input(context, 9);
    const Tensor cos = input(context, 10), sin = input(context, 11), row_positions = input(context, 12);
    const Tensor sinks = input(context, 13);
    Step step{};
    require(keys.data && values.data && slot.data && row.data && committed.data && positions.data, "an input is missing");
    require(!key.data == !value.data, "key and value come together");
    require(keys.shape.size() == 4 && values.shape.size() == 4 && visible.shape.size() == 2, "an input has a wrong shape");
    step.nodes = product(slot.shape);
    step.slots = keys.shape[0];
    step.width = visible.shape[1];
    const int64_t capacity = keys.shape[2], q = heads * key_size, k = kv_heads * key_size, v = kv_heads * value_size;
    require(keys.shape == std::vector<int64_t>({step.slots, kv_heads, capacity, key_size}), "keys have a wrong shape");
    require(values.shape == std::vector<int64_t>({step.slots, kv_heads, capacity, value_size}), "values have a wrong shape");
    require(product(row.shape) == step.nodes && product(positions.shape) == step.nodes && visible.shape[0] == step.nodes &&
                product(committed.shape) == step.slots,
            "nodes differ in number");
    require(product(query.shape) == step.nodes * (key.data ? q : q + k + v), "query has a wrong shape");
    require(!key.data || (product(key.shape) == step.nodes * k && product(value.shape) == step.nodes * v),
            "key or value has a wrong shape");
    require(!window || (row_positions.data && product(row_positions.shape) == step.slots * capacity),
            "a window needs row_positions");
    require(!sinks.data || product(sinks.shape) == heads, "sinks have a wrong shape");
    step.query = static_cast<const float*>(query.data);
    step.key = key.data ? static_cast<const float*>(key.data) : step.query + q;
    step.value = key.data ? static_cast<const float*>(value.data) : step.query + q + k;
    step.query_stride = key.data ? q : q + k + v;
    step.key_stride = key.data ? k : step.query_stride;
    step.value_stride = key.data ? v : step.query_stride;
    step.slot = static_cast<const int32_t*>(slot.data);
    step.row = static_cast<const int32_t*>(row.data);
    step.committed = static_cast<const int32_t*>(committed.data);
    step.visible = static_cast<const bool*>(visible.data);
    step.positions = static_cast<const int64_t*>(positions.data);
    step.row_positions = static_cast<const int32_t*>(row_positions.data);
    step.attention = {heads, kv_heads, key_size, value_size, capacity, scale, softcap, static_cast<float*>(keys.data),
                      static_cast<float*>(values.data), static_cast<const float*>(sinks.data)};
    for (int64_t node = 0; node < step.nodes; ++node)
      require(step.slot[node] >= 0 && step.slot[node] < step.slots && step.row[node] >= 0 && step.row[node] < capacity,
              "a node has no row in a cache");
    for (int64_t each = 0; each < step.slots; ++each)
      require(step.committed[each] >= 0 && step.committed[each] <= capacity, "committed is out of range");
    if (!cos.data) return step;
    require(cos.shape.size() == 2 && cos.shape == sin.shape && 2 * cos.shape[1] <= key_size, "cos and sin do not fit");
    for (int64_t node = 0; node < step.nodes; ++node)
      require(step.positions[node] >= 0 && step.positions[node] < cos.shape[0], "a position is out of range");
    step.cos = static_cast<const float*>(cos.data);
    step.sin = static_cast<const float*>(sin.data);
    step.table = cos.shape[1];
    return step;
  }

  // Rotates a node's queries, and writes its keys, rotated, and its values.
  void write(const Step& step, int64_t node, float* queries) const {
    const Attention& a = step.attention;
    for (int64_t head = 0; head < heads; ++head)
      rotate(step, node, step.query + node * step.query_stride + head * key_size, queries + (node * heads + head) * key_size);
    for (int64_t head = 0; head < kv_heads; ++head) {
      const int64_t at = (step.slot[node] * kv_heads + head) * a.capacity + step.row[node];
      rotate(step, node, step.key + node * step.key_stride + head * key_size, a.keys + at * key_size);
      const float* value = step.value + node * step.value_stride + head * value_size;
      std::memcpy(a.values + at * value_size, value, value_size * sizeof(float));
    }
  }

  void rotate(const Step& step, int64_t node, const float* x, float* y) const {
    const int64_t half = step.table;
    for (int64_t d = 0; d < half; ++d) {
      const float c = step.cos[step.positions[node] * half + d], s = step.sin[step.positions[node] * half + d];
      y[d] = x[d] * c - x[half + d] * s;
      y[half + d] = x[half + d] * c + x[d] * s;
    }
    std::copy(x + 2 * half, x + key_size, y + 2 * half);
  }

  // Computes heads of nodes from `node` to `last`.
  void attend(const Step& step, int64_t node, int64_t last, int64_t first, int64_t end, const float* queries, float* y) const {
    std::vector<std::vector<int32_t>> rows(last - node);
    std::vector<Head> each;
    int64_t room = 0;
    for (int64_t at = node; at < last; ++at) {
      see(step, at, rows[at - node]);
      room += (end - first) * (static_cast<int64_t>(rows[at - node].size()) + kColumns - 1);
    }
    const std::unique_ptr<float[]> scores(new float[room]);
    float* free = scores.get();
    for (int64_t at = node; at < last; ++at) {
      const std::vector<int32_t>& seen = rows[at - node];
      const int64_t count = static_cast<int64_t>(seen.size());
      for (int64_t head = first; head < end; ++head, free += count + kColumns - 1) {
        const int64_t unit = at * heads + head;
        each.push_back({step.slot[at], head, queries + unit * key_size, seen.data(), count, free, y + unit * value_size});
      }
    }
    uses.attend(step.attention, each.data(), static_cast<int64_t>(each.size()));
  }

  // Lists the cache rows that a node sees, in order.
  void see(const Step& step, int64_t node, std::vector<int32_t>& rows) const {
    const int32_t slot = step.slot[node], committed = step.committed[slot];
    const int32_t* positions = window ? step.row_positions + slot * step.attention.capacity : nullptr;
    const bool* visible = step.visible + node * step.width;
    const int64_t own = step.positions[node];
    const auto near = [&](int32_t row) {
      return !window || (window > 0 ? own - positions[row] < window : own / -window == positions[row] / -window);
    };
    rows.clear();
    for (int32_t row = 0; row < committed; ++row)
      if (near(row)) rows.push_back(row);
    const int32_t end = static_cast<int32_t>(std::min<int64_t>(step.width, step.attention.capacity - committed));
    for (int32_t at = 0; at < end; ++at)
      if (visible[at] && near(committed + at)) rows.push_back(committed + at);
  }

  int64_t heads, kv_heads, key_size, value_size, window;
  float scale, softcap;
  const Instructions& uses;
};

}  // namespace

OrtCustomOp tree_attention() { return describe<TreeAttention>(); }

}  // namespace specbuild
