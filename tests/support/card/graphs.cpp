// Graphs: their nodes and edges, what may lie inside what, and how one runs, node by node.
#include "card/card.h"

#include <algorithm>
#include <cstring>

namespace card {

std::map<CUgraph, std::shared_ptr<Graph>> graphs;
std::map<CUgraphExec, std::shared_ptr<Exec>> execs;

namespace {

bool conditional(const Node &node) { return node.type == CU_GRAPH_NODE_TYPE_CONDITIONAL; }

Node *node_in(const Graph &graph, CUgraphNode handle) {
  for (const auto &node : graph.nodes)
    if (reinterpret_cast<CUgraphNode>(node.get()) == handle) return node.get();
  return nullptr;
}

// An order in which they may run: of those that may, the one that was added last, to show a missing edge.
std::vector<std::shared_ptr<Node>> in_order(const Graph &graph) {
  std::map<const Node *, size_t> waits;
  for (const Edge &edge : graph.edges) ++waits[edge.to];
  std::vector<std::shared_ptr<Node>> ready, order;
  for (const auto &node : graph.nodes)
    if (!waits[node.get()]) ready.push_back(node);
  while (!ready.empty()) {
    const std::shared_ptr<Node> next = ready.back();
    ready.pop_back();
    order.push_back(next);
    for (const auto &node : graph.nodes)
      for (const Edge &edge : graph.edges)
        if (edge.from == next.get() && edge.to == node.get() && !--waits[node.get()]) ready.push_back(node);
  }
  return order;
}

void run_node(const std::shared_ptr<Node> &node, Stream &stream) {
  if (node->work) node->work();
  if (!conditional(*node)) {
    for (const auto &child : node->inside) run_graph(child, stream);
    return;
  }
  const unsigned value = node->condition->value;
  if (node->kind == CU_GRAPH_COND_TYPE_WHILE && value) {
    stream.queue.push_front([node](Stream &on) { run_node(node, on); });
    run_graph(node->inside[0], stream);
  } else if (node->kind == CU_GRAPH_COND_TYPE_IF && (value || node->inside.size() > 1)) {
    run_graph(node->inside[value ? 0 : 1], stream);
  }
}

void reset(const Graph &graph) {
  for (const auto &condition : graph.conditions)
    if (condition->assign) condition->value = condition->initial;
  for (const auto &node : graph.nodes)
    for (const auto &inside : node->inside) reset(*inside);
}

std::shared_ptr<Node> node_of(CUgraphNodeType type) {
  auto node = std::make_shared<Node>();
  return node->type = type, node;
}

CUresult add_conditional(Graph &graph, Node &node, CUDA_CONDITIONAL_NODE_PARAMS &params) {
  const auto is = [&](const std::shared_ptr<Condition> &each) { return uintptr_t(&each->value) == params.handle; };
  const auto found = std::find_if(graph.conditions.begin(), graph.conditions.end(), is);
  if (found == graph.conditions.end()) return CUDA_ERROR_INVALID_VALUE;
  const bool loop = params.type == CU_GRAPH_COND_TYPE_WHILE;
  if (params.type == CU_GRAPH_COND_TYPE_SWITCH) return CUDA_ERROR_NOT_SUPPORTED;
  if (params.size < 1 || params.size > (loop ? 1 : 2)) return CUDA_ERROR_INVALID_VALUE;
  node.condition = *found, node.kind = params.type;
  for (unsigned i = 0; i < params.size; ++i) {
    node.inside.push_back(std::make_shared<Graph>());
    node.inside.back()->body = node.inside.back()->owned = true;
    node.handles.push_back(handle_of(node.inside.back()));
  }
  params.phGraph_out = node.handles.data();
  return CUDA_SUCCESS;
}

CUresult fill(Graph &graph, Node &node, CUgraphNodeParams &params) {
  switch (params.type) {
    case CU_GRAPH_NODE_TYPE_EMPTY: return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_CONDITIONAL: return add_conditional(graph, node, params.conditional);
    case CU_GRAPH_NODE_TYPE_KERNEL: return prepare(params.kernel, &node.work);
    case CU_GRAPH_NODE_TYPE_GRAPH: {
      const Graph &child = graph_of(params.graph.graph, "a child");
      node.inside.push_back(copy_of(child));
      node.inside.back()->body = graph.body;
      return fits(child, graph.body, true);
    }
    default: return CUDA_ERROR_NOT_SUPPORTED;
  }
}

CUresult add_node(Graph &graph, const std::shared_ptr<Node> &node, const CUgraphNode *after, const CUgraphEdgeData *data,
                  size_t count) {
  for (size_t i = 0; i < count; ++i)
    if (!node_in(graph, after[i])) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < count; ++i)
    graph.edges.push_back({node_in(graph, after[i]), node.get(), data ? data[i] : CUgraphEdgeData{}});
  graph.nodes.push_back(node);
  return CUDA_SUCCESS;
}

}  // namespace

bool Edge::same(const Edge &other) const {
  return from == other.from && to == other.to && !memcmp(&data, &other.data, sizeof data);
}

std::shared_ptr<Graph> copy_of(const Graph &graph) {
  auto copy = std::make_shared<Graph>(graph);
  std::map<const Node *, Node *> twins;
  for (auto &node : copy->nodes) {
    auto twin = std::make_shared<Node>(*node);
    twin->handles.clear();
    for (auto &inside : twin->inside) inside = copy_of(*inside);
    twins[node.get()] = twin.get();
    node = twin;
  }
  for (Edge &edge : copy->edges) edge.from = twins[edge.from], edge.to = twins[edge.to];
  return copy;
}

CUresult fits(const Graph &graph, bool body, bool child) {
  for (const Edge &edge : graph.edges)
    if (body && child && programmatic(edge.data)) return CUDA_ERROR_NOT_SUPPORTED;
  for (const auto &node : graph.nodes) {
    if (child && conditional(*node)) return CUDA_ERROR_NOT_SUPPORTED;
    for (const auto &inside : node->inside)
      if (const CUresult status = fits(*inside, body || conditional(*node), !conditional(*node))) return status;
  }
  return CUDA_SUCCESS;
}

void run_graph(const std::shared_ptr<Graph> &graph, Stream &stream) {
  const auto order = in_order(*graph);
  for (auto node = order.rbegin(); node != order.rend(); ++node)
    stream.queue.push_front([held = *node](Stream &on) { run_node(held, on); });
}

CUgraph handle_of(const std::shared_ptr<Graph> &graph) {
  const CUgraph handle = reinterpret_cast<CUgraph>(graph.get());
  return graphs[handle] = graph, handle;
}

void forget(const Graph &graph) {
  for (const auto &node : graph.nodes)
    for (const auto &inside : node->inside) graphs.erase(reinterpret_cast<CUgraph>(inside.get())), forget(*inside);
}

Graph &graph_of(CUgraph handle, const char *asking) {
  const auto found = graphs.find(handle);
  if (found == graphs.end()) die(asking, handle);
  return *found->second;
}

CUresult instantiate(CUgraphExec *handle, CUgraph from) {
  const Graph &graph = graph_of(from, "cuGraphInstantiate");
  if (in_order(graph).size() != graph.nodes.size()) return CUDA_ERROR_INVALID_VALUE;  // a circle
  if (const CUresult status = fits(graph, false, false)) return status;
  auto exec = std::make_shared<Exec>();
  exec->graph = copy_of(graph);
  *handle = reinterpret_cast<CUgraphExec>(exec.get());
  execs[*handle] = exec;
  return CUDA_SUCCESS;
}

// Launches of one and the same follow each other.
CUresult launch(const std::shared_ptr<Exec> &exec, CUstream on) {
  const std::shared_ptr<Stream> stream = stream_of(on);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (stream->capture) {
    auto node = node_of(CU_GRAPH_NODE_TYPE_GRAPH);
    node->inside.push_back(copy_of(*exec->graph));
    return record(*stream, node, false);
  }
  wait_in(*stream, exec->last);
  enqueue(*stream, [graph = exec->graph](Stream &self) { reset(*graph), run_graph(graph, self); });
  exec->last = stream->last;
  return CUDA_SUCCESS;
}

CUresult make_node(CUgraphNode *handle, CUgraph to, const CUgraphNode *after, const CUgraphEdgeData *data, size_t count,
                   CUgraphNodeParams &params) {
  Graph &graph = graph_of(to, "cuGraphAddNode");
  auto node = node_of(params.type);
  CUresult status = fill(graph, *node, params);
  if (status == CUDA_SUCCESS) status = add_node(graph, node, after, data, count);
  if (status == CUDA_SUCCESS) *handle = reinterpret_cast<CUgraphNode>(node.get());
  return status;
}

CUresult connect(CUgraph handle, const CUgraphNode *from, const CUgraphNode *to, const CUgraphEdgeData *data, size_t count,
                 bool remove) {
  Graph &graph = graph_of(handle, "a graph's edges");
  for (size_t i = 0; i < count; ++i) {
    const Edge edge = {node_in(graph, from[i]), node_in(graph, to[i]), data ? data[i] : CUgraphEdgeData{}};
    if (!edge.from || !edge.to || edge.from == edge.to) return CUDA_ERROR_INVALID_VALUE;
    const bool kernels = edge.from->type == CU_GRAPH_NODE_TYPE_KERNEL && edge.to->type == CU_GRAPH_NODE_TYPE_KERNEL;
    if (programmatic(edge.data) && !kernels) return CUDA_ERROR_INVALID_VALUE;
    const auto is = [&](const Edge &each) { return remove ? each.same(edge) : each.from == edge.from && each.to == edge.to; };
    const auto found = std::find_if(graph.edges.begin(), graph.edges.end(), is);
    if (remove != (found != graph.edges.end())) return CUDA_ERROR_INVALID_VALUE;
    if (remove) graph.edges.erase(found);
    else graph.edges.push_back(edge);
  }
  return CUDA_SUCCESS;
}

}  // namespace card
