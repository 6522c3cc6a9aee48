// What is done to single rows, once per instruction set. Chosen when the module is loaded.
//
// This header and row_kernels_impl.h include C headers only: the files that hold one instruction set must not emit
// inline functions of the C++ library, which the linker could keep for the rest of the module.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace moonep {

enum Dtype { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kNumDtypes = 3 };

// One summand of a token: either rows still to be weighted and summed, or the finished fp32 sum of a rank.
struct Part {
  const void* sum;          // when not null: the finished sum [H], in the wire dtype
  const void* const* rows;  // else `count` rows [H]
  const float* weights;     // their weights; null: 1
  int64_t count;
  bool opens_host;  // the first rank of another host: sums are closed per host
};

struct RowKernels {
  const char* name;
  // Copies past the caches (for rows that are not read soon) and makes the stores visible to other threads.
  void (*stream)(void* dst, const void* src, size_t bytes);
  void (*fence)();
  // dst[n] = +0 + sum of the rows in order, each weighted row rounded to fp32 before it is added; stored as fp32 or,
  // where the wire carries the payload dtype, rounded to it.
  void (*sum_rows[kNumDtypes])(void* dst, const void* const* rows, const float* weights, int64_t count, int64_t n,
                               bool payload_wire);
  // dst[n] = the parts summed in order, per host first, rounded once.
  void (*sum_parts[kNumDtypes])(void* dst, const Part* parts, int64_t count, int64_t n, bool payload_wire);
  void (*scale[kNumDtypes])(void* dst, const void* src, float weight, int64_t n);
  float (*dot[kNumDtypes])(const void* a, const void* b, int64_t n);
  // situ_impl.h, of a row's n gates and then n ups, in fp32, rounded once; backward gives the gradients of both.
  void (*situ_glu[kNumDtypes])(void* out, const void* gate_up, int64_t n);
  void (*situ_glu_backward[kNumDtypes])(void* grad_gate_up, const void* gate_up, const void* grad, int64_t n);
};

const RowKernels& generic_kernels();
const RowKernels* avx2_kernels();  // null where the build or the machine has none
const RowKernels* avx512_kernels();

}  // namespace moonep
