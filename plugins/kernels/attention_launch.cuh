// The host side of TreeAttention: what is refused, how the context is split, and which kernel is launched. Part of
// attention.cu, which names the kernels.
#pragma once

namespace specbuild {

struct AttentionKernel {
  int32_t dtype, cache_dtype, head_dim, rows;
  int shared;
  void (*run)(specbuild_attention);
};

constexpr float kMost = 1e30f;  // of a number that a score is multiplied by
constexpr int32_t kF16 = SPECBUILD_F16, kBF16 = SPECBUILD_BF16, kE4M3 = SPECBUILD_E4M3;
#define LIST(T, C, D, ROWS) {k##T, k##C, D, ROWS, Tile<C, D, ROWS / 16>::kShared, tree_attention_##T##_##C##_d##D##_r##ROWS},
static const AttentionKernel kAttentionKernels[] = {EACH_KERNEL(LIST)};
#undef LIST

// The kernel with the fewest query rows a block that hold all of a head's, or else the most.
inline const AttentionKernel *find_kernel(const specbuild_attention &p) {
  const AttentionKernel *found = nullptr;
  for (const AttentionKernel &kernel : kAttentionKernels)
    if (kernel.dtype == p.dtype && kernel.cache_dtype == p.cache_dtype && kernel.head_dim == p.head_dim &&
        (!found || found->rows < p.nodes * (p.heads / p.kv_heads)))
      found = &kernel;
  return found;
}

}  // namespace specbuild

extern "C" {

int specbuild_attention_check(const specbuild_attention *p) {
  using namespace specbuild;
  if (p->dtype != kF16 && p->dtype != kBF16) return refuse("TreeAttention computes in float16 or bfloat16, not in %s", name_of(p->dtype));
  if (p->cache_dtype != p->dtype && p->cache_dtype != kE4M3)
    return refuse("a cache of %s for activations of %s: use the same type, or float8 E4M3", name_of(p->cache_dtype), name_of(p->dtype));
  const int d = p->head_dim;
  if (d != 64 && d != 80 && d != 96 && d != 128 && d != 256) return refuse("head size %d: TreeAttention has 64, 80, 96, 128 and 256", d);
  if (p->batch < 1 || p->batch > 65535) return refuse("batch %d is not in 1…65535", p->batch);
  if (p->kv_heads < 1 || p->heads < p->kv_heads || p->heads % p->kv_heads)
    return refuse("%d heads cannot share %d key/value heads: use a multiple", p->heads, p->kv_heads);
  if (p->nodes < 1 || (p->parents && p->nodes > SPECBUILD_MOST_NODES)) return refuse("%d nodes: a tree has 1 to %d", p->nodes, SPECBUILD_MOST_NODES);
  if (p->parents && (p->tree_nodes < p->nodes || p->tree_nodes > SPECBUILD_MOST_NODES))
    return refuse("a tree of %d nodes for %d new ones: use %d to %d", p->tree_nodes, p->nodes, p->nodes, SPECBUILD_MOST_NODES);
  if (p->capacity < 1) return refuse("capacity %d of a cache slot: at least 1", p->capacity);
  if (int64_t(p->batch) * p->nodes * p->heads > 0x7fffffff)
    return refuse("%d sequences of %d nodes with %d heads are too many for one launch", p->batch, p->nodes, p->heads);
  if ((p->page_rows != 0) != (p->page_table != nullptr)) return refuse("%d rows a page, and %s page table", p->page_rows, p->page_table ? "a" : "no");
  if (p->page_rows < 0 || (p->page_rows & (p->page_rows - 1)) || (p->page_rows && p->capacity % p->page_rows))
    return refuse("%d rows a page of a capacity of %d: use a power of two that divides it", p->page_rows, p->capacity);
  if (p->page_rows ? p->pages < 1 : p->pages != 0) return refuse("%d pages of %d rows: at least 1, and none of a linear cache", p->pages, p->page_rows);
  if ((p->cos != nullptr) != (p->rotary_dim > 0) || (p->sin != nullptr) != (p->rotary_dim > 0))
    return refuse("a rotary dimension of %d %s both tables, cos and sin", p->rotary_dim, p->rotary_dim > 0 ? "needs" : "excludes");
  if (p->rotary_dim < 0 || p->rotary_dim > d || p->rotary_dim % 16) return refuse("rotary dimension %d of a head size of %d: use a multiple of 16", p->rotary_dim, d);
  if (p->rotary_dim > 0 && p->positions < 1) return refuse("rotary tables of %d positions: at least 1", p->positions);
  if (p->window < 0) return refuse("window %d: 0 for none, or the positions a node sees", p->window);
  if (!p->parents && p->nodes > p->capacity) return refuse("a chain of %d nodes does not fit a capacity of %d rows", p->nodes, p->capacity);
  if (!(p->softcap >= 0.0f && p->softcap < kMost)) return refuse("soft-cap %g: 0 for none, or a positive bound", p->softcap);
  if (!(p->scale > 0.0f && p->scale < kMost)) return refuse("scale %g of the scores must be positive, and a number", p->scale);
  if ((p->key_scale || p->value_scale) && p->cache_dtype != kE4M3) return refuse("scales are for a cache of float8 E4M3, this one is of %s", name_of(p->cache_dtype));
  if ((p->query_norm || p->key_norm) && !(p->norm_epsilon >= 0.0f)) return refuse("a norm's epsilon of %g", p->norm_epsilon);
  const struct { const char *name; int64_t stride, least; } strides[] = {
      {"query", p->query_stride, int64_t(p->heads) * d}, {"key", p->key_stride, int64_t(p->kv_heads) * d}, {"value", p->value_stride, int64_t(p->kv_heads) * d}};
  for (const auto &s : strides)
    if (s.stride < s.least || s.stride % 8) return refuse("%s's stride is %lld: at least %lld, a multiple of 8", s.name, (long long)s.stride, (long long)s.least);
  if (p->splits < 1 || p->splits > SPECBUILD_MOST_SPLITS) return refuse("%d splits: use 1 to %d", p->splits, SPECBUILD_MOST_SPLITS);
  if (p->splits > 1 && !p->workspace) return refuse("%d splits need a workspace of %zu bytes", p->splits, specbuild_attention_workspace(p));
  const Pointer pointers[] = {{"query", p->query}, {"key", p->key}, {"value", p->value}, {"key_cache", p->key_cache},
                              {"value_cache", p->value_cache}, {"cache_len", p->cache_len, 4}, {"output", p->output},
                              {"parents", p->parents, 4, true}, {"cos", p->cos, 16, true}, {"sin", p->sin, 16, true},
                              {"workspace", p->workspace, 16, true}, {"page_table", p->page_table, 4, true},
                              {"tree_offset", p->tree_offset, 4, true}, {"counts", p->counts, 4, true},
                              {"query_norm", p->query_norm, 4, true}, {"key_norm", p->key_norm, 4, true},
                              {"key_scale", p->key_scale, 4, true}, {"value_scale", p->value_scale, 4, true},
                              {"sinks", p->sinks, 4, true}, {"fault", p->fault, 4, true}};
  return check_pointers(pointers);
}

int32_t specbuild_attention_splits(const specbuild_attention *p, int32_t processors) {
  using namespace specbuild;
  if (processors < 1 || p->batch < 1 || p->nodes < 1 || p->kv_heads < 1 || p->heads < p->kv_heads) return 1;
  const AttentionKernel *const kernel = find_kernel(*p);
  if (!kernel) return 1;
  const int blocks = p->batch * p->kv_heads * ceil_div(p->nodes * (p->heads / p->kv_heads), kernel->rows);
  // Two blocks a processor hide each other's waits; a part of fewer than 2 tiles is not worth its combination.
  return larger(1, smaller(smaller(2 * processors / blocks, p->capacity / (2 * 64)), SPECBUILD_MOST_SPLITS));
}

size_t specbuild_attention_workspace(const specbuild_attention *p) {
  if (p->splits <= 1) return 0;
  return size_t(p->batch) * p->nodes * p->heads * p->splits * (p->head_dim + 2) * sizeof(float);
}

int specbuild_tree_attention(const specbuild_attention *p, void *stream) {
  using namespace specbuild;
  if (const int status = specbuild_attention_check(p)) return status;
  const AttentionKernel *const kernel = find_kernel(*p);
  if (!kernel) return refuse("this library was compiled without head size %d in %s", p->head_dim, name_of(p->dtype));
  const int tiles = ceil_div(p->nodes * (p->heads / p->kv_heads), kernel->rows);
  if (p->kv_heads * tiles > 65535) return refuse("%d nodes of %d heads are too many for one launch", p->nodes, p->heads);
  int architecture = 0;
  if (const int status = compiled_for(kernel->run, &architecture)) return status;
  if (architecture > 0 && architecture < 80)
    return refuse("this library was compiled for sm_%d: TreeAttention needs sm_80 or later, compile with -arch", architecture);
  const int status = launch(kernel->run, Grid{p->splits, p->kv_heads * tiles, p->batch, kThreads, size_t(kernel->shared)}, *p, stream);
  if (status || p->splits == 1) return status;
  const Grid grid = {ceil_div(p->batch * p->nodes * p->heads, kWarps), 1, 1, kThreads, 0};
  return launch(p->dtype == kF16 ? tree_attention_combine_F16 : tree_attention_combine_BF16, grid, *p, stream, true);
}

}  // extern "C"
