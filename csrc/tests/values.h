// Inputs that the kernels' tests share.
#pragma once

#include <cstddef>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "isa.h"
#include "kernels.h"

using pyps::Codec;

inline std::size_t bytes_of(Codec codec, std::size_t count) {
  return pyps::all_codecs()[static_cast<std::size_t>(codec) - 1].bytes_of(count);
}

// `size` bytes at a given distance from an aligned address, with nothing readable behind the last.
class Payload {
 public:
  Payload(std::size_t size, std::size_t offset)
      : block_(new unsigned char[offset + size]), offset_(offset) {}
  unsigned char* data() { return block_.get() + offset_; }

 private:
  std::unique_ptr<unsigned char[]> block_;
  std::size_t offset_;
};

inline std::vector<float> random_values(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-2.0f, 2.0f);
  std::vector<float> values(count);
  for (float& value : values) value = uniform(random);
  values.shrink_to_fit();
  return values;
}

inline bool same_bits(const std::vector<float>& left, const std::vector<float>& right) {
  return left.size() == right.size() &&
         (left.empty() || std::memcmp(left.data(), right.data(), left.size() * 4) == 0);
}
