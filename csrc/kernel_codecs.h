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

template <class C>
constexpr bool is_words = requires { typename C::Word; };

// A codec of words writes each number alone, as a Word, and has two conversions. `exponent_mask`
// covers the exponent, all ones in NaN and infinity; adding `exponent_one` then carries into the
// top bit.
//
// In a codec of blocks a `block` of numbers shares something, such as a scale. block_max is a
// multiple of it, and number k * block begins at byte bytes_of(k * block). Its decode(float*, const
// Byte*, count) and encode(Byte*, const float*, count) take one block, the last perhaps shorter.
// tests/int8_blocks.h is an example.
template <class W>
struct Words {
  using Word = W;
  static constexpr std::size_t bytes_of(std::size_t count) { return count * sizeof(W); }
};

struct Float32 : Words<std::uint32_t> {
  static constexpr CodecTraits traits = {Codec::float32, "float32", bytes_of, 'f'};
  static constexpr Word exponent_mask = 0x7f800000;
  static constexpr Word exponent_one = 0x00800000;

  static float decode(Word word) { return float_of(word); }
  static Word encode(float value) { return bits_of(value); }
};

struct Float16 : Words<std::uint16_t> {
  static constexpr CodecTraits traits = {Codec::float16, "float16", bytes_of, 'e'};
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

struct Bfloat16 : Words<std::uint16_t> {
  static constexpr CodecTraits traits = {Codec::bfloat16, "bfloat16", bytes_of, 'H'};
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

// All codecs of this build.
#ifndef PYPS_CODECS
#define PYPS_CODECS Float32, Float16, Bfloat16
#endif

template <class... C>
struct CodecList {
  static constexpr CodecTraits traits[] = {C::traits...};
};
using Codecs = CodecList<PYPS_CODECS>;

template <class Loop, class First, class... Rest>
auto with_codec_of(CodecList<First, Rest...>, Codec codec, Loop loop) {
  if constexpr (sizeof...(Rest) > 0) {
    if (codec != First::traits.codec) return with_codec_of(CodecList<Rest...>{}, codec, loop);
  }
  return loop(First{});
}

// Calls `loop` with the codec as a type, so that the loop itself does not look it up.
template <class Loop>
auto with_codec(Codec codec, Loop loop) {
  return with_codec_of(Codecs{}, codec, loop);
}

inline std::size_t bytes_of(Codec codec, std::size_t count) {
  return with_codec(codec, [=](auto c) { return decltype(c)::bytes_of(count); });
}

template <class C>
void decode_loop(float* __restrict values, const Byte* __restrict encoded, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {  // Vectorised.
    values[i] = C::decode(load<C>(encoded, i));
  }
}

template <class C>
void encode_loop(Byte* __restrict encoded, const float* __restrict values, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {  // Vectorised.
    store<C>(encoded, i, C::encode(values[i]));
  }
}

// Calls `body(start, size)` for each block of the codec.
template <class C, class Body>
void for_each_block(std::size_t count, Body body) {
  for (std::size_t start = 0; start < count; start += C::block) {
    body(start, count - start < C::block ? count - start : C::block);
  }
}

template <class C>
void decode_all(float* values, const Byte* encoded, std::size_t count) {
  if constexpr (is_words<C>) {
    decode_loop<C>(values, encoded, count);
  } else {
    for_each_block<C>(count, [=](std::size_t start, std::size_t size) {
      C::decode(values + start, encoded + C::bytes_of(start), size);
    });
  }
}

template <class C>
void encode_all(Byte* encoded, const float* values, std::size_t count) {
  if constexpr (is_words<C>) {
    encode_loop<C>(encoded, values, count);
  } else {
    for_each_block<C>(count, [=](std::size_t start, std::size_t size) {
      C::encode(encoded + C::bytes_of(start), values + start, size);
    });
  }
}

}  // namespace
}  // namespace pyps
