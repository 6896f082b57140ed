#include "avx512.h"

namespace specbuild {
namespace {

bool usable() { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw"); }

}  // namespace

extern const Instructions kAvx512 = instructions<Avx512>("avx512", usable);

}  // namespace specbuild
