// The text's continuation, drafted on the device: what followed the longest earlier occurrence of a text's end, as a chain
// (runtime/drafting/lookup.py: the same match, and the same continuation of a text that repeats itself), or habits: what
// followed the last two tokens in another text, or mostly follows them (runtime/drafting/habits.py).
//
// emitted int32 [B, N] and length int32 [B] of the last round to texts int32 [B, S] and habits uint64 [H], then both to
// tokens, parents int32 [B, N] and counts int32 [B]. A block reads a text once, and a few tokens more where the last one
// occurs. Bytes: 4·S in and 2·4·N out per sequence.
#include "kernels/common.cuh"

namespace specbuild {

constexpr int kTextThreads = 256;
constexpr int kLongestMatch = 12;  // tokens compared, as LONGEST in lookup.py
constexpr int kRecalled = 4;       // tokens from habits

// How many tokens up to `end` are those up to `last`, at most kLongestMatch.
__device__ __forceinline__ int matched(const int32_t *text, int end, int last) {
  int count = 0;
  while (count < kLongestMatch && count <= end && text[end - count] == text[last - count]) ++count;
  return count;
}

// An entry of the habits: the upper half tells the key, the lower half of which is the place, from others with that place.
__device__ __forceinline__ uint64_t habit_key(int32_t before, int32_t last, uint32_t salt) {
  uint64_t key = (uint64_t(uint32_t(before)) << 32 | uint32_t(last)) ^ uint64_t(salt) * 0xD1B54A32D192ED03ull;
  key = (key ^ key >> 32) * 0x9E3779B97F4A7C15ull;
  return (key ^ key >> 29) * 0xBF58476D1CE4E5B9ull;
}
__device__ __forceinline__ int32_t habit(const specbuild_text &p, int32_t before, int32_t last, uint32_t salt) {
  const uint64_t key = habit_key(before, last, salt), entry = p.habits[uint32_t(key) & uint32_t(p.slots - 1)];
  return entry >> 32 == key >> 32 ? int32_t(uint32_t(entry)) : -1;
}

// What habits say after a text, at most kRecalled tokens; `known`: whether the text itself continues its last token.
__device__ __forceinline__ int recall(const specbuild_text &p, const int32_t *text, int last, uint32_t salt, bool known, int32_t *to) {
  int32_t before = last > 0 ? text[last - 1] : -1, token = text[last];
  int count = 0;
  while (count < kRecalled) {
    int32_t next = habit(p, before, token, salt);
    if (next < 0 && count == 0 && known) break;
    if (next < 0) next = habit(p, before, token, SPECBUILD_COMMON);
    if (next < 0 && count == 0) next = habit(p, -1, token, SPECBUILD_COMMON);
    if (next < 0) break;
    to[count++] = next, before = token, token = next;
  }
  return count;
}

__device__ __forceinline__ void continue_text(const specbuild_text &p) {
  __shared__ unsigned long long best;  // matched tokens, then the place: the longest, among equals the most recent
  __shared__ int32_t recalled[kRecalled];
  __shared__ int remembered;
  const int b = blockIdx.x, count = p.counts[b], last = p.root_position[b], length = p.length[b];
  const int64_t first = int64_t(b) * p.nodes;
  int32_t *const text = p.texts + int64_t(b) * p.capacity;
  if (count == 0) return;  // an idle sequence
  const bool sound = last >= 0 && last < p.capacity && length >= 0 && length <= p.nodes && length <= last + 1;
  if (!sound && threadIdx.x == 0 && p.fault) p.fault[b] = SPECBUILD_FAULT_CAPACITY;
  if (threadIdx.x == 0) best = 0, remembered = 0;
  for (int i = threadIdx.x; sound && i < length; i += kTextThreads) text[last - length + 1 + i] = p.emitted[first + i];
  __syncthreads();
  for (int i = threadIdx.x; sound && p.habits && i < length; i += kTextThreads) {
    const int at = last - length + 1 + i;
    if (at < 2 || text[at] < 0) continue;
    const uint64_t key = habit_key(text[at - 2], text[at - 1], p.salts[b]);
    p.habits[uint32_t(key) & uint32_t(p.slots - 1)] = key >> 32 << 32 | uint32_t(text[at]);  // in one piece, whoever else writes
  }
  const bool drafts = sound && p.most[b] > 0 && text[last] >= 0;
  for (int end = threadIdx.x; drafts && end < last; end += kTextThreads)
    if (const int found = matched(text, end, last)) atomicMax(&best, (unsigned long long)(found) << 32 | unsigned(end));
  __syncthreads();
  const int reached = int(best >> 32), end = int(best & 0xffffffffu);
  if (threadIdx.x == 0 && drafts && p.habits && reached < 2) remembered = recall(p, text, last, p.salts[b], reached > 0, recalled);
  __syncthreads();
  const int wanted = remembered ? remembered : 2 * reached;  // a longer match is likely to go on for longer
  const int drafted = drafts ? smaller(smaller(p.most[b], p.nodes - 1), wanted) : 0;
  for (int i = threadIdx.x; i < p.nodes; i += kTextThreads) {
    const bool real = i > 0 && i <= drafted;
    int token = 0;  // behind the text's end, what was just drafted
    if (real) token = remembered ? recalled[i - 1] : text[end + 1 + (i - 1) % (last - end)];
    p.tokens[first + i] = i == 0 ? p.roots[b] : larger(token, 0);
    p.parents[first + i] = real ? i - 1 : -1;
  }
  if (threadIdx.x == 0) p.counts[b] = 1 + drafted;
}

}  // namespace specbuild

extern "C" __global__ void __launch_bounds__(specbuild::kTextThreads)
    continue_text(const __grid_constant__ specbuild_text p) { specbuild::continue_text(p); }

#ifndef __CUDACC_RTC__
extern "C" int specbuild_continue_text(const specbuild_text *p, void *stream) {
  using namespace specbuild;
  if (p->batch < 1) return refuse("batch %d: at least 1", p->batch);
  if (p->nodes < 1 || p->nodes > SPECBUILD_MOST_NODES)
    return refuse("a tree of %d nodes: 1 to %d", p->nodes, SPECBUILD_MOST_NODES);
  if (p->capacity < 1) return refuse("texts of %d tokens: at least 1", p->capacity);
  if (p->habits ? p->slots < 1 || p->slots & (p->slots - 1) || !p->salts : p->slots != 0)
    return refuse("habits in %d slots: a power of two, and a salt for each sequence", p->slots);
  const Pointer pointers[] = {{"texts", p->texts, 4}, {"most", p->most, 4}, {"root_position", p->root_position, 4},
                              {"roots", p->roots, 4}, {"length", p->length, 4}, {"emitted", p->emitted, 4},
                              {"tokens", p->tokens, 4}, {"parents", p->parents, 4}, {"counts", p->counts, 4},
                              {"fault", p->fault, 4, true}, {"habits", p->habits, 8, true}, {"salts", p->salts, 4, true}};
  return launch(pointers, ::continue_text, Grid{p->batch, 1, 1, kTextThreads, 0}, *p, stream);
}
#endif
