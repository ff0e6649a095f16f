// A codec of blocks, for tests: 64 numbers share a scale and take a byte each.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace pyps {
namespace {

struct Int8Blocks {
  static constexpr std::size_t block = 64;
  static constexpr std::size_t bytes_of(std::size_t count) {
    return count + (count + block - 1) / block * sizeof(float);
  }
  static constexpr CodecTraits traits = {Codec{99}, "int8_blocks", bytes_of, '\0'};

  static void decode(float* values, const unsigned char* encoded, std::size_t count) {
    float scale;
    __builtin_memcpy(&scale, encoded, sizeof scale);
    const unsigned char* numbers = encoded + sizeof scale;
    for (std::size_t i = 0; i < count; ++i) {
      values[i] = scale * static_cast<float>(static_cast<std::int8_t>(numbers[i]));
    }
  }

  // A block with NaN or infinity decodes to no finite number.
  static void encode(unsigned char* encoded, const float* values, std::size_t count) {
    float largest = 0.0f;
    for (std::size_t i = 0; i < count; ++i) {
      const float magnitude = __builtin_fabsf(values[i]);
      largest = largest != largest || magnitude <= largest ? largest : magnitude;
    }
    const float scale = largest / 127.0f;
    __builtin_memcpy(encoded, &scale, sizeof scale);
    unsigned char* numbers = encoded + sizeof scale;
    for (std::size_t i = 0; i < count; ++i) {
      const float number = scale > 0.0f ? __builtin_rintf(values[i] / scale) : 1.0f;
      numbers[i] = static_cast<unsigned char>(
          static_cast<std::int8_t>(number >= -127.0f && number <= 127.0f ? number : 127.0f));
    }
  }
};

}  // namespace
}  // namespace pyps
