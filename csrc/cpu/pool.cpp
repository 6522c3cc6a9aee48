#include "cpu/pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

namespace moonep {

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kMostBytes = size_t{1} << 47;  // of address space
constexpr size_t kHugePage = size_t{2} << 20;

// Sizes are rounded to eighths of a power of two, so that the slightly different N of every step fits what came back.
size_t round_up(size_t bytes) {
  size_t step = kPage;
  while (step * 16 <= bytes) step *= 2;
  return (std::max(bytes, size_t{1}) + step - 1) / step * step;
}

}  // namespace

Pool::~Pool() { trim(0); }

std::unique_ptr<Pool::Block> Pool::take(size_t bytes) {
  if (bytes > kMostBytes) throw std::bad_alloc();
  const size_t capacity = round_up(bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  // The smallest that fits, but not one that wastes more than a quarter.
  auto best = free_.end();
  for (auto piece = free_.begin(); piece != free_.end(); ++piece)
    if (piece->capacity >= capacity && piece->capacity <= capacity + capacity / 4 &&
        (best == free_.end() || piece->capacity < best->capacity))
      best = piece;
  Piece piece;
  if (best != free_.end()) {
    piece = *best;
    free_.erase(best);
    free_bytes_ -= piece.capacity;
  } else {
    // New memory replaces what lay idle beyond the most that was ever in use at once.
    const size_t wanted = used_bytes_ + capacity;
    trim(peak_bytes_ > wanted ? peak_bytes_ - wanted : 0);
    void* data = mmap(nullptr, capacity, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
    if (capacity >= kHugePage) madvise(data, capacity, MADV_HUGEPAGE);
#endif
    piece = {data, capacity};
  }
  used_bytes_ += piece.capacity;
  peak_bytes_ = std::max(peak_bytes_, used_bytes_);
  return std::make_unique<Block>(shared_from_this(), piece.data, bytes, piece.capacity);
}

void Pool::give_back(void* data, size_t capacity) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  used_bytes_ -= capacity;
  try {
    free_.push_back({data, capacity});
  } catch (const std::bad_alloc&) {  // no room to note it: this is called by a destructor, and must not fail
    munmap(data, capacity);
    return;
  }
  free_bytes_ += capacity;
  if (closed_) trim(0);
}

void Pool::trim(size_t keep) {
  size_t gone = 0;
  while (gone < free_.size() && free_bytes_ > keep) {
    munmap(free_[gone].data, free_[gone].capacity);
    free_bytes_ -= free_[gone].capacity;
    ++gone;
  }
  free_.erase(free_.begin(), free_.begin() + gone);
}

void Pool::close() {
  std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
  trim(0);
}

size_t Pool::free_bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return free_bytes_;
}

size_t Pool::used_bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return used_bytes_;
}

}  // namespace moonep
