// The TensorRT plugin around specbuild_tree_attention().
#include "trt/plugin.h"

#include <algorithm>
#include <sstream>

#include <cuda_runtime_api.h>

namespace specbuild::trt {
namespace {

using nvinfer1::DataType;
using Desc = nvinfer1::PluginTensorDesc;
using DynamicDesc = nvinfer1::DynamicPluginTensorDesc;
using Exprs = nvinfer1::DimsExprs;

class TreeAttention final : public nvinfer1::IPluginV3,
                            public nvinfer1::IPluginV3OneCore,
                            public nvinfer1::IPluginV3OneBuildV2,
                            public nvinfer1::IPluginV3OneRuntime {
 public:
  TreeAttention(const Fields &fields, const Inputs &inputs, nvinfer1::TensorRTPhase phase)
      : fields_(fields), inputs_(inputs), phase_(phase) {
    std::ostringstream text;
    text.precision(9);
    each_field(fields_, [&](const char *name, const auto &field) { text << name << '=' << field << ' '; });
    description_ = text.str();
  }

  nvinfer1::IPluginCapability *getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override {
    switch (type) {
      case nvinfer1::PluginCapabilityType::kCORE: return static_cast<nvinfer1::IPluginV3OneCore *>(this);
      case nvinfer1::PluginCapabilityType::kBUILD: return static_cast<nvinfer1::IPluginV3OneBuildV2 *>(this);
      case nvinfer1::PluginCapabilityType::kRUNTIME: return static_cast<nvinfer1::IPluginV3OneRuntime *>(this);
    }
    return nullptr;
  }
  nvinfer1::IPluginV3 *clone() noexcept override {
    try {
      return new TreeAttention(fields_, inputs_, phase_);
    } catch (const std::exception &error) {
      refuse("no clone: %s", error.what());
      return nullptr;
    }
  }
  nvinfer1::IPluginV3 *attachToContext(nvinfer1::IPluginResourceContext *) noexcept override { return clone(); }

  const char *getPluginName() const noexcept override { return kName; }
  const char *getPluginVersion() const noexcept override { return kVersion; }
  const char *getPluginNamespace() const noexcept override { return kNamespace; }
  // The state that the fields make: TensorRT adds shapes and types by itself.
  const char *getTimingCacheID() noexcept override { return description_.c_str(); }
  const char *getMetadataString() noexcept override { return description_.c_str(); }
  int32_t getNbOutputs() const noexcept override { return fields_.fault ? 4 : 3; }

  int32_t getOutputDataTypes(DataType *outputs, int32_t output_count, const DataType *inputs,
                             int32_t input_count) const noexcept override {
    if (const int status = expect(input_count, output_count)) return status;
    outputs[0] = inputs[0];
    outputs[1] = outputs[2] = inputs[inputs_.at(kPastKey)];
    if (fields_.fault) outputs[3] = DataType::kINT32;
    return 0;
  }

  int32_t getOutputShapes(const Exprs *inputs, int32_t input_count, const Exprs *, int32_t shape_count, Exprs *outputs,
                          int32_t output_count, nvinfer1::IExprBuilder &builder) noexcept override {
    if (const int status = expect(input_count, output_count)) return status;
    if (shape_count) return refuse("%d shape inputs: there are none", shape_count);
    const Exprs &past = inputs[inputs_.at(kPastKey)];
    if (inputs[0].nbDims != 4 || past.nbDims != 4)
      return refuse("activations and caches have 4 dimensions, not %d and %d", inputs[0].nbDims, past.nbDims);
    outputs[0] = inputs[0];
    if (inputs_.has(kQkv)) {
      using Operation = nvinfer1::DimensionOperation;
      const auto *const keys_and_values = builder.operation(Operation::kPROD, *builder.constant(2), *past.d[1]);
      outputs[0].d[2] = builder.operation(Operation::kSUB, *inputs[0].d[2], *keys_and_values);
    }
    outputs[1] = past;
    outputs[2] = inputs[inputs_.at(kPastValue)];
    if (fields_.fault) outputs[3] = {1, {inputs[0].d[0]}};
    return 0;
  }

  bool supportsFormatCombination(int32_t position, const DynamicDesc *all, int32_t input_count,
                                 int32_t output_count) noexcept override {
    if (expect(input_count, output_count)) return false;
    const Desc &asked = all[position].desc;
    if (asked.format != nvinfer1::TensorFormat::kLINEAR) return false;
    const DataType activations = all[0].desc.type, cache = all[inputs_.at(kPastKey)].desc.type;
    if (position < input_count) return inputs_.takes(position, asked.type, activations, cache);
    const int output = position - input_count;
    return asked.type == (output == 0 ? activations : output < 3 ? cache : DataType::kINT32);
  }

  int32_t configurePlugin(const DynamicDesc *inputs, int32_t input_count, const DynamicDesc *,
                          int32_t output_count) noexcept override {
    if (const int status = expect(input_count, output_count)) return status;
    specbuild_attention p;
    if (const int status = fill_largest(inputs, &p)) return status;
    // The launcher's own check, on an address that is aligned and never read.
    alignas(16) static char nowhere[16];
    const std::vector<const void *> some_inputs(size_t(input_count), nowhere);
    const std::vector<void *> some_outputs(size_t(output_count), nowhere);
    point(some_inputs.data(), some_outputs.data(), nowhere, &p);
    return specbuild_attention_check(&p) ? refuse("%s", specbuild_error()) : 0;
  }

  // A smaller batch is split into more parts, and may need more than the largest.
  size_t getWorkspaceSize(const DynamicDesc *inputs, int32_t, const DynamicDesc *, int32_t) const noexcept override {
    specbuild_attention p;
    if (fill_largest(inputs, &p)) return 0;
    const int32_t most_batch = p.batch, most_nodes = p.nodes;
    size_t most = 0;
    for (p.batch = 1; p.batch <= most_batch; ++p.batch)
      for (p.nodes = 1; p.nodes <= most_nodes; ++p.nodes) {
        p.splits = splits_for(p);
        most = std::max(most, specbuild_attention_workspace(&p));
      }
    return most;
  }

  int32_t getAliasedInput(int32_t output) noexcept override {
    if (fields_.in_place != "alias") return -1;
    return output == 1 ? inputs_.at(kPastKey) : output == 2 ? inputs_.at(kPastValue) : -1;
  }

  int32_t onShapeChange(const Desc *inputs, int32_t, const Desc *, int32_t) noexcept override {
    specbuild_attention p;
    return fill(inputs, &p);
  }

  int32_t enqueue(const Desc *descriptions, const Desc *, const void *const *inputs, void *const *outputs,
                  void *workspace, cudaStream_t stream) noexcept override {
    specbuild_attention p;
    if (const int status = fill(descriptions, &p)) return status;
    point(inputs, outputs, workspace, &p);
    const bool placed = inputs[inputs_.at(kPastKey)] == outputs[1] && inputs[inputs_.at(kPastValue)] == outputs[2];
    // TensorRT binds buffers of its own, with anything in them, when it times layers for a build: a page table too.
    if (phase_ == nvinfer1::TensorRTPhase::kBUILD && (!placed || p.page_table)) {
      warn("not run: nothing is in place yet");
      return 0;
    }
    if (!placed)
      return refuse("past_key and present_key, past_value and present_value must each have one address: %s",
                    fields_.in_place == "alias" ? "build with the preview feature ALIASED_PLUGIN_IO_10_03"
                                                : "bind the same one to both");
    if (p.fault && cudaMemsetAsync(p.fault, 0, sizeof(int32_t) * p.batch, stream) != cudaSuccess)
      return refuse("CUDA did not clear the faults");
    const int status = specbuild_tree_attention(&p, stream);
    if (status) refuse("%s", specbuild_error());
    return status;
  }

  const nvinfer1::PluginFieldCollection *getFieldsToSerialize() noexcept override {
    serialized_.clear();
    each_field(fields_, [&](const char *name, const auto &field) {
      if constexpr (std::is_same_v<decltype(field), const std::string &>)
        serialized_.emplace_back(name, field.data(), type_of(field), int32_t(field.size()));
      else
        serialized_.emplace_back(name, &field, type_of(field), 1);
    });
    collection_ = {int32_t(serialized_.size()), serialized_.data()};
    return &collection_;
  }

 private:
  int expect(int32_t input_count, int32_t output_count) const {
    if (input_count != inputs_.count())
      return refuse("%d inputs: the field 'inputs' names %s", input_count, fields_.inputs.c_str());
    return output_count == getNbOutputs() ? 0 : refuse("%d outputs, not %d", output_count, getNbOutputs());
  }

  int32_t splits_for(const specbuild_attention &p) const {
    return fields_.splits ? fields_.splits : specbuild_attention_splits(&p, fields_.processors);
  }

  // Everything but the pointers.
  int fill(const Desc *descriptions, specbuild_attention *p) const {
    if (const int status = inputs_.measure(descriptions, p)) return status;
    p->scale = fields_.scale, p->softcap = fields_.softcap, p->norm_epsilon = fields_.norm_epsilon;
    p->window = fields_.window;
    p->splits = splits_for(*p);
    return SPECBUILD_OK;
  }
  int fill_largest(const DynamicDesc *inputs, specbuild_attention *p) const {
    std::vector<Desc> largest;
    for (int i = 0; i < inputs_.count(); ++i) {
      largest.push_back(inputs[i].desc);
      largest.back().dims = inputs[i].max;
    }
    return fill(largest.data(), p);
  }

  void point(const void *const *inputs, void *const *outputs, void *workspace, specbuild_attention *p) const {
    const auto given = [&](Input input) { return inputs_.has(input) ? inputs[inputs_.at(input)] : nullptr; };
    const auto indices = [&](Input input) { return static_cast<const int32_t *>(given(input)); };
    const auto table = [&](Input input) { return static_cast<const float *>(given(input)); };
    p->query = inputs[0], p->key = given(kKey), p->value = given(kValue);
    if (inputs_.has(kQkv)) {
      const uintptr_t head = uintptr_t(p->head_dim) * 2, first = reinterpret_cast<uintptr_t>(inputs[0]);
      p->key = reinterpret_cast<const void *>(first + uintptr_t(p->heads) * head);
      p->value = reinterpret_cast<const void *>(first + uintptr_t(p->heads + p->kv_heads) * head);
    }
    p->parents = p->tree_nodes ? indices(kParents) : nullptr;  // of no nodes at all: a chain
    if (!p->tree_nodes) p->tree_nodes = p->nodes;
    p->cache_len = indices(kCacheLen), p->tree_offset = indices(kTreeOffset);
    p->counts = indices(kCounts), p->page_table = indices(kPageTable);
    p->cos = table(kCos), p->sin = table(kSin), p->query_norm = table(kQueryNorm), p->key_norm = table(kKeyNorm);
    p->key_scale = table(kKeyScale), p->value_scale = table(kValueScale), p->sinks = table(kSinks);
    p->output = outputs[0], p->key_cache = outputs[1], p->value_cache = outputs[2];
    p->fault = fields_.fault ? static_cast<int32_t *>(outputs[3]) : nullptr;
    p->workspace = static_cast<float *>(workspace);
  }

  const Fields fields_;
  const Inputs inputs_;
  const nvinfer1::TensorRTPhase phase_;
  std::string description_;
  std::vector<nvinfer1::PluginField> serialized_;
  nvinfer1::PluginFieldCollection collection_{};
};

}  // namespace

nvinfer1::IPluginV3 *create(const Fields &fields, const Inputs &inputs, nvinfer1::TensorRTPhase phase) {
  return new TreeAttention(fields, inputs, phase);
}

}  // namespace specbuild::trt
