#include <tandem/parallel/unused_parameters.h>

#include <unordered_map>
#include <unordered_set>

#include <tandem/autograd/node.h>
#include <tandem/tensor/create.h>

namespace tandem::parallel {

std::shared_ptr<const void> UnusedParameters::note_graph(std::span<const Tensor> outputs) {
  std::unordered_map<const autograd::Node*, std::size_t> leaves;
  for (std::size_t i = 0; i < reducer_.size(); ++i)
    leaves.emplace(&autograd::leaf_of("DistributedDataParallel", reducer_.parameter(i)), i);
  auto reached = std::make_shared<Reached>(reducer_.size(), false);
  std::unordered_set<const autograd::Node*> seen;
  std::vector<const autograd::Node*> stack;
  auto visit = [&](const autograd::Node* node) {
    if (node == nullptr || !seen.insert(node).second) return;
    if (const auto leaf = leaves.find(node); leaf != leaves.end()) (*reached)[leaf->second] = true;
    stack.push_back(node);
  };
  for (const Tensor& y : outputs)
    if (const autograd::Meta* meta = autograd::meta_of(y))
      visit(meta->grad_fn ? meta->grad_fn.get() : static_cast<autograd::Node*>(meta->leaf.get()));
  while (!stack.empty()) {
    const autograd::Node* node = stack.back();
    stack.pop_back();
    for (const autograd::Edge& edge : node->inputs) visit(edge.node.get());
  }
  std::erase_if(graphs_, [](const auto& graph) { return graph.expired(); });
  graphs_.push_back(reached);
  return reached;
}

void UnusedParameters::begin() {
  const NoGradGuard no_grad;
  kept_.clear();
  Reached any(reducer_.size(), false);
  for (const auto& graph : graphs_)
    if (const auto reached = graph.lock())
      for (std::size_t i = 0; i < any.size(); ++i) any[i] = any[i] || (*reached)[i];
  for (std::size_t i = 0; i < any.size(); ++i) {
    if (any[i]) continue;
    const Tensor gradient = reducer_.parameter(i).grad();
    if (gradient.defined() && !reducer_.touched(i)) kept_.emplace_back(i, gradient.clone());
    reducer_.mark_ready(i);
  }
}

std::exception_ptr UnusedParameters::end() {
  const NoGradGuard no_grad;
  Tensor used = zeros({static_cast<std::int64_t>(reducer_.size())}, {.dtype = int32});
  auto* bits = used.data<std::int32_t>();
  for (std::size_t i = 0; i < reducer_.size(); ++i) bits[i] = reducer_.touched(i);
  reducer_.launch_rest(true);
  Work work;
  std::exception_ptr error;
  try {
    work = group_->all_reduce(used, ReduceOp::max);
  } catch (...) {
    error = std::current_exception();
  }
  if (const std::exception_ptr first = reducer_.wait()) error = first;
  try {
    work.wait();
  } catch (...) {
    if (!error) error = std::current_exception();
  }
  if (error) return error;
  bits = used.data<std::int32_t>();
  for (std::size_t i = 0; i < reducer_.size(); ++i)
    if (bits[i] != 0 && !reducer_.parameter(i).grad().defined())
      Tensor(reducer_.parameter(i)).set_grad(reducer_.view(i));
  for (const auto& [i, gradient] : kept_)
    if (bits[i] == 0) reducer_.parameter(i).grad().copy_(gradient);
  kept_.clear();
  return nullptr;
}

void UnusedParameters::abandon(const std::string& reason) {
  reducer_.fail_rest(reason);
  Work work;
  try {
    work = group_->fail(reason);
  } catch (const std::exception&) {  // the backward's own error is on its way
  }
  (void)reducer_.wait();
  (void)work.exception();
}

}  // namespace tandem::parallel
