// Routing -> row numbers. The definition in plain loops is moonep/plan.py; this gives the same numbers.
#pragma once

#include <cstdint>
#include <vector>

#include "common/layout.h"

namespace moonep {

constexpr int64_t kNoBadId = -1;

// Copies ids [T, K] of any strides (in elements) to a dense int32 array and counts them per expert.
// Returns the flat index of the first id that is neither -1 nor in [0, experts), or kNoBadId.
// counts must hold `experts` values; it is overwritten. On a bad id the outputs are unfinished.
template <typename Id>
int64_t load_ids(const Id* ids, int64_t tokens, int64_t top_k, int64_t stride_t, int64_t stride_k, int64_t experts,
                 int32_t* dense, int32_t* counts);

// Crossings as in moonep/plan.py; the arrays are the caller's, with room for one crossing per route
// and one entry more.
struct CrossingArrays {
  int32_t* first;  // [R + 1]
  int32_t* token;  // [C]
  int32_t* start;  // [C + 1]
  int32_t* route;  // [M]
  int32_t* row;    // [M]
};

// Drops routes of every expert that has more than `capacity` in all ranks together: those of the lowest weight (NaN is
// lowest, among equals the latest by rank, token and k; null weights: all are equal). ids and weights are [T, K] dense,
// counts [E], one pointer per rank; a dropped id becomes -1 and leaves its rank's count.
void drop_overflow(const std::vector<int32_t*>& ids_of_rank, const std::vector<const float*>& weights_of_rank,
                   const std::vector<int32_t*>& counts_of_rank, const int64_t* tokens_of_rank, int64_t top_k,
                   int64_t experts, int64_t capacity);

// How one rank numbers rows that go to their experts' homes. All counts are [R][E] through one pointer per rank.
class HomePlanner {
 public:
  HomePlanner(int64_t rank, int64_t ranks, int64_t experts, int64_t top_k, int64_t alignment);

  // Must come first: sums the counts of all ranks. Every expert gets `group_rows` rows, or (kAsCounted) as many as it
  // has routes, aligned.
  static constexpr int64_t kAsCounted = -1;
  void set_counts(const std::vector<const int32_t*>& counts_of_rank, int64_t group_rows);

  int64_t num_rows() const { return num_rows_; }
  int64_t routes_out() const { return routes_out_; }  // this rank's routes, to anywhere
  int64_t routes_in() const { return routes_in_; }    // everybody's routes to this rank
  void write_groups(int64_t* group_experts, int64_t* group_sizes, int32_t* group_ends, int64_t* rank_rows) const;

  // This rank's routes: destination of each and what crosses to whom. Returns the crossings.
  int64_t number_outgoing(const int32_t* ids, int64_t tokens, int64_t* dst_rank, int64_t* dst_row,
                          const CrossingArrays& out) const;

  // Everybody's routes to this rank, read from the ids of all. Returns the crossings.
  int64_t number_incoming(const std::vector<const int32_t*>& ids_of_rank, const int64_t* tokens_of_rank,
                          const CrossingArrays& in) const;

  // The same for ranks that do not see each other's ids: each sends, per destination, one word a route.
  // pack: words in outbox order. unpack: words of all sources in rank order; words_of_rank[r] of them from r.
  // unpack returns the crossings, or -1 when the words do not agree with the counts.
  static constexpr int32_t kFirstOfToken = 1 << 30;  // experts are below this
  void pack_words(const int32_t* ids, const CrossingArrays& out, int32_t* words) const;
  int64_t unpack_words(const int32_t* words, const int64_t* words_of_rank, const CrossingArrays& in) const;

 private:
  int64_t rank_, ranks_, experts_, top_k_, alignment_;
  Homes homes_;
  std::vector<const int32_t*> counts_;
  std::vector<int32_t> home_;    // [E] home rank
  std::vector<int64_t> sizes_;   // [E] rows of all ranks
  std::vector<int64_t> starts_;  // [E] first row at home
  std::vector<int64_t> ends_;    // [E] behind the last, padding included
  int64_t num_rows_ = 0, routes_out_ = 0, routes_in_ = 0;
};

}  // namespace moonep
