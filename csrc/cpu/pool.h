// Memory that is handed out and comes back: pages touched for the first time cost as much as a whole exchange.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

namespace moonep {

class Pool : public std::enable_shared_from_this<Pool> {
 public:
  // A piece of pool memory; goes back to the pool (which it keeps alive) when destroyed.
  class Block {
   public:
    Block(std::shared_ptr<Pool> pool, void* data, size_t bytes, size_t capacity)
        : data_(data), bytes_(bytes), capacity_(capacity), pool_(std::move(pool)) {}
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;
    ~Block() { pool_->give_back(data_, capacity_); }

    void* data() const { return data_; }
    size_t bytes() const { return bytes_; }

   private:
    void* data_;
    size_t bytes_, capacity_;
    std::shared_ptr<Pool> pool_;
  };

  ~Pool();
  // At least `bytes`, aligned to pages, contents undefined. Throws std::bad_alloc.
  std::unique_ptr<Block> take(size_t bytes);
  // Unmaps what is not handed out, now and whenever something comes back.
  void close();
  size_t free_bytes() const;
  size_t used_bytes() const;

 private:
  struct Piece {
    void* data;
    size_t capacity;
  };
  void give_back(void* data, size_t capacity) noexcept;
  void trim(size_t keep);

  mutable std::mutex mutex_;
  std::vector<Piece> free_;  // least recently used first
  size_t free_bytes_ = 0, used_bytes_ = 0, peak_bytes_ = 0;
  bool closed_ = false;
};

}  // namespace moonep
