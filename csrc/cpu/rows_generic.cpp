// The row kernels for the architecture's baseline.
#include "cpu/row_kernels_impl.h"

namespace moonep {

const RowKernels& generic_kernels() {
  static const RowKernels kernels = MOONEP_ROW_KERNELS("generic");
  return kernels;
}

}  // namespace moonep
