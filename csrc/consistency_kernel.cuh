// SPDX-License-Identifier: Apache-2.0
//
// The CUDA kernel of `check_consistency`. It knows nothing of torch, so that tests can run it without a GPU, with a
// thread of the processor for each of its threads (tests/ops/cuda_on_cpu.cpp).
//
// Definition  consistency.h.
// Grid        one block a sample; 32 to 256 threads, as many as it has columns, each with one column at a time.
// Bytes       reads 28 (29 with base_accept) and writes 4 a target. Up to 256 columns are read once and kept in
//             registers between the two walks; the rest is read again, from L1 or L2.
// Numerics    no rounding, and a summary that does not depend on the order: two runs are bit-equal, and a sample does
//             not notice the others.
// Limits      compute capability 8.0, for the reductions within a warp.
#pragma once

#include "consistency.h"

namespace leap {

constexpr int kWarp = 32, kMostThreads = 256, kMostWarps = kMostThreads / kWarp;
constexpr unsigned kAll = 0xFFFFFFFFu;

// Every lane gets the summary of its warp.
__device__ __forceinline__ void merge_warp(Summary& s) {
  s.targets = __reduce_add_sync(kAll, s.targets);
  s.evidence = __reduce_add_sync(kAll, s.evidence);
  s.converged = __reduce_add_sync(kAll, s.converged);
  s.either = __reduce_add_sync(kAll, s.either);
  const auto high = static_cast<uint32_t>(s.first >> 32);
  const uint32_t most = __reduce_max_sync(kAll, high);
  const uint32_t low = __reduce_max_sync(kAll, high == most ? static_cast<uint32_t>(s.first) : 0u);
  s.first = (static_cast<uint64_t>(most) << 32) | low;
}

// A thread for each column, in whole warps, as far as a block goes.
inline unsigned threads_for(int64_t columns) {
  const int64_t whole = (columns + kWarp - 1) / kWarp * kWarp;
  return static_cast<unsigned>(whole < kWarp ? kWarp : whole > kMostThreads ? kMostThreads : whole);
}

__global__ void __launch_bounds__(kMostThreads)
    check_consistency_kernel(const Inputs in, const Rule rule, int32_t* reason_out, int32_t* left_out) {
  __shared__ Summary parts[kMostWarps];
  const int64_t b = blockIdx.x;
  const int64_t mine = threadIdx.x;

  Column first{};
  Summary all{};
  if (mine < in.columns) {
    first = look(in, rule, b, mine);
    all.add(first, static_cast<uint32_t>(mine));
  }
#pragma unroll 1
  for (int64_t t = mine + blockDim.x; t < in.columns; t += blockDim.x) {
    all.add(look(in, rule, b, t), static_cast<uint32_t>(t));
  }
  __syncwarp();
  merge_warp(all);
  if (blockDim.x > kWarp) {
    if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = all;
    __syncthreads();
    all = parts[0];
#pragma unroll 1
    for (int w = 1; w < static_cast<int>(blockDim.x) / kWarp; ++w) all.merge(parts[w]);
  }

  const Decision decision = decide(all, rule);
  reason_out += b * in.columns;
  if (mine < in.columns) reason_out[mine] = reason(first, decision, mine);
#pragma unroll 1
  for (int64_t t = mine + blockDim.x; t < in.columns; t += blockDim.x) {
    reason_out[t] = reason(look(in, rule, b, t), decision, t);
  }
  if (threadIdx.x == 0) left_out[b] = decision.left;
}

}  // namespace leap
