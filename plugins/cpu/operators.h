// What every operator needs of ONNX Runtime: its inputs, its output, threads and errors.
#pragma once

#include <cstdint>
#include <exception>
#include <vector>

#include "onnxruntime.h"
#include "products.h"

namespace specbuild {

extern const OrtApi* g_api;

// Ends an operator's call with a status of ONNX Runtime.
struct Failure {
  OrtStatus* status;
};

inline void check(OrtStatus* status) {
  if (status) throw Failure{status};
}

inline Ort ort() { return Ort(g_api); }

inline void require(bool holds, const char* message) {
  if (!holds) throw Failure{ort().status(message)};
}

template <class Number = int64_t>
Number attribute(const OrtKernelInfo* info, const char* name) {
  Number number{};
  check(ort().attribute(info, name, &number));
  return number;
}

// Returns an attribute, or `otherwise` where a node has none.
template <class Number>
Number attribute_or(const OrtKernelInfo* info, const char* name, Number otherwise) {
  Number number{};
  OrtStatus* missing = ort().attribute(info, name, &number);
  if (!missing) return number;
  ort().release(missing);
  return otherwise;
}

inline std::vector<int64_t> shape_of(const OrtValue* value) {
  OrtTensorTypeAndShapeInfo* info;
  check(ort().shape_info(value, &info));
  size_t count = 0;
  check(ort().dimension_count(info, &count));
  std::vector<int64_t> shape(count);
  check(ort().dimensions(info, shape.data(), count));
  ort().release(info);
  return shape;
}

inline int64_t product(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (int64_t dimension : shape) count *= dimension;
  return count;
}

struct Tensor {
  std::vector<int64_t> shape;
  void* data = nullptr;
};

// Returns an input; one that was left out has no data.
inline Tensor input(OrtKernelContext* context, size_t index) {
  size_t count = 0;
  check(ort().input_count(context, &count));
  const OrtValue* value = nullptr;
  if (index < count) check(ort().input(context, index, &value));
  Tensor tensor;
  if (!value) return tensor;
  tensor.shape = shape_of(value);
  check(ort().data(value, &tensor.data));
  return tensor;
}

inline float* output(OrtKernelContext* context, const std::vector<int64_t>& shape) {
  OrtValue* value;
  void* data;
  check(ort().output(context, 0, shape.data(), shape.size(), &value));
  check(ort().data(value, &data));
  return static_cast<float*>(data);
}

template <class Work>
inline void parallel(OrtKernelContext* context, int64_t total, const Work& work) {
  if (total == 1) return work(0);
  const auto call = [](void* data, size_t index) { (*static_cast<const Work*>(data))(static_cast<int64_t>(index)); };
  check(ort().parallel(context, call, static_cast<size_t>(total), const_cast<Work*>(&work)));
}

// Returns what went wrong in a call of ONNX Runtime's, or null: no exception leaves it.
template <class Work>
OrtStatus* status_of(const Work& work) {
  try {
    work();
    return nullptr;
  } catch (const Failure& failure) {
    return failure.status;
  } catch (const std::exception& error) {
    return ort().status(error.what());
  }
}

// Describes `Kernel` to ONNX Runtime.
template <class Kernel>
OrtCustomOp describe() {
  OrtCustomOp op{};
  op.version = kOrtVersion;
  op.GetName = [](const OrtCustomOp*) { return Kernel::kName; };
  op.GetExecutionProviderType = [](const OrtCustomOp*) { return "CPUExecutionProvider"; };
  op.GetInputTypeCount = [](const OrtCustomOp*) { return sizeof(Kernel::kInputs) / sizeof(Kernel::kInputs[0]); };
  op.GetInputType = [](const OrtCustomOp*, size_t index) { return Kernel::kInputs[index]; };
  op.GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return 1; };
  op.GetOutputType = [](const OrtCustomOp*, size_t) { return kOrtFloat; };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t index) {
    return index < Kernel::kRequired ? kOrtRequired : kOrtOptional;
  };
  op.GetOutputCharacteristic = [](const OrtCustomOp*, size_t) { return kOrtRequired; };
  op.GetInputMemoryType = [](const OrtCustomOp*, size_t) { return 0; };
  op.GetVariadicInputMinArity = op.GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 0; };
  op.GetVariadicOutputMinArity = op.GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 0; };
  op.GetStartVersion = [](const OrtCustomOp*) { return 1; };
  op.GetEndVersion = [](const OrtCustomOp*) { return 1; };
  op.CreateKernelV2 = [](const OrtCustomOp*, const OrtApi*, const OrtKernelInfo* info, void** kernel) {
    return status_of([&] { *kernel = new Kernel(info); });
  };
  op.KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
    return status_of([&] { static_cast<const Kernel*>(kernel)->compute(context); });
  };
  op.KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  return op;
}

// The set with an index into `all_instructions`; the fastest that the processor has for -1.
const Instructions& instructions_of(int64_t index);

// Describe the operators.
OrtCustomOp rowwise_mat_mul();
OrtCustomOp rowwise_gather();
OrtCustomOp tree_attention();
OrtCustomOp tree_convolution();
OrtCustomOp tree_recurrence();

}  // namespace specbuild
