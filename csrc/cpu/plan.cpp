#include "cpu/plan.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace moonep {

template <typename Id>
int64_t load_ids(const Id* ids, int64_t tokens, int64_t top_k, int64_t stride_t, int64_t stride_k, int64_t experts,
                 int32_t* dense, int32_t* counts) {
  // Slot 0 takes the -1 routes, so that counting needs no branch.
  std::vector<int32_t> slots(experts + 1, 0);
  for (int64_t t = 0; t < tokens; ++t) {
    const Id* from = ids + t * stride_t;
    int32_t* to = dense + t * top_k;
    bool bad = false;
    for (int64_t k = 0; k < top_k; ++k) {
      const Id id = from[k * stride_k];
      bad |= id < -1 || id >= static_cast<Id>(experts);
      to[k] = static_cast<int32_t>(id);
    }
    if (bad) {
      for (int64_t k = 0; k < top_k; ++k) {
        const Id id = from[k * stride_k];
        if (id < -1 || id >= static_cast<Id>(experts)) return t * top_k + k;
      }
    }
    for (int64_t k = 0; k < top_k; ++k) ++slots[to[k] + 1];
  }
  std::memcpy(counts, slots.data() + 1, experts * sizeof(int32_t));
  return kNoBadId;
}

template int64_t load_ids(const int32_t*, int64_t, int64_t, int64_t, int64_t, int64_t, int32_t*, int32_t*);
template int64_t load_ids(const int64_t*, int64_t, int64_t, int64_t, int64_t, int64_t, int32_t*, int32_t*);

namespace {

// Moves the crossings of each peer, written at the place of the peer's first route, together.
int64_t close_gaps(const CrossingArrays& box, const std::vector<int64_t>& place, const std::vector<int64_t>& crossings,
                   int64_t routes) {
  int64_t total = 0;
  for (size_t peer = 0; peer < crossings.size(); ++peer) {
    box.first[peer] = static_cast<int32_t>(total);
    std::memmove(box.token + total, box.token + place[peer], crossings[peer] * sizeof(int32_t));
    std::memmove(box.start + total, box.start + place[peer], crossings[peer] * sizeof(int32_t));
    total += crossings[peer];
  }
  box.first[crossings.size()] = static_cast<int32_t>(total);
  box.start[total] = static_cast<int32_t>(routes);
  return total;
}

}  // namespace

void drop_overflow(const std::vector<int32_t*>& ids_of_rank, const std::vector<const float*>& weights_of_rank,
                   const std::vector<int32_t*>& counts_of_rank, const int64_t* tokens_of_rank, int64_t top_k,
                   int64_t experts, int64_t capacity) {
  struct Route {
    float weight;
    int32_t rank;
    int64_t route;
  };
  std::vector<int64_t> sizes(experts, 0);
  for (const int32_t* counts : counts_of_rank)
    for (int64_t e = 0; e < experts; ++e) sizes[e] += counts[e];
  std::vector<int32_t> place(experts, -1);
  std::vector<std::vector<Route>> crowded;
  for (int64_t e = 0; e < experts; ++e) {
    if (sizes[e] <= capacity) continue;
    place[e] = static_cast<int32_t>(crowded.size());
    crowded.emplace_back();
    crowded.back().reserve(sizes[e]);
  }

  for (size_t r = 0; r < ids_of_rank.size(); ++r) {
    for (int64_t route = 0; route < tokens_of_rank[r] * top_k; ++route) {
      const int32_t expert = ids_of_rank[r][route];
      if (expert < 0 || place[expert] < 0) continue;
      const float weight = weights_of_rank[r] ? weights_of_rank[r][route] : 0.0f;
      crowded[place[expert]].push_back(
          {std::isnan(weight) ? -std::numeric_limits<float>::infinity() : weight, static_cast<int32_t>(r), route});
    }
  }
  for (std::vector<Route>& routes : crowded) {
    // A total order, so what is kept does not depend on how the library sorts.
    std::nth_element(routes.begin(), routes.begin() + capacity, routes.end(), [](const Route& a, const Route& b) {
      if (a.weight != b.weight) return a.weight > b.weight;
      return a.rank != b.rank ? a.rank < b.rank : a.route < b.route;
    });
    for (auto dropped = routes.begin() + capacity; dropped != routes.end(); ++dropped) {
      int32_t& id = ids_of_rank[dropped->rank][dropped->route];
      --counts_of_rank[dropped->rank][id];
      id = -1;
    }
  }
}

HomePlanner::HomePlanner(int64_t rank, int64_t ranks, int64_t experts, int64_t top_k, int64_t alignment)
    : rank_(rank),
      ranks_(ranks),
      experts_(experts),
      top_k_(top_k),
      alignment_(alignment),
      homes_{experts, ranks},
      home_(experts),
      sizes_(experts),
      starts_(experts),
      ends_(experts) {
  for (int64_t r = 0; r < ranks; ++r)
    for (int64_t e = homes_.first(r); e < homes_.first(r + 1); ++e) home_[e] = static_cast<int32_t>(r);
}

void HomePlanner::set_counts(const std::vector<const int32_t*>& counts_of_rank, int64_t group_rows) {
  counts_ = counts_of_rank;
  std::fill(sizes_.begin(), sizes_.end(), 0);
  for (const int32_t* counts : counts_)
    for (int64_t e = 0; e < experts_; ++e) sizes_[e] += counts[e];
  for (int64_t r = 0; r < ranks_; ++r) {
    int64_t end = 0;
    for (int64_t e = homes_.first(r); e < homes_.first(r + 1); ++e) {
      starts_[e] = end;
      end += group_rows == kAsCounted ? align_up(sizes_[e], alignment_) : group_rows;
      ends_[e] = end;
    }
    if (r == rank_) num_rows_ = end;
  }
  routes_in_ = routes_out_ = 0;
  for (int64_t e = homes_.first(rank_); e < homes_.first(rank_ + 1); ++e) routes_in_ += sizes_[e];
  for (int64_t e = 0; e < experts_; ++e) routes_out_ += counts_[rank_][e];
}

void HomePlanner::write_groups(int64_t* group_experts, int64_t* group_sizes, int32_t* group_ends,
                               int64_t* rank_rows) const {
  const int64_t first = homes_.first(rank_);
  for (int64_t g = 0; g < homes_.count(rank_); ++g) {
    group_experts[g] = first + g;
    group_sizes[g] = sizes_[first + g];
    group_ends[g] = static_cast<int32_t>(ends_[first + g]);
  }
  for (int64_t r = 0; r < ranks_; ++r) {
    rank_rows[r] = 0;
    for (int64_t e = homes_.first(r); e < homes_.first(r + 1); ++e) rank_rows[r] += sizes_[e];
  }
}

int64_t HomePlanner::number_outgoing(const int32_t* ids, int64_t tokens, int64_t* dst_rank, int64_t* dst_row,
                                     const CrossingArrays& out) const {
  // Rows of lower source ranks come first in every group.
  std::vector<int32_t> next_row(experts_);
  for (int64_t e = 0; e < experts_; ++e) next_row[e] = static_cast<int32_t>(starts_[e]);
  for (int64_t s = 0; s < rank_; ++s)
    for (int64_t e = 0; e < experts_; ++e) next_row[e] += counts_[s][e];

  std::vector<int64_t> place(ranks_), next_route(ranks_), crossings(ranks_, 0), last_token(ranks_, -1);
  int64_t routes = 0;
  for (int64_t r = 0; r < ranks_; ++r) {
    place[r] = next_route[r] = routes;
    for (int64_t e = homes_.first(r); e < homes_.first(r + 1); ++e) routes += counts_[rank_][e];
  }

  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t route = t * top_k_; route < (t + 1) * top_k_; ++route) {
      const int32_t expert = ids[route];
      if (expert < 0) {
        dst_rank[route] = dst_row[route] = -1;
        continue;
      }
      const int32_t home = home_[expert];
      const int32_t row = next_row[expert]++;
      dst_rank[route] = home;
      dst_row[route] = row;
      const int64_t at = next_route[home]++;
      if (last_token[home] != t) {
        last_token[home] = t;
        const int64_t c = place[home] + crossings[home]++;
        out.token[c] = static_cast<int32_t>(t);
        out.start[c] = static_cast<int32_t>(at);
      }
      out.route[at] = static_cast<int32_t>(route);
      out.row[at] = row;
    }
  }
  return close_gaps(out, place, crossings, routes);
}

int64_t HomePlanner::number_incoming(const std::vector<const int32_t*>& ids_of_rank, const int64_t* tokens_of_rank,
                                     const CrossingArrays& in) const {
  const int32_t first = static_cast<int32_t>(homes_.first(rank_));
  const uint32_t count = static_cast<uint32_t>(homes_.count(rank_));
  std::vector<int32_t> next_row(count + 1);  // the last one takes what goes elsewhere
  for (uint32_t g = 0; g < count; ++g) next_row[g] = static_cast<int32_t>(starts_[first + g]);

  // No branches: which ids live here cannot be foreseen. What is not counted is written over, or lies one behind the
  // end, for which the arrays have room.
  int32_t c = 0, at = 0;
  for (int64_t s = 0; s < ranks_; ++s) {
    in.first[s] = c;
    const int32_t* ids = ids_of_rank[s];
    for (int64_t t = 0; t < tokens_of_rank[s]; ++t) {
      const int32_t before = at;
      for (int64_t route = t * top_k_; route < (t + 1) * top_k_; ++route) {
        const uint32_t group = std::min(static_cast<uint32_t>(ids[route] - first), count);  // -1 becomes large
        in.route[at] = static_cast<int32_t>(route);
        in.row[at] = next_row[group]++;
        at += group < count;
      }
      in.token[c] = static_cast<int32_t>(t);
      in.start[c] = before;
      c += at != before;
    }
  }
  in.first[ranks_] = c;
  in.start[c] = at;
  return c;
}

void HomePlanner::pack_words(const int32_t* ids, const CrossingArrays& out, int32_t* words) const {
  for (int32_t c = 0; c < out.first[ranks_]; ++c)
    for (int32_t at = out.start[c]; at < out.start[c + 1]; ++at)
      words[at] = ids[out.route[at]] | (at == out.start[c] ? kFirstOfToken : 0);
}

int64_t HomePlanner::unpack_words(const int32_t* words, const int64_t* words_of_rank, const CrossingArrays& in) const {
  const int64_t first = homes_.first(rank_), count = homes_.count(rank_);
  std::vector<int32_t> next_row(count);
  for (int64_t g = 0; g < count; ++g) next_row[g] = static_cast<int32_t>(starts_[first + g]);

  int64_t c = 0, at = 0;
  std::vector<int64_t> seen(count);
  for (int64_t s = 0; s < ranks_; ++s) {
    std::fill(seen.begin(), seen.end(), 0);
    in.first[s] = static_cast<int32_t>(c);
    for (int64_t i = 0; i < words_of_rank[s]; ++i, ++at) {
      const int64_t group = (words[at] & (kFirstOfToken - 1)) - first;
      if (words[at] < 0 || group < 0 || group >= count) return -1;
      const bool is_first = words[at] & kFirstOfToken;
      if (i == 0 && !is_first) return -1;
      if (is_first) {
        in.token[c] = static_cast<int32_t>(c - in.first[s]);
        in.start[c++] = static_cast<int32_t>(at);
      }
      in.route[at] = static_cast<int32_t>(i);
      in.row[at] = next_row[group]++;
      ++seen[group];
    }
    for (int64_t g = 0; g < count; ++g)
      if (seen[g] != counts_[s][first + g]) return -1;
  }
  in.first[ranks_] = static_cast<int32_t>(c);
  in.start[c] = static_cast<int32_t>(at);
  return c;
}

}  // namespace moonep
