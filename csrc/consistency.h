// SPDX-License-Identifier: Apache-2.0
//
// The decisions of `check_consistency`, once, for host and device. Their specification is
// leap_kernels/ops/consistency/reference.py: with y = top1, c = prob1, and y~, p~ of the target's copy,
//
//   accept = { c > phi }  +  { y~ = y and c >= tau and p~ >= kappa },  where that is empty the target of largest c.
//
// A sample is decided in two walks over its columns. The first sums them up: counts and a maximum, which come out the
// same in any order and so by any number of threads. The second gives each column its reason.
//
// Nothing here rounds: comparisons of float32 and integers only, so every caller gets the same bits. NaN fails each
// comparison, and as a rank it stands below every probability. Compile without -ffast-math.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define LEAP_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define LEAP_HOST_DEVICE inline
#endif

namespace leap {

// Why a token is committed; the values are the public constants of leap_kernels.ops.
constexpr int32_t kMasked = 0, kConfident = 1, kConverged = 2, kForced = 3;

// A (B, T) tensor wherever its elements lie; strides in elements.
template <typename T>
struct Table {
  const T* data;
  int64_t stride_b, stride_t;

  LEAP_HOST_DEVICE T at(int64_t b, int64_t t) const { return data[b * stride_b + t * stride_t]; }
};

struct Inputs {
  int64_t samples, columns;
  Table<int32_t> targets;      // < 0: no target
  Table<int64_t> top1;
  Table<float> prob1;
  Table<int64_t> copy_top1;    // < 0: no evidence
  Table<float> copy_prob1;
  Table<uint8_t> base_accept;  // replaces c > phi; data is null for the paper's rule
};

struct Rule {
  float phi, tau, kappa;
  bool keep_confident;
};

// What one column says for itself.
struct Column {
  bool target, evidence, confident, converged;
  float prob;
};

LEAP_HOST_DEVICE Column look(const Inputs& in, const Rule& rule, int64_t b, int64_t t) {
  // All loads before the first use: on a GPU they are under way together.
  const int32_t target = in.targets.at(b, t);
  const int64_t y = in.top1.at(b, t), copy = in.copy_top1.at(b, t);
  const float c = in.prob1.at(b, t), copy_c = in.copy_prob1.at(b, t);
  const bool certain = in.base_accept.data != nullptr ? in.base_accept.at(b, t) != 0 : c > rule.phi;
  Column x;
  x.prob = c;
  x.target = target >= 0;
  x.evidence = x.target & (copy >= 0);
  x.confident = x.target & certain;
  x.converged = x.evidence & (copy == y) & (c >= rule.tau) & (copy_c >= rule.kappa);
  return x;
}

// A target's place among those that may be forced, as one number to take the maximum of: probability in the high half,
// the complement of the column in the low half, so that of equals the first wins. Never 0, which stands for nobody.
LEAP_HOST_DEVICE uint64_t place(float prob, uint32_t column) {
  const float rank = (prob != prob ? -1.0f : prob) + 0.0f;  // + 0: -0 and 0 are equals
  uint32_t bits;
  memcpy(&bits, &rank, sizeof bits);
  bits ^= (bits >> 31) != 0 ? 0xFFFFFFFFu : 0x80000000u;  // the order of floats as the order of unsigned integers
  return (static_cast<uint64_t>(bits) << 32) | static_cast<uint32_t>(~column);
}

// What the columns of a sample say together.
struct Summary {
  int32_t targets, evidence, converged, either;  // counts; either = confident or converged
  uint64_t first;                                // the largest place

  LEAP_HOST_DEVICE void add(const Column& x, uint32_t column) {
    targets += x.target;
    evidence += x.evidence;
    converged += x.converged;
    either += x.confident || x.converged;
    if (x.target) take(place(x.prob, column));
  }

  LEAP_HOST_DEVICE void merge(const Summary& other) {
    targets += other.targets;
    evidence += other.evidence;
    converged += other.converged;
    either += other.either;
    take(other.first);
  }

  LEAP_HOST_DEVICE void take(uint64_t other) { first = other > first ? other : first; }
};

struct Decision {
  bool drop_confident;  // copies have spoken, and keep_confident is off
  int64_t forced;       // column, or -1
  int32_t left;         // targets that stay masked
};

LEAP_HOST_DEVICE Decision decide(const Summary& all, const Rule& rule) {
  Decision d;
  d.drop_confident = !rule.keep_confident && all.evidence > 0;
  const int32_t accepted = d.drop_confident ? all.converged : all.either;
  const bool force = accepted == 0 && all.targets > 0;
  d.forced = force ? static_cast<int64_t>(static_cast<uint32_t>(~all.first)) : -1;
  d.left = all.targets - accepted - (force ? 1 : 0);
  return d;
}

LEAP_HOST_DEVICE int32_t reason(const Column& x, const Decision& d, int64_t t) {
  if (x.confident && !d.drop_confident) return kConfident;
  if (x.converged) return kConverged;
  return t == d.forced ? kForced : kMasked;
}

}  // namespace leap
