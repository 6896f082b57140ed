// Of the kernels' library beside the stand-in: its kernels by name, and launches that keep to the stand-in's streams.
#include "card/kernel.h"
#include "host/host.h"
#include "kernels.h"

#include <cstdio>
#include <cstring>
#include <dlfcn.h>

extern "C" {
void choose_best_F32(specbuild_choose), choose_best_F16(specbuild_choose), choose_best_BF16(specbuild_choose);
void choose_cuts_F32(specbuild_choose), choose_cuts_F16(specbuild_choose), choose_cuts_BF16(specbuild_choose);
void walk_tree(specbuild_walk), commit_path(specbuild_commit), publish(specbuild_ring);
void tree_mask_BOOL(specbuild_mask), tree_mask_F32(specbuild_mask);
void tree_mask_F16(specbuild_mask), tree_mask_BF16(specbuild_mask);
void grow_level(specbuild_grow), grow_finish(specbuild_grow);
void tree_attention_F16_F16_d64_r16(specbuild_attention), tree_attention_F16_F16_d64_r32(specbuild_attention);
void tree_attention_F16_F16_d64_r64(specbuild_attention), tree_attention_combine_F16(specbuild_attention);
void block_product_F16_4_t1(specbuild_product), block_product_F16_4_t2(specbuild_product);
void block_product_F16_4_t8(specbuild_product), block_product_F16_8_t1(specbuild_product);
void block_product_F16_8_t2(specbuild_product), block_product_F16_8_t8(specbuild_product);
}

namespace {

template <class... P> struct Sizes { static constexpr size_t all[] = {sizeof(P)...}; };

template <class... P, size_t... I>
void call(void (*kernel)(P...), void *const *parameters, std::index_sequence<I...>) {
  kernel(*static_cast<const P *>(parameters[I])...);
}

template <auto kernel> struct Known;
template <class... P, void (*kernel)(P...)> struct Known<kernel> {
  static const char *run(void *const *parameters, int x, int y, int z, int threads, size_t shared) {
    const void *const address = reinterpret_cast<const void *>(kernel);
    if (threads % 32 == 0)
      return host::run(address, x, y, z, threads, shared, [&] { call(kernel, parameters, std::index_sequence_for<P...>()); });
    for (int i = 0; i < threads; ++i) {  // a toy's few threads, which know nothing of each other
      threadIdx = {unsigned(i), 0, 0};
      call(kernel, parameters, std::index_sequence_for<P...>());
    }
    return nullptr;
  }
  static card_kernel named(const char *name) { return {name, sizeof...(P), Sizes<P...>::all, run}; }
};

// The toy of scripts/gpu/flavours.py.
void twice(const float *x, float *y) { y[threadIdx.x] = x[threadIdx.x] + x[threadIdx.x]; }

#define KNOWN(NAME) Known<&NAME>::named(#NAME)
const card_kernel kernels[] = {
    KNOWN(choose_best_F32), KNOWN(choose_best_F16), KNOWN(choose_best_BF16),
    KNOWN(choose_cuts_F32), KNOWN(choose_cuts_F16), KNOWN(choose_cuts_BF16),
    KNOWN(walk_tree),      KNOWN(commit_path),   KNOWN(publish),        KNOWN(tree_mask_BOOL),
    KNOWN(tree_mask_F32),  KNOWN(tree_mask_F16), KNOWN(tree_mask_BF16), KNOWN(grow_level),    KNOWN(grow_finish),
    KNOWN(twice),          KNOWN(tree_attention_F16_F16_d64_r16),      KNOWN(tree_attention_F16_F16_d64_r32),
    KNOWN(tree_attention_F16_F16_d64_r64),       KNOWN(tree_attention_combine_F16),
    KNOWN(block_product_F16_4_t1), KNOWN(block_product_F16_4_t2), KNOWN(block_product_F16_4_t8),
    KNOWN(block_product_F16_8_t1), KNOWN(block_product_F16_8_t2), KNOWN(block_product_F16_8_t8),
};

template <class F> F asked(const char *name) {
  static void *const driver = dlopen("libcuda.so.1", RTLD_NOW);
  return driver ? reinterpret_cast<F>(dlsym(driver, name)) : nullptr;
}

void run_held(void *run) {
  const char *const problem = (*static_cast<host::Run *>(run))();
  if (problem) asked<decltype(&card_fail)>("card_fail")(problem);
}
void release_held(void *run) { delete static_cast<host::Run *>(run); }

const char *keep(void *stream, bool overlap, const host::Run &run) {
  thread_local char text[32];
  static const auto launch = asked<decltype(&card_launch)>("card_launch");
  const int status = launch(stream, run_held, new host::Run(run), release_held, overlap);
  snprintf(text, sizeof text, "CUDA error %d", status);
  return status ? text : nullptr;
}

// Where there is no stand-in, launches run at once.
const bool kept = (host::keeper = asked<void *>("card_launch") ? keep : nullptr) != nullptr;

}  // namespace

extern "C" const card_kernel *card_find_kernel(const char *name) {
  for (const card_kernel &kernel : kernels)
    if (!strcmp(kernel.name, name)) return &kernel;
  return nullptr;
}
