// The driver's calls for graphs.
#include "card/card.h"

#include <algorithm>

namespace {

// What a graph keeps alive: called when nobody holds it any more.
struct Kept {
  void *at;
  CUhostFn destroy;
  unsigned held;
};
void release(Kept *kept, unsigned count) {
  if (kept->held -= count) return;
  kept->destroy(kept->at);
  delete kept;
}

}  // namespace

using namespace card;

extern "C" {

CUresult cuUserObjectCreate(CUuserObject *handle, void *at, CUhostFn destroy, unsigned int count, unsigned int) {
  CARD_ENTER(Needs::nothing);
  return *handle = reinterpret_cast<CUuserObject>(new Kept{at, destroy, count}), CUDA_SUCCESS;
}
CUresult cuUserObjectRelease(CUuserObject handle, unsigned int count) {
  CARD_ENTER(Needs::nothing);
  return release(reinterpret_cast<Kept *>(handle), count), CUDA_SUCCESS;
}
CUresult cuGraphRetainUserObject(CUgraph handle, CUuserObject object, unsigned int count, unsigned int flags) {
  CARD_ENTER();
  Kept *const kept = reinterpret_cast<Kept *>(object);
  if (!(flags & CU_GRAPH_USER_OBJECT_MOVE)) kept->held += count;
  const auto end = [count](void *at) { release(static_cast<Kept *>(at), count); };
  graph_of(handle, "cuGraphRetainUserObject").kept.emplace_back(kept, end);
  return CUDA_SUCCESS;
}

CUresult cuGraphReleaseUserObject(CUgraph handle, CUuserObject object, unsigned int) {
  CARD_ENTER();
  auto &kept = graph_of(handle, "cuGraphReleaseUserObject").kept;
  const auto is = [object](const std::shared_ptr<void> &each) { return each.get() == object; };
  const auto found = std::find_if(kept.begin(), kept.end(), is);
  return found == kept.end() ? CUDA_ERROR_INVALID_VALUE : (kept.erase(found), CUDA_SUCCESS);
}

CUresult cuGraphCreate(CUgraph *handle, unsigned int) {
  CARD_ENTER();
  return *handle = handle_of(std::make_shared<Graph>()), CUDA_SUCCESS;
}
CUresult cuGraphClone(CUgraph *handle, CUgraph from) {
  CARD_ENTER();
  return *handle = handle_of(copy_of(graph_of(from, "cuGraphClone"))), CUDA_SUCCESS;
}
CUresult cuGraphDestroy(CUgraph handle) {
  CARD_ENTER();
  const Graph &graph = graph_of(handle, "cuGraphDestroy");
  if (graph.owned) return CUDA_ERROR_INVALID_VALUE;
  forget(graph);
  graphs.erase(handle);
  return CUDA_SUCCESS;
}

CUresult cuGraphAddNode(CUgraphNode *handle, CUgraph graph, const CUgraphNode *after, const CUgraphEdgeData *data,
                        size_t count, CUgraphNodeParams *params) {
  CARD_ENTER();
  return make_node(handle, graph, after, data, count, *params);
}
CUresult cuGraphAddChildGraphNode(CUgraphNode *handle, CUgraph graph, const CUgraphNode *after, size_t count, CUgraph child) {
  CARD_ENTER();
  CUgraphNodeParams params = {};
  params.type = CU_GRAPH_NODE_TYPE_GRAPH, params.graph.graph = child;
  return make_node(handle, graph, after, nullptr, count, params);
}
CUresult cuGraphAddEmptyNode(CUgraphNode *handle, CUgraph graph, const CUgraphNode *after, size_t count) {
  CARD_ENTER();
  CUgraphNodeParams params = {};
  params.type = CU_GRAPH_NODE_TYPE_EMPTY;
  return make_node(handle, graph, after, nullptr, count, params);
}
CUresult cuGraphConditionalHandleCreate(CUgraphConditionalHandle *handle, CUgraph to, CUcontext, unsigned int initial,
                                        unsigned int flags) {
  CARD_ENTER();
  Graph &graph = graph_of(to, "cuGraphConditionalHandleCreate");
  graph.conditions.push_back(std::make_shared<Condition>());
  Condition &condition = *graph.conditions.back();
  condition.value = condition.initial = initial, condition.assign = flags & CU_GRAPH_COND_ASSIGN_DEFAULT;
  *handle = uintptr_t(&condition.value);
  return CUDA_SUCCESS;
}

CUresult cuGraphGetNodes(CUgraph handle, CUgraphNode *nodes, size_t *count) {
  CARD_ENTER();
  const Graph &graph = graph_of(handle, "cuGraphGetNodes");
  for (size_t i = 0; nodes && i < *count; ++i)
    nodes[i] = i < graph.nodes.size() ? reinterpret_cast<CUgraphNode>(graph.nodes[i].get()) : nullptr;
  if (!nodes || *count > graph.nodes.size()) *count = graph.nodes.size();
  return CUDA_SUCCESS;
}
CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType *type) {
  CARD_ENTER();
  return *type = reinterpret_cast<const Node *>(node)->type, CUDA_SUCCESS;
}
CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode node, CUgraph *handle) {
  CARD_ENTER();
  const auto &inside = reinterpret_cast<const Node *>(node)->inside;
  if (reinterpret_cast<const Node *>(node)->type != CU_GRAPH_NODE_TYPE_GRAPH) return CUDA_ERROR_INVALID_VALUE;
  inside[0]->owned = true;
  return *handle = handle_of(inside[0]), CUDA_SUCCESS;
}
CUresult cuGraphGetEdges(CUgraph handle, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *data, size_t *count) {
  CARD_ENTER();
  const auto &edges = graph_of(handle, "cuGraphGetEdges").edges;
  for (size_t i = 0; from && i < *count && i < edges.size(); ++i) {
    const CUgraphEdgeData plain = {};
    if (!data && !edges[i].same({edges[i].from, edges[i].to, plain})) return CUDA_ERROR_LOSSY_QUERY;
    from[i] = reinterpret_cast<CUgraphNode>(edges[i].from), to[i] = reinterpret_cast<CUgraphNode>(edges[i].to);
    if (data) data[i] = edges[i].data;
  }
  if (!from || *count > edges.size()) *count = edges.size();
  return CUDA_SUCCESS;
}
CUresult cuGraphAddDependencies(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, const CUgraphEdgeData *data,
                                size_t count) {
  CARD_ENTER();
  return connect(graph, from, to, data, count, false);
}
CUresult cuGraphRemoveDependencies(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to,
                                   const CUgraphEdgeData *data, size_t count) {
  CARD_ENTER();
  return connect(graph, from, to, data, count, true);
}

// ---- what can be launched

CUresult cuGraphInstantiateWithFlags(CUgraphExec *handle, CUgraph graph, unsigned long long) {
  CARD_ENTER();
  return instantiate(handle, graph);
}
CUresult cuGraphInstantiateWithParams(CUgraphExec *handle, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params) {
  CARD_ENTER();
  const CUresult status = instantiate(handle, graph);
  params->result_out = status ? CUDA_GRAPH_INSTANTIATE_ERROR : CUDA_GRAPH_INSTANTIATE_SUCCESS;
  return status;
}
CUresult cuGraphUpload(CUgraphExec, CUstream) {
  CARD_ENTER();
  return CUDA_SUCCESS;
}
CUresult cuGraphLaunch(CUgraphExec handle, CUstream stream) {
  CARD_ENTER();
  const auto found = execs.find(handle);
  if (found == execs.end()) die("cuGraphLaunch", handle);
  return launch(found->second, stream);
}
CUresult cuGraphExecDestroy(CUgraphExec handle) {
  CARD_ENTER();
  if (!execs.erase(handle)) die("cuGraphExecDestroy", handle);
  return CUDA_SUCCESS;
}

}  // extern "C"
