// Compiled once per instruction set; see kernels.h for what each loop computes.
//
// The build defines PYPS_ISA_NAME ("avx2") and PYPS_KERNELS (kernels_avx2). Everything but the
// table is local to the file and no standard-library template is used: a weak symbol compiled with
// wider instructions could otherwise be the one that the linker picks for everybody.
//
// `scripts/check_vectorised.py` requires that the compiler vectorised every loop marked
// "Vectorised".

#include "kernels.h"

#include <cstdint>

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

// The loops over memory that is not in a cache ask for it ahead of its use, which the processor's
// own prefetching does not do across the pages of several arrays. Distances are in bytes and
// measured; they cost little where they are wrong.
constexpr std::size_t update_distance = 2048;
constexpr std::size_t scan_distance = 16384;
constexpr std::size_t cache_line_size = 64;

// The memory of the `size` bytes that lie `distance` beyond `address`; there may be none.
inline void prefetch(const void* address, std::size_t distance, std::size_t size) {
  const std::uintptr_t start = reinterpret_cast<std::uintptr_t>(address) + distance;
  for (std::size_t offset = 0; offset < size; offset += cache_line_size) {
    __builtin_prefetch(reinterpret_cast<const void*>(start + offset));
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

// Elements of an update between two prefetches: more than compilers unroll before they vectorise.
constexpr std::size_t update_piece = 2 * cache_line_size / sizeof(float);

template <class C>
inline void sgd_loop(float* __restrict parameters, const Byte* __restrict gradient,
                     std::size_t count, float rate) {
  for (std::size_t i = 0; i < count; ++i) {  // Vectorised.
    const float g = C::decode(load<C>(gradient, i));
    parameters[i] = parameters[i] - rate * g;
  }
}

void sgd(float* parameters, const void* gradient, Codec codec, std::size_t count,
         SgdOptions options) {
  with_codec(codec, [=](auto c) {
    using C = decltype(c);
    const Byte* words = static_cast<const Byte*>(gradient);
    for_each_piece<update_piece>(count, [=](std::size_t start, std::size_t size) {
      const Byte* piece = words + start * sizeof(typename C::Word);
      prefetch(parameters + start, update_distance, size * sizeof(float));
      prefetch(piece, update_distance, size * sizeof(typename C::Word));
      sgd_loop<C>(parameters + start, piece, size, options.rate);
    });
  });
}

template <class C>
inline void adagrad_loop(float* __restrict parameters, float* __restrict accumulator,
                         const Byte* __restrict gradient, std::size_t count, float rate,
                         float eps) {
  for (std::size_t i = 0; i < count; ++i) {  // Vectorised.
    const float g = C::decode(load<C>(gradient, i));
    const float a = accumulator[i] + g * g;
    const float denominator = __builtin_sqrtf(a) + eps;
    const float step = rate * g / denominator;
    accumulator[i] = a;
    parameters[i] = parameters[i] - (denominator == 0.0f ? 0.0f : step);
  }
}

void adagrad(float* parameters, float* accumulator, const void* gradient, Codec codec,
             std::size_t count, AdagradOptions options) {
  with_codec(codec, [=](auto c) {
    using C = decltype(c);
    const Byte* words = static_cast<const Byte*>(gradient);
    for_each_piece<update_piece>(count, [=](std::size_t start, std::size_t size) {
      const Byte* piece = words + start * sizeof(typename C::Word);
      prefetch(parameters + start, update_distance, size * sizeof(float));
      prefetch(accumulator + start, update_distance, size * sizeof(float));
      prefetch(piece, update_distance, size * sizeof(typename C::Word));
      adagrad_loop<C>(parameters + start, accumulator + start, piece, size, options.rate,
                      options.eps);
    });
  });
}

// The carries out of the exponents: the top bit is set if any word is NaN or infinite.
template <class C>
inline typename C::Word exponent_carries(const Byte* encoded, std::size_t count) {
  using Word = typename C::Word;
  Word carries = 0;
  for (std::size_t i = 0; i < count; ++i) {  // Vectorised.
    const Word exponent = load<C>(encoded, i) & C::exponent_mask;
    carries = static_cast<Word>(carries | (exponent + C::exponent_one));
  }
  return carries;
}

template <class C>
bool any_non_finite(const Byte* encoded, std::size_t count) {
  using Word = typename C::Word;
  constexpr std::size_t scan_piece = 2 * cache_line_size / sizeof(Word);
  Word carries = 0;
  for_each_piece<scan_piece>(count, [&](std::size_t start, std::size_t size) {
    const Byte* piece = encoded + start * sizeof(Word);
    prefetch(piece, scan_distance, size * sizeof(Word));
    carries = static_cast<Word>(carries | exponent_carries<C>(piece, size));
  });
  return carries >> (8 * sizeof(Word) - 1) != 0;
}

template <class C>
std::ptrdiff_t first_non_finite_loop(const Byte* encoded, std::size_t count) {
  constexpr std::size_t block_max = 4096;
  for (std::size_t start = 0; start < count; start += block_max) {
    const std::size_t left = count - start;
    const std::size_t block = left < block_max ? left : block_max;
    const Byte* words = encoded + start * sizeof(typename C::Word);
    if (!any_non_finite<C>(words, block)) continue;
    for (std::size_t i = 0; i < block; ++i) {
      if (any_non_finite<C>(words + i * sizeof(typename C::Word), 1)) {
        return static_cast<std::ptrdiff_t>(start + i);
      }
    }
  }
  return -1;
}

std::ptrdiff_t first_non_finite(const void* gradient, Codec codec, std::size_t count) {
  return with_codec(codec, [=](auto c) {
    return first_non_finite_loop<decltype(c)>(static_cast<const Byte*>(gradient), count);
  });
}

template <class C>
void decode_loop(float* __restrict values, const Byte* __restrict encoded, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {  // Vectorised.
    values[i] = C::decode(load<C>(encoded, i));
  }
}

void decode(float* values, const void* encoded, Codec codec, std::size_t count) {
  with_codec(codec, [=](auto c) {
    decode_loop<decltype(c)>(values, static_cast<const Byte*>(encoded), count);
  });
}

template <class C>
void encode_loop(Byte* __restrict encoded, const float* __restrict values, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {  // Vectorised.
    store<C>(encoded, i, C::encode(values[i]));
  }
}

void encode(void* encoded, const float* values, Codec codec, std::size_t count) {
  with_codec(codec,
             [=](auto c) { encode_loop<decltype(c)>(static_cast<Byte*>(encoded), values, count); });
}

constexpr std::size_t num_lanes = 16;

// Element i always belongs to lane i modulo 16, whatever the width of a vector: the sum has one
// order of additions, hence one value, on every instruction set.
struct Lanes {
  double sums[num_lanes] = {};
  float minima[num_lanes];
  float maxima[num_lanes];

  Lanes() {
    for (std::size_t lane = 0; lane < num_lanes; ++lane) {
      minima[lane] = __builtin_inff();
      maxima[lane] = -__builtin_inff();
    }
  }

  void add(const float* __restrict values, std::size_t count) {
    for (std::size_t lane = 0; lane < count; ++lane) {
      const float value = values[lane];
      sums[lane] += double{value} * double{value};
      minima[lane] = value < minima[lane] ? value : minima[lane];
      maxima[lane] = value > maxima[lane] ? value : maxima[lane];
    }
  }
};

Summary summary(const float* values, std::size_t count) {
  Lanes lanes;
  const std::size_t whole = count - count % num_lanes;
  for (std::size_t start = 0; start < whole; start += num_lanes) {
    lanes.add(values + start, num_lanes);
  }
  lanes.add(values + whole, count - whole);

  Summary result = {0.0, __builtin_inff(), -__builtin_inff()};
  for (std::size_t lane = 0; lane < num_lanes; ++lane) {
    result.sum_of_squares += lanes.sums[lane];
    result.min = lanes.minima[lane] < result.min ? lanes.minima[lane] : result.min;
    result.max = lanes.maxima[lane] > result.max ? lanes.maxima[lane] : result.max;
  }
  return result;
}

void bandwidth_loop(float* __restrict parameters, float* __restrict accumulator,
                    const Byte* __restrict gradient, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {  // Vectorised.
    const float g = Float32::decode(load<Float32>(gradient, i));
    accumulator[i] = accumulator[i] + g;
    parameters[i] = parameters[i] + g;
  }
}

void bandwidth(float* parameters, float* accumulator, const void* gradient, std::size_t count) {
  bandwidth_loop(parameters, accumulator, static_cast<const Byte*>(gradient), count);
}

}  // namespace

extern const Kernels PYPS_KERNELS;
const Kernels PYPS_KERNELS = {
    PYPS_ISA_NAME, sgd, adagrad, first_non_finite, decode, encode, summary, bandwidth,
};

}  // namespace pyps
