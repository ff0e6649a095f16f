// How the kernels read and write encoded numbers.
//
// For kernels.cpp and worker_codings.cpp alone, which are compiled once per instruction set:
// everything is local to them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "codecs.h"

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
// multiple of it, and number k * block begins at byte k * bytes_of(block). encode(Byte*, const
// float*, size) and decode(float*, const Byte*) take one block; numbers behind `size` are zeros.
// `surely_finite` may say no of a block that is finite. Not finite is what decodes from NaN.
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

// The scale of a block of int8 or int4: the least power of two that is at least a limit-th of the
// largest magnitude. Its exponent is encoded, 255 for a block with NaN or infinity.
struct Scale {
  static constexpr std::size_t block = 32;
  static constexpr std::uint32_t infinite = 255;

  Scale(const float* values, float limit) {
    std::int32_t largest = 0;
    for (std::size_t i = 0; i < block; ++i) {
      const auto magnitude = static_cast<std::int32_t>(bits_of(values[i]) & 0x7fffffffu);
      largest = magnitude > largest ? magnitude : largest;
    }
    const float step = float_of(static_cast<std::uint32_t>(largest)) / limit;
    exponent = largest < 0x7f800000 ? (bits_of(step) + 0x7fffffu) >> 23 : infinite;
  }

  float inverse() const { return float_of((254u - exponent) << 23); }

  static float of(const Byte* encoded) { return float_of(std::uint32_t{*encoded} << 23); }

  // 127 times 2^120 is less than float32's largest.
  static bool surely_finite(const Byte* encoded) { return *encoded <= 127 + 120; }

  std::uint32_t exponent;
};

struct Int8 {
  static constexpr std::size_t block = Scale::block;
  static constexpr std::size_t bytes_of(std::size_t count) {
    return count + (count + block - 1) / block;
  }
  static constexpr CodecTraits traits = {Codec::int8, "int8", bytes_of, '\0'};

  static void encode(Byte* __restrict encoded, const float* __restrict values, std::size_t) {
    const Scale scale(values, 127.0f);
    encoded[0] = static_cast<Byte>(scale.exponent);
    if (scale.exponent == Scale::infinite) {
      // Each code is 1, so that every number decodes to infinity.
      __builtin_memset(encoded + 1, 1, block);
      return;
    }
    const float inverse = scale.inverse();
    for (std::size_t i = 0; i < block; ++i) {
      // The sum's last bits are the whole number nearest to the quotient, ties to even.
      encoded[1 + i] = static_cast<Byte>(bits_of(values[i] * inverse + 0x1.8p23f));
    }
  }

  static void decode(float* __restrict values, const Byte* __restrict encoded) {
    const float scale = Scale::of(encoded);
    for (std::size_t i = 0; i < block; ++i) {
      values[i] = scale * static_cast<float>(static_cast<std::int8_t>(encoded[1 + i]));
    }
  }

  static bool surely_finite(const Byte* encoded) { return Scale::surely_finite(encoded); }
};

struct Int4 {
  static constexpr std::size_t block = Scale::block;
  static constexpr std::size_t half = block / 2;
  static constexpr std::size_t bytes_of(std::size_t count) {
    return (count + block - 1) / block * (1 + half);
  }
  static constexpr CodecTraits traits = {Codec::int4, "int4", bytes_of, '\0'};

  static void encode(Byte* __restrict encoded, const float* __restrict values, std::size_t) {
    const Scale scale(values, 7.0f);
    encoded[0] = static_cast<Byte>(scale.exponent);
    if (scale.exponent == Scale::infinite) {
      __builtin_memset(encoded + 1, 0x11, half);
      return;
    }
    const float inverse = scale.inverse();
    std::uint32_t codes[half];
    for (std::size_t i = 0; i < half; ++i) {
      codes[i] = code_of(values[i] * inverse) | code_of(values[half + i] * inverse) << 4;
    }
    for (std::size_t i = 0; i < half; ++i) encoded[1 + i] = static_cast<Byte>(codes[i]);
  }

  static void decode(float* __restrict values, const Byte* __restrict encoded) {
    const float scale = 0.5f * Scale::of(encoded);
#if defined(__AVX2__)
    // Compilers make nothing as fast of a loop. The table has twice the number of each code.
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(encoded + 1));
    const __m128i halves = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    const __m128i mask = _mm_set1_epi8(15);
    const __m128i low = _mm_shuffle_epi8(halves, _mm_and_si128(codes, mask));
    const __m128i high = _mm_shuffle_epi8(halves, _mm_and_si128(_mm_srli_epi16(codes, 4), mask));
    write(values, low, scale);
    write(values + half, high, scale);
#else
    Bytes codes;
    __builtin_memcpy(&codes, encoded + 1, half);
    const Bytes low = halves_of(codes & 15), high = halves_of(codes >> 4);
    for (std::size_t i = 0; i < half; ++i) {
      values[i] = scale * static_cast<float>(static_cast<std::int8_t>(low[i]));
      values[half + i] = scale * static_cast<float>(static_cast<std::int8_t>(high[i]));
    }
#endif
  }

  static bool surely_finite(const Byte* encoded) { return Scale::surely_finite(encoded); }

 private:
  // A sign and the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6, ties to the even code: a float with two
  // bits of exponent and one of mantissa.
  static std::uint32_t code_of(float value) {
    const std::uint32_t sign = bits_of(value) >> 28 & 8u;
    const float magnitude = float_of(bits_of(value) & 0x7fffffffu);
    // The last bits of these sums count multiples of 0.5, 1 and 2, rounded: the steps between the
    // numbers up to 2, up to 4 and beyond. Counts agree at 2 and at 4; the one to use is the least.
    const std::int32_t halves = last_bits(magnitude, 0x1p22f);
    const std::int32_t wholes = last_bits(magnitude, 0x1p23f) + 2;
    const std::int32_t twos = last_bits(magnitude, 0x1p24f) + 4;
    std::int32_t index = halves < wholes ? halves : wholes;
    index = index < twos ? index : twos;
    index = index < 7 ? index : 7;
    return static_cast<std::uint32_t>(index) | sign;
  }

  static std::int32_t last_bits(float magnitude, float unit) {
    return static_cast<std::int32_t>(bits_of(magnitude + unit) - bits_of(unit));
  }

#if !defined(__AVX2__)
  using Bytes __attribute__((vector_size(half))) = Byte;

  // Twice the numbers of codes: 0, 1, 2, 3, 4, 6, 8, 12, and the same below zero.
  static Bytes halves_of(Bytes codes) {
    const Bytes index = codes & 7;
    Bytes halves = index > 3 ? 2 * index - 4 : index;
    halves = index > 5 ? 4 * index - 16 : halves;
    return codes > 7 ? -halves : halves;
  }
#endif

#if defined(__AVX512F__)
  // Masked, since compilers warn of the undefined lanes of the plain forms.
  static void write(float* values, __m128i halves, float scale) {
    constexpr __mmask16 all = 0xffff;
    const __m512i numbers = _mm512_maskz_cvtepi8_epi32(all, halves);
    _mm512_storeu_ps(values, _mm512_maskz_cvtepi32_ps(all, numbers) * _mm512_set1_ps(scale));
  }
#elif defined(__AVX2__)
  static void write(float* values, __m128i halves, float scale) {
    const __m256 first = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(halves));
    const __m256 second = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(halves, 8)));
    _mm256_storeu_ps(values, _mm256_mul_ps(first, _mm256_set1_ps(scale)));
    _mm256_storeu_ps(values + 8, _mm256_mul_ps(second, _mm256_set1_ps(scale)));
  }
#endif
};

// Seide et al. 2014. The two means, then 32 words: bit k of word j is that of number 32 * k + j.
struct OneBit {
  static constexpr std::size_t block = 1024;
  static constexpr std::size_t num_words = block / 32;
  static constexpr std::size_t bytes_of(std::size_t count) {
    return (count + block - 1) / block * (4 + num_words * sizeof(std::uint32_t));
  }
  static constexpr CodecTraits traits = {Codec::onebit, "onebit", bytes_of, '\0'};

  // Sums are float32, number i in lane i modulo 32; the lanes are added in order in float64.
  static void encode(Byte* __restrict encoded, const float* __restrict values, std::size_t size) {
    Sides sides[num_words / Sides::num];
    double above = 0, below = 0;
    std::uint32_t num_below = 0;
    for (std::size_t i = 0; i < num_words / Sides::num; ++i) {
      sides[i].add(values + i * Sides::num);
      for (std::size_t lane = 0; lane < Sides::num; ++lane) {
        above += double{sides[i].above[lane]};
        below += double{sides[i].below[lane]};
        num_below += sides[i].num_below[lane];
      }
      __builtin_memcpy(encoded + 4 + i * sizeof sides->words, sides[i].words, sizeof sides->words);
    }
    const std::uint16_t levels[] = {mean(above, size - num_below), mean(below, num_below)};
    __builtin_memcpy(encoded, levels, sizeof levels);
  }

  static void decode(float* __restrict values, const Byte* __restrict encoded) {
    std::uint16_t levels[2];
    std::uint32_t words[num_words];
    __builtin_memcpy(levels, encoded, sizeof levels);
    __builtin_memcpy(words, encoded + sizeof levels, sizeof words);
    const float positive = Bfloat16::decode(levels[0]);
    const float negative = Bfloat16::decode(levels[1]);
    for (std::size_t k = 0; k < block / num_words; ++k) {
      for (std::size_t j = 0; j < num_words; ++j) {
        values[k * num_words + j] = (words[j] >> k & 1u) != 0 ? negative : positive;
      }
    }
  }

  static bool surely_finite(const Byte* encoded) {
    std::uint16_t levels[2];
    __builtin_memcpy(levels, encoded, sizeof levels);
    constexpr std::uint16_t mask = Bfloat16::exponent_mask;
    return (levels[0] & mask) != mask && (levels[1] & mask) != mask;
  }

 private:
  // The numbers of some words, by the side of zero on which they lie.
  struct Sides {
    static constexpr std::size_t num = 16;

    void add(const float* values) {
      for (std::size_t k = 0; k < block / num_words; ++k) {
        for (std::size_t lane = 0; lane < num; ++lane) {
          const float value = values[k * num_words + lane];
          const std::uint32_t negative = value < 0.0f;
          words[lane] |= negative << k;
          num_below[lane] += negative;
          above[lane] += value < 0.0f ? 0.0f : value;
          below[lane] += value < 0.0f ? value : 0.0f;
        }
      }
    }

    std::uint32_t words[num] = {}, num_below[num] = {};
    float above[num] = {}, below[num] = {};
  };

  static std::uint16_t mean(double sum, std::size_t num) {
    const auto value = static_cast<float>(sum / static_cast<double>(num > 0 ? num : 1));
    // Processors differ in the sign of NaN.
    return value == value ? Bfloat16::encode(value) : std::uint16_t{0x7fc0};
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
#define PYPS_CODECS Float32, Float16, Bfloat16, Int8, Int4, OneBit
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
  // Callers check numbers: another codec's loop would write beyond the array.
  if (codec != First::traits.codec) __builtin_trap();
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

// Calls `body(start, encoded, size)` for each block, of a size that the compiler knows but for the
// last. `Bytes` is Byte or const Byte.
template <class C, class Bytes, class Body>
void for_each_block(Bytes* encoded, std::size_t count, Body body) {
  const std::size_t whole = count - count % C::block;
  for (std::size_t start = 0; start < whole; start += C::block) {
    body(start, encoded, std::integral_constant<std::size_t, C::block>());
    encoded += C::bytes_of(C::block);
  }
  if (whole < count) body(whole, encoded, count - whole);
}

// Decodes a block, the last perhaps shorter, into room for a whole one.
template <class C>
void decode_block(float* block, const Byte* encoded, std::size_t size) {
  if (size == C::block) return C::decode(block, encoded);
  Byte whole[C::bytes_of(C::block)] = {};
  __builtin_memcpy(whole, encoded, C::bytes_of(size));
  C::decode(block, whole);
}

// Encodes a block, the last perhaps shorter and filled up with zeros.
template <class C>
void encode_block(Byte* encoded, const float* block, std::size_t size) {
  if (size == C::block) return C::encode(encoded, block, size);
  Byte whole[C::bytes_of(C::block)];
  C::encode(whole, block, size);
  __builtin_memcpy(encoded, whole, C::bytes_of(size));
}

template <class C>
void decode_all(float* values, const Byte* encoded, std::size_t count) {
  if constexpr (is_words<C>) {
    decode_loop<C>(values, encoded, count);
  } else {
    for_each_block<C>(encoded, count, [=](std::size_t start, const Byte* from, auto size) {
      if (size == C::block) return C::decode(values + start, from);
      float block[C::block];
      decode_block<C>(block, from, size);
      __builtin_memcpy(values + start, block, size * sizeof(float));
    });
  }
}

template <class C>
void encode_all(Byte* encoded, const float* values, std::size_t count) {
  if constexpr (is_words<C>) {
    encode_loop<C>(encoded, values, count);
  } else {
    for_each_block<C>(encoded, count, [=](std::size_t start, Byte* to, auto size) {
      if (size == C::block) return C::encode(to, values + start, size);
      float block[C::block] = {};
      __builtin_memcpy(block, values + start, size * sizeof(float));
      encode_block<C>(to, block, size);
    });
  }
}

}  // namespace
}  // namespace pyps
