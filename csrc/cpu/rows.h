// Rows of a plan: copied out, summed, brought home. Which kernel runs each row is row_kernels.h's business.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/row_kernels.h"

namespace moonep {

const RowKernels& row_kernels();         // the best that this machine has
bool use_row_kernels(const char* name);  // for tests: "generic", "avx2", "avx512"; false: not to be had here

int64_t dtype_bytes(Dtype dtype);

// The arrays of moonep/plan.py's Crossings.
struct Crossings {
  const int32_t *first, *token, *start, *route, *row;
};

// rows[row] = src[token] for every route of crossings [begin, end): each row is read once and written to its places.
// src holds the rows of one source from its token `token_base` on.
void expand(char* rows, const char* src, int64_t row_bytes, const Crossings& in, int64_t begin, int64_t end,
            int64_t token_base, int64_t threads);

// The same, each copy times its row's weight (null: 1); where `other` is given, dots[row] = <other[row], src[token]>.
void expand_scaled(char* rows, const char* src, int64_t width, Dtype dtype, const float* row_weights, const char* other,
                   float* dots, const Crossings& in, int64_t begin, int64_t end, int64_t token_base, int64_t threads);

// How sums cross: as fp32, or rounded to the payload dtype.
int64_t sum_bytes(int64_t width, Dtype dtype, bool payload_wire);

// dst[c - begin] = sum of the weighted rows of crossing c, k ascending.
void sum_crossings(char* dst, const char* rows, int64_t width, Dtype dtype, const float* row_weights,
                   const Crossings& in, int64_t begin, int64_t end, bool payload_wire, int64_t threads);

// dst[c - begin] = src[token]: rows to send, once per crossing.
void pack(char* dst, const char* src, int64_t row_bytes, const Crossings& out, int64_t begin, int64_t end,
          int64_t threads);

// Where the sums of each rank are found at home.
struct Sums {
  std::vector<int64_t> order;           // ranks in the order of summation: host by host
  std::vector<bool> opens_host;         // per place in `order`: the first rank of a host, the very first excepted
  std::vector<const char*> of_rank;     // per rank: its sums of this rank's crossings; null at `own_rank`
  std::vector<int64_t> first_crossing;  // per rank: the crossing that its sums begin with
  bool payload_wire;
  int64_t own_rank;
  const char* own_rows;      // rows here, summed as the rest is
  const float* own_weights;  // null: 1
  // When not empty: all ranks' rows and weights, to be read where they are instead of finished sums.
  std::vector<const char*> rows_of_rank;
  std::vector<const float*> weights_of_rank;
};

// y[t] for tokens [begin, end): the ranks' sums in order, rounded once.
void finish(char* y, int64_t width, Dtype dtype, const Sums& sums, const Crossings& out, const Crossings& in,
            int64_t begin, int64_t end, int64_t threads);

// out[i] = SiTU-GLU (situ_impl.h) of row i of gate_up: `width` gates, then as many ups. All in `dtype`.
void situ_glu(char* out, const char* gate_up, int64_t num_rows, int64_t width, Dtype dtype, int64_t threads);

// The gradient of gate_up [num_rows, 2 * width] from that of out [num_rows, width].
void situ_glu_backward(char* grad_gate_up, const char* gate_up, const char* grad, int64_t num_rows, int64_t width,
                       Dtype dtype, int64_t threads);

// Zeroes the padding at the end of every group, and the rows behind the last one.
void zero_padding(char* rows, int64_t num_rows, int64_t row_bytes, const int64_t* group_sizes,
                  const int32_t* group_ends, int64_t groups);

// dst[dst_index[i] - dst_base] = src[src_index[i] - src_base]; a null index counts up from 0.
void move_floats(float* dst, const int32_t* dst_index, int64_t dst_base, const float* src, const int32_t* src_index,
                 int64_t src_base, int64_t count);

}  // namespace moonep
