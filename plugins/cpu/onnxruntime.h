// The part of ONNX Runtime's C interface that the operators use; no package on PyPI brings its header.
//
// The interface is a table of functions that only grows: an entry keeps its index. The indices and the layout of
// OrtCustomOp are those of `onnxruntime_c_api.h`, version 23 of the interface, which ONNX Runtime 1.23 and later provide.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {
struct OrtKernelContext;
struct OrtKernelInfo;
struct OrtSessionOptions;
struct OrtStatus;
struct OrtCustomOpDomain;
struct OrtTensorTypeAndShapeInfo;
struct OrtValue;
struct OrtApi {
  void (*entries[275])();
};
struct OrtApiBase {
  const OrtApi* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};

enum OrtElementType { kOrtFloat = 1, kOrtUint8 = 2, kOrtInt32 = 6, kOrtInt64 = 7, kOrtBool = 9 };
enum OrtCharacteristic { kOrtRequired = 0, kOrtOptional = 1 };

struct OrtCustomOp {
  uint32_t version;
  void* (*CreateKernel)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*);
  const char* (*GetName)(const OrtCustomOp*);
  const char* (*GetExecutionProviderType)(const OrtCustomOp*);
  OrtElementType (*GetInputType)(const OrtCustomOp*, size_t);
  size_t (*GetInputTypeCount)(const OrtCustomOp*);
  OrtElementType (*GetOutputType)(const OrtCustomOp*, size_t);
  size_t (*GetOutputTypeCount)(const OrtCustomOp*);
  void (*KernelCompute)(void*, OrtKernelContext*);
  void (*KernelDestroy)(void*);
  OrtCharacteristic (*GetInputCharacteristic)(const OrtCustomOp*, size_t);
  OrtCharacteristic (*GetOutputCharacteristic)(const OrtCustomOp*, size_t);
  int (*GetInputMemoryType)(const OrtCustomOp*, size_t);
  int (*GetVariadicInputMinArity)(const OrtCustomOp*);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp*);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp*);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp*);
  OrtStatus* (*CreateKernelV2)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*, void**);
  OrtStatus* (*KernelComputeV2)(void*, OrtKernelContext*);
  void* InferOutputShape;
  int (*GetStartVersion)(const OrtCustomOp*);
  int (*GetEndVersion)(const OrtCustomOp*);
  void* GetMayInplace;
  void* ReleaseMayInplace;
  void* GetAliasMap;
  void* ReleaseAliasMap;
};
static_assert(sizeof(OrtCustomOp) == 208, "the layout is ONNX Runtime's");
}

namespace specbuild {

constexpr uint32_t kOrtVersion = 23;

// The functions of the table by name.
class Ort {
 public:
  explicit Ort(const OrtApi* api) : api_(api) {}

  OrtStatus* status(const char* message) const { return at<OrtStatus*(int, const char*)>(0)(1, message); }
  OrtStatus* create_domain(const char* name, OrtCustomOpDomain** domain) const {
    return at<OrtStatus*(const char*, OrtCustomOpDomain**)>(26)(name, domain);
  }
  OrtStatus* add_operator(OrtCustomOpDomain* domain, const OrtCustomOp* op) const {
    return at<OrtStatus*(OrtCustomOpDomain*, const OrtCustomOp*)>(27)(domain, op);
  }
  OrtStatus* add_domain(OrtSessionOptions* options, OrtCustomOpDomain* domain) const {
    return at<OrtStatus*(OrtSessionOptions*, OrtCustomOpDomain*)>(28)(options, domain);
  }
  OrtStatus* data(const OrtValue* value, void** data) const {
    return at<OrtStatus*(OrtValue*, void**)>(51)(const_cast<OrtValue*>(value), data);
  }
  OrtStatus* dimension_count(const OrtTensorTypeAndShapeInfo* info, size_t* count) const {
    return at<OrtStatus*(const OrtTensorTypeAndShapeInfo*, size_t*)>(61)(info, count);
  }
  OrtStatus* dimensions(const OrtTensorTypeAndShapeInfo* info, int64_t* dimensions, size_t count) const {
    return at<OrtStatus*(const OrtTensorTypeAndShapeInfo*, int64_t*, size_t)>(62)(info, dimensions, count);
  }
  OrtStatus* shape_info(const OrtValue* value, OrtTensorTypeAndShapeInfo** info) const {
    return at<OrtStatus*(const OrtValue*, OrtTensorTypeAndShapeInfo**)>(65)(value, info);
  }
  void release(OrtStatus* status) const { at<void(OrtStatus*)>(93)(status); }
  void release(OrtTensorTypeAndShapeInfo* info) const { at<void(OrtTensorTypeAndShapeInfo*)>(99)(info); }
  OrtStatus* attribute(const OrtKernelInfo* info, const char* name, float* number) const {
    return at<OrtStatus*(const OrtKernelInfo*, const char*, float*)>(85)(info, name, number);
  }
  OrtStatus* attribute(const OrtKernelInfo* info, const char* name, int64_t* number) const {
    return at<OrtStatus*(const OrtKernelInfo*, const char*, int64_t*)>(86)(info, name, number);
  }
  OrtStatus* input_count(const OrtKernelContext* context, size_t* count) const {
    return at<OrtStatus*(const OrtKernelContext*, size_t*)>(88)(context, count);
  }
  OrtStatus* input(const OrtKernelContext* context, size_t index, const OrtValue** value) const {
    return at<OrtStatus*(const OrtKernelContext*, size_t, const OrtValue**)>(90)(context, index, value);
  }
  OrtStatus* output(OrtKernelContext* context, size_t index, const int64_t* shape, size_t count, OrtValue** value) const {
    using Function = OrtStatus*(OrtKernelContext*, size_t, const int64_t*, size_t, OrtValue**);
    return at<Function>(91)(context, index, shape, count, value);
  }
  // Calls `work(data, i)` for each i below `total` on the session's threads.
  OrtStatus* parallel(const OrtKernelContext* context, void (*work)(void*, size_t), size_t total, void* data) const {
    using Function = OrtStatus*(const OrtKernelContext*, void (*)(void*, size_t), size_t, size_t, void*);
    return at<Function>(274)(context, work, total, 0, data);
  }

 private:
  template <class Function>
  Function* at(int index) const {
    return reinterpret_cast<Function*>(api_->entries[index]);
  }

  const OrtApi* api_;
};

}  // namespace specbuild
