// The last refusal's text, and the structs' sizes, for callers of the C interface.
#include "kernels/common.cuh"

#include <cstring>

extern "C" {

const char *specbuild_error(void) { return specbuild::message; }

size_t specbuild_struct_size(const char *name) {
  if (!strcmp(name, "attention")) return sizeof(specbuild_attention);
  if (!strcmp(name, "product")) return sizeof(specbuild_product);
  if (!strcmp(name, "request")) return sizeof(specbuild_request);
  if (!strcmp(name, "choose")) return sizeof(specbuild_choose);
  if (!strcmp(name, "noise")) return sizeof(specbuild_noise);
  if (!strcmp(name, "walk")) return sizeof(specbuild_walk);
  if (!strcmp(name, "cache")) return sizeof(specbuild_cache);
  if (!strcmp(name, "commit")) return sizeof(specbuild_commit);
  if (!strcmp(name, "mask")) return sizeof(specbuild_mask);
  if (!strcmp(name, "growth")) return sizeof(specbuild_growth);
  if (!strcmp(name, "grow")) return sizeof(specbuild_grow);
  if (!strcmp(name, "ring")) return sizeof(specbuild_ring);
  return 0;
}

}  // extern "C"
