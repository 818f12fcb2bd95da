// SPDX-License-Identifier: Apache-2.0
//
// csrc/consistency_kernel.cuh without a GPU: a thread of the processor for each thread of a block, and barriers where
// the GPU synchronizes. One block at a time; what blocks share stays from one to the next, as rubbish.
#include <array>
#include <barrier>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __shared__ static

struct Index {
  unsigned x;
};

static thread_local Index threadIdx, blockIdx;
static Index blockDim;

struct Warp {
  std::barrier<> together{32};
  std::array<uint32_t, 32> lanes{};
};

static std::vector<std::unique_ptr<Warp>> warps;
static std::unique_ptr<std::barrier<>> block;

static Warp& warp() { return *warps[threadIdx.x / 32]; }

template <typename Combine>
static uint32_t reduce(uint32_t value, Combine combine) {
  Warp& w = warp();
  w.lanes[threadIdx.x % 32] = value;
  w.together.arrive_and_wait();
  uint32_t all = w.lanes[0];
  for (int lane = 1; lane < 32; ++lane) all = combine(all, w.lanes[lane]);
  w.together.arrive_and_wait();
  return all;
}

static int __reduce_add_sync(unsigned, int value) {
  return static_cast<int>(reduce(static_cast<uint32_t>(value), [](uint32_t a, uint32_t b) { return a + b; }));
}
static unsigned __reduce_max_sync(unsigned, unsigned value) {
  return reduce(value, [](uint32_t a, uint32_t b) { return a > b ? a : b; });
}
static void __syncwarp() { warp().together.arrive_and_wait(); }
static void __syncthreads() { block->arrive_and_wait(); }

#include "consistency_kernel.cuh"

template <typename T>
static leap::Table<T> table(const void* const* data, const int64_t* strides, int i) {
  return {static_cast<const T*>(data[i]), strides[2 * i], strides[2 * i + 1]};
}

extern "C" void check_consistency(
    int64_t samples, int64_t columns, const void* const* data, const int64_t* strides, float phi, float tau,
    float kappa, bool keep_confident, int32_t* reason, int32_t* left) {
  const leap::Inputs in = {
      samples,
      columns,
      table<int32_t>(data, strides, 0),
      table<int64_t>(data, strides, 1),
      table<float>(data, strides, 2),
      table<int64_t>(data, strides, 3),
      table<float>(data, strides, 4),
      table<uint8_t>(data, strides, 5),
  };
  const leap::Rule rule = {phi, tau, kappa, keep_confident};
  blockDim.x = leap::threads_for(columns);
  for (unsigned b = 0; b < samples; ++b) {
    block = std::make_unique<std::barrier<>>(blockDim.x);
    warps.clear();
    for (unsigned w = 0; w < blockDim.x / 32; ++w) warps.push_back(std::make_unique<Warp>());
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < blockDim.x; ++i) {
      threads.emplace_back([&, i] {
        threadIdx.x = i;
        blockIdx.x = b;
        leap::check_consistency_kernel(in, rule, reason, left);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}
