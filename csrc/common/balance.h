// Which experts get replicas on which ranks, and how many rows each takes: one definition for host and device, in
// integers alone. moonep/balance.py says the same in Python and explains the rules; both give the same numbers.
#pragma once

#include <cstdint>

#include "common/layout.h"

namespace moonep {

// What is decided. Arrays are the caller's.
struct Replicas {
  int64_t* experts;    // [R, slots] ascending on a rank, -1 (idle) last
  int64_t* rows;       // [R, slots] rows that the replica takes; its expert's home keeps the rest. Idle: 0
  int64_t* rank_rows;  // [R] rows that each rank then has
};

class Balancer {
 public:
  // Words of scratch that the constructor is to be given.
  MOONEP_HD static constexpr int64_t scratch_size(Homes homes) { return homes.experts + 3 * homes.ranks; }

  // totals: [E] rows of every expert; limit: rows that no rank should exceed, at least ceil(total / R).
  MOONEP_HD Balancer(Homes homes, const int64_t* totals, int64_t limit, int64_t slots, Replicas out, int64_t* scratch)
      : homes_(homes),
        totals_(totals),
        limit_(limit),
        slots_(slots),
        out_(out),
        left_(scratch),
        used_(left_ + homes.experts),
        giver_(used_ + homes.ranks),
        quota_(giver_ + homes.ranks) {}

  // exact_shares: slack 0. With ceil(E / R) slots the first line always succeeds.
  MOONEP_HD void run(bool exact_shares) {
    const bool done = exact_shares ? share_exactly() || keep(limit_) : keep(limit_) || share_exactly();
    if (!done) keep_lowest();
    for (int64_t r = 0; r < homes_.ranks; ++r) {
      for (int64_t i = r * slots_ + used_[r]; i < (r + 1) * slots_; ++i) {
        out_.experts[i] = -1;
        out_.rows[i] = 0;
      }
    }
  }

 private:
  // Everything at home.
  MOONEP_HD void reset() {
    for (int64_t r = 0; r < homes_.ranks; ++r) {
      used_[r] = 0;
      out_.rank_rows[r] = 0;
      for (int64_t e = homes_.first(r); e < homes_.first(r + 1); ++e) {
        left_[e] = totals_[e];
        out_.rank_rows[r] += totals_[e];
      }
    }
  }

  // The expert of `home` with the most rows left there.
  MOONEP_HD int64_t largest_expert(int64_t home) const {
    int64_t best = homes_.first(home);
    for (int64_t e = best + 1; e < homes_.first(home + 1); ++e)
      if (left_[e] > left_[best]) best = e;
    return best;
  }

  MOONEP_HD int64_t fullest_rank() const {
    int64_t best = 0;
    for (int64_t r = 1; r < homes_.ranks; ++r)
      if (out_.rank_rows[r] > out_.rank_rows[best]) best = r;
    return best;
  }

  // Gives `rows` of `expert` to a replica in a free slot of `rank`.
  MOONEP_HD void place(int64_t expert, int64_t rank, int64_t rows) {
    left_[expert] -= rows;
    int64_t i = rank * slots_ + used_[rank]++;
    for (; i > rank * slots_ && out_.experts[i - 1] > expert; --i) {
      out_.experts[i] = out_.experts[i - 1];
      out_.rows[i] = out_.rows[i - 1];
    }
    out_.experts[i] = expert;
    out_.rows[i] = rows;
  }

  // ---- few replicas: no rank above `limit` ----

  // Returns whether the slots were enough. A step ends a rank's excess, empties an expert or fills a rank. Ranks that
  // give never have room, so no expert comes home as a replica, and none goes to one rank twice.
  MOONEP_HD bool keep(int64_t limit) {
    reset();
    while (true) {
      const int64_t from = fullest_rank();
      const int64_t excess = out_.rank_rows[from] - limit;
      if (excess <= 0) return true;
      const int64_t expert = largest_expert(from);
      const int64_t wanted = left_[expert] < excess ? left_[expert] : excess;
      const int64_t to = receiver(limit, wanted);
      if (to < 0) return false;
      const int64_t room = limit - out_.rank_rows[to];
      const int64_t rows = wanted < room ? wanted : room;
      place(expert, to, rows);
      out_.rank_rows[from] -= rows;
      out_.rank_rows[to] += rows;
    }
  }

  // Of the ranks with room for all of `wanted`, the one with the fewest replicas, then with the least room; if there is
  // none, the rank with the most room. -1: no rank has both room and a slot.
  MOONEP_HD int64_t receiver(int64_t limit, int64_t wanted) const {
    int64_t best = -1;
    for (int64_t r = 0; r < homes_.ranks; ++r) {
      const int64_t rows = out_.rank_rows[r];
      if (limit - rows < wanted || used_[r] == slots_) continue;
      if (best < 0 || used_[r] < used_[best] || (used_[r] == used_[best] && rows > out_.rank_rows[best])) best = r;
    }
    return best < 0 ? roomiest_rank(limit) : best;
  }

  // Of the ranks with a free slot, the one with the most room; -1: none.
  MOONEP_HD int64_t roomiest_rank(int64_t limit) const {
    int64_t best = -1;
    for (int64_t r = 0; r < homes_.ranks; ++r)
      if (out_.rank_rows[r] < limit && used_[r] < slots_ && (best < 0 || out_.rank_rows[r] < out_.rank_rows[best]))
        best = r;
    return best;
  }

  // ---- too few slots ----

  // The lowest limit that halving finds. Where it is the fullest rank's own rows, nothing moves.
  MOONEP_HD void keep_lowest() {
    reset();
    int64_t fails = limit_ - 1, works = out_.rank_rows[fullest_rank()];
    while (works - fails > 1) {
      const int64_t middle = fails + (works - fails) / 2;
      if (keep(middle) || relay(middle))
        works = middle;
      else
        fails = middle;
    }
    if (!keep(works)) relay(works);
  }

  // As `keep`, but makes the most of every slot: the rank with the most room takes the largest piece that it can get
  // from any home, also from one below the limit that has a slot to be filled up again. A step takes a slot.
  MOONEP_HD bool relay(int64_t limit) {
    reset();
    int64_t* rank_rows = out_.rank_rows;
    while (rank_rows[fullest_rank()] > limit) {
      const int64_t to = roomiest_rank(limit);
      if (to < 0) return false;
      const int64_t room = limit - rank_rows[to];
      int64_t from = -1, expert = -1, rows = 0;
      for (int64_t r = 0; r < homes_.ranks; ++r) {
        if (r == to || homes_.count(r) == 0 || (rank_rows[r] <= limit && used_[r] == slots_)) continue;
        const int64_t largest = largest_expert(r);
        const int64_t piece = left_[largest] < room ? left_[largest] : room;
        if (piece == 0 || is_on(largest, to)) continue;
        if (piece > rows || (piece == rows && rank_rows[r] > rank_rows[from])) {
          from = r;
          expert = largest;
          rows = piece;
        }
      }
      if (from < 0) return false;
      place(expert, to, rows);
      rank_rows[from] -= rows;
      rank_rows[to] += rows;
    }
    return true;
  }

  MOONEP_HD bool is_on(int64_t expert, int64_t rank) const {
    for (int64_t i = rank * slots_; i < rank * slots_ + used_[rank]; ++i)
      if (out_.experts[i] == expert) return true;
    return false;
  }

  // ---- the even rule: every rank ends at exactly its share ----

  // Returns whether the slots were enough; ceil(E / R) always are, as a rank receives from one home alone.
  MOONEP_HD bool share_exactly() {
    reset();
    set_quotas();
    for (int64_t home = 0; home < homes_.ranks; ++home) {
      while (true) {
        const int64_t to = largest_quota(home);
        if (to < 0) break;
        if (used_[to] == slots_) return false;
        const int64_t expert = largest_expert(home);
        const int64_t rows = left_[expert] < quota_[to] ? left_[expert] : quota_[to];
        place(expert, to, rows);
        quota_[to] -= rows;
      }
    }
    return true;
  }

  // Who gives how many rows to whom. A step brings the receiver to its share for good; a home that is then below its
  // own share receives later.
  MOONEP_HD void set_quotas() {
    int64_t* rows = out_.rank_rows;
    int64_t total = 0;
    for (int64_t r = 0; r < homes_.ranks; ++r) {
      total += rows[r];
      quota_[r] = 0;
      giver_[r] = -1;
    }
    const int64_t share = total / homes_.ranks, extra = total % homes_.ranks;
    while (true) {
      int64_t from = 0, to = 0, most = 0, least = 0;  // rows above the share
      for (int64_t r = 0; r < homes_.ranks; ++r) {
        const int64_t above = rows[r] - share - (r < extra ? 1 : 0);
        if (above > most) {
          most = above;
          from = r;
        }
        if (above < least) {
          least = above;
          to = r;
        }
      }
      if (most == 0) return;
      giver_[to] = from;
      quota_[to] = -least;
      rows[to] -= least;
      rows[from] += least;
    }
  }

  // Of the ranks that receive from `home`, the one with the largest quota still open, -1: none.
  MOONEP_HD int64_t largest_quota(int64_t home) const {
    int64_t best = -1;
    for (int64_t r = 0; r < homes_.ranks; ++r)
      if (giver_[r] == home && quota_[r] > 0 && (best < 0 || quota_[r] > quota_[best])) best = r;
    return best;
  }

  Homes homes_;
  const int64_t* totals_;
  int64_t limit_, slots_;
  Replicas out_;
  int64_t* left_;   // [E] rows still at home
  int64_t* used_;   // [R] slots taken
  int64_t* giver_;  // [R] the even rule: who fills this rank up
  int64_t* quota_;  // [R] and how many rows are still to come
};

}  // namespace moonep
