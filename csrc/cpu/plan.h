// Routing -> row numbers. The definition in plain loops is moonep/plan.py; this gives the same numbers.
#pragma once

#include <cstdint>
#include <vector>

#include "common/balance.h"
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

// How one rank numbers the rows of a step. All counts are [R][E] through one pointer per rank. In this order:
// set_counts, perhaps balance, lay_out, then the rest.
class Planner {
 public:
  Planner(int64_t rank, std::vector<int64_t> host_of_rank, int64_t experts, int64_t top_k, int64_t alignment);

  // Sums the counts of all ranks; every row goes home.
  void set_counts(const std::vector<const int32_t*>& counts_of_rank);
  int64_t total_rows() const { return total_rows_; }  // of all ranks

  // Replicas so that no rank exceeds `limit`, at most `slots` on each; see common/balance.h.
  void balance(int64_t limit, int64_t slots, bool exact_shares);

  // Where every group begins on its rank. A group gets `group_rows` rows, or (kAsCounted) as many as it has, aligned.
  // This rank gets `num_rows`, or (kAsCounted) what its groups fill.
  static constexpr int64_t kAsCounted = -1;
  void lay_out(int64_t group_rows, int64_t num_rows);

  int64_t num_rows() const { return num_rows_; }
  int64_t most_rows() const { return most_rows_; }  // of any rank
  int64_t num_groups() const { return static_cast<int64_t>(groups_.size()); }
  int64_t routes_out() const { return routes_out_; }  // this rank's routes, to anywhere
  int64_t routes_in() const { return routes_in_; }    // everybody's routes to this rank
  // [G], [G], [G], [R], [R, slots]
  void write_groups(int64_t* group_experts, int64_t* group_sizes, int32_t* group_ends, int64_t* rank_rows,
                    int64_t* replicas) const;
  void write_routes(int64_t* routes_between) const;  // [R, R] from source to destination

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
  struct Group {
    int64_t expert, size, start, end;
  };
  struct Instance {  // of an expert with replicas: its home, or one of them
    int64_t rank, start, rows;
    std::vector<int64_t> of_source;  // [R] rows that come from each
  };
  struct Split {
    int64_t expert;
    std::vector<Instance> instances;  // by rank
  };
  struct Segment {  // consecutive routes of one source to one expert that go to one instance
    int64_t rank, first_route, first_row, routes;
  };

  void share_out(Split& split) const;
  std::vector<Segment> segments(const Split& split, int64_t source) const;
  template <bool kSplit>
  int64_t number_incoming_impl(const std::vector<const int32_t*>& ids_of_rank, const int64_t* tokens_of_rank,
                               const CrossingArrays& in) const;

  int64_t rank_, ranks_, experts_, top_k_, alignment_;
  std::vector<int64_t> host_of_rank_;
  Homes homes_;
  std::vector<const int32_t*> counts_;
  std::vector<int32_t> home_;     // [E] home rank
  std::vector<int64_t> sizes_;    // [E] rows of all ranks
  std::vector<int64_t> kept_;     // [E] of which the home keeps
  std::vector<int64_t> starts_;   // [E] first row at home
  std::vector<int64_t> scratch_;  // of the Balancer
  int64_t slots_ = 0;
  std::vector<int64_t> replica_experts_, replica_rows_;  // [R, slots]
  std::vector<int64_t> rank_rows_;                       // [R]
  std::vector<Split> splits_;                            // of the experts with replicas
  std::vector<int32_t> split_of_;                        // [E] place there, -1: none
  std::vector<Group> groups_;                            // of this rank
  std::vector<int32_t> group_of_;                        // [E + 1] of this rank, by expert + 1; G: not here
  int64_t total_rows_ = 0, num_rows_ = 0, most_rows_ = 0, routes_in_ = 0, routes_out_ = 0;
};

}  // namespace moonep
