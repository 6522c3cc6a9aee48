// Memory that the ranks of one machine share, and how they meet in it. Linux only.
//
// Every rank owns one segment: a page of flags, two headers and two halves of staging. In phase n a rank
//   1. writes header and staging half n % 2 of its own segment,
//   2. announces n (release) and waits until every peer has announced n (acquire),
//   3. reads the peers' halves n % 2.
// A rank that announces n has finished reading phase n - 1, so half n % 2 may be written again once everybody has
// announced n - 1: two halves and one meeting per phase are enough.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace moonep {

constexpr size_t kHeaderBytes = 512;
constexpr size_t kNonceBytes = 16;

struct SegmentFlags {
  char nonce[kNonceBytes];
  // The last phase that the owner announced. A futex sleeps on its low half, so it counts whole.
  alignas(64) std::atomic<uint32_t> phase;
  std::atomic<uint32_t> closed;                   // the owner will announce no more
  alignas(64) std::atomic<uint32_t> sleepers;     // ranks asleep on `phase`
  alignas(64) std::atomic<uint64_t> first_error;  // in rank 0's segment: what all ranks raise; 0: none
};

constexpr size_t kFlagsBytes = 4096;
constexpr size_t kHeadersBytes = 4096;  // two, padded to a page
static_assert(sizeof(SegmentFlags) <= kFlagsBytes && 2 * kHeaderBytes <= kHeadersBytes, "each has one page");

class SharedGroup {
 public:
  // Makes this rank's segment, with all its memory reserved. Throws std::runtime_error with the reason.
  SharedGroup(int64_t rank, int64_t ranks, size_t staging_bytes);
  ~SharedGroup();
  SharedGroup(const SharedGroup&) = delete;
  SharedGroup& operator=(const SharedGroup&) = delete;

  int segment_fd() const { return fd_; }
  const char* nonce() const { return flags(rank_)->nonce; }

  // Maps the segment of `peer`, found as descriptor `fd` of process `pid`, proven by its nonce, and watches that
  // process. Returns the reason when that cannot be done (another machine, another container), else an empty string.
  std::string connect(int64_t peer, int64_t pid, int fd, const std::string& nonce);
  // After every rank has connected: the descriptor is not needed any more.
  void release_fd();

  char* header(int64_t rank, uint32_t phase) const { return base(rank) + kFlagsBytes + (phase & 1) * kHeaderBytes; }
  char* staging(int64_t rank, uint32_t phase) const {
    return base(rank) + kFlagsBytes + kHeadersBytes + (phase & 1) * staging_bytes_;
  }

  uint32_t phase() const { return phase_; }  // the phase to write next
  void announce();

  struct Outcome {
    enum Kind { kDone, kPending, kLost, kClosed, kError } kind;
    int64_t rank;    // the peer waited for, lost or closed
    uint64_t error;  // what was recorded first
  };
  // Waits, at most about `slice_ms`, until every peer has announced the phase that this rank announced last. When
  // close() is called meanwhile, by another thread or a signal handler, says kClosed with this rank's own number.
  Outcome wait(int slice_ms);

  // Records what every rank shall raise, unless something is recorded already; returns what stands. The upper half
  // is the phase in which it happened: a rank that completes an earlier phase late does not raise there.
  uint64_t record_error(uint32_t error);
  uint64_t recorded_error() const;
  // Ends waits, here and at the peers; memory stays as it is, for a verb that may be at work in it.
  void cancel();
  void close();

 private:
  SegmentFlags* flags(int64_t rank) const { return reinterpret_cast<SegmentFlags*>(base(rank)); }
  char* base(int64_t rank) const;  // throws once closed
  Outcome wait_inside(int slice_ms);
  std::string map_peer(int64_t peer, int64_t pid, int fd, const std::string& nonce);
  void disconnect(int64_t peer);
  void unmap();
  uint64_t error_until(uint32_t phase) const;
  bool sleep_on(int64_t peer, uint32_t seen, int64_t ns);

  int64_t rank_, ranks_;
  size_t staging_bytes_, segment_bytes_;
  int fd_ = -1;
  std::vector<char*> base_;
  std::vector<int> pidfd_;
  uint32_t phase_ = 1;
  int64_t owner_pid_;
  // Memory stays mapped while a wait is inside.
  std::mutex mutex_;
  int waits_inside_ = 0;
  bool unmapping_ = false;
  std::atomic<bool> closing_{false};
};

// True while `pidfd` (from pidfd_open) names a process that has not ended; a zombie has ended.
bool is_alive(int pidfd);
int open_pidfd(int64_t pid);  // -1 where that cannot be done

}  // namespace moonep
