// The library of operators of domain `specbuild` for ONNX Runtime, registered by register_custom_ops_library.
#include <algorithm>

#include "operators.h"

namespace specbuild {

const OrtApi* g_api;

const Instructions* const* all_instructions(int* count) {
#if defined(__x86_64__)
  static const Instructions* const all[] = {&kVnni, &kAvx2, &kPortable};
#elif defined(__aarch64__)
  static const Instructions* const all[] = {&kNeon, &kPortable};
#else
  static const Instructions* const all[] = {&kPortable};
#endif
  *count = sizeof(all) / sizeof(all[0]);
  return all;
}

static const Instructions& fastest() {
  int count;
  const auto* all = all_instructions(&count);
  return **std::find_if(all, all + count, [](const Instructions* each) { return each->usable(); });
}

const Instructions& instructions_of(int64_t index) {
  if (index < 0) return fastest();
  int count;
  const auto* all = all_instructions(&count);
  require(index < count && all[index]->usable(), "this processor has not these instructions");
  return *all[index];
}

}  // namespace specbuild

#define SPECBUILD_EXPORT extern "C" __attribute__((visibility("default")))

SPECBUILD_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  using namespace specbuild;
  static OrtCustomOp operators[] = {rowwise_mat_mul(), rowwise_gather(), tree_attention(), tree_convolution(),
                                    tree_recurrence()};
  static OrtCustomOpDomain* domain = nullptr;
  g_api = base->GetApi(kOrtVersion);
  if (!g_api) return Ort(base->GetApi(1)).status("specbuild's operators need ONNX Runtime 1.23 or later");
  return status_of([&] {
    if (!domain) {
      check(ort().create_domain("specbuild", &domain));
      for (OrtCustomOp& each : operators) check(ort().add_operator(domain, &each));
    }
    check(ort().add_domain(options, domain));
  });
}

// The name of a set of instructions by index: empty if this processor has it not, null after the last.
SPECBUILD_EXPORT const char* specbuild_instructions(int index) {
  int count;
  const auto* all = specbuild::all_instructions(&count);
  if (index >= count) return nullptr;
  return all[index]->usable() ? all[index]->name : "";
}
