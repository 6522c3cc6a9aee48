// parallel_for: the one way this library uses threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

namespace moonep {

// Calls body(begin, end) over [0, count) on up to `threads` threads, the caller's among them. Threads start and end
// within the call (an exception of any is thrown when all have), so nothing lingers and a fork between calls is
// harmless; `min_per_thread` keeps small work whole.
template <typename Body>
void parallel_for(int64_t count, int64_t threads, int64_t min_per_thread, const Body& body) {
  const int64_t parts = std::max<int64_t>(1, std::min(threads, count / std::max<int64_t>(1, min_per_thread)));
  if (parts == 1) {
    if (count > 0) body(int64_t{0}, count);
    return;
  }
  std::vector<std::exception_ptr> failures(parts);
  const auto part = [&](int64_t index, int64_t begin, int64_t end) {
    try {
      body(begin, end);
    } catch (...) {
      failures[index] = std::current_exception();
    }
  };
  std::vector<std::thread> helpers;
  helpers.reserve(parts - 1);
  int64_t begun = 1;
  for (; begun < parts; ++begun) {
    try {
      helpers.emplace_back(part, begun, count * begun / parts, count * (begun + 1) / parts);
    } catch (...) {
      break;  // no more threads to be had: the caller does the rest
    }
  }
  part(0, 0, count / parts);
  if (begun < parts) part(begun, count * begun / parts, count);
  for (std::thread& helper : helpers) helper.join();
  for (const std::exception_ptr& failure : failures)
    if (failure) std::rethrow_exception(failure);
}

}  // namespace moonep
