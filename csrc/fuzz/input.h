// What the fuzz targets share: their input in pieces, each a heap block of its exact size, so that
// one byte read or written beyond it is an error.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define REQUIRE(condition)                                                         \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                \
    }                                                                              \
  } while (false)

class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}

  // A number below `bound`, of two bytes; 0 where none are left.
  std::size_t below(std::size_t bound) {
    std::uint8_t bytes[2] = {};
    take(bytes, sizeof bytes);
    return (bytes[0] + std::size_t{256} * bytes[1]) % bound;
  }

  // So many bytes, zeros behind the last that there are.
  std::vector<std::uint8_t> bytes(std::size_t count) {
    std::vector<std::uint8_t> taken(count);
    take(taken.data(), count);
    return taken;
  }

  std::vector<float> floats(std::size_t count) {
    std::vector<float> taken(count);
    take(taken.data(), count * sizeof(float));
    return taken;
  }

  std::vector<std::uint8_t> rest() { return bytes(size_); }

 private:
  void take(void* to, std::size_t count) {
    const std::size_t taken = std::min(count, size_);
    if (taken > 0) std::memcpy(to, data_, taken);
    data_ += taken;
    size_ -= taken;
  }

  const std::uint8_t* data_;
  std::size_t size_;
};

// NaN is one value: processors differ in its sign.
inline bool same(const std::vector<float>& left, const std::vector<float>& right) {
  return std::equal(left.begin(), left.end(), right.begin(), right.end(), [](float l, float r) {
    return std::memcmp(&l, &r, sizeof l) == 0 || (l != l && r != r);
  });
}
