// Streams that record instead of run: what one captures, what joins it, and what breaks it.
#include "card/card.h"

#include <algorithm>

namespace card {

std::set<std::shared_ptr<Capture>> captures;

namespace {

cuuint64_t begun = 0;

// What has to run before one of these, and they themselves.
std::set<const Node *> behind(const Graph &graph, const std::vector<Node *> &tails) {
  std::set<const Node *> found(tails.begin(), tails.end());
  for (size_t before = 0; before != found.size();) {
    before = found.size();
    for (const Edge &edge : graph.edges)
      if (found.count(edge.to)) found.insert(edge.from);
  }
  return found;
}

bool joined(const Capture &capture, const Stream &origin) {
  const std::set<const Node *> reached = behind(*capture.graph, origin.tails);
  for (const auto &stream : streams)
    if (stream->capture.get() == &capture)
      for (const Node *tail : stream->tails)
        if (!reached.count(tail)) return false;
  return true;
}

// All its streams run what they are given again.
void end(const std::shared_ptr<Capture> &capture) {
  for (const auto &stream : streams)
    if (stream->capture == capture) stream->capture = nullptr, stream->tails.clear(), stream->overlap_next = false;
  captures.erase(capture);
}

}  // namespace

bool programmatic(const CUgraphEdgeData &data) { return data.type == CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC; }

bool anyone_captures() { return !captures.empty(); }

CUresult break_capture(Stream &stream) {
  Capture &capture = *stream.capture;
  const CUresult status = capture.broken ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  capture.broken = true;
  return status;
}

CUresult unsafe() {
  CUresult status = CUDA_SUCCESS;
  for (const auto &capture : captures) {
    const bool mine = capture->thread == std::this_thread::get_id();
    if (capture->mode == CU_STREAM_CAPTURE_MODE_RELAXED) continue;
    if (mine || capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL)
      capture->broken = true, status = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return status;
}

CUresult record(Stream &stream, const std::shared_ptr<Node> &node, bool overlap) {
  Capture &capture = *stream.capture;
  if (capture.broken) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  overlap |= stream.overlap_next, stream.overlap_next = false;
  capture.graph->nodes.push_back(node);
  for (Node *tail : stream.tails) {
    CUgraphEdgeData data = {};
    if (overlap && node->type == CU_GRAPH_NODE_TYPE_KERNEL && tail->type == CU_GRAPH_NODE_TYPE_KERNEL)
      data.type = CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC, data.from_port = CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC;
    capture.graph->edges.push_back({tail, node.get(), data});
  }
  stream.tails = {node.get()};
  return CUDA_SUCCESS;
}

CUresult record(Stream &stream, CUgraphNodeType type, std::function<void()> work, bool overlap) {
  auto node = std::make_shared<Node>();
  node->type = type, node->work = std::move(work);
  return record(stream, node, overlap);
}

CUresult join(Stream &stream, const Event &event) {
  if (!event.capture && !event.mark) return CUDA_SUCCESS;  // never recorded
  if (!event.capture) return break_capture(stream), CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
  if (!captures.count(event.capture)) {
    if (stream.capture) break_capture(stream);
    return CUDA_ERROR_CAPTURED_EVENT;
  }
  if (event.capture->broken) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (stream.capture && stream.capture != event.capture) {
    event.capture->broken = true;
    return break_capture(stream), CUDA_ERROR_STREAM_CAPTURE_MERGE;
  }
  if (stream.shared_from_this() == stream_of(nullptr)) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  stream.capture = event.capture;
  for (Node *tail : event.tails)
    if (std::find(stream.tails.begin(), stream.tails.end(), tail) == stream.tails.end()) stream.tails.push_back(tail);
  return CUDA_SUCCESS;
}

}  // namespace card

using namespace card;

extern "C" {

CUresult cuStreamBeginCapture(CUstream handle, CUstreamCaptureMode mode) {
  CARD_ENTER();
  const std::shared_ptr<Stream> stream = stream_of(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (stream == stream_of(nullptr)) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (stream->capture) return break_capture(*stream), CUDA_ERROR_ILLEGAL_STATE;
  auto capture = std::make_shared<Capture>();
  capture->origin = stream, capture->mode = mode;
  capture->thread = std::this_thread::get_id(), capture->number = ++begun;
  captures.insert(capture);
  stream->capture = capture;
  return CUDA_SUCCESS;
}

CUresult cuStreamEndCapture(CUstream handle, CUgraph *graph) {
  CARD_ENTER();
  *graph = nullptr;
  const std::shared_ptr<Stream> stream = stream_of(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  const std::shared_ptr<Capture> capture = stream->capture;
  if (!capture) return CUDA_ERROR_ILLEGAL_STATE;
  if (capture->origin.lock() != stream) return break_capture(*stream), CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
  if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != std::this_thread::get_id())
    return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
  const bool whole = joined(*capture, *stream);
  end(capture);
  if (capture->broken || !whole) forget(*capture->graph), graphs.erase(reinterpret_cast<CUgraph>(capture->graph.get()));
  if (capture->broken) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (!whole) return CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
  *graph = handle_of(capture->graph);
  return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *status) {
  CARD_ENTER();
  const std::shared_ptr<Stream> stream = stream_of(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  *status = !stream->capture          ? CU_STREAM_CAPTURE_STATUS_NONE
            : stream->capture->broken ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                      : CU_STREAM_CAPTURE_STATUS_ACTIVE;
  return CUDA_SUCCESS;
}

CUresult cuStreamGetCaptureInfo(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *number, CUgraph *graph,
                                const CUgraphNode **nodes, const CUgraphEdgeData **data, size_t *count) {
  if (const CUresult problem = cuStreamIsCapturing(handle, status)) return problem;
  const std::lock_guard<std::recursive_mutex> guard(lock);
  if (*status != CU_STREAM_CAPTURE_STATUS_ACTIVE) return CUDA_SUCCESS;
  const std::shared_ptr<Stream> stream = stream_of(handle);
  stream->tail_data.assign(stream->tails.size(), CUgraphEdgeData{});
  if (number) *number = stream->capture->number;
  if (graph) *graph = handle_of(stream->capture->graph);
  if (nodes) *nodes = reinterpret_cast<const CUgraphNode *>(stream->tails.data());
  if (data) *data = stream->tail_data.data();
  if (count) *count = stream->tails.size();
  return CUDA_SUCCESS;
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
  thread_local CUstreamCaptureMode mine = CU_STREAM_CAPTURE_MODE_GLOBAL;
  std::swap(*mode, mine);
  return CUDA_SUCCESS;
}

}  // extern "C"
