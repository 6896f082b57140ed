// Streams and events: queues that run when somebody waits.
#include "card/card.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>

namespace card {

std::set<std::shared_ptr<Stream>> streams;

namespace {

std::map<CUevent, std::unique_ptr<Event>> events;
unsigned long long made = 0;
unsigned patience = 1;

std::shared_ptr<Stream> legacy() {
  static const std::shared_ptr<Stream> stream = [] {
    auto first = std::make_shared<Stream>();
    streams.insert(first);
    return first;
  }();
  return stream;
}

bool blocking(const Stream &stream) { return !(stream.flags & CU_STREAM_NON_BLOCKING); }

void advance(Stream &stream) {
  const Step step = std::move(stream.queue.front());
  stream.queue.pop_front();
  step(stream);
}

CUresult make_stream(CUstream *handle, unsigned flags, int priority) {
  auto stream = std::make_shared<Stream>();
  stream->flags = flags, stream->priority = priority, stream->number = ++made;
  streams.insert(stream);
  *handle = reinterpret_cast<CUstream>(stream.get());
  return CUDA_SUCCESS;
}

Event *event_of(CUevent handle) {
  const auto found = events.find(handle);
  return found == events.end() ? nullptr : found->second.get();
}

}  // namespace

std::shared_ptr<Stream> stream_of(CUstream handle) {
  if (handle == nullptr || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD) return legacy();
  for (const auto &stream : streams)
    if (reinterpret_cast<CUstream>(stream.get()) == handle) return stream;
  return nullptr;
}

void reach(Mark &mark) {
  while (!mark.reached) {
    const std::shared_ptr<Stream> stream = mark.stream.lock();
    if (!stream || stream->queue.empty()) break;
    advance(*stream);
  }
}

void enqueue(Stream &stream, Step step) {
  if (&stream == legacy().get()) {  // it waits for all that do not say they need not be waited for
    for (const auto &other : streams)
      if (other.get() != &stream && blocking(*other) && other->last && !other->last->reached) {
        const auto last = other->last;
        stream.queue.push_back([last](Stream &) { reach(*last); });
      }
  } else if (blocking(stream) && legacy()->last && !legacy()->last->reached) {
    const auto last = legacy()->last;
    stream.queue.push_back([last](Stream &) { reach(*last); });
  }
  stream.queue.push_back(std::move(step));
  mark(stream);
}

std::shared_ptr<Mark> mark(Stream &stream) {
  auto made = std::make_shared<Mark>();
  made->stream = stream.weak_from_this();
  stream.queue.push_back([made](Stream &) {
    made->reached = true;
    made->seconds = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  });
  return stream.last = made;
}

void wait_in(Stream &stream, const std::shared_ptr<Mark> &mark) {
  if (mark && !mark->reached) stream.queue.push_back([mark](Stream &) { reach(*mark); });
}

void drain(Stream &stream) {
  while (!stream.queue.empty()) advance(stream);
}

void drain_all() {
  std::vector<std::shared_ptr<Stream>> all(streams.begin(), streams.end());
  for (const auto &stream : all) drain(*stream);
}

CUresult submit(CUstream handle, CUgraphNodeType type, std::function<void()> work, bool overlap) {
  const std::shared_ptr<Stream> stream = stream_of(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (stream->capture) return record(*stream, type, std::move(work), overlap);
  if (stream == legacy() && anyone_captures()) {
    for (const auto &other : streams)
      if (other->capture && blocking(*other)) return break_capture(*other), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  }
  enqueue(*stream, [work](Stream &) { work(); });
  return CUDA_SUCCESS;
}

}  // namespace card

using namespace card;

extern "C" {

CUresult cuStreamCreate(CUstream *handle, unsigned int flags) {
  CARD_ENTER();
  return make_stream(handle, flags, 0);
}
CUresult cuStreamCreateWithPriority(CUstream *handle, unsigned int flags, int priority) {
  CARD_ENTER();
  return make_stream(handle, flags, priority);
}
CUresult cuStreamDestroy(CUstream handle) {
  CARD_ENTER();
  const std::shared_ptr<Stream> stream = stream_of(handle);
  if (!stream || stream == legacy()) return CUDA_ERROR_INVALID_HANDLE;
  if (stream->capture) break_capture(*stream);
  drain(*stream);
  streams.erase(stream);
  return CUDA_SUCCESS;
}
CUresult cuStreamGetFlags(CUstream handle, unsigned int *flags) {
  CARD_ENTER();
  const std::shared_ptr<Stream> stream = stream_of(handle);
  return stream ? (*flags = stream->flags, CUDA_SUCCESS) : CUDA_ERROR_INVALID_HANDLE;
}
CUresult cuStreamGetPriority(CUstream handle, int *priority) {
  CARD_ENTER();
  const std::shared_ptr<Stream> stream = stream_of(handle);
  return stream ? (*priority = stream->priority, CUDA_SUCCESS) : CUDA_ERROR_INVALID_HANDLE;
}
CUresult cuStreamGetId(CUstream handle, unsigned long long *number) {
  CARD_ENTER();
  const std::shared_ptr<Stream> stream = stream_of(handle);
  return stream ? (*number = stream->number, CUDA_SUCCESS) : CUDA_ERROR_INVALID_HANDLE;
}
CUresult cuStreamGetCtx(CUstream handle, CUcontext *context) {
  CARD_ENTER();
  return stream_of(handle) ? cuCtxGetCurrent(context) : CUDA_ERROR_INVALID_HANDLE;
}
CUresult cuStreamGetDevice(CUstream handle, CUdevice *device) {
  CARD_ENTER();
  return stream_of(handle) ? (*device = 0, CUDA_SUCCESS) : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuStreamSynchronize(CUstream handle) {
  CARD_ENTER();
  const std::shared_ptr<Stream> stream = stream_of(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (stream->capture) return break_capture(*stream);
  if (stream == legacy()) enqueue(*stream, [](Stream &) {});
  if (getenv("CARD_OTHERS_FIRST")) drain_all();  // as a GPU may, too
  drain(*stream);
  return failure();
}
CUresult cuStreamQuery(CUstream handle) {
  CARD_ENTER();
  const std::shared_ptr<Stream> stream = stream_of(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (stream->capture) return break_capture(*stream);
  patience = patience * 5 + 3;
  for (unsigned steps = 1 + (patience >> 8) % 13; steps && !stream->queue.empty(); --steps) advance(*stream);
  return stream->queue.empty() ? failure() : failure() ? failure() : CUDA_ERROR_NOT_READY;
}
CUresult cuStreamWaitEvent(CUstream handle, CUevent other, unsigned int) {
  CARD_ENTER();
  const std::shared_ptr<Stream> stream = stream_of(handle);
  const Event *const event = event_of(other);
  if (!stream || !event) return CUDA_ERROR_INVALID_HANDLE;
  if (event->capture || stream->capture) return join(*stream, *event);
  wait_in(*stream, event->mark);
  mark(*stream);
  return CUDA_SUCCESS;
}

// ---- events

CUresult cuEventCreate(CUevent *handle, unsigned int flags) {
  CARD_ENTER();
  auto event = std::make_unique<Event>();
  event->flags = flags;
  *handle = reinterpret_cast<CUevent>(event.get());
  events[*handle] = std::move(event);
  return CUDA_SUCCESS;
}
CUresult cuEventDestroy(CUevent handle) {
  CARD_ENTER();
  return events.erase(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
CUresult cuEventRecord(CUevent handle, CUstream on) {
  CARD_ENTER();
  const std::shared_ptr<Stream> stream = stream_of(on);
  Event *const event = event_of(handle);
  if (!stream || !event) return CUDA_ERROR_INVALID_HANDLE;
  if (stream->capture && stream->capture->broken) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  event->capture = stream->capture, event->tails = stream->tails;
  event->mark = stream->capture ? nullptr : mark(*stream);
  return CUDA_SUCCESS;
}
CUresult cuEventSynchronize(CUevent handle) {
  CARD_ENTER(Needs::context_uncaptured);
  const Event *const event = event_of(handle);
  if (!event) return CUDA_ERROR_INVALID_HANDLE;
  if (event->capture) return CUDA_ERROR_CAPTURED_EVENT;
  if (event->mark) reach(*event->mark);
  return failure();
}
CUresult cuEventQuery(CUevent handle) {
  CARD_ENTER(Needs::context_uncaptured);
  const Event *const event = event_of(handle);
  if (!event) return CUDA_ERROR_INVALID_HANDLE;
  if (event->capture) return CUDA_ERROR_CAPTURED_EVENT;
  if (!event->mark || event->mark->reached) return failure();
  const std::shared_ptr<Stream> stream = event->mark->stream.lock();
  if (stream && !stream->queue.empty()) advance(*stream);
  return event->mark->reached ? failure() : CUDA_ERROR_NOT_READY;
}
CUresult cuEventElapsedTime(float *milliseconds, CUevent first, CUevent second) {
  CARD_ENTER();
  const Event *const begin = event_of(first), *const end = event_of(second);
  if (!begin || !end) return CUDA_ERROR_INVALID_HANDLE;
  if ((begin->flags | end->flags) & CU_EVENT_DISABLE_TIMING || !begin->mark || !end->mark) return CUDA_ERROR_INVALID_HANDLE;
  if (!begin->mark->reached || !end->mark->reached) return CUDA_ERROR_NOT_READY;
  *milliseconds = float(1000 * (end->mark->seconds - begin->mark->seconds));
  return CUDA_SUCCESS;
}

// ---- what other libraries ask

int card_launch(void *stream, void (*run)(void *), void *argument, void (*release)(void *), int overlap) {
  const Entry entry("card_launch", Needs::nothing);  // whoever launches so takes the first context there is
  const std::shared_ptr<void> held(argument, [release](void *at) { if (release) release(at); });
  if (entry.status || failure()) return entry.status ? entry.status : failure();
  return submit(static_cast<CUstream>(stream), CU_GRAPH_NODE_TYPE_KERNEL, [run, held] { run(held.get()); }, overlap);
}
int card_enqueue(void *stream, void (*run)(void *), void *argument) {
  return card_launch(stream, run, argument, nullptr, 0);
}
int card_programmatic(void *handle) {
  const Entry entry("card_programmatic", Needs::nothing);
  const std::shared_ptr<Stream> stream = stream_of(static_cast<CUstream>(handle));
  return stream ? (stream->overlap_next = true, CUDA_SUCCESS) : CUDA_ERROR_INVALID_HANDLE;
}
size_t card_count(const char *what) {
  const std::lock_guard<std::recursive_mutex> guard(lock);
  const std::map<std::string, size_t> counts = {
      {"memory", allocated(false)}, {"pinned", allocated(true)}, {"streams", streams.size() - streams.count(legacy())},
      {"events", events.size()}, {"graphs", graphs.size()}, {"execs", execs.size()}};
  const auto found = counts.find(what);
  return found == counts.end() ? size_t(-1) : found->second;
}

}  // extern "C"
