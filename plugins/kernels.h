/* specbuild's kernels, behind a C interface without CUDA's or TensorRT's headers.
 *
 * A kernel takes one struct of plain pointers and numbers by value, the one its launcher takes here, so that a caller may
 * as well launch it from a cubin. Launchers check what the host can know, refuse with SPECBUILD_BAD_INPUT before any
 * launch and return at once; specbuild_error() then says what is wrong, with the offending value. Pointers are the
 * device's, shapes are row-major, sizes count elements and rows; where "null" is allowed it says what null means.
 *
 * B sequences, N new nodes of a tree of M nodes (tree_offset[b] of which are in the cache already), H heads over Hkv
 * key/value heads, D the head size, S the rows of a cache slot, V the vocabulary.
 */
#ifndef SPECBUILD_KERNELS_H
#define SPECBUILD_KERNELS_H

#ifdef __CUDACC_RTC__
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
typedef uint64_t uintptr_t;
#else
#include <stddef.h>
#include <stdint.h>
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define SPECBUILD_MOST_NODES 64 /* of a tree: a node's ancestors are the bits of one word */
#define SPECBUILD_MOST_SPLITS 64
#define SPECBUILD_MOST_POOL 512 /* candidates of a growing tree: the root, and 8 levels of 63 in best:63 */
#define SPECBUILD_MOST_BEST 64
#define SPECBUILD_MOST_VOCAB (1 << 19)
#define SPECBUILD_SMALL_VOCAB 8192 /* up to it every token has its own word of noise */

typedef enum { SPECBUILD_OK = 0, SPECBUILD_BAD_INPUT = 1, SPECBUILD_CUDA_ERROR = 2 } specbuild_status;
typedef enum { SPECBUILD_F32 = 0, SPECBUILD_F16 = 1, SPECBUILD_BF16 = 2, SPECBUILD_E4M3 = 3, SPECBUILD_BOOL = 4,
               SPECBUILD_INT8 = 5 } specbuild_dtype;

/* What the last call on this thread that did not return SPECBUILD_OK found wrong; valid until the next one. */
const char *specbuild_error(void);
/* The size in bytes of struct specbuild_<name>; 0 for one unknown. For callers that declare the structs by themselves. */
size_t specbuild_struct_size(const char *name);

/* What a kernel found wrong in device memory: written to `fault`, where one is given; the sequence's
 * output is zero then, and its cache left alone. NODE: a node's or row's number out of range or order; TOKEN: an id past the
 * vocabulary; PAGE: a page table names one that the cache has not, among those that the sequence reads or writes. */
typedef enum { SPECBUILD_FAULT_NONE = 0, SPECBUILD_FAULT_PARENT = 1, SPECBUILD_FAULT_CAPACITY = 2,
               SPECBUILD_FAULT_NODE = 3, SPECBUILD_FAULT_TOKEN = 4, SPECBUILD_FAULT_PAGE = 5 } specbuild_fault;

/* TreeAttention: rotates the new queries and keys, writes the new keys and values to the rows cache_len + tree_offset + i
 * of the cache, in place, and attends: node i sees every row before cache_len, its ancestors and itself. Its position is
 * cache_len plus its depth. */
typedef struct specbuild_attention {
  const void *query, *key, *value; /* dtype [B, N, H or Hkv, D] */
  void *key_cache, *value_cache;   /* cache_dtype [B, Hkv, S, D], or [pages, Hkv, page_rows, D] */
  const int32_t *page_table;       /* [B, S / page_rows], each in [0, pages); null: the cache is linear */
  const int32_t *parents;          /* [B, M], −1 where the parent is committed, parents first; null: a chain of any M */
  const int32_t *cache_len;        /* [B] */
  const int32_t *tree_offset;      /* [B]; null: 0 */
  const int32_t *counts;           /* [B], how many of the N are nodes, the rest padding; null: all */
  const float *cos, *sin;          /* [positions, rotary_dim / 2]; null: no rotation */
  const float *query_norm;         /* [D], weights of an RMS norm before the rotation; null: none */
  const float *key_norm;           /* [D] */
  const float *key_scale;          /* [Hkv], what an E4M3 row is multiplied by; null: 1 */
  const float *value_scale;        /* [Hkv] */
  const float *sinks;              /* [H], a logit that takes its share of the softmax and gives nothing; null: none */
  void *output;                    /* dtype [B, N, H, D]; zero for padding */
  float *workspace;                /* specbuild_attention_workspace() bytes; null where splits is 1 */
  int32_t *fault;                  /* [B], a specbuild_fault each, written where not 0; null: not reported */
  int64_t query_stride, key_stride, value_stride; /* elements from a node's to the next one's: H·D where packed */
  float scale, softcap, norm_epsilon;             /* softcap 0: none */
  int32_t window;                                 /* positions a node sees, its own included; 0: all */
  int32_t batch, nodes, tree_nodes, heads, kv_heads, head_dim, capacity;
  int32_t page_rows; /* a power of two; 0 where the cache is linear */
  int32_t rotary_dim, positions;
  int32_t splits; /* parts of the context, each a block's; specbuild_attention_splits() */
  int32_t dtype, cache_dtype, pages; /* pages: how many there are; 0 where the cache is linear */
} specbuild_attention;

int specbuild_tree_attention(const specbuild_attention *p, void *stream);
/* A number of splits that fills `processors` multiprocessors, for texts of up to S rows. */
int32_t specbuild_attention_splits(const specbuild_attention *p, int32_t processors);
size_t specbuild_attention_workspace(const specbuild_attention *p);
/* Everything specbuild_tree_attention refuses by itself, without a launch. */
int specbuild_attention_check(const specbuild_attention *p);

/* A product of rows with a weight in blocks, packed as a CPU's operators take it (cpu/products.h): codes `q` in panels of 16
 * columns, and factors, every 256 numbers of k their blocks' scales, minima and steps. */
typedef struct specbuild_product {
  const void *input;                  /* dtype [rows, K] */
  const uint8_t *codes, *factors;     /* [⌈N / 16⌉, bytes of a panel] */
  void *output;                       /* dtype [rows, N] */
  int32_t rows, inner, columns;       /* inner: K, a multiple of block; columns: N */
  int32_t bits, block;                /* 4, 5, 6 or 8; 16, 32, 64 or 128 columns of k */
  int32_t scale_bits, minimum_bits;   /* 8, 16 or 32; the same, or 8 for zero points, or 0: there are none */
  int32_t dtype;                      /* F16 or BF16 */
} specbuild_product;

int specbuild_block_product(const specbuild_product *p, void *stream);

/* How one sequence decodes; the parameters of the request, in device memory. */
typedef struct specbuild_request {
  uint64_t seed;
  double top_p;      /* 1: off */
  double min_p_log;  /* the natural logarithm of min_p; −infinity: off */
  float temperature; /* 0: greedy, without noise and cut-offs */
  float repetition;  /* 1: off */
  float frequency, presence;
  int32_t top_k; /* 0: off */
  int32_t bias_begin, bias_end;
} specbuild_request;

/* The K best tokens of f(logits) + g of every row, best first, the lowest id among equals, and their scores. f are the
 * request's processors over the node's path, g the noise at root_position plus the node's depth. A row with a NaN, or whose
 * best score is not finite, gives −1 alone; so do places past the last token that the cut-offs leave, with a score of
 * −infinity. A mask says which tokens of a row are legal, one a bit, token t's is bit t % 32 of word t / 32: an illegal
 * one's score is −infinity before the cut-offs, whatever its logit, a NaN too. Bits past the vocabulary have no meaning. */
typedef struct specbuild_choose {
  const void *logits;                /* dtype [B, N, V], rows `stride` elements apart */
  const specbuild_request *requests; /* [B] */
  /* history: [B, V], bit 31: in prompt or output; the rest: times in the output; null: nothing.
   * masks: [B, N, ⌈V / 32⌉], without gaps whatever the stride, a mask a row of logits; null: every token is legal. */
  const uint32_t *history, *masks;
  const int32_t *bias_tokens;        /* the requests' lists one after another, ascending in each; null: none has one */
  const float *bias_values;
  const int32_t *tokens, *parents; /* [B, M], node 0 the root; parents null: a chain */
  const int32_t *row_nodes;        /* [B, N], which node a row is; null: row n is node n */
  const int32_t *root_position;    /* [B] */
  const int32_t *counts;           /* [B], how many of the N rows are there, −1 for the others; null: all */
  int32_t *choices;                /* [B, N, K] */
  float *scores;                   /* [B, N, K]; null: not wanted */
  void *workspace;                 /* specbuild_choose_workspace() bytes */
  uint32_t *tickets;               /* [B, N], zero before the first launch and after every one */
  int32_t *fault;                  /* [B], as in specbuild_attention; null: not reported */
  int64_t stride;
  int32_t batch, nodes, tree_nodes, vocab;
  int32_t best;     /* K */
  int32_t cut_offs; /* 0: no request has any at a temperature above 0; saves a launch */
  int32_t dtype;    /* F32, F16 or BF16 */
} specbuild_choose;

int specbuild_choose_tokens(const specbuild_choose *p, void *stream);
size_t specbuild_choose_workspace(const specbuild_choose *p);

/* The noise alone, for tests. */
typedef struct specbuild_noise {
  const uint64_t *seeds, *positions; /* [rows] */
  float *noise;                      /* [rows, vocab] */
  int32_t rows, vocab;
} specbuild_noise;

int specbuild_make_noise(const specbuild_noise *p, void *stream);

/* Acceptance: from the root along the choices, as long as a child carries the choice. */
typedef struct specbuild_walk {
  const int32_t *tokens, *parents; /* [B, N], node 0 the root; parents null: a chain */
  const int32_t *choices;          /* [B, N], specbuild_choose with K = 1 */
  const int32_t *counts;           /* [B], nodes of the tree; 0: an idle sequence; null: N */
  uint32_t *history;               /* [B, V], takes note of what is emitted; null: not kept */
  int32_t *path;                   /* [B, N], the accepted nodes, root first, then −1 */
  int32_t *length;                 /* [B], how many; 0 for an idle sequence and after a fault */
  int32_t *emitted;                /* [B, N], the choices along the path, the last one the bonus token, then −1 */
  int32_t *roots;                  /* [B], becomes the bonus token, the next round's root; null: not wanted */
  int32_t *pair;                   /* [B, 2], become the token before the bonus token, and that; null: not wanted */
  int32_t *fault;                  /* [B]; null: not reported. roots and pair stay where the path is empty */
  int32_t batch, nodes, vocab;     /* vocab: of the history */
  int32_t trunk;                   /* 1: the walk ends where the path leaves the nodes 0, 1, 2, …; 0: at a leaf */
} specbuild_walk;

int specbuild_walk_tree(const specbuild_walk *p, void *stream);

/* One model's cache, as specbuild_commit moves rows in it. */
typedef struct specbuild_cache {
  void *const *layers;       /* [2·layers], each [B, Hkv, S, row_bytes], or [pages, Hkv, page_rows, row_bytes] */
  const int32_t *page_table; /* [B, S / page_rows], each in [0, pages); null: linear */
  const int32_t *base;       /* [B], the row of the root; may be cache_len itself */
  const int32_t *node_rows;  /* [B, N], a node's row counted from base; −1: in no row of this cache; null: row i is node i's */
  int32_t *cache_len;        /* [B], becomes base plus the rows kept, where the path is not empty */
  int32_t count;             /* 2·layers; 0: there is no such cache */
  int32_t heads, row_bytes, capacity, page_rows, pages; /* the last two 0 where linear */
} specbuild_cache;

/* Commits the accepted rows of the target and of the draft: row node_rows[path[j]] becomes row j from base on. The nodes of
 * a path that a cache has no row of are its last ones, and not kept: a draft keeps the root and what it has run itself. */
typedef struct specbuild_commit {
  specbuild_cache caches[2];
  const int32_t *path;   /* [B, N] of specbuild_walk */
  const int32_t *length; /* [B] */
  int32_t *kept;         /* [2, B], how many rows of the path each cache keeps; 0 after a fault */
  uint32_t *ticket;      /* [1], zero before the first launch and after every one */
  int32_t *fault;        /* [B]; null: not reported. The sequence's rows and cache_len stay as they were */
  int32_t batch, nodes;
} specbuild_commit;

int specbuild_commit_path(const specbuild_commit *p, void *stream);

/* The mask of a tree for a standard attention: what TreeAttention sees by itself, written out, and where a standard lowering
 * places the nodes. Padding sees row 0 alone, and so does a sequence with a fault, for a softmax over nothing is NaN. Where
 * rows are wanted it is a fault that a sequence with nodes has no room for all N. Without an output it is for TreeAttention:
 * the tree is checked, rows become cache_len + shift, whatever the offset, and only the nodes need room. */
typedef struct specbuild_mask {
  const int32_t *parents;     /* [B, M]; null: a chain */
  const int32_t *cache_len;   /* [B] */
  const int32_t *tree_offset; /* [B]; null: 0 */
  const int32_t *counts;      /* [B]; null: all N */
  void *output;               /* [B, N, S]: 1 and 0 in BOOL; 0 and −infinity, to be added, in F32, F16, BF16; or null */
  int32_t *positions;         /* [B, N], cache_len + shift plus the depth, 0 for padding; null: not wanted */
  int32_t *rows;              /* [B], cache_len + shift + tree_offset, moved into [0, S − N]; null: not wanted */
  int32_t *fault;             /* [B]; null: not reported */
  int32_t shift;              /* is added to every cache_len */
  int32_t window;             /* 0: none */
  int32_t batch, nodes, tree_nodes, capacity, dtype;
} specbuild_mask;

int specbuild_tree_mask(const specbuild_mask *p, void *stream);

/* One growing tree: the shape asked for (TreeSpec), and how far it has come. */
typedef struct specbuild_growth {
  int32_t branch, width, expand, depth, nodes; /* the shape, the root not counted; 0 nodes: an idle sequence */
  int32_t size;                                /* candidates in the pool, the root included */
  int32_t level;                               /* levels grown */
  int32_t run;                                 /* nodes that have a row in the draft's cache */
  int32_t done;                                /* no further level is wanted */
} specbuild_growth;

/* Growing a draft's tree level by level, and choosing the final one. Pool node 0 is the root. */
typedef struct specbuild_grow {
  specbuild_growth *growths;            /* [B] */
  int32_t *pool_tokens, *pool_parents;  /* [B, P]; what specbuild_choose takes as tokens and parents, with M = P */
  int32_t *pool_rows;                   /* [B, P], a node's row from the level's first one on; −1: none */
  double *pool_scores;                  /* [B, P] */
  int32_t *frontier;                    /* [B, F], pool nodes that are expanded next: the row_nodes of specbuild_choose */
  int32_t *level_counts;                /* [B], how many; 0 where the tree is done */
  const int32_t *roots, *root_position; /* [B], the root's token and position */
  const int32_t *choices;               /* [B, F, K], of specbuild_choose for the frontier; at first [B, 1, K] for the root */
  const float *scores;                  /* [B, F, K] */
  int32_t *level_tokens, *positions;    /* [B, F], what the draft runs next; padding is token 0 at the root's position */
  int32_t *level_parents;               /* [B, R], parents of all rows, −1 below the root: TreeAttention's parents */
  int32_t *level_offset;                /* [B], rows before the level: TreeAttention's tree_offset */
  int32_t *tree_tokens, *tree_parents;  /* [B, N], the final tree; padding is token 0 with parent −1 */
  int32_t *tree_counts;                 /* [B] */
  int32_t *tree_nodes;                  /* [B, N], a final node's place in the pool; −1 for padding */
  int32_t *node_rows;                   /* [B, N], what specbuild_commit takes for the draft: 0 for the root, 1 + row, or −1 */
  int32_t *fault;                       /* [B]; null: not reported */
  int32_t batch, pool, frontiers, best, rows, nodes; /* B, P, F, K, R, N */
  int32_t first;                        /* 1: the level below the root, which sets everything up */
} specbuild_grow;

int specbuild_grow_level(const specbuild_grow *p, void *stream);
int specbuild_finish_tree(const specbuild_grow *p, void *stream);

#include "resident.h"

#ifdef __cplusplus
}
#endif
#endif
