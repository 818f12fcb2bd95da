// SPDX-License-Identifier: Apache-2.0
//
// What the CPU and the CUDA binding share: arguments checked and taken apart, results allocated, and a Python module
// whose import registers the operator. Stable ABI of torch >= 2.11 and limited API of Python only, so that one build
// outlives upgrades of both.
#pragma once

#include <Python.h>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/version.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <tuple>

#include "consistency.h"

#if !defined(Py_LIMITED_API) || TORCH_TARGET_VERSION != 0x020b000000000000
#error "build with setup.py, which sets Py_LIMITED_API and TORCH_TARGET_VERSION"
#endif

// A module that only has to be imported. Its docstring says what it was built for and with; extension.py reads the same
// text out of files that do not load.
#define LEAP_STRING_(...) #__VA_ARGS__
#define LEAP_STRING(...) LEAP_STRING_(__VA_ARGS__)
#define LEAP_BUILD \
  "leap_kernels build: package " LEAP_STRING(LEAP_KERNELS_VERSION) "; torch >= 2.11; headers of torch " TORCH_VERSION
#define LEAP_MODULE(name, build)                                                                        \
  PyMODINIT_FUNC PyInit_##name() {                                                                      \
    static PyModuleDef module = {                                                                       \
        PyModuleDef_HEAD_INIT, #name, build ";", -1, nullptr, nullptr, nullptr, nullptr, nullptr};      \
    return PyModule_Create(&module);                                                                    \
  }

namespace leap {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline const char* dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Bool: return "bool";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Short: return "int16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Half: return "float16";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    default: return "another dtype";
  }
}

inline std::string shape_of(const Tensor& t) {
  std::string text = "(";
  for (int64_t d = 0; d < t.dim(); ++d) text += (d != 0 ? ", " : "") + std::to_string(t.size(d));
  return text + ")";
}

inline std::string device_of(const Tensor& t) {
  if (t.is_cpu()) return "cpu";
  return (t.is_cuda() ? "cuda:" : "device ") + std::to_string(t.get_device_index());
}

// `t` as a table of T, refused unless it has the dtype, and shape and device of `targets`.
template <typename T>
Table<T> table(const char* name, const Tensor& t, ScalarType dtype, const Tensor& targets) {
  STD_TORCH_CHECK(
      t.scalar_type() == dtype, name, " must be ", dtype_name(dtype), ", got ", dtype_name(t.scalar_type()), ".");
  STD_TORCH_CHECK(
      t.dim() == 2 && t.size(0) == targets.size(0) && t.size(1) == targets.size(1),
      name, " must have the shape ", shape_of(targets), " of targets, got ", shape_of(t), ".");
  STD_TORCH_CHECK(
      t.device() == targets.device(), name, " must be on ", device_of(targets), " like targets, got ", device_of(t),
      ".");
  return {static_cast<const T*>(t.const_data_ptr()), t.stride(0), t.stride(1)};
}

// A checked call: what the kernels read, and what they write, both (B, T) and (B,) contiguous.
struct Call {
  Inputs in;
  Rule rule;
  Tensor reason, left;
};

inline Call prepare(const Tensor& targets, const Tensor& top1, const Tensor& prob1, const Tensor& copy_top1,
                    const Tensor& copy_prob1, const std::optional<Tensor>& base_accept, double phi, double tau,
                    double kappa, bool keep_confident) {
  STD_TORCH_CHECK(targets.dim() == 2, "targets must have the shape (B, T), got ", shape_of(targets), ".");
  const int64_t b = targets.size(0), t = targets.size(1);
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();  // counts and columns are 32 bits wide
  STD_TORCH_CHECK(b <= kMost && t <= kMost, "targets must have at most 2^31 - 1 rows and columns, got ",
                  shape_of(targets), ".");
  const Inputs in = {
      b,
      t,
      table<int32_t>("targets", targets, ScalarType::Int, targets),
      table<int64_t>("top1", top1, ScalarType::Long, targets),
      table<float>("prob1", prob1, ScalarType::Float, targets),
      table<int64_t>("copy_top1", copy_top1, ScalarType::Long, targets),
      table<float>("copy_prob1", copy_prob1, ScalarType::Float, targets),
      base_accept.has_value() ? table<uint8_t>("base_accept", *base_accept, ScalarType::Bool, targets)
                              : Table<uint8_t>{nullptr, 0, 0},
  };
  const Rule rule = {static_cast<float>(phi), static_cast<float>(tau), static_cast<float>(kappa), keep_confident};
  return {in, rule, torch::stable::new_empty(targets, {b, t}, ScalarType::Int),
          torch::stable::new_empty(targets, {b}, ScalarType::Int)};
}

}  // namespace leap
