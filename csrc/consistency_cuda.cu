// SPDX-License-Identifier: Apache-2.0
//
// `leap_kernels._C_cuda`: the CUDA kernel of `leap_ext::check_consistency`, whose schema `leap_kernels._C` defines.
#ifndef USE_CUDA
#define USE_CUDA  // has torch's headers declare the CUDA part of the stable ABI
#endif
#include <cuda_runtime.h>

#include "binding.h"
#include "consistency_kernel.cuh"

// Also declared by torch's headers so far, but not among those that are promised to stay.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace {

using torch::stable::Tensor;

std::tuple<Tensor, Tensor> check_consistency(
    const Tensor& targets, const Tensor& top1, const Tensor& prob1, const Tensor& copy_top1, const Tensor& copy_prob1,
    const std::optional<Tensor>& base_accept, double phi, double tau, double kappa, bool keep_confident) {
  STD_TORCH_CHECK(targets.is_cuda(), "targets must be on a CUDA device, got ", leap::device_of(targets), ".");
  const torch::stable::accelerator::DeviceGuard guard(targets.get_device_index());
  const leap::Call call =
      leap::prepare(targets, top1, prob1, copy_top1, copy_prob1, base_accept, phi, tau, kappa, keep_confident);
  if (call.in.samples == 0) return {call.reason, call.left};
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(targets.get_device_index(), &stream));
  const auto blocks = static_cast<unsigned>(call.in.samples);
  const unsigned threads = leap::threads_for(call.in.columns);
  leap::check_consistency_kernel<<<blocks, threads, 0, static_cast<cudaStream_t>(stream)>>>(
      call.in, call.rule, static_cast<int32_t*>(call.reason.mutable_data_ptr()),
      static_cast<int32_t*>(call.left.mutable_data_ptr()));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return {call.reason, call.left};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(leap_ext, CUDA, m) { m.impl("check_consistency", TORCH_BOX(&check_consistency)); }

#define LEAP_CUDA LEAP_STRING(__CUDACC_VER_MAJOR__) "." LEAP_STRING(__CUDACC_VER_MINOR__)
LEAP_MODULE(_C_cuda, LEAP_BUILD "; CUDA " LEAP_CUDA "; architectures " LEAP_STRING(__CUDA_ARCH_LIST__))
