// The row kernels for AVX2 and F16C.
#if defined(__AVX2__)
#include "cpu/row_kernels_impl.h"
#else
#include "cpu/row_kernels.h"
#endif

namespace moonep {

const RowKernels* avx2_kernels() {
#if defined(__AVX2__)
  static const RowKernels kernels = MOONEP_ROW_KERNELS("avx2");
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") ? &kernels : nullptr;
#else
  return nullptr;
#endif
}

}  // namespace moonep
