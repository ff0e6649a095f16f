// How the kernels read and write encoded numbers.
//
// For kernels.cpp alone, which is compiled once per instruction set: everything is local to it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire is little-endian, as is memory");

namespace pyps {
namespace {

using Byte = unsigned char;

std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

float float_of(std::uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

// Each codec has a Word as it lies in memory and the two conversions. `exponent_mask` covers the
// exponent, all ones in NaN and infinity; adding `exponent_one` then carries into the top bit.

struct Float32 {
  using Word = std::uint32_t;
  static constexpr Word exponent_mask = 0x7f800000;
  static constexpr Word exponent_one = 0x00800000;

  static float decode(Word word) { return float_of(word); }
  static Word encode(float value) { return bits_of(value); }
};

struct Float16 {
  using Word = std::uint16_t;
  static constexpr Word exponent_mask = 0x7c00;
  static constexpr Word exponent_one = 0x0400;

  static float decode(Word word) {
    const std::uint32_t sign = (std::uint32_t{word} & 0x8000u) << 16;
    // Exponent and mantissa at their place in a float32; the bias is then 112 too low.
    const std::uint32_t magnitude = (std::uint32_t{word} & 0x7fffu) << 13;
    const std::uint32_t exponent = magnitude & 0x0f800000u;
    const std::uint32_t normal = magnitude + (112u << 23);
    const std::uint32_t not_finite = magnitude + (224u << 23);
    // Give the mantissa the leading one it lacks, then take it away: no operand is ever a subnormal
    // float32, on which processors are slow and which some modes flush to zero.
    const std::uint32_t subnormal = bits_of(float_of(magnitude + (113u << 23)) - 0x1p-14f);
    std::uint32_t bits = normal;
    bits = exponent == 0x0f800000u ? not_finite : bits;
    bits = exponent == 0 ? subnormal : bits;
    return float_of(bits | sign);
  }

  static Word encode(float value) {
    const std::uint32_t all = bits_of(value);
    const std::uint32_t sign = (all & 0x80000000u) >> 16;
    const std::uint32_t magnitude = all & 0x7fffffffu;
    // The added 0xfff and the last kept bit round to nearest even; a carry moves the exponent on.
    const std::uint32_t normal =
        (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // Adding a half lets the adder do the rounding of what will be a subnormal.
    const std::uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    std::uint32_t bits = normal;
    bits = magnitude < (113u << 23) ? subnormal : bits;
    bits = magnitude >= (143u << 23) ? 0x7c00u : bits;
    bits = magnitude > 0x7f800000u ? 0x7e00u : bits;
    return static_cast<Word>(bits | sign);
  }
};

struct Bfloat16 {
  using Word = std::uint16_t;
  static constexpr Word exponent_mask = 0x7f80;
  static constexpr Word exponent_one = 0x0080;

  static float decode(Word word) { return float_of(std::uint32_t{word} << 16); }

  static Word encode(float value) {
    const std::uint32_t all = bits_of(value);
    const std::uint32_t rounded = (all + 0x7fffu + ((all >> 16) & 1u)) >> 16;
    const std::uint32_t quiet_nan = (all >> 16) | 0x40u;
    return static_cast<Word>((all & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
  }
};

// Copying bytes is how a word at any address is read; it compiles to one unaligned load.
template <class C>
typename C::Word load(const Byte* encoded, std::size_t index) {
  typename C::Word word;
  __builtin_memcpy(&word, encoded + index * sizeof word, sizeof word);
  return word;
}

template <class C>
void store(Byte* encoded, std::size_t index, typename C::Word word) {
  __builtin_memcpy(encoded + index * sizeof word, &word, sizeof word);
}

// Calls `loop` with the codec as a type, so that the loop decodes without asking again.
template <class Loop>
auto with_codec(Codec codec, Loop loop) {
  switch (codec) {
    case Codec::float16:
      return loop(Float16{});
    case Codec::bfloat16:
      return loop(Bfloat16{});
    case Codec::float32:
      break;
  }
  return loop(Float32{});
}

}  // namespace
}  // namespace pyps
