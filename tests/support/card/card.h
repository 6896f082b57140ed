// A stand-in for NVIDIA's driver (libcuda.so.1): memory of the host for a GPU's, streams that are queues, kernels compiled
// for the host. For tests; it shows what Python asks of a driver and in which order, never how fast.
//
// It is as lazy as a GPU may be: work runs when somebody waits for it, and a little of it when a stream is queried. What a
// driver forbids is refused with its own code; what would end a process on a GPU ends it here, with a line on stderr.
#pragma once

#include <cuda.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "card/kernel.h"

namespace card {

struct Stream;
using Step = std::function<void(Stream &)>;  // may put further steps at the stream's front

// A place in a stream, which events and waits share: reached once all in front of it has run.
struct Mark {
  std::weak_ptr<Stream> stream;
  bool reached = false;
  double seconds = 0;
};

// ---- graphs

struct Condition {
  unsigned value, initial;  // the handle is the address of `value`
  bool assign;              // the initial value, at every launch
};

struct Graph;
struct Node {
  CUgraphNodeType type;
  std::function<void()> work;  // of kernels, copies and fills
  std::vector<std::shared_ptr<Graph>> inside;  // a child, or a conditional node's bodies
  std::shared_ptr<Condition> condition;
  CUgraphConditionalNodeType kind = CU_GRAPH_COND_TYPE_IF;
  std::vector<CUgraph> handles;  // of `inside`, which the driver hands out
};
struct Edge {
  Node *from, *to;
  CUgraphEdgeData data;
  bool same(const Edge &other) const;
};
struct Graph {
  std::vector<std::shared_ptr<Node>> nodes;
  std::vector<Edge> edges;
  std::vector<std::shared_ptr<Condition>> conditions;
  std::vector<std::shared_ptr<void>> kept;  // for as long as the graph or a copy is there
  bool body = false;   // of a conditional node, at any depth
  bool owned = false;  // by a node: not to be destroyed
};
struct Exec {
  std::shared_ptr<Graph> graph;
  std::shared_ptr<Mark> last;
};

bool programmatic(const CUgraphEdgeData &data);
std::shared_ptr<Graph> copy_of(const Graph &graph);
CUresult fits(const Graph &graph, bool body, bool child);  // whether a driver takes it there
void run_graph(const std::shared_ptr<Graph> &graph, Stream &stream);
CUresult make_node(CUgraphNode *handle, CUgraph to, const CUgraphNode *after, const CUgraphEdgeData *data, size_t count,
                   CUgraphNodeParams &params);
// Adds edges, or removes them.
CUresult connect(CUgraph handle, const CUgraphNode *from, const CUgraphNode *to, const CUgraphEdgeData *data, size_t count,
                 bool remove);
CUresult instantiate(CUgraphExec *handle, CUgraph from);
CUresult launch(const std::shared_ptr<Exec> &exec, CUstream on);
CUresult prepare(const CUDA_KERNEL_NODE_PARAMS_v3 &launch, std::function<void()> *work);  // a kernel and its arguments

// ---- capture

struct Capture {
  std::shared_ptr<Graph> graph = std::make_shared<Graph>();
  std::weak_ptr<Stream> origin;
  std::thread::id thread;
  CUstreamCaptureMode mode;
  cuuint64_t number;
  bool broken = false;
};
struct Event {
  unsigned flags;
  std::shared_ptr<Mark> mark;
  std::shared_ptr<Capture> capture;
  std::vector<Node *> tails;
};

CUresult record(Stream &stream, CUgraphNodeType type, std::function<void()> work, bool overlap);
CUresult record(Stream &stream, const std::shared_ptr<Node> &node, bool overlap);
CUresult join(Stream &stream, const Event &event);
CUresult break_capture(Stream &stream);
bool anyone_captures();
// Breaks this thread's captures, and all global ones: what a driver does on a call that none allows.
CUresult unsafe();

// ---- streams

struct Stream : std::enable_shared_from_this<Stream> {
  unsigned flags = 0;
  int priority = 0;
  unsigned long long number = 0;
  std::deque<Step> queue;
  std::shared_ptr<Mark> last;  // of what was enqueued last
  std::shared_ptr<Capture> capture;
  std::vector<Node *> tails;
  std::vector<CUgraphEdgeData> tail_data;  // what a query of the capture points at
  bool overlap_next = false;
};

std::shared_ptr<Stream> stream_of(CUstream handle);  // null: none
void enqueue(Stream &stream, Step step);             // with the order that a default stream asks for
std::shared_ptr<Mark> mark(Stream &stream);
void wait_in(Stream &stream, const std::shared_ptr<Mark> &mark);
void reach(Mark &mark);
void drain(Stream &stream);
void drain_all();
// Enqueued, or recorded where the stream is being captured.
CUresult submit(CUstream handle, CUgraphNodeType type, std::function<void()> work, bool overlap = false);

// ---- the rest

extern std::recursive_mutex lock;
extern std::map<CUgraph, std::shared_ptr<Graph>> graphs;  // as handles: of users' and of nodes' own
extern std::map<CUgraphExec, std::shared_ptr<Exec>> execs;
extern std::set<std::shared_ptr<Stream>> streams;
extern std::set<std::shared_ptr<Capture>> captures;

CUgraph handle_of(const std::shared_ptr<Graph> &graph);
void forget(const Graph &graph);  // the handles of what its nodes own
Graph &graph_of(CUgraph handle, const char *asking);
void fail(CUresult status, const char *what);  // what a kernel did: from now on everything is refused
CUresult failure();                             // by which everything is refused, if it is
[[noreturn]] void die(const char *what, const void *handle);
size_t allocated(bool pinned);

// What an entry point begins with: the lock, and what speaks against it.
enum class Needs { nothing, context, context_uncaptured };
struct Entry {
  explicit Entry(const char *name, Needs needs = Needs::context);
  std::lock_guard<std::recursive_mutex> guard;
  CUresult status;
};

}  // namespace card

#define CARD_ENTER(...)                             \
  const card::Entry entry{__func__, __VA_ARGS__};   \
  if (entry.status != CUDA_SUCCESS) return entry.status
