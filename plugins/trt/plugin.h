// What the plugin is given: its fields, and its inputs by name, with the types and shapes that fit together.
#pragma once

#include <NvInferRuntime.h>

#include <string>
#include <vector>

#include "kernels.h"

namespace specbuild::trt {

constexpr char kName[] = "TreeAttention", kVersion[] = "1", kNamespace[] = "specbuild";

// Write one line to TensorRT's log, or to stderr where TensorRT lent none; refuse() returns SPECBUILD_BAD_INPUT.
int refuse(const char *format, ...) __attribute__((format(printf, 1, 2)));
void warn(const char *format, ...) __attribute__((format(printf, 1, 2)));

struct Fields {
  float scale = 0.0f, softcap = 0.0f, norm_epsilon = 1e-6f;
  int32_t window = 0;
  int32_t splits = 0;      // 0: as many as fill `processors` multiprocessors
  int32_t processors = 0;  // 0: those of the device that the engine is built on
  int32_t fault = 0;       // 1: a fourth output says what the kernel found wrong
  std::string inputs = "query,key,value,past_key,past_value,parents,cache_len,tree_offset,cos,sin";
  std::string in_place = "address";
};

// Calls visit(name, field) for each; what there is to read, check, serialize and describe.
template <class F, class Visit> void each_field(F &fields, Visit &&visit) {
  visit("scale", fields.scale);
  visit("softcap", fields.softcap);
  visit("norm_epsilon", fields.norm_epsilon);
  visit("window", fields.window);
  visit("splits", fields.splits);
  visit("processors", fields.processors);
  visit("fault", fields.fault);
  visit("inputs", fields.inputs);
  visit("in_place", fields.in_place);
}
inline nvinfer1::PluginFieldType type_of(float) { return nvinfer1::PluginFieldType::kFLOAT32; }
inline nvinfer1::PluginFieldType type_of(int32_t) { return nvinfer1::PluginFieldType::kINT32; }
inline nvinfer1::PluginFieldType type_of(const std::string &) { return nvinfer1::PluginFieldType::kCHAR; }

// Every input there can be, in the order in which they come. Positions are none: a node's is cache_len plus its depth,
// by contract, and the kernel counts depths itself.
enum Input {
  kQuery, kKey, kValue, kQkv, kPastKey, kPastValue, kParents, kCacheLen, kTreeOffset, kCos, kSin, kQueryNorm, kKeyNorm,
  kCounts, kPageTable, kKeyScale, kValueScale, kSinks, kInputs
};

class Inputs {
 public:
  // Reads names separated by commas. Not SPECBUILD_OK: a name is unknown, out of order, or missing; the log says which.
  int read(const std::string &names);
  int count() const { return int(order_.size()); }
  // Where an input comes, or −1.
  int at(Input input) const { return at_[input]; }
  bool has(Input input) const { return at_[input] >= 0; }
  // Whether the input at a position may have a type, given the types of those before it.
  bool takes(int position, nvinfer1::DataType type, nvinfer1::DataType activations, nvinfer1::DataType cache) const;
  // Sets the numbers and types in `p`. Not SPECBUILD_OK: two dimensions that should be equal are not.
  int measure(const nvinfer1::PluginTensorDesc *descriptions, specbuild_attention *p) const;

 private:
  std::vector<Input> order_;
  int at_[kInputs];
};

// The plugin of fields that have been checked, and of the inputs that were read from them.
nvinfer1::IPluginV3 *create(const Fields &fields, const Inputs &inputs, nvinfer1::TensorRTPhase phase);

}  // namespace specbuild::trt
