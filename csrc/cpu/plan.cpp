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

Planner::Planner(int64_t rank, std::vector<int64_t> host_of_rank, int64_t experts, int64_t top_k, int64_t alignment)
    : rank_(rank),
      ranks_(static_cast<int64_t>(host_of_rank.size())),
      experts_(experts),
      top_k_(top_k),
      alignment_(alignment),
      host_of_rank_(std::move(host_of_rank)),
      homes_{experts, ranks_},
      home_(experts),
      sizes_(experts),
      kept_(experts),
      starts_(experts),
      rank_rows_(ranks_),
      split_of_(experts, -1),
      group_of_(experts + 1) {
  for (int64_t r = 0; r < ranks_; ++r)
    for (int64_t e = homes_.first(r); e < homes_.first(r + 1); ++e) home_[e] = static_cast<int32_t>(r);
}

void Planner::set_counts(const std::vector<const int32_t*>& counts_of_rank) {
  counts_ = counts_of_rank;
  std::fill(sizes_.begin(), sizes_.end(), 0);
  for (const int32_t* counts : counts_)
    for (int64_t e = 0; e < experts_; ++e) sizes_[e] += counts[e];
  kept_ = sizes_;
  total_rows_ = 0;
  for (int64_t r = 0; r < ranks_; ++r) {
    rank_rows_[r] = 0;
    for (int64_t e = homes_.first(r); e < homes_.first(r + 1); ++e) rank_rows_[r] += sizes_[e];
    total_rows_ += rank_rows_[r];
  }
  for (const Split& split : splits_) split_of_[split.expert] = -1;
  splits_.clear();
  slots_ = 0;
}

void Planner::balance(int64_t limit, int64_t slots, bool exact_shares) {
  slots_ = slots;
  replica_experts_.resize(ranks_ * slots);
  replica_rows_.resize(ranks_ * slots);
  scratch_.resize(Balancer::scratch_size(homes_));
  const Replicas out{replica_experts_.data(), replica_rows_.data(), rank_rows_.data()};
  Balancer(homes_, sizes_.data(), limit, slots, out, scratch_.data()).run(exact_shares);

  for (int64_t i = 0; i < ranks_ * slots; ++i) {
    const int64_t expert = replica_experts_[i];
    if (expert < 0) continue;
    kept_[expert] -= replica_rows_[i];
    if (split_of_[expert] >= 0) continue;
    split_of_[expert] = static_cast<int32_t>(splits_.size());
    splits_.push_back({expert, {}});
  }
}

void Planner::lay_out(int64_t group_rows, int64_t num_rows) {
  groups_.clear();
  most_rows_ = 0;
  for (int64_t r = 0; r < ranks_; ++r) {
    int64_t end = 0;
    const auto add = [&](int64_t expert, int64_t rows) {
      const int64_t start = end;
      end += group_rows == kAsCounted ? align_up(rows, alignment_) : group_rows;
      if (r == rank_) groups_.push_back({expert, rows, start, end});
      if (expert >= 0 && split_of_[expert] >= 0)
        splits_[split_of_[expert]].instances.push_back({r, start, rows, std::vector<int64_t>(ranks_, 0)});
      return start;
    };
    for (int64_t e = homes_.first(r); e < homes_.first(r + 1); ++e) starts_[e] = add(e, kept_[e]);
    for (int64_t i = r * slots_; i < (r + 1) * slots_; ++i) add(replica_experts_[i], replica_rows_[i]);
    if (num_rows != kAsCounted) end = num_rows;
    if (r == rank_) num_rows_ = end;
    most_rows_ = std::max(most_rows_, end);
  }
  for (Split& split : splits_) share_out(split);

  std::fill(group_of_.begin(), group_of_.end(), static_cast<int32_t>(groups_.size()));
  routes_in_ = routes_out_ = 0;
  for (size_t g = 0; g < groups_.size(); ++g) {
    routes_in_ += groups_[g].size;
    if (groups_[g].expert >= 0) group_of_[groups_[g].expert + 1] = static_cast<int32_t>(g);
  }
  for (int64_t e = 0; e < experts_; ++e) routes_out_ += counts_[rank_][e];
}

// Which rows go to which instance: to the source's own rank, then to its host, then wherever there is room. What an
// instance takes and what sources have adds up, so all find a place.
void Planner::share_out(Split& split) const {
  std::vector<int64_t> room;
  for (const Instance& instance : split.instances) room.push_back(instance.rows);
  std::vector<int64_t> left(ranks_);
  for (int64_t s = 0; s < ranks_; ++s) left[s] = counts_[s][split.expert];

  const auto pass = [&](const auto& may_take) {
    for (int64_t s = 0; s < ranks_; ++s) {
      for (size_t i = 0; i < split.instances.size() && left[s] > 0; ++i) {
        if (!may_take(s, split.instances[i].rank)) continue;
        const int64_t rows = std::min(left[s], room[i]);
        split.instances[i].of_source[s] += rows;
        left[s] -= rows;
        room[i] -= rows;
      }
    }
  };
  pass([](int64_t source, int64_t rank) { return source == rank; });
  pass([&](int64_t source, int64_t rank) { return host_of_rank_[source] == host_of_rank_[rank]; });
  pass([](int64_t, int64_t) { return true; });
}

// In the order of the passes: a source's routes, by token and k, go to one instance after the other.
std::vector<Planner::Segment> Planner::segments(const Split& split, int64_t source) const {
  std::vector<Segment> found;
  int64_t first_route = 0;
  const auto add = [&](const Instance& instance) {
    const int64_t routes = instance.of_source[source];
    if (routes == 0) return;
    int64_t row = instance.start;
    for (int64_t s = 0; s < source; ++s) row += instance.of_source[s];
    found.push_back({instance.rank, first_route, row, routes});
    first_route += routes;
  };
  const auto distance = [&](const Instance& instance) {
    if (instance.rank == source) return 0;
    return host_of_rank_[instance.rank] == host_of_rank_[source] ? 1 : 2;
  };
  for (int away = 0; away <= 2; ++away)
    for (const Instance& instance : split.instances)
      if (distance(instance) == away) add(instance);
  return found;
}

void Planner::write_groups(int64_t* group_experts, int64_t* group_sizes, int32_t* group_ends, int64_t* rank_rows,
                           int64_t* replicas) const {
  for (size_t g = 0; g < groups_.size(); ++g) {
    group_experts[g] = groups_[g].expert;
    group_sizes[g] = groups_[g].size;
    group_ends[g] = static_cast<int32_t>(groups_[g].end);
  }
  std::copy(rank_rows_.begin(), rank_rows_.end(), rank_rows);
  std::copy_n(replica_experts_.begin(), ranks_ * slots_, replicas);
}

void Planner::write_routes(int64_t* routes_between) const {
  std::fill_n(routes_between, ranks_ * ranks_, 0);
  for (int64_t s = 0; s < ranks_; ++s)
    for (int64_t e = 0; e < experts_; ++e)
      if (split_of_[e] < 0) routes_between[s * ranks_ + home_[e]] += counts_[s][e];
  for (const Split& split : splits_)
    for (const Instance& instance : split.instances)
      for (int64_t s = 0; s < ranks_; ++s) routes_between[s * ranks_ + instance.rank] += instance.of_source[s];
}

int64_t Planner::number_outgoing(const int32_t* ids, int64_t tokens, int64_t* dst_rank, int64_t* dst_row,
                                 const CrossingArrays& out) const {
  // Where the next route of each expert goes, and how many more may follow it there.
  std::vector<int32_t> to(home_), next_row(experts_), left(experts_, std::numeric_limits<int32_t>::max());
  for (int64_t e = 0; e < experts_; ++e) next_row[e] = static_cast<int32_t>(starts_[e]);
  for (int64_t s = 0; s < rank_; ++s)  // rows of lower source ranks come first in every group
    for (int64_t e = 0; e < experts_; ++e) next_row[e] += counts_[s][e];
  std::vector<int64_t> routes_to(ranks_, 0);
  for (int64_t e = 0; e < experts_; ++e)
    if (split_of_[e] < 0) routes_to[home_[e]] += counts_[rank_][e];
  std::vector<std::vector<Segment>> segments_of(splits_.size());
  for (size_t i = 0; i < splits_.size(); ++i) {
    segments_of[i] = segments(splits_[i], rank_);
    std::reverse(segments_of[i].begin(), segments_of[i].end());  // the next one is the last
    left[splits_[i].expert] = 0;
    for (const Segment& segment : segments_of[i]) routes_to[segment.rank] += segment.routes;
  }

  std::vector<int64_t> place(ranks_), next_route(ranks_), crossings(ranks_, 0), last_token(ranks_, -1);
  int64_t routes = 0;
  for (int64_t r = 0; r < ranks_; ++r) {
    place[r] = next_route[r] = routes;
    routes += routes_to[r];
  }

  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t route = t * top_k_; route < (t + 1) * top_k_; ++route) {
      const int32_t expert = ids[route];
      if (expert < 0) {
        dst_rank[route] = dst_row[route] = -1;
        continue;
      }
      if (left[expert] == 0) {
        std::vector<Segment>& segments = segments_of[split_of_[expert]];
        to[expert] = static_cast<int32_t>(segments.back().rank);
        next_row[expert] = static_cast<int32_t>(segments.back().first_row);
        left[expert] = static_cast<int32_t>(segments.back().routes);
        segments.pop_back();
      }
      --left[expert];
      const int32_t rank = to[expert];
      const int32_t row = next_row[expert]++;
      dst_rank[route] = rank;
      dst_row[route] = row;
      const int64_t at = next_route[rank]++;
      if (last_token[rank] != t) {
        last_token[rank] = t;
        const int64_t c = place[rank] + crossings[rank]++;
        out.token[c] = static_cast<int32_t>(t);
        out.start[c] = static_cast<int32_t>(at);
      }
      out.route[at] = static_cast<int32_t>(route);
      out.row[at] = row;
    }
  }
  return close_gaps(out, place, crossings, routes);
}

int64_t Planner::number_incoming(const std::vector<const int32_t*>& ids_of_rank, const int64_t* tokens_of_rank,
                                 const CrossingArrays& in) const {
  return splits_.empty() ? number_incoming_impl<false>(ids_of_rank, tokens_of_rank, in)
                         : number_incoming_impl<true>(ids_of_rank, tokens_of_rank, in);
}

// No branches: which ids live here cannot be foreseen. What is not counted is written over, or lies one behind the end,
// for which the arrays have room.
template <bool kSplit>
int64_t Planner::number_incoming_impl(const std::vector<const int32_t*>& ids_of_rank, const int64_t* tokens_of_rank,
                                      const CrossingArrays& in) const {
  const int32_t groups = static_cast<int32_t>(groups_.size());
  std::vector<int32_t> next_row(groups + 1, 0);  // the last one takes what goes elsewhere
  for (int32_t g = 0; g < groups; ++g) next_row[g] = static_cast<int32_t>(groups_[g].start);
  // Of a source's routes to an expert, by their number among them: [skip, skip + take) come here.
  std::vector<int32_t> number, skip, take;

  int32_t c = 0, at = 0;
  for (int64_t s = 0; s < ranks_; ++s) {
    in.first[s] = c;
    const int32_t* ids = ids_of_rank[s];
    if (kSplit) {
      number.assign(groups + 1, 0);
      skip.assign(groups + 1, 0);
      take.assign(groups + 1, std::numeric_limits<int32_t>::max());
      take[groups] = 0;
      for (const Split& split : splits_) {
        const int32_t g = group_of_[split.expert + 1];
        if (g == groups) continue;
        take[g] = 0;
        for (const Segment& segment : segments(split, s)) {
          if (segment.rank != rank_) continue;
          skip[g] = static_cast<int32_t>(segment.first_route);
          take[g] = static_cast<int32_t>(segment.routes);
        }
      }
    }
    for (int64_t t = 0; t < tokens_of_rank[s]; ++t) {
      const int32_t before = at;
      for (int64_t route = t * top_k_; route < (t + 1) * top_k_; ++route) {
        const int32_t g = group_of_[ids[route] + 1];
        const bool here =
            kSplit ? static_cast<uint32_t>(number[g]++ - skip[g]) < static_cast<uint32_t>(take[g]) : g < groups;
        in.route[at] = static_cast<int32_t>(route);
        in.row[at] = next_row[g];
        next_row[g] += here;
        at += here;
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

void Planner::pack_words(const int32_t* ids, const CrossingArrays& out, int32_t* words) const {
  for (int32_t c = 0; c < out.first[ranks_]; ++c)
    for (int32_t at = out.start[c]; at < out.start[c + 1]; ++at)
      words[at] = ids[out.route[at]] | (at == out.start[c] ? kFirstOfToken : 0);
}

int64_t Planner::unpack_words(const int32_t* words, const int64_t* words_of_rank, const CrossingArrays& in) const {
  const int64_t groups = num_groups();
  std::vector<int32_t> next_row(groups);
  for (int64_t g = 0; g < groups; ++g) next_row[g] = static_cast<int32_t>(groups_[g].start);

  int64_t c = 0, at = 0;
  std::vector<int64_t> to_come(groups);
  for (int64_t s = 0; s < ranks_; ++s) {
    for (int64_t g = 0; g < groups; ++g) to_come[g] = groups_[g].expert < 0 ? 0 : counts_[s][groups_[g].expert];
    for (const Split& split : splits_)
      for (const Instance& instance : split.instances)
        if (instance.rank == rank_) to_come[group_of_[split.expert + 1]] = instance.of_source[s];
    in.first[s] = static_cast<int32_t>(c);
    for (int64_t i = 0; i < words_of_rank[s]; ++i, ++at) {
      const int64_t expert = words[at] & (kFirstOfToken - 1);
      if (words[at] < 0 || expert >= experts_) return -1;
      const int64_t group = group_of_[expert + 1];
      if (group == groups) return -1;
      const bool is_first = words[at] & kFirstOfToken;
      if (i == 0 && !is_first) return -1;
      if (is_first) {
        in.token[c] = static_cast<int32_t>(c - in.first[s]);
        in.start[c++] = static_cast<int32_t>(at);
      }
      in.route[at] = static_cast<int32_t>(i);
      in.row[at] = next_row[group]++;
      --to_come[group];
    }
    for (int64_t g = 0; g < groups; ++g)
      if (to_come[g] != 0) return -1;
  }
  in.first[ranks_] = static_cast<int32_t>(c);
  in.start[c] = static_cast<int32_t>(at);
  return c;
}

}  // namespace moonep
