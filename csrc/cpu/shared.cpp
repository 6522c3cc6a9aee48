#include "cpu/shared.h"

#include <stdexcept>

#if defined(__linux__)

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <new>

namespace moonep {

namespace {

static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free,
              "flags in shared memory must not need locks");

constexpr size_t kMostStagingBytes = size_t{1} << 46;
// How long a wait spins before it yields, and yields before it sleeps. A peer on another core answers within the
// first; peers that share this core need the second at once; sleeping costs tens of microseconds to wake.
constexpr int kSpins = 100;
constexpr int64_t kYieldNs = 1000 * 1000;
constexpr int64_t kSleepNs = 20 * 1000 * 1000;  // then look whether the peer still lives

// On some kernels a signal undoes the part of a reservation that is at work. Parts so small get through between the
// ticks of a timer, and so many tries of each end some time.
constexpr size_t kReserveBytes = size_t{1} << 20;
constexpr int kReserveTries = 1000;

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t{1000000000} + now.tv_nsec;
}

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

std::string reason(const char* what) { return std::string(what) + ": " + std::strerror(errno); }

// The flags are unsigned and wrap: a is at or after b when their difference is small.
bool reached(uint32_t a, uint32_t b) { return static_cast<int32_t>(a - b) >= 0; }

// Whether all of the file has memory now; errno says why not.
bool reserve(int fd, size_t bytes) {
  for (size_t done = 0; done < bytes; done += kReserveBytes) {
    int tries = 0;
    while (fallocate(fd, 0, done, std::min(kReserveBytes, bytes - done)) != 0)
      if (errno != EINTR || ++tries == kReserveTries) return false;
  }
  return true;
}

}  // namespace

int open_pidfd(int64_t pid) {
#if defined(SYS_pidfd_open)
  return static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0));
#else
  errno = ENOSYS;
  return -1;
#endif
}

bool is_alive(int pidfd) {
  pollfd watched{pidfd, POLLIN, 0};
  return poll(&watched, 1, 0) != 1 || (watched.revents & POLLIN) == 0;
}

SharedGroup::SharedGroup(int64_t rank, int64_t ranks, size_t staging_bytes)
    : rank_(rank),
      ranks_(ranks),
      staging_bytes_((staging_bytes + 4095) / 4096 * 4096),
      base_(ranks),
      pidfd_(ranks, -1),
      owner_pid_(getpid()) {
  if (staging_bytes > kMostStagingBytes) throw std::runtime_error("staging: more bytes than any machine has");
  segment_bytes_ = kFlagsBytes + kHeadersBytes + 2 * staging_bytes_;
  try {
    fd_ = memfd_create("moonep", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd_ < 0) throw std::runtime_error(reason("memfd_create"));
    fchmod(fd_, 0600);
    if (ftruncate(fd_, segment_bytes_) != 0) throw std::runtime_error(reason("ftruncate"));
    // Reserved now, so that no later touch can raise SIGBUS; sealed, so that no peer can shrink it under us.
    if (!reserve(fd_, segment_bytes_)) throw std::runtime_error(reason("reserving shared memory"));
    if (fcntl(fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
      throw std::runtime_error(reason("sealing shared memory"));
    void* base = mmap(nullptr, segment_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, 0);
    if (base == MAP_FAILED) throw std::runtime_error(reason("mapping shared memory"));
    base_[rank] = static_cast<char*>(base);
    // Shared memory belongs to this rank: a forked child must not touch it, even by unmapping late.
    madvise(base, segment_bytes_, MADV_DONTFORK);
  } catch (...) {
    close();
    throw;
  }
  SegmentFlags* own = new (base_[rank]) SegmentFlags{};
  if (getrandom(own->nonce, kNonceBytes, 0) != static_cast<ssize_t>(kNonceBytes)) {
    close();
    throw std::runtime_error(reason("getrandom"));
  }
}

SharedGroup::~SharedGroup() { close(); }

void SharedGroup::disconnect(int64_t peer) {
  if (base_[peer]) munmap(base_[peer], segment_bytes_);
  if (pidfd_[peer] >= 0) ::close(pidfd_[peer]);
  base_[peer] = nullptr;
  pidfd_[peer] = -1;
}

char* SharedGroup::base(int64_t rank) const {
  if (!base_[rank]) throw std::runtime_error("the shared memory is closed, or not connected");
  return base_[rank];
}

std::string SharedGroup::connect(int64_t peer, int64_t pid, int fd, const std::string& nonce) {
  if (peer == rank_ || closing_) return "closed, or this rank itself";
  disconnect(peer);
  const std::string failure = map_peer(peer, pid, fd, nonce);
  if (!failure.empty()) disconnect(peer);
  return failure;
}

std::string SharedGroup::map_peer(int64_t peer, int64_t pid, int fd, const std::string& nonce) {
  // Watch first: once the nonce is seen, the process watched is the right one, whatever its number did before.
  const int watch = open_pidfd(pid);
  if (watch < 0) return reason("watching the process (pidfd_open)");
  pidfd_[peer] = watch;
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  const int segment = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (segment < 0) return reason("opening its memory");
  struct stat status;
  void* base = MAP_FAILED;
  std::string failure;
  if (fstat(segment, &status) != 0 || static_cast<size_t>(status.st_size) != segment_bytes_) {
    failure = "its memory has another size";
  } else if ((fcntl(segment, F_GET_SEALS) & F_SEAL_SHRINK) == 0) {
    failure = "its memory is not sealed";
  } else if (status.st_uid != geteuid()) {
    failure = "its memory belongs to another user";
  } else if ((base = mmap(nullptr, segment_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, segment, 0)) ==
             MAP_FAILED) {
    failure = reason("mapping its memory");
  }
  ::close(segment);
  if (!failure.empty()) return failure;
  base_[peer] = static_cast<char*>(base);
  madvise(base, segment_bytes_, MADV_DONTFORK);
  if (nonce.size() != kNonceBytes || std::memcmp(flags(peer)->nonce, nonce.data(), kNonceBytes) != 0)
    return "the process of that number is not the peer (another machine or container)";
  return "";
}

void SharedGroup::release_fd() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

void SharedGroup::announce() {
  SegmentFlags* own = flags(rank_);
  // Orders header and staging of this phase, and this rank's reads of the last one, before the announcement. It is
  // sequentially consistent because a sleeper first counts itself and then looks at the phase: one of us sees the
  // other.
  own->phase.store(phase_, std::memory_order_seq_cst);
  if (own->sleepers.load(std::memory_order_seq_cst) != 0)
    syscall(SYS_futex, &own->phase, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  ++phase_;
}

bool SharedGroup::sleep_on(int64_t peer, uint32_t seen, int64_t ns) {
  SegmentFlags* theirs = flags(peer);
  theirs->sleepers.fetch_add(1, std::memory_order_seq_cst);
  const timespec limit{ns / 1000000000, ns % 1000000000};
  // Not FUTEX_PRIVATE: the sleepers are in other processes.
  const long slept = syscall(SYS_futex, &theirs->phase, FUTEX_WAIT, seen, &limit, nullptr, 0);
  const bool interrupted = slept != 0 && errno == EINTR;
  theirs->sleepers.fetch_sub(1, std::memory_order_seq_cst);
  return interrupted;
}

SharedGroup::Outcome SharedGroup::wait(int slice_ms) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closing_) return {Outcome::kClosed, rank_, 0};
    ++waits_inside_;
  }
  const Outcome outcome = wait_inside(slice_ms);
  std::lock_guard<std::mutex> lock(mutex_);
  if (--waits_inside_ == 0 && unmapping_) unmap();
  return outcome;
}

SharedGroup::Outcome SharedGroup::wait_inside(int slice_ms) {
  const uint32_t target = phase_ - 1;
  const int64_t began = now_ns();
  const int64_t end = began + slice_ms * int64_t{1000000};
  for (int64_t step = 1; step < ranks_; ++step) {
    const int64_t peer = (rank_ + step) % ranks_;
    SegmentFlags* theirs = flags(peer);
    int spins = 0;
    while (true) {
      // Acquire: what the peer wrote before it announced is seen after this.
      const uint32_t seen = theirs->phase.load(std::memory_order_acquire);
      if (reached(seen, target)) break;
      if (closing_) return {Outcome::kClosed, rank_, 0};
      if (const uint64_t error = error_until(target)) return {Outcome::kError, peer, error};
      if (++spins < kSpins) {
        pause_cpu();
        continue;
      }
      const int64_t now = now_ns();
      if (now - began < kYieldNs) {
        sched_yield();
        continue;
      }
      // Any peer that is gone ends the wait, also one that is not waited for yet.
      for (int64_t other = 0; other < ranks_; ++other) {
        if (other == rank_) continue;
        // The order matters: a peer that announced and then closed or ended has done its part.
        const bool closed = flags(other)->closed.load(std::memory_order_acquire) != 0;
        const bool lost = !is_alive(pidfd_[other]);
        if (reached(flags(other)->phase.load(std::memory_order_acquire), target)) continue;
        if (lost) return {Outcome::kLost, other, 0};
        if (closed) return {Outcome::kClosed, other, 0};
      }
      if (now >= end || sleep_on(peer, seen, std::min(kSleepNs, end - now))) return {Outcome::kPending, peer, 0};
    }
  }
  // Whoever comes so late that the others have given up must not think that all went well.
  if (const uint64_t error = error_until(target)) return {Outcome::kError, rank_, error};
  return {Outcome::kDone, rank_, 0};
}

uint64_t SharedGroup::error_until(uint32_t phase) const {
  const uint64_t error = recorded_error();
  return error && reached(phase, static_cast<uint32_t>(error >> 32)) ? error : 0;
}

uint64_t SharedGroup::record_error(uint32_t code) {
  const uint64_t error = static_cast<uint64_t>(phase_ - 1) << 32 | code;
  uint64_t none = 0;
  // Acquire and release: whoever reads an error also sees what its rank did before.
  return flags(0)->first_error.compare_exchange_strong(none, error, std::memory_order_acq_rel) ? error : none;
}

uint64_t SharedGroup::recorded_error() const { return flags(0)->first_error.load(std::memory_order_acquire); }

void SharedGroup::cancel() {
  // A forked child has none of the memory (MADV_DONTFORK): what lies at these addresses there is not ours.
  if (getpid() != owner_pid_) return;
  std::lock_guard<std::mutex> lock(mutex_);
  closing_ = true;
  if (base_[rank_]) {
    SegmentFlags* own = flags(rank_);
    own->closed.store(1, std::memory_order_seq_cst);
    // Sleepers look again at once: the kernel only needs to be told, the value need not change.
    syscall(SYS_futex, &own->phase, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

void SharedGroup::close() {
  if (getpid() != owner_pid_) return;
  cancel();
  std::lock_guard<std::mutex> lock(mutex_);
  unmapping_ = true;
  if (waits_inside_ == 0) unmap();
}

void SharedGroup::unmap() {
  for (int64_t rank = 0; rank < ranks_; ++rank) disconnect(rank);
  release_fd();
}

}  // namespace moonep

#else

namespace moonep {

SharedGroup::SharedGroup(int64_t, int64_t, size_t) { throw std::runtime_error("shared memory transport: Linux only"); }
SharedGroup::~SharedGroup() = default;
std::string SharedGroup::connect(int64_t, int64_t, int, const std::string&) { return "Linux only"; }
void SharedGroup::release_fd() {}
void SharedGroup::announce() {}
SharedGroup::Outcome SharedGroup::wait(int) { return {Outcome::kClosed, 0, 0}; }
uint64_t SharedGroup::record_error(uint32_t error) { return error; }
uint64_t SharedGroup::error_until(uint32_t) const { return 0; }
uint64_t SharedGroup::recorded_error() const { return 0; }
void SharedGroup::cancel() {}
void SharedGroup::close() {}
bool is_alive(int) { return true; }
int open_pidfd(int64_t) { return -1; }

}  // namespace moonep

#endif
