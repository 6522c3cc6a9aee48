#include "cpu/rows.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "cpu/parallel.h"

namespace moonep {

namespace {

// Below this much written in one call the caches hold it, and streaming past them is slower.
constexpr int64_t kStreamBytes = 4 << 20;
constexpr int64_t kThreadBytes = 1 << 20;  // less work than this per thread does not pay for its start

const RowKernels* best_kernels() {
  if (const RowKernels* kernels = avx512_kernels()) return kernels;
  if (const RowKernels* kernels = avx2_kernels()) return kernels;
  return &generic_kernels();
}

std::atomic<const RowKernels*>& chosen() {
  static std::atomic<const RowKernels*> kernels{best_kernels()};
  return kernels;
}

int64_t rows_per_thread(int64_t row_bytes) {
  return std::max<int64_t>(1, kThreadBytes / std::max<int64_t>(1, row_bytes));
}

// Rows whose activations take longer than the start of a thread.
int64_t activations_per_thread(int64_t width) { return std::max<int64_t>(1, 32768 / std::max<int64_t>(1, width)); }

}  // namespace

const RowKernels& row_kernels() { return *chosen().load(std::memory_order_relaxed); }

bool use_row_kernels(const char* name) {
  for (const RowKernels* kernels : {&generic_kernels(), avx2_kernels(), avx512_kernels()}) {
    if (kernels && std::strcmp(kernels->name, name) == 0) {
      chosen().store(kernels, std::memory_order_relaxed);
      return true;
    }
  }
  return false;
}

int64_t dtype_bytes(Dtype dtype) { return dtype == kFloat32 ? 4 : 2; }

void expand(char* rows, const char* src, int64_t row_bytes, const Crossings& in, int64_t begin, int64_t end,
            int64_t token_base, int64_t threads) {
  if (begin >= end) return;
  const RowKernels& kernels = row_kernels();
  const int64_t written = (in.start[end] - in.start[begin]) * row_bytes;
  const bool streams = written > kStreamBytes && row_bytes >= 256;
  const int64_t per_crossing = written / (end - begin);
  parallel_for(end - begin, threads, rows_per_thread(per_crossing), [&](int64_t from, int64_t to) {
    for (int64_t c = begin + from; c < begin + to; ++c) {
      const char* row = src + (in.token[c] - token_base) * row_bytes;
      for (int64_t i = in.start[c]; i < in.start[c + 1]; ++i) {
        char* place = rows + static_cast<int64_t>(in.row[i]) * row_bytes;
        if (streams) {
          kernels.stream(place, row, row_bytes);
        } else {
          std::memcpy(place, row, row_bytes);
        }
      }
    }
    if (streams) kernels.fence();
  });
}

void expand_scaled(char* rows, const char* src, int64_t width, Dtype dtype, const float* row_weights, const char* other,
                   float* dots, const Crossings& in, int64_t begin, int64_t end, int64_t token_base, int64_t threads) {
  if (begin >= end) return;
  const RowKernels& kernels = row_kernels();
  const int64_t row_bytes = width * dtype_bytes(dtype);
  const int64_t per_crossing = (in.start[end] - in.start[begin]) * row_bytes / (end - begin);
  parallel_for(end - begin, threads, rows_per_thread(per_crossing), [&](int64_t from, int64_t to) {
    for (int64_t c = begin + from; c < begin + to; ++c) {
      const char* row = src + (in.token[c] - token_base) * row_bytes;
      for (int64_t i = in.start[c]; i < in.start[c + 1]; ++i) {
        const int64_t at = in.row[i];
        if (row_weights) {
          kernels.scale[dtype](rows + at * row_bytes, row, row_weights[at], width);
        } else {
          std::memcpy(rows + at * row_bytes, row, row_bytes);
        }
        if (other) dots[at] = kernels.dot[dtype](other + at * row_bytes, row, width);
      }
    }
  });
}

namespace {

// The rows of one crossing and their weights, gathered into the caller's scratch.
struct Gathered {
  std::vector<const void*> rows;
  std::vector<float> weights;

  void add(const char* base, int64_t row_bytes, const float* row_weights, const Crossings& in, int64_t crossing) {
    for (int64_t i = in.start[crossing]; i < in.start[crossing + 1]; ++i) {
      rows.push_back(base + static_cast<int64_t>(in.row[i]) * row_bytes);
      if (row_weights) weights.push_back(row_weights[in.row[i]]);
    }
  }
  void clear() {
    rows.clear();
    weights.clear();
  }
};

// Starts the next crossing's rows on their way: the prefetcher of the CPU cannot know where they are.
void prefetch_crossing(const char* base, int64_t row_bytes, const Crossings& in, int64_t crossing) {
  for (int64_t i = in.start[crossing]; i < in.start[crossing + 1]; ++i) {
    const char* row = base + static_cast<int64_t>(in.row[i]) * row_bytes;
    for (int64_t at = 0; at < std::min<int64_t>(row_bytes, 512); at += 64) __builtin_prefetch(row + at, 0, 3);
  }
}

}  // namespace

int64_t sum_bytes(int64_t width, Dtype dtype, bool payload_wire) {
  return width * (payload_wire ? dtype_bytes(dtype) : static_cast<int64_t>(sizeof(float)));
}

void sum_crossings(char* dst, const char* rows, int64_t width, Dtype dtype, const float* row_weights,
                   const Crossings& in, int64_t begin, int64_t end, bool payload_wire, int64_t threads) {
  if (begin >= end) return;
  const RowKernels& kernels = row_kernels();
  const int64_t row_bytes = width * dtype_bytes(dtype), wire_bytes = sum_bytes(width, dtype, payload_wire);
  const int64_t per_crossing = (in.start[end] - in.start[begin]) * row_bytes / (end - begin);
  parallel_for(end - begin, threads, rows_per_thread(per_crossing), [&](int64_t from, int64_t to) {
    Gathered gathered;
    for (int64_t c = begin + from; c < begin + to; ++c) {
      gathered.clear();
      gathered.add(rows, row_bytes, row_weights, in, c);
      if (c + 1 < begin + to) prefetch_crossing(rows, row_bytes, in, c + 1);
      kernels.sum_rows[dtype](dst + (c - begin) * wire_bytes, gathered.rows.data(),
                              row_weights ? gathered.weights.data() : nullptr, gathered.rows.size(), width,
                              payload_wire);
    }
  });
}

void pack(char* dst, const char* src, int64_t row_bytes, const Crossings& out, int64_t begin, int64_t end,
          int64_t threads) {
  parallel_for(end - begin, threads, rows_per_thread(row_bytes), [&](int64_t from, int64_t to) {
    for (int64_t c = from; c < to; ++c)
      std::memcpy(dst + c * row_bytes, src + out.token[begin + c] * row_bytes, row_bytes);
  });
}

void finish(char* y, int64_t width, Dtype dtype, const Sums& sums, const Crossings& out, const Crossings& in,
            int64_t begin, int64_t end, int64_t threads) {
  const RowKernels& kernels = row_kernels();
  const int64_t row_bytes = width * dtype_bytes(dtype), wire_bytes = sum_bytes(width, dtype, sums.payload_wire);
  const int64_t ranks = static_cast<int64_t>(sums.order.size());
  const int64_t own = sums.own_rank;
  const bool direct = !sums.rows_of_rank.empty();
  const int64_t in_of_out = in.first[own] - out.first[own];  // both list this rank's own crossings in the same order
  parallel_for(end - begin, threads, rows_per_thread(4 * row_bytes), [&](int64_t from, int64_t to) {
    std::vector<int64_t> next(ranks);
    for (int64_t r = 0; r < ranks; ++r) {
      const int32_t* first = out.token + out.first[r];
      next[r] = std::lower_bound(first, out.token + out.first[r + 1], begin + from) - out.token;
    }
    std::vector<Part> parts;
    Gathered gathered;
    for (int64_t t = begin + from; t < begin + to; ++t) {
      parts.clear();
      gathered.clear();
      bool opens_host = false;
      for (int64_t i = 0; i < ranks; ++i) {
        const int64_t r = sums.order[i];
        opens_host |= sums.opens_host[i];
        if (next[r] == out.first[r + 1] || out.token[next[r]] != t) continue;
        const int64_t c = next[r]++;
        if (direct) {
          const size_t before = gathered.rows.size();
          gathered.add(sums.rows_of_rank[r], row_bytes, sums.weights_of_rank[r], out, c);
          if (next[r] < out.first[r + 1]) prefetch_crossing(sums.rows_of_rank[r], row_bytes, out, c + 1);
          const int64_t count = static_cast<int64_t>(gathered.rows.size() - before);
          parts.push_back({nullptr, nullptr, nullptr, count, opens_host});  // where they are is known below
        } else if (r == own) {
          gathered.add(sums.own_rows, row_bytes, sums.own_weights, in, c + in_of_out);
          if (next[r] < out.first[r + 1]) prefetch_crossing(sums.own_rows, row_bytes, in, c + 1 + in_of_out);
          parts.push_back({nullptr, gathered.rows.data(), sums.own_weights ? gathered.weights.data() : nullptr,
                           static_cast<int64_t>(gathered.rows.size()), opens_host});
        } else {
          parts.push_back(
              {sums.of_rank[r] + (c - sums.first_crossing[r]) * wire_bytes, nullptr, nullptr, 0, opens_host});
        }
        opens_host = false;
      }
      if (direct) {
        const void* const* rows = gathered.rows.data();
        const float* weights = gathered.weights.data();
        for (Part& part : parts) {
          part.rows = rows;
          part.weights = weights;
          rows += part.count;
          weights += part.count;
        }
      }
      kernels.sum_parts[dtype](y + t * row_bytes, parts.data(), parts.size(), width, sums.payload_wire);
    }
  });
}

void situ_glu(char* out, const char* gate_up, int64_t num_rows, int64_t width, Dtype dtype, int64_t threads) {
  const RowKernels& kernels = row_kernels();
  const int64_t row_bytes = width * dtype_bytes(dtype);
  parallel_for(num_rows, threads, activations_per_thread(width), [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i)
      kernels.situ_glu[dtype](out + i * row_bytes, gate_up + 2 * i * row_bytes, width);
  });
}

void situ_glu_backward(char* grad_gate_up, const char* gate_up, const char* grad, int64_t num_rows, int64_t width,
                       Dtype dtype, int64_t threads) {
  const RowKernels& kernels = row_kernels();
  const int64_t row_bytes = width * dtype_bytes(dtype);
  parallel_for(num_rows, threads, activations_per_thread(width), [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i)
      kernels.situ_glu_backward[dtype](grad_gate_up + 2 * i * row_bytes, gate_up + 2 * i * row_bytes,
                                       grad + i * row_bytes, width);
  });
}

void zero_padding(char* rows, int64_t num_rows, int64_t row_bytes, const int64_t* group_sizes,
                  const int32_t* group_ends, int64_t groups) {
  int64_t start = 0;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t real_end = start + group_sizes[g];
    std::memset(rows + real_end * row_bytes, 0, (group_ends[g] - real_end) * row_bytes);
    start = group_ends[g];
  }
  std::memset(rows + start * row_bytes, 0, (num_rows - start) * row_bytes);
}

void move_floats(float* dst, const int32_t* dst_index, int64_t dst_base, const float* src, const int32_t* src_index,
                 int64_t src_base, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    dst[dst_index ? dst_index[i] - dst_base : i] = src[src_index ? src_index[i] - src_base : i];
}

}  // namespace moonep
