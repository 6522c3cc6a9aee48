// Where experts live and how sizes are rounded: one definition for host and device.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define MOONEP_HD __host__ __device__
#else
#define MOONEP_HD
#endif

namespace moonep {

// Home ranks: contiguous blocks of experts, the first (experts % ranks) ranks hold one more.
struct Homes {
  int64_t experts, ranks;

  MOONEP_HD int64_t first(int64_t rank) const {
    const int64_t extra = experts % ranks;
    return rank * (experts / ranks) + (rank < extra ? rank : extra);
  }
  MOONEP_HD int64_t count(int64_t rank) const { return first(rank + 1) - first(rank); }
};

MOONEP_HD inline int64_t align_up(int64_t value, int64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

}  // namespace moonep
