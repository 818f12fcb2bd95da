// SPDX-License-Identifier: Apache-2.0
//
// `leap_kernels._C`: the schema of `leap_ext::check_consistency` and its CPU kernel, the code that the GPU runs, one
// sample after the other. It exists to hold that code to the reference where there is no GPU.
#include "binding.h"

namespace {

using torch::stable::Tensor;

std::tuple<Tensor, Tensor> check_consistency(
    const Tensor& targets, const Tensor& top1, const Tensor& prob1, const Tensor& copy_top1, const Tensor& copy_prob1,
    const std::optional<Tensor>& base_accept, double phi, double tau, double kappa, bool keep_confident) {
  const leap::Call call =
      leap::prepare(targets, top1, prob1, copy_top1, copy_prob1, base_accept, phi, tau, kappa, keep_confident);
  auto* reason = static_cast<int32_t*>(call.reason.mutable_data_ptr());
  auto* left = static_cast<int32_t*>(call.left.mutable_data_ptr());
  for (int64_t b = 0; b < call.in.samples; ++b, reason += call.in.columns) {
    leap::Summary all{};
    for (int64_t t = 0; t < call.in.columns; ++t) {
      all.add(leap::look(call.in, call.rule, b, t), static_cast<uint32_t>(t));
    }
    const leap::Decision decision = leap::decide(all, call.rule);
    for (int64_t t = 0; t < call.in.columns; ++t) {
      reason[t] = leap::reason(leap::look(call.in, call.rule, b, t), decision, t);
    }
    left[b] = decision.left;
  }
  return {call.reason, call.left};
}

}  // namespace

STABLE_TORCH_LIBRARY(leap_ext, m) {
  m.def(
      "check_consistency(Tensor targets, Tensor top1, Tensor prob1, Tensor copy_top1, Tensor copy_prob1, "
      "Tensor? base_accept, float phi, float tau, float kappa, bool keep_confident) -> (Tensor reason, Tensor left)");
}

STABLE_TORCH_LIBRARY_IMPL(leap_ext, CPU, m) { m.impl("check_consistency", TORCH_BOX(&check_consistency)); }

LEAP_MODULE(_C, LEAP_BUILD)
