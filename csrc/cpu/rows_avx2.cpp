// The row kernels for AVX2 and F16C.
#if defined(__AVX2__)
#include "cpu/row_kernels_impl.h"
#else
#include "cpu/row_kernels.h"
#endif

namespace moonep {

// GCC before 11 does not know "f16c", nor do some versions of clang; every processor with AVX2 has it.
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11
#define MOONEP_HAS_F16C __builtin_cpu_supports("f16c")
#else
#define MOONEP_HAS_F16C true
#endif

const RowKernels* avx2_kernels() {
#if defined(__AVX2__)
  static const RowKernels kernels = MOONEP_ROW_KERNELS("avx2");
  return __builtin_cpu_supports("avx2") && MOONEP_HAS_F16C ? &kernels : nullptr;
#else
  return nullptr;
#endif
}

}  // namespace moonep
