// The row kernels for AVX-512.
#if defined(__AVX512F__)
#include "cpu/row_kernels_impl.h"
#else
#include "cpu/row_kernels.h"
#endif

namespace moonep {

const RowKernels* avx512_kernels() {
#if defined(__AVX512F__)
  static const RowKernels kernels = MOONEP_ROW_KERNELS("avx512");
  const bool here = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return here ? &kernels : nullptr;
#else
  return nullptr;
#endif
}

}  // namespace moonep
