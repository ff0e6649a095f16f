// Walking memory in pieces that are prefetched.
//
// For kernels.cpp alone, which is compiled once per instruction set: everything is local to it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pyps {
namespace {

// Loops over memory outside the caches prefetch it, as the processor's own prefetching stops at the
// ends of pages and follows few arrays. Distances are in bytes and measured; a wrong one costs
// little.
constexpr std::size_t update_distance = 2048;
constexpr std::size_t guarded_distance = 3072;
constexpr std::size_t scan_distance = 16384;
constexpr std::size_t block_distance = 4096;
constexpr std::size_t cache_line_size = 64;

// Reads, and keeps in all caches or in all but the nearest.
enum Locality : int { in_outer_caches = 2, in_all_caches = 3 };

// The memory of the `size` bytes that lie `distance` beyond `address`; there may be none.
template <Locality locality = in_all_caches>
inline void prefetch(const void* address, std::size_t distance, std::size_t size) {
  const std::uintptr_t start = reinterpret_cast<std::uintptr_t>(address) + distance;
  for (std::size_t offset = 0; offset < size; offset += cache_line_size) {
    __builtin_prefetch(reinterpret_cast<const void*>(start + offset), 0, locality);
  }
}

// Calls `body(start, size)` for pieces of a known size, which the compiler unrolls, then for the
// rest.
template <std::size_t piece, class Body>
inline void for_each_piece(std::size_t count, Body body) {
  const std::size_t whole = count - count % piece;
  for (std::size_t start = 0; start < whole; start += piece) body(start, piece);
  body(whole, count - whole);
}

}  // namespace
}  // namespace pyps
