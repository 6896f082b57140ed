// Calls the plugin as TensorRT would, for ctypes: what Python's bindings do not reach. Dimensions are expressions of a
// fake builder, the log goes to a string, and the three functions of CUDA's runtime that the plugin needs are here.
#include <NvInferRuntime.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "kernels.h"

using namespace nvinfer1;

extern "C" IPluginCreatorInterface *const *getCreators(int32_t &count);
extern "C" void setLoggerFinder(ILoggerFinder *finder);
extern "C" int __real_specbuild_tree_attention(const specbuild_attention *p, void *stream);

namespace {

std::string text;
int processors = 0;
specbuild_attention launched;

struct Log final : ILogger {
  void log(Severity severity, const char *line) noexcept override {
    text += severity == Severity::kWARNING ? "warning: " : "error: ";
    text += line;
    text += '\n';
  }
};
struct Finder final : ILoggerFinder {
  ILogger *findLogger() override { return &logger; }
  Log logger;
};

struct Value final : apiv::VDimensionExpr {
  explicit Value(int64_t number) : number(number) {}
  bool isConstant() const override { return true; }
  int64_t getConstantValue() const override { return number; }
  bool isSizeTensor() const override { return false; }
  int64_t number;
};
struct Dimension final : IDimensionExpr {
  explicit Dimension(int64_t number) : value(number) { mImpl = &value; }
  ~Dimension() noexcept override = default;
  Value value;
};
struct Arithmetic final : apiv::VExprBuilder {
  const IDimensionExpr *constant(int64_t number) override {
    made.push_back(std::make_unique<Dimension>(number));
    return made.back().get();
  }
  const IDimensionExpr *operation(DimensionOperation op, const IDimensionExpr &x, const IDimensionExpr &y) override {
    const int64_t a = x.getConstantValue(), b = y.getConstantValue();
    if (op == DimensionOperation::kPROD) return constant(a * b);
    return op == DimensionOperation::kSUB ? constant(a - b) : nullptr;
  }
  const IDimensionExpr *declareSizeTensor(int32_t, const IDimensionExpr &, const IDimensionExpr &) override {
    return nullptr;
  }
  std::vector<std::unique_ptr<Dimension>> made;
};
struct Builder final : IExprBuilder {
  Builder() { mImpl = &arithmetic; }
  ~Builder() noexcept override = default;
  Arithmetic arithmetic;
};

template <class T> T *capability(void *plugin, PluginCapabilityType type) {
  return static_cast<T *>(static_cast<IPluginV3 *>(plugin)->getCapabilityInterface(type));
}
auto *build(void *plugin) { return capability<IPluginV3OneBuildV2>(plugin, PluginCapabilityType::kBUILD); }
auto *runtime(void *plugin) { return capability<IPluginV3OneRuntime>(plugin, PluginCapabilityType::kRUNTIME); }

}  // namespace

extern "C" {

cudaError_t cudaGetDevice(int *device) {
  *device = 0;
  return processors ? cudaSuccess : cudaErrorNoDevice;
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
  if (attribute != cudaDevAttrMultiProcessorCount) return cudaErrorInvalidValue;
  *value = processors;
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t) {
  memset(to, value, bytes);
  return cudaSuccess;
}

int harness_major() { return NV_TENSORRT_MAJOR; }

// The linker's --wrap leads the plugin's call here.
int __wrap_specbuild_tree_attention(const specbuild_attention *p, void *stream) {
  launched = *p;
  return __real_specbuild_tree_attention(p, stream);
}
const specbuild_attention *harness_launched() { return &launched; }

void harness_start(int count) {
  static Finder finder;
  setLoggerFinder(&finder);
  processors = count;
}
// What was logged since the last call.
const char *harness_log() {
  static std::string last;
  last.swap(text);
  text.clear();
  return last.c_str();
}

void *harness_create(const PluginFieldCollection *fields, int phase) {
  int32_t count = 0;
  auto *const creator = static_cast<IPluginCreatorV3One *>(getCreators(count)[0]);
  return creator->createPlugin("a layer", fields, TensorRTPhase(phase));
}
void *harness_clone(void *plugin) { return static_cast<IPluginV3 *>(plugin)->clone(); }
void *harness_attach(void *plugin) { return runtime(plugin)->attachToContext(nullptr); }
void harness_free(void *plugin) { delete static_cast<IPluginV3 *>(plugin); }
const PluginFieldCollection *harness_fields(void *plugin) { return runtime(plugin)->getFieldsToSerialize(); }
const char *harness_metadata(void *plugin) { return build(plugin)->getMetadataString(); }
const char *harness_timing_id(void *plugin) { return build(plugin)->getTimingCacheID(); }

int harness_outputs(void *plugin) { return build(plugin)->getNbOutputs(); }
int harness_aliased(void *plugin, int output) { return build(plugin)->getAliasedInput(output); }
int harness_types(void *plugin, const DataType *in, int in_count, DataType *out, int out_count) {
  return build(plugin)->getOutputDataTypes(out, out_count, in, in_count);
}
int harness_shapes(void *plugin, const Dims *in, int in_count, Dims *out, int out_count) {
  Builder builder;
  std::vector<DimsExprs> given(in_count), made(out_count);
  for (int i = 0; i < in_count; ++i) {
    given[i].nbDims = in[i].nbDims;
    for (int j = 0; j < in[i].nbDims; ++j) given[i].d[j] = builder.constant(in[i].d[j]);
  }
  const int status =
      build(plugin)->getOutputShapes(given.data(), in_count, nullptr, 0, made.data(), out_count, builder);
  for (int i = 0; !status && i < out_count; ++i) {
    out[i].nbDims = made[i].nbDims;
    for (int j = 0; j < made[i].nbDims; ++j) out[i].d[j] = made[i].d[j]->getConstantValue();
  }
  return status;
}
bool harness_supports(void *plugin, int position, const DynamicPluginTensorDesc *all, int in_count, int out_count) {
  return build(plugin)->supportsFormatCombination(position, all, in_count, out_count);
}
int harness_configure(void *plugin, const DynamicPluginTensorDesc *all, int in_count, int out_count) {
  return build(plugin)->configurePlugin(all, in_count, all + in_count, out_count);
}
size_t harness_workspace(void *plugin, const DynamicPluginTensorDesc *all, int in_count, int out_count) {
  return build(plugin)->getWorkspaceSize(all, in_count, all + in_count, out_count);
}
int harness_shape_change(void *plugin, const PluginTensorDesc *all, int in_count, int out_count) {
  return runtime(plugin)->onShapeChange(all, in_count, all + in_count, out_count);
}
int harness_enqueue(void *plugin, const PluginTensorDesc *all, int in_count, const void *const *inputs,
                    void *const *outputs, void *workspace) {
  return runtime(plugin)->enqueue(all, all + in_count, inputs, outputs, workspace, nullptr);
}

}  // extern "C"
