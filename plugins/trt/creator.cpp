// What TensorRT finds in the library: the plugin's creator, and the place for its log.
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include <cuda_runtime_api.h>

#include "trt/plugin.h"

namespace specbuild::trt {
namespace {

nvinfer1::ILoggerFinder *logger_finder = nullptr;

void log(nvinfer1::ILogger::Severity severity, const char *format, va_list arguments) {
  char text[512] = "specbuild::TreeAttention: ";
  const size_t prefix = strlen(text);
  vsnprintf(text + prefix, sizeof text - prefix, format, arguments);
  nvinfer1::ILogger *const logger = logger_finder ? logger_finder->findLogger() : nullptr;
  if (logger) logger->log(severity, text);
  else fprintf(stderr, "%s\n", text);
}

template <class T> int read_field(const nvinfer1::PluginField &given, T *to) {
  const nvinfer1::PluginFieldType type = type_of(*to);
  const bool text = type == nvinfer1::PluginFieldType::kCHAR;
  if (given.type != type || !given.data || (text ? given.length < 0 : given.length != 1))
    return refuse("the field '%s' takes %s, not %d of type %d", given.name,
                  text ? "text" : type == nvinfer1::PluginFieldType::kINT32 ? "one INT32" : "one FLOAT32", given.length,
                  int(given.type));
  if constexpr (std::is_same_v<T, std::string>)
    to->assign(static_cast<const char *>(given.data), strnlen(static_cast<const char *>(given.data), given.length));
  else
    memcpy(to, given.data, sizeof *to);
  return SPECBUILD_OK;
}

int read_fields(const nvinfer1::PluginFieldCollection &given, Fields *fields) {
  for (int i = 0; i < given.nbFields; ++i) {
    int status = -1;
    each_field(*fields, [&](const char *name, auto &field) {
      if (!strcmp(name, given.fields[i].name)) status = read_field(given.fields[i], &field);
    });
    if (status == -1) return refuse("there is no field '%s'", given.fields[i].name);
    if (status) return status;
  }
  if (!(fields->scale > 0.0f)) return refuse("scale %g: give a positive one", fields->scale);
  if (!(fields->softcap >= 0.0f)) return refuse("softcap %g: 0 for none, or a positive bound", fields->softcap);
  if (!(fields->norm_epsilon >= 0.0f)) return refuse("norm_epsilon %g is negative", fields->norm_epsilon);
  if (fields->window < 0) return refuse("window %d: 0 for none, or the positions a node sees", fields->window);
  if (fields->splits < 0 || fields->splits > SPECBUILD_MOST_SPLITS)
    return refuse("splits %d: 0 for automatic, or 1 to %d", fields->splits, SPECBUILD_MOST_SPLITS);
  if (fields->processors < 0) return refuse("processors %d: 0 for the device's, or their number", fields->processors);
  if (fields->fault != 0 && fields->fault != 1) return refuse("fault %d: 0 or 1", fields->fault);
  if (fields->in_place != "alias" && fields->in_place != "address")
    return refuse("in_place '%s': use 'alias' or 'address'", fields->in_place.c_str());
  return SPECBUILD_OK;
}

// Multiprocessors of the current device; 0 without one.
int32_t multiprocessors() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  return cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) == cudaSuccess ? count : 0;
}

class Creator final : public nvinfer1::IPluginCreatorV3One {
 public:
  Creator() {
    Fields fields;
    each_field(fields, [&](const char *name, auto &field) { names_.emplace_back(name, nullptr, type_of(field), 1); });
    collection_ = {int32_t(names_.size()), names_.data()};
  }

  const char *getPluginName() const noexcept override { return kName; }
  const char *getPluginVersion() const noexcept override { return kVersion; }
  const char *getPluginNamespace() const noexcept override { return kNamespace; }
  const nvinfer1::PluginFieldCollection *getFieldNames() noexcept override { return &collection_; }

  nvinfer1::IPluginV3 *createPlugin(const char *, const nvinfer1::PluginFieldCollection *given,
                                    nvinfer1::TensorRTPhase phase) noexcept override {
    try {
      Fields fields;
      Inputs inputs;
      if (read_fields(given ? *given : nvinfer1::PluginFieldCollection{}, &fields) || inputs.read(fields.inputs))
        return nullptr;
      // The number is kept with the engine: its workspace was measured for it.
      if (phase == nvinfer1::TensorRTPhase::kBUILD && !fields.processors) fields.processors = multiprocessors();
      return create(fields, inputs, phase);
    } catch (const std::exception &error) {
      refuse("%s", error.what());
      return nullptr;
    }
  }

 private:
  std::vector<nvinfer1::PluginField> names_;
  nvinfer1::PluginFieldCollection collection_{};
};

}  // namespace

int refuse(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  log(nvinfer1::ILogger::Severity::kERROR, format, arguments);
  va_end(arguments);
  return SPECBUILD_BAD_INPUT;
}

void warn(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  log(nvinfer1::ILogger::Severity::kWARNING, format, arguments);
  va_end(arguments);
}

}  // namespace specbuild::trt

// IPluginRegistry::loadLibrary, and a plan that carries its plugins, call these two.
extern "C" {

__attribute__((visibility("default"))) void setLoggerFinder(nvinfer1::ILoggerFinder *finder) {
  specbuild::trt::logger_finder = finder;
}

__attribute__((visibility("default"))) nvinfer1::IPluginCreatorInterface *const *getCreators(int32_t &count) {
  static specbuild::trt::Creator creator;
  static nvinfer1::IPluginCreatorInterface *const creators[] = {&creator};
  count = 1;
  return creators;
}

}  // extern "C"
