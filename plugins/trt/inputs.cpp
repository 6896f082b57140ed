// Which inputs there are, their types, and how their dimensions agree.
#include "trt/plugin.h"

#include <algorithm>
#include <cstring>
#include <sstream>

namespace specbuild::trt {
namespace {

using nvinfer1::DataType;

enum class Kind { activation, cache, index, table };

// A letter stands for a dimension, the same number wherever it occurs: B sequences, N nodes, M nodes of the whole tree,
// H heads, K key/value heads, Q = H + 2K, D head size, S rows of a slot, P positions, R half the rotary dimension, T
// pages of a sequence. A paged cache has X pages of W rows.
const struct { const char *name; Kind kind; const char *shape; } kSpecs[kInputs] = {
    {"query", Kind::activation, "BNHD"},
    {"key", Kind::activation, "BNKD"},
    {"value", Kind::activation, "BNKD"},
    {"qkv", Kind::activation, "BNQD"},
    {"past_key", Kind::cache, "BKSD"},
    {"past_value", Kind::cache, "BKSD"},
    {"parents", Kind::index, "BM"},
    {"cache_len", Kind::index, "B"},
    {"tree_offset", Kind::index, "B"},
    {"cos", Kind::table, "PR"},
    {"sin", Kind::table, "PR"},
    {"query_norm", Kind::table, "D"},
    {"key_norm", Kind::table, "D"},
    {"counts", Kind::index, "B"},
    {"page_table", Kind::index, "BT"},
    {"key_scale", Kind::table, "K"},
    {"value_scale", Kind::table, "K"},
    {"sinks", Kind::table, "H"},
};

// Of those that Inputs::takes() lets pass.
int32_t dtype_of(DataType type) {
  return type == DataType::kHALF ? SPECBUILD_F16 : type == DataType::kBF16 ? SPECBUILD_BF16 : SPECBUILD_E4M3;
}

}  // namespace

int Inputs::read(const std::string &names) {
  order_.clear();
  std::fill(at_, at_ + kInputs, -1);
  std::istringstream rest(names);
  for (std::string name; std::getline(rest, name, ',');) {
    int input = 0;
    while (input < kInputs && name != kSpecs[input].name) ++input;
    if (input == kInputs) return refuse("inputs: there is no input '%s'", name.c_str());
    if (!order_.empty() && input <= order_.back())
      return refuse("inputs: '%s' cannot come after '%s'", name.c_str(), kSpecs[order_.back()].name);
    at_[input] = count();
    order_.push_back(Input(input));
  }
  const bool separate = has(kQuery) && has(kKey) && has(kValue), any = has(kQuery) || has(kKey) || has(kValue);
  if (has(kQkv) ? any : !separate) return refuse("inputs: either query, key and value, or qkv, in '%s'", names.c_str());
  for (const Input input : {kPastKey, kPastValue, kCacheLen})
    if (!has(input)) return refuse("inputs: %s is missing in '%s'", kSpecs[input].name, names.c_str());
  if (has(kCos) != has(kSin)) return refuse("inputs: cos and sin come together, in '%s'", names.c_str());
  return SPECBUILD_OK;
}

bool Inputs::takes(int position, DataType type, DataType activations, DataType cache) const {
  if (position == 0) return type == DataType::kHALF || type == DataType::kBF16;
  if (position == at(kPastKey)) return type == activations || type == DataType::kFP8;
  switch (kSpecs[order_[position]].kind) {
    case Kind::activation: return type == activations;
    case Kind::cache: return type == cache;
    case Kind::index: return type == DataType::kINT32;
    case Kind::table: return type == DataType::kFLOAT;
  }
  return false;
}

int Inputs::measure(const nvinfer1::PluginTensorDesc *descriptions, specbuild_attention *p) const {
  int64_t sizes[128] = {};
  for (int position = 0; position < count(); ++position) {
    const auto &spec = kSpecs[order_[position]];
    const nvinfer1::PluginTensorDesc &given = descriptions[position];
    const char *const shape = spec.kind == Kind::cache && has(kPageTable) ? "XKWD" : spec.shape;
    if (given.dims.nbDims != int(strlen(shape)))
      return refuse("%s has %d dimensions: use %zu", spec.name, given.dims.nbDims, strlen(shape));
    if (given.format != nvinfer1::TensorFormat::kLINEAR ||
        !takes(position, given.type, descriptions[0].type, descriptions[at(kPastKey)].type))
      return refuse("%s cannot have the type %d in the format %d", spec.name, int(given.type), int(given.format));
    for (int i = 0; shape[i]; ++i) {
      int64_t &size = sizes[int(shape[i])];
      const int64_t here = given.dims.d[i];
      if (here < (shape[i] == 'M' ? 0 : 1) || here > INT32_MAX) return refuse("%s's dimension %d is %lld", spec.name, i, (long long)here);
      if (size && size != here)
        return refuse("%s's dimension %d is %lld: an earlier input has %lld", spec.name, i, (long long)here,
                      (long long)size);
      size = here;
    }
  }
  const int64_t heads = has(kQkv) ? sizes['Q'] - 2 * sizes['K'] : sizes['H'];
  if (heads < sizes['K'] || (has(kSinks) && sizes['H'] != heads))
    return refuse("%lld heads for %lld key/value heads and %lld sinks", (long long)heads, (long long)sizes['K'],
                  (long long)(has(kSinks) ? sizes['H'] : 0));
  const int64_t capacity = has(kPageTable) ? sizes['T'] * sizes['W'] : sizes['S'];
  if (capacity > INT32_MAX) return refuse("a capacity of %lld rows is too large", (long long)capacity);
  *p = {};
  p->batch = int32_t(sizes['B']), p->nodes = int32_t(sizes['N']);
  p->tree_nodes = int32_t(has(kParents) ? sizes['M'] : sizes['N']);
  p->heads = int32_t(heads), p->kv_heads = int32_t(sizes['K']), p->head_dim = int32_t(sizes['D']);
  p->capacity = int32_t(capacity), p->page_rows = int32_t(sizes['W']), p->pages = int32_t(sizes['X']);
  p->rotary_dim = int32_t(2 * sizes['R']), p->positions = int32_t(sizes['P']);
  p->query_stride = (has(kQkv) ? sizes['Q'] : heads) * sizes['D'];
  p->key_stride = p->value_stride = (has(kQkv) ? sizes['Q'] : sizes['K']) * sizes['D'];
  p->dtype = dtype_of(descriptions[0].type), p->cache_dtype = dtype_of(descriptions[at(kPastKey)].type);
  return SPECBUILD_OK;
}

}  // namespace specbuild::trt
