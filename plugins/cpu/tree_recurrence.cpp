// TreeRecurrence: a state for each head, of which a node's own path makes the node's; a row of the caches is an input.
//
// query and key [1, T, G, K], value [1, T, H, V], decay [1, T, H] or [1, T, H, K], beta [1, T, H] of H heads, H / G for
// each of query and key; states [slots, H · K · V]; keys [slots, 1, capacity, G · K + a node's decay + H], which have a
// row's key, decay and beta, and values [slots, 1, capacity, H · V]; slots, rows, committed, visible as TreeAttention takes
// them; state_rows int32 [slots], the rows that a slot's states are made of -> [1, T, H, V].
//
// A head's state S [K, V] of a node is S' + key ⊗ beta (value − delta · key S'), S' its parent's times decay; the node's
// output is query S. The states are those of the committed rows when the step ends; the nodes' own are not stored.
//
// A node's sums run over the rows of its own path in order: its bits depend on nothing else.
#include <algorithm>
#include <cstring>
#include <memory>

#include "operators.h"

namespace specbuild {
namespace {

constexpr int64_t kColumns = 32;  // of V together: a state's part stays in the first cache

// What a node does to `kColumns` columns of a state [K, kColumns].
struct Update {
  const float *key, *decay, *value;
  float beta;
};

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) // as wide as the processor is: no sum changes
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
void advance(float* __restrict state, const Update& update, int64_t size, bool many_decays, bool delta,
             const float* __restrict query, float* __restrict y) {
  float change[kColumns], sums[kColumns];
  for (int64_t c = 0; c < kColumns; ++c) sums[c] = 0.0f;
  for (int64_t k = 0; k < size; ++k) {
    const float decay = update.decay[many_decays ? k : 0], key = update.key[k];
    float* row = state + k * kColumns;
    for (int64_t c = 0; c < kColumns; ++c) {
      row[c] *= decay;
      sums[c] += key * row[c];
    }
  }
  for (int64_t c = 0; c < kColumns; ++c) {
    change[c] = update.beta * (delta ? update.value[c] - sums[c] : update.value[c]);
    sums[c] = 0.0f;
  }
  for (int64_t k = 0; k < size; ++k) {
    const float key = update.key[k], asked = query ? query[k] : 0.0f;
    float* row = state + k * kColumns;
    for (int64_t c = 0; c < kColumns; ++c) {
      row[c] += key * change[c];
      sums[c] += asked * row[c];
    }
  }
  if (y)
    for (int64_t c = 0; c < kColumns; ++c) y[c] = sums[c];
}

struct TreeRecurrence {
  static constexpr const char* kName = "TreeRecurrence";
  static constexpr OrtElementType kInputs[] = {kOrtFloat, kOrtFloat, kOrtFloat, kOrtFloat, kOrtFloat, kOrtFloat, kOrtFloat,
                                               kOrtFloat, kOrtInt32, kOrtInt32, kOrtInt32, kOrtBool,  kOrtInt32};
  static constexpr size_t kRequired = 13;

  explicit TreeRecurrence(const OrtKernelInfo* info) : delta(attribute(info, "delta") != 0) {}

  // A node of a step: where its parent's state comes from, and whether another than the next node needs its own.
  struct Node {
    int64_t number;
    int64_t parent = -1;             // among the slot's nodes; −1: `path` leads to it from the committed rows
    std::vector<int64_t> path;       // rows of an earlier step
    int64_t saved = -1;              // the place of its state among those that are saved
  };

  struct Step {
    int64_t nodes, slots, capacity, width, heads, groups, size, columns, decays, key_row;
    const float* query;
    float *states, *keys, *values, *y;
    const int32_t *slot, *row, *committed, *state_rows;
    const bool* visible;
  };

  void compute(OrtKernelContext* context) const {
    const Step step = read(context);
    std::vector<std::vector<Node>> trees(step.slots);
    for (int64_t node = 0; node < step.nodes; ++node) trees[step.slot[node]].push_back({node, -1, {}, -1});
    std::vector<int64_t> active;
    for (int64_t slot = 0; slot < step.slots; ++slot)
      if (!trees[slot].empty()) {
        connect(step, slot, trees[slot]);
        active.push_back(slot);
      }
    const int64_t blocks = (step.columns + kColumns - 1) / kColumns, each = step.heads * blocks;
    parallel(context, static_cast<int64_t>(active.size()) * each, [&](int64_t task) {
      const int64_t slot = active[task / each];
      run(step, slot, task % each / blocks, task % blocks * kColumns, trees[slot]);
    });
  }

 private:
  Step read(OrtKernelContext* context) const {
    const Tensor query = input(context, 0), key = input(context, 1), value = input(context, 2), decay = input(context, 3);
    const Tensor beta = input(context, 4), states = input(context, 5), keys = input(context, 6), values = input(context, 7);
    const Tensor slot = input(context, 8), row = input(context, 9), committed = input(context, 10);
    const Tensor visible = input(context, 11), state_rows = input(context, 12);
    require(key.shape.size() == 4 && value.shape.size() == 4 && keys.shape.size() == 4 && values.shape.size() == 4 &&
                visible.shape.size() == 2,
            "an input has a wrong shape");
    Step step{};
    step.nodes = product(slot.shape);
    step.slots = keys.shape[0];
    step.capacity = keys.shape[2];
    step.width = visible.shape[1];
    step.groups = key.shape[2];
    step.size = key.shape[3];
    step.heads = value.shape[2];
    step.columns = value.shape[3];
    const int64_t wide = step.groups * step.size, high = step.heads * step.columns;
    require(wide > 0 && high > 0 && step.heads % step.groups == 0, "heads must be a multiple of those of key");
    require(query.shape == key.shape && product(key.shape) == step.nodes * wide, "query or key has a wrong shape");
    require(product(value.shape) == step.nodes * high, "value has a wrong shape");
    step.decays = decay.shape.size() == 4 ? step.size : 1;
    require(product(decay.shape) == step.nodes * step.heads * step.decays && product(beta.shape) == step.nodes * step.heads,
            "decay or beta has a wrong shape");
    step.key_row = wide + step.heads * step.decays + step.heads;
    require(keys.shape == std::vector<int64_t>({step.slots, 1, step.capacity, step.key_row}), "keys have a wrong shape");
    require(values.shape == std::vector<int64_t>({step.slots, 1, step.capacity, high}), "values have a wrong shape");
    require(product(states.shape) == step.slots * high * step.size, "states have a wrong shape");
    require(product(row.shape) == step.nodes && visible.shape[0] == step.nodes && product(committed.shape) == step.slots &&
                product(state_rows.shape) == step.slots,
            "nodes differ in number");
    step.query = static_cast<const float*>(query.data);
    step.states = static_cast<float*>(states.data);
    step.keys = static_cast<float*>(keys.data);
    step.values = static_cast<float*>(values.data);
    step.slot = static_cast<const int32_t*>(slot.data);
    step.row = static_cast<const int32_t*>(row.data);
    step.committed = static_cast<const int32_t*>(committed.data);
    step.state_rows = static_cast<const int32_t*>(state_rows.data);
    step.visible = static_cast<const bool*>(visible.data);
    for (int64_t each = 0; each < step.slots; ++each)
      require(step.committed[each] >= 0 && step.committed[each] <= step.capacity && step.state_rows[each] >= 0,
              "committed or state_rows is out of range");
    for (int64_t node = 0; node < step.nodes; ++node) {
      require(step.slot[node] >= 0 && step.slot[node] < step.slots && step.row[node] >= 0 && step.row[node] < step.capacity,
              "a node has no row in a cache");
      require(step.state_rows[step.slot[node]] <= step.committed[step.slot[node]], "states have rows that are not committed");
      const int64_t at = step.slot[node] * step.capacity + step.row[node], gates = step.heads * step.decays;
      float* to = step.keys + at * step.key_row;
      std::memcpy(to, static_cast<const float*>(key.data) + node * wide, wide * sizeof(float));
      std::memcpy(to + wide, static_cast<const float*>(decay.data) + node * gates, gates * sizeof(float));
      std::memcpy(to + wide + gates, static_cast<const float*>(beta.data) + node * step.heads, step.heads * sizeof(float));
      std::memcpy(step.values + at * high, static_cast<const float*>(value.data) + node * high, high * sizeof(float));
    }
    step.y = output(context, value.shape);
    return step;
  }

  // Finds where each node's parent's state comes from: its path's last row before its own is its parent's.
  void connect(const Step& step, int64_t slot, std::vector<Node>& tree) const {
    const int64_t committed = step.committed[slot], width = std::min(step.width, step.capacity - committed);
    int64_t saved = 0;
    for (int64_t place = 0; place < static_cast<int64_t>(tree.size()); ++place) {
      Node& node = tree[place];
      const bool* marks = step.visible + node.number * step.width;
      int64_t at = std::min<int64_t>(width, step.row[node.number] - committed) - 1;
      while (at >= 0 && !marks[at]) --at;
      if (at < 0) continue;
      for (int64_t other = place; node.parent < 0 && other--;)
        if (step.row[tree[other].number] == committed + at) node.parent = other;
      if (node.parent < 0)
        for (int64_t each = 0; each <= at; ++each)
          if (marks[each]) node.path.push_back(committed + each);
      if (node.parent >= 0 && node.parent != place - 1 && tree[node.parent].saved < 0) tree[node.parent].saved = saved++;
    }
  }

  // Runs all nodes of a slot over some columns of a head.
  void run(const Step& step, int64_t slot, int64_t head, int64_t first, const std::vector<Node>& tree) const {
    const int64_t numbers = step.size * kColumns, width = std::min(kColumns, step.columns - first);
    const int64_t saves = std::count_if(tree.begin(), tree.end(), [](const Node& each) { return each.saved >= 0; });
    const std::unique_ptr<float[]> memory(new float[(2 + saves) * numbers]());
    float *const committed = memory.get(), *const current = committed + numbers, *const saved = current + numbers;
    float* const stored = step.states + (slot * step.heads + head) * step.size * step.columns + first;
    if (step.state_rows[slot])
      for (int64_t k = 0; k < step.size; ++k)
        std::memcpy(committed + k * kColumns, stored + k * step.columns, width * sizeof(float));
    for (int64_t row = step.state_rows[slot]; row < step.committed[slot]; ++row)
      take(step, slot, head, first, row, committed, -1);
    for (int64_t k = 0; k < step.size; ++k)
      std::memcpy(stored + k * step.columns, committed + k * kColumns, width * sizeof(float));
    for (int64_t place = 0; place < static_cast<int64_t>(tree.size()); ++place) {
      const Node& node = tree[place];
      const float* parent = node.parent < 0 ? committed : saved + tree[node.parent].saved * numbers;
      if (node.parent < 0 || node.parent != place - 1) std::memcpy(current, parent, numbers * sizeof(float));
      for (int64_t row : node.path) take(step, slot, head, first, row, current, -1);
      take(step, slot, head, first, step.row[node.number], current, node.number);
      if (node.saved >= 0) std::memcpy(saved + node.saved * numbers, current, numbers * sizeof(float));
    }
  }

  // Lets a row change some columns of a head's state, and writes a node's output, unless it is −1.
  void take(const Step& step, int64_t slot, int64_t head, int64_t first, int64_t row, float* state, int64_t node) const {
    const int64_t at = slot * step.capacity + row, wide = step.groups * step.size, group = head / (step.heads / step.groups);
    const int64_t width = std::min(kColumns, step.columns - first), column = head * step.columns + first;
    const float* keys = step.keys + at * step.key_row;
    float value[kColumns] = {}, y[kColumns];
    std::memcpy(value, step.values + at * step.heads * step.columns + column, width * sizeof(float));
    const Update update{keys + group * step.size, keys + wide + head * step.decays, value,
                        keys[wide + step.heads * step.decays + head]};
    const float* query = node < 0 ? nullptr : step.query + node * wide + group * step.size;
    advance(state, update, step.size, step.decays > 1, delta, query, node < 0 ? nullptr : y);
    if (node >= 0) std::memcpy(step.y + node * step.heads * step.columns + column, y, width * sizeof(float));
  }

  bool delta;
};

}  // namespace

OrtCustomOp tree_recurrence() { return describe<TreeRecurrence>(); }

}  // namespace specbuild
